// All other operators, in one function: it asks torch for the shapes of the results, and launches
// the kernel of the CPU, which the thread of the stream runs on the memory of the tensors.
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

#include <set>

#include "random.h"
#include "tensors.h"

namespace sim {
namespace {

using c10::IValue;
using torch::jit::Stack;
using Change = std::function<at::Tensor(const at::Tensor&)>;

// Results whose size depends on values: there the host waits, as it does for a GPU.
const std::set<std::string> kSizedByValues = {
    "aten::nonzero",
    "aten::masked_select",
    "aten::_unique2",
    "aten::unique_dim",
    "aten::unique_consecutive",
    "aten::repeat_interleave.Tensor",
    "aten::bincount",
};

// Results whose shape on the CPU is not that of other devices.
const std::set<std::string> kShapedByTheCpu = {"aten::native_batch_norm"};

// The value with other tensors, and on another device where it is one.
IValue changed(const IValue& value, c10::DeviceType device, const Change& change) {
  if (value.isTensor()) return value.toTensor().defined() ? change(value.toTensor()) : value;
  if (value.isTensorList()) {
    c10::List<at::Tensor> list;
    for (const at::Tensor& tensor : value.toTensorVector())
      list.push_back(tensor.defined() ? change(tensor) : tensor);
    return list;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> list;
    for (const auto& tensor : value.toOptionalTensorVector())
      list.push_back(tensor && tensor->defined() ? change(*tensor) : tensor);
    return list;
  }
  if (value.isDevice() && value.toDevice().type() == kSim) return c10::Device(device);
  return value;
}

void for_each_tensor(const IValue& value, const std::function<void(const at::Tensor&)>& visit) {
  changed(value, c10::kCPU, [&](const at::Tensor& tensor) {
    visit(tensor);
    return tensor;
  });
}

// An argument for the kernel: addresses of the device's tensors, copies of the host's, which the
// host may change after the launch.
std::function<IValue()> for_kernel(const IValue& argument) {
  std::vector<Alias> aliases;
  const auto shell = changed(argument, c10::kCPU, [&](const at::Tensor& tensor) {
    if (is_sim(tensor)) aliases.emplace_back(tensor);
    if (is_sim(tensor)) return at::empty({0});  // holds a place
    return tensor.unsafeGetTensorImpl()->is_wrapped_number() ? tensor : tensor.clone();
  });
  std::vector<bool> is_place;
  for_each_tensor(argument, [&](const at::Tensor& tensor) { is_place.push_back(is_sim(tensor)); });
  return [shell, aliases, is_place] {
    size_t tensor = 0, alias = 0;
    return changed(shell, c10::kCPU, [&](const at::Tensor& host) {
      return is_place[tensor++] ? aliases[alias++].on_cpu() : host;
    });
  };
}

bool holds_tensors(const c10::Argument& result) {
  const auto& type = *result.type();
  return type.isSubtypeOf(*c10::TensorType::get()) || type.isSubtypeOf(*c10::ListType::ofTensors());
}

bool is_for_lists(const std::string& name) {
  return name.rfind("aten::_foreach_", 0) == 0;
}

// One call of an operator.
class Call {
 public:
  Call(const c10::OperatorHandle& op, Stack arguments)
      : op_(op),
        target_(op),
        name_(c10::toString(op.operator_name())),
        args_(std::move(arguments)) {
    find_device();
    find_what_is_written();
    choose_kernel();
    find_generator();
  }

  Stack run() {
    const c10::Device device(kSim, static_cast<c10::DeviceIndex>(device_));
    c10::DeviceGuard guard(device);
    const auto& results = op_.schema().returns();
    const bool gives_tensors = std::all_of(results.begin(), results.end(), holds_tensors);
    if (!gives_tensors || is_sized_by_values()) return run_now();
    if (has_fresh_results() || has_out()) infer_results();
    if (generator_) move_generator_on();
    launch_kernel();
    if (is_for_lists(name_)) count_changes();
    return has_fresh_results() ? results_ : results_among_arguments();
  }

 private:
  bool has_fresh_results() const {
    const auto& results = op_.schema().returns();
    const auto is_argument = [](const c10::Argument& result) { return result.alias_info(); };
    return !results.empty() && std::none_of(results.begin(), results.end(), is_argument);
  }

  bool is_sized_by_values() const {
    if (name_ != "aten::index.Tensor") return kSizedByValues.count(name_);
    bool has_mask = false;
    for_each_tensor(args_.at(1), [&](const at::Tensor& index) {
      has_mask |= index.scalar_type() == at::kBool || index.scalar_type() == at::kByte;
    });
    return has_mask;
  }

  bool has_out() const {
    for (const auto& argument : op_.schema().arguments())
      if (argument.is_out()) return true;
    return false;
  }

  void find_device() {
    device_ = -1;
    for (const auto& arg : args_) {
      for_each_tensor(arg, [&](const at::Tensor& tensor) {
        if (is_sim(tensor)) device_ = std::max<int>(device_, tensor.device().index());
      });
      if (arg.isDevice() && device_ < 0) device_ = arg.toDevice().index();
    }
    if (device_ < 0) device_ = current_device();
  }

  void find_what_is_written() {
    for (const auto& argument : op_.schema().arguments())
      is_written_.push_back(argument.alias_info() && argument.alias_info()->isWrite());
    // Its schema does not say that it updates the running statistics.
    if (name_ == "aten::native_batch_norm") is_written_.at(3) = is_written_.at(4) = true;
  }

  // torch has two operators for convolutions on devices that it does not know.
  void choose_kernel() {
    auto& dispatcher = c10::Dispatcher::singleton();
    if (name_ == "aten::convolution_overrideable")
      target_ = dispatcher.findSchemaOrThrow("aten::convolution", "");
    if (name_ != "aten::convolution_backward_overrideable") return;
    target_ = dispatcher.findSchemaOrThrow("aten::convolution_backward", "");
    const auto weight = args_.at(2).toTensor();
    const bool is_transposed = args_.at(6).toBool();
    const auto groups = args_.at(8).toInt();
    const auto outputs = is_transposed ? weight.size(1) * groups : weight.size(0);
    args_.insert(args_.begin() + 3, c10::List<int64_t>({outputs}));  // sizes of the bias
    is_written_.insert(is_written_.begin() + 3, false);
  }

  void find_generator() {
    const auto& arguments = op_.schema().arguments();
    const auto optional = c10::OptionalType::create(c10::GeneratorType::get());
    for (size_t i = 0; i < arguments.size(); ++i) {
      if (!arguments[i].type()->isSubtypeOf(*optional)) continue;
      generator_ = inner(args_[i].isNone() ? default_generator(device_) : args_[i].toGenerator());
      generator_at_ = i;
    }
  }

  // Calls the operator on tensors without the values of the real ones.
  Stack try_on(c10::DeviceType device) {
    Stack stack;
    for (const auto& arg : args_)
      stack.push_back(changed(arg, device, [&](const at::Tensor& tensor) {
        if (!is_sim(tensor)) return tensor;
        const auto options = tensor.options().device(device);
        auto other = at::empty_strided(tensor.sizes(), tensor.strides(), options);
        return device == c10::kCPU ? other.fill_(1) : other;  // 1 is a probability, too
      }));
    at::AutoDispatchBelowAutograd below;
    target_.callBoxed(&stack);
    return stack;
  }

  void infer_results() {
    Stack shapes;
    try {
      shapes = try_on(kShapedByTheCpu.count(name_) ? c10::kCPU : c10::kMeta);
    } catch (const c10::Error&) {  // there is no shape function
      if (generator_) args_[generator_at_] = generator_->clone();  // takes no numbers from it
      shapes = try_on(c10::kCPU);
    }
    if (has_out()) {
      resize_out(shapes);
      return;
    }
    for (const auto& shape : shapes)
      results_.push_back(changed(
          shape, c10::kCPU, [&](const at::Tensor& tensor) { return empty_on(device_, tensor); }));
  }

  void resize_out(const Stack& shapes) {
    size_t result = 0;
    const auto& arguments = op_.schema().arguments();
    for (size_t i = 0; i < arguments.size(); ++i)
      if (arguments[i].is_out() && args_[i].isTensor() && result < shapes.size())
        at::native::resize_output(args_[i].toTensor(), shapes[result++].toTensor().sizes());
  }

  // The kernel gets the numbers that are next now. What it takes does not depend on values, so a
  // run on other values takes as many from the generator itself.
  void move_generator_on() {
    auto copy = generator_->clone();
    args_[generator_at_] = *generator_;
    try_on(c10::kCPU);
    args_[generator_at_] = copy;
  }

  void launch_kernel() {
    std::vector<Range> ranges;
    std::vector<std::function<IValue()>> makers;
    for (size_t i = 0; i < args_.size(); ++i) {
      makers.push_back(for_kernel(args_[i]));
      for_each_tensor(args_[i], [&](const at::Tensor& tensor) {
        if (is_sim(tensor)) ranges.push_back(range_of(tensor, is_written_[i]));
      });
    }
    std::vector<std::vector<Alias>> fresh(results_.size());
    for (size_t i = 0; i < results_.size(); ++i)
      for_each_tensor(results_[i], [&](const at::Tensor& tensor) {
        fresh[i].emplace_back(tensor);
        ranges.push_back(range_of(tensor, true));
      });
    launch(current_stream(device_), name_, ranges, [makers, fresh, target = target_] {
      at::AutoDispatchBelowAutograd below;
      Stack stack;
      for (const auto& make : makers) stack.push_back(make());
      target.callBoxed(&stack);
      // A gradient that nobody asked for is no tensor here, although its shape function gives one.
      for (size_t i = 0; i < fresh.size(); ++i) {
        size_t next = 0;
        for_each_tensor(stack.at(i), [&](const at::Tensor& tensor) {
          fresh[i].at(next++).on_cpu().copy_(tensor);
        });
      }
    });
  }

  // As kernels for lists do on a GPU: torch leaves it to them.
  void count_changes() const {
    for (size_t i = 0; i < args_.size(); ++i)
      if (is_written_[i])
        for_each_tensor(args_[i], [](const at::Tensor& tensor) {
          tensor.unsafeGetTensorImpl()->bump_version();
        });
  }

  Stack results_among_arguments() const {
    Stack found;
    const auto& arguments = op_.schema().arguments();
    for (const auto& result : op_.schema().returns())
      for (size_t i = 0; i < arguments.size(); ++i) {
        const auto* info = arguments[i].alias_info();
        if (!info || !result.alias_info()) continue;
        if (info->beforeSets() != result.alias_info()->beforeSets()) continue;
        found.push_back(args_[i]);
        break;
      }
    return found;
  }

  // The host computes the results. They are written on the stream, because their memory may have
  // been freed by another thread meanwhile, and the allocator then still overwrites it.
  Stack run_now() {
    synchronize(current_stream(device_), name_);
    Stack stack;
    for (const auto& arg : args_)
      stack.push_back(changed(arg, c10::kCPU, [](const at::Tensor& tensor) {
        return is_sim(tensor) ? Alias(tensor).on_cpu() : tensor;
      }));
    {
      at::AutoDispatchBelowAutograd below;
      target_.callBoxed(&stack);
    }
    Stack results;
    for (const auto& value : stack)
      results.push_back(changed(value, c10::kCPU, [&](const at::Tensor& tensor) {
        auto result = empty_on(device_, tensor);
        launch(
            current_stream(device_), name_, {range_of(result, true)}, [to = Alias(result), tensor] {
              to.on_cpu().copy_(tensor);
            });
        return result;
      }));
    return results;
  }

  const c10::OperatorHandle op_;
  c10::OperatorHandle target_;  // which the CPU runs
  const std::string name_;
  Stack args_;
  std::vector<bool> is_written_;
  int device_ = -1;
  std::optional<at::Generator> generator_;  // of the CPU
  size_t generator_at_ = 0;
  Stack results_;
};

void call_on_stream(const c10::OperatorHandle& op, Stack* stack) {
  const auto num_arguments = static_cast<int64_t>(op.schema().arguments().size());
  Stack arguments(stack->end() - num_arguments, stack->end());
  torch::jit::drop(*stack, num_arguments);
  for (auto& result : Call(op, std::move(arguments)).run()) stack->push_back(std::move(result));
}

bool gives_a_view(const c10::FunctionSchema& schema) {
  for (const auto& result : schema.returns())
    if (result.alias_info() && !result.alias_info()->isWrite()) return true;
  return false;
}

}  // namespace

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&call_on_stream>());
}

// Where the CPU has a kernel of its own, torch would take a composite one for this device, whose
// bits may differ. The kernels for lists of tensors are one launch each, as on a GPU.
TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  const std::set<std::string> other_files = {
      "aten::empty.memory_format",
      "aten::empty_strided",
      "aten::resize_",
      "aten::set_.source_Storage_storage_offset",
      "aten::set_.source_Storage",
      "aten::set_.source_Tensor",
      "aten::set_",
      "aten::is_set_to",
      "aten::view",
      "aten::as_strided",
      "aten::_reshape_alias",
      "aten::unfold",
      "aten::view_as_real",
      "aten::view_as_complex",
      "aten::record_stream",
      "aten::_copy_from",
      "aten::_copy_from_and_resize",
      "aten::_local_scalar_dense",
      "aten::copy_",  // calls _copy_from
  };
  for (const auto& name : c10::Dispatcher::singleton().getAllOpNames()) {
    if (name.name.rfind("aten::", 0) != 0) continue;
    const auto op = c10::Dispatcher::singleton().findSchema(name);
    if (!op || other_files.count(c10::toString(name)) || gives_a_view(op->schema())) continue;
    const bool is_for_others =
        name.name.find("_overrideable") != std::string::npos && name.overload_name.empty();
    if (!op->hasKernelForDispatchKey(c10::DispatchKey::CPU) && !is_for_lists(name.name) &&
        !is_for_others)
      continue;
    m.impl(
        c10::toString(name).c_str(), torch::CppFunction::makeFromBoxedFunction<&call_on_stream>());
  }
}

}  // namespace sim
