"""``minidp.attach``: the bits of a wrapped model, without a wrapper."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import warnings
import weakref
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel

import minidp
from minidp import comm_hooks
from tests.support.both import averages, same
from tests.support.ranks import on_ranks

OPTIONS: dict[str, dict[str, Any]] = {
    "default": {},
    "small buckets": {"bucket_cap_mb": 0.0001},
    "views": {"gradient_as_bucket_view": True},
    "unused": {"find_unused_parameters": True},
    "static": {"static_graph": True},
}


class Net(nn.Module):
    """Has module buffers, an attribute, and a branch that may go unused."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.first = nn.Linear(6, 8)
        self.norm = nn.BatchNorm1d(8)
        self.last = nn.Linear(8, 2)
        self.side = nn.Linear(8, 2)
        self.hint = "mine"

    def forward(self, x, fails=False):
        if fails:
            raise ValueError("boo")
        x = torch.tanh(self.norm(self.first(x)))
        return self.last(x) + (0 if self.skips_side else self.side(x))

    skips_side = False


class Recursive(Net):
    """Calls itself; has a way of its own to be copied."""

    is_inside = False

    def forward(self, x):
        if self.is_inside:
            return super().forward(x)
        self.is_inside = True
        try:
            return self(x)
        finally:
            self.is_inside = False

    def __getstate__(self):
        return dict(self.__dict__)


def trained(ctx, net, call, sync, steps=5):
    """Losses, gradients, weights and module buffers of a few steps."""
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    generator = torch.Generator().manual_seed(ctx.rank)
    seen = []
    for step in range(steps):
        net.train(step != 3)
        x = torch.randn(5, 6, generator=generator)
        if step == 1:
            with sync():
                call(x).square().sum().backward()
        loss = call(x).square().sum()
        loss.backward()
        found = [p.grad.clone() for p in net.parameters() if p.grad is not None]
        seen.append([loss.detach(), *found])
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            seen.append(call(x))
    return [seen, net.state_dict()]


@on_ranks(2)
@pytest.mark.parametrize("mode", [*OPTIONS, "recursive"])
def test_bits_are_those_of_a_wrapped_model(ctx, mode):
    kind = Recursive if mode == "recursive" else Net
    results = []
    for wrap in (DistributedDataParallel, minidp.DataParallel, minidp.attach):
        net = kind()
        net.skips_side = mode == "unused"
        before = dict(vars(net))
        ddp = wrap(net, process_group=ctx.group, **OPTIONS.get(mode, {}))
        call = net if wrap is minidp.attach else ddp
        results.append(trained(ctx, net, call, ddp.no_sync))
    ddp.detach()
    assert vars(net).keys() - {"is_inside"} == before.keys()
    assert not hasattr(net, "module")
    assert type(net) is kind
    assert same(results[0], results[1])
    assert same(results[1], results[2])


def after_detach(ctx):
    """Local gradients of a detached model, and rank 0's weights when attached again."""
    net = Net()
    handle = minidp.attach(net, process_group=ctx.group, gradient_as_bucket_view=True)
    x = torch.full((4, 6), float(ctx.rank + 1)) + torch.arange(4.0)[:, None]
    net(x).sum().backward()
    synced = [p.grad.clone() for p in net.parameters()]
    handle.detach()
    handle.detach()
    with pytest.raises(RuntimeError, match="was detached"):
        handle.no_sync()
    assert same(synced, [p.grad for p in net.parameters()])
    net.zero_grad()
    net(x).square().sum().backward()
    torch.optim.SGD(net.parameters(), lr=0.1).step()  # nobody complains
    local = net.last.bias.grad.tolist()
    with minidp.attach(net, process_group=ctx.group):  # takes rank 0's weights
        weights = net.last.weight.tolist()
    return local, weights


def test_detach_leaves_a_plain_model(pool):
    first, second = pool.run(after_detach, 2)
    assert first[0] != second[0]
    assert first[1] == second[1]


@on_ranks(2)
def test_guard_reset_hook_and_record(ctx):
    net = Net()
    handle = minidp.attach(net, process_group=ctx.group, unsynced="raise")
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    x = torch.full((4, 6), float(ctx.rank + 1)) + torch.arange(4.0)[:, None]
    for call in (net.forward, net):
        net.zero_grad()
        if call is net:
            with handle.alone():
                net(x).square().sum().backward()
        else:
            call(x).square().sum().backward()
        with pytest.raises(minidp.UnsyncedGradientsError) as caught:
            optimizer.step()
        assert "after attach() model.forward(x), or inside alone()" in str(caught.value)
        handle.data_parallel.sync_gradients()
        optimizer.step()
    net.zero_grad()
    with pytest.raises(ValueError, match="boo"):
        net(x, fails=True)
    handle.data_parallel.reset()
    handle.data_parallel.register_comm_hook(None, comm_hooks.all_reduce_hook)
    net(x).square().sum().backward()
    optimizer.step()
    for either in (handle, net, handle.data_parallel):
        with minidp.record(either) as rec:
            net(x).square().sum().backward()
    assert len(rec.timelines[0].steps) == 1
    if ctx.rank == 0:  # alone
        with handle.alone(), torch.no_grad():
            net.eval()(x)
    return [p.grad.clone() for p in net.parameters()]


# --------------------------------------------------------------- one rank is enough


def gradients_of(net):
    net.zero_grad()
    net(torch.ones(3, 6)).sum().backward()
    return net


def test_copies_are_plain(lone_group):
    net = Net()
    plain = set(vars(net))
    handle = minidp.attach(net)
    file = io.BytesIO()
    torch.save(net, file)
    file.seek(0)
    copies = [
        copy.deepcopy(net),
        copy.copy(net),
        pickle.loads(pickle.dumps(net)),
        torch.load(file, weights_only=False),
        AveragedModel(net).module,
    ]
    assert b"minidp" not in pickle.dumps(net)
    for twin in copies:
        assert type(twin) is Net
        assert set(vars(twin)) == plain
        assert twin.hint == "mine"
        assert list(twin.state_dict()) == list(net.state_dict())
    averaged = averages(handle.data_parallel)
    for twin in (copies[0], *copies[2:]):
        gradients_of(twin)
    assert averaged == []
    gradients_of(net)
    assert len(averaged) == 1
    handle.detach()
    with minidp.attach(net := Recursive()):
        twin = copy.deepcopy(net)
    gradients_of(twin)
    assert twin._compiled_call_impl is None


@on_ranks(2)
@pytest.mark.parametrize("no_grad", [False, True])
@pytest.mark.parametrize("wrap", ["attached", "wrapped"])
def test_an_exported_program_has_no_ranks(ctx, wrap, no_grad):
    """Ranks may export alone; synchronisation goes on as if nothing had been."""
    torch.manual_seed(0)
    net = model = nn.Sequential(nn.Linear(2, 3), nn.ReLU())
    if wrap == "attached":
        minidp.attach(net, process_group=ctx.group)
    else:
        model = minidp.DataParallel(net, process_group=ctx.group)
    x = torch.ones(4, 2)
    model(x).sum().backward()
    if ctx.rank == 0:
        with torch.set_grad_enabled(not no_grad):
            exported = torch.export.export(model, (x,)).module()
            assert torch.equal(exported(x), nn.Sequential(*net)(x))
            if wrap == "attached":
                torch.jit.trace(net, (x,))
    model(x * ctx.rank).sum().backward()
    return [param.grad for param in model.parameters()]


def test_the_handle_need_not_be_kept(lone_group):
    net = Net()
    minidp.attach(net)
    gc.collect()
    inside = net._compiled_call_impl.through
    averaged = averages(inside)
    gradients_of(net)
    assert len(averaged) == 1
    dead = weakref.ref(inside)
    del inside, net
    gc.collect()
    assert dead() is None


def test_attach_twice(lone_group):
    net = Net()
    with minidp.attach(net) as handle:
        with pytest.raises(RuntimeError, match="This Net is attached already"):
            minidp.attach(net)
        with pytest.raises(RuntimeError, match="averaged already"):
            minidp.attach(nn.Sequential(net.last))
        with pytest.raises(RuntimeError, match=r"already, by minidp\.attach"):
            minidp.DataParallel(net)
        averaged = averages(handle.data_parallel)
        gradients_of(net)
        assert len(averaged) == 1
    with minidp.attach(net):
        pass


def test_attach_while_wrapped(lone_group):
    net = Net()
    ddp = minidp.DataParallel(net)
    with pytest.raises(TypeError, match=r"attach to its \.module"):
        minidp.attach(ddp)
    with pytest.raises(RuntimeError, match="delete or detach that object"):
        minidp.attach(net)
    assert "_compiled_call_impl" not in vars(net)
    del ddp
    minidp.attach(net).detach()


def test_bad_models_leave_nothing(lone_group):
    net = Net().requires_grad_(False)
    before = set(vars(net))
    with pytest.raises(RuntimeError, match="not needed when a module"):
        minidp.attach(net)
    with pytest.raises(TypeError, match=r"torch\.nn\.Module, but got int"):
        minidp.attach(7)
    with pytest.raises(TypeError, match="unexpected keyword"):
        minidp.attach(net, nonsense=1)
    assert set(vars(net)) == before


@on_ranks(2)
def test_compiled_models(ctx):
    warnings.simplefilter("ignore")
    results = []
    for how in ("plain", "around", "before", "after"):
        net = Net()
        if how == "before":
            net.compile(backend="eager")
        handle = minidp.attach(net, process_group=ctx.group)
        call = torch.compile(net, backend="eager") if how == "around" else net
        if how == "after":
            net.compile(backend="eager")
            net(torch.full((3, 6), 1.0 + ctx.rank)).sum().backward()
            with pytest.raises(minidp.UnsyncedGradientsError):
                torch.optim.SGD(net.parameters(), lr=0.1).step()
        else:
            results.append(trained(ctx, net, call, handle.no_sync))
        handle.detach()
        own = vars(net).get("_compiled_call_impl")
        assert (own is not None) is (how in ("before", "after"))
        if how == "before":
            assert not isinstance(own, minidp.attachment.Detour)
    plain, around, before = results
    assert same(plain, around)
    assert same(plain, before)


def test_a_compiled_model_is_refused():
    with pytest.raises(TypeError, match="then compile it"):
        minidp.attach(torch.compile(Net(), backend="eager"))
