// The copies between gradients and a bucket's buffer, on a GPU. No CUDA header in here:
// flatten.cpp includes this with a plain C++ compiler.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

namespace minidp::cuda {

// to[k] = from[k] * scale for the given k, on the current stream of their device. All
// have one dtype (float, double, half or bfloat16) and lie on one GPU; each pair is laid
// out alike and without gaps.
void copy_rows(
    const std::vector<const at::Tensor*>& to,
    const std::vector<const at::Tensor*>& from,
    const std::vector<size_t>& slots,
    double scale);

}  // namespace minidp::cuda
