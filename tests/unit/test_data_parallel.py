"""The nn.Module face: state, copies, modes, schedules; side by side with torch's."""

from __future__ import annotations

import copy
import io
import pickle
from typing import Generic, TypeVar

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from minidp import DataParallel, ReducerFailedError, UnfinishedReductionError
from minidp._phase import Phase

BOTH = [DistributedDataParallel, DataParallel]
both = pytest.mark.parametrize("wrap", BOTH)
every_mode = pytest.mark.parametrize(
    "options",
    [
        {},
        {"gradient_as_bucket_view": True},
        {"find_unused_parameters": True},
        {"static_graph": True},
    ],
    ids=str,
)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.norm = nn.BatchNorm1d(2)

    def forward(self, x):
        return self.norm(self.linear(x))


class Scale(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.ones(1))

    def forward(self, x):
        return self.w * x


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


def test_names_and_children(lone_group):
    ddp = DataParallel(Net())
    assert [name for name, _ in ddp.named_children()] == ["module"]
    assert [name for name, _ in ddp.named_parameters()] == [
        "module.linear.weight",
        "module.linear.bias",
        "module.norm.weight",
        "module.norm.bias",
    ]


def test_train_and_eval(lone_group):
    ddp = DataParallel(Net())
    assert ddp.eval() is ddp
    assert not any(child.training for child in ddp.modules())
    assert ddp.train() is ddp
    assert all(child.training for child in ddp.modules())


def test_output_is_the_very_object(lone_group):
    class Plain(Scale):
        def forward(self, x, *, key):
            self.output = {"y": [self.w * x], key: None}
            return self.output

    ddp = DataParallel(Plain())
    assert ddp(torch.ones(1), key="k") is ddp.module.output
    assert list(ddp.module.output) == ["y", "k"]


def test_public_attributes_are_torchs(lone_group):
    theirs, ours = (
        wrap(Net(), find_unused_parameters=True, bucket_cap_mb=3) for wrap in BOTH
    )
    for name in (
        "device_ids",
        "output_device",
        "device",
        "device_type",
        "dim",
        "is_multi_device_module",
        "find_unused_parameters",
        "gradient_as_bucket_view",
        "static_graph",
        "forward_sync_buffers",
        "broadcast_buffers",
        "require_backward_grad_sync",
        "require_forward_param_sync",
        "bucket_bytes_cap",
        "broadcast_bucket_size",
        "parameters_to_ignore",
        "process_group",
    ):
        assert getattr(ours, name) == getattr(theirs, name), name
    assert list(ours.named_module_buffers) == list(theirs.named_module_buffers)


# -------------------------------------------------------------------------- copies


@every_mode
def test_deepcopy(lone_group, options):
    ddp = DataParallel(Net(), **options)
    step(ddp)
    twin = copy.deepcopy(ddp)
    assert twin.module is not ddp.module
    assert twin.process_group is ddp.process_group
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
        assert text == (
            "DDP Pickling/Unpickling are only supported when using DDP with the "
            "default process group. Save module.state_dict() instead."
        )


@every_mode
def test_pickle(lone_group, options):
    ddp = DataParallel(Net(), **options)
    step(ddp)
    twin = pickle.loads(pickle.dumps(ddp))
    assert twin.process_group is lone_group
    for name, value in ddp.state_dict().items():
        assert torch.equal(twin.state_dict()[name], value)
    for _ in range(3):
        assert equal(step(twin), step(ddp))


def test_torch_save(lone_group):
    ddp = DataParallel(Net(), bucket_cap_mb=1, unsynced="warn")
    file = io.BytesIO()
    torch.save(ddp, file)
    file.seek(0)
    twin = torch.load(file, weights_only=False)
    assert twin.bucket_bytes_cap == 2**20
    assert twin._guard.policy == "warn"


def test_copy_keeps_flags_and_warns_no_second_time(lone_group):
    with pytest.warns(FutureWarning):
        ddp = DataParallel(Net(), broadcast_buffers=True)
    ddp.forward_sync_buffers = False
    ddp.require_backward_grad_sync = False
    ddp.eval()
    for twin in (copy.deepcopy(ddp), pickle.loads(pickle.dumps(ddp))):
        assert twin.forward_sync_buffers is False
        assert twin.require_backward_grad_sync is False
        assert twin.training is False


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


@both
def test_no_sync_restores_what_was(lone_group, wrap):
    ddp = wrap(Net())
    assert ddp.require_backward_grad_sync is True
    with ddp.no_sync():
        assert ddp.require_backward_grad_sync is False
        with ddp.no_sync():
            pass
        assert ddp.require_backward_grad_sync is False
    assert ddp.require_backward_grad_sync is True
    with pytest.raises(KeyError), ddp.no_sync():
        raise KeyError
    assert ddp.require_backward_grad_sync is True


def by_attribute(ctx, wrap_name):
    """The attribute decides as no_sync() does, and at the forward."""
    wrap = {"torch": DistributedDataParallel, "minidp": DataParallel}[wrap_name]
    ddp = wrap(Scale(), process_group=ctx.group)
    x = torch.tensor([ctx.rank + 1.0])
    seen = []
    for at_forward, at_backward in [(0, 0), (0, 1), (1, 0), (1, 1)]:
        ddp.zero_grad()
        ddp.require_backward_grad_sync = bool(at_forward)
        loss = ddp(x)
        ddp.require_backward_grad_sync = bool(at_backward)
        loss.backward()
        seen.append(ddp.module.w.grad.item())
    return seen


def test_the_forward_decides(pool):
    for name in ("torch", "minidp"):
        assert pool.run(by_attribute, 2, name) == [
            [1.0, 1.0, 1.5, 1.5],
            [2.0, 2.0, 1.5, 1.5],
        ]


# -------------------------------------------------------------------- module buffers


SCHEDULE = ["sync", "no_sync", "no_sync", "sync", "sync", "no_grad", "sync", "sync"]


def buffer_schedule(ctx, wrap_name, options):
    """At which forwards rank 1 gets rank 0's module buffer."""
    wrap = {"torch": DistributedDataParallel, "minidp": DataParallel}[wrap_name]
    module = Scale()
    module.register_buffer("mark", torch.zeros(1))
    ddp = wrap(module, process_group=ctx.group, **options)
    seen = []
    for number, kind in enumerate(SCHEDULE):
        module.mark.fill_(10 * number + ctx.rank)
        announced = ddp.will_sync_module_buffers()
        if kind == "no_sync":
            with ddp.no_sync():
                ddp(torch.ones(1)).backward()
        elif kind == "no_grad":
            with torch.no_grad():
                ddp(torch.ones(1))
        else:
            ddp(torch.ones(1)).backward()
        got = module.mark.item() == 10 * number
        assert ctx.rank == 0 or got == announced
        seen.append(got)
    return seen


def test_buffers_follow_one_forward_late_as_in_torch(pool):
    for name in ("torch", "minidp"):
        _, second = pool.run(buffer_schedule, 2, name, {})
        assert second == [True, True, False, False, True, True, False, True]


def test_buffers_stay_local_on_request(pool):
    for name in ("torch", "minidp"):
        options = {"forward_sync_buffers": False}
        _, second = pool.run(buffer_schedule, 2, name, options)
        assert second == [False] * len(SCHEDULE)


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


def test_without_buffers_there_is_nothing_to_broadcast(lone_group):
    assert DataParallel(Scale()).will_sync_module_buffers() is False
    assert DataParallel(Net()).will_sync_module_buffers() is True


# -------------------------------------------------------------------- sync_gradients


def local_then_sync(ctx, options):
    module = nn.ModuleDict({"a": Scale(), "b": Scale(), "c": Scale()})
    module.forward = lambda x: sum(part(x) for part in module.values())
    ddp = DataParallel(module, process_group=ctx.group, **options)
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


@every_mode
def test_sync_gradients(pool, options):
    for after, again in pool.run(local_then_sync, 2, options):
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


def test_sync_gradients_refuses_a_pending_reduction(lone_group):
    module = nn.ModuleDict({"a": Scale(), "b": Scale()})
    module.forward = lambda x: module["a"](x)
    ddp = DataParallel(module)
    ddp(torch.ones(1)).backward()
    with pytest.raises(UnfinishedReductionError, match=r"rank 0: b\.w\.\n"):
        ddp.sync_gradients()
    assert ddp._reducer.phase.now is Phase.PENDING


def test_sync_gradients_refuses_after_a_failure(lone_group):
    ddp = DataParallel(Scale())
    ddp._reducer.phase.enter(Phase.FAILED)
    with pytest.raises(ReducerFailedError, match="call reset"):
        ddp.sync_gradients()


# ---------------------------------------------------------------------- the forward


def test_no_grad_forwards_announce_nothing(lone_group):
    ddp = DataParallel(Scale())
    with torch.no_grad():
        ddp(torch.ones(1))
    assert ddp._reducer.phase.now is Phase.IDLE
    with torch.inference_mode():
        ddp(torch.ones(1))
    assert ddp._reducer.phase.now is Phase.IDLE


def test_error_in_the_forward_announces_nothing(lone_group):
    ddp = DataParallel(Net())
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        ddp(torch.ones(3, 5))
    assert ddp._reducer.phase.now is Phase.IDLE
    step(ddp)


def test_reused_over_many_steps_gradients_are_those_of_the_module(lone_group):
    module = Net()
    ddp = DataParallel(copy.deepcopy(module))
    for _ in range(4):
        module.zero_grad()
        module(batch()).square().sum().backward()
        assert equal(step(ddp), [param.grad for param in module.parameters()])


def test_object_reports_its_group(lone_group):
    assert dist.get_world_size(DataParallel(Scale()).process_group) == 1


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

    for derived in (Before, After, Before[int], After[int]):
        assert isinstance(derived(Scale()), DataParallel)


def test_derived_from_one_with_a_parameter(lone_group):
    class OfScale(DataParallel[Scale]):
        pass

    assert OfScale.__mro__[1] is DataParallel
    assert isinstance(OfScale(Scale()).module, Scale)
