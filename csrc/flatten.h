// The copies between gradients and a bucket's buffer, on CPU and, with cuda/, on GPUs.
//
// minidp/core/kernels.py is the specification: every function here gives the same bits, but for
// the sign and payload of a NaN.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace minidp {

// Whether a tensor is plain: subclasses, sparse tensors and lazy zeros have no address.
bool has_memory(const at::Tensor& tensor);

// Whether two tensors of one device and shape lie in memory in the same order and without gaps, so
// that copying one to the other is a loop over memory.
bool same_order(const at::Tensor& a, const at::Tensor& b);

// Tensors that the caller keeps alive meanwhile: counting references costs as much as
// copying a small one.
using Refs = std::vector<const at::Tensor*>;

// view = grad * scale by torch itself, for whatever is not a loop over memory.
void scale_by_torch(const at::Tensor& view, const at::Tensor& grad, double scale);

// Whether copies to or from a buffer of this size bypass the cache: it is evicted anyway before it
// is read again, and storing to memory that was not read first saves a third of the traffic.
bool is_past_cache(size_t nbytes);

// memcpy with such stores. Before another thread may read them: `fence_past_cache`.
void copy_past_cache(void* to, const void* from, size_t nbytes);
void fence_past_cache();

// Stretches of memory to copy, all of one type.
struct Rows {
  bool past_cache = false;
  std::vector<void*> to;
  std::vector<const void*> from;
  std::vector<int64_t> ends;  // sums of their numbers of elements

  void reserve(size_t n);
  void add(void* to, const void* from, int64_t numel);
};

// Whether there are loops on CPU for a type: floating point, but not complex.
bool has_loop(at::ScalarType type);

// to = from * scale on CPU, for each row.
void copy_rows(const Rows& rows, at::ScalarType type, double scale);

// The same for one row, on this thread.
void copy_row(
    void* to, const void* from, int64_t numel, at::ScalarType type, double scale, bool past_cache);

// to[k] = left[k] + right[k]; `to` may be `left`. Writes nothing and returns false unless all are
// plain tensors on the CPU, of one type, and those of each sum have one shape and lie in memory in
// the same order.
bool add(const Refs& to, const Refs& left, const Refs& right);

// views[k] = grads[k] * scale, of one dtype. An undefined gradient gives zeros.
void flatten(const Refs& views, const Refs& grads, double scale);

// grads[k] = views[k] * scale.
void unflatten(const Refs& grads, const Refs& views, double scale = 1.0);

}  // namespace minidp
