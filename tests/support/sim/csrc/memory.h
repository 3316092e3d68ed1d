// Memory of the devices, and pinned memory of the host.
//
// The allocator is the strictest that torch's contract permits: what is freed is overwritten with
// NaN at once, by the stream for which it was allocated, and the next allocation of that stream
// gets it. `record_stream` delays that until the recorded streams have come so far.
#pragma once

#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/Storage.h>

#include "launch.h"

namespace sim {

c10::DeviceAllocator& device_allocator();
c10::Allocator& pinned_allocator();
bool is_pinned(const void* address);
int device_of(const void* address);  // 0 if it belongs to none

// Somebody kept this memory until what used it before `clock` was over. So it may be freed; streams
// that read it must wait all the same.
void mark_safe_to_free(const void* address, const Clock& clock);

// Give a storage other memory, with as much of its content as fits.
void resize_storage(c10::StorageImpl& storage, size_t num_bytes);

// Check an access of a launch for races. The caller has the state mutex.
void note_access(
    const Stream& stream, const Range& range, const std::string& name, const std::string& where);
void set_detecting(bool detects);

// A copy uses pinned memory as long as one of these lives.
class PinnedUse {
 public:
  explicit PinnedUse(const void* address);
  ~PinnedUse();
  PinnedUse(const PinnedUse&) = delete;
  PinnedUse& operator=(const PinnedUse&) = delete;

 private:
  const void* address_;
};
// Overwrite pinned memory that a copy will fill, unless another copy still uses it: a host that
// reads it without waiting finds NaN, and not what was there before.
void poison_pinned(const Range& range);

struct Usage {
  size_t allocated = 0;
  size_t peak = 0;
  size_t reserved = 0;
};
Usage usage(int device);
void reset_peak(int device);

}  // namespace sim
