// What one thread of the kernel does. No thread depends on another, so that a host
// program can run them one after the other: tests check this file bit for bit on
// machines without a GPU.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <type_traits>

#include "rows.h"

namespace minidp::cuda {

// What torch computes in.
template <typename T>
using Math = std::conditional_t<std::is_same_v<T, double>, double, float>;

MINIDP_HOST_DEVICE float widen(float x) {
  return x;
}
MINIDP_HOST_DEVICE double widen(double x) {
  return x;
}
MINIDP_HOST_DEVICE float widen(__half x) {
  return __half2float(x);
}
MINIDP_HOST_DEVICE float widen(__nv_bfloat16 x) {
  return __bfloat162float(x);
}

// To the nearest, ties to even.
template <typename T>
MINIDP_HOST_DEVICE T narrow(Math<T> x) {
  if constexpr (std::is_same_v<T, __half>) {
    return __float2half_rn(x);
  } else if constexpr (std::is_same_v<T, __nv_bfloat16>) {
    return __float2bfloat16_rn(x);
  } else {
    return x;
  }
}

// A multiplication by one would change the bits of a NaN.
template <typename T>
MINIDP_HOST_DEVICE T scaled(T x, double scale) {
  return scale == 1.0 ? x : narrow<T>(widen(x) * static_cast<Math<T>>(scale));
}

// Neighbouring threads touch neighbouring elements. Source and destination may be the same
// tensor.
template <typename T>
MINIDP_HOST_DEVICE void run_thread(const Batch& batch, std::int64_t block, int thread) {
  const Row& row = row_of(batch, block);
  const T* from = static_cast<const T*>(row.from);
  T* to = static_cast<T*>(row.to);
  const std::int64_t begin = (block - row.first_block) * kBlockElements;
  const std::int64_t end = begin + kBlockElements < row.numel ? begin + kBlockElements : row.numel;
  for (std::int64_t i = begin + thread; i < end; i += kThreads) {
    to[i] = scaled(from[i], batch.scale);
  }
}

}  // namespace minidp::cuda
