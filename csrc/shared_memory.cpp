// Linux only: anonymous files and futexes.
#ifdef __linux__
#include "shared_memory.h"

#include <fcntl.h>
#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <climits>
#include <cstring>
#include <mutex>
#include <set>
#include <stdexcept>
#include <system_error>
#include <type_traits>

#include "adder.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace minidp {
namespace {

constexpr int64_t kPage = 4096;
constexpr int64_t kLine = 64;
constexpr int64_t kPieceBytes = 128 * 1024;  // a piece of two ranks stays in the L2 cache
constexpr int kSpins = 2000;                 // some 20 to 50 microseconds
constexpr int64_t kBlock = 1024;             // elements whose sum stays in the L1 cache
constexpr int64_t kStack = 8 * kBlock;       // elements: for 8 sums at once, or shorter ones

int64_t round_up(int64_t n, int64_t unit) {
  return (n + unit - 1) / unit * unit;
}

[[noreturn]] void fail(const std::string& what) {
  throw std::system_error(errno, std::generic_category(), what);
}

double now() {
  timespec time{};
  clock_gettime(CLOCK_MONOTONIC, &time);
  return static_cast<double>(time.tv_sec) + 1e-9 * static_cast<double>(time.tv_nsec);
}

void relax() {
#if defined(__x86_64__)
  _mm_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// The words are shared between processes: no FUTEX_PRIVATE_FLAG.
void sleep_on(const std::atomic<uint32_t>& word, uint32_t value, double seconds) {
  timespec limit{};
  limit.tv_sec = static_cast<time_t>(seconds);
  limit.tv_nsec = static_cast<long>((seconds - static_cast<double>(limit.tv_sec)) * 1e9);
  syscall(SYS_futex, &word, FUTEX_WAIT, value, &limit, nullptr, 0);
}

void wake_all(const std::atomic<uint32_t>& word) {
  syscall(SYS_futex, &word, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

// Writes the sums of `n` elements to all ranks, or to `tiles` in place of rank `own`.
template <typename T>
void write_to_all(
    const std::vector<void*>& ranks,
    int64_t at,
    const T* sum,
    int64_t n,
    int own,
    const Tiles* tiles) {
  for (int64_t rank = 0; rank < static_cast<int64_t>(ranks.size()); ++rank) {
    if (rank == own && tiles != nullptr) {
      tiles->write(at * static_cast<int64_t>(sizeof(T)), sum, n * sizeof(T));
    } else {
      std::memcpy(static_cast<T*>(ranks[rank]) + at, sum, n * sizeof(T));
    }
  }
}

// Chunk c of Gloo's ring begins with the values of rank c - 1; then each lower rank adds its own,
// and rank c last.
template <typename T>
void sum_chunk(
    const std::vector<void*>& ranks,
    int64_t chunk,
    int64_t begin,
    int64_t end,
    int own,
    const Tiles* tiles) {
  const auto size = static_cast<int64_t>(ranks.size());
  alignas(kLine) T sum[kBlock];
  static_assert(sizeof(sum) <= Tiles::kMost);
  for (int64_t at = begin; at < end; at += kBlock) {
    const int64_t n = std::min(kBlock, end - at);
    for (int64_t k = 1; k <= size; ++k) {
      const auto* values = static_cast<const T*>(ranks[(chunk - k + size) % size]) + at;
      if (k == 1) {
        std::memcpy(sum, values, n * sizeof(T));
      } else {
        Adder<T>::add(sum, values, n);
      }
    }
    write_to_all(ranks, at, sum, n, own, tiles);
  }
}

// Writes the sums of `n` elements to rank `own`, or to `tiles`.
template <typename T>
void write_to_own(void* own, int64_t at, const T* sum, int64_t n, const Tiles* tiles) {
  if (tiles != nullptr) {
    tiles->write(at * static_cast<int64_t>(sizeof(T)), sum, n * sizeof(T));
  } else {
    std::memcpy(static_cast<T*>(own) + at, sum, n * sizeof(T));
  }
}

// Calls `write(at, sum, n)` for each part of the sum. Sums lie on a stack of blocks. A row that is
// added as soon as it comes need not be copied there.
template <typename T, typename Write>
void sum_rows(
    const std::vector<const T*>& rows,
    const SumOrder& order,
    int64_t begin,
    int64_t end,
    const Write& write) {
  alignas(kLine) T stack[kStack];
  const int64_t block = std::min(kBlock, kStack / order.depth / kLine * kLine);
  const auto& postfix = order.postfix;
  for (int64_t at = begin; at < end; at += block) {
    const int64_t n = std::min(block, end - at);
    T* next = stack;  // above the top
    for (size_t k = 0; k < postfix.size(); ++k) {
      if (postfix[k] == SumOrder::kAdd) {
        next -= block;
        Adder<T>::add(next - block, next, n);
      } else if (k + 1 < postfix.size() && postfix[k + 1] == SumOrder::kAdd) {
        Adder<T>::add(next - block, rows[postfix[k]] + at, n);
        ++k;
      } else {
        std::memcpy(next, rows[postfix[k]] + at, n * sizeof(T));
        next += block;
      }
    }
    write(at, stack, n);
  }
}

// How many elements of `bucket` each rank's chunk has: the arithmetic of Gloo's ring.
int64_t chunk_size(const BucketShape& bucket, int64_t size) {
  const auto item = static_cast<int64_t>(c10::elementSize(bucket.type));
  const int64_t bytes = bucket.numel * item;
  const int64_t largest = (1 << 20) / item * item;
  const int64_t segments = round_up(std::max((bytes + largest - 1) / largest, 2 * size), size);
  return round_up((bytes + segments - 1) / segments, item) / item * (segments / size);
}

template <typename F>
void with_type(c10::ScalarType type, F f) {
  switch (type) {
    case c10::kFloat:
      return f(float{});
    case c10::kDouble:
      return f(double{});
    case c10::kHalf:
      return f(c10::Half{});
    case c10::kBFloat16:
      return f(c10::BFloat16{});
    case c10::kByte:
    case c10::kChar:
      return f(uint8_t{});
    case c10::kInt:
      return f(uint32_t{});
    case c10::kLong:
      return f(uint64_t{});
    default:
      throw std::runtime_error(std::string("no sums in shared memory for ") + c10::toString(type));
  }
}

}  // namespace

SumOrder::SumOrder(std::vector<int32_t> rows_of_ranks, std::vector<int32_t> program)
    : counts(std::move(rows_of_ranks)), postfix(std::move(program)) {
  int32_t rows = 0;
  bool is_right = true;
  for (const int32_t count : counts) {
    is_right &= count > 0;
    most = std::max(most, count);
    rows += count;
  }
  std::set<int32_t> used;
  int32_t height = 0;
  for (const int32_t word : postfix) {
    is_right &= word == kAdd ? height > 1 : 0 <= word && word < rows && used.insert(word).second;
    height += word == kAdd ? -1 : 1;
    depth = std::max(depth, height);
  }
  is_right &= height == 1 && static_cast<int32_t>(used.size()) == rows;
  if (!is_right || depth > kMostDepth) {
    throw std::invalid_argument("not an order in which all rows are added up");
  }
}

int64_t row_stride(const BucketShape& bucket) {
  return round_up(bucket.numel * static_cast<int64_t>(c10::elementSize(bucket.type)), kLine);
}

void sum_in_given_order(
    const std::vector<void*>& ranks,
    const BucketShape& bucket,
    int64_t begin,
    int64_t end,
    int own,
    const Tiles* tiles) {
  const auto& order = *bucket.order;
  const int64_t stride = row_stride(bucket);
  with_type(bucket.type, [&](auto x) {
    using T = decltype(x);
    std::vector<const T*> rows;
    for (size_t rank = 0; rank < ranks.size(); ++rank) {
      for (int32_t row = 0; row < order.counts[rank]; ++row) {
        rows.push_back(
            reinterpret_cast<const T*>(static_cast<const char*>(ranks[rank]) + row * stride));
      }
    }
    sum_rows<T>(rows, order, begin, end, [&](int64_t at, const T* sum, int64_t n) {
      if (bucket.bounds.empty()) {
        write_to_all(ranks, at, sum, n, own, tiles);
      } else {
        write_to_own(ranks[own], at, sum, n, tiles);
      }
    });
  });
}

namespace {

// In one pass, which takes two thirds of the time: two ranks, one of which has its values in the
// tiles. The sum of two has no order.
template <typename T>
void sum_two(const T* other, int64_t begin, int64_t end, const Tiles& tiles) {
  const auto own_scale = static_cast<T>(tiles.own_scale);
  const auto scale = static_cast<T>(tiles.scale);
  constexpr int64_t kItem = sizeof(T);
  tiles.each(begin * kItem, end * kItem, [&](char* memory, int64_t at, int64_t nbytes) {
    auto* __restrict mine = reinterpret_cast<T*>(memory);
    const auto* __restrict more = other + at / kItem;
    const int64_t n = nbytes / kItem;
    for (int64_t i = 0; i < n; ++i) {
      mine[i] = (mine[i] * own_scale + more[i]) * scale;
    }
  });
}

}  // namespace

void sum_share(
    const std::vector<void*>& ranks,
    const BucketShape& bucket,
    int64_t begin,
    int64_t end,
    int own,
    const Tiles* tiles) {
  with_type(bucket.type, [&](auto x) {
    using T = decltype(x);
    if constexpr (std::is_floating_point_v<T>) {
      if (ranks.size() == 2 && tiles != nullptr && tiles->has_own) {
        sum_two(static_cast<const T*>(ranks[1 - own]), begin, end, *tiles);
        return;
      }
    }
    alignas(kLine) T sum[kBlock];
    alignas(kLine) T mine[kBlock];
    const bool has_own = tiles != nullptr && tiles->has_own;
    for (int64_t at = begin; at < end; at += kBlock) {
      const int64_t n = std::min(kBlock, end - at);
      if (has_own) {
        tiles->read(at * static_cast<int64_t>(sizeof(T)), mine, n * sizeof(T));
      }
      for (int rank = 0; rank < static_cast<int>(ranks.size()); ++rank) {
        const bool is_mine = has_own && rank == own;
        const T* values = is_mine ? mine : static_cast<const T*>(ranks[rank]) + at;
        if (rank == 0) {
          std::memcpy(sum, values, n * sizeof(T));
        } else {
          Adder<T>::add(sum, values, n);
        }
      }
      write_to_own(ranks[own], at, sum, n, tiles);
    }
  });
}

void sum_in_ring_order(
    const std::vector<void*>& ranks,
    const BucketShape& bucket,
    int64_t begin,
    int64_t end,
    int own,
    const Tiles* tiles) {
  const auto size = static_cast<int64_t>(ranks.size());
  const int64_t per_chunk = chunk_size(bucket, size);
  with_type(bucket.type, [&](auto x) {
    while (begin < end) {
      const int64_t chunk = begin / per_chunk;
      const int64_t stop = std::min(end, (chunk + 1) * per_chunk);
      sum_chunk<decltype(x)>(ranks, chunk, begin, stop, own, tiles);
      begin = stop;
    }
  });
}

// One bucket's round, on the board of rank 0. Each counter only grows, and may wrap around.
struct alignas(kLine) SharedMemory::Counters {
  std::atomic<uint32_t> posted;    // ranks, of all rounds
  std::atomic<uint32_t> claimed;   // pieces, of all rounds
  std::atomic<uint32_t> done;      // pieces, of all rounds
  std::atomic<uint32_t> events;    // futex: all ranks have posted, or the round is done
  std::atomic<uint32_t> sleepers;  // ranks that sleep on `events`

  void announce() {
    // Both in the one order of all seq_cst operations: a rank that sleeps has counted itself
    // before the kernel compared `events`, and is seen here; or the kernel saw the new value.
    events.fetch_add(1);
    if (sleepers.load() != 0) {
      wake_all(events);
    }
  }
};

// One rank's file in memory. A forked child gets a private copy of its parent's own file, which it
// may read and write, and nothing of the other ranks'.
class SharedMemory::Mapping {
 public:
  // Takes over the descriptor; keeps it open if the file is this rank's own.
  Mapping(int descriptor, int64_t nbytes, bool is_own)
      : descriptor_(descriptor), nbytes_(nbytes), is_own_(is_own) {
    static const int installed = pthread_atfork(
        [] { mutex().lock(); },
        [] { mutex().unlock(); },
        [] {
          for (Mapping* mapping : all()) {
            mapping->leave();
          }
          mutex().unlock();
        });
    static_cast<void>(installed);
    const std::lock_guard lock(mutex());
    void* found = mmap(nullptr, nbytes, PROT_READ | PROT_WRITE, MAP_SHARED, descriptor, 0);
    const int error = errno;
    if (found == MAP_FAILED || !is_own) {
      close(descriptor);
    }
    if (found == MAP_FAILED) {
      errno = error;
      fail("mmap");
    }
    start = static_cast<char*>(found);
    if (!is_own) {
      madvise(start, nbytes, MADV_DONTFORK);
    }
    all().insert(this);
  }

  ~Mapping() {
    const std::lock_guard lock(mutex());
    all().erase(this);
    if (is_own_) {
      close(descriptor_);
    }
    if (is_own_ || !is_in_child) {  // else something of the child's may lie there now
      munmap(start, nbytes_);
    }
  }

  Mapping(const Mapping&) = delete;
  Mapping& operator=(const Mapping&) = delete;

  int descriptor() const {
    return descriptor_;
  }

  std::atomic<uint64_t>& token() const {
    return *reinterpret_cast<std::atomic<uint64_t>*>(start);
  }

  Counters* counters() const {
    return reinterpret_cast<Counters*>(start + kLine);
  }

  char* start = nullptr;
  bool is_in_child = false;  // mapped before this process was forked

 private:
  static std::mutex& mutex() {
    static std::mutex found;
    return found;
  }

  static std::set<Mapping*>& all() {
    static auto* found = new std::set<Mapping*>;  // outlives all mappings
    return *found;
  }

  void leave() {
    if (is_own_ && !is_in_child) {
      mmap(start, nbytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_FIXED, descriptor_, 0);
    }
    is_in_child = true;
  }

  int descriptor_;
  int64_t nbytes_;
  bool is_own_;
};

// A file holds: its token; per bucket the counters (used are those of rank 0's file); per bucket
// the number of rounds that its rank has posted; the core on which it posted last; per bucket how
// often its rank has given, and which round of it that rank has added up; the buckets.
SharedMemory::SharedMemory(int rank, int size, std::vector<BucketShape> buckets)
    : rank_(rank),
      size_(size),
      buckets_(std::move(buckets)),
      rounds_(buckets_.size(), 0),
      summed_(buckets_.size(), 0),
      given_(buckets_.size(), 0),
      mappings_(size),
      addresses_(buckets_.size(), std::vector<void*>(size, nullptr)) {
  const size_t head =
      kLine + buckets_.size() * (sizeof(Counters) + 3 * sizeof(uint32_t)) + sizeof(uint32_t);
  int64_t at = round_up(static_cast<int64_t>(head), kPage);
  for (const auto& bucket : buckets_) {
    with_type(bucket.type, [](auto) {});
    if (bucket.order && static_cast<int>(bucket.order->counts.size()) != size) {
      throw std::invalid_argument("an order for another number of ranks");
    }
    const auto& bounds = bucket.bounds;
    const bool are_shares = bounds.empty() ||
        (static_cast<int>(bounds.size()) == size + 1 && bounds.front() == 0 &&
         bounds.back() == bucket.numel && std::is_sorted(bounds.begin(), bounds.end()));
    if (!are_shares) {
      throw std::invalid_argument("not a share for each rank");
    }
    const auto bytes = bucket.numel * static_cast<int64_t>(c10::elementSize(bucket.type));
    offsets_.push_back(at);
    at += row_stride(bucket) * bucket.room();
    pieces_.push_back(std::max<int64_t>(1, round_up(bytes, kPieceBytes) / kPieceBytes));
  }
  nbytes_ = round_up(at, kPage);
  cpu_set_t cpus;
  const bool is_known = sched_getaffinity(0, sizeof(cpus), &cpus) == 0;
  spins_ = is_known && CPU_COUNT(&cpus) < size ? 0 : kSpins;  // a rank that spins takes a core
  if (getrandom(&token_, sizeof(token_), 0) != sizeof(token_)) {
    fail("getrandom");
  }
  token_ >>= 1;  // fits a signed integer
  const int file = memfd_create("minidp", MFD_CLOEXEC);
  if (file < 0 || ftruncate(file, nbytes_) != 0) {
    const int error = errno;
    if (file >= 0) {
      close(file);
    }
    errno = error;
    fail("memfd_create");
  }
  adopt(rank, std::make_unique<Mapping>(file, nbytes_, /*is_own=*/true));
  mappings_[rank]->token().store(token_, std::memory_order_release);
}

void SharedMemory::adopt(int rank, std::unique_ptr<Mapping> mapping) {
  for (size_t b = 0; b < buckets_.size(); ++b) {
    addresses_[b][rank] = mapping->start + offsets_[b];
  }
  mappings_[rank] = std::move(mapping);
}

SharedMemory::~SharedMemory() = default;

int SharedMemory::descriptor() const {
  return mappings_[rank_]->descriptor();
}

uint64_t SharedMemory::token() const {
  return token_;
}

void SharedMemory::connect(int peer, const std::string& path, uint64_t token) {
  const int file = open(path.c_str(), O_RDWR | O_CLOEXEC);
  if (file < 0) {
    fail("open " + path);
  }
  struct stat facts{};
  const bool is_as_large = fstat(file, &facts) == 0 && facts.st_size == nbytes_;
  if (!is_as_large) {
    close(file);
  }
  auto mapping = is_as_large ? std::make_unique<Mapping>(file, nbytes_, /*is_own=*/false) : nullptr;
  if (!mapping || mapping->token().load(std::memory_order_acquire) != token) {
    throw std::runtime_error(path + " is not the memory of rank " + std::to_string(peer));
  }
  adopt(peer, std::move(mapping));
}

const BucketShape& SharedMemory::shape(size_t bucket) const {
  return buckets_.at(bucket);
}

void* SharedMemory::data(size_t bucket, int32_t row) const {
  if (row < 0 || row >= shape(bucket).rows(rank_)) {
    throw std::invalid_argument("this rank has no such row");
  }
  return static_cast<char*>(addresses_[bucket][rank_]) + row * row_stride(shape(bucket));
}

void* SharedMemory::given(size_t bucket, int rank) const {
  if (shape(bucket).bounds.empty() || rank < 0 || rank >= size_) {
    throw std::invalid_argument("a bucket without shares, or no rank");
  }
  refuse_in_child();
  const BucketShape& found = shape(bucket);
  return static_cast<char*>(addresses_[bucket][rank]) + found.given_row() * row_stride(found);
}

SharedMemory::Counters& SharedMemory::counters(size_t bucket) const {
  return mappings_[0]->counters()[bucket];
}

std::atomic<uint32_t>* SharedMemory::posted_by(int rank) const {
  return reinterpret_cast<std::atomic<uint32_t>*>(mappings_[rank]->counters() + buckets_.size());
}

std::atomic<uint32_t>* SharedMemory::given_by(int rank) const {
  return posted_by(rank) + buckets_.size() + 1;
}

std::atomic<uint32_t>* SharedMemory::summed_by(int rank) const {
  return given_by(rank) + buckets_.size();
}

std::atomic<uint32_t>& SharedMemory::core_of(int rank) const {
  return posted_by(rank)[buckets_.size()];
}

// Not where another rank was seen on this core last: it may wait for the core, not we for it.
bool SharedMemory::may_spin() const {
  const auto mine = static_cast<uint32_t>(sched_getcpu());
  for (int rank = 0; rank < size_; ++rank) {
    if (rank != rank_ && core_of(rank).load(std::memory_order_relaxed) == mine) {
      return false;
    }
  }
  return true;
}

bool SharedMemory::is_done(size_t bucket) const {
  if (!shape(bucket).bounds.empty()) {
    return summed_[bucket] == rounds_[bucket];
  }
  return counters(bucket).done.load(std::memory_order_acquire) == rounds_[bucket] * pieces_[bucket];
}

bool SharedMemory::all_posted(size_t bucket) const {
  const uint32_t target = rounds_[bucket] * static_cast<uint32_t>(size_);
  return counters(bucket).posted.load(std::memory_order_acquire) == target;
}

// The other ranks' memory is not there.
void SharedMemory::refuse_in_child() const {
  if (mappings_[rank_]->is_in_child) {
    throw std::runtime_error("a forked child cannot use its parent's shared memory");
  }
}

void SharedMemory::post(size_t bucket) {
  refuse_in_child();
  auto& shared = counters(bucket);
  const uint32_t round = ++rounds_.at(bucket);
  core_of(rank_).store(static_cast<uint32_t>(sched_getcpu()), std::memory_order_relaxed);
  posted_by(rank_)[bucket].store(round, std::memory_order_release);
  // Releases this rank's values to every rank that sees the last post.
  const uint32_t posted = shared.posted.fetch_add(1, std::memory_order_acq_rel) + 1;
  if (posted == round * static_cast<uint32_t>(size_)) {
    shared.announce();
  }
}

bool SharedMemory::advance(size_t bucket, Tiles* tiles) {
  refuse_in_child();
  if (is_done(bucket)) {
    return true;
  }
  if (!all_posted(bucket)) {
    return false;
  }
  if (!buckets_[bucket].bounds.empty()) {
    return sum_own(bucket, tiles);
  }
  auto& shared = counters(bucket);
  const BucketShape& shape = buckets_[bucket];
  const uint32_t end = rounds_[bucket] * pieces_[bucket];
  const uint32_t begin = end - pieces_[bucket];
  const int64_t per_piece = round_up((shape.numel + pieces_[bucket] - 1) / pieces_[bucket], kLine);
  uint32_t next = shared.claimed.load(std::memory_order_relaxed);
  while (next != end) {
    if (!shared.claimed.compare_exchange_weak(next, next + 1, std::memory_order_relaxed)) {
      continue;
    }
    const int64_t from = std::min<int64_t>(shape.numel, per_piece * (next - begin));
    const int64_t to = std::min<int64_t>(shape.numel, from + per_piece);
    const auto sum = shape.order ? sum_in_given_order : sum_in_ring_order;
    sum(addresses_[bucket], shape, from, to, rank_, tiles);
    if (tiles != nullptr) {
      const auto item = static_cast<int64_t>(c10::elementSize(shape.type));
      tiles->written.emplace_back(from * item, to * item);
    }
    if (shared.done.fetch_add(1, std::memory_order_acq_rel) + 1 == end) {
      shared.announce();
      return true;
    }
    next = shared.claimed.load(std::memory_order_relaxed);
  }
  return is_done(bucket);
}

// All ranks have posted.
bool SharedMemory::sum_own(size_t bucket, Tiles* tiles) {
  const BucketShape& shape = buckets_[bucket];
  const int64_t from = shape.bounds[rank_];
  const int64_t to = shape.bounds[rank_ + 1];
  // A bucket with an order has all of this rank's values, and `tiles` has none.
  const auto sum = shape.order ? sum_in_given_order : sum_share;
  sum(addresses_[bucket], shape, from, to, rank_, tiles);
  if (tiles != nullptr) {
    const auto item = static_cast<int64_t>(c10::elementSize(shape.type));
    tiles->written.emplace_back(from * item, to * item);
  }
  summed_[bucket] = rounds_[bucket];
  summed_by(rank_)[bucket].store(summed_[bucket], std::memory_order_release);
  counters(bucket).announce();
  return true;
}

bool SharedMemory::wait(size_t bucket, double seconds, Tiles* tiles) {
  refuse_in_child();
  return wait_until(bucket, seconds, [&] { return advance(bucket, tiles); });
}

template <typename CountsOf>
std::vector<int> SharedMemory::behind(
    size_t bucket, uint32_t wanted, const CountsOf& counts_of) const {
  refuse_in_child();
  std::vector<int> found;
  for (int rank = 0; rank < size_; ++rank) {
    const uint32_t count = counts_of(rank)[bucket].load(std::memory_order_acquire);
    // Another rank may be one round ahead, and counts wrap around.
    if (static_cast<int32_t>(count - wanted) < 0) {
      found.push_back(rank);
    }
  }
  return found;
}

std::vector<int> SharedMemory::missing(size_t bucket) const {
  return behind(bucket, rounds_.at(bucket), [&](int rank) { return posted_by(rank); });
}

void SharedMemory::give(size_t bucket) {
  refuse_in_child();
  const uint32_t times = ++given_.at(bucket);
  given_by(rank_)[bucket].store(times, std::memory_order_release);
  counters(bucket).announce();
}

std::vector<int> SharedMemory::not_given(size_t bucket) const {
  return behind(bucket, given_.at(bucket), [&](int rank) { return given_by(rank); });
}

std::vector<int> SharedMemory::not_summed(size_t bucket) const {
  return behind(bucket, rounds_.at(bucket), [&](int rank) { return summed_by(rank); });
}

bool SharedMemory::wait_given(size_t bucket, double seconds) const {
  return wait_until(bucket, seconds, [&] { return not_given(bucket).empty(); });
}

bool SharedMemory::wait_summed(size_t bucket, double seconds) const {
  return wait_until(bucket, seconds, [&] { return not_summed(bucket).empty(); });
}

template <typename IsOver>
bool SharedMemory::wait_until(size_t bucket, double seconds, const IsOver& is_over) const {
  for (int spin = may_spin() ? 0 : spins_; spin < spins_; ++spin) {
    if (is_over()) {
      return true;
    }
    relax();
  }
  auto& shared = counters(bucket);
  const double end = now() + seconds;
  while (true) {
    const uint32_t seen = shared.events.load();
    if (is_over()) {
      return true;
    }
    const double left = end - now();
    if (left <= 0) {
      return false;
    }
    shared.sleepers.fetch_add(1);
    // Wakes late at worst: who is killed between a count and its wake-up call.
    sleep_on(shared.events, seen, std::min(left, 0.1));
    shared.sleepers.fetch_sub(1);
  }
}

}  // namespace minidp
#endif
