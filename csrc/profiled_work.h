// A collective as profilers show it: a range that begins where it is started and ends where it is
// found complete, maybe in another thread. Tools of torch look for such ranges by their names.
#pragma once

#include <ATen/ThreadLocalState.h>
#include <ATen/record_function.h>

#include <functional>
#include <memory>
#include <utility>
#include <vector>

namespace minidp {

class ProfiledWork {
 public:
  // Begins the range of a collective on the tensor that `values()` returns. Returns null, and
  // calls nothing, if no profiler runs.
  template <typename Values>
  static std::unique_ptr<ProfiledWork> begin(const char* name, const Values& values) {
    auto callbacks = at::getStepCallbacksUnlessEmpty(at::RecordScope::USER_SCOPE);
    if (!callbacks) {
      return nullptr;
    }
    auto range = std::make_shared<at::RecordFunction>(std::move(*callbacks));
    range->_setAsync();
    const std::vector<c10::IValue> inputs{values()};
    range->before(name, c10::ArrayRef<const c10::IValue>(inputs.data(), inputs.size()));
    // A profiler belongs to the thread that started it: the end must find that one.
    return std::unique_ptr<ProfiledWork>(
        new ProfiledWork(at::wrapPropagateTLSState([range] { range->end(); })));
  }

  // Ends the range. Without it the range ends with this object.
  void end() {
    end_();
  }

 private:
  explicit ProfiledWork(std::function<void()> end) : end_(std::move(end)) {}

  std::function<void()> end_;
};

}  // namespace minidp
