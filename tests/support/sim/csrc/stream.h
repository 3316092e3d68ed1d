// Streams: queues of work, each with a thread that takes one piece after another.
//
// A stream knows, beside its queue, which work of other streams is certain to be over before what
// it takes next. That is a vector clock: it grows where the program asks for order (an event that a
// stream or the host waits for), never because some work happened to be fast. The race detector
// (races.h) compares clocks, so it finds a missing wait in whatever order the threads really run.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <vector>

namespace sim {

using StreamKey = int64_t;  // a device and the id of a stream of it

// Guards clocks, blocks of memory and reports. Nobody waits for the GIL or for a stream under it.
std::recursive_mutex& state_mutex();
using StateLock = std::lock_guard<std::recursive_mutex>;

// How many launches of each stream are over.
class Clock {
 public:
  uint64_t operator[](StreamKey key) const;
  void advance(StreamKey key);
  void merge(const Clock& other);

 private:
  std::map<StreamKey, uint64_t> launches_;
};

// What an event records: a place in the queue of a stream.
class Moment {
 public:
  explicit Moment(Clock clock) : clock(std::move(clock)) {}
  void happen();
  void wait();
  bool has_happened();
  double milliseconds();  // when it happened

  const Clock clock;

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  bool has_happened_ = false;
  double milliseconds_ = 0;
};
using MomentPtr = std::shared_ptr<Moment>;

class Stream {
 public:
  Stream(int device, int64_t id);
  void push(std::function<void()> work);
  bool is_idle();
  // Sleep for a random time, so that other threads get ahead. Called by the stream's thread.
  void dawdle();

  const int device;
  const int64_t id;
  const StreamKey key;
  Clock clock;  // guarded by state_mutex()

 private:
  void run();

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::function<void()>> queue_;
  bool is_busy_ = false;
  uint64_t random_;
};

// The delay of each launch is between 0 and `microseconds`. `seed` decides which.
void set_delay(int microseconds, uint64_t seed);
// Let a stream stand still from here on until `let_go`: what it then gets is certainly late.
void hold(Stream& stream);
void let_go(Stream& stream);

constexpr int kNumDevices = 2;
StreamKey key_of(int device, int64_t id);
Stream& stream_at(int device, int64_t id);  // made, and its thread started, at the first call
std::vector<Stream*> all_streams(int device);  // -1: of all devices
int64_t next_pool_id(int device);
int64_t next_group_id(int device);  // none of the pool: a group would order that stream's work

bool is_on_host();  // whether this thread is none of a stream
// What is current is so for one thread of the host.
int current_device();
int exchange_device(int device);  // returns what was current; a negative number changes nothing
int64_t current_stream_id(int device);
int64_t exchange_stream_id(int device, int64_t id);
inline Stream& current_stream(int device) {
  return stream_at(device, current_stream_id(device));
}

}  // namespace sim
