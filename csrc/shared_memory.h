// Buckets in memory that all ranks of one host map, summed in place: with the bits of Gloo's ring,
// or in an order that the caller gives.
//
//   rank 0  [board | bucket 0 | bucket 1 | ...]   one anonymous file per rank,
//   rank 1  [board | bucket 0 | bucket 1 | ...]   mapped by every rank
//
// A round of one bucket: every rank posts; then any rank, waiting or not, claims pieces of the
// bucket, sums each over all ranks and writes the sum to all of them. The bucket is done when its
// last piece is. A rank that sleeps holds nobody up: it has claimed nothing. All counters are on
// the board of rank 0 and only grow, so that a round needs no reset and a buffer may be written
// as soon as its round is done.
#pragma once

#include <c10/core/ScalarType.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "tiles.h"

namespace minidp {

// Which values of a bucket are added to which. A rank brings one or several rows: its buffer, which
// gets the sum, and maybe others, which are only read. The rows of all ranks are numbered, rank by
// rank, each rank's buffer first.
class SumOrder {
 public:
  static constexpr int32_t kAdd = -1;
  static constexpr int32_t kMostDepth = 64;

  // counts: how many rows each rank brings. postfix: a row's number puts that row on a stack, and
  // kAdd adds the top of the stack to what lies below it, and takes the top off. Throws
  // std::invalid_argument unless every row is used once and their sum is left.
  SumOrder(std::vector<int32_t> counts, std::vector<int32_t> postfix);

  const std::vector<int32_t> counts;
  const std::vector<int32_t> postfix;
  int32_t depth = 0;  // how much is on the stack at most
  int32_t most = 0;   // how many rows a rank has at most
};

struct BucketShape {
  int64_t numel;
  c10::ScalarType type;
  std::shared_ptr<const SumOrder> order = nullptr;  // null: the order of Gloo's ring
  // Where the share of each rank begins, and the end of the last one; empty: no shares. With
  // shares a rank gets the sums of its own share only, added in the order of ranks if there is no
  // other one, and has a further row, through which it gives values of its share to the others.
  std::vector<int64_t> bounds = {};

  // How many rows a rank adds to the sum.
  int32_t rows(int rank) const {
    return order ? order->counts[rank] : 1;
  }

  // The row through which a rank gives values: it lies behind those of all ranks.
  int32_t given_row() const {
    return order ? order->most : 1;
  }

  // How many rows there is room for in the file of each rank.
  int32_t room() const {
    return given_row() + (bounds.empty() ? 0 : 1);
  }
};

// Adds elements [begin, end) of all ranks, in the order of Gloo's ring of `numel` elements, and
// writes the sums to all ranks; to `tiles`, if given, in place of rank `own`. Halves are added in
// float and rounded after each addition, as Gloo does.
void sum_in_ring_order(
    const std::vector<void*>& ranks,
    const BucketShape& bucket,
    int64_t begin,
    int64_t end,
    int own = -1,
    const Tiles* tiles = nullptr);

// The same in the bucket's own order. Halves are rounded after each addition here, too. A rank's
// rows lie behind each other, `row_stride(bucket)` bytes apart. If the bucket has shares, the sums
// are written to rank `own`, or to `tiles`, alone.
void sum_in_given_order(
    const std::vector<void*>& ranks,
    const BucketShape& bucket,
    int64_t begin,
    int64_t end,
    int own = -1,
    const Tiles* tiles = nullptr);

// Adds elements [begin, end) of all ranks, in the order of ranks, and writes the sums to rank
// `own`, or to `tiles`, if given, which may also have the values of rank `own`. Halves are rounded
// after each addition.
void sum_share(
    const std::vector<void*>& ranks,
    const BucketShape& bucket,
    int64_t begin,
    int64_t end,
    int own,
    const Tiles* tiles = nullptr);

int64_t row_stride(const BucketShape& bucket);

class SharedMemory {
 public:
  // Takes new anonymous memory for this rank's buckets. Throws std::runtime_error if the system
  // has none, or for a type without sums.
  SharedMemory(int rank, int size, std::vector<BucketShape> buckets);
  ~SharedMemory();
  SharedMemory(const SharedMemory&) = delete;
  SharedMemory& operator=(const SharedMemory&) = delete;

  // For the other ranks: they open this file, and check the token.
  int descriptor() const;
  uint64_t token() const;

  // Maps the memory of another rank. Throws std::runtime_error if it cannot be opened, or is not
  // what that rank made.
  void connect(int peer, const std::string& path, uint64_t token);

  const BucketShape& shape(size_t bucket) const;
  // Row 0 is the buffer. Memory of rows that nobody writes is never taken from the system.
  void* data(size_t bucket, int32_t row = 0) const;
  // The row of another rank, or of this one, through which it gives values of its share.
  void* given(size_t bucket, int rank) const;

  // This rank's values are in the bucket's memory: the round begins. Until it is done, no one but
  // `advance` may touch them. This and what follows throws std::runtime_error in a forked child.
  void post(size_t bucket);

  // Whether this rank's round is done; of a bucket with shares, whether its own share is summed.
  bool is_done(size_t bucket) const;

  // Sums what can be summed now; whether the round is done. What this rank adds for itself goes to
  // `tiles`, if given.
  bool advance(size_t bucket, Tiles* tiles = nullptr);

  // Waits at most so long, and sums meanwhile; whether the round is done.
  bool wait(size_t bucket, double seconds, Tiles* tiles = nullptr);

  // Ranks that have not posted this rank's round of a bucket.
  std::vector<int> missing(size_t bucket) const;

  // This rank's values are in its row `given` of a bucket with shares. Nobody may write there until
  // all ranks have read them, of which this class knows nothing.
  void give(size_t bucket);

  // Waits at most so long; whether all ranks have given as often as this one.
  bool wait_given(size_t bucket, double seconds) const;

  // Waits at most so long; whether all ranks have added up their shares of this rank's last round.
  // Until then they read this rank's values.
  bool wait_summed(size_t bucket, double seconds) const;

  // Ranks that have not given as often as this one, or not added up its last round.
  std::vector<int> not_given(size_t bucket) const;
  std::vector<int> not_summed(size_t bucket) const;

 private:
  struct Counters;
  class Mapping;

  void refuse_in_child() const;
  void adopt(int rank, std::unique_ptr<Mapping> mapping);
  Counters& counters(size_t bucket) const;
  std::atomic<uint32_t>* posted_by(int rank) const;
  std::atomic<uint32_t>* given_by(int rank) const;
  std::atomic<uint32_t>* summed_by(int rank) const;
  template <typename IsOver>
  bool wait_until(size_t bucket, double seconds, const IsOver& is_over) const;
  // Ranks whose count of a bucket is below the wanted one.
  template <typename CountsOf>
  std::vector<int> behind(size_t bucket, uint32_t wanted, const CountsOf& counts_of) const;
  bool sum_own(size_t bucket, Tiles* tiles);
  bool all_posted(size_t bucket) const;
  std::atomic<uint32_t>& core_of(int rank) const;
  bool may_spin() const;

  int rank_;
  int size_;
  std::vector<BucketShape> buckets_;
  std::vector<int64_t> offsets_;
  std::vector<uint32_t> pieces_;  // per bucket
  std::vector<uint32_t> rounds_;  // per bucket, of this rank
  std::vector<uint32_t> summed_;  // per bucket with shares: the last round whose share is summed
  std::vector<uint32_t> given_;  // per bucket with shares: how often this rank has given
  uint64_t token_ = 0;
  int64_t nbytes_ = 0;
  int spins_ = 0;
  std::vector<std::unique_ptr<Mapping>> mappings_;  // per rank
  std::vector<std::vector<void*>> addresses_;  // per bucket and rank
};

}  // namespace minidp
