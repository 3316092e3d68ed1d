// A bucket on a GPU, ready to be flattened and unflattened in one launch each.
//
// No CUDA header in here: bindings.cpp includes this with a plain C++ compiler.
#pragma once

#include <ATen/ATen.h>

#include <memory>
#include <optional>
#include <utility>
#include <vector>

namespace minidp {

class CudaPlan {
 public:
  // `views`: windows on one buffer, one per slot, of one dtype, each non-overlapping
  // and dense. Blocks once, for the upload of what never changes. Keeps the buffer.
  explicit CudaPlan(const std::vector<at::Tensor>& views);
  ~CudaPlan();
  CudaPlan(CudaPlan&&) noexcept;
  CudaPlan& operator=(CudaPlan&&) noexcept;

  // views[k] = grads[k] * scale on the device's current stream; an undefined gradient
  // leaves its slot alone. The gradients share one dtype, have their view's shape and
  // strides and lie on its device; nothing is written if one does not. Types other
  // than float, double, half and bfloat16 can only be copied: no scale, no statistics,
  // no other dtype.
  //
  // `stats`: one-element tensors on the device, both updated: a float64 to which the
  // sum of squares of what is written is added, and an int64 that is lowered to the
  // first slot with an infinity or a NaN (start with the number of slots).
  void flatten(const std::vector<at::Tensor>& grads, double scale,
               const std::optional<std::pair<at::Tensor, at::Tensor>>& stats);

  // grads[k] = views[k], with the same rules.
  void unflatten(const std::vector<at::Tensor>& grads);

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace minidp
