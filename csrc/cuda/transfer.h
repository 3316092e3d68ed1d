// What one thread of a flatten or unflatten kernel does.
//
// No thread depends on another, so a host program can run them one after the other:
// that is how tests check this file, bit for bit, on machines without a GPU.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <cstring>
#include <type_traits>

#include "chunks.h"

namespace minidp::cuda {

// ---------------------------------------------------------------------- arithmetic

// The type torch computes in.
template <typename T>
using Math = std::conditional_t<std::is_same_v<T, double>, double, float>;

MINIDP_HOST_DEVICE float widen(float x) { return x; }
MINIDP_HOST_DEVICE double widen(double x) { return x; }
MINIDP_HOST_DEVICE float widen(__half x) { return __half2float(x); }
MINIDP_HOST_DEVICE float widen(__nv_bfloat16 x) { return __bfloat162float(x); }

// To the nearest, ties to even. A double becomes a half by way of float, with two
// roundings: torch does so, and a copy here must have the bits of a copy there.
template <typename T, typename M>
MINIDP_HOST_DEVICE T narrow(M x) {
  if constexpr (std::is_same_v<T, __half>) {
    return __float2half_rn(static_cast<float>(x));
  } else if constexpr (std::is_same_v<T, __nv_bfloat16>) {
    return __float2bfloat16_rn(static_cast<float>(x));
  } else {
    return static_cast<T>(x);
  }
}

template <typename Dst, typename Src>
MINIDP_HOST_DEVICE Dst convert(Src x) {
  if constexpr (std::is_same_v<Src, Dst>) {
    return x;  // not through float: keeps the bits of a NaN
  } else {
    return narrow<Dst>(widen(x));
  }
}

// What happens to each element on its way, and what a thread remembers of it.
template <typename Src, typename Dst, bool kStats>
struct Transfer {
  Math<Src> scale;
  bool scales;  // a multiplication by one would still change the bits of a NaN
  double squares = 0;
  bool nonfinite = false;

  MINIDP_HOST_DEVICE explicit Transfer(double factor)
      : scale(static_cast<Math<Src>>(factor)), scales(factor != 1.0) {}

  MINIDP_HOST_DEVICE Dst operator()(Src x) {
    const Dst y = convert<Dst>(scales ? narrow<Src>(widen(x) * scale) : x);
    if constexpr (kStats) {
      note(static_cast<double>(widen(y)));
    }
    return y;
  }

  MINIDP_HOST_DEVICE void note(double y) {
    squares += y * y;
    nonfinite |= !(y - y == 0);  // the difference is NaN for infinities and NaN
  }
};

// Bits that are moved, whatever they mean (complex numbers, integers).
template <typename Word>
struct RawTransfer {
  MINIDP_HOST_DEVICE explicit RawTransfer(double /*factor*/) {}
  MINIDP_HOST_DEVICE Word operator()(Word x) { return x; }
};

template <typename Src, typename Dst, bool kStats>
using TransferOf = std::conditional_t<std::is_integral_v<Src>, RawTransfer<Src>,
                                      Transfer<Src, Dst, kStats>>;

// -------------------------------------------------------------------------- memory

// Only nvcc's device pass knows the pragma, the others warn about it.
#ifdef __CUDA_ARCH__
#define MINIDP_UNROLL _Pragma("unroll")
#else
#define MINIDP_UNROLL
#endif

// N neighbouring elements that travel in one memory access.
template <typename T, int N>
struct alignas(sizeof(T) * N) Pack {
  T values[N];
};

// Tests watch the accesses of the host version through this.
#ifndef MINIDP_ON_ACCESS
#define MINIDP_ON_ACCESS(pointer, bytes)
#endif

// The built-in type of one access: `kBytes` of it in words of up to `kWord` bytes. Two
// doubles as four words of four bytes would be put together and taken apart again, and
// then the compiler gives up on a single store.
template <int kWord, int kBytes>
struct AccessOf : AccessOf<(kBytes < 4 ? kBytes : 4), kBytes> {};  // of small words
template <>
struct AccessOf<1, 1> {
  using type = unsigned char;
};
template <>
struct AccessOf<2, 2> {
  using type = unsigned short;
};
template <>
struct AccessOf<4, 4> {
  using type = unsigned int;
};
template <>
struct AccessOf<8, 8> {
  using type = unsigned long long;
};
template <>
struct AccessOf<4, 8> {
  using type = uint2;
};
template <>
struct AccessOf<4, 16> {
  using type = uint4;
};
template <>
struct AccessOf<8, 16> {
  using type = ulonglong2;
};

template <typename T, int N>
using Access = typename AccessOf<sizeof(T), sizeof(T) * N>::type;

// One access of the whole width. Through the built-in vector types: a copy of a struct
// of halves may be compiled to one access per half.
template <typename T, int N>
MINIDP_HOST_DEVICE Pack<T, N> load(const T* from) {
  Pack<T, N> pack;
#ifdef __CUDA_ARCH__
  const auto bits = *reinterpret_cast<const Access<T, N>*>(from);
  std::memcpy(&pack, &bits, sizeof(pack));
#else
  MINIDP_ON_ACCESS(from, sizeof(pack));
  std::memcpy(static_cast<void*>(&pack), from, sizeof(pack));
#endif
  return pack;
}

template <typename T, int N>
MINIDP_HOST_DEVICE void store(T* to, const Pack<T, N>& pack) {
#ifdef __CUDA_ARCH__
  Access<T, N> bits;
  std::memcpy(&bits, &pack, sizeof(pack));
  *reinterpret_cast<Access<T, N>*>(to) = bits;
#else
  MINIDP_ON_ACCESS(to, sizeof(pack));
  std::memcpy(static_cast<void*>(to), &pack, sizeof(pack));
#endif
}

// Copy `count` packs of N elements, interleaved over the threads of a team. All loads
// of a round are issued before its first store, so kUnroll of them are in flight.
template <int N, int kUnroll, typename Src, typename Dst, typename Op>
MINIDP_HOST_DEVICE void copy_packs(const Src* src, Dst* dst, int count, Op& op,
                                   int thread, int num_threads) {
  for (int first = thread; first < count; first += kUnroll * num_threads) {
    Pack<Src, N> packs[kUnroll];
    MINIDP_UNROLL
    for (int u = 0; u < kUnroll; ++u) {
      const int i = first + u * num_threads;
      if (i < count) {
        packs[u] = load<Src, N>(src + static_cast<std::int64_t>(i) * N);
      }
    }
    MINIDP_UNROLL
    for (int u = 0; u < kUnroll; ++u) {
      const int i = first + u * num_threads;
      if (i < count) {
        Pack<Dst, N> result;
        MINIDP_UNROLL
        for (int e = 0; e < N; ++e) {
          result.values[e] = op(packs[u].values[e]);
        }
        store<Dst, N>(dst + static_cast<std::int64_t>(i) * N, result);
      }
    }
  }
}

// Elements from `pointer` to the next boundary of a pack of N.
template <int N, typename T>
MINIDP_HOST_DEVICE int elements_to_boundary(const T* pointer) {
  const auto position = reinterpret_cast<std::uintptr_t>(pointer) / sizeof(T);
  return static_cast<int>((N - position % N) % N);
}

// Copy a chunk of `n` elements; every thread of the team calls this.
//
// A pack has as many elements as make 16 bytes on the side with the larger elements.
// The other side moves the same elements in fewer bytes, still without gaps in a warp.
// Slots follow each other without padding, gradients start at allocations: with
// different alignments no pack fits both sides, and elements travel one by one. They
// still coalesce, what they need is more of them in flight.
template <typename Src, typename Dst, typename Op>
MINIDP_HOST_DEVICE void copy_chunk(const Src* src, Dst* dst, int n, Op& op, int thread,
                                   int num_threads) {
  constexpr int N = 16 / (sizeof(Src) > sizeof(Dst) ? sizeof(Src) : sizeof(Dst));
  int head = elements_to_boundary<N>(src);
  if (head != elements_to_boundary<N>(dst)) {
    copy_packs<1, 8>(src, dst, n, op, thread, num_threads);
    return;
  }
  head = head < n ? head : n;
  const int packs = (n - head) / N;
  const int tail = head + packs * N;
  copy_packs<1, 1>(src, dst, head, op, thread, num_threads);
  copy_packs<N, 4>(src + head, dst + head, packs, op, thread, num_threads);
  copy_packs<1, 1>(src + tail, dst + tail, n - tail, op, thread, num_threads);
}

// ---------------------------------------------------------------------- one thread

// What a launch is told, apart from the addresses outside the buffer.
struct Work {
  const Chunk* chunks;
  void* buffer;
  Launch launch;
  double scale;
  double* squares;
  long long* lowest_nonfinite;
  bool into_buffer;
};

// The share of one thread; `outside[k]` is the gradient of the launch's k-th slot, null
// to skip it. Returns the slot, -1 without one.
template <typename Src, typename Dst, typename Op>
MINIDP_HOST_DEVICE int run_thread(const Work& work, void* const* outside,
                                  std::int64_t block, int thread, Op& op) {
  const Team team = team_of(work.launch, block, thread);
  if (team.chunk < 0) {
    return -1;
  }
  const Chunk chunk = work.chunks[team.chunk];
  void* const gradient = outside[chunk.slot - work.launch.first_slot];
  if (gradient == nullptr) {
    return -1;
  }
  const Src* src;
  Dst* dst;
  if (work.into_buffer) {
    src = static_cast<const Src*>(gradient) + chunk.slot_begin;
    dst = static_cast<Dst*>(work.buffer) + chunk.buffer_begin;
  } else {
    src = static_cast<const Src*>(work.buffer) + chunk.buffer_begin;
    dst = static_cast<Dst*>(gradient) + chunk.slot_begin;
  }
  copy_chunk(src, dst, chunk.numel, op, team.thread, team.num_threads);
  return chunk.slot;
}

}  // namespace minidp::cuda
