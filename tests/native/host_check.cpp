// The kernel's threads, run one after the other on the CPU: for tests on machines
// without a GPU, which load this as a shared library. Not part of minidp.
#include <cstdint>

#include "rows.h"

#if __has_include(<cuda_fp16.h>)
#define MINIDP_HAS_COPY
#include "scaled_copy.h"
#endif

using namespace minidp::cuda;

// What tests pass and get; `rows` are those that the extension would make of tensors.
struct Run {
  const Row* rows;
  std::int64_t num_rows;
  double scale;
  std::int64_t num_launches;
  std::int64_t num_blocks;
  std::int64_t most_rows;  // of a launch
};

namespace {

template <typename OnBatch>
void run_all(Run& run, OnBatch on_batch) {
  const auto row_at = [&](std::size_t n) { return run.rows[n]; };
  for_batches(run.num_rows, run.scale, row_at, [&](const Batch& batch) {
    run.num_launches += 1;
    run.num_blocks += batch.num_blocks;
    run.most_rows = batch.num_rows > run.most_rows ? batch.num_rows : run.most_rows;
    on_batch(batch);
  });
}

}  // namespace

extern "C" {

int threads_per_block() {
  return kThreads;
}
std::int64_t elements_per_block() {
  return kBlockElements;
}
int rows_per_launch() {
  return kMaxRows;
}

// Copies nothing: which row every block of every launch finds, as its number in
// `tags`, which the rows carry in `to`.
void plan(Run* run, std::int64_t* tags, std::int64_t* begins) {
  std::int64_t n = 0;
  run_all(*run, [&](const Batch& batch) {
    for (std::int64_t block = 0; block < batch.num_blocks; ++block, ++n) {
      const Row& row = row_of(batch, block);
      tags[n] = static_cast<std::int64_t>(reinterpret_cast<std::uintptr_t>(row.to));
      begins[n] = (block - row.first_block) * kBlockElements;
    }
  });
}

}  // extern "C"

#ifdef MINIDP_HAS_COPY

namespace {

template <typename T>
void copy_as(Run& run) {
  run_all(run, [](const Batch& batch) {
    for (std::int64_t block = 0; block < batch.num_blocks; ++block) {
      for (int thread = 0; thread < kThreads; ++thread) {
        run_thread<T>(batch, block, thread);
      }
    }
  });
}

}  // namespace

extern "C" void copy(char type, Run* run) {
  switch (type) {
    case 'f':
      return copy_as<float>(*run);
    case 'd':
      return copy_as<double>(*run);
    case 'h':
      return copy_as<__half>(*run);
    default:
      return copy_as<__nv_bfloat16>(*run);
  }
}

#endif
