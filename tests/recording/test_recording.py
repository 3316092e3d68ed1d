"""``minidp.record``: what is written down of real steps, in a group of one rank."""

from __future__ import annotations

import gc
import html
import itertools
import json
import time
import weakref
from contextlib import nullcontext, suppress
from functools import partial

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import checkpoint

import minidp
from minidp import DataParallel, Recorder, comm_hooks
from minidp.overlap import Stopwatch, from_json
from minidp.overlap.analysis import overlap_of
from minidp.overlap.stopwatch import Clock
from tests.support.both import Chain


@pytest.fixture
def wrap(lone_group):
    def make(**options):
        return DataParallel(Chain(), process_group=lone_group, **options)

    return make


@pytest.fixture
def model(wrap):
    return wrap()


def recorded(model, *works, **options):
    """The timeline of ``works``, functions of the model."""
    with minidp.record(model, **options) as rec:
        for work in works:
            work(model)
    return rec.timelines[0]


def step(model, optimizer=None, **kwargs):
    model(torch.ones(2), **kwargs).sum().backward()
    if optimizer is not None:
        optimizer.step()
        optimizer.zero_grad()


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=1e-3)


def test_phases_of_a_step_are_in_order(model):
    timeline = recorded(model, *[partial(step, optimizer=sgd(model))] * 3)
    assert [s.number for s in timeline.steps] == [0, 1, 2]
    assert timeline.num_dropped == 0
    assert [p.name for p in timeline.params] == ["a", "b", "c"]
    for one in timeline.steps:
        (forward,), (update,), (bucket,) = one.forwards, one.optimizers, one.buckets
        times = [
            forward.begin_ns, forward.end_ns, one.backward.begin_ns, bucket.full_ns,
            bucket.launched_ns, bucket.done_ns, bucket.copied_out_ns,
            one.finalize_end_ns, update.begin_ns, update.end_ns, one.end_ns,
        ]  # fmt: skip
        assert times == sorted(times)
        assert one.backward.end_ns >= bucket.launched_ns
    ends = [one.end_ns for one in timeline.steps[:-1]]
    assert ends == [one.begin_ns for one in timeline.steps[1:]]  # without gaps


def hooks_of(model):
    """What runs, of hooks in Python; of native ones whether they read the clock."""
    hooks = model._reducer.hooks
    if hooks.native_table is not None:
        return hooks.native_table.is_timed
    return [handle.hooks_dict_ref()[handle.id] for handle in hooks._handles]


def test_recording_changes_neither_gradients_nor_events_and_leaves_no_hook(wrap):
    grads, events = [], []
    for is_on in (True, False):
        model, recorder = wrap(), Recorder()
        before = hooks_of(model)
        model.set_recorder(recorder)
        with minidp.record(model) if is_on else nullcontext():
            step(model)
            assert (hooks_of(model) != before) is is_on
        model.set_recorder(None)
        assert hooks_of(model) == before
        observers = model._reducer.queue.observers
        assert not any(isinstance(each, Stopwatch) for each in observers.everybody)
        grads.append([param.grad for param in model.parameters()])
        events.append([(e.moment, e.index) for e in recorder])
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))
    assert events[0] == events[1]


def test_parameters_are_timed_without_the_slow_path(model):
    steps = recorded(model, *[step] * 5).steps
    assert [bool(one.ready_ns) for one in steps] == [True, False, False, False, True]
    for one in steps[::4]:
        c, b, a = (one.ready_ns[i] for i in (2, 1, 0))
        assert one.backward.begin_ns <= c <= b <= a <= one.buckets[0].full_ns
        assert one.first_gradient_ns((0, 1, 2)) == c


def test_only_the_last_steps_are_kept(model):
    timeline = recorded(model, *[step] * 5, keep=2)
    assert [s.number for s in timeline.steps] == [3, 4]
    assert timeline.num_dropped == 3


def test_layouts_belong_to_steps(wrap):
    timeline = recorded(wrap(bucket_cap_mb_list=[8 / 2**20, 1]), *[step] * 3)
    found = [timeline.layouts[one.layout] for one in timeline.steps]
    assert found[0] != found[1]  # the first follows the order of registration
    assert found[1:] == [((2,), (1, 0))] * 2


def counts_of(one):
    return len(one.forwards), len(one.local_forwards), len(one.local_backwards)


def loss(model):
    return model(torch.ones(2)).sum()


def local(model, act):
    with model.no_sync():
        return act(model)


def with_the_flag_off(model):
    model.require_backward_grad_sync = False
    step(model)
    model.require_backward_grad_sync = True


def around_the_wrapper(model):
    model.module(torch.ones(2)).sum().backward()


def penalty(model):
    x = torch.ones(2, requires_grad=True)
    torch.autograd.grad(model(x).sum(), x)


@pytest.mark.parametrize(
    ("work", "counts"),
    [
        (lambda model: local(model, step), (1, 1, 1)),
        (with_the_flag_off, (1, 1, 1)),
        (lambda model: local(model, loss).backward(), (1, 1, 1)),
        (lambda model: local(model, penalty), (1, 1, 1)),
        (lambda model: local(model, loss), (1, 1, 0)),  # and no backward
        (lambda model: (local(model, loss) + loss(model)).backward(), (1, 1, 0)),
        (penalty, (2, 0, 1)),
    ],
)
def test_local_work_is_told_apart(model, work, counts):
    one = recorded(model, work, step).steps[0]
    assert counts_of(one) == counts
    assert all(t is None or t >= one.backward.begin_ns for t in one.ready_ns)
    assert one.backward.begin_ns >= one.forwards[-1].end_ns
    earliest = min(span.begin_ns for span in (*one.forwards, *one.local_forwards))
    for span in one.local_backwards:
        assert earliest < span.begin_ns <= span.end_ns <= one.forwards[-1].begin_ns


def test_a_backward_around_the_wrapper_is_local_wherever_it_comes(wrap):
    """Before the first forward nobody knows a step to which it would belong."""
    works = [around_the_wrapper, *[step, around_the_wrapper] * 2]
    first, second = recorded(wrap(unsynced="ignore"), *works).steps
    assert [counts_of(one) for one in (first, second)] == [(1, 0, 1)] * 2
    assert first.finalize_end_ns <= first.local_backwards[0].begin_ns
    assert first.local_backwards[0].end_ns <= first.end_ns
    assert second.local_backwards[0].end_ns <= second.end_ns


def test_a_local_backward_lasts_from_its_outputs_to_its_end(model):
    times = []

    def note(_grad=None):
        times.append(time.perf_counter_ns())

    def work(model):
        output = model(torch.ones(2))
        for tensor in (output, *model.parameters()):
            tensor.register_hook(note)
        note()
        output.sum().backward()
        note()

    one = recorded(model, lambda model: local(model, work), step).steps[0]
    (span,) = one.local_backwards
    before, _, *of_params, after = times[:6]
    assert before < span.begin_ns <= of_params[0]
    assert of_params[-1] <= span.end_ns < after


def fail(_grad):
    raise OSError("no")


def failing_step(model, name="b"):
    handle = model.module.get_parameter(name).register_hook(fail)
    with pytest.raises(OSError, match="no"):
        step(model)
    handle.remove()


def test_a_local_backward_that_raises_is_left_out_and_the_next_one_is_not(model):
    fails = partial(failing_step, name="a")
    works = [partial(local, act=act) for act in (fails, step)]
    (one,) = recorded(model, *works, DataParallel.zero_grad, step).steps
    assert counts_of(one) == (1, 2, 1)
    assert one.local_backwards[0].begin_ns >= one.local_forwards[1].end_ns


class Checkpointed(Chain):
    """A backward in the backward."""

    def forward(self, x):
        return checkpoint(super().forward, x, use_reentrant=True)


def test_backwards_within_a_local_one_count_once(lone_group):
    model = DataParallel(Checkpointed(), process_group=lone_group)
    x = torch.ones(2, requires_grad=True)
    with minidp.record(model) as rec:
        for is_synchronised in (False, True):
            with nullcontext() if is_synchronised else model.no_sync():
                model(x).sum().backward()
    (one,) = rec.timelines[0].steps
    outer, inner = one.local_backwards
    assert outer.begin_ns < inner.begin_ns <= inner.end_ns <= outer.end_ns
    assert overlap_of(rec.timelines[0], one).local_backward_s == outer.seconds


def test_optimizer_steps_in_the_backward(model):
    model.step_in_backward(sgd(model))
    (one,) = recorded(model, step).steps
    (update,) = one.optimizers
    assert one.backward.end_ns <= update.begin_ns <= update.end_ns
    assert update.end_ns <= one.finalize_end_ns


def test_an_optimizer_within_another_counts_once(model):
    inner, outer = sgd(model), sgd(model)
    outer.register_step_pre_hook(lambda *_: inner.step())
    timeline = recorded(model, partial(step, optimizer=outer))
    around, within = timeline.steps[0].optimizers
    assert around.begin_ns < within.begin_ns < within.end_ns < around.end_ns
    assert overlap_of(timeline, timeline.steps[0]).optimizer_s == around.seconds


def test_unused_parameters_and_other_optimizers_have_no_time(wrap, lone_group):
    model, stranger = wrap(find_unused_parameters=True), nn.Parameter(torch.ones(1))
    model.register_comm_hook(lone_group, comm_hooks.all_reduce_hook)
    stranger.grad = torch.ones(1)
    other = torch.optim.SGD([stranger], lr=0.1)
    (one,) = recorded(model, partial(step, skip_b=True), lambda _: other.step()).steps
    assert [t is None for t in one.ready_ns] == [False, True, False]
    assert one.optimizers == ()
    assert len(one.buckets) == 1


def test_an_attached_model_is_recorded(lone_group):
    net = Chain()
    handle = minidp.attach(net, process_group=lone_group)
    with minidp.record(net) as rec:
        with handle.no_sync():
            step(net)
        with handle.alone():
            step(net)
        step(net)
    assert counts_of(rec.timelines[0].steps[0]) == (1, 1, 2)


class Separate(DataParallel):
    """As mmengine's MMSeparateDistributedDataParallel: each child has its wrapper."""

    def __init__(self, module, *, wraps):
        super(DataParallel, self).__init__()
        self.module = module
        for name, child in module.named_children() if wraps else ():
            setattr(module, name, DataParallel(child))


@pytest.mark.parametrize("function", [minidp.record, minidp.watch_speed])
@pytest.mark.parametrize("wraps", [True, False])
def test_what_wraps_only_its_children_is_named(lone_group, function, wraps):
    model = Separate(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1)), wraps=wraps)
    with pytest.raises(TypeError) as caught:
        function(model)
    text = str(caught.value)
    assert (
        f"{function.__name__}() needs one minidp.DataParallel, but this Separ" in text
    )
    if not wraps:
        assert "inside it are: none. What to do: call the constructor, or wrap" in text
        return
    assert "are: module.0, module.1. What to do: choose one of those, " in text
    assert f"{function.__name__}(model.get_submodule('module.0')); or start" in text
    with minidp.record(model.get_submodule("module.0")) as rec:
        model.module(torch.ones(1, 2)).sum().backward()
    assert len(rec.timelines[0].steps) == 1


def test_a_recording_does_not_keep_the_model_alive(wrap):
    model = wrap()
    with minidp.record(model) as rec:
        step(model)
    there = weakref.ref(model)
    del model
    gc.collect()
    assert there() is None
    assert "One step" in rec.report()


def test_errors_drop_a_step_and_keep_the_others(model):
    with suppress(KeyError), minidp.record(model) as rec:
        for work in (step, failing_step, DataParallel.reset, nn.Module.zero_grad, step):
            work(model)
        raise KeyError
    (timeline,) = rec.timelines
    assert len(timeline.steps) == 2
    assert timeline.num_dropped == 1
    with minidp.record(model):
        pass


def test_what_is_reduced_on_demand_is_no_step(wrap):
    times = []

    def note(_model):
        times.append(time.perf_counter_ns())

    works = [step, note, around_the_wrapper, DataParallel.sync_gradients]
    (one,) = recorded(wrap(unsynced="ignore"), *works).steps
    assert one.buckets[0].copied_out_ns < times[0]


def test_what_is_no_data_parallel_is_refused(wrap):
    for model, says in (
        (nn.Linear(1, 1), r"got torch.nn.modules.linear.Linear. .*wrap the"),
        (5, r"got builtins.int"),
        (nn.Sequential(wrap()), r"pass the wrapper itself"),
    ):
        with pytest.raises(TypeError, match=says):
            minidp.record(model)
    with pytest.raises(ValueError, match="at least 1 step, but is 0"):
        minidp.record(wrap(), keep=0)


def test_a_model_is_recorded_once_at_a_time(model):
    with (
        minidp.record(model) as rec,
        pytest.raises(RuntimeError, match="recorded already"),
        minidp.record(model),
    ):
        pass
    with pytest.raises(RuntimeError, match="recording is over"), rec:
        pass


class Events(Clock):
    """A clock that, as CUDA's, is read later: marks are objects until then."""

    params_every = 1

    def __init__(self):
        self.ticks = itertools.count(100)
        self.is_settled = False

    def read(self):
        return [next(self.ticks)]

    def settle(self):
        self.is_settled = True

    def resolve(self, mark, anchor):
        assert self.is_settled
        return anchor[0] + (mark[0] - anchor[0])


def test_marks_are_looked_at_when_everything_is_over(model):
    clock = Events()
    reducer = model._reducer
    watch = Stopwatch(reducer.queue, reducer.hooks, keep=2, clock=clock)
    watch.start()
    for _ in range(2):
        step(model)
    assert not clock.is_settled
    watch.stop()
    (first, second), _ = watch.steps()
    assert first.begin_ns == 100
    assert first.ready_ns[2] < first.ready_ns[1] < first.ready_ns[0]
    assert first.end_ns == second.begin_ns


def test_a_saved_recording_is_the_recording(model, tmp_path):
    with minidp.record(model) as rec:
        pass
    assert rec.report().startswith("No complete step was recorded. A step is a forward")
    with minidp.record(model) as rec:
        step(model, sgd(model))
    rec.save(tmp_path / "steps.json")
    assert from_json((tmp_path / "steps.json").read_text()) == rec.timelines
    rec.save_page(tmp_path / "page.html")
    with pytest.raises(AttributeError, match=r"call save_page\(\)"):
        rec.save_picture(tmp_path / "page.png")
    assert html.escape(rec.report()) in (tmp_path / "page.html").read_text()
    rec.save_trace(tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert min(e["ts"] for e in events if e["ph"] == "X") == 0


def test_labels_in_a_trace_of_torch(model):
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        step(model)
    names = {event.name for event in profiler.events()}
    assert {
        "DistributedDataParallel.forward",
        "minidp::flatten bucket=0",
        "minidp::launch bucket=0",
        "minidp::wait bucket=0",
        "minidp::copy out bucket=0",
    } <= names
