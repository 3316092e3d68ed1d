#include "grad_table.h"

#include <torch/csrc/Exceptions.h>
#include <torch/csrc/utils/pybind.h>

#include <algorithm>
#include <chrono>
#include <utility>

namespace minidp {
namespace {

// Calls into Python from a thread without the GIL; whether the result is True. An exception goes on
// through the engine to the caller of backward(), with its type and traceback.
bool call_python(const py::object& callable, size_t index) {
  py::gil_scoped_acquire gil;
  PyObject* result = PyObject_CallFunction(callable.ptr(), "n", static_cast<Py_ssize_t>(index));
  if (result == nullptr) {
    python_error error;
    error.persist();
    throw std::move(error);
  }
  const bool is_true = result == Py_True;
  Py_DECREF(result);
  return is_true;
}

}  // namespace

bool is_tensor(py::handle object, at::Tensor& tensor) {
  py::detail::make_caster<at::Tensor> caster;
  if (!caster.load(object, /*convert=*/false)) {
    return false;
  }
  tensor = py::detail::cast_op<at::Tensor&&>(std::move(caster));
  return true;
}

GradTable::GradTable(
    std::vector<at::Tensor> params,
    py::tuple marks,
    const py::object& unset,
    const py::object& copied,
    const py::tuple& callbacks)
    : params_(std::move(params)),
      marks_(std::move(marks)),
      on_ready_(callbacks[0]),
      admit_(callbacks[1]) {
  grads_.resize(params_.size());
  codes_.resize(params_.size());
  targets_.resize(params_.size());
  stamps_.resize(params_.size());
  bucket_of.resize(params_.size());
  for (size_t code = 0; code < marks_.size(); ++code) {
    if (marks_[code].ptr() == unset.ptr()) {
      unset_ = static_cast<uint8_t>(code);
    }
    if (marks_[code].ptr() == copied.ptr()) {
      copied_ = static_cast<uint8_t>(code);
    }
  }
}

// The last reference may go with a node of the graph, on a thread without the GIL.
GradTable::~GradTable() {
  if (!Py_IsInitialized()) {
    marks_.release();
    on_ready_.release();
    admit_.release();
    stamper_.release();
    return;
  }
  py::gil_scoped_acquire gil;
  for (py::object* each : {static_cast<py::object*>(&marks_), &on_ready_, &admit_, &stamper_}) {
    each->release().dec_ref();  // the members are destroyed without the GIL
  }
}

void GradTable::stamp(size_t i) {
  if (stamper_) {
    call_python(stamper_, i);
    return;
  }
  const auto now = std::chrono::steady_clock::now().time_since_epoch();
  stamps_[i] = std::chrono::duration_cast<std::chrono::nanoseconds>(now).count();
}

void GradTable::stamp_by(const py::object& stamper) {
  stamper_ = stamper.is_none() ? py::object() : stamper;
}

std::vector<int64_t> GradTable::take_stamps() {
  std::vector<int64_t> taken(stamps_.size());
  std::swap(taken, stamps_);
  return taken;
}

void GradTable::refuse_compiled(size_t i) const {
  call_python(admit_, i);  // raises
  TORCH_CHECK(false, "minidp does not run under compiled autograd.");
}

void GradTable::fired(size_t i) {
  if (is_timed.load(std::memory_order_relaxed)) {
    stamp(i);
  }
  const bool is_cpu = params_[i].is_cpu();
  if (!is_cpu) {
    note_stream(i);  // also of what Python takes: whoever flattens waits for all
  }
  const bool is_elsewhere = is_cpu && !is_owner();
  if ((codes_[i] != unset_ || is_elsewhere) && !call_python(admit_, i)) {
    if (arrived_) {
      arrived_->note(i);
    }
    return;
  }
  // Without the checks of Tensor::grad(), which cost more than the rest of this.
  const auto& grad = params_[i].unsafeGetTensorImpl()->grad();
  const auto& target = targets_[i];
  if (target.slots && grad.defined() && target.slots->copy_now(target.k, grad, scale)) {
    codes_[i] = copied_;
  } else {
    grads_[i] = grad;
    codes_[i] = kArrived;
  }
  int32_t left = 0;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    ready.push_back(static_cast<int32_t>(i));
    left = --num_left.at(bucket_of[i]);
  }
  if (left == 0) {
    call_python(on_ready_, bucket_of[i]);
  }
}

void GradTable::note_stream(size_t i) {
  const auto stream = current_stream(params_[i].device());
  if (targets_[i].slots) {
    targets_[i].slots->use_on(stream);
  }
  const std::lock_guard<std::mutex> lock(mutex_);
  auto& streams = streams_.at(bucket_of[i]);
  if (std::find(streams.begin(), streams.end(), stream) == streams.end()) {
    streams.push_back(stream);
  }
}

std::vector<c10::Stream> GradTable::take_streams(size_t bucket) {
  std::vector<c10::Stream> taken;
  const std::lock_guard<std::mutex> lock(mutex_);
  std::swap(taken, streams_.at(bucket));
  return taken;
}

void GradTable::note_ready(size_t i) {
  const std::lock_guard<std::mutex> lock(mutex_);
  ready.push_back(static_cast<int32_t>(i));
}

int32_t GradTable::count_down(size_t i) {
  const std::lock_guard<std::mutex> lock(mutex_);
  return --num_left.at(bucket_of.at(i));
}

void GradTable::copy_at_once(size_t i, std::shared_ptr<Slots> slots, size_t k) {
  targets_.at(i) = {std::move(slots), k};
}

std::vector<int64_t> GradTable::used() const {
  std::vector<int64_t> found;
  for (const int32_t i : ready) {
    if (codes_[i] != kArrived || grads_[i].defined()) {
      found.push_back(i);
    }
  }
  return found;
}

py::object GradTable::decode(uint8_t code, const at::Tensor& grad) const {
  if (code != kArrived) {
    return marks_[code];
  }
  return grad.defined() ? py::cast(grad) : py::none();
}

py::object GradTable::entry(size_t i) const {
  return decode(codes_.at(i), grads_.at(i));
}

// The code of anything but a gradient.
uint8_t GradTable::code_of(py::handle entry) const {
  if (entry.is_none()) {
    return kArrived;
  }
  for (size_t code = 0; code < marks_.size(); ++code) {
    if (PyTuple_GET_ITEM(marks_.ptr(), code) == entry.ptr()) {
      return static_cast<uint8_t>(code);
    }
  }
  throw py::type_error("an entry is a gradient, None or a mark");
}

void GradTable::set_entry(size_t i, py::handle entry) {
  if (is_tensor(entry, grads_.at(i))) {
    codes_.at(i) = kArrived;
  } else {
    codes_.at(i) = code_of(entry);
    grads_.at(i).reset();
  }
}

void GradTable::set_entries(const py::sequence& entries) {
  const auto list = py::reinterpret_steal<py::object>(
      PySequence_Fast(entries.ptr(), "entries must be a sequence"));
  if (!list) {
    throw py::error_already_set();
  }
  if (static_cast<size_t>(PySequence_Fast_GET_SIZE(list.ptr())) != size()) {
    throw py::value_error("one entry per parameter");
  }
  PyObject** items = PySequence_Fast_ITEMS(list.ptr());
  PyObject* last = nullptr;  // nearly always all entries are the same mark
  uint8_t code = 0;
  for (size_t i = 0; i < size(); ++i) {
    if (items[i] != last) {
      if (is_tensor(items[i], grads_[i])) {
        codes_[i] = kArrived;
        continue;
      }
      code = code_of(items[i]);
      last = items[i];
    }
    codes_[i] = code;
    grads_[i].reset();
  }
}

void GradTable::adopt(std::vector<std::vector<size_t>> members) {
  for (size_t bucket = 0; bucket < members.size(); ++bucket) {
    for (const size_t i : members[bucket]) {
      bucket_of.at(i) = static_cast<int32_t>(bucket);
    }
  }
  streams_.assign(members.size(), {});
  members_ = std::move(members);
  std::fill(targets_.begin(), targets_.end(), Target{});
  refill();
}

void GradTable::refill() {
  owner_.store(std::this_thread::get_id());
  ready.clear();
  num_left.clear();
  for (const auto& indices : members_) {
    num_left.push_back(static_cast<int32_t>(indices.size()));
  }
}

Gathered GradTable::gather(size_t bucket) const {
  const auto& indices = members_.at(bucket);
  Gathered found;
  found.table = shared_from_this();
  found.grads.reserve(indices.size());
  found.codes.reserve(indices.size());
  for (const size_t i : indices) {
    found.grads.push_back(grads_[i]);
    found.codes.push_back(codes_[i]);
  }
  return found;
}

}  // namespace minidp
