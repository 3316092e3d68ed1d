// Everything that the host does with a stream: launch, record, let it wait, wait for it.
//
// This is where the parts meet: the queue and the clock (stream.h), the detector (races.h), and the
// counters by which tests tell what a training costs.
#pragma once

#include <string>
#include <vector>

#include "stream.h"

namespace sim {

// What a launch reads or writes: from `begin` up to `end`. A tensor with gaps counts as a whole.
struct Range {
  char* begin;
  char* end;
  bool is_written;
};

enum class Kind { kKernel, kCollective, kAllocator };

// The state mutex must be free, because a report may need the GIL for the stack of Python.
void launch(
    Stream& stream,
    const std::string& name,
    const std::vector<Range>& ranges,
    std::function<void()> work,
    Kind kind = Kind::kKernel);
// For who has the state mutex.
void launch_locked(
    Stream& stream,
    const std::string& name,
    const std::string& where,
    const std::vector<Range>& ranges,
    std::function<void()> work,
    Kind kind);

// What each call of the host does first, but for questions: wait while another thread copies to
// pageable memory.
void enter_driver();

MomentPtr record(Stream& stream);
// What `stream` gets from now on runs after `moment`.
void wait_for(Stream& stream, const MomentPtr& moment);
// The same without a promise: the program may not rely on it, so the detector does not either.
void queue_behind(Stream& stream, const MomentPtr& moment);

// The host waits, which is counted, and raises if that is refused, or if a kernel has failed.
// `reason` is for the message.
void host_wait(const MomentPtr& moment, const std::string& reason);
void synchronize(Stream& stream, const std::string& reason);
// The same for a copy to pageable memory: until it is over, other threads can launch nothing on any
// device, and record or free no event.
void synchronize_with_driver(Stream& stream, const std::string& reason);
void synchronize_device(int device, const std::string& reason);  // -1: all
// Like these, but not counted: for tests and for the device itself.
void drain(int device);
// Whether a moment is over. If so, this thread may rely on it, and no other.
bool has_happened(const MomentPtr& moment);

// A kernel has failed. As on a GPU, the next wait of the host raises.
void fail(const std::string& message);

struct Counters {
  uint64_t kernels = 0;
  uint64_t collectives = 0;
  uint64_t events = 0;
  uint64_t stream_waits = 0;
  std::vector<std::string> host_waits;  // the reasons
};
Counters take_counters();
void refuse_host_waits(bool refuses);
// From now on: each launch as text, and Python's stacks in reports of races.
void set_tracing(bool traces);
std::vector<std::string> take_trace();

}  // namespace sim
