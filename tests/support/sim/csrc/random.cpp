#include "random.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/ones_like.h>
#include <torch/library.h>

#include <array>
#include <tuple>

#include "stream.h"

namespace sim {
namespace {

class Generator final : public c10::GeneratorImpl {
 public:
  Generator(int device, at::Generator inner)
      : GeneratorImpl(
            c10::Device(c10::DeviceType::PrivateUse1, static_cast<c10::DeviceIndex>(device)),
            c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)),
        inner(std::move(inner)) {}

  void set_current_seed(uint64_t seed) override {
    inner.set_current_seed(seed);
  }
  void set_offset(uint64_t offset) override {
    inner.set_offset(offset);
  }
  uint64_t get_offset() const override {
    return inner.get_offset();
  }
  uint64_t current_seed() const override {
    return inner.current_seed();
  }
  uint64_t seed() override {
    return inner.seed();
  }
  void set_state(const c10::TensorImpl& state) override {
    inner.unsafeGetGeneratorImpl()->set_state(state);
  }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    return inner.unsafeGetGeneratorImpl()->get_state();
  }

  at::Generator inner;

 private:
  Generator* clone_impl() const override {
    return new Generator(device().index(), inner.clone());
  }
};

// The operator has no argument for a generator, so that the CPU's kernel would take the CPU's own,
// when it runs. Composed of others, which take the device's at their launch.
std::tuple<at::Tensor, at::Tensor> native_dropout(
    const at::Tensor& input, double p, std::optional<bool> train) {
  const auto flags = input.options().dtype(at::kBool);
  if (!train.value_or(true)) {
    return {input.clone(), at::ones_like(input, flags)};
  }
  const double kept = 1.0 - p;
  auto mask = at::empty_like(input, flags).bernoulli_(kept);
  auto output = input.mul(mask).mul_(kept == 0 ? 0.0 : 1.0 / kept);
  return {output, mask};
}

}  // namespace

const at::Generator& default_generator(int device) {
  static auto* all = [] {
    auto* made = new std::array<at::Generator, kNumDevices>;
    for (int index = 0; index < kNumDevices; ++index) (*made)[index] = new_generator(index);
    return made;
  }();
  return all->at(device < 0 ? current_device() : device);
}

at::Generator new_generator(int device) {
  const auto on = device < 0 ? current_device() : device;
  return at::make_generator<Generator>(on, at::detail::createCPUGenerator());
}

at::Generator inner(const at::Generator& generator) {
  const auto* ours = dynamic_cast<const Generator*>(generator.unsafeGetGeneratorImpl());
  TORCH_CHECK(ours, "sim: expected a generator of the device, found one of ", generator.device());
  return ours->inner;
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("native_dropout", native_dropout);
}

}  // namespace sim
