#include "copy_rows.h"

#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

#include "launch.h"

namespace minidp::cuda {
namespace {

Type type_of(at::ScalarType dtype) {
  switch (dtype) {
    case at::kFloat:
      return Type::kFloat;
    case at::kDouble:
      return Type::kDouble;
    case at::kHalf:
      return Type::kHalf;
    case at::kBFloat16:
      return Type::kBFloat16;
    default:
      TORCH_INTERNAL_ASSERT(false, "minidp: no kernel for ", dtype);
  }
}

void launch_rows(
    const std::vector<const at::Tensor*>& to,
    const std::vector<const at::Tensor*>& from,
    const std::vector<size_t>& slots,
    double scale) {
  if (slots.empty()) {
    return;
  }
  const auto& first = *to[slots.front()];
  const auto type = type_of(first.scalar_type());
  const c10::cuda::CUDAGuard guard(first.device());
  const auto stream = c10::cuda::getCurrentCUDAStream(first.device().index());
  const auto row_at = [&](size_t n) {
    const at::Tensor& target = *to[slots[n]];
    const at::Tensor& source = *from[slots[n]];
    return Row{target.mutable_data_ptr(), source.const_data_ptr(), target.numel(), 0};
  };
  for_batches(slots.size(), scale, row_at, [&](const Batch& batch) {
    C10_CUDA_CHECK(launch(batch, type, stream));
  });
}

[[maybe_unused]] const bool is_registered = [] {
  copy_rows = launch_rows;
  return true;
}();

}  // namespace
}  // namespace minidp::cuda
