// What torch asks of every device: its streams and events (c10's device guard), and the hooks of a
// backend that lives outside of torch.
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include "memory.h"
#include "random.h"

namespace sim {
namespace {

constexpr auto kSim = c10::DeviceType::PrivateUse1;

int index_of(const c10::Device& device) {
  return device.has_index() ? device.index() : current_device();
}

c10::Stream to_c10(int device, int64_t id) {
  const c10::Device on(kSim, static_cast<c10::DeviceIndex>(device));
  return c10::Stream(c10::Stream::UNSAFE, on, id);
}

Stream& from_c10(const c10::Stream& stream) {
  return stream_at(index_of(stream.device()), stream.id());
}

struct Event {
  MomentPtr moment;  // of the last record(), if there was one
};

class Guard final : public c10::impl::DeviceGuardImplInterface {
 public:
  static constexpr c10::DeviceType static_type = kSim;

  c10::DeviceType type() const override {
    return kSim;
  }
  c10::Device exchangeDevice(c10::Device device) const override {
    return {kSim, static_cast<c10::DeviceIndex>(exchange_device(device.index()))};
  }
  c10::Device getDevice() const override {
    return {kSim, static_cast<c10::DeviceIndex>(current_device())};
  }
  void setDevice(c10::Device device) const override {
    exchange_device(device.index());
  }
  void uncheckedSetDevice(c10::Device device) const noexcept override {
    exchange_device(device.index());
  }
  c10::DeviceIndex deviceCount() const noexcept override {
    return kNumDevices;
  }

  c10::Stream getStream(c10::Device device) const override {
    return to_c10(index_of(device), current_stream_id(index_of(device)));
  }
  c10::Stream getDefaultStream(c10::Device device) const override {
    return to_c10(index_of(device), 0);
  }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override {
    return to_c10(index_of(device), next_pool_id(index_of(device)));
  }
  c10::Stream getNewStream(c10::Device device, int) const override {
    return getStreamFromGlobalPool(device, false);
  }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    const int device = index_of(stream.device());
    return to_c10(device, exchange_stream_id(device, stream.id()));
  }
  void* getStreamNativeHandle(const c10::Stream stream) const override {
    return &from_c10(stream);
  }
  bool queryStream(const c10::Stream& stream) const override {
    return from_c10(stream).is_idle();
  }
  void synchronizeStream(const c10::Stream& stream) const override {
    synchronize(from_c10(stream), "Stream.synchronize");
  }
  void synchronizeDevice(const c10::DeviceIndex device) const override {
    synchronize_device(device, "synchronize");
  }

  void record(void** event, const c10::Stream& stream, const c10::DeviceIndex, const c10::EventFlag)
      const override {
    if (!*event) *event = new Event;
    static_cast<Event*>(*event)->moment = sim::record(from_c10(stream));
  }
  void block(void* event, const c10::Stream& stream) const override {
    wait_for(from_c10(stream), moment_of(event));
  }
  bool queryEvent(void* event) const override {
    return has_happened(moment_of(event));
  }
  void synchronizeEvent(void* event) const override {
    host_wait(moment_of(event), "Event.synchronize");
  }
  double elapsedTime(void* begin, void* end, const c10::DeviceIndex) const override {
    return moment_of(end)->milliseconds() - moment_of(begin)->milliseconds();
  }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override {
    enter_driver();
    delete static_cast<Event*>(event);
  }
  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& stream) const override {
    device_allocator().recordStream(data, stream);
  }

 private:
  static MomentPtr moment_of(void* event) {
    return event ? static_cast<Event*>(event)->moment : nullptr;
  }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

class Hooks final : public at::PrivateUse1HooksInterface {
 public:
  bool isBuilt() const override {
    return true;
  }
  bool isAvailable() const override {
    return true;
  }
  bool hasPrimaryContext(c10::DeviceIndex) const override {
    return true;
  }
  c10::DeviceIndex deviceCount() const override {
    return kNumDevices;
  }
  void setCurrentDevice(c10::DeviceIndex device) const override {
    exchange_device(device);
  }
  c10::DeviceIndex getCurrentDevice() const override {
    return static_cast<c10::DeviceIndex>(current_device());
  }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex device) const override {
    return static_cast<c10::DeviceIndex>(exchange_device(device));
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex device) const override {
    return exchangeDevice(device);
  }
  at::Device getDeviceFromPtr(void* data) const override {
    return {kSim, static_cast<c10::DeviceIndex>(device_of(data))};
  }
  at::Allocator* getPinnedMemoryAllocator() const override {
    return &pinned_allocator();
  }
  bool isPinnedPtr(const void* data) const override {
    return is_pinned(data);
  }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t num_bytes) const override {
    resize_storage(*storage.unsafeGetStorageImpl(), num_bytes);
  }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex device) const override {
    return default_generator(device);
  }
  at::Generator getNewGenerator(c10::DeviceIndex device) const override {
    return new_generator(device);
  }
};

const bool is_registered = [] {
  c10::SetAllocator(kSim, &device_allocator());
  at::RegisterPrivateUse1HooksInterface(new Hooks);
  return true;
}();

}  // namespace
}  // namespace sim
