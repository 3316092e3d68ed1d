// Chunks and threads of the kernels, run one after the other on the CPU: for tests on
// machines without a GPU, which load this as a shared library. Not part of minidp.
#include <algorithm>
#include <cstdint>

#include "chunks.h"

#if __has_include(<cuda_fp16.h>)
#define MINIDP_HAS_TRANSFER

// What a GPU would fault on, and what it would be slow at.
struct Accesses {
  std::int64_t misaligned;
  std::int64_t wide;    // of 16 bytes
  std::int64_t narrow;  // of fewer
};
static Accesses accesses;
static void on_access(const void* pointer, std::uintptr_t bytes) {
  accesses.misaligned += reinterpret_cast<std::uintptr_t>(pointer) % bytes != 0;
  (bytes == 16 ? accesses.wide : accesses.narrow) += 1;
}
#define MINIDP_ON_ACCESS(pointer, bytes) on_access(pointer, bytes)
#include "transfer.h"
#endif

using namespace minidp::cuda;

extern "C" {

// Tells the sizes; fills the arrays unless they are null.
void make(const Slot* slots, std::int64_t num_slots, std::int64_t element_size,
          std::int64_t max_slots, std::int64_t* sizes, Chunk* chunks,
          Launch* launches) {
  const auto schedule =
      make_schedule({slots, slots + num_slots}, element_size, max_slots);
  sizes[0] = static_cast<std::int64_t>(schedule.chunks.size());
  sizes[1] = static_cast<std::int64_t>(schedule.launches.size());
  if (chunks != nullptr) {
    std::copy(schedule.chunks.begin(), schedule.chunks.end(), chunks);
    std::copy(schedule.launches.begin(), schedule.launches.end(), launches);
  }
}

std::int64_t blocks_of(const Launch* launch) { return num_blocks(*launch); }

// kThreads teams per block.
void teams_of(const Launch* launch, Team* teams) {
  for (std::int64_t i = 0; i < num_blocks(*launch) * kThreads; ++i) {
    teams[i] = team_of(*launch, i / kThreads, static_cast<int>(i % kThreads));
  }
}

}  // extern "C"

#ifdef MINIDP_HAS_TRANSFER

// One transfer: what flatten.cu's host side is told, and its statistics.
struct Run {
  const Slot* slots;
  std::int64_t num_slots;
  std::int64_t element_size;
  std::int64_t max_slots;
  void* buffer;
  void* const* gradients;
  double scale;
  std::int64_t into_buffer;
  double squares;
  std::int64_t lowest;
  Accesses accesses;
};

namespace {

template <typename Src, typename Dst, bool kStats>
void run_thread_of(Run& run, const Work& work, std::int64_t block, int thread) {
  TransferOf<Src, Dst, kStats> transfer(run.scale);
  [[maybe_unused]] const std::int64_t slot = run_thread<Src, Dst>(
      work, run.gradients + work.launch.first_slot, block, thread, transfer);
  if constexpr (kStats) {
    run.squares += transfer.squares;
    run.lowest = transfer.nonfinite ? std::min(run.lowest, slot) : run.lowest;
  }
}

template <typename Src, typename Dst, bool kStats>
void run_all(Run& run) {
  const auto schedule = make_schedule({run.slots, run.slots + run.num_slots},
                                      run.element_size, run.max_slots);
  for (const Launch& launch : schedule.launches) {
    const Work work{schedule.chunks.data(), run.buffer, launch, run.scale, nullptr,
                    nullptr,                run.into_buffer != 0};
    for (std::int64_t i = 0; i < num_blocks(launch) * kThreads; ++i) {
      run_thread_of<Src, Dst, kStats>(run, work, i / kThreads,
                                      static_cast<int>(i % kThreads));
    }
  }
}

template <typename Src>
void run_to(char dst, Run& run) {
  switch (dst) {
    case 'f':
      return run_all<Src, float, true>(run);
    case 'd':
      return run_all<Src, double, true>(run);
    case 'h':
      return run_all<Src, __half, true>(run);
    default:
      return run_all<Src, __nv_bfloat16, true>(run);
  }
}

}  // namespace

extern "C" void transfer(char src, char dst, Run* run) {
  accesses = {};
  switch (src) {
    case '1':
      run_all<std::uint8_t, std::uint8_t, false>(*run);
      break;
    case '2':
      run_all<std::uint16_t, std::uint16_t, false>(*run);
      break;
    case '4':
      run_all<std::uint32_t, std::uint32_t, false>(*run);
      break;
    case '8':
      run_all<std::uint64_t, std::uint64_t, false>(*run);
      break;
    case 'f':
      run_to<float>(dst, *run);
      break;
    case 'd':
      run_to<double>(dst, *run);
      break;
    case 'h':
      run_to<__half>(dst, *run);
      break;
    default:
      run_to<__nv_bfloat16>(dst, *run);
  }
  run->accesses = accesses;
}

#endif
