#include "slots.h"

#include <ATen/core/grad_mode.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <cstring>
#include <utility>

namespace minidp {

c10::Stream current_stream(c10::Device device) {
  return c10::impl::VirtualGuardImpl(device.type()).getStream(device);
}

Slots::Slots(
    std::vector<at::Tensor> params, std::vector<at::Tensor> views, at::Tensor values, bool as_view)
    : params_(std::move(params)),
      views_(std::move(views)),
      values_(std::move(values)),
      as_view_(as_view),
      past_cache_(is_past_cache(values_.nbytes())) {
  TORCH_CHECK(params_.size() == views_.size(), "one view per parameter");
  places_.reserve(views_.size());
  for (const auto& view : views_) {
    places_.push_back(place_of(view));
  }
  if (!values_.is_cpu()) {
    users_.push_back(current_stream(values_.device()));  // its memory belongs to this one
  }
}

void Slots::use_on(const c10::Stream& stream) {
  const std::lock_guard<std::mutex> lock(users_mutex_);
  if (std::find(users_.begin(), users_.end(), stream) == users_.end()) {
    users_.push_back(stream);
    values_.record_stream(stream);
  }
}

Slots::Place Slots::place_of(const at::Tensor& view) const {
  Place place;
  const auto sizes = view.sizes();
  const bool is_row = values_.is_cpu() && has_loop(values_.scalar_type()) && view.is_contiguous() &&
      sizes.size() <= std::size(place.sizes);
  if (is_row) {
    const auto elements = view.storage_offset() - values_.storage_offset();
    place.begin = elements * static_cast<int64_t>(values_.element_size());
    place.numel = view.numel();
    std::copy(sizes.begin(), sizes.end(), place.sizes);
    place.dim = static_cast<int32_t>(sizes.size());
  }
  return place;
}

// Whether a gradient is a plain row of memory of the slot's type and shape, outside of the
// buffer. False says nothing: `fits` looks closer.
bool Slots::is_row(const Place& place, const at::Tensor& grad, const char* buffer) const {
  if (!has_memory(grad)) {  // first: a subclass may answer all else in Python
    return false;
  }
  const auto sizes = grad.sizes();
  if (static_cast<int32_t>(sizes.size()) != place.dim || grad.is_neg() || !grad.is_cpu() ||
      grad.scalar_type() != values_.scalar_type() || !grad.is_contiguous() ||
      !std::equal(sizes.begin(), sizes.end(), place.sizes)) {
    return false;
  }
  const auto* address = static_cast<const char*>(grad.const_data_ptr());
  return address < buffer || address >= buffer + values_.nbytes();
}

namespace {

constexpr int64_t kSmall = 1 << 17;  // elements that one thread copies
constexpr size_t kTiled = 256 * 1024;  // bytes of a bucket; to copy a smaller one costs less

// Without the checks of Tensor::grad(), which cost more than the copy of a small one.
const at::Tensor& grad_of(const at::Tensor& param) {
  return param.unsafeGetTensorImpl()->grad();
}

// How often it was changed in place.
uint32_t version_of(const at::Tensor& tensor) {
  const auto& counter = tensor.unsafeGetTensorImpl()->version_counter();
  return counter.enabled() ? counter.current_version() : 0;
}

}  // namespace

bool Slots::lies_in_buffer(const at::Tensor& grad) const {
  const auto* start = static_cast<const char*>(values_.const_data_ptr());
  const auto* address = static_cast<const char*>(grad.const_data_ptr());
  return address >= start && address < start + values_.nbytes();
}

// Whether a gradient may be copied without a second look.
bool Slots::fits(const at::Tensor& grad, const at::Tensor& view) const {
  return has_memory(grad) && grad.scalar_type() == view.scalar_type() &&
      grad.device() == view.device() && grad.sizes() == view.sizes() &&
      !(at::GradMode::is_enabled() && grad.requires_grad()) && !grad.is_same(view) &&
      !(as_view_ && lies_in_buffer(grad));
}

bool Slots::copy_now(size_t k, const at::Tensor& grad, double scale) {
  if (at::GradMode::is_enabled() || (is_divided_ && is_own(k))) {
    return false;
  }
  const auto& place = places_.at(k);
  auto* buffer = static_cast<char*>(values_.data_ptr());
  if (place.numel <= kSmall && is_row(place, grad, buffer)) {
    copy_row(
        buffer + place.begin,
        grad.const_data_ptr(),
        place.numel,
        values_.scalar_type(),
        scale,
        past_cache_);
    values_.unsafeGetTensorImpl()->bump_version();
  } else if (fits(grad, views_[k])) {
    copy_in({k}, {&grad}, scale);
  } else {
    return false;
  }
  if (as_view_) {
    point_at_view(k);
  } else if (is_divided_) {
    params_[k].mutable_grad().reset();
  }
  return true;
}

void Slots::divide(size_t first, size_t last) {
  TORCH_CHECK(!as_view_ && first <= last && last <= params_.size(), "no share of these slots");
  is_divided_ = true;
  first_own_ = first;
  last_own_ = last;
}

bool Slots::may_stay(const std::vector<at::Tensor>& grads, const std::vector<bool>& present) const {
  if (!is_divided_ || first_own_ == last_own_ || at::GradMode::is_enabled()) {
    return false;
  }
  const auto* buffer = static_cast<const char*>(values_.const_data_ptr());
  for (size_t k = first_own_; k < last_own_; ++k) {
    const bool is_usual = present[k] && grads[k].defined() && is_row(places_[k], grads[k], buffer);
    if (!is_usual) {
      return false;
    }
  }
  return true;
}

int64_t Slots::settle() {
  for (size_t k = 0; k < stayed_.size(); ++k) {
    if (version_of(stayed_[k]) != versions_[k]) {
      return static_cast<int64_t>(first_own_ + k);
    }
  }
  if (!have_stayed()) {
    complete();
  }
  return -1;
}

// Whether all of them are still in .grad, and in memory of their own.
bool Slots::have_stayed() const {
  for (size_t k = 0; k < stayed_.size(); ++k) {
    const auto& grad = grad_of(params_[first_own_ + k]);
    if (!grad.is_same(stayed_[k]) || grad.storage().use_count() != 1) {
      return false;
    }
  }
  return !stayed_.empty();
}

void Slots::complete() {
  if (stayed_.empty()) {
    return;
  }
  auto* buffer = static_cast<char*>(values_.data_ptr());
  Rows rows;
  rows.reserve(stayed_.size());
  for (size_t k = 0; k < stayed_.size(); ++k) {
    const auto& place = places_[first_own_ + k];
    rows.add(buffer + place.begin, stayed_[k].const_data_ptr(), place.numel);
  }
  rows.past_cache = past_cache_;
  copy_rows(rows, values_.scalar_type(), stayed_scale_);
  values_.unsafeGetTensorImpl()->bump_version();  // written behind autograd's back
  stayed_.clear();
}

void Slots::point_at_view(size_t k) {
  const auto& grad = grad_of(params_[k]);
  if (grad.defined() && !grad.is_cpu()) {
    grad.record_stream(current_stream(grad.device()));  // the user may have made it
  }
  params_[k].mutable_grad() = views_[k];
}

bool Slots::flatten(
    const std::vector<at::Tensor>& grads, const std::vector<bool>& present, int64_t divisor) {
  TORCH_CHECK(grads.size() == views_.size(), "one gradient per slot");
  std::vector<size_t> slots;
  Refs from;
  slots.reserve(grads.size());
  from.reserve(grads.size());
  size_t in_place = 0;
  stayed_.clear();
  const bool stays = may_stay(grads, present);
  for (size_t k = 0; k < grads.size(); ++k) {
    const auto& grad = grads[k];
    if (!present[k] || (stays && is_own(k))) {
      continue;
    }
    if (as_view_ && grad.is_same(views_[k])) {
      ++in_place;
      continue;
    }
    if (grad.defined() && !fits(grad, views_[k])) {
      return false;
    }
    slots.push_back(k);
    from.push_back(&grad);
  }
  if (in_place == grads.size()) {
    if (divisor != 1) {
      values_.div_(divisor);
    }
    return true;
  }
  if (in_place != 0) {
    return false;  // some to multiply, some to divide
  }
  const double scale = 1.0 / static_cast<double>(divisor);
  copy_in(slots, from, scale);
  if (stays) {
    stayed_.assign(grads.begin() + first_own_, grads.begin() + last_own_);
    versions_.resize(stayed_.size());
    std::transform(stayed_.begin(), stayed_.end(), versions_.begin(), version_of);
    stayed_scale_ = scale;
  }
  return true;
}

Refs Slots::views_of(const std::vector<size_t>& slots) const {
  Refs views;
  views.reserve(slots.size());
  for (const size_t k : slots) {
    views.push_back(&views_[k]);
  }
  return views;
}

void Slots::copy_in(const std::vector<size_t>& slots, const Refs& grads, double scale) {
  minidp::flatten(views_of(slots), grads, scale);
  values_.unsafeGetTensorImpl()->bump_version();  // written behind autograd's back
}

void Slots::forget_tiles() {
  tiles_.clear();
  tiled_.clear();
}

bool Slots::unflatten(const std::vector<at::Tensor>& arrived, double scale) {
  TORCH_CHECK(arrived.size() == views_.size(), "one gradient per slot");
  if (as_view_) {
    return point_at_views(arrived);
  }
  is_scaled_ = false;
  if (unflatten_tiles(scale)) {
    return true;
  }
  if (is_scaled_) {
    scale = 1;
  }
  if (unflatten_rows(scale)) {
    return true;
  }
  std::vector<at::Tensor> held;  // another thread may set .grad meanwhile
  Refs grads;
  Refs views;
  held.reserve(params_.size());
  grads.reserve(params_.size());
  views.reserve(params_.size());
  for (size_t k = 0; k < params_.size(); ++k) {
    const auto& grad = grad_of(params_[k]);
    if (!grad.defined() || !fits(grad, views_[k])) {
      forget_tiles();
      return false;
    }
    held.push_back(grad);
    grads.push_back(&held.back());
    views.push_back(&views_[k]);
  }
  minidp::unflatten(grads, views, scale);
  forget_tiles();
  return true;
}

// `unflatten` if every gradient is a row. In passes, so that the gradients' cache lines are
// fetched side by side.
bool Slots::unflatten_rows(double scale) {
  if (at::GradMode::is_enabled()) {
    return false;
  }
  std::vector<at::Tensor> held;  // another thread may set .grad meanwhile
  held.reserve(params_.size());
  for (const auto& param : params_) {
    held.push_back(grad_of(param));
  }
  auto* buffer = static_cast<char*>(values_.data_ptr());
  Rows rows;
  rows.reserve(held.size());
  for (size_t k = 0; k < held.size(); ++k) {
    const auto& grad = held[k];
    if (!grad.defined() || !is_row(places_[k], grad, buffer)) {
      return false;
    }
    rows.add(grad.data_ptr(), buffer + places_[k].begin, places_[k].numel);
  }
  rows.past_cache = past_cache_;
  copy_rows(rows, values_.scalar_type(), scale);
  for (const auto& grad : held) {
    grad.unsafeGetTensorImpl()->bump_version();  // written behind autograd's back
  }
  forget_tiles();
  return true;
}

bool Slots::offer_tiles(double scale) {
  if (values_.nbytes() < kTiled) {
    forget_tiles();
    return false;
  }
  return offer_share(0, params_.size(), scale);
}

bool Slots::offer_share(size_t first, size_t last, double scale) {
  forget_tiles();
  const bool has_own = have_stayed() && !at::GradMode::is_enabled();
  if (!has_own) {
    complete();
  }
  if (as_view_ || at::GradMode::is_enabled() || first >= last) {
    return false;
  }
  const auto* buffer = static_cast<const char*>(values_.const_data_ptr());
  int64_t begin = places_[first].begin;
  first_tiled_ = first;
  for (size_t k = first; k < last; ++k) {
    const auto& grad = grad_of(params_[k]);
    if (!grad.defined() || !is_row(places_[k], grad, buffer) || places_[k].begin != begin) {
      complete();
      forget_tiles();
      return false;
    }
    tiled_.push_back(grad);  // another thread may set .grad meanwhile
    tiles_.add(grad.data_ptr(), begin);
    begin += places_[k].numel * static_cast<int64_t>(values_.element_size());
  }
  tiles_.past_cache = past_cache_ && !has_own;  // what was just read is in the cache
  tiles_.type = values_.scalar_type();
  tiles_.scale = scale;
  tiles_.has_own = has_own;
  tiles_.own_scale = stayed_scale_;
  stayed_.clear();
  return true;
}

// The sums of a share are written all at once, to the tiles or to the buffer.
bool Slots::has_taken_share() {
  is_scaled_ = false;
  if (tiles_.written.empty()) {
    forget_tiles();
    return false;
  }
  fence_past_cache();  // after the tiles' own stores
  bool are_there = true;
  for (size_t k = 0; k < tiled_.size(); ++k) {
    are_there = are_there && grad_of(params_[first_tiled_ + k]).is_same(tiled_[k]);
  }
  auto* buffer = static_cast<char*>(values_.data_ptr());
  for (size_t k = 0; k < tiled_.size(); ++k) {
    if (are_there) {
      tiled_[k].unsafeGetTensorImpl()->bump_version();  // written behind autograd's back
    } else {
      std::memcpy(
          buffer + places_[first_tiled_ + k].begin, tiled_[k].const_data_ptr(), tiled_[k].nbytes());
    }
  }
  is_scaled_ = !are_there;
  forget_tiles();
  return are_there;
}

// Copies what was not written to the tiles. If a gradient was replaced since, brings the buffer up
// to date instead, scaled, and returns false.
bool Slots::unflatten_tiles(double scale) {
  if (tiles_.written.empty()) {
    return false;
  }
  auto* buffer = static_cast<char*>(values_.data_ptr());
  bool are_there = true;
  for (size_t k = 0; k < params_.size(); ++k) {
    are_there = are_there && grad_of(params_[k]).is_same(tiled_[k]);
  }
  Rows sums;  // not in tiles
  Rows back;
  sums.past_cache = back.past_cache = past_cache_;
  const auto item = static_cast<int64_t>(values_.element_size());
  const auto scale_sums = [&](char* tile, int64_t at, int64_t size) {
    sums.add(are_there ? tile : buffer + at, buffer + at, size / item);
  };
  const auto copy_back = [&](char* tile, int64_t at, int64_t size) {
    back.add(buffer + at, tile, size / item);
  };
  std::sort(tiles_.written.begin(), tiles_.written.end());
  int64_t begin = 0;
  for (const auto& [from, to] : tiles_.written) {
    tiles_.each(begin, from, scale_sums);
    if (!are_there) {
      tiles_.each(from, to, copy_back);
    }
    begin = to;
  }
  tiles_.each(begin, static_cast<int64_t>(values_.nbytes()), scale_sums);
  if (are_there || scale != 1) {
    copy_rows(sums, values_.scalar_type(), scale);
  }
  copy_rows(back, values_.scalar_type(), 1.0);
  is_scaled_ = !are_there;
  fence_past_cache();  // after the tiles' own stores, too
  if (are_there) {
    for (const auto& grad : tiled_) {
      grad.unsafeGetTensorImpl()->bump_version();  // written behind autograd's back
    }
  }
  forget_tiles();
  return are_there;
}

bool Slots::point_at_views(const std::vector<at::Tensor>& arrived) {
  for (size_t k = 0; k < params_.size(); ++k) {
    const auto& grad = grad_of(params_[k]);
    if (grad.defined() && !grad.is_same(views_[k]) && !grad.is_same(arrived[k])) {
      return false;  // somebody else's memory: the Python side names the parameter
    }
  }
  for (size_t k = 0; k < params_.size(); ++k) {
    if (!grad_of(params_[k]).is_same(views_[k])) {
      point_at_view(k);
    }
  }
  return true;
}

}  // namespace minidp
