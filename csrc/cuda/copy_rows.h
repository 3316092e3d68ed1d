// What cuda/ does for the other files. They need no header of CUDA for it, and the same
// objects of them link with cuda/ and without: it is left out where it does not compile.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

namespace minidp::cuda {

// to[k] = from[k] * scale for the given k, on the current stream of their device. All
// have one dtype (float, double, half or bfloat16) and lie on one GPU; each pair is laid
// out alike and without gaps.
using CopyRows = void(
    const std::vector<const at::Tensor*>& to,
    const std::vector<const at::Tensor*>& from,
    const std::vector<size_t>& slots,
    double scale);

// Null if the extension is linked without cuda/. Set while the extension is loaded.
extern CopyRows* copy_rows;

}  // namespace minidp::cuda
