#include "grad_hook.h"

#include <c10/util/Type.h>
#include <torch/csrc/autograd/function_hook.h>
#if __has_include(<torch/csrc/autograd/node.h>)
#include <torch/csrc/autograd/node.h>
#else  // before torch 2.13
#include <torch/csrc/autograd/function.h>
#endif
#include <torch/csrc/autograd/python_hook.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/csrc/dynamo/compiled_autograd.h>

#include <algorithm>
#include <atomic>
#include <typeinfo>
#include <utility>

namespace minidp {
namespace {

using torch::autograd::variable_list;

// A hook of the AccumulateGrad node, where torch's reducer has its own: behind the
// accumulation and all post-accumulate hooks, in the order of registration among others.
class GradHook : public torch::autograd::FunctionPostHook {
 public:
  GradHook(std::shared_ptr<GradTable> table, size_t index)
      : table_(std::move(table)), index_(index) {}

  variable_list operator()(const variable_list& outputs, const variable_list& /*inputs*/) override {
    if (const auto table = table_.load()) {
      table->fired(index_);
    }
    return outputs;
  }

  // Compiled autograd captures this backward: let Python refuse it, with an error that
  // names the rank, and of which the other ranks hear.
  void compiled_args(torch::dynamo::autograd::CompiledNodeArgs& /*args*/) const override {
    if (const auto table = table_.load()) {
      table->refuse_compiled(index_);
    }
  }

  void disarm() {
    table_.store(nullptr);
  }
  bool is_disarmed() const {
    return table_.load() == nullptr;
  }

 private:
  std::atomic<std::shared_ptr<GradTable>> table_;
  size_t index_;
};

using AnyHook = std::unique_ptr<torch::autograd::FunctionPostHook>;

uintptr_t key_of(const AnyHook& hook) {
  return reinterpret_cast<uintptr_t>(hook.get());
}

bool is_disarmed(const AnyHook& hook) {
  const auto* ours = dynamic_cast<const GradHook*>(hook.get());
  return ours != nullptr && ours->is_disarmed();
}

// What stays on a node when hooks have been removed.
bool is_empty(const AnyHook& hook) {
  if (is_disarmed(hook)) {
    return true;
  }
  const auto& any = *hook;
  // By name: torch does not export what a dynamic_cast needs.
  if (c10::demangle(typeid(any).name()) != "torch::autograd::PyFunctionPostHook") {
    return false;
  }
  const auto& python = static_cast<const torch::autograd::PyFunctionPostHook&>(any);
  return PyDict_Size(python.dict) == 0;
}

void prune(torch::autograd::Node& node) {
  std::vector<uintptr_t> disarmed;
  for (const auto& hook : node.post_hooks()) {
    if (is_disarmed(hook)) {
      disarmed.push_back(key_of(hook));
    }
  }
  for (const auto key : disarmed) {
    node.del_post_hook(key);
  }
}

}  // namespace

struct GradHooks::Attached {
  // Which kind of pointer holds a node depends on the version of torch.
  decltype(torch::autograd::impl::grad_accumulator(std::declval<at::Tensor&>())) node;
  uintptr_t key;
};

GradHooks::GradHooks(const std::shared_ptr<GradTable>& table) {
  for (size_t i = 0; i < table->size(); ++i) {
    auto node = torch::autograd::impl::grad_accumulator(table->params()[i]);
    TORCH_CHECK(node, "parameter ", i, " requires no gradient");
    prune(*node);
    const auto key = node->add_post_hook(std::make_unique<GradHook>(table, i));
    attached_.push_back(Attached{std::move(node), key});
  }
}

GradHooks::~GradHooks() {
  remove();
}

std::vector<size_t> GradHooks::shared() const {
  std::vector<size_t> found;
  for (size_t i = 0; i < attached_.size(); ++i) {
    const auto& hooks = attached_[i].node->post_hooks();
    if (std::any_of(hooks.begin(), hooks.end(), [&](const auto& hook) {
          return key_of(hook) != attached_[i].key && !is_empty(hook);
        })) {
      found.push_back(i);
    }
  }
  return found;
}

void GradHooks::remove() {
  for (const auto& each : attached_) {
    for (const auto& hook : each.node->post_hooks()) {
      if (key_of(hook) == each.key) {
        static_cast<GradHook&>(*hook).disarm();
      }
    }
  }
  attached_.clear();
}

}  // namespace minidp
