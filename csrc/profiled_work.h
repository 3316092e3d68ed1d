// A collective as profilers show it: a range that begins where it is started and ends where it is
// found complete, maybe in another thread. Tools of torch look for such ranges by their names.
//
// The end of a range is written into memory of the profile in which it began. A collective may be
// found complete later than that: nobody waits for the used-map before the next backward. So the
// end is written only while the same profile runs, as far as this thread knows; after it the
// range is forgotten, without its destructor, which would write, too.
#pragma once

#include <ATen/record_function.h>
#include <c10/util/ThreadLocalDebugInfo.h>
#include <torch/csrc/profiler/orchestration/observer.h>
#include <torch/version.h>

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
    auto found = std::unique_ptr<ProfiledWork>(new ProfiledWork(std::move(*callbacks)));
    const std::vector<c10::IValue> inputs{values()};
    found->range_->_setAsync();
    found->range_->before(name, c10::ArrayRef<const c10::IValue>(inputs.data(), inputs.size()));
    return found;
  }

  // Ends the range, if its profile still runs.
  void end() {
    if (running() == profile_) {
      range_.reset();
    } else {
      static_cast<void>(range_.release());
    }
    keeps_.reset();
  }

  ~ProfiledWork() {
    end();
  }

  ProfiledWork(const ProfiledWork&) = delete;
  ProfiledWork& operator=(const ProfiledWork&) = delete;

 private:
  explicit ProfiledWork(at::StepCallbacks&& callbacks)
      : range_(std::make_unique<at::RecordFunction>(std::move(callbacks))),
        profile_(running()),
        keeps_(c10::ThreadLocalDebugInfo::current()) {}

  static void* running() {
    using State = torch::profiler::impl::ProfilerStateBase;
#if TORCH_VERSION_MAJOR > 2 || TORCH_VERSION_MINOR >= 14
    const auto of_all_threads = State::getGlobal();
    return of_all_threads ? of_all_threads.get() : State::getTLS();
#else
    return State::get();
#endif
  }

  std::unique_ptr<at::RecordFunction> range_;
  void* profile_;
  std::shared_ptr<c10::ThreadLocalDebugInfo> keeps_;  // so that no other profile has its address
};

}  // namespace minidp
