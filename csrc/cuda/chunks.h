// How a bucket's copy is cut into pieces of work: plain C++, testable without CUDA.
//
// The unit of work is a *chunk*: a run of elements of one slot, bounded in bytes. A
// grid of chunks, not of slots, keeps all of memory busy whether the bucket is one
// huge gradient or a thousand tiny ones.
#pragma once

#include <algorithm>
#include <cstdint>
#include <stdexcept>
#include <vector>

#ifdef __CUDACC__
#define MINIDP_HOST_DEVICE __host__ __device__ __forceinline__
#else
#define MINIDP_HOST_DEVICE inline
#endif

namespace minidp::cuda {

constexpr int kThreads = 256;  // per block
constexpr int kWarpThreads = 32;
constexpr int kWarps = kThreads / kWarpThreads;

// A block reads 256 threads * 16 bytes * 4 loads = 16 KiB in one go, so a full chunk is
// two rounds: a 25 MiB bucket becomes 800 blocks, six per SM of an H200 (132 SMs), which
// is what the 40 registers of the usual kernels let run there at once. Larger chunks
// leave SMs idle at the end of such a bucket, smaller ones pay the start of a block
// too often. Reasoned, not measured.
constexpr std::int64_t kChunkBytes = 32 * 1024;

// Up to here one warp copies a chunk (two rounds of 32 * 16 * 4 bytes) and eight chunks
// share a block: a whole block per bias would mostly be idle threads.
constexpr std::int64_t kSmallBytes = 4 * 1024;

struct Slot {
  std::int64_t offset;  // in elements of the buffer
  std::int64_t numel;
};

struct Chunk {
  std::int64_t buffer_begin;  // in elements, from the start of the buffer
  std::int64_t slot_begin;    // in elements, from the start of the slot
  std::int32_t slot;
  std::int32_t numel;  // 32 bits are enough: chunks are bounded
};

// One kernel launch: consecutive slots, as many as their pointers fit as parameters.
// Its chunks are consecutive too, the wide ones (a block each) before the small ones
// (a warp each). So a block finds its chunk by arithmetic, without another lookup.
struct Launch {
  std::int64_t first_slot;
  std::int64_t num_slots;
  std::int64_t first_chunk;
  std::int64_t num_wide;
  std::int64_t num_small;
};

struct Schedule {
  std::vector<Chunk> chunks;
  std::vector<Launch> launches;
};

// What one thread of a launch works on, and with how many others.
struct Team {
  std::int64_t chunk;  // index in the schedule; -1: nothing to do
  int thread;
  int num_threads;
};

MINIDP_HOST_DEVICE std::int64_t num_blocks(const Launch& launch) {
  return launch.num_wide + (launch.num_small + kWarps - 1) / kWarps;
}

MINIDP_HOST_DEVICE Team team_of(const Launch& launch, std::int64_t block, int thread) {
  if (block < launch.num_wide) {
    return {launch.first_chunk + block, thread, kThreads};
  }
  const std::int64_t small =
      (block - launch.num_wide) * kWarps + thread / kWarpThreads;
  if (small >= launch.num_small) {
    return {-1, 0, kWarpThreads};
  }
  return {launch.first_chunk + launch.num_wide + small, thread % kWarpThreads,
          kWarpThreads};
}

// Cut one slot; small remainders join the small chunks.
inline void cut_slot(const Slot& slot, std::int32_t index, std::int64_t element_size,
                     std::vector<Chunk>& wide, std::vector<Chunk>& small) {
  // A power of two of bytes, so that every chunk of a slot is aligned like the first.
  const std::int64_t full = kChunkBytes / element_size;
  for (std::int64_t begin = 0; begin < slot.numel; begin += full) {
    const std::int64_t numel = std::min(full, slot.numel - begin);
    auto& list = numel * element_size <= kSmallBytes ? small : wide;
    list.push_back(
        {slot.offset + begin, begin, index, static_cast<std::int32_t>(numel)});
  }
}

// `element_size`: of the buffer, a power of two. `max_slots`: whose pointers fit in the
// parameters of one launch.
inline Schedule make_schedule(const std::vector<Slot>& slots, std::int64_t element_size,
                              std::int64_t max_slots) {
  if (slots.size() > INT32_MAX || element_size <= 0 || element_size > 16 ||
      (element_size & (element_size - 1)) != 0 || max_slots <= 0) {
    throw std::invalid_argument("make_schedule: impossible bucket");
  }
  Schedule schedule;
  const auto num_slots = static_cast<std::int64_t>(slots.size());
  for (std::int64_t first = 0; first < num_slots; first += max_slots) {
    const std::int64_t last = std::min(first + max_slots, num_slots);
    std::vector<Chunk> wide;
    std::vector<Chunk> small;
    for (std::int64_t k = first; k < last; ++k) {
      cut_slot(slots[k], static_cast<std::int32_t>(k), element_size, wide, small);
    }
    auto& chunks = schedule.chunks;
    schedule.launches.push_back({first, last - first,
                                 static_cast<std::int64_t>(chunks.size()),
                                 static_cast<std::int64_t>(wide.size()),
                                 static_cast<std::int64_t>(small.size())});
    chunks.insert(chunks.end(), wide.begin(), wide.end());
    chunks.insert(chunks.end(), small.begin(), small.end());
  }
  return schedule;
}

}  // namespace minidp::cuda
