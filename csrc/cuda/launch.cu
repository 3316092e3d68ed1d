#include "launch.h"

#include "scaled_copy.h"

namespace minidp::cuda {
namespace {

template <typename T>
__global__ void __launch_bounds__(kThreads) scaled_copy(const __grid_constant__ Batch batch) {
  run_thread<T>(batch, blockIdx.x, static_cast<int>(threadIdx.x));
}

template <typename T>
cudaError_t launch_as(const Batch& batch, cudaStream_t stream) {
  const auto blocks = static_cast<unsigned>(batch.num_blocks);
  scaled_copy<T><<<blocks, kThreads, 0, stream>>>(batch);
  return cudaGetLastError();
}

}  // namespace

cudaError_t launch(const Batch& batch, Type type, cudaStream_t stream) {
  switch (type) {
    case Type::kFloat:
      return launch_as<float>(batch, stream);
    case Type::kDouble:
      return launch_as<double>(batch, stream);
    case Type::kHalf:
      return launch_as<__half>(batch, stream);
    case Type::kBFloat16:
      return launch_as<__nv_bfloat16>(batch, stream);
  }
  return cudaErrorInvalidValue;
}

}  // namespace minidp::cuda
