"""With ``overlap_param_gather`` nobody ever sees an old value of a parameter."""

from __future__ import annotations

import copy
import io
import os
import pickle
import sys
import threading
import time
import warnings
from multiprocessing.reduction import ForkingPickler

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.func import functional_call
from torch.nn.parallel import DistributedDataParallel

from minidp import DataParallel
from minidp.errors import CollectiveError
from minidp.sharded.awaited import AwaitedParameter
from tests.support.both import same
from tests.support.combined import in_turns
from tests.support.fresh import MEMORIES, run_fresh
from tests.support.optimized import Breaks
from tests.support.ranks import on_ranks

from .test_bits import CASES, train


def forget_compilations():
    """Other tests of this process may have compiled, and then nothing is awaited."""
    if (dynamo := sys.modules.get("torch._dynamo.convert_frame")) is not None:
        dynamo.FRAME_COUNTER = 0


def awaited(module):
    return [n for n, p in module.named_parameters() if type(p) is AwaitedParameter]


@pytest.mark.parametrize(("name", "options", "how"), in_turns(CASES), ids=str)
@on_ranks(2)
def test_weights_are_those_of_the_plain_loop(ctx, name, options, how):
    theirs, _ = train(ctx, False, name, options, how)
    ours, _ = train(ctx, True, name, options, how, overlap_param_gather=True)
    assert same(theirs, ours)


class Slow(torch.optim.SGD):
    """An optimizer that one rank finishes later than the other one."""

    seconds = 0.0

    def step(self, closure=None):
        time.sleep(self.seconds)
        return super().step(closure)


class Net(nn.Module):
    """Layers that are called in turn; ``head`` belongs to nobody's forward."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.head = nn.ParameterDict({"a": torch.randn(8, 8), "b": torch.randn(8, 8)})

    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x @ self.head["a"] @ self.head["b"]


def after_a_step(ctx, **options):
    """Return a model whose foreign values are on their way, and what they will be."""
    forget_compilations()
    made = []
    for kind in (DistributedDataParallel, DataParallel):
        torch.manual_seed(1)
        net = Net()
        ddp = kind(net, process_group=ctx.group, **options)
        optimizer = Slow(net.parameters(), 0.1)
        if kind is DataParallel:
            ddp.sharded_step(optimizer, per_parameter=True, overlap_param_gather=True)
        for number in range(2):  # the first forward after a backward rebuilds buckets
            if number:
                optimizer.seconds = 0.2 * ctx.rank * (kind is DataParallel)
            optimizer.zero_grad()
            ddp(torch.ones(2, 8) + ctx.rank).sum().backward()
            optimizer.step()
        made.append((ddp, optimizer))
    (theirs, _), (ddp, optimizer) = made
    assert awaited(ddp.module), "nothing is on its way"
    return ddp, optimizer, theirs.module


def pickled(value):
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def in_a_thread(param):
    found = []
    thread = threading.Thread(target=lambda: found.append(param * 1))
    thread.start()
    thread.join()
    return found[0]


def in_a_child(param):
    reading, writing = os.pipe()
    if not (child := os.fork()):
        os.write(writing, pickle.dumps(param.detach().tolist()))
        os._exit(0)
    os.waitpid(child, 0)
    return torch.tensor(pickle.loads(os.read(reading, 1 << 16)))


READS = {
    "operator": lambda p: p + 0,
    "method": lambda p: p.clone(),
    "data": lambda p: p.data,
    "detach": lambda p: p.detach(),
    "numpy": lambda p: torch.from_numpy(p.detach().numpy()),
    "list": lambda p: torch.tensor(p.tolist()),
    "index": lambda p: torch.stack([p[i] for i in range(len(p))]),
    "foreach": lambda p: torch._foreach_mul([p], 1.0)[0],
    "inside a list": lambda p: torch.stack([torch.zeros_like(p), p])[1],
    "keyword": lambda p: torch.add(input=p, other=0),
    "aten": lambda p: torch.ops.aten.add.Tensor(p, 0),
    "parameter": nn.Parameter,
    "constant": lambda p: nn.Parameter(p, requires_grad=False),
    "buffer": nn.Buffer,
    "as_tensor": torch.as_tensor,
    "asarray": torch.asarray,
    "queue": lambda p: pickle.loads(ForkingPickler.dumps(p)),
    "copy": copy.copy,
    "dlpack": lambda p: torch.from_dlpack(p.detach()),
    "deepcopy": copy.deepcopy,
    "pickle": lambda p: pickle.loads(pickle.dumps(p)),
    "save": pickled,
    "storage": lambda p: torch.tensor(list(p.untyped_storage())[:4]),
    "address": lambda p: (p.data_ptr(), p.detach().clone())[1],
    "thread": in_a_thread,
    "child": in_a_child,
    "no_grad": torch.no_grad()(lambda p: p * 1),
    "inference": torch.inference_mode()(lambda p: p * 1),
    "written in place": torch.no_grad()(lambda p: p.mul_(1)),
}


@pytest.mark.parametrize("read", READS)
@on_ranks(2)
def test_a_read_waits(ctx, read):
    ddp, _, theirs = after_a_step(ctx)
    expected = dict(theirs.named_parameters())
    names = awaited(ddp.module)
    for name, param in ddp.module.named_parameters():
        found = READS[read](param)
        value = expected[name].detach()
        if read == "storage":
            value = torch.tensor(list(value.untyped_storage())[:4])
        assert same(found.detach(), value), name
        assert type(param) is nn.Parameter
        assert type(found) in (nn.Parameter, torch.Tensor)
    assert names


@torch.no_grad()
def as_data(param):
    other = torch.empty(1)
    other.data = param
    return other


UNSEEN = {  # uses of which torch tells nobody
    "data": as_data,
    "set_": torch.no_grad()(lambda p: torch.empty(0).set_(p)),
    "constructor": torch.Tensor,
    "typed constructor": torch.FloatTensor,
    "new": lambda p: torch.empty(0).new(p),
    "subclass": lambda p: p.as_subclass(torch.Tensor),
}


@pytest.mark.parametrize("use", UNSEEN)
@on_ranks(2)
def test_who_gets_the_memory_unseen_is_told(ctx, use):
    """Not at once, but at the next read: nothing of ours runs before."""
    ddp, _, theirs = after_a_step(ctx)
    awaited_names = awaited(ddp.module)
    name = awaited_names[-1]
    params = dict(ddp.module.named_parameters())
    other = UNSEEN[use](params[name])
    with pytest.warns(UserWarning, match="memory of a parameter while") as caught:
        params[name].detach()
    (text,) = [str(each.message) for each in caught]
    assert text.startswith(f"[rank {ctx.rank}] ")
    assert f"Parameters: {name}." in text
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for each, param in params.items():
            assert same(param.detach(), dict(theirs.named_parameters())[each].detach())
    assert same(other.detach(), params[name].detach()), "the memory is the same"


@pytest.mark.parametrize("whole", ["state_dict", "keep_vars", "copy", "call", "vector"])
@on_ranks(2)
def test_a_module_waits(ctx, whole):
    ddp, _, theirs = after_a_step(ctx)

    def read(net):
        x = torch.ones(2, 8)
        if whole == "call":
            return functional_call(net, dict(net.named_parameters()), (x,)).detach()
        if whole == "copy":
            return [p.detach() for p in copy.deepcopy(net).parameters()]
        if whole == "vector":
            return nn.utils.parameters_to_vector(net.parameters()).detach()
        found = net.state_dict(keep_vars=whole == "keep_vars")
        return {name: each.detach() for name, each in found.items()}

    assert same(read(ddp.module), read(theirs))
    assert not awaited(ddp.module)


@on_ranks(2)
def test_a_forward_waits_for_what_it_has_reached(ctx):
    ddp, _, theirs = after_a_step(ctx, bucket_cap_mb=0.0001)
    net = ddp.module
    seen = []
    for number, layer in enumerate(net.layers):
        names = [n for n in awaited(net) if n.startswith("layers")]
        layer.register_forward_hook(lambda *_: seen.append(awaited(net)))
        assert number == 0 or names
    out = ddp(torch.ones(2, 8))
    assert not awaited(net)
    assert same(out.detach(), theirs(torch.ones(2, 8)).detach())
    for number, waiting in enumerate(seen):
        passed = tuple(f"layers.{k}." for k in range(number + 1))
        assert not any(name.startswith(passed) for name in waiting)
        assert any(name.startswith("head") for name in waiting)


@on_ranks(2)
def test_a_step_does_not_wait_for_a_slow_rank(ctx):
    ddp, optimizer, _ = after_a_step(ctx)
    optimizer.zero_grad()
    ddp(torch.ones(2, 8)).sum().backward()
    optimizer.seconds = 3.0 * ctx.rank
    start = time.monotonic()
    optimizer.step()
    took = time.monotonic() - start
    assert (took < 2.0) == (ctx.rank == 0)
    assert awaited(ddp.module)
    assert next(iter(optimizer.param_groups))["params"][0].grad is None or ctx.rank
    first = time.monotonic()
    list(ddp.module.state_dict())
    assert not awaited(ddp.module)
    assert ctx.rank or time.monotonic() - first > 0.2


@on_ranks(2)
def test_memory_that_others_share_is_there_at_once(ctx):
    forget_compilations()
    torch.manual_seed(1)
    net = Net()
    ddp = DataParallel(net, process_group=ctx.group, bucket_cap_mb=0.0001)
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    ddp.sharded_step(optimizer, overlap_param_gather=True)
    alias = net.layers[0].weight.detach()
    array = net.layers[1].weight.detach().numpy()
    storage = net.layers[2].weight.untyped_storage()
    view = net.layers[3].weight.view(-1)
    for _ in range(2):
        optimizer.zero_grad()
        ddp(torch.ones(2, 8)).sum().backward()
        optimizer.step()
    late = awaited(net)
    assert not any(f"layers.{k}.weight" in late for k in range(4))
    assert any(name.startswith("head") for name in late)
    found = torch.tensor([], dtype=torch.float32).set_(storage, 0, (8, 8))
    both = [torch.empty(2, 8, 8) for _ in range(2)]
    mine = torch.stack([alias, torch.from_numpy(array)])
    dist.all_gather(both, mine, ctx.group)
    assert same(both[0], both[1])
    assert same(found, net.layers[2].weight.detach())
    assert same(view.view(8, 8).detach(), net.layers[3].weight.detach())


@on_ranks(2)
def test_a_graph_from_before_the_step_is_refused(ctx):
    ddp, optimizer, _ = after_a_step(ctx)
    named = {name: ddp.get_parameter(name) for name in awaited(ddp)}
    optimizer.zero_grad()
    ddp(torch.ones(2, 8)).sum().backward()
    losses = {name: param.square().sum() for name, param in named.items()}
    optimizer.step()
    assert [*named] == awaited(ddp)
    for name, param in named.items():
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            torch.autograd.grad(losses[name], param)


class Attending(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True)

    def forward(self, x):
        return self.layer(x)


@on_ranks(2)
def test_an_evaluation_takes_the_same_fast_path(ctx):
    forget_compilations()
    found, fast = [], torch._transformer_encoder_layer_fwd
    times = []

    def noted(*inputs):
        times.append(1)
        return fast(*inputs)

    x = torch.randn(3, 5, 8, generator=torch.Generator().manual_seed(0))
    for kind in (DistributedDataParallel, DataParallel):
        torch.manual_seed(1)
        net = Attending()
        options = {} if kind is DistributedDataParallel else {"bucket_cap_mb": 0.0001}
        ddp = kind(net, process_group=ctx.group, **options)
        optimizer = torch.optim.AdamW(net.parameters(), 0.1)
        if kind is DataParallel:
            ddp.sharded_step(optimizer, overlap_param_gather=True)
        ddp(x + ctx.rank).sum().backward()
        optimizer.step()
        assert awaited(net) or kind is DistributedDataParallel
        ddp.eval()
        with torch.no_grad(), pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch, "_transformer_encoder_layer_fwd", noted)
            found.append(ddp(x))
    assert same(found[0], found[1])
    assert len(times) == 2


@on_ranks(2)
def test_a_module_of_c_code_waits_before_its_forward(ctx):
    class Foreign(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(8, 8))
            self.other = nn.Parameter(torch.ones(8, 8))

        def forward(self, x):
            seen.append([type(p) for p in self.parameters()])
            return x @ self.weight @ self.other

    forget_compilations()
    seen = []
    net = nn.Sequential(nn.Linear(8, 8), Foreign())
    ddp = DataParallel(net, process_group=ctx.group, bucket_cap_mb=0.0001)
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    ddp.sharded_step(optimizer, overlap_param_gather=True)
    for _ in range(2):
        ddp(torch.ones(2, 8)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert awaited(net)
    assert seen == [[nn.Parameter] * 2] * 2


class Twice(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.eye(8))

    def forward(self, x):
        return x @ self.weight @ self.weight


@on_ranks(2)
def test_what_is_compiled_or_scripted_has_its_values_at_once(ctx):
    for compiles in (True, False):
        forget_compilations()
        inner = Twice() if compiles else nn.Linear(8, 8)
        net = nn.Sequential(nn.Linear(8, 8), inner)
        if compiles:
            inner.compile(backend="eager")
        else:
            net[1] = torch.jit.script(inner)
        ddp = DataParallel(net, process_group=ctx.group)
        optimizer = torch.optim.SGD(net.parameters(), 0.1)
        ddp.sharded_step(optimizer, overlap_param_gather=True)
        for _ in range(3):
            ddp(torch.ones(2, 8)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            assert not awaited(net)


@on_ranks(2)
def test_a_reset_brings_all_values(ctx):
    ddp, optimizer, theirs = after_a_step(ctx)
    ddp.reset()
    assert not awaited(ddp.module)
    assert same(ddp.module.state_dict(), theirs.state_dict())
    optimizer.zero_grad()
    ddp(torch.ones(2, 8)).sum().backward()
    optimizer.step()
    return {name: each.clone() for name, each in ddp.module.state_dict().items()}


def outlives(ctx):
    ddp, optimizer, theirs = after_a_step(ctx)
    net = ddp.module
    dist.barrier()
    del ddp, optimizer
    dist.destroy_process_group()
    return same(net.state_dict(), theirs.state_dict())


class Dies(Breaks):
    def step(self, closure=None):
        if self.is_broken:
            os._exit(3)
        return super().step(closure)


def reads_of_a_dead_rank(ctx):
    net = Net()
    ddp = DataParallel(net, hang_timeout=8.0)
    optimizer = Dies(net.parameters(), 0.1)
    ddp.sharded_step(optimizer, per_parameter=True, overlap_param_gather=True)
    for step in range(3):
        ddp(torch.ones(1, 8)).sum().backward()
        optimizer.is_broken = ctx.rank == 1 and step == 2
        optimizer.step()
        optimizer.zero_grad()
    try:
        net.state_dict()
    except CollectiveError as error:
        return str(error), awaited(net)
    return None


@pytest.mark.fresh
@pytest.mark.parametrize("memory", MEMORIES)
def test_values_come_though_the_group_is_gone(memory):
    assert run_fresh(outlives, 2, **memory) == [True, True]


@pytest.mark.fresh
@pytest.mark.fault
@pytest.mark.parametrize("memory", MEMORIES)
def test_who_has_died_is_named_by_the_first_read(memory):
    results = run_fresh(
        reads_of_a_dead_rank, 2, group_timeout=10.0, errors="return", **memory
    )
    text, left = results[0]
    assert "ank 1" in text
    assert "new values of parameters" in text
    assert not left
