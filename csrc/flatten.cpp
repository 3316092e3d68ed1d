#include "flatten.h"

#include <ATen/Parallel.h>
#include <ATen/core/grad_mode.h>
#include <ATen/cpu/vec/vec.h>
#include <ATen/ops/mul_ops.h>
#include <ATen/ops/scalar_tensor_ops.h>
#include <c10/util/complex.h>

#include <algorithm>
#include <bit>
#include <cstring>
#include <fstream>
#include <type_traits>

#if defined(__AVX__)
#include <immintrin.h>
#endif

#include "adder.h"
#include "cuda/copy_rows.h"

namespace minidp {

namespace cuda {
CopyRows* copy_rows = nullptr;
}  // namespace cuda

namespace {

// Below this many bytes a thread costs more than it saves.
constexpr int64_t kBytesPerThread = 1 << 20;

template <typename T>
constexpr bool is_half = std::is_same_v<T, at::BFloat16> || std::is_same_v<T, at::Half>;

// Torch multiplies halves in float and rounds once.
template <typename T>
using Wide = std::conditional_t<is_half<T>, float, T>;

template <typename T>
T scaled(T x, Wide<T> scale) {
  return static_cast<T>(static_cast<Wide<T>>(x) * scale);
}

// Each returns how many elements it did; the loop in scale_row does the rest.
int64_t scale_halves(at::Half* to, const at::Half* from, int64_t n, float scale) {
  // The compiler does not vectorise these conversions by itself.
  using Vec = at::vec::Vectorized<at::Half>;
  const at::vec::Vectorized<float> factor(scale);
  int64_t i = 0;
  for (; i + Vec::size() <= n; i += Vec::size()) {
    auto [low, high] = at::vec::convert_to_float<at::Half>(Vec::loadu(from + i));
    at::vec::convert_from_float<at::Half>(low * factor, high * factor).store(to + i);
  }
  return i;
}

// In integers, which measured 10 % faster than at::vec: a bfloat16 is the upper half of a
// float, and is rounded to nearest, ties to even.
int64_t scale_halves(at::BFloat16* to, const at::BFloat16* from, int64_t n, float scale) {
  for (int64_t i = 0; i < n; ++i) {
    const float x = std::bit_cast<float>(uint32_t{from[i].x} << 16) * scale;
    const auto bits = std::bit_cast<uint32_t>(x);
    const uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    to[i].x = x != x ? 0x7fc0 : static_cast<uint16_t>(rounded);
  }
  return n;
}

// In pieces: the C library's memcpy of some MiB takes another path, and measured a fifth
// slower here (38 against 47 GB/s, both directions counted).
void copy_bytes(void* to, const void* from, size_t size) {
  constexpr size_t kPiece = 64 * 1024;
  for (size_t done = 0; done < size; done += kPiece) {
    std::memcpy(
        static_cast<char*>(to) + done,
        static_cast<const char*>(from) + done,
        std::min(kPiece, size - done));
  }
}

#if defined(__AVX512F__)
// A whole cache line in each store: 1.1 to 1.2 times as fast as halves of it.
void stream_line(float* to, const float* from, float factor) {
  _mm512_stream_ps(to, _mm512_mul_ps(_mm512_loadu_ps(from), _mm512_set1_ps(factor)));
}

void stream_line(double* to, const double* from, double factor) {
  _mm512_stream_pd(to, _mm512_mul_pd(_mm512_loadu_pd(from), _mm512_set1_pd(factor)));
}

// Whether `stream_line` has done the row. It takes one pass, where others scale blocks first.
template <typename T>
bool scale_past_cache(T* to, const T* from, int64_t n, double scale) {
  if constexpr (std::is_same_v<T, float> || std::is_same_v<T, double>) {
    constexpr int64_t kLine = 64 / sizeof(T);
    const auto factor = static_cast<T>(scale);
    const int64_t ahead = -reinterpret_cast<uintptr_t>(to) % 64 / sizeof(T);
    int64_t i = 0;
    for (; i < std::min(ahead, n); ++i) {
      to[i] = from[i] * factor;
    }
    for (; i + kLine <= n; i += kLine) {
      stream_line(to + i, from + i, factor);
    }
    for (; i < n; ++i) {
      to[i] = from[i] * factor;
    }
    return true;
  }
  return false;
}
#else
template <typename T>
bool scale_past_cache(T* /*to*/, const T* /*from*/, int64_t /*n*/, double /*scale*/) {
  return false;
}
#endif

template <typename T>
void scale_row(T* to, const T* from, int64_t n, double scale, bool past_cache = false) {
  if (past_cache && scale == 1) {
    copy_past_cache(to, from, n * sizeof(T));
    return;
  }
  if (past_cache) {
    if (scale_past_cache(to, from, n, scale)) {
      return;
    }
    constexpr int64_t kBlock = 4096 / sizeof(T);
    alignas(64) T block[kBlock];
    for (int64_t at = 0; at < n; at += kBlock) {
      const int64_t size = std::min(kBlock, n - at);
      scale_row(block, from + at, size, scale);
      copy_past_cache(to + at, block, size * sizeof(T));
    }
    return;
  }
  if (scale == 1) {
    copy_bytes(to, from, n * sizeof(T));
    return;
  }
  const auto factor = static_cast<Wide<T>>(scale);
  int64_t i = 0;
  if constexpr (is_half<T>) {
    i = scale_halves(to, from, n, factor);
  }
  for (; i < n; ++i) {
    to[i] = scaled(from[i], factor);
  }
}

// One stretch of memory: the elements [begin, end) of slot `slot`.
struct Stretch {
  size_t slot;
  int64_t begin;
  int64_t end;
};

// Calls `work(stretch)` for all elements of all slots, on several threads if that pays.
template <typename Work>
void for_stretches(const std::vector<int64_t>& ends, int64_t item_size, Work work) {
  const int64_t total = ends.empty() ? 0 : ends.back();
  at::parallel_for(0, total, kBytesPerThread / item_size, [&](int64_t begin, int64_t end) {
    auto slot = std::upper_bound(ends.begin(), ends.end(), begin) - ends.begin();
    while (begin < end) {
      const int64_t start = slot == 0 ? 0 : ends[slot - 1];
      const int64_t stop = std::min(ends[slot], end);
      if (begin < stop) {
        work(Stretch{static_cast<size_t>(slot), begin - start, stop - start});
      }
      begin = stop;
      ++slot;
    }
  });
}

template <typename F>
void with_type(at::ScalarType type, F f) {
  switch (type) {
    case at::kFloat:
      return f(float{});
    case at::kDouble:
      return f(double{});
    case at::kBFloat16:
      return f(at::BFloat16{});
    case at::kHalf:
      return f(at::Half{});
    default:
      TORCH_INTERNAL_ASSERT(false, "minidp: no loop for ", type);
  }
}

template <typename T>
void copy_typed(const Rows& rows, double scale) {
  for_stretches(rows.ends, sizeof(T), [&](Stretch s) {
    scale_row(
        static_cast<T*>(rows.to[s.slot]) + s.begin,
        static_cast<const T*>(rows.from[s.slot]) + s.begin,
        s.end - s.begin,
        scale,
        rows.past_cache);
    if (rows.past_cache) {
      fence_past_cache();
    }
  });
}

// In blocks that stay in the cache between the copy and the addition.
template <typename T>
void add_typed(const Rows& left, const Rows& right) {
  constexpr int64_t kBlock = 1024;
  for_stretches(left.ends, sizeof(T), [&](Stretch s) {
    auto* to = static_cast<T*>(left.to[s.slot]);
    const auto* first = static_cast<const T*>(left.from[s.slot]);
    const auto* second = static_cast<const T*>(right.from[s.slot]);
    for (int64_t at = s.begin; at < s.end; at += kBlock) {
      const int64_t size = std::min(kBlock, s.end - at);
      if (to != first) {
        std::memcpy(to + at, first + at, size * sizeof(T));
      }
      Adder<T>::add(to + at, second + at, size);
    }
  });
}

// Whether a copy is a loop over memory, or a row of a kernel.
bool is_loop(const at::Tensor& to, const at::Tensor& from) {
  if (!has_loop(to.scalar_type()) || to.scalar_type() != from.scalar_type() ||
      !same_order(to, from)) {
    return false;
  }
  return to.is_cpu() || (to.is_cuda() && cuda::copy_rows != nullptr);
}

// Whether two copies to these can be done together.
bool are_alike(const at::Tensor& to, const at::Tensor& other) {
  return to.scalar_type() == other.scalar_type() && to.device() == other.device();
}

// Copies slots that are all alike.
void copy_together(
    const Refs& to, const Refs& from, const std::vector<size_t>& slots, double scale) {
  const size_t first = slots.front();
  if (to[first]->is_cuda()) {
    cuda::copy_rows(to, from, slots, scale);
    return;
  }
  Rows rows;
  rows.reserve(slots.size());
  rows.past_cache =
      is_past_cache(std::max(to[first]->storage().nbytes(), from[first]->storage().nbytes()));
  for (const size_t slot : slots) {
    rows.add(to[slot]->data_ptr(), from[slot]->const_data_ptr(), to[slot]->numel());
  }
  copy_rows(rows, to[first]->scalar_type(), scale);
}

void copy_all(const Refs& to, const Refs& from, double scale) {
  std::vector<size_t> alike;
  alike.reserve(to.size());
  const auto flush = [&] {
    if (!alike.empty()) {
      copy_together(to, from, alike, scale);
      alike.clear();
    }
  };
  for (size_t k = 0; k < to.size(); ++k) {
    if (!from[k]->defined()) {
      to[k]->zero_();
    } else if (!is_loop(*to[k], *from[k])) {
      scale_by_torch(*to[k], *from[k], scale);
    } else {
      if (!alike.empty() && !are_alike(*to[alike.front()], *to[k])) {
        flush();
      }
      alike.push_back(k);
    }
  }
  flush();
}

}  // namespace

void Rows::reserve(size_t n) {
  to.reserve(n);
  from.reserve(n);
  ends.reserve(n);
}

void Rows::add(void* target, const void* source, int64_t numel) {
  to.push_back(target);
  from.push_back(source);
  ends.push_back((ends.empty() ? 0 : ends.back()) + numel);
}

bool has_loop(at::ScalarType type) {
  return type == at::kFloat || type == at::kDouble || type == at::kBFloat16 || type == at::kHalf;
}

bool add(const Refs& to, const Refs& left, const Refs& right) {
  Rows first;
  Rows second;
  first.reserve(to.size());
  second.reserve(to.size());
  for (size_t k = 0; k < to.size(); ++k) {
    const auto& sum = *to[k];
    if (!sum.defined() || !sum.is_cpu() || !has_loop(sum.scalar_type()) ||
        sum.scalar_type() != to[0]->scalar_type() || sum.requires_grad()) {
      return false;
    }
    for (const auto* each : {left[k], right[k]}) {
      if (!each->defined() || each->scalar_type() != sum.scalar_type() || each->requires_grad() ||
          !same_order(sum, *each)) {
        return false;
      }
    }
    first.add(sum.data_ptr(), left[k]->const_data_ptr(), sum.numel());
    second.add(sum.data_ptr(), right[k]->const_data_ptr(), sum.numel());
  }
  if (to.empty()) {
    return true;
  }
  with_type(to[0]->scalar_type(), [&](auto x) { add_typed<decltype(x)>(first, second); });
  for (const auto* sum : to) {
    sum->unsafeGetTensorImpl()->bump_version();  // written behind autograd's back
  }
  return true;
}

void copy_rows(const Rows& rows, at::ScalarType type, double scale) {
  with_type(type, [&](auto x) { copy_typed<decltype(x)>(rows, scale); });
}

void copy_row(
    void* to, const void* from, int64_t numel, at::ScalarType type, double scale, bool past_cache) {
  with_type(type, [&](auto x) {
    using T = decltype(x);
    scale_row(static_cast<T*>(to), static_cast<const T*>(from), numel, scale, past_cache);
  });
  if (past_cache) {
    fence_past_cache();
  }
}

// Half of the last cache, because several ranks share it, and gradients lie there too.
bool is_past_cache(size_t nbytes) {
  static const size_t limit = [] {
    std::ifstream file("/sys/devices/system/cpu/cpu0/cache/index3/size");  // "32768K"
    size_t kib = 0;
    return file >> kib && kib != 0 ? kib * 1024 / 2 : size_t{16} << 20;
  }();
  return nbytes > limit;
}

void copy_past_cache(void* to, const void* from, size_t nbytes) {
#if defined(__AVX__)
#if defined(__AVX512F__)
  constexpr size_t kVector = 64;
  const auto stream = [](char* target, const char* source) {
    _mm512_stream_si512(reinterpret_cast<__m512i*>(target), _mm512_loadu_si512(source));
  };
#else
  constexpr size_t kVector = 32;
  const auto stream = [](char* target, const char* source) {
    _mm256_stream_si256(
        reinterpret_cast<__m256i*>(target),
        _mm256_loadu_si256(reinterpret_cast<const __m256i*>(source)));
  };
#endif
  auto* target = static_cast<char*>(to);
  const auto* source = static_cast<const char*>(from);
  const size_t head = std::min(-reinterpret_cast<uintptr_t>(target) % kVector, nbytes);
  std::memcpy(target, source, head);
  size_t at = head;
  for (; at + kVector <= nbytes; at += kVector) {
    stream(target + at, source + at);
  }
  std::memcpy(target + at, source + at, nbytes - at);
#else
  copy_bytes(to, from, nbytes);
#endif
}

void fence_past_cache() {
#if defined(__AVX__)
  _mm_sfence();
#endif
}

bool has_memory(const at::Tensor& tensor) {
  return tensor.layout() == at::kStrided && !tensor._is_zerotensor() &&
      !tensor.unsafeGetTensorImpl()->is_python_dispatch();
}

bool same_order(const at::Tensor& a, const at::Tensor& b) {
  if (!has_memory(a) || !has_memory(b) || a.device() != b.device() || a.is_conj() != b.is_conj() ||
      a.is_neg() || b.is_neg() || a.sizes() != b.sizes()) {
    return false;
  }
  if (a.is_contiguous() && b.is_contiguous()) {
    return true;
  }
  return a.strides() == b.strides() && a.is_non_overlapping_and_dense();
}

// Odd strides, complex numbers (whose product with a real number is torch's own), lazily
// negated or conjugated tensors.
void scale_by_torch(const at::Tensor& view, const at::Tensor& grad, double scale) {
  at::NoGradGuard no_grad;
  if (scale == 1) {
    view.copy_(grad);
  } else {
    // By their schemas: the headers of at::mul_out and at::scalar_tensor take seconds.
    auto factor = at::_ops::scalar_tensor::call(scale, at::kDouble, {}, at::kCPU, {});
    factor.unsafeGetTensorImpl()->set_wrapped_number(true);  // never promotes
    at::Tensor out = view;
    at::_ops::mul_out::call(grad, factor, out);
  }
}

void flatten(const Refs& views, const Refs& grads, double scale) {
  copy_all(views, grads, scale);
}

void unflatten(const Refs& grads, const Refs& views, double scale) {
  copy_all(grads, views, scale);
  for (const auto* grad : grads) {
    grad->unsafeGetTensorImpl()->bump_version();  // written behind autograd's back
  }
}

}  // namespace minidp
