// The slots of one dense bucket: the everyday case of minidp/core/dense_bucket.py. That is:
// every gradient is there or counts as zeros, is a plain strided tensor of its slot's
// dtype, shape and device, has no history to keep; and is either outside of the buffer,
// or all gradients are their views.
//
// Each method either does its whole job and returns true, or finds something that is not
// everyday, has written no value, and returns false: Python then does the job, or says
// what is wrong.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "flatten.h"
#include "tiles.h"

namespace minidp {

// Every type of device answers through the guard that it has registered with torch.
c10::Stream current_stream(c10::Device device);

class Slots {
 public:
  // views: N-D windows on `values`, the bucket's buffer, one per parameter.
  // as_view: gradient_as_bucket_view.
  Slots(
      std::vector<at::Tensor> params,
      std::vector<at::Tensor> views,
      at::Tensor values,
      bool as_view);

  // Copies one gradient into its slot at once.
  bool copy_now(size_t k, const at::Tensor& grad, double scale);

  // Marks the buffer as used by a stream, so that nobody else gets its memory while that stream
  // still writes there. The bucket may die before it is full.
  void use_on(const c10::Stream& stream);

  // Scales all gradients into the buffer. present[k] false: slot k is filled already;
  // an undefined gradient gives zeros.
  bool flatten(
      const std::vector<at::Tensor>& grads, const std::vector<bool>& present, int64_t divisor);

  // Copies the buffer, scaled, into every .grad, or points .grad at it (scale is then 1).
  // `arrived` is what was flattened.
  bool unflatten(const std::vector<at::Tensor>& arrived, double scale);

  // Divided steps, before any gradient comes: the slots [first, last) are this rank's share of a
  // buffer in shared memory. Nobody else reads its gradients there, so `flatten` leaves them in
  // .grad, and `offer_share` adds them up from there. The others are what other ranks need:
  // `copy_now` copies each one, and lets go of it at once, so that the next gradient gets its
  // memory, which the cache still has.
  void divide(size_t first, size_t last);
  // Brings to the buffer what `flatten` has left in .grad.
  void complete();
  // The same, if a gradient of them was replaced, or if something else lies in its memory: the
  // gradients of x + y are one tensor, or views of it. Then a sum that is written to one of them
  // would change what the other one brings. So this goes before the sum of any bucket. Returns the
  // slot of a gradient that was changed in place since, and does nothing then; else -1.
  int64_t settle();

  // Offers the gradients as tiles: sums, scaled, may be written there instead of to the buffer, and
  // `unflatten` follows. False if that does not pay, or if a gradient is not everyday.
  bool offer_tiles(double scale);
  // The same for the slots [first, last) alone, which are this rank's share of the buffer. When the
  // sums are there, `has_taken_share` follows.
  bool offer_share(size_t first, size_t last, double scale);
  // Whether the gradients of the share have the sums. If not, the buffer has them, unscaled, unless
  // `is_scaled` is true.
  bool has_taken_share();
  // Whether the last `unflatten` has scaled the buffer: for Python, if it returned false.
  bool is_scaled() const {
    return is_scaled_;
  }
  Tiles* tiles() {
    return tiled_.empty() ? nullptr : &tiles_;
  }

  // Python ends this backward: let go of the gradients that were offered as tiles.
  void forget_tiles();

 private:
  // What a gradient must look like to be copied as one row of memory, in one cache line:
  // a view's own tensor is cold when its gradient arrives.
  struct Place {
    int64_t begin = 0;  // in bytes from the start of the buffer
    int64_t numel = 0;
    int64_t sizes[5] = {};
    int32_t dim = -1;  // -1: no row: the view has gaps, more than five dimensions ...
  };

  Place place_of(const at::Tensor& view) const;
  bool is_row(const Place& place, const at::Tensor& grad, const char* buffer) const;
  bool unflatten_rows(double scale);
  bool unflatten_tiles(double scale);
  bool lies_in_buffer(const at::Tensor& grad) const;
  bool is_own(size_t k) const {
    return first_own_ <= k && k < last_own_;
  }
  bool may_stay(const std::vector<at::Tensor>& grads, const std::vector<bool>& present) const;
  bool have_stayed() const;
  bool fits(const at::Tensor& grad, const at::Tensor& view) const;
  Refs views_of(const std::vector<size_t>& slots) const;
  void copy_in(const std::vector<size_t>& slots, const Refs& grads, double scale);
  // Lets .grad be the view, and so lets go of the gradient's own memory.
  void point_at_view(size_t k);
  bool point_at_views(const std::vector<at::Tensor>& arrived);

  std::vector<at::Tensor> params_;
  std::vector<at::Tensor> views_;
  at::Tensor values_;
  std::vector<Place> places_;
  std::mutex users_mutex_;  // grad hooks of several devices run at once
  std::vector<c10::Stream> users_;  // of the buffer; none on the CPU
  bool is_scaled_ = false;
  Tiles tiles_;
  std::vector<at::Tensor> tiled_;  // the gradients of `tiles_`
  size_t first_tiled_ = 0;         // the slot of the first one
  bool as_view_;
  bool past_cache_;
  bool is_divided_ = false;
  size_t first_own_ = 0;
  size_t last_own_ = 0;
  std::vector<at::Tensor> stayed_;  // the gradients of the share that the buffer does not have
  std::vector<uint32_t> versions_;  // that they had then
  double stayed_scale_ = 1;         // by which they are to be multiplied
};

}  // namespace minidp
