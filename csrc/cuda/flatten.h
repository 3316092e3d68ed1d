// Flatten and unflatten on the GPU: one kernel launch per bucket. No torch in here.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "chunks.h"

namespace minidp::cuda {

// The bytes of one kernel's parameters.
#if CUDART_VERSION >= 12010
constexpr std::int64_t kParameterBytes = 32764;  // on sm_70 and later
#else
constexpr std::int64_t kParameterBytes = 4096;
#endif

// Slots whose pointers fit beside the other parameters (flatten.cu checks the sum).
constexpr std::int64_t kMaxSlots = (kParameterBytes - 128) / 8;

enum class Type {
  kFloat,
  kDouble,
  kHalf,
  kBFloat16,
  // Words of so many bytes whose meaning does not matter; copied, never converted.
  kRaw1,
  kRaw2,
  kRaw4,
  kRaw8,
};

// A bucket: `chunks` is device memory, the rest is read by the caller's thread.
struct Bucket {
  void* buffer;
  Type type;
  const Chunk* chunks;     // the schedule's chunks
  const Launch* launches;  // made with max_slots <= kMaxSlots
  std::int64_t num_launches;
};

// Device memory, initialised by the caller. Both or none.
struct Stats {
  double* squares = nullptr;              // += the sum of squares of what is written
  long long* lowest_nonfinite = nullptr;  // = min(itself, slots with inf or NaN)
};

// buffer[slot k] = gradients[k] * scale for all k with a non-null gradient.
//
// In the source's opmath type; the product is rounded to the source's type, then
// converted. A scale of one copies. `gradients` is an array in host memory that may be
// reused as soon as the call returns. The order in which `squares` is summed up, and so
// its last bits, change from call to call.
cudaError_t flatten(const Bucket& bucket, const void* const* gradients, Type type,
                    double scale, const Stats& stats, cudaStream_t stream);

// gradients[k] = buffer[slot k], converted, for all k with a non-null gradient.
cudaError_t unflatten(const Bucket& bucket, void* const* gradients, Type type,
                      cudaStream_t stream);

}  // namespace minidp::cuda
