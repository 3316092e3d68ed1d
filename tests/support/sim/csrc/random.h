// Random numbers of the device.
//
// A device has the generator of the CPU, so that a training with dropout has the CPU's bits. A
// kernel runs later than its launch, and must get the numbers of its launch: it takes a copy of the
// generator, and the generator itself is moved on at the launch (operators.cpp).
#pragma once

#include <ATen/core/Generator.h>

namespace sim {

const at::Generator& default_generator(int device);  // -1: of the current device
at::Generator new_generator(int device);
// The generator of the CPU inside.
at::Generator inner(const at::Generator& generator);

}  // namespace sim
