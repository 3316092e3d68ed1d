"""Where the grad hooks sit, how they go away, and what a graph search sees."""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections import OrderedDict, namedtuple
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parallel.distributed import _find_tensors

from minidp import CommHookError, DataParallel, ReducerFailedError, native
from minidp._arrivals import COPY_AT_ONCE_BYTES, Callbacks, Mark
from minidp._autograd import (
    NO_TASK,
    GradHooks,
    current_task,
    find_tensors,
    probe_outputs,
    queue_final_callback,
    reachable_nodes,
    unreachable,
)
from minidp._countdown import Countdown

both = pytest.mark.parametrize("wrap", [DistributedDataParallel, DataParallel])


# --------------------------------------------------------- position among user hooks


class Weight(nn.Module):
    def __init__(self, numel=1):
        super().__init__()
        self.w = nn.Parameter(torch.ones(numel))

    def forward(self, x):
        return self.w * x


def run_with_hooks(wrap, group, when_node_hooks, numel=1):
    """What each user hook saw, each one scaling the gradient, and the final value."""
    module = Weight(numel)
    param, seen = module.w, []

    def accumulated(tag, factor):
        def hook(p):
            seen.append((tag, p.grad[0].item()))
            p.grad.mul_(factor)

        return param.register_post_accumulate_grad_hook(hook)

    def on_node(tag, factor):
        def hook(*_):
            seen.append((tag, param.grad[0].item()))
            param.grad.mul_(factor)

        return get_gradient_edge(param).node.register_hook(hook)

    keep = [get_gradient_edge(param).node]
    accumulated("accumulated, before", 2)
    if "before" in when_node_hooks:
        on_node("node, before", 3)
    ddp = wrap(module, process_group=group)
    accumulated("accumulated, after", 5)
    if "after" in when_node_hooks:
        on_node("node, after", 7)
    param.register_hook(lambda grad: seen.append(("tensor", grad[0].item())))
    for _ in range(2):
        ddp.zero_grad()
        ddp(torch.ones(numel)).sum().backward()
        seen.append(("final", param.grad[0].item()))
    del keep
    return seen


@pytest.mark.parametrize("numel", [1, COPY_AT_ONCE_BYTES // 4])
@pytest.mark.parametrize(
    ("when", "expected"),
    [
        ((), 10.0),
        (("after",), 10.0),  # it ran behind the copy: too late
        (("before",), 30.0),
    ],
)
def test_user_hooks_run_before_the_gradient_is_read_as_in_torch(
    lone_group, when, expected, numel
):
    found = run_with_hooks(DataParallel, lone_group, when, numel)
    assert found == run_with_hooks(DistributedDataParallel, lone_group, when, numel)
    finals = [value for tag, value in found if tag == "final"]
    assert finals == [expected, expected]


def test_difference_a_node_hook_behind_ours_is_too_late(lone_group):
    """Python hooks of a node share one slot; torch's hook is C++ and has its own."""
    when = ("before", "after")
    theirs = run_with_hooks(DistributedDataParallel, lone_group, when)
    ours = run_with_hooks(DataParallel, lone_group, when)
    assert theirs[-1] == ("final", 210.0)
    if native.library() is not None:
        assert ours == theirs  # so has ours, natively
        return
    assert ours[-1] == ("final", 30.0)
    assert theirs[:-1] != ours[:-1]  # already in the first of two steps
    assert [tag for tag, _ in theirs] == [tag for tag, _ in ours]


@both
def test_a_node_hook_behind_ours_cannot_change_what_was_read(lone_group, wrap):
    """... also while the bucket still waits for other gradients."""
    module = nn.Sequential(Weight(), Weight(), Weight())  # the middle one waits
    ddp = wrap(module, process_group=lone_group)
    for param in module.parameters():
        node = get_gradient_edge(param).node
        node.register_hook(lambda *_, param=param: param.grad.mul_(7) and None)
    for _ in range(3):
        ddp.zero_grad()
        ddp(torch.ones(1)).sum().backward()
        assert [param.grad.item() for param in module.parameters()] == [1.0] * 3


@both
def test_a_hook_may_take_the_gradient_away(lone_group, wrap):
    module = Weight()

    def drop(param):
        param.grad = None

    ddp = wrap(module, process_group=lone_group)
    module.w.register_post_accumulate_grad_hook(drop)
    ddp(torch.ones(1)).sum().backward()
    assert module.w.grad.tolist() == [0.0]


def queued(wrap, group, position):
    """Gradients that an engine callback of the user sees."""
    seen = []
    module = Weight()

    class Early(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            queue_final_callback(lambda: seen.append(module.w.grad.item()))
            return grad

    ddp = wrap(module, process_group=group)

    def late(*_):
        module.w.grad.fill_(5.0)  # after the copy: the reduction overwrites it
        queue_final_callback(lambda: seen.append(module.w.grad.item()))

    handle = get_gradient_edge(module.w).node.register_hook(late)
    loss = ddp(torch.ones(1)).sum()
    (Early.apply(loss) if position == "early" else loss).backward()
    handle.remove()
    return seen


@both
def test_final_callback_is_queued_where_torch_queues_its_own(lone_group, wrap):
    assert queued(wrap, lone_group, "late") == [1.0]
    assert queued(wrap, lone_group, "early") == [5.0, 1.0]


# ----------------------------------------------------------------- coming and going


@pytest.fixture
def params():
    return [nn.Parameter(torch.ones(1)) for _ in range(2)]


@pytest.fixture
def countdown(params):
    callbacks = Callbacks(lambda _: None, lambda _: None)
    return Countdown(params, callbacks, lambda _i, grad: grad)


def test_hooks_can_be_removed_twice(params, countdown):
    hooks = GradHooks(params, countdown)
    assert hooks.nodes == [get_gradient_edge(param).node for param in params]
    hooks.remove()
    hooks.remove()
    assert hooks.nodes == []
    countdown.adopt([])
    (params[0] * params[1]).backward()
    assert list(countdown.ready) == []


def test_nodes_that_users_share_are_told(params, countdown):
    hooks = GradHooks(params, countdown)
    assert hooks.shared() == []
    handle = hooks.nodes[1].register_hook(lambda *_: None)
    assert hooks.shared() == [1]
    handle.remove()
    assert hooks.shared() == []


def test_hooks_need_no_grad_mode(params, countdown):
    with torch.no_grad():
        hooks = GradHooks(params, countdown)
    assert hooks.nodes[0] is get_gradient_edge(params[0]).node


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"gradient_as_bucket_view": True},
        {"find_unused_parameters": True},
        {"static_graph": True},
    ],
    ids=str,
)
@pytest.mark.usefixtures("no_gc")
def test_dropping_the_object_takes_the_hooks_off(lone_group, options):
    module = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    ddp = DataParallel(module, process_group=lone_group, **options)
    for _ in range(3):
        ddp(torch.randn(3, 2)).sum().backward()
    hooks = ddp._reducer.hooks
    nodes, ready = list(hooks.nodes), ddp._reducer.countdown.ready
    assert len(nodes) == 4
    parts = [weakref.ref(part) for part in (ddp, ddp._reducer, ddp._guard)]
    del ddp
    assert [part() for part in parts] == [None] * 3
    assert hooks.nodes == []
    ready.clear()
    module(torch.randn(3, 2)).sum().backward()
    assert list(ready) == []
    assert nodes[0] is get_gradient_edge(module[0].weight).node  # the same, bare
    module.zero_grad()
    module(torch.randn(3, 2)).sum().backward()
    assert module[0].weight.grad is not None


@pytest.mark.usefixtures("no_gc")
def test_a_failed_object_is_not_kept_by_its_error(lone_group):
    module = nn.Linear(2, 2)
    ddp = DataParallel(module, process_group=lone_group)
    ddp.register_comm_hook(None, lambda state, bucket: None)
    with contextlib.suppress(CommHookError):
        ddp(torch.ones(1, 2)).sum().backward()
    with contextlib.suppress(ReducerFailedError):
        ddp(torch.ones(1, 2))
    assert "CommHookError" in ddp._reducer.failure
    parts = [weakref.ref(part) for part in (ddp, ddp._reducer)]
    del ddp
    assert [part() for part in parts] == [None, None]


@pytest.mark.usefixtures("no_gc")
def test_an_output_that_lives_on_does_not_keep_the_object(lone_group):
    ddp = DataParallel(Weight(), process_group=lone_group, find_unused_parameters=True)
    module = ddp.module
    loss = ddp(torch.ones(1)).sum()
    part = weakref.ref(ddp._reducer)
    del ddp
    assert part() is None
    loss.backward()
    assert module.w.grad.tolist() == [1.0]


@pytest.mark.usefixtures("no_gc")
def test_dropping_the_object_frees_the_module(lone_group):
    ddp = DataParallel(Weight(), process_group=lone_group)
    ddp(torch.ones(1)).sum().backward()
    module, param = weakref.ref(ddp.module), weakref.ref(ddp.module.w)
    del ddp
    assert module() is None
    assert param() is None
    assert gc.isenabled() is False


@pytest.mark.parametrize("option", ["gradient_as_bucket_view", "static_graph"])
def test_nothing_is_planted_on_parameters(lone_group, option):
    module = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    planted = [*module.parameters(), *module.buffers(), *module.modules()]
    before = [(dir(thing), sorted(vars(thing))) for thing in planted]
    ddp = DataParallel(module, process_group=lone_group, **{option: True})
    for _ in range(3):
        ddp(torch.randn(3, 2)).sum().backward()
    assert [(dir(thing), sorted(vars(thing))) for thing in planted] == before
    for param in module.parameters():
        assert param._backward_hooks is None
        assert param._post_accumulate_grad_hooks is None
    for child in module.modules():
        assert not child._forward_hooks
        assert not child._forward_pre_hooks


# --------------------------------------------------------------------- the engine


def test_current_task_is_known_inside_a_backward_only():
    leaf = torch.ones(1, requires_grad=True)
    seen = []
    leaf.register_hook(lambda _: seen.append(current_task()))
    assert current_task() == NO_TASK
    (leaf * 1).backward()
    (leaf * 1).backward()
    assert current_task() == NO_TASK
    assert NO_TASK not in seen
    assert seen[0] != seen[1]


def test_final_callbacks_run_at_the_end_and_raise_there():
    leaf = torch.ones(1, requires_grad=True)
    seen = []

    def fail():
        seen.append(leaf.grad.item())
        raise KeyError("from the callback")

    out = leaf * 2
    out.register_hook(lambda _: queue_final_callback(fail))
    with pytest.raises(KeyError, match="from the callback"):
        out.backward()
    assert seen == [2.0]


# ------------------------------------------------------------------- what is found


@dataclass
class Output:
    loss: torch.Tensor
    rest: Any = None
    hidden: list[torch.Tensor] = field(default_factory=list)


class Opaque:
    def __init__(self, tensor):
        self.tensor = tensor


Pair = namedtuple("Pair", "first second")
A, B, C, D = (torch.tensor(float(i), requires_grad=True) * 1 for i in range(4))


@pytest.mark.parametrize(
    ("output", "found"),
    [
        (A, [A]),
        ([A, (B, C)], [A, B, C]),
        ({"x": A, "y": {"z": [B]}}, [A, B]),
        (OrderedDict(x=B, y=A), [B, A]),
        (Pair(A, [B]), [A, B]),
        (Output(A, Output(B), [C, D]), [A, B, C, D]),
        ((A, 3, None, "text"), [A]),
        ([A, A], [A, A]),
        (Output, []),  # the class itself
        ({A}, []),  # torch does not look into sets either
        (Opaque(A), []),
        (None, []),
        ([], []),
    ],
    ids=lambda value: type(value).__name__,
)
def test_tensors_of_an_output(output, found):
    result = find_tensors(output)
    assert len(result) == len(found)
    assert all(a is b for a, b in zip(result, found, strict=True))


def test_tensors_are_those_that_torch_finds():
    for output in (A, [A, (B,)], {"x": [A]}, Output(A, [B]), {A}, Pair(A, B), None):
        theirs = list(_find_tensors(output))
        assert [id(t) for t in find_tensors(output)] == [id(t) for t in theirs]


def test_probe_runs_when_a_backward_reaches_an_output():
    leaf = torch.ones(1, requires_grad=True)
    calls = []
    first, second = leaf * 2, leaf * 3
    outputs = [first, {"x": second}, leaf, leaf.detach()]
    probe_outputs(outputs, lambda _: calls.append(1))
    second.backward()
    assert calls == [1]
    (first * 5).backward()
    assert calls == [1, 1]
    assert leaf.grad.item() == 13.0  # probes change nothing


def test_reachable_and_unreachable():
    params = [nn.Parameter(torch.ones(1)) for _ in range(4)]
    nodes = [get_gradient_edge(param).node for param in params]
    output = {"a": (params[0] * params[1]).exp(), "b": [params[2].detach() * params[0]]}
    reached = reachable_nodes(output)
    assert [node in reached for node in nodes] == [True, True, False, False]
    assert unreachable(output, nodes, range(4)) == {2, 3}
    assert unreachable(output, nodes, [1, 3]) == {3}
    assert unreachable(None, nodes, [0]) == set()  # nothing seen, nothing known


def test_search_survives_long_chains():
    leaf = nn.Parameter(torch.ones(1))
    value = leaf * 1
    for _ in range(5000):
        value = value + 1
    assert unreachable(value, [get_gradient_edge(leaf).node], [0]) == set()


def test_small_hook_and_countdown_agree():
    """The hot path spells out what `Countdown.fill` does; it must not drift."""
    states = []
    for numel in (1, COPY_AT_ONCE_BYTES // 4):  # small hook, large hook
        full = []
        params = [nn.Parameter(torch.ones(numel)) for _ in range(2)]
        callbacks = Callbacks(full.append, full.append)
        countdown = Countdown(params, callbacks, lambda _i, grad: grad)
        plan = SimpleNamespace(indices=(1, 0), slots=(1, 0))
        streams = SimpleNamespace(written_on=set())
        bucket = SimpleNamespace(plan=plan, streams=streams, slots=None, large=())
        countdown.adopt([bucket])
        hooks = GradHooks(params, countdown)
        countdown.open([Mark.UNSET] * 2, 1)
        params[1].sum().backward()
        states.append([list(countdown.ready), list(countdown.pending), list(full)])
        assert countdown.entries[1] is params[1].grad
        params[0].sum().backward()
        states.append([list(countdown.ready), list(countdown.pending), list(full)])
        params[0].sum().backward()  # a second time: unusual
        states.append([list(countdown.ready), list(countdown.pending), list(full)])
        hooks.remove()
    assert states[:3] == [[[1], [1], []], [[1, 0], [0], [0]], [[1, 0], [0], [0, 0]]]
    assert states[3:] == states[:3]
