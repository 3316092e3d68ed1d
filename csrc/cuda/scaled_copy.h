// What one thread of the kernel does. No thread depends on another, so that a host
// program can run them one after the other: tests check this file bit for bit on
// machines without a GPU.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
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

// What one instruction moves at most, if its address is a multiple of that.
constexpr std::int64_t kVectorBytes = 16;

template <typename T>
struct __attribute__((aligned(kVectorBytes), may_alias)) Vector {
  T values[kVectorBytes / sizeof(T)];
};

MINIDP_HOST_DEVICE bool is_aligned(const void* address) {
  return reinterpret_cast<std::uintptr_t>(address) % kVectorBytes == 0;
}

// Neighbouring threads touch neighbouring vectors, then what is left at the end, or all
// of a tensor that is not aligned, in elements. Source and destination may be the same
// tensor.
template <typename T>
MINIDP_HOST_DEVICE void run_thread(const Batch& batch, std::int64_t block, int thread) {
  constexpr std::int64_t kWidth = kVectorBytes / sizeof(T);
  const Row& row = row_of(batch, block);
  const T* from = static_cast<const T*>(row.from);
  T* to = static_cast<T*>(row.to);
  const std::int64_t begin = (block - row.first_block) * kBlockElements;
  const std::int64_t end = begin + kBlockElements < row.numel ? begin + kBlockElements : row.numel;
  const bool has_vectors = is_aligned(from) && is_aligned(to);
  const std::int64_t rest = has_vectors ? end - (end - begin) % kWidth : begin;
  for (std::int64_t i = begin + thread * kWidth; i < rest; i += kThreads * kWidth) {
    auto vector = *reinterpret_cast<const Vector<T>*>(from + i);
    for (T& value : vector.values) {
      value = scaled(value, batch.scale);
    }
    *reinterpret_cast<Vector<T>*>(to + i) = vector;
  }
  for (std::int64_t i = rest + thread; i < end; i += kThreads) {
    to[i] = scaled(from[i], batch.scale);
  }
}

}  // namespace minidp::cuda
