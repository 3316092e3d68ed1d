// Which gradients a logical rank has brought, and what each of them was like then.
//
// The twin of `Arrived` in minidp/logical/arrived.py, which is its specification. A grad hook calls
// `note`, without the GIL and on any thread, each hook for another parameter.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

namespace minidp {

class Arrived {
 public:
  explicit Arrived(std::vector<at::Tensor> params);

  void note(size_t i);
  void note_all();
  void clear();
  // How many are noted.
  size_t size() const;
  std::vector<int64_t> changed() const;
  bool is_any_there() const;
  // The second value: whether all are there, plain, on the CPU and without a graph.
  std::pair<std::vector<at::Tensor>, bool> take();

 private:
  // Weak, so that it keeps no memory. While it lives no other tensor has this address.
  using Weak = c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>;
  struct Note {
    Weak grad;
    uint32_t version;
  };

  std::vector<at::Tensor> params_;
  std::vector<std::optional<Note>> notes_;  // by parameter
};

}  // namespace minidp
