// What Python calls; `tests/support/sim` says what it is for.
#include <torch/csrc/utils/pybind.h>
#include <torch/extension.h>

#include "group.h"
#include "launch.h"
#include "memory.h"
#include "races.h"
#include "random.h"
#include "tensors.h"

namespace py = pybind11;

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  using namespace sim;
  m.attr("num_devices") = kNumDevices;
  m.def("current_device", current_device);
  m.def("exchange_device", exchange_device);
  m.def("default_generator", default_generator);
  m.def("drain", [] { drain(-1); });

  m.def("set_delay", set_delay);
  m.def("hold", [](int device, int64_t id) { hold(stream_at(device, id)); });
  m.def("let_go", [](int device, int64_t id) { let_go(stream_at(device, id)); });
  m.def("set_detecting", set_detecting);
  m.def("ignore_marks_of", ignore_marks_of);
  m.def("take_races", take_races);
  m.def("set_tracing", set_tracing);
  m.def("take_trace", take_trace);
  m.def("refuse_host_waits", refuse_host_waits);
  m.def("take_counters", [] {
    const auto counters = take_counters();
    py::dict all;
    all["kernels"] = counters.kernels;
    all["collectives"] = counters.collectives;
    all["events"] = counters.events;
    all["stream_waits"] = counters.stream_waits;
    all["host_waits"] = counters.host_waits;
    return all;
  });
  m.def("memory", [](int device) {
    const auto used = usage(device);
    return py::make_tuple(used.allocated, used.peak, used.reserved);
  });
  m.def("reset_peak", reset_peak);

  m.def("make_group", [](std::vector<c10::intrusive_ptr<c10d::Backend>> gloos, double seconds) {
    const auto timeout = std::chrono::milliseconds(static_cast<int64_t>(seconds * 1000));
    return make_group(std::move(gloos), timeout);
  });
  m.def("set_group_mutant", set_group_mutant);
  m.def("abort_group_on_timeout", [](bool aborts) {
    set_on_timeout(aborts ? OnTimeout::kAbortGroup : OnTimeout::kEndProcess);
  });
}
