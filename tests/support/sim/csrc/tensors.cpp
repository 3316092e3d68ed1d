#include "tensors.h"

#include <ATen/EmptyTensor.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/is_set_to_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_as_complex_native.h>
#include <ATen/ops/view_as_real_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/DeviceGuard.h>
#include <dlfcn.h>
#include <execinfo.h>
#include <torch/library.h>

#include <cstring>
#include <filesystem>
#include <iterator>

#include "memory.h"
#include "races.h"

namespace sim {
namespace {

const c10::DispatchKeySet kKeys(c10::DispatchKey::PrivateUse1);

// -------------------------------------------------------------------- memory, and views of it

at::Tensor empty(
    c10::IntArrayRef sizes,
    std::optional<at::ScalarType> dtype,
    std::optional<c10::Layout>,
    std::optional<c10::Device> device,
    std::optional<bool>,
    std::optional<c10::MemoryFormat> format) {
  c10::OptionalDeviceGuard guard(device);
  const auto type = c10::dtype_or_default(dtype);
  return at::detail::empty_generic(sizes, &device_allocator(), kKeys, type, format);
}

at::Tensor empty_strided(
    c10::IntArrayRef sizes,
    c10::IntArrayRef strides,
    std::optional<at::ScalarType> dtype,
    std::optional<c10::Layout>,
    std::optional<c10::Device> device,
    std::optional<bool>) {
  c10::OptionalDeviceGuard guard(device);
  const auto type = c10::dtype_or_default(dtype);
  return at::detail::empty_strided_generic(sizes, strides, &device_allocator(), kKeys, type);
}

void ensure_size(const at::Tensor& tensor) {
  const auto needed = at::detail::computeStorageNbytes(
      tensor.sizes(), tensor.strides(), tensor.dtype().itemsize(), tensor.storage_offset());
  auto* storage = tensor.storage().unsafeGetStorageImpl();
  if (needed > storage->nbytes()) resize_storage(*storage, needed);
}

const at::Tensor& resize(
    const at::Tensor& self, c10::IntArrayRef sizes, std::optional<c10::MemoryFormat> format) {
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_sizes_contiguous(sizes);
  if (format) impl->empty_tensor_restride(*format);
  ensure_size(self);
  return self;
}

at::Tensor& set_storage(
    at::Tensor& self,
    c10::Storage storage,
    int64_t offset,
    c10::IntArrayRef sizes,
    c10::IntArrayRef strides) {
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(storage));
  impl->set_sizes_and_strides(sizes, strides, offset);
  ensure_size(self);
  return self;
}

at::Tensor& set_tensor(at::Tensor& self, const at::Tensor& source) {
  return set_storage(
      self, source.storage(), source.storage_offset(), source.sizes(), source.strides());
}

at::Tensor& set_whole_storage(at::Tensor& self, c10::Storage storage) {
  const auto count = static_cast<int64_t>(storage.nbytes() / self.dtype().itemsize());
  return set_storage(self, std::move(storage), 0, {count}, {1});
}

at::Tensor& set_nothing(at::Tensor& self) {
  c10::DeviceGuard guard(self.device());
  const auto none = empty({0}, self.scalar_type(), {}, self.device(), {}, {});
  return set_tensor(self, none);
}

at::Tensor as_strided(
    const at::Tensor& self,
    c10::IntArrayRef sizes,
    c10::IntArrayRef strides,
    std::optional<int64_t> offset) {
  return at::native::as_strided_tensorimpl(self, sizes, strides, offset);
}

std::string ignored_library;  // whose marks count for nothing

// Whether code of a library, by the start of its file's name, has asked torch for the operator that
// runs now. If Python has asked for it, no library has.
bool is_asked_by(const std::string& library) {
  void* frames[64];
  const int depth = backtrace(frames, std::size(frames));
  for (int i = 0; i < depth; ++i) {
    Dl_info info;
    if (dladdr(frames[i], &info) == 0 || info.dli_fname == nullptr) {
      continue;
    }
    const auto file = std::filesystem::path(info.dli_fname).filename().string();
    if (file.starts_with(library)) {
      return true;
    }
    if (file.starts_with("libtorch_python")) {
      return false;
    }
  }
  return false;
}

void record_stream(at::Tensor& self, c10::Stream stream) {
  if (!ignored_library.empty() && is_asked_by(ignored_library)) {
    return;
  }
  device_allocator().recordStream(self.storage().data_ptr(), stream);
}

// ------------------------------------------------------------------------------------- copies

Stream& stream_of(const at::Tensor& tensor) {
  return current_stream(tensor.device().index());
}

void copy_on_devices(const at::Tensor& from, const at::Tensor& to) {
  auto& stream = stream_of(to);
  auto& other = stream_of(from);
  const bool is_peer = &stream != &other;
  // Between two devices, torch's CUDA kernels wait for both current streams, too.
  if (is_peer) wait_for(stream, record(other));
  launch(
      stream,
      "copy",
      {range_of(from, false), range_of(to, true)},
      [a = Alias(from), b = Alias(to)] { b.on_cpu().copy_(a.on_cpu()); });
  if (is_peer) wait_for(other, record(stream));
}

// Pageable memory is read at once, and pinned memory later: then the host must leave it alone.
void copy_to_device(const at::Tensor& from, const at::Tensor& to, bool non_blocking) {
  auto& stream = stream_of(to);
  if (!from.is_pinned()) {
    launch(stream, "copy from the host", {range_of(to, true)}, [a = from.clone(), b = Alias(to)] {
      b.on_cpu().copy_(a);
    });
  } else {
    const auto source = range_of(from, false);
    launch(
        stream,
        "copy from pinned memory",
        {source, range_of(to, true)},
        [a = Alias(from),
         b = Alias(to),
         source,
         held = from.storage(),
         use = std::make_shared<PinnedUse>(source.begin),
         seen = std::vector<char>(source.begin, source.end)] {
          if (std::memcmp(seen.data(), source.begin, seen.size()) != 0)
            report_race("the host wrote pinned memory before a copy had read it");
          b.on_cpu().copy_(a.on_cpu());
        });
  }
  if (!non_blocking) synchronize(stream, "a copy from the host that is not non_blocking");
}

// A copy to pageable memory is over when the call returns, also if it is non_blocking.
void copy_to_host(const at::Tensor& from, const at::Tensor& to, bool non_blocking) {
  auto& stream = stream_of(from);
  const auto target = range_of(to, true);
  const bool is_pinned = to.is_pinned();
  if (is_pinned) poison_pinned(target);
  launch(
      stream,
      "copy to the host",
      {range_of(from, false), target},
      [a = Alias(from),
       b = Alias(to),
       held = to.storage(),
       use = std::make_shared<PinnedUse>(target.begin)] { b.on_cpu().copy_(a.on_cpu()); });
  if (!is_pinned) {
    synchronize_with_driver(stream, "a copy to the host");
  } else if (!non_blocking) {
    synchronize(stream, "a copy to the host");
  }
}

at::Tensor copy_from(const at::Tensor& from, const at::Tensor& to, bool non_blocking) {
  if (!to.numel()) return to;
  if (is_sim(from) && is_sim(to)) {
    copy_on_devices(from, to);
  } else if (is_sim(to)) {
    copy_to_device(from, to, non_blocking);
  } else {
    copy_to_host(from, to, non_blocking);
  }
  return to;
}

at::Tensor copy_from_and_resize(const at::Tensor& from, const at::Tensor& to) {
  if (to.sizes() != from.sizes()) to.resize_(from.sizes());
  return copy_from(from, to, false);
}

at::Scalar local_scalar(const at::Tensor& self) {
  auto& stream = stream_of(self);
  const auto value = std::make_shared<at::Scalar>();  // outlives a wait that raises
  launch(stream, "aten::_local_scalar_dense", {range_of(self, false)}, [value, from = Alias(self)] {
    *value = from.on_cpu().item();
  });
  synchronize(stream, "item()");
  return *value;
}

}  // namespace

Alias::Alias(const at::Tensor& tensor)
    : data_(const_cast<void*>(tensor.const_data_ptr())),
      sizes_(tensor.sizes().vec()),
      strides_(tensor.strides().vec()),
      dtype_(tensor.scalar_type()),
      is_conjugate_(tensor.is_conj()),
      is_negative_(tensor.is_neg()) {}

at::Tensor Alias::on_cpu() const {
  const auto options = at::TensorOptions().dtype(dtype_);
  auto tensor = at::for_blob(data_, sizes_).strides(strides_).options(options).make_tensor();
  tensor._set_conj(is_conjugate_);
  tensor._set_neg(is_negative_);
  return tensor;
}

Range range_of(const at::Tensor& tensor, bool is_written) {
  if (!tensor.numel()) return {nullptr, nullptr, is_written};
  int64_t last = 0;
  for (int64_t dim = 0; dim < tensor.dim(); ++dim)
    last += (tensor.size(dim) - 1) * tensor.stride(dim);
  auto* begin = static_cast<char*>(const_cast<void*>(tensor.const_data_ptr()));
  return {begin, begin + (last + 1) * static_cast<int64_t>(tensor.element_size()), is_written};
}

at::Tensor empty_on(int device, const at::Tensor& like) {
  const c10::Device on(kSim, static_cast<c10::DeviceIndex>(device));
  return empty_strided(like.sizes(), like.strides(), like.scalar_type(), {}, on, {});
}

void ignore_marks_of(const std::string& library) {
  ignored_library = library;
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("resize_", resize);
  m.impl("set_.source_Storage_storage_offset", set_storage);
  m.impl("set_.source_Storage", set_whole_storage);
  m.impl("set_.source_Tensor", set_tensor);
  m.impl("set_", set_nothing);
  m.impl("is_set_to", at::native::is_set_to);
  m.impl("view", [](const at::Tensor& self, c10::IntArrayRef sizes) {
    return at::native::view(self, sizes);
  });
  m.impl("as_strided", as_strided);
  m.impl(
      "_reshape_alias",
      [](const at::Tensor& self, c10::IntArrayRef sizes, c10::IntArrayRef strides) {
        return at::native::_reshape_alias(self, sizes, strides);
      });
  m.impl("unfold", [](const at::Tensor& self, int64_t dim, int64_t size, int64_t step) {
    return at::native::unfold(self, dim, size, step);
  });
  m.impl("view_as_real", [](const at::Tensor& self) { return at::native::view_as_real(self); });
  m.impl(
      "view_as_complex", [](const at::Tensor& self) { return at::native::view_as_complex(self); });
  m.impl("record_stream", record_stream);
  m.impl("_copy_from", copy_from);
  m.impl("_copy_from_and_resize", copy_from_and_resize);
  m.impl("_local_scalar_dense", local_scalar);
}

}  // namespace sim
