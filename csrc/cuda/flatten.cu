// See flatten.h. What a thread does is in transfer.h, what a block gets in chunks.h.
#include "flatten.h"

#include <climits>
#include <cstring>

#include "transfer.h"

namespace minidp::cuda {
namespace {

// The gradients' addresses are new every step. As kernel parameters they are part of
// the launch: taken when it is issued, in place when it runs. An asynchronous copy from
// pinned memory would be a second operation in front of every kernel, and its memory
// must not be rewritten before the copy has run: an event to wait for or a ring of
// tables per bucket. From pageable memory the copy would wait for the stream.
template <int kCapacity>
struct Arguments {
  Work work;
  void* outside[kCapacity];
};

constexpr int kLargeCapacity = static_cast<int>(kMaxSlots);
// Parameters are copied with every launch, used or not: most buckets need few.
constexpr int kSmallCapacity = 480;

static_assert(sizeof(Arguments<kLargeCapacity>) <= kParameterBytes);
static_assert(sizeof(Arguments<kSmallCapacity>) <= 4096);

// ------------------------------------------------------------------------ on the GPU

__device__ void reduce_warp(double& squares, int& lowest) {
  for (int distance = kWarpThreads / 2; distance > 0; distance /= 2) {
    squares += __shfl_down_sync(0xffffffffu, squares, distance);
    lowest = min(lowest, __shfl_down_sync(0xffffffffu, lowest, distance));
  }
}

// One atomic operation per block; every thread of the block has to come here.
__device__ void add_statistics(const Work& work, double squares, int lowest) {
  __shared__ double squares_of[kWarps];
  __shared__ int lowest_of[kWarps];
  reduce_warp(squares, lowest);
  if (threadIdx.x % kWarpThreads == 0) {
    squares_of[threadIdx.x / kWarpThreads] = squares;
    lowest_of[threadIdx.x / kWarpThreads] = lowest;
  }
  __syncthreads();
  if (threadIdx.x != 0) {
    return;
  }
  for (int warp = 1; warp < kWarps; ++warp) {
    squares += squares_of[warp];
    lowest = min(lowest, lowest_of[warp]);
  }
  atomicAdd(work.squares, squares);
  if (lowest != INT_MAX) {
    atomicMin(work.lowest_nonfinite, static_cast<long long>(lowest));
  }
}

template <typename Src, typename Dst, bool kStats, int kCapacity>
__global__ void __launch_bounds__(kThreads)
    transfer_kernel(const __grid_constant__ Arguments<kCapacity> arguments) {
  TransferOf<Src, Dst, kStats> transfer(arguments.work.scale);
  [[maybe_unused]] const int slot =
      run_thread<Src, Dst>(arguments.work, arguments.outside, blockIdx.x,
                           static_cast<int>(threadIdx.x), transfer);
  if constexpr (kStats) {
    add_statistics(arguments.work, transfer.squares,
                   transfer.nonfinite ? slot : INT_MAX);
  }
}

// ----------------------------------------------------------------------- on the host

template <typename Src, typename Dst, bool kStats, int kCapacity>
cudaError_t start(const Work& work, void* const* outside, cudaStream_t stream) {
  Arguments<kCapacity> arguments;  // the unused pointers stay unset: nobody reads them
  arguments.work = work;
  std::memcpy(arguments.outside, outside, work.launch.num_slots * sizeof(void*));
  const auto blocks = static_cast<unsigned>(num_blocks(work.launch));
  transfer_kernel<Src, Dst, kStats, kCapacity>
      <<<blocks, kThreads, 0, stream>>>(arguments);
  return cudaGetLastError();
}

template <typename Src, typename Dst, bool kStats>
cudaError_t run_all(const Bucket& bucket, Work work, void* const* outside,
                    cudaStream_t stream) {
  for (std::int64_t i = 0; i < bucket.num_launches; ++i) {
    work.launch = bucket.launches[i];
    if (work.launch.num_slots > kMaxSlots || num_blocks(work.launch) > INT_MAX) {
      return cudaErrorInvalidValue;
    }
    if (num_blocks(work.launch) == 0) {
      continue;  // all its slots are empty, and an empty grid is an error
    }
    void* const* mine = outside + work.launch.first_slot;
    const cudaError_t error =
        work.launch.num_slots <= kSmallCapacity
            ? start<Src, Dst, kStats, kSmallCapacity>(work, mine, stream)
            : start<Src, Dst, kStats, kLargeCapacity>(work, mine, stream);
    if (error != cudaSuccess) {
      return error;
    }
  }
  return cudaSuccess;
}

template <typename Src, typename Dst>
cudaError_t choose_stats(const Bucket& bucket, const Work& work, void* const* outside,
                         cudaStream_t stream) {
  if constexpr (!std::is_integral_v<Src>) {
    if (work.squares != nullptr) {
      return run_all<Src, Dst, true>(bucket, work, outside, stream);
    }
  }
  return run_all<Src, Dst, false>(bucket, work, outside, stream);
}

template <typename Src>
cudaError_t choose_dst(Type dst, const Bucket& bucket, const Work& work,
                       void* const* outside, cudaStream_t stream) {
  switch (dst) {
    case Type::kFloat:
      return choose_stats<Src, float>(bucket, work, outside, stream);
    case Type::kDouble:
      return choose_stats<Src, double>(bucket, work, outside, stream);
    case Type::kHalf:
      return choose_stats<Src, __half>(bucket, work, outside, stream);
    case Type::kBFloat16:
      return choose_stats<Src, __nv_bfloat16>(bucket, work, outside, stream);
    default:
      return cudaErrorInvalidValue;
  }
}

cudaError_t run_numbers(Type src, Type dst, const Bucket& bucket, const Work& work,
                        void* const* outside, cudaStream_t stream) {
  switch (src) {
    case Type::kFloat:
      return choose_dst<float>(dst, bucket, work, outside, stream);
    case Type::kDouble:
      return choose_dst<double>(dst, bucket, work, outside, stream);
    case Type::kHalf:
      return choose_dst<__half>(dst, bucket, work, outside, stream);
    case Type::kBFloat16:
      return choose_dst<__nv_bfloat16>(dst, bucket, work, outside, stream);
    default:
      return cudaErrorInvalidValue;
  }
}

cudaError_t run_raw(Type type, const Bucket& bucket, const Work& work,
                    void* const* outside, cudaStream_t stream) {
  switch (type) {
    case Type::kRaw1:
      return choose_stats<std::uint8_t, std::uint8_t>(bucket, work, outside, stream);
    case Type::kHalf:
    case Type::kBFloat16:
    case Type::kRaw2:
      return choose_stats<std::uint16_t, std::uint16_t>(bucket, work, outside, stream);
    case Type::kFloat:
    case Type::kRaw4:
      return choose_stats<std::uint32_t, std::uint32_t>(bucket, work, outside, stream);
    case Type::kDouble:
    case Type::kRaw8:
      return choose_stats<std::uint64_t, std::uint64_t>(bucket, work, outside, stream);
  }
  return cudaErrorInvalidValue;
}

cudaError_t run(Type src, Type dst, const Bucket& bucket, const Work& work,
                void* const* outside, cudaStream_t stream) {
  if ((work.squares == nullptr) != (work.lowest_nonfinite == nullptr)) {
    return cudaErrorInvalidValue;
  }
  if (src == dst && work.scale == 1.0 && work.squares == nullptr) {
    return run_raw(src, bucket, work, outside, stream);
  }
  return run_numbers(src, dst, bucket, work, outside, stream);
}

}  // namespace

cudaError_t flatten(const Bucket& bucket, const void* const* gradients, Type type,
                    double scale, const Stats& stats, cudaStream_t stream) {
  const Work work{bucket.chunks, bucket.buffer,          {}, scale,
                  stats.squares, stats.lowest_nonfinite, true};
  // The table is shared with unflatten, which writes; flatten only reads through it.
  void* const* outside = const_cast<void* const*>(gradients);
  return run(type, bucket.type, bucket, work, outside, stream);
}

cudaError_t unflatten(const Bucket& bucket, void* const* gradients, Type type,
                      cudaStream_t stream) {
  const Work work{bucket.chunks, bucket.buffer, {}, 1.0, nullptr, nullptr, false};
  return run(bucket.type, type, bucket, work, gradients, stream);
}

}  // namespace minidp::cuda
