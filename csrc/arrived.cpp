#include "arrived.h"

#include <algorithm>

#include "flatten.h"

namespace minidp {
namespace {

const at::Tensor& grad_of(const at::Tensor& param) {
  return param.unsafeGetTensorImpl()->grad();
}

uint32_t version_of(const at::Tensor& grad) {
  return grad.unsafeGetTensorImpl()->version_counter().current_version();
}

}  // namespace

Arrived::Arrived(std::vector<at::Tensor> params)
    : params_(std::move(params)), notes_(params_.size()) {}

void Arrived::note(size_t i) {
  const auto& grad = grad_of(params_[i]);
  if (grad.defined()) {
    notes_[i] = Note{Weak(grad.getIntrusivePtr()), version_of(grad)};
  }
}

void Arrived::note_all() {
  for (size_t i = 0; i < params_.size(); ++i) {
    note(i);
  }
}

void Arrived::clear() {
  notes_.assign(params_.size(), std::nullopt);
}

size_t Arrived::size() const {
  return static_cast<size_t>(
      std::count_if(notes_.begin(), notes_.end(), [](const auto& note) { return bool(note); }));
}

std::vector<int64_t> Arrived::changed() const {
  std::vector<int64_t> found;
  for (size_t i = 0; i < params_.size(); ++i) {
    const auto& note = notes_[i];
    if (!note) {
      continue;
    }
    const auto& grad = grad_of(params_[i]);
    const bool is_same = grad.unsafeGetTensorImpl() == note->grad._unsafe_get_target();
    // Views share the version of their bucket.
    if (!is_same || (version_of(grad) != note->version && !grad.is_view())) {
      found.push_back(static_cast<int64_t>(i));
    }
  }
  return found;
}

bool Arrived::is_any_there() const {
  return std::any_of(
      params_.begin(), params_.end(), [](const auto& param) { return grad_of(param).defined(); });
}

std::pair<std::vector<at::Tensor>, bool> Arrived::take() {
  std::vector<at::Tensor> grads;
  grads.reserve(params_.size());
  bool are_plain = true;
  for (const auto& param : params_) {
    auto& grad = param.mutable_grad();
    are_plain =
        are_plain && grad.defined() && grad.is_cpu() && has_memory(grad) && !grad.requires_grad();
    grads.push_back(std::move(grad));
    grad.reset();
  }
  return {std::move(grads), are_plain};
}

}  // namespace minidp
