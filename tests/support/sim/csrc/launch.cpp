#include "launch.h"

#include <torch/csrc/utils/pybind.h>

#include <optional>
#include <shared_mutex>
#include <stdexcept>

#include "memory.h"

namespace sim {
namespace {

Clock host_clock;  // what any wait of the host has made certain, for all its threads
thread_local Clock own_clock;  // what this thread has asked an event about
Counters counters;
bool refuses = false;
std::atomic<bool> is_tracing{false};
std::vector<std::string> trace;
std::string failure;

// As CUDA's driver, which keeps its lock while a copy from a device to pageable memory waits for
// the device. Calls of other threads wait for that, but for questions whether an event has come.
std::shared_mutex& driver_mutex() {
  static auto* mutex = new std::shared_mutex;
  return *mutex;
}

std::string python_stack() {
  if (!is_tracing || !Py_IsInitialized()) return "";
  pybind11::gil_scoped_acquire gil;
  const auto lines = pybind11::module_::import("traceback").attr("format_stack")();
  return pybind11::str("").attr("join")(lines).cast<std::string>();
}

// What the host knows is known to what it launches.
void tell_host_clock(Stream& stream) {
  stream.clock.merge(host_clock);
  stream.clock.merge(own_clock);
}

void note_host_wait(const std::string& reason) {
  StateLock lock(state_mutex());
  counters.host_waits.push_back(reason);
  if (refuses) throw std::runtime_error("sim: the host waits for the device: " + reason);
}

void wait_without_gil(const std::vector<MomentPtr>& moments, bool keeps_driver = false) {
  {
    std::optional<pybind11::gil_scoped_release> released;
    if (Py_IsInitialized() && PyGILState_Check()) released.emplace();
    std::unique_lock<std::shared_mutex> driver(driver_mutex(), std::defer_lock);
    if (keeps_driver) driver.lock();
    for (const auto& moment : moments) moment->wait();
  }
  StateLock lock(state_mutex());
  for (const auto& moment : moments) host_clock.merge(moment->clock);
}

void raise_failure() {
  StateLock lock(state_mutex());
  if (!failure.empty())
    throw std::runtime_error("sim: a kernel failed: " + std::exchange(failure, ""));
}

std::vector<MomentPtr> record_all(int device) {
  std::vector<MomentPtr> moments;
  for (auto* stream : all_streams(device)) moments.push_back(record(*stream));
  return moments;
}

}  // namespace

void enter_driver() {
  if (!is_on_host()) return;  // a stream drops what it has run
  std::shared_lock<std::shared_mutex> lock(driver_mutex(), std::try_to_lock);
  if (lock) return;
  std::optional<pybind11::gil_scoped_release> released;
  if (Py_IsInitialized() && PyGILState_Check()) released.emplace();
  std::shared_lock<std::shared_mutex> when_free(driver_mutex());
}

void launch(
    Stream& stream,
    const std::string& name,
    const std::vector<Range>& ranges,
    std::function<void()> work,
    Kind kind) {
  const auto where = python_stack();
  enter_driver();
  StateLock lock(state_mutex());
  launch_locked(stream, name, where, ranges, std::move(work), kind);
}

void launch_locked(
    Stream& stream,
    const std::string& name,
    const std::string& where,
    const std::vector<Range>& ranges,
    std::function<void()> work,
    Kind kind) {
  tell_host_clock(stream);
  stream.clock.advance(stream.key);
  if (kind == Kind::kKernel) ++counters.kernels;
  if (kind == Kind::kCollective) ++counters.collectives;
  if (is_tracing && kind != Kind::kAllocator)
    trace.push_back(std::to_string(stream.key) + ": " + name);
  for (const auto& range : ranges) note_access(stream, range, name, where);
  stream.push([&stream, name, work = std::move(work)] {
    stream.dawdle();
    try {
      work();
    } catch (const std::exception& error) {
      fail(name + ": " + error.what());
    }
  });
}

MomentPtr record(Stream& stream) {
  enter_driver();
  StateLock lock(state_mutex());
  tell_host_clock(stream);
  ++counters.events;
  auto moment = std::make_shared<Moment>(stream.clock);
  stream.push([moment] { moment->happen(); });
  return moment;
}

void wait_for(Stream& stream, const MomentPtr& moment) {
  if (!moment) return;
  enter_driver();
  StateLock lock(state_mutex());
  stream.clock.merge(moment->clock);
  ++counters.stream_waits;
  queue_behind(stream, moment);
}

void queue_behind(Stream& stream, const MomentPtr& moment) {
  if (moment) stream.push([moment] { moment->wait(); });
}

void host_wait(const MomentPtr& moment, const std::string& reason) {
  note_host_wait(reason);
  if (moment) wait_without_gil({moment});
  raise_failure();
}

void synchronize(Stream& stream, const std::string& reason) {
  note_host_wait(reason);
  wait_without_gil({record(stream)});
  raise_failure();
}

void synchronize_with_driver(Stream& stream, const std::string& reason) {
  note_host_wait(reason);
  wait_without_gil({record(stream)}, /*keeps_driver=*/true);
  raise_failure();
}

void synchronize_device(int device, const std::string& reason) {
  note_host_wait(reason);
  drain(device);
}

void drain(int device) {
  wait_without_gil(record_all(device));
  raise_failure();
}

bool has_happened(const MomentPtr& moment) {
  if (!moment) return true;
  if (!moment->has_happened()) return false;
  own_clock.merge(moment->clock);
  return true;
}

void fail(const std::string& message) {
  StateLock lock(state_mutex());
  if (failure.empty()) failure = message;
}

Counters take_counters() {
  StateLock lock(state_mutex());
  return std::exchange(counters, Counters());
}

void refuse_host_waits(bool refuses_now) {
  StateLock lock(state_mutex());
  refuses = refuses_now;
}

void set_tracing(bool traces) {
  is_tracing = traces;
}

std::vector<std::string> take_trace() {
  StateLock lock(state_mutex());
  return std::exchange(trace, {});
}

}  // namespace sim
