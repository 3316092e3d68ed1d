#include "memory.h"

#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/alloc_cpu.h>

#include <array>
#include <cstring>
#include <set>
#include <tuple>

#include "races.h"

namespace sim {
namespace {

constexpr auto kSim = c10::DeviceType::PrivateUse1;
constexpr int kPoison = 0xFF;      // a NaN in each floating point type, -1 as an integer
constexpr size_t kAlignment = 512;  // as of CUDA's allocator, so that sizes can be compared
constexpr int kHost = -1;

struct Block {
  char* data;
  size_t capacity;
  size_t size;  // what was asked for, rounded up
  int device;
  int64_t stream;
  std::set<int64_t> used_on;  // by record_stream
  int num_copies = 0;         // that are pending, of pinned memory
  History history;
  Clock safe_to_free;  // before which its uses are over
};
using PoolKey = std::tuple<int, int64_t, size_t>;  // device, stream, capacity
struct Waiting {
  std::vector<MomentPtr> moments;  // until these have happened
  Block* block;
};

// Never destroyed: tensors may outlive main().
struct State {
  std::map<const char*, Block*> blocks;
  std::multimap<PoolKey, Block*> pool;
  std::vector<Waiting> waiting;
  std::array<Usage, kNumDevices> usage;
  bool detects = true;
};
State& state() {
  static auto* all = new State;
  return *all;
}

size_t rounded(size_t num_bytes) {
  return std::max(kAlignment, (num_bytes + kAlignment - 1) / kAlignment * kAlignment);
}

Block* block_at(const void* address) {
  const auto* byte = static_cast<const char*>(address);
  const auto after = state().blocks.upper_bound(byte);
  if (after == state().blocks.begin()) return nullptr;
  auto* block = std::prev(after)->second;
  return byte < block->data + block->capacity ? block : nullptr;
}

std::string describe(const Block& block) {
  if (block.device == kHost) return std::to_string(block.size) + " bytes, pinned";
  return std::to_string(block.size) + " bytes, allocated for stream " +
      std::to_string(block.stream);
}

Block* make_block(size_t capacity, size_t size, int device, int64_t stream) {
  auto* data = static_cast<char*>(c10::alloc_cpu(capacity));
  std::memset(data, kPoison, capacity);
  auto* block = new Block{data, capacity, size, device, stream, {}, 0, {}, {}};
  state().blocks[data] = block;
  return block;
}

void destroy_block(Block* block) {
  state().blocks.erase(block->data);
  c10::free_cpu(block->data);
  delete block;
}

// Lets the stream of the block overwrite it: what this stream got before may still read it, and
// what other streams got is a race if nobody waits for it.
void to_pool(Block* block) {
  auto* data = block->data;
  const auto capacity = block->capacity;
  launch_locked(
      stream_at(block->device, block->stream),
      "the allocator, which reuses freed memory,",
      "",
      {{data, data + capacity, true}},
      [data, capacity] { std::memset(data, kPoison, capacity); },
      Kind::kAllocator);
  state().pool.emplace(PoolKey{block->device, block->stream, capacity}, block);
}

// As CUDA's allocator does at each allocation.
void reuse_what_recorded_streams_are_done_with() {
  std::vector<Waiting> still;
  for (auto& entry : std::exchange(state().waiting, {})) {
    bool is_over = true;
    for (const auto& moment : entry.moments) is_over = is_over && moment->has_happened();
    if (!is_over) {
      still.push_back(std::move(entry));
      continue;
    }
    for (const auto& moment : entry.moments) entry.block->history.forget(moment->clock);
    to_pool(entry.block);
  }
  state().waiting = std::move(still);
}

void release(void* context) {
  StateLock lock(state_mutex());
  auto* block = static_cast<Block*>(context);
  state().usage.at(block->device).allocated -= block->size;
  block->history.forget(std::exchange(block->safe_to_free, Clock()));
  if (block->used_on.empty()) {
    to_pool(block);
    return;
  }
  std::vector<MomentPtr> moments;
  for (const auto id : block->used_on) moments.push_back(record(stream_at(block->device, id)));
  block->used_on.clear();
  state().waiting.push_back({std::move(moments), block});
}

class DeviceAllocator final : public c10::DeviceAllocator {
 public:
  c10::DataPtr allocate(size_t num_bytes) override {
    StateLock lock(state_mutex());
    const int device = current_device();
    const auto stream = current_stream_id(device);
    const auto size = rounded(num_bytes);
    reuse_what_recorded_streams_are_done_with();
    auto* block = take_from_pool(device, stream, size);
    auto& used = state().usage.at(device);
    if (!block) {
      block = make_block(size, size, device, stream);
      used.reserved += size;
    }
    block->size = size;
    used.allocated += size;
    used.peak = std::max(used.peak, used.allocated);
    return {block->data, block, &release, c10::Device(kSim, static_cast<c10::DeviceIndex>(device))};
  }

  void recordStream(const c10::DataPtr& pointer, c10::Stream stream) override {
    StateLock lock(state_mutex());
    auto* block = block_at(pointer.get());
    if (block && block->device != kHost && stream.id() != block->stream)
      block->used_on.insert(stream.id());
  }

  // The host waits until no stream uses what is in the pool, which is then given back.
  void emptyCache(c10::MempoolId_t) override {
    drain(-1);
    {
      StateLock lock(state_mutex());
      reuse_what_recorded_streams_are_done_with();
    }
    drain(-1);
    StateLock lock(state_mutex());
    auto& pool = state().pool;
    for (auto entry = pool.begin(); entry != pool.end();) {
      auto* block = entry->second;
      if (!stream_at(block->device, block->stream).is_idle()) {
        ++entry;
        continue;
      }
      entry = pool.erase(entry);
      state().usage.at(block->device).reserved -= block->capacity;
      destroy_block(block);
    }
  }

  c10::DeleterFnPtr raw_deleter() const override {
    return nullptr;
  }
  void copy_data(void* to, const void* from, std::size_t num_bytes) const override {
    std::memcpy(to, from, num_bytes);
  }
  bool initialized() override {
    return true;
  }
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex device) override {
    const auto used = sim::usage(device);
    c10::CachingDeviceAllocator::DeviceStats stats;
    stats.allocated_bytes[0].current = static_cast<int64_t>(used.allocated);
    stats.allocated_bytes[0].peak = static_cast<int64_t>(used.peak);
    stats.reserved_bytes[0].current = static_cast<int64_t>(used.reserved);
    return stats;
  }
  void resetAccumulatedStats(c10::DeviceIndex) override {}
  void resetPeakStats(c10::DeviceIndex device) override {
    reset_peak(device);
  }

 private:
  // The smallest block that fits, unless it is much too large.
  Block* take_from_pool(int device, int64_t stream, size_t size) {
    auto& pool = state().pool;
    const auto found = pool.lower_bound({device, stream, size});
    if (found == pool.end() || found->second->device != device) return nullptr;
    auto* block = found->second;
    if (block->stream != stream || block->capacity > 2 * size) return nullptr;
    pool.erase(found);
    return block;
  }
};

// A copy holds the storages that it uses until it is over, as CUDA's allocator of pinned memory
// does by events. So what is freed here is in no queue.
class PinnedAllocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t num_bytes) override {
    StateLock lock(state_mutex());
    auto* block = make_block(rounded(num_bytes), num_bytes, kHost, 0);
    const auto free = [](void* context) {
      StateLock lock(state_mutex());
      destroy_block(static_cast<Block*>(context));
    };
    return {block->data, block, free, c10::Device(c10::kCPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override {
    return nullptr;
  }
  void copy_data(void* to, const void* from, std::size_t num_bytes) const override {
    std::memcpy(to, from, num_bytes);
  }
};

}  // namespace

c10::DeviceAllocator& device_allocator() {
  static auto* allocator = new DeviceAllocator;
  return *allocator;
}

c10::Allocator& pinned_allocator() {
  static auto* allocator = new PinnedAllocator;
  return *allocator;
}

bool is_pinned(const void* address) {
  StateLock lock(state_mutex());
  const auto* block = block_at(address);
  return block && block->device == kHost;
}

int device_of(const void* address) {
  StateLock lock(state_mutex());
  const auto* block = block_at(address);
  return block && block->device != kHost ? block->device : 0;
}

void mark_safe_to_free(const void* address, const Clock& clock) {
  StateLock lock(state_mutex());
  if (auto* block = block_at(address)) block->safe_to_free.merge(clock);
}

void resize_storage(c10::StorageImpl& storage, size_t num_bytes) {
  const auto device = storage.device();
  c10::DeviceGuard guard(device);
  auto fresh = num_bytes ? device_allocator().allocate(num_bytes) : c10::DataPtr(nullptr, device);
  auto* to = static_cast<char*>(fresh.get());
  const auto kept = std::min(num_bytes, storage.nbytes());
  const auto old = storage.set_data_ptr(std::move(fresh));
  storage.set_nbytes(num_bytes);
  auto* from = static_cast<char*>(old.get());
  if (!kept || !from) return;
  launch(
      current_stream(device.index()),
      "resize",
      {{from, from + kept, false}, {to, to + kept, true}},
      [=] { std::memcpy(to, from, kept); });
}

void note_access(
    const Stream& stream, const Range& range, const std::string& name, const std::string& where) {
  if (!state().detects || range.begin >= range.end) return;
  auto* block = block_at(range.begin);
  if (!block) return;
  const Access access{range, stream.key, stream.clock[stream.key], name, where};
  block->history.add(access, stream.clock, describe(*block));
}

void set_detecting(bool detects) {
  StateLock lock(state_mutex());
  state().detects = detects;
}

PinnedUse::PinnedUse(const void* address) : address_(address) {
  StateLock lock(state_mutex());
  if (auto* block = block_at(address_)) ++block->num_copies;
}

PinnedUse::~PinnedUse() {
  StateLock lock(state_mutex());
  if (auto* block = block_at(address_)) --block->num_copies;
}

void poison_pinned(const Range& range) {
  StateLock lock(state_mutex());
  const auto* block = block_at(range.begin);
  if (block && block->device == kHost && !block->num_copies)
    std::memset(range.begin, kPoison, range.end - range.begin);
}

Usage usage(int device) {
  StateLock lock(state_mutex());
  return state().usage.at(device);
}

void reset_peak(int device) {
  StateLock lock(state_mutex());
  auto& used = state().usage.at(device);
  used.peak = used.allocated;
}

}  // namespace sim
