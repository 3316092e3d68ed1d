// See plan.h: checks tensors, then hands their addresses to flatten.cu.
#include "plan.h"

#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

#include <cstring>

#include "flatten.h"

namespace minidp {
namespace {

using cuda::Type;

// How the kernels see a dtype: words of a type, some elements being two words.
struct Words {
  Type type;
  std::int64_t size;         // in bytes
  std::int64_t per_element;
};

Words words_of(at::ScalarType dtype) {
  switch (dtype) {
    case at::kFloat:
      return {Type::kFloat, 4, 1};
    case at::kDouble:
      return {Type::kDouble, 8, 1};
    case at::kHalf:
      return {Type::kHalf, 2, 1};
    case at::kBFloat16:
      return {Type::kBFloat16, 2, 1};
    default:
      break;
  }
  const auto size = static_cast<std::int64_t>(c10::elementSize(dtype));
  switch (size) {
    case 1:
      return {Type::kRaw1, 1, 1};
    case 2:
      return {Type::kRaw2, 2, 1};
    case 4:
      return {Type::kRaw4, 4, 1};
    case 8:
      return {Type::kRaw8, 8, 1};
    case 16:
      return {Type::kRaw8, 8, 2};
    default:
      TORCH_CHECK(false, "CudaPlan: elements of ", size, " bytes");
  }
}

bool is_number(Type type) {
  return type == Type::kFloat || type == Type::kDouble || type == Type::kHalf ||
         type == Type::kBFloat16;
}

// The same elements in the same order; a dimension of size one has no stride to speak
// of, a tensor without elements none at all.
bool same_memory_order(const at::Tensor& a, const at::Tensor& b) {
  if (a.sizes() != b.sizes()) {
    return false;
  }
  for (std::int64_t d = 0; a.numel() > 0 && d < a.dim(); ++d) {
    if (a.size(d) != 1 && a.stride(d) != b.stride(d)) {
      return false;
    }
  }
  return true;
}

// Torch notices by this that a tensor which it saved for a backward has changed.
void note_write(const at::Tensor& tensor) {
  if (!tensor.is_inference()) {
    tensor.unsafeGetTensorImpl()->bump_version();
  }
}

void check_views(const std::vector<at::Tensor>& views) {
  TORCH_CHECK(!views.empty(), "CudaPlan: a bucket has at least one slot");
  for (std::size_t k = 0; k < views.size(); ++k) {
    const auto& view = views[k];
    TORCH_CHECK(view.defined() && view.layout() == at::kStrided && view.is_cuda(),
                "CudaPlan: view ", k, " is not a strided CUDA tensor");
    TORCH_CHECK(view.scalar_type() == views[0].scalar_type() &&
                    view.is_alias_of(views[0]),
                "CudaPlan: view ", k, " is not a window on the buffer of view 0");
    TORCH_CHECK(view.is_non_overlapping_and_dense() && !view.is_conj() &&
                    !view.is_neg(),
                "CudaPlan: view ", k, " is not dense, or conjugated or negated lazily");
  }
}

cuda::Schedule schedule_of(const std::vector<at::Tensor>& views, const Words& words) {
  std::vector<cuda::Slot> slots;
  slots.reserve(views.size());
  for (const auto& view : views) {
    slots.push_back({view.storage_offset() * words.per_element,
                     view.numel() * words.per_element});
  }
  return cuda::make_schedule(slots, words.size, cuda::kMaxSlots);
}

// In memory of torch's allocator. A copy from pageable memory that is not asked to be
// asynchronous has arrived when it returns: steps may run on other streams.
at::Tensor upload(const std::vector<cuda::Chunk>& chunks, const at::Device& device) {
  const auto bytes = static_cast<std::int64_t>(chunks.size() * sizeof(cuda::Chunk));
  at::Tensor host = at::empty({bytes}, at::TensorOptions().dtype(at::kByte));
  if (bytes > 0) {
    std::memcpy(host.mutable_data_ptr(), chunks.data(), bytes);
  }
  return host.to(device, /*non_blocking=*/false);
}

}  // namespace

struct CudaPlan::Impl {
  explicit Impl(const std::vector<at::Tensor>& tensors)
      : views(tensors), words(words_of(tensors[0].scalar_type())) {
    const c10::cuda::CUDAGuard guard(views[0].device());
    cuda::Schedule schedule = schedule_of(views, words);
    chunks = upload(schedule.chunks, views[0].device());
    launches = std::move(schedule.launches);
  }

  // The current stream, on which the plan's memory is in use from now on.
  c10::cuda::CUDAStream stream() {
    const auto stream = c10::cuda::getCurrentCUDAStream(views[0].device().index());
    if (last_stream != stream) {
      chunks.record_stream(stream);  // only when it changes: it costs a lock
      last_stream = stream;
    }
    return stream;
  }

  cuda::Bucket bucket() const {
    // By way of the storage: the schedule's offsets count from its start.
    return {views[0].storage().mutable_data(), words.type,
            static_cast<const cuda::Chunk*>(chunks.const_data_ptr()), launches.data(),
            static_cast<std::int64_t>(launches.size())};
  }

  void check_grad(std::size_t k, const at::Tensor& grad) const {
    const auto& view = views[k];
    TORCH_CHECK(grad.layout() == at::kStrided && grad.device() == view.device(),
                "CudaPlan: gradient ", k, " is not a strided tensor on ",
                view.device());
    TORCH_CHECK(grad.numel() == view.numel() && same_memory_order(grad, view),
                "CudaPlan: gradient ", k, " has shape ", grad.sizes(), " and strides ",
                grad.strides(), ", its slot ", view.sizes(), " and ", view.strides());
    TORCH_CHECK(!grad.is_conj() && !grad.is_neg(), "CudaPlan: gradient ", k,
                " is conjugated or negated lazily");
  }

  // Checks them all; nothing if none is defined.
  std::optional<at::ScalarType> dtype_of(const std::vector<at::Tensor>& grads) const {
    TORCH_CHECK(grads.size() == views.size(), "CudaPlan: ", grads.size(),
                " gradients for ", views.size(), " slots");
    std::optional<at::ScalarType> dtype;
    for (std::size_t k = 0; k < grads.size(); ++k) {
      if (!grads[k].defined()) {
        continue;
      }
      check_grad(k, grads[k]);
      TORCH_CHECK(!dtype || *dtype == grads[k].scalar_type(), "CudaPlan: gradient ", k,
                  " is ", grads[k].scalar_type(), ", others are ", *dtype);
      dtype = grads[k].scalar_type();
    }
    check_conversion(dtype);
    return dtype;
  }

  void check_conversion(const std::optional<at::ScalarType>& dtype) const {
    const auto mine = views[0].scalar_type();
    TORCH_CHECK(!dtype || *dtype == mine ||
                    (is_number(words.type) && is_number(words_of(*dtype).type)),
                "CudaPlan: no conversion between ", *dtype, " and ", mine);
  }

  cuda::Stats
  stats_of(const std::optional<std::pair<at::Tensor, at::Tensor>>& stats) const {
    if (!stats) {
      return {};
    }
    const auto& [squares, lowest] = *stats;
    const auto device = views[0].device();
    TORCH_CHECK(squares.device() == device && squares.scalar_type() == at::kDouble &&
                    squares.numel() == 1,
                "CudaPlan: the sum of squares is one float64 on ", device);
    TORCH_CHECK(lowest.device() == device && lowest.scalar_type() == at::kLong &&
                    lowest.numel() == 1,
                "CudaPlan: the lowest slot is one int64 on ", device);
    return {static_cast<double*>(squares.mutable_data_ptr()),
            static_cast<long long*>(lowest.mutable_data_ptr())};
  }

  std::vector<at::Tensor> views;
  Words words;
  at::Tensor chunks;  // device memory
  std::vector<cuda::Launch> launches;
  std::optional<c10::cuda::CUDAStream> last_stream;
};

CudaPlan::CudaPlan(const std::vector<at::Tensor>& views) {
  check_views(views);
  impl_ = std::make_unique<Impl>(views);
}

CudaPlan::~CudaPlan() = default;
CudaPlan::CudaPlan(CudaPlan&&) noexcept = default;
CudaPlan& CudaPlan::operator=(CudaPlan&&) noexcept = default;

void CudaPlan::flatten(const std::vector<at::Tensor>& grads, double scale,
                       const std::optional<std::pair<at::Tensor, at::Tensor>>& stats) {
  const auto dtype = impl_->dtype_of(grads);
  const cuda::Stats targets = impl_->stats_of(stats);
  TORCH_CHECK(is_number(impl_->words.type) || (scale == 1.0 && !stats),
              "CudaPlan: ", impl_->views[0].scalar_type(), " can only be copied");
  if (!dtype) {
    return;
  }
  std::vector<const void*> pointers(grads.size(), nullptr);
  for (std::size_t k = 0; k < grads.size(); ++k) {
    pointers[k] = grads[k].defined() ? grads[k].const_data_ptr() : nullptr;
  }
  const c10::cuda::CUDAGuard guard(impl_->views[0].device());
  C10_CUDA_CHECK(cuda::flatten(impl_->bucket(), pointers.data(), words_of(*dtype).type,
                               scale, targets, impl_->stream()));
  note_write(impl_->views[0]);  // windows on one buffer share its version
}

void CudaPlan::unflatten(const std::vector<at::Tensor>& grads) {
  const auto dtype = impl_->dtype_of(grads);
  if (!dtype) {
    return;
  }
  std::vector<void*> pointers(grads.size(), nullptr);
  for (std::size_t k = 0; k < grads.size(); ++k) {
    pointers[k] = grads[k].defined() ? grads[k].mutable_data_ptr() : nullptr;
  }
  const c10::cuda::CUDAGuard guard(impl_->views[0].device());
  C10_CUDA_CHECK(cuda::unflatten(impl_->bucket(), pointers.data(),
                                 words_of(*dtype).type, impl_->stream()));
  for (const auto& grad : grads) {
    if (grad.defined()) {
      note_write(grad);
    }
  }
}

}  // namespace minidp
