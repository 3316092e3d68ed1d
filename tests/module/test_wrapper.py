"""The nn.Module face: state, copies, modes, schedules; side by side with torch's."""

from __future__ import annotations

import contextlib
import copy
import io
import pickle
import re
import warnings
from typing import Generic, TypeVar

import pytest
import torch
from torch import nn
from torch.nn.modules.utils import consume_prefix_in_state_dict_if_present
from torch.nn.parallel import DistributedDataParallel

import minidp
from minidp import DataParallel
from minidp.core.reducer import Phase
from tests.support.both import MODES, Scale, history_of, modes, values, wrapped, x_of
from tests.support.ranks import as_in_torch, on_ranks

BOTH = [DistributedDataParallel, DataParallel]


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.norm = nn.BatchNorm1d(2)

    def forward(self, x):
        return self.norm(self.linear(x))


def batch(rank=0):
    return torch.tensor([[1.0, 2.0], [3.0, rank], [0.5, -1.0]])


def step(ddp, x=None):
    ddp.zero_grad()
    ddp(batch() if x is None else x).square().sum().backward()
    return [param.grad.clone() for param in ddp.parameters()]


def equal(a, b):
    return len(a) == len(b) and all(map(torch.equal, a, b))


# -------------------------------------------------------------------- an nn.Module


@pytest.mark.parametrize("options", [*MODES, {"average_over": "items"}], ids=str)
@pytest.mark.parametrize("has_trained", [False, True])
def test_tools_may_look_at_every_attribute(lone_group, options, has_trained):
    """What has no value raises an AttributeError: debuggers and tracers expect it."""
    ddp, net = DataParallel(Net(), **options), Net()
    handle = minidp.attach(net, **options)
    recording = minidp.record(ddp)
    detached = minidp.attach(Net())
    detached.detach()
    if has_trained:
        for owner, model in ((ddp, ddp), (handle, net)):
            if "average_over" in options:
                owner.count_items(3)
            model(batch()).sum().backward()
    for thing in (ddp, handle, recording, detached):
        for name in dir(thing):
            getattr(thing, name, None)
    for owner in (ddp, handle):
        assert hasattr(owner, "item_totals") == (
            has_trained and "average_over" in options
        )
    assert not hasattr(detached, "data_parallel")


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({}, "averages over ranks. What to do: pass average_over='items'"),
        ({"average_over": "items"}, "[rank 0] item_totals has no value: no synchron"),
    ],
)
def test_an_attribute_without_a_value_says_why(lone_group, options, says):
    ddp = DataParallel(Net(), **options)
    with pytest.raises(minidp.UnavailableError, match=re.escape(says)):
        ddp.item_totals  # noqa: B018
    with pytest.raises(AttributeError, match="'DataParallel' object has no attribute"):
        ddp.item_total  # noqa: B018


@pytest.mark.parametrize("mode", [{}, {"gradient_as_bucket_view": True}], ids=str)
def test_a_trace_is_torchs(lone_group, mode):
    module, x = nn.Sequential(nn.Linear(2, 2), nn.ReLU()), batch()
    traces = []
    for wrap in BOTH:
        ddp = wrap(copy.deepcopy(module), **mode)
        with torch.no_grad():
            traces.append(torch.jit.trace(ddp, x))
        traces.append(step(ddp))  # as if nothing had been traced
    theirs, their_grads, ours, our_grads = traces
    assert list(ours.state_dict()) == list(theirs.state_dict())
    assert torch.equal(ours(2 * x), theirs(2 * x))
    assert equal(our_grads, their_grads)


@modes
def test_a_trace_of_what_torch_cannot_trace(lone_group, mode):
    """It has module buffers; and torch's trace of the last two modes cannot run."""
    ddp = DataParallel(Net(), **mode).eval()
    traced = torch.jit.trace(ddp, batch())
    assert torch.equal(traced(2 * batch()), ddp.module(2 * batch()))


def test_state_dict_is_torchs(lone_group):
    module = Net()
    theirs, ours = (wrap(copy.deepcopy(module)) for wrap in BOTH)
    assert list(ours.state_dict()) == list(theirs.state_dict())
    assert next(iter(ours.state_dict())) == "module.linear.weight"
    with torch.no_grad():
        theirs.module.linear.weight.fill_(7.0)
    ours.load_state_dict(theirs.state_dict())
    assert equal(list(ours.state_dict().values()), list(theirs.state_dict().values()))
    step(ours)


# -------------------------------------------------------------------------- copies


@pytest.mark.parametrize("method", ["deepcopy", "pickle"])
@pytest.mark.parametrize("mode", MODES, ids=str)
def test_copies_train_alike(lone_group, mode, method):
    ddp = DataParallel(Net(), **mode)
    ddp._register_buffer_comm_hook(None, lambda *_: None)  # is not copied
    step(ddp)
    is_deep = method == "deepcopy"
    twin = copy.deepcopy(ddp) if is_deep else pickle.loads(pickle.dumps(ddp))
    assert type(twin) is DataParallel
    assert twin.module is not ddp.module
    assert twin.process_group is ddp.process_group is lone_group
    assert equal([*twin.state_dict().values()], [*ddp.state_dict().values()])
    for _ in range(3):
        assert equal(step(twin), step(ddp))
    assert twin._reducer is not ddp._reducer
    assert twin._get_ddp_logging_data()["world_size"] == 1


@on_ranks((1, 2))
def test_copies_on_another_group(ctx):
    ddp = wrapped(ctx, Scale())
    ddp(x_of(ctx)).backward()
    twin = copy.deepcopy(ddp)
    twin.zero_grad()
    twin(x_of(ctx)).backward()
    assert values(twin) == [1.5]
    assert twin.process_group is ctx.group
    with pytest.raises(RuntimeError, match="DDP with the default process group"):
        pickle.dumps(ddp)


class Names(pickle.Unpickler):
    """Notes which of our classes a pickle names."""

    def find_class(self, module, name):
        self.seen = {*getattr(self, "seen", ()), f"{module}.{name}"}
        return super().find_class(module, name)


def test_pickles_name_public_classes_only(lone_group):
    """Private ones may move: old pickles must still load."""
    ddp = DataParallel(Scale(), bucket_cap_mb_list=[1])
    ddp(torch.ones(1)).backward()
    names = Names(io.BytesIO(pickle.dumps(ddp)))
    twin = names.load()
    assert {n for n in names.seen if n.startswith("minidp")} == {"minidp.DataParallel"}
    assert twin.bucket_bytes_cap_list == [2**20]


def test_copies_keep_flags_and_warn_no_second_time(lone_group):
    with pytest.warns(FutureWarning):
        ddp = DataParallel(Net(), broadcast_buffers=True, unsynced="warn")
    ddp.forward_sync_buffers = False
    ddp.require_backward_grad_sync = False
    for twin in (copy.deepcopy(ddp), pickle.loads(pickle.dumps(ddp))):
        assert twin.forward_sync_buffers is False
        assert twin.require_backward_grad_sync is False
        assert twin._guard.policy == "warn"


# ------------------------------------------------------------- require_..._grad_sync


@as_in_torch(2)
def test_the_forward_decides(ctx, wrap):
    """The attribute decides as no_sync() does, at the forward; no_sync restores it."""
    ddp, x, local = wrap(Scale()), x_of(ctx), [float(ctx.rank + 1)]
    for at_forward, at_backward in [(0, 0), (0, 1), (1, 0), (1, 1)]:
        ddp.zero_grad()
        ddp.require_backward_grad_sync = bool(at_forward)
        loss = ddp(x)
        ddp.require_backward_grad_sync = bool(at_backward)
        loss.backward()
        assert values(ddp) == ([1.5] if at_forward else local)
    with contextlib.suppress(KeyError), ddp.no_sync():
        with ddp.no_sync():
            pass
        assert not ddp.require_backward_grad_sync
        raise KeyError
    assert ddp.require_backward_grad_sync


# -------------------------------------------------------------------- module buffers


@on_ranks(2)
def test_reassigned_and_added_buffers_are_broadcast(ctx):
    module = Scale()
    module.register_buffer("mark", torch.zeros(1))
    ddp = wrapped(ctx, module)
    module.mark = torch.tensor([ctx.rank + 5.0])  # re-assigned
    module.register_buffer("extra", torch.tensor([ctx.rank + 7]))
    versions = [b._version for b in module.buffers()]
    ddp(torch.ones(1))
    assert versions == [b._version for b in module.buffers()]
    assert [b.item() for b in module.buffers()] == [5.0, 7]


# -------------------------------------------------------------------- sync_gradients


@on_ranks(2)
@modes
def test_sync_gradients(ctx, mode):
    module = nn.ModuleDict({"a": Scale(), "b": Scale(), "c": Scale()})
    module.forward = lambda x: sum(part(x) for part in module.values())
    ddp = wrapped(ctx, module, **mode)
    with ddp.no_sync():
        ddp(x_of(ctx)).backward()
    module["b"].w.grad = None if ctx.rank == 0 else module["b"].w.grad
    module["c"].w.grad = None
    ddp.sync_gradients()
    assert values(module) == [1.5, 1.0, None]  # b: zeros from rank 0; c: None on both
    assert history_of(ddp, lambda _: ddp(x_of(ctx)), 2) == [[1.5] * 3] * 2


@on_ranks(2)
def test_sync_gradients_leaves_a_waiting_forward_armed(ctx):
    ddp = wrapped(ctx, Scale())
    ddp.module(x_of(ctx)).backward()
    loss = ddp(x_of(ctx))
    ddp.sync_gradients()
    assert values(ddp) == [1.5]
    loss.backward()
    assert values(ddp) == [3.0]


# ---------------------------------------------------------------------- the forward


def test_forwards_without_a_backward_announce_nothing(lone_group):
    ddp = DataParallel(Net())
    for mode in (torch.no_grad(), torch.inference_mode()):
        with mode:
            ddp(batch())
        assert ddp._reducer.phase.now is Phase.IDLE
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        ddp(torch.ones(3, 5))
    assert ddp._reducer.phase.now is Phase.IDLE
    step(ddp)


# ------------------------------------------------------------- generic in its module


@pytest.mark.parametrize("wrap", [DataParallel, DataParallel[Scale]], ids=str)
def test_a_parameter_changes_nothing_at_run_time(wrap, lone_group):
    ddp = wrap(Scale())
    assert type(ddp) is DataParallel
    for twin in (ddp, copy.deepcopy(ddp), pickle.loads(pickle.dumps(ddp))):
        assert isinstance(twin, DistributedDataParallel)
        twin(torch.ones(1)).backward()
        assert twin.module.w.grad == 1


def test_classes_may_be_generic_in_any_order(lone_group):
    """Not torch's: `typing` keeps such a class, and `swap` would warn of it later."""
    T = TypeVar("T")

    class Before(Generic[T], DataParallel):
        pass

    class After(DataParallel, Generic[T]):
        pass

    class OfScale(DataParallel[Scale]):
        pass

    for derived in (Before, After, Before[int], After[int], OfScale):
        assert isinstance(derived(Scale()), DataParallel)
    assert OfScale.__mro__[1] is DataParallel


# ------------------------------------------------------------- names in a checkpoint


def hint_of(load, checkpoint):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(RuntimeError, match="Missing key") as caught:
            load(checkpoint)
    text = str(caught.value)
    return text[text.index("\tThe checkpoint has") :] if "What to do" in text else ""


def test_a_checkpoint_under_other_names(lone_group):
    plain = nn.Linear(2, 2).state_dict()
    ddp = DataParallel(nn.Linear(2, 2))
    before = ddp.module.weight.clone()
    hint = hint_of(ddp.load_state_dict, plain)
    assert "has 'weight' where this wrapper has 'module.weight'" in hint
    assert "into the wrapper's .module" in hint
    ddp.module.load_state_dict(plain)
    assert not torch.equal(ddp.module.weight, before)

    twice = {f"module.module.{name}": value for name, value in plain.items()}
    hint = hint_of(ddp.load_state_dict, dict(twice))
    assert (
        "consume_prefix_in_state_dict_if_present(checkpoint, 'module.module.')" in hint
    )
    consume_prefix_in_state_dict_if_present(twice, "module.module.")
    ddp.module.load_state_dict(twice)
    compiled = {f"module._orig_mod.{name}": value for name, value in plain.items()}
    assert "'module._orig_mod.'" in hint_of(ddp.load_state_dict, compiled)


def test_a_checkpoint_of_something_around_a_wrapper(lone_group):
    holder = nn.ModuleDict({"net": DataParallel(nn.Linear(2, 2))})
    plain = nn.ModuleDict({"net": nn.Linear(2, 2)}).state_dict()
    told = r"where this wrapper has 'net\.module\.weight'"
    missing = pytest.raises(RuntimeError, match="Missing key")
    with pytest.warns(UserWarning, match=told), missing:
        holder.load_state_dict(plain)


def test_a_checkpoint_without_a_hint(lone_group):
    ddp = DataParallel(nn.Linear(2, 2))
    assert hint_of(ddp.load_state_dict, {}) == ""
    assert hint_of(ddp.load_state_dict, {"module.weight": ddp.module.weight}) == ""
    assert hint_of(ddp.load_state_dict, {"other.weight": ddp.module.weight}) == ""
    ddp.load_state_dict(ddp.state_dict())
    ddp.load_state_dict({"module.weight": ddp.module.weight}, strict=False)


def test_a_checkpoint_of_which_nothing_would_be_loaded(lone_group):
    ddp = DataParallel(nn.Linear(2, 2))
    with pytest.warns(UserWarning, match="has 'weight' where this wrapper has"):
        ddp.load_state_dict(ddp.module.state_dict(), strict=False)
