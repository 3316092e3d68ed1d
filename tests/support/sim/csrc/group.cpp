#include "group.h"

#include <ATen/ops/stack.h>
#include <ATen/ops/zeros.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/StreamGuard.h>
#include <torch/csrc/utils/pybind.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <iostream>
#include <list>
#include <optional>
#include <set>
#include <thread>

#include "memory.h"
#include "tensors.h"

namespace sim {
namespace {

using Tensors = std::vector<at::Tensor>;
using GlooWork = c10::intrusive_ptr<c10d::Work>;
using BackendPtr = c10::intrusive_ptr<c10d::Backend>;
using std::chrono::milliseconds;
using SteadyClock = std::chrono::steady_clock;

std::atomic<OnTimeout> on_timeout{OnTimeout::kEndProcess};
std::string mutant;

// What a collective is, apart from when it runs.
struct Collective {
  c10d::OpType type;
  std::string name;
  int device;
  Tensors tensors;  // all, so that they live as long as they must
  Tensors outputs;
  std::vector<Range> ranges;
  std::function<GlooWork(c10d::Backend&)> start;
  std::function<void()> finish = [] {};  // on the outputs, when Gloo is done
};

// Tensors of the CPU on the memory of a collective's tensors, noted as read or written.
class Arguments {
 public:
  at::Tensor read(const at::Tensor& tensor) {
    return add(tensor, false);
  }
  at::Tensor write(const at::Tensor& tensor) {
    return add(tensor, true);
  }
  Tensors read(const Tensors& tensors) {
    Tensors all;
    for (const auto& tensor : tensors) all.push_back(read(tensor));
    return all;
  }
  Tensors write(const Tensors& tensors) {
    Tensors all;
    for (const auto& tensor : tensors) all.push_back(write(tensor));
    return all;
  }
  Collective collective(c10d::OpType type, const char* name, Tensors outputs) const {
    TORCH_CHECK(!tensors_.empty(), "simccl: ", name, " got no tensor");
    const int device = tensors_[0].device().index();
    return {type, name, device, tensors_, std::move(outputs), ranges_, {}};
  }

 private:
  at::Tensor add(const at::Tensor& tensor, bool is_written) {
    TORCH_CHECK(is_sim(tensor), "simccl: expected a tensor on sim, found ", tensor.device());
    TORCH_CHECK(
        tensor.is_non_overlapping_and_dense(), "simccl: expected a dense tensor, as NCCL does");
    tensors_.push_back(tensor);
    ranges_.push_back(range_of(tensor, is_written));
    return Alias(tensor).on_cpu();
  }
  Tensors tensors_;
  std::vector<Range> ranges_;
};

// Whether a communicator has been aborted, and why. Its kernels then end, whoever is missing.
struct Health {
  std::atomic<bool> is_aborted{false};
  std::mutex mutex;
  std::string reason;

  void abort(const std::string& why) {
    std::lock_guard<std::mutex> lock(mutex);
    if (!is_aborted) reason = why;
    is_aborted = true;
  }
  void check() {
    if (!is_aborted) return;
    std::lock_guard<std::mutex> lock(mutex);
    C10_THROW_ERROR(DistBackendError, "simccl: the communicator was aborted: " + reason);
  }
};

// The tensors of a collective. As NCCL's group, ours keeps them until a stream waits for the
// collective, or until it is over, whatever comes first. Who comes second finds them gone: it
// waits while the other one still lets go of them.
class Held {
 public:
  explicit Held(Tensors tensors) : tensors_(std::move(tensors)) {}
  void let_go() {
    std::lock_guard<std::mutex> lock(mutex_);
    tensors_.clear();
  }
  void let_go_at_end(const Clock& end) {
    std::lock_guard<std::mutex> lock(mutex_);
    for (const auto& tensor : tensors_) mark_safe_to_free(tensor.const_data_ptr(), end);
    tensors_.clear();
  }

 private:
  std::mutex mutex_;
  Tensors tensors_;
};

class Work final : public c10d::Work {
 public:
  Work(int rank, const Collective& collective, std::shared_ptr<Health> health, bool is_barrier)
      : c10d::Work(rank, collective.type),
        device_(collective.device),
        outputs_(collective.outputs),
        held_(std::make_shared<Held>(collective.tensors)),
        health_(std::move(health)),
        is_barrier_(is_barrier) {
    const std::vector<c10::Device> devices{{kSim, static_cast<c10::DeviceIndex>(device_)}};
    future_ = c10::make_intrusive<c10::ivalue::Future>(
        c10::ListType::create(c10::TensorType::get()), devices);
  }

  // The moment at which the collective is over; called on the stream of the collective.
  void set_end(MomentPtr end) {
    end_ = std::move(end);
    future_->markCompleted(outputs_);  // records its events there
  }

  bool isCompleted() override {
    return health_->is_aborted || has_happened(end_);
  }
  bool isSuccess() const override {
    return !health_->is_aborted;
  }
  std::exception_ptr exception() const override {
    try {
      health_->check();
    } catch (...) {
      return std::current_exception();
    }
    return nullptr;
  }
  void synchronize() override {
    auto& stream = current_stream(device_);
    if (mutant != "work") wait_for(stream, end_);
    held_->let_go();  // the current stream is behind the collective now, and so is who reuses them
  }
  bool wait(milliseconds) override {
    synchronize();
    if (is_barrier_) sim::synchronize(current_stream(device_), "barrier");
    health_->check();
    return true;
  }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override {
    return future_;
  }
  Tensors result() override {
    return outputs_;
  }

  std::shared_ptr<Held> held() const {
    return held_;
  }

 private:
  const int device_;
  const Tensors outputs_;
  const std::shared_ptr<Held> held_;
  const std::shared_ptr<Health> health_;
  const bool is_barrier_;
  MomentPtr end_;
  c10::intrusive_ptr<c10::ivalue::Future> future_;
};

// What is launched and not known to be over, and the watchdog, which acts when it is late.
class Outstanding {
 public:
  Outstanding(std::shared_ptr<Health> health, milliseconds timeout)
      : health_(std::move(health)), timeout_(timeout), watchdog_([this] { watch(); }) {}

  ~Outstanding() {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      is_closed_ = true;
    }
    changed_.notify_all();
    watchdog_.join();
  }

  void add(std::string name, MomentPtr end) {
    std::lock_guard<std::mutex> lock(mutex_);
    entries_.push_back({std::move(name), std::move(end), SteadyClock::now()});
  }

  void set_timeout(milliseconds timeout) {
    std::lock_guard<std::mutex> lock(mutex_);
    timeout_ = timeout;
  }

 private:
  struct Entry {
    std::string name;
    MomentPtr end;
    SteadyClock::time_point since;
  };

  void watch() {
    constexpr milliseconds kInterval(20);
    for (;;) {
      std::string late;
      {
        std::unique_lock<std::mutex> lock(mutex_);
        changed_.wait_for(lock, kInterval, [this] { return is_closed_; });
        if (is_closed_) return;
        entries_.remove_if([](const Entry& entry) { return entry.end->has_happened(); });
        for (const auto& entry : entries_)
          if (late.empty() && !entry.end->has_happened() &&
              SteadyClock::now() - entry.since > timeout_)
            late = entry.name + " took longer than " + std::to_string(timeout_.count()) + " ms";
      }
      if (late.empty() || health_->is_aborted) continue;
      if (on_timeout == OnTimeout::kEndProcess) {
        std::cerr << "simccl: the watchdog ends the process: " << late << std::endl;
        std::_Exit(134);  // as after SIGABRT, without a core
      }
      health_->abort(late);
    }
  }

  const std::shared_ptr<Health> health_;
  milliseconds timeout_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::list<Entry> entries_;
  bool is_closed_ = false;
  std::thread watchdog_;
};

class Group final : public c10d::Backend {
 public:
  Group(std::vector<BackendPtr> gloos, milliseconds timeout)
      : Backend(gloos.at(0)->getRank(), gloos.at(0)->getSize()),
        gloos_(std::move(gloos)),
        timeout_(timeout),
        outstanding_(health_, timeout) {
    for (int device = 0; device < kNumDevices; ++device) streams_.push_back(next_group_id(device));
    last_.resize(kNumDevices);
  }

  const std::string getBackendName() const override {
    return "simccl";
  }
  bool supportsCoalescing() const override {
    return true;
  }
  void setTimeout(milliseconds timeout) override {
    timeout_ = timeout;
    outstanding_.set_timeout(timeout);
  }
  void setSequenceNumberForGroup() override {}
  uint64_t getSequenceNumberForGroup() override {
    return sequence_number_;
  }
  void abort() override {
    health_->abort("by a call of abort()");
    for (const auto& gloo : gloos_) gloo->abort();
  }
  void shutdown() override {
    abort();
  }

  // Between these two, collectives are only collected. They are one launch, with one Work.
  void startCoalescing() override {
    is_coalescing_ = true;
  }
  GlooWork endCoalescing() override {
    is_coalescing_ = false;
    return launch_all(std::exchange(coalesced_, {}), /*is_async=*/true);
  }

  GlooWork allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override {
    Arguments arguments;
    auto cpu = arguments.write(tensors);
    auto collective = arguments.collective(c10d::OpType::ALLREDUCE, "allreduce", tensors);
    auto opts = options;
    collective.finish = averaging(opts.reduceOp, cpu);
    collective.start = [cpu, opts](c10d::Backend& gloo) mutable {
      return gloo.allreduce(cpu, opts);
    };
    return launch(std::move(collective), options.asyncOp);
  }

  GlooWork allreduce_coalesced(
      Tensors& tensors, const c10d::AllreduceCoalescedOptions& options) override {
    startCoalescing();
    for (const auto& tensor : tensors) {
      Tensors one{tensor};
      allreduce(one, options);
    }
    return endCoalescing();
  }

  GlooWork broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override {
    Arguments arguments;
    auto cpu = arguments.write(tensors);
    auto collective = arguments.collective(c10d::OpType::BROADCAST, "broadcast", tensors);
    collective.start = [cpu, options](c10d::Backend& gloo) mutable {
      return gloo.broadcast(cpu, options);
    };
    return launch(std::move(collective), options.asyncOp);
  }

  GlooWork reduce(Tensors& tensors, const c10d::ReduceOptions& options) override {
    Arguments arguments;
    auto cpu = arguments.write(tensors);
    auto collective = arguments.collective(c10d::OpType::REDUCE, "reduce", tensors);
    collective.start = [cpu, options](c10d::Backend& gloo) mutable {
      return gloo.reduce(cpu, options);
    };
    return launch(std::move(collective), options.asyncOp);
  }

  GlooWork allgather(
      std::vector<Tensors>& outputs,
      Tensors& inputs,
      const c10d::AllgatherOptions& options) override {
    Arguments arguments;
    auto in = arguments.read(inputs);
    std::vector<Tensors> out{arguments.write(outputs.at(0))};
    auto collective = arguments.collective(c10d::OpType::ALLGATHER, "allgather", outputs.at(0));
    collective.start = [in, out, options](c10d::Backend& gloo) mutable {
      return gloo.allgather(out, in, options);
    };
    return launch(std::move(collective), options.asyncOp);
  }

  GlooWork _allgather_base(
      at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions& options) override {
    Arguments arguments;
    // Flat, because NCCL counts elements only, whereas Gloo cuts the first dimension.
    auto in = arguments.read(input).view({-1});
    auto out = arguments.write(output).view({-1});
    auto collective =
        arguments.collective(c10d::OpType::_ALLGATHER_BASE, "allgather into a tensor", {output});
    collective.start = [in, out, options](c10d::Backend& gloo) mutable {
      return gloo._allgather_base(out, in, options);
    };
    return launch(std::move(collective), options.asyncOp);
  }

  GlooWork allgather_into_tensor_coalesced(
      Tensors& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) override {
    startCoalescing();
    for (size_t i = 0; i < inputs.size(); ++i) _allgather_base(outputs.at(i), inputs[i], options);
    return endCoalescing();
  }

  GlooWork reduce_scatter(
      Tensors& outputs,
      std::vector<Tensors>& inputs,
      const c10d::ReduceScatterOptions& options) override {
    Arguments arguments;
    const auto in = arguments.read(inputs.at(0));
    const auto out = arguments.write(outputs.at(0));
    auto collective = arguments.collective(c10d::OpType::REDUCE_SCATTER, "reduce_scatter", outputs);
    reduce_then_scatter(collective, [in] { return at::stack(in); }, out, options);
    return launch(std::move(collective), options.asyncOp);
  }

  GlooWork _reduce_scatter_base(
      at::Tensor& output, at::Tensor& input, const c10d::ReduceScatterOptions& options) override {
    Arguments arguments;
    const auto in = arguments.read(input);
    const auto out = arguments.write(output);
    auto collective = arguments.collective(
        c10d::OpType::_REDUCE_SCATTER_BASE, "reduce_scatter of a tensor", {output});
    const auto whole = [in, size = getSize()] { return in.reshape({size, -1}).clone(); };
    reduce_then_scatter(collective, whole, out, options);
    return launch(std::move(collective), options.asyncOp);
  }

  GlooWork reduce_scatter_tensor_coalesced(
      Tensors& outputs, Tensors& inputs, const c10d::ReduceScatterOptions& options) override {
    startCoalescing();
    for (size_t i = 0; i < inputs.size(); ++i)
      _reduce_scatter_base(outputs.at(i), inputs[i], options);
    return endCoalescing();
  }

  GlooWork alltoall_base(
      at::Tensor& output,
      at::Tensor& input,
      std::vector<int64_t>& output_sizes,
      std::vector<int64_t>& input_sizes,
      const c10d::AllToAllOptions& options) override {
    Arguments arguments;
    auto in = arguments.read(input);
    auto out = arguments.write(output);
    auto collective =
        arguments.collective(c10d::OpType::ALLTOALL_BASE, "alltoall of a tensor", {output});
    collective.start = [=](c10d::Backend& gloo) mutable {
      return gloo.alltoall_base(out, in, output_sizes, input_sizes, options);
    };
    return launch(std::move(collective), options.asyncOp);
  }

  GlooWork send(Tensors& tensors, int rank, int tag) override {
    Arguments arguments;
    auto cpu = arguments.read(tensors);
    auto collective = arguments.collective(c10d::OpType::SEND, "send", {});
    collective.start = [=](c10d::Backend& gloo) mutable { return gloo.send(cpu, rank, tag); };
    return launch(std::move(collective), true);
  }

  GlooWork recv(Tensors& tensors, int rank, int tag) override {
    Arguments arguments;
    auto cpu = arguments.write(tensors);
    auto collective = arguments.collective(c10d::OpType::RECV, "recv", tensors);
    collective.start = [=](c10d::Backend& gloo) mutable { return gloo.recv(cpu, rank, tag); };
    return launch(std::move(collective), true);
  }

  // An all-reduce, for which Work.wait() lets the host wait, too.
  GlooWork barrier(const c10d::BarrierOptions& options) override {
    int device = current_device();
    if (options.device) device = options.device->index();
    if (!options.device_ids.empty()) device = static_cast<int>(options.device_ids[0]);
    const c10::Device on(kSim, static_cast<c10::DeviceIndex>(device));
    const auto token = at::zeros({1}, at::TensorOptions().device(on));
    Arguments arguments;
    Tensors cpu{arguments.write(token)};
    auto collective = arguments.collective(c10d::OpType::BARRIER, "barrier", {token});
    collective.start = [cpu](c10d::Backend& gloo) mutable {
      return gloo.allreduce(cpu, c10d::AllreduceOptions());
    };
    return launch(std::move(collective), true);
  }

 private:
  // Gloo has no AVG: let it sum up, and return what then divides.
  std::function<void()> averaging(c10d::ReduceOp& op, Tensors outputs) const {
    if (op != c10d::ReduceOp::AVG) return [] {};
    op = c10d::ReduceOp::SUM;
    return [outputs = std::move(outputs), size = getSize()] {
      for (auto output : outputs) output.div_(size);
    };
  }

  // Gloo's own is over only when it is waited for. `whole` has a row for each rank.
  void reduce_then_scatter(
      Collective& collective,
      std::function<at::Tensor()> whole,
      at::Tensor out,
      const c10d::ReduceScatterOptions& options) const {
    const auto rows = std::make_shared<Tensors>();
    c10d::AllreduceOptions opts;
    opts.reduceOp = options.reduceOp;
    const auto average = averaging(opts.reduceOp, {out});
    collective.start = [=](c10d::Backend& gloo) {
      rows->push_back(whole());
      return gloo.allreduce(*rows, opts);
    };
    collective.finish = [=, rank = getRank()] {
      out.copy_(rows->at(0).select(0, rank).view_as(out));
      average();
    };
  }

  GlooWork launch(Collective collective, bool is_async) {
    if (is_coalescing_) {
      coalesced_.push_back(std::move(collective));
      return nullptr;
    }
    std::vector<Collective> one;
    one.push_back(std::move(collective));
    return launch_all(std::move(one), is_async);
  }

  // As NCCL: on a stream of its own, behind what the current stream has got so far; a collective
  // that is not asynchronous on the current stream itself.
  GlooWork launch_all(std::vector<Collective> collectives, bool is_async) {
    if (collectives.empty()) return nullptr;
    health_->check();
    const auto all = joined(std::move(collectives));
    const int device = all.device;
    connect(device);
    const c10::Device on(kSim, static_cast<c10::DeviceIndex>(device));
    c10::DeviceGuard device_guard(on);
    const auto id = is_async ? streams_.at(device) : current_stream_id(device);
    auto& stream = stream_at(device, id);
    if (is_async && mutant != "launch") wait_for(stream, record(current_stream(device)));
    // One collective of a communicator runs after another, also on several streams.
    queue_behind(stream, last_.at(device));
    ++sequence_number_;
    const bool is_barrier = all.type == c10d::OpType::BARRIER;
    auto work = c10::make_intrusive<Work>(getRank(), all, health_, is_barrier);
    const auto run = [start = all.start, gloo = communicator_of(device), health = health_] {
      if (!health->is_aborted) start(*gloo);
    };
    // Without the tensors of `all`, which must not live as long as the queue.
    sim::launch(stream, all.name, all.ranges, run, Kind::kCollective);
    const auto end = record(stream);
    last_.at(device) = end;
    outstanding_.add(all.name, end);
    stream.push([held = work->held(), end] { held->let_go_at_end(end->clock); });
    c10::StreamGuard guard(c10::Stream(c10::Stream::UNSAFE, on, id));
    work->set_end(end);
    return work;
  }

  // Several as one, whose `start` returns when all are over or the communicator is aborted.
  Collective joined(std::vector<Collective> parts) const {
    const bool is_one = parts.size() == 1;
    Collective all{
        is_one ? parts[0].type : c10d::OpType::COALESCED,
        is_one ? parts[0].name : parts[0].name + " and others",
        parts[0].device,
        {},
        {},
        {},
        {}};
    for (auto& part : parts) {
      all.tensors.insert(all.tensors.end(), part.tensors.begin(), part.tensors.end());
      all.outputs.insert(all.outputs.end(), part.outputs.begin(), part.outputs.end());
      all.ranges.insert(all.ranges.end(), part.ranges.begin(), part.ranges.end());
      part.tensors.clear();  // the queue must not keep them
      part.outputs.clear();
    }
    all.start = [parts, health = health_](c10d::Backend& gloo) -> GlooWork {
      std::vector<GlooWork> works;
      for (const auto& part : parts) works.push_back(part.start(gloo));
      for (size_t i = 0; i < parts.size(); ++i) {
        try {
          await(*works[i], parts[i].type, *health);
        } catch (const std::exception& error) {
          health->abort(error.what());
        }
        if (health->is_aborted) return nullptr;
        parts[i].finish();
      }
      return nullptr;
    };
    return all;
  }

  static void await(c10d::Work& work, c10d::OpType type, const Health& health) {
    // Of messages, Gloo knows only while it waits whether they have come.
    const bool can_ask = type != c10d::OpType::SEND && type != c10d::OpType::RECV;
    while (can_ask && !work.isCompleted()) {
      if (health.is_aborted) return;
      std::this_thread::sleep_for(std::chrono::microseconds(50));
    }
    work.wait();
  }

  // As NCCL in the first collective of a device: the host waits there until all ranks have come.
  // abort() does not end that, because it does not know this communicator yet.
  void connect(int device) {
    auto& gloo = *communicator_of(device);
    {
      std::lock_guard<std::mutex> lock(used_mutex_);
      if (connected_.count(device)) return;
    }
    std::optional<pybind11::gil_scoped_release> released;
    if (PyGILState_Check()) released.emplace();
    const auto deadline = SteadyClock::now() + timeout_.load();
    const auto work = gloo.barrier(c10d::BarrierOptions());
    while (!work->isCompleted() || health_->is_aborted) {
      TORCH_CHECK(SteadyClock::now() < deadline, "simccl: the ranks did not connect in time");
      std::this_thread::sleep_for(std::chrono::microseconds(100));
    }
    std::lock_guard<std::mutex> lock(used_mutex_);
    connected_.insert(device);
  }

  // As with NCCL, ranks meet in the order in which they first use their devices, whatever the
  // numbers of these are.
  const BackendPtr& communicator_of(int device) {
    std::lock_guard<std::mutex> lock(used_mutex_);
    auto found = std::find(used_.begin(), used_.end(), device);
    if (found == used_.end()) found = used_.insert(found, device);
    return gloos_.at(found - used_.begin());
  }

  const std::vector<BackendPtr> gloos_;  // one communicator for each device
  std::mutex used_mutex_;
  std::vector<int> used_;  // devices, in the order of their first collectives
  std::set<int> connected_;
  std::atomic<milliseconds> timeout_;
  const std::shared_ptr<Health> health_ = std::make_shared<Health>();
  Outstanding outstanding_;
  std::vector<int64_t> streams_;  // of each device
  std::vector<MomentPtr> last_;  // collective of each device
  std::atomic<uint64_t> sequence_number_{0};
  bool is_coalescing_ = false;
  std::vector<Collective> coalesced_;
};

}  // namespace

c10::intrusive_ptr<c10d::Backend> make_group(std::vector<BackendPtr> gloos, milliseconds timeout) {
  return c10::make_intrusive<Group>(std::move(gloos), timeout);
}

void set_on_timeout(OnTimeout action) {
  on_timeout = action;
}

void set_group_mutant(const std::string& name) {
  mutant = name;
}

}  // namespace sim
