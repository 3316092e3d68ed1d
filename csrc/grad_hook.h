// The hooks that write gradients down in a `GradTable`. No header of autograd in here: to read
// one takes the compiler seconds.
#pragma once

#include <memory>
#include <vector>

#include "grad_table.h"

namespace minidp {

// The hooks of all parameters of an `GradTable`, until `remove`. A removed hook stays on
// its node and does nothing: the engine may be walking the node's hooks right now, if the
// garbage collector is what removes it. The next hook on the node takes it away.
class GradHooks {
 public:
  explicit GradHooks(const std::shared_ptr<GradTable>& table);
  ~GradHooks();
  GradHooks(const GradHooks&) = delete;
  GradHooks& operator=(const GradHooks&) = delete;

  // Parameters on whose node there are other hooks: one may run behind ours.
  std::vector<size_t> shared() const;
  void remove();

 private:
  struct Attached;  // a node of the graph, and which of its hooks is ours
  std::vector<Attached> attached_;
};

}  // namespace minidp
