// Copies of many tensors, as the parameters of kernel launches: plain C++, testable
// without CUDA.
#pragma once

#include <cstddef>
#include <cstdint>

#ifdef __CUDACC__
#define MINIDP_HOST_DEVICE __host__ __device__ __forceinline__
#else
#define MINIDP_HOST_DEVICE inline
#endif

namespace minidp::cuda {

constexpr int kThreads = 256;  // per block
constexpr std::int64_t kBlockElements = 8 * kThreads;

// One tensor.
struct Row {
  void* to;
  const void* from;
  std::int64_t numel;
  std::int64_t first_block;  // of the launch
};

// More would not fit: a launch may have 4096 bytes of parameters on every device.
constexpr int kMaxRows = 120;

// One launch. The addresses are parameters, because gradients lie elsewhere in every
// step: parameters are taken when the launch is issued and are in place when it runs. A
// table in device memory would have to be copied first, and kept until that is done.
struct Batch {
  double scale;
  std::int64_t num_blocks;
  int num_rows;
  Row rows[kMaxRows];
};
static_assert(sizeof(Batch) <= 4096);

// Calls `run(batch)` for batches of all rows that have elements.
//
// row_at(n): the n-th row, its first block aside.
template <typename RowAt, typename Run>
void for_batches(std::size_t num_rows, double scale, RowAt row_at, Run run) {
  Batch batch{scale, 0, 0, {}};
  for (std::size_t n = 0; n < num_rows; ++n) {
    Row row = row_at(n);
    if (row.numel == 0) {
      continue;
    }
    if (batch.num_rows == kMaxRows) {
      run(batch);
      batch.num_rows = 0;
      batch.num_blocks = 0;
    }
    row.first_block = batch.num_blocks;
    batch.num_blocks += (row.numel + kBlockElements - 1) / kBlockElements;
    batch.rows[batch.num_rows++] = row;
  }
  if (batch.num_rows > 0) {
    run(batch);
  }
}

// The tensor that a block works on: the last one that begins at or before it.
MINIDP_HOST_DEVICE const Row& row_of(const Batch& batch, std::int64_t block) {
  int low = 0;
  int high = batch.num_rows;
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    (batch.rows[middle].first_block <= block ? low : high) = middle;
  }
  return batch.rows[low];
}

}  // namespace minidp::cuda
