// Memory that takes the sums of one bucket in place of this rank's buffer: stretches that tile it.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <utility>
#include <vector>

#include "flatten.h"

namespace minidp {

// All numbers are bytes from the start of the buffer.
class Tiles {
 public:
  static constexpr int64_t kMost = 8192;

  at::ScalarType type = at::kFloat;
  double scale = 1;  // the sums are multiplied by it
  bool past_cache = false;
  // Whether the values that this rank brings to the sums lie here, too, and not in its buffer. They
  // have to be multiplied by `own_scale` first.
  bool has_own = false;
  double own_scale = 1;
  std::vector<std::pair<int64_t, int64_t>> written;  // from and to, as `write` was called

  void clear() {
    memory_.clear();
    begins_.clear();
    written.clear();
    has_own = false;
  }

  // The next stretch, at `begin`.
  void add(void* memory, int64_t begin) {
    memory_.push_back(static_cast<char*>(memory));
    begins_.push_back(begin);
  }

  // At most kMost bytes.
  void write(int64_t begin, const void* from, int64_t nbytes) const {
    alignas(64) char scaled[kMost];
    if (scale != 1) {
      const auto numel = nbytes / static_cast<int64_t>(c10::elementSize(type));
      copy_row(scaled, from, numel, type, scale, /*past_cache=*/false);
      from = scaled;
    }
    const auto* source = static_cast<const char*>(from) - begin;
    each(begin, begin + nbytes, [&](char* to, int64_t at, int64_t size) {
      if (past_cache) {
        copy_past_cache(to, source + at, size);
      } else {
        std::memcpy(to, source + at, size);
      }
    });
  }

  // This rank's own values, which lie here until `write` puts sums in their place.
  void read(int64_t begin, void* to, int64_t nbytes) const {
    auto* target = static_cast<char*>(to) - begin;
    const auto item = static_cast<int64_t>(c10::elementSize(type));
    each(begin, begin + nbytes, [&](const char* from, int64_t at, int64_t size) {
      copy_row(target + at, from, size / item, type, own_scale, /*past_cache=*/false);
    });
  }

  // Calls `work(memory, at, size)` for each stretch of [begin, end).
  template <typename Work>
  void each(int64_t begin, int64_t end, Work work) const {
    auto k = std::upper_bound(begins_.begin(), begins_.end(), begin) - begins_.begin() - 1;
    while (begin < end) {
      const bool is_last = k + 1 == static_cast<int64_t>(begins_.size());
      const int64_t stop = is_last ? end : std::min(end, begins_[k + 1]);
      if (begin < stop) {
        work(memory_[k] + (begin - begins_[k]), begin, stop - begin);
      }
      begin = stop;
      ++k;
    }
  }

 private:
  std::vector<char*> memory_;
  std::vector<int64_t> begins_;
};

}  // namespace minidp
