// The protocol of csrc/shared_memory.h under a sanitizer, with threads for ranks: tsan.sh and
// asan.sh run it. ThreadSanitizer knows memory by its address, so here a file is mapped once, for
// all threads.
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <barrier>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <mutex>
#include <thread>

namespace {

void* map_once(void* at, size_t size, int protection, int flags, int file, off_t offset) {
  static std::mutex mutex;
  static auto* known = new std::map<ino_t, void*>;
  struct stat facts{};
  fstat(file, &facts);
  const std::lock_guard lock(mutex);
  void*& found = (*known)[facts.st_ino];
  if (found == nullptr) {
    found = mmap(at, size, protection, flags, file, offset);
  }
  return found;
}

}  // namespace

#define mmap map_once
#define munmap(start, size) static_cast<void>(start)  // other threads may read it
#include "../../csrc/shared_memory.cpp"

// Without the rest of the extension.
void minidp::copy_past_cache(void* to, const void* from, size_t nbytes) {
  std::memcpy(to, from, nbytes);
}

// Called for sums that are scaled: none here.
void minidp::copy_row(void*, const void*, int64_t, at::ScalarType, double, bool) {
  std::abort();
}

namespace {

constexpr int kRounds = 60;

int32_t rows_of(int rank) {
  return 1 + rank % 2;
}

// The last one has an order of its own: every second rank brings two rows.
std::vector<minidp::BucketShape> buckets_of(int size) {
  std::vector<int32_t> counts;
  std::vector<int32_t> postfix;
  int32_t rows = 0;
  for (int rank = 0; rank < size; ++rank) {
    counts.push_back(rows_of(rank));
    for (int32_t row = 0; row < rows_of(rank); ++row) {
      postfix.push_back(rows++);
    }
  }
  postfix.insert(postfix.end(), rows - 1, minidp::SumOrder::kAdd);
  const auto order = std::make_shared<minidp::SumOrder>(counts, postfix);
  return {{1, c10::kInt}, {1000, c10::kInt}, {200'003, c10::kInt}, {150'001, c10::kInt, order}};
}

struct Address {
  int descriptor;
  uint64_t token;
};

uint32_t value(int rank, int round, int64_t k) {
  return static_cast<uint32_t>(1000 * rank + 100'000 * round + k % 997);
}

void fail(const char* what, int rank, int round) {
  std::printf("rank %d, round %d: %s\n", rank, round, what);
  std::exit(1);
}

void train(int rank, int size, std::vector<Address>& addresses, std::barrier<>& barrier) {
  const auto buckets = buckets_of(size);
  minidp::SharedMemory memory(rank, size, buckets);
  addresses[rank] = {memory.descriptor(), memory.token()};
  barrier.arrive_and_wait();
  for (int peer = 0; peer < size; ++peer) {
    if (peer != rank) {
      const auto path = "/proc/self/fd/" + std::to_string(addresses[peer].descriptor);
      memory.connect(peer, path, addresses[peer].token);
    }
  }
  barrier.arrive_and_wait();
  for (int round = 0; round < kRounds; ++round) {
    const size_t last = buckets.size();
    for (size_t b = 0; b < last; ++b) {
      for (int32_t row = 0; row < (buckets[b].order ? rows_of(rank) : 1); ++row) {
        auto* values = static_cast<uint32_t*>(memory.data(b, row));
        for (int64_t k = 0; k < buckets[b].numel; ++k) {
          values[k] = value(rank, round, k) + 7 * row;
        }
      }
      memory.post(b);
      memory.advance(0);
    }
    for (size_t b = 0; b < last; ++b) {
      const auto numel = buckets[b].numel;
      // Every other time this rank's own sums go to two tiles.
      std::vector<uint32_t> tile(numel);
      minidp::Tiles tiles;
      const bool has_tiles = (round + rank) % 2 == 0;
      tiles.add(tile.data(), 0);
      tiles.add(tile.data() + numel / 3, numel / 3 * 4);
      while (!memory.wait(b, 0.05, has_tiles ? &tiles : nullptr)) {
      }
      auto* values = static_cast<uint32_t*>(memory.data(b));
      for (const auto& [from, to] : tiles.written) {
        std::copy(tile.begin() + from / 4, tile.begin() + to / 4, values + from / 4);
      }
      for (int64_t k = 0; k < numel; ++k) {
        uint32_t sum = 0;
        for (int each = 0; each < size; ++each) {
          for (int32_t row = 0; row < (buckets[b].order ? rows_of(each) : 1); ++row) {
            sum += value(each, round, k) + 7 * row;
          }
        }
        if (values[k] != sum) {
          fail("a wrong sum", rank, round);
        }
      }
    }
  }
  barrier.arrive_and_wait();
}

}  // namespace

int main() {
  for (int size = 2; size <= 4; ++size) {
    std::vector<Address> addresses(size);
    std::barrier<> barrier(size);
    std::vector<std::thread> ranks;
    for (int rank = 0; rank < size; ++rank) {
      ranks.emplace_back(train, rank, size, std::ref(addresses), std::ref(barrier));
    }
    for (auto& rank : ranks) {
      rank.join();
    }
  }
  std::puts("shared memory: no wrong sum");
}
