// Tensors of the device, and the tensors of the CPU on the same memory, on which kernels run.
#pragma once

#include <ATen/core/Tensor.h>

#include <string>
#include <vector>

#include "launch.h"

namespace sim {

constexpr auto kSim = c10::DeviceType::PrivateUse1;

inline bool is_sim(const at::Tensor& tensor) {
  return tensor.defined() && tensor.device().type() == kSim;
}

// A tensor without a share in its memory. A kernel has these: as on a GPU, what the host lets go of
// is free, whether or not kernels that read it have run.
class Alias {
 public:
  explicit Alias(const at::Tensor& tensor);
  at::Tensor on_cpu() const;

 private:
  void* data_;
  std::vector<int64_t> sizes_, strides_;
  at::ScalarType dtype_;
  bool is_conjugate_, is_negative_;
};

Range range_of(const at::Tensor& tensor, bool is_written);
at::Tensor empty_on(int device, const at::Tensor& like);  // with its sizes, strides and dtype

// Let `record_stream` do nothing when a library whose file has a name that begins so calls it; with
// "" it works for all. This is no moment at which another thread uses the device.
void ignore_marks_of(const std::string& library);

}  // namespace sim
