// What has arrived in a backward; the hook (grad_hook.h) writes it down without the GIL.
//
// The twin of `GradTable` in minidp/core/grad_hooks.py, which is its specification. The hook
// reacts to one kind of entry, UNSET, and writes gradients or COPIED; on any other it asks
// Python (`admit`), as it does when a bucket is ready (`on_ready`). So what the other
// marks mean, and every feature built on them, is Python's business.
//
// The GIL does not serialise hooks here: each device has a thread of its own, and on CPU
// a backward runs on the thread that called it. So what all of them share, the order, the
// counts and the streams, has a lock, which nobody holds while it waits for the GIL; and gradients
// on CPU that arrive on a second thread are Python's business.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Stream.h>
#include <pybind11/pybind11.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#include "arrived.h"
#include "slots.h"

namespace minidp {

namespace py = pybind11;

class GradTable;

// Whether a Python object is a tensor; if so, `tensor` refers to it then. Here and not from
// torch's python_variable.h, which takes the compiler seconds.
bool is_tensor(py::handle object, at::Tensor& tensor);

// A bucket's entries as they were when it was full: what `Slots::flatten` reads.
struct Gathered {
  std::shared_ptr<const GradTable> table;
  std::vector<at::Tensor> grads;  // undefined: no gradient, or a mark
  std::vector<uint8_t> codes;
};

class GradTable : public std::enable_shared_from_this<GradTable> {
 public:
  static constexpr uint8_t kArrived = 255;  // grads[i] is the entry

  // marks: all values an entry can have besides a gradient or None; the hook knows
  // `unset` and `copied`. callbacks: (on_ready, admit); the hook records what `admit` returns True
  // for.
  GradTable(
      std::vector<at::Tensor> params,
      py::tuple marks,
      const py::object& unset,
      const py::object& copied,
      const py::tuple& callbacks);
  ~GradTable();

  // The gradient of parameter i was accumulated; called without the GIL.
  void fired(size_t i);
  // Compiled autograd captures the hook of parameter i; always throws.
  void refuse_compiled(size_t i) const;

  // Whether this thread has opened the backward.
  bool is_owner() const {
    return owner_.load() == std::this_thread::get_id();
  }

  // Until the next `adopt`, gradient i is copied to slot k when it arrives.
  void copy_at_once(size_t i, std::shared_ptr<Slots> slots, size_t k);
  void note_ready(size_t i);
  // Counts parameter i as arrived; returns how many its bucket still lacks.
  int32_t count_down(size_t i);
  // The streams of a device that wrote gradients of a bucket since the last call.
  std::vector<c10::Stream> take_streams(size_t bucket);
  // When each hook was last called, and forget it: nanoseconds of the clock that is
  // Python's time.perf_counter_ns on Linux; 0: not since, or not while `is_timed`.
  std::vector<int64_t> take_stamps();
  // Call this with the parameter index instead of reading the clock; None: read it.
  void stamp_by(const py::object& stamper);
  // Notes every gradient that no reduction records; null: nobody does.
  void tell(std::shared_ptr<Arrived> arrived) {
    arrived_ = std::move(arrived);
  }
  // Parameter indices that arrived with a gradient.
  std::vector<int64_t> used() const;

  py::object entry(size_t i) const;
  void set_entry(size_t i, py::handle entry);
  void set_entries(const py::sequence& entries);
  // Follow new buckets: parameter indices of each, in slot order.
  void adopt(std::vector<std::vector<size_t>> members);
  // A backward starts: every bucket waits for all of its gradients.
  void refill();
  Gathered gather(size_t bucket) const;
  py::object decode(uint8_t code, const at::Tensor& grad) const;
  const std::vector<at::Tensor>& params() const {
    return params_;
  }
  size_t size() const {
    return codes_.size();
  }

  std::atomic<bool> is_timed = false;
  double scale = 1;  // for what is copied at once
  std::vector<int32_t> ready;  // parameter indices, in order of arrival
  std::vector<int32_t> num_left;  // per bucket, how many gradients are to arrive
  std::vector<int32_t> bucket_of;  // per parameter

 private:
  void note_stream(size_t i);
  void stamp(size_t i);
  uint8_t code_of(py::handle entry) const;

  struct Target {
    std::shared_ptr<Slots> slots;
    size_t k = 0;
  };

  std::vector<at::Tensor> params_;
  std::vector<at::Tensor> grads_;
  std::vector<uint8_t> codes_;
  std::vector<Target> targets_;
  std::vector<int64_t> stamps_;  // per parameter
  std::vector<std::vector<size_t>> members_;  // per bucket
  std::vector<std::vector<c10::Stream>> streams_;  // per bucket
  py::tuple marks_;
  py::object on_ready_;
  py::object admit_;
  py::object stamper_;  // null: the clock is read here
  std::shared_ptr<Arrived> arrived_;
  uint8_t unset_ = 0;
  uint8_t copied_ = 0;
  std::mutex mutex_;  // of ready, num_left and streams_
  std::atomic<std::thread::id> owner_;  // who opened this backward
};

}  // namespace minidp
