// Launches of the kernel; torch is unknown here.
#pragma once

#include <cuda_runtime_api.h>

#include "rows.h"

namespace minidp::cuda {

enum class Type { kFloat, kDouble, kHalf, kBFloat16 };

// to = from * scale for every row of the batch; multiplied and rounded as torch does.
cudaError_t launch(const Batch& batch, Type type, cudaStream_t stream);

}  // namespace minidp::cuda
