"""The nn.Module face: state, copies, modes, schedules; side by side with torch's."""

from __future__ import annotations

import contextlib
import copy
import io
import pickle
from typing import Generic, TypeVar

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parallel.distributed import _MixedPrecision

from minidp import DataParallel
from minidp.core.reducer import Phase
from tests.support.both import Scale, modes, on_both

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
@modes
def test_copies_train_alike(lone_group, mode, method):
    ddp = DataParallel(Net(), **mode)
    step(ddp)
    is_deep = method == "deepcopy"
    twin = copy.deepcopy(ddp) if is_deep else pickle.loads(pickle.dumps(ddp))
    assert twin.module is not ddp.module
    assert twin.process_group is ddp.process_group is lone_group
    assert equal([*twin.state_dict().values()], [*ddp.state_dict().values()])
    for _ in range(3):
        assert equal(step(twin), step(ddp))
    assert twin._reducer is not ddp._reducer


def copies_on_a_subgroup(ctx):
    ddp = DataParallel(Scale(), process_group=ctx.group)
    x = torch.tensor([ctx.rank + 1.0])
    ddp(x).backward()
    twin = copy.deepcopy(ddp)
    twin.zero_grad()
    twin(x).backward()
    try:
        pickle.dumps(ddp)
    except RuntimeError as error:
        text = str(error)
    return twin.module.w.grad.item(), twin.process_group is ctx.group, text


def test_copies_on_another_group(pool):
    for grad, same_group, text in pool.run(copies_on_a_subgroup, (1, 2)):
        assert grad == 1.5
        assert same_group
        assert "only supported when using DDP with the default process group" in text


class Names(pickle.Unpickler):
    """Notes which of our classes a pickle names."""

    def find_class(self, module, name):
        self.seen = {*getattr(self, "seen", ()), f"{module}.{name}"}
        return super().find_class(module, name)


def test_pickles_name_public_classes_only(lone_group):
    """Private ones may move: old pickles must still load."""
    low = _MixedPrecision(param_dtype=torch.bfloat16)
    ddp = DataParallel(Scale(), mixed_precision=low, bucket_cap_mb_list=[1])
    ddp(torch.ones(1)).backward()
    names = Names(io.BytesIO(pickle.dumps(ddp)))
    twin = names.load()
    assert {n for n in names.seen if n.startswith("minidp")} == {"minidp.DataParallel"}
    assert twin.bucket_bytes_cap_list == [2**20]
    assert twin.mixed_precision.param_dtype is torch.bfloat16


def test_copies_keep_flags_and_warn_no_second_time(lone_group):
    with pytest.warns(FutureWarning):
        ddp = DataParallel(Net(), broadcast_buffers=True, unsynced="warn")
    ddp.forward_sync_buffers = False
    ddp.require_backward_grad_sync = False
    for twin in (copy.deepcopy(ddp), pickle.loads(pickle.dumps(ddp))):
        assert twin.forward_sync_buffers is False
        assert twin.require_backward_grad_sync is False
        assert twin._guard.policy == "warn"


def trained_static_copies(ctx):
    """Torch's copies of a trained static graph never synchronise."""
    ddp = DataParallel(Scale(), process_group=ctx.group, static_graph=True)
    x = torch.tensor([ctx.rank + 1.0])
    for _ in range(3):
        ddp(x).backward()
    twin = copy.deepcopy(ddp)
    seen = []
    for _ in range(3):
        twin.zero_grad()
        twin(x).backward()
        seen.append(twin.module.w.grad.item())
    return seen


def test_difference_copy_of_a_trained_static_graph_synchronises(pool):
    assert pool.run(trained_static_copies, 2) == [[1.5] * 3] * 2


# ------------------------------------------------------------- require_..._grad_sync


def local_and_not(ctx, wrap):
    """The attribute decides as no_sync() does, at the forward; no_sync restores it."""
    ddp = wrap(Scale())
    x = torch.tensor([ctx.rank + 1.0])
    seen = []
    for at_forward, at_backward in [(0, 0), (0, 1), (1, 0), (1, 1)]:
        ddp.zero_grad()
        ddp.require_backward_grad_sync = bool(at_forward)
        loss = ddp(x)
        ddp.require_backward_grad_sync = bool(at_backward)
        loss.backward()
        seen.append(ddp.module.w.grad.item())
    with contextlib.suppress(KeyError), ddp.no_sync():
        with ddp.no_sync():
            pass
        seen.append(ddp.require_backward_grad_sync)
        raise KeyError
    return [*seen, ddp.require_backward_grad_sync]


def test_the_forward_decides(pool):
    results = pool.run(on_both, 2, local_and_not)
    assert results[0] == ([1.0, 1.0, 1.5, 1.5, False, True],) * 2
    assert results[1] == ([2.0, 2.0, 1.5, 1.5, False, True],) * 2


# -------------------------------------------------------------------- module buffers


def new_buffers(ctx):
    module = Scale()
    module.register_buffer("mark", torch.zeros(1))
    ddp = DataParallel(module, process_group=ctx.group)
    module.mark = torch.tensor([ctx.rank + 5.0])  # re-assigned
    module.register_buffer("extra", torch.tensor([ctx.rank + 7]))
    versions = [b._version for b in module.buffers()]
    ddp(torch.ones(1))
    assert versions == [b._version for b in module.buffers()]
    return [b.item() for b in module.buffers()]


def test_reassigned_and_added_buffers_are_broadcast(pool):
    assert pool.run(new_buffers, 2) == [[5.0, 7]] * 2


# -------------------------------------------------------------------- sync_gradients


def local_then_sync(ctx, mode):
    module = nn.ModuleDict({"a": Scale(), "b": Scale(), "c": Scale()})
    module.forward = lambda x: sum(part(x) for part in module.values())
    ddp = DataParallel(module, process_group=ctx.group, **mode)
    x = torch.tensor([ctx.rank + 1.0])
    with ddp.no_sync():
        ddp(x).backward()
    module["b"].w.grad = None if ctx.rank == 0 else module["b"].w.grad
    module["c"].w.grad = None
    ddp.sync_gradients()
    grads = [param.grad for param in module.parameters()]
    after = [grad if grad is None else grad.item() for grad in grads]
    again = []
    for _ in range(2):
        ddp.zero_grad()
        ddp(x).backward()
        again.append([param.grad.item() for param in module.parameters()])
    return after, again


@modes
def test_sync_gradients(pool, mode):
    for after, again in pool.run(local_then_sync, 2, mode):
        assert after == [1.5, 1.0, None]  # b: zeros from rank 0; c: None everywhere
        assert again == [[1.5] * 3] * 2


def between_forward_and_backward(ctx):
    ddp = DataParallel(Scale(), process_group=ctx.group)
    x = torch.tensor([ctx.rank + 1.0])
    ddp.module(x).backward()
    loss = ddp(x)
    ddp.sync_gradients()
    first = ddp.module.w.grad.item()
    loss.backward()
    return first, ddp.module.w.grad.item()


def test_sync_gradients_leaves_a_waiting_forward_armed(pool):
    assert pool.run(between_forward_and_backward, 2) == [(1.5, 3.0)] * 2


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
