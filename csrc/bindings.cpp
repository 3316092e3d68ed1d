// What Python sees: minidp/core/kernels.py and minidp/core/grad_hooks.py say what each thing does.

#include <ATen/ops/from_blob.h>
#include <pybind11/stl.h>
#include <pybind11/stl_bind.h>
#include <torch/csrc/utils/pybind.h>

#include <algorithm>
#include <memory>
#include <string>

#include "arrived.h"
#include "cuda/copy_rows.h"
#include "flatten.h"
#include "grad_hook.h"
#include "slots.h"
#ifdef __linux__
#include "profiled_work.h"
#include "shared_memory.h"
#endif

PYBIND11_MAKE_OPAQUE(std::vector<int32_t>)

namespace {

namespace py = pybind11;
using minidp::Arrived;
using minidp::GradTable;
using minidp::Gathered;
using minidp::GradHooks;
using minidp::Slots;
using minidp::Tiles;
using Tensors = std::vector<at::Tensor>;
using Integers = std::vector<int32_t>;

// The whole of `entries[:]`: the only slice that anybody needs.
void check_whole(const py::slice& slice, size_t size) {
  size_t start = 0;
  size_t stop = 0;
  size_t step = 0;
  size_t length = 0;
  if (!slice.compute(size, &start, &stop, &step, &length) || length != size) {
    throw py::index_error("only entries[:]");
  }
}

// A view of the entries of an GradTable, which Python uses like a list.
struct Entries {
  std::shared_ptr<GradTable> table;
};

void check_index(const GradTable& table, size_t i) {
  if (i >= table.size()) {
    throw py::index_error("no such parameter index");
  }
}

void bind_entries(py::module_& module) {
  py::class_<Entries>(module, "Entries")
      .def("__len__", [](const Entries& self) { return self.table->size(); })
      .def(
          "__getitem__",
          [](const Entries& self, size_t i) {
            check_index(*self.table, i);
            return self.table->entry(i);
          })
      .def(
          "__setitem__",
          [](const Entries& self, size_t i, py::handle entry) {
            check_index(*self.table, i);
            self.table->set_entry(i, entry);
          })
      .def(
          "__setitem__",
          [](const Entries& self, const py::slice& slice, const py::sequence& entries) {
            check_whole(slice, self.table->size());
            self.table->set_entries(entries);
          });
}

void bind_grad_table(py::module_& module) {
  py::bind_vector<Integers>(module, "Integers");
  py::class_<GradHooks>(module, "GradHooks")
      .def("shared", &GradHooks::shared)
      .def("remove", &GradHooks::remove);
  // Iterates too: Python asks for items until there are no more.
  py::class_<Gathered>(module, "Gathered")
      .def("__len__", [](const Gathered& self) { return self.grads.size(); })
      .def("__getitem__", [](const Gathered& self, size_t k) {
        if (k >= self.grads.size()) {
          throw py::index_error("no such slot");
        }
        return self.table->decode(self.codes[k], self.grads[k]);
      });
  py::class_<GradTable, std::shared_ptr<GradTable>>(module, "GradTable")
      .def(
          py::init<Tensors, py::tuple, const py::object&, const py::object&, const py::tuple&>(),
          py::arg("params"),
          py::arg("marks"),
          py::arg("unset"),
          py::arg("copied"),
          py::arg("callbacks"))
      .def_property_readonly(
          "entries", [](std::shared_ptr<GradTable> self) { return Entries{std::move(self)}; })
      .def_readonly("ready", &GradTable::ready)
      .def_readonly("num_left", &GradTable::num_left)
      .def_readonly("bucket_of", &GradTable::bucket_of)
      .def_readwrite("scale", &GradTable::scale)
      .def_property(
          "is_timed",
          [](const GradTable& self) { return self.is_timed.load(); },
          [](GradTable& self, bool is_timed) { self.is_timed.store(is_timed); })
      .def("is_owner", &GradTable::is_owner)
      .def("take_stamps", &GradTable::take_stamps)
      .def("stamp_by", &GradTable::stamp_by)
      .def("tell", &GradTable::tell)
      .def("copy_at_once", &GradTable::copy_at_once)
      .def("note_ready", &GradTable::note_ready)
      .def("count_down", &GradTable::count_down)
      .def("adopt", &GradTable::adopt)
      .def("refill", &GradTable::refill)
      .def("take_streams", &GradTable::take_streams)
      .def("used", &GradTable::used)
      .def(
          "attach",
          [](const std::shared_ptr<GradTable>& self) { return std::make_unique<GradHooks>(self); })
      .def("gather", &GradTable::gather);
}

void bind_arrived(py::module_& module) {
  py::class_<Arrived, std::shared_ptr<Arrived>>(module, "Arrived")
      .def(py::init<Tensors>(), py::arg("params"))
      .def("note", &Arrived::note)
      .def("note_all", &Arrived::note_all)
      .def("clear", &Arrived::clear)
      .def("__len__", &Arrived::size)
      .def("changed", &Arrived::changed)
      .def("is_any_there", &Arrived::is_any_there)
      .def("take", &Arrived::take);
}

// What Python calls entries, when it is not what `gather` returned: any sequence of
// gradients, None and marks.
struct Given {
  Tensors grads;
  std::vector<bool> present;  // false: filled already
};

Given given(const py::sequence& entries) {
  Given found;
  for (const auto entry : entries) {
    at::Tensor grad;
    found.present.push_back(minidp::is_tensor(entry, grad) || entry.is_none());
    found.grads.push_back(std::move(grad));
  }
  return found;
}

std::vector<bool> present(const Gathered& entries) {
  std::vector<bool> found;
  found.reserve(entries.codes.size());
  for (const auto code : entries.codes) {
    found.push_back(code == GradTable::kArrived);
  }
  return found;
}

void bind_slots(py::module_& module) {
  py::class_<Slots, std::shared_ptr<Slots>>(module, "Slots")
      .def(
          py::init<Tensors, Tensors, at::Tensor, bool>(),
          py::arg("params"),
          py::arg("views"),
          py::arg("values"),
          py::kw_only(),
          py::arg("as_view"))
      .def("copy_now", &Slots::copy_now)
      .def("offer_tiles", &Slots::offer_tiles, py::arg("scale") = 1.0)
      .def("divide", &Slots::divide)
      .def("complete", &Slots::complete)
      .def("settle", &Slots::settle)
      .def("offer_share", &Slots::offer_share)
      .def("has_taken_share", &Slots::has_taken_share)
      .def_property_readonly("is_scaled", &Slots::is_scaled)
      .def("forget_tiles", &Slots::forget_tiles)
      .def(
          "flatten",
          [](Slots& self, const Gathered& entries, int64_t divisor) {
            py::gil_scoped_release no_gil;
            return self.flatten(entries.grads, present(entries), divisor);
          })
      .def(
          "flatten",
          [](Slots& self, const py::sequence& entries, int64_t divisor) {
            const Given from = given(entries);
            return self.flatten(from.grads, from.present, divisor);
          })
      .def(
          "unflatten",
          [](Slots& self, const Gathered& arrived, double scale) {
            py::gil_scoped_release no_gil;
            return self.unflatten(arrived.grads, scale);
          },
          py::arg("arrived"),
          py::kw_only(),
          py::arg("scale") = 1.0)
      .def(
          "unflatten",
          [](Slots& self, const py::sequence& arrived, double scale) {
            return self.unflatten(given(arrived).grads, scale);
          },
          py::arg("arrived"),
          py::kw_only(),
          py::arg("scale") = 1.0);
}

#ifdef __linux__
using minidp::ProfiledWork;
using minidp::SharedMemory;

at::Tensor buffer_of(const std::shared_ptr<SharedMemory>& memory, size_t bucket, int32_t row = 0) {
  const auto& shape = memory->shape(bucket);
  const auto keep = [memory](void* /*data*/) {};
  return at::from_blob(
      memory->data(bucket, row), {shape.numel}, keep, at::TensorOptions(shape.type));
}

at::Tensor given_by(const std::shared_ptr<SharedMemory>& memory, size_t bucket, int rank) {
  const auto& shape = memory->shape(bucket);
  const auto keep = [memory](void* /*data*/) {};
  return at::from_blob(
      memory->given(bucket, rank), {shape.numel}, keep, at::TensorOptions(shape.type));
}

void bind_shared_memory(py::module_& module) {
  using minidp::SumOrder;
  using Order = std::shared_ptr<SumOrder>;
  using Longs = std::vector<int64_t>;  // from any sequence; Integers are opaque
  using Buffer = std::tuple<int64_t, at::ScalarType, Order, Longs>;
  py::class_<SumOrder, Order>(module, "SumOrder")
      .def(
          py::init([](const Longs& counts, const Longs& postfix) {
            return std::make_shared<SumOrder>(
                Integers(counts.begin(), counts.end()), Integers(postfix.begin(), postfix.end()));
          }),
          py::arg("counts"),
          py::arg("postfix"));
  py::class_<ProfiledWork>(module, "ProfiledWork").def("end", &ProfiledWork::end);
  py::class_<SharedMemory, std::shared_ptr<SharedMemory>>(module, "SharedMemory")
      .def(
          py::init([](int rank, int size, const std::vector<Buffer>& buckets) {
            std::vector<minidp::BucketShape> shapes;
            for (const auto& [numel, type, order, bounds] : buckets) {
              shapes.push_back({numel, type, order, bounds});
            }
            return std::make_shared<SharedMemory>(rank, size, std::move(shapes));
          }),
          py::arg("rank"),
          py::arg("size"),
          py::arg("buckets"))
      .def_property_readonly("descriptor", &SharedMemory::descriptor)
      .def_property_readonly("token", &SharedMemory::token)
      .def("connect", &SharedMemory::connect)
      .def("buffer", &buffer_of, py::arg("bucket"), py::arg("row") = 0)
      .def(
          "post",
          [](const std::shared_ptr<SharedMemory>& self, size_t bucket) {
            auto profiled =
                ProfiledWork::begin("gloo:all_reduce", [&] { return buffer_of(self, bucket); });
            self->post(bucket);
            return profiled;
          })
      .def(
          "advance",
          [](SharedMemory& self, size_t bucket, Slots* into) {
            Tiles* tiles = into == nullptr ? nullptr : into->tiles();
            py::gil_scoped_release no_gil;
            return self.advance(bucket, tiles);
          },
          py::arg("bucket"),
          py::arg("into") = py::none())
      .def(
          "wait",
          [](SharedMemory& self, size_t bucket, double seconds, Slots* into) {
            Tiles* tiles = into == nullptr ? nullptr : into->tiles();
            py::gil_scoped_release no_gil;
            return self.wait(bucket, seconds, tiles);
          },
          py::arg("bucket"),
          py::arg("seconds"),
          py::arg("into") = py::none())
      .def("is_done", &SharedMemory::is_done)
      .def("missing", &SharedMemory::missing)
      .def("given", &given_by, py::arg("bucket"), py::arg("rank"))
      .def("give", &SharedMemory::give)
      .def(
          "wait_given",
          &SharedMemory::wait_given,
          py::arg("bucket"),
          py::arg("seconds"),
          py::call_guard<py::gil_scoped_release>())
      .def(
          "wait_summed",
          &SharedMemory::wait_summed,
          py::arg("bucket"),
          py::arg("seconds"),
          py::call_guard<py::gil_scoped_release>())
      .def("not_summed", &SharedMemory::not_summed)
      .def("not_given", &SharedMemory::not_given);
}

#endif

minidp::Refs refs(const Tensors& tensors) {
  minidp::Refs found;
  found.reserve(tensors.size());
  for (const auto& tensor : tensors) {
    found.push_back(&tensor);
  }
  return found;
}

void check_pairs(const Tensors& views, const Tensors& grads) {
  if (views.size() != grads.size()) {
    throw py::value_error("one gradient per view");
  }
  for (size_t k = 0; k < views.size(); ++k) {
    if (grads[k].sizes() != views[k].sizes()) {
      throw py::value_error("gradient " + std::to_string(k) + " has not its view's shape");
    }
    if (grads[k].scalar_type() != views[k].scalar_type()) {
      throw py::value_error("gradient " + std::to_string(k) + " has not its view's dtype");
    }
    if (grads[k].layout() != at::kStrided || views[k].layout() != at::kStrided) {
      throw py::value_error("gradient " + std::to_string(k) + " is not strided");
    }
  }
}

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  bind_entries(module);
  bind_grad_table(module);
  bind_arrived(module);
  bind_slots(module);
#ifdef __linux__
  bind_shared_memory(module);
#endif
  module.def("flatten", [](const Tensors& views, const Tensors& grads, double scale) {
    check_pairs(views, grads);
    py::gil_scoped_release no_gil;
    minidp::flatten(refs(views), refs(grads), scale);
  });
  using Sequence = py::sequence;
  module.def("add", [](const Sequence& to, const Sequence& left, const Sequence& right) {
    const Given sums = given(to);
    const Given first = given(left);
    const Given second = given(right);
    const size_t size = sums.grads.size();
    if (first.grads.size() != size || second.grads.size() != size) {
      throw py::value_error("two tensors for each sum");
    }
    py::gil_scoped_release no_gil;
    return minidp::add(refs(sums.grads), refs(first.grads), refs(second.grads));
  });
  module.def("unflatten", [](const Tensors& grads, const Tensors& views) {
    check_pairs(views, grads);
    py::gil_scoped_release no_gil;
    minidp::unflatten(refs(grads), refs(views));
  });
  // The type of the devices between which it can copy, besides the CPU.
  module.attr("kernels_for") = minidp::cuda::copy_rows != nullptr ? "cuda" : "";
}
