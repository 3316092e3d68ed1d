"""``mixed_precision`` against the same computed by hand, bit for bit."""

from __future__ import annotations

import copy
from collections import namedtuple

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel.distributed import _MixedPrecision

from minidp import DataParallel, comm_hooks
from tests.support.both import grads, same, wrapped
from tests.support.ranks import on_ranks

FP32, FP16, BF16 = torch.float32, torch.float16, torch.bfloat16
Pair = namedtuple("Pair", "first second")


class Net(nn.Module):
    """A tied weight, a module buffer, an integer input and nested inputs."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(5, 4)
        self.inner = nn.Linear(4, 4)
        self.head = nn.Linear(4, 5, bias=False)
        self.head.weight = self.table.weight
        self.register_buffer("shift", torch.linspace(0.0, 1.0, 4))
        self.seen: list[torch.dtype] = []

    def forward(self, index, more):
        self.seen = [index.dtype, more["pair"].first.dtype, more["count"].dtype]
        self.seen += [self.inner.weight.dtype, self.shift.dtype]
        x = self.table(index) + more["pair"].first
        x = torch.tanh(self.inner(x) + self.shift.to(x.dtype))
        return self.head(x) * more["pair"].second / 8


def inputs(rank, step):
    generator = torch.Generator().manual_seed(10 * rank + step)
    x = torch.randn(3, 4, generator=generator)
    pair = Pair(x, torch.ones(1) * (step + 1))
    return torch.tensor([rank, 1, 4]), {"pair": pair, "count": torch.tensor(3)}


def local_gradients(master, mixed, args):
    """Of a copy in low precision, in fp32."""
    low = copy.deepcopy(master)
    if mixed.param_dtype is not None:
        for param in low.parameters():
            param.data = param.data.to(mixed.param_dtype)
    if mixed.buffer_dtype is not None:
        low.shift = low.shift.to(mixed.buffer_dtype)
    low.zero_grad()
    index, more = args
    if mixed.param_dtype is not None:
        pair = Pair(*(item.to(mixed.param_dtype) for item in more["pair"]))
        more = {**more, "pair": pair}
    low(index, more).float().square().sum().backward()
    return [param.grad.float() for param in low.parameters()]


def reduce_by_hand(ctx, found, assignment, mixed):
    """Cast, SUM, divide, upcast; in the buckets of ``assignment``."""
    dtype = mixed.reduce_dtype or mixed.param_dtype
    averages = [torch.empty_like(grad) for grad in found]
    for members in assignment:
        flat = torch.cat([found[i].flatten() for i in members])
        flat = flat if dtype is None else flat.to(dtype)
        dist.all_reduce(flat, group=ctx.group)
        flat = flat.div_(ctx.world_size).float()
        parts = flat.split([found[i].numel() for i in members])
        for i, part in zip(members, parts, strict=True):
            averages[i].copy_(part.view_as(averages[i]))
    return averages


PRECISIONS = [
    _MixedPrecision(BF16, BF16, BF16),
    _MixedPrecision(FP16, FP16, None),
    _MixedPrecision(BF16, FP32, FP32),
    _MixedPrecision(FP16, FP32, FP16),
    _MixedPrecision(BF16, None, None),
    _MixedPrecision(None, FP16, None),
    _MixedPrecision(FP32, BF16, BF16),
    _MixedPrecision(None, None, FP16),
    _MixedPrecision(None, None, None),
]


CASES = [
    *((mixed, 2 + number % 2, {}) for number, mixed in enumerate(PRECISIONS)),
    (PRECISIONS[0], 3, {"gradient_as_bucket_view": True}),
    (PRECISIONS[2], 2, {"gradient_as_bucket_view": True}),
    (PRECISIONS[0], 2, {"find_unused_parameters": True}),
    (PRECISIONS[1], 2, {"static_graph": True}),
    (PRECISIONS[3], 3, {"bucket_cap_mb_list": [0.00002]}),
]


@on_ranks()
@pytest.mark.parametrize(("mixed", "where", "options"), CASES, ids=str)
def test_against_a_plain_reference(ctx, mixed, options):
    """Gradients and parameters of each step."""
    net = Net()
    reference = copy.deepcopy(net)
    ddp = wrapped(ctx, net, mixed_precision=mixed, **options)
    optimizers = [
        torch.optim.SGD(module.parameters(), 0.01, momentum=0.9)
        for module in (net, reference)
    ]
    for step in range(4):
        mine = local_gradients(reference, mixed, inputs(ctx.rank, step))
        if step == 2:  # accumulates
            with ddp.no_sync():
                ddp(*inputs(ctx.rank, 7)).float().square().sum().backward()
            local = local_gradients(reference, mixed, inputs(ctx.rank, 7))
            mine = [a + b for a, b in zip(local, mine, strict=True)]
        ddp(*inputs(ctx.rank, step)).float().square().sum().backward()
        assignment = ddp._reducer.queue.layout.assignment
        expected = reduce_by_hand(ctx, mine, assignment, mixed)
        assert same(grads(net), expected)
        for param, grad in zip(reference.parameters(), expected, strict=True):
            param.grad = grad
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        assert same(list(net.parameters()), list(reference.parameters()))
    state = {key: value.dtype for key, value in ddp.state_dict().items()}
    param, stored = mixed.param_dtype or FP32, mixed.buffer_dtype or FP32
    assert net.seen == [torch.int64, param, torch.int64, param, stored]
    assert state.pop("module.shift") is stored
    assert set(state.values()) == {FP32}


# ------------------------------------------------------------- what is left alone


class Doubles(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.ones(2))
        self.own = nn.Parameter(torch.ones(2))
        self.z = nn.Parameter(torch.ones(2, dtype=torch.complex64) / 3)
        self.register_buffer("count", torch.tensor(3))
        self.register_buffer("mine", torch.ones(2))

    def forward(self, x):
        self.seen = [t.dtype for t in (x, self.w, self.own, self.z, self.mine)]
        return (self.w * x * self.own).sum() + (self.z * x).abs().sum()


@on_ranks(2)
def test_ignored_complex_and_integer_tensors_are_not_cast(ctx):
    module = Doubles()
    names = ["own", "mine"]
    DataParallel._set_params_and_buffers_to_ignore_for_model(module, names)
    mixed = _MixedPrecision(BF16, BF16, BF16)
    ddp = DataParallel(module, process_group=ctx.group, mixed_precision=mixed)
    ddp(torch.full((2,), ctx.rank + 1.0)).backward()
    assert module.seen == [BF16, BF16, FP32, torch.complex64, FP32]
    assert module.count.dtype is torch.int64
    assert torch.equal(module.own.grad, torch.full((2,), ctx.rank + 1.0))
    mean = torch.full((2,), 1.5, dtype=torch.complex64)
    assert torch.equal(module.z.grad, mean)


@on_ranks(2)
def test_recurrent_and_sparse_modules(ctx):
    """Packed sequences are cast, and weights that a module keeps in a list."""
    lstm = nn.LSTM(2, 3)
    ddp = wrapped(ctx, lstm, mixed_precision=_MixedPrecision(BF16, FP32, None))
    packed = nn.utils.rnn.pack_sequence([torch.ones(2, 2), torch.ones(1, 2)])
    output, _ = ddp(packed)
    output.data.float().sum().backward()
    assert all(map(lambda a, b: a is b, lstm._flat_weights, lstm.parameters()))
    assert output.data.dtype is BF16
    table = nn.Embedding(3, 2, sparse=True)
    ddp = wrapped(ctx, table, mixed_precision=_MixedPrecision(BF16, BF16, None))
    ddp(torch.tensor([ctx.rank])).sum().backward()
    for param in (*lstm.parameters(), *table.parameters()):
        assert param.grad.dtype is FP32
    expected = [[0.5, 0.5], [0.5, 0.5], [0.0, 0.0]]
    assert table.weight.grad.to_dense().tolist() == expected


# ----------------------------------------------------------------------- and the rest


def test_a_comm_hook_besides_is_refused(lone_group):
    mixed = _MixedPrecision(BF16)
    ddp = DataParallel(Doubles(), mixed_precision=mixed)
    with pytest.raises(RuntimeError, match="only be called once, and reduce_in_low"):
        ddp.register_comm_hook(None, comm_hooks.all_reduce_hook)


def test_parameters_are_what_they_were(lone_group):
    net = Net()
    before = [(id(p), p.data_ptr(), p.dtype, vars(p)) for p in net.parameters()]
    ddp = DataParallel(net, mixed_precision=_MixedPrecision(FP16))
    with torch.no_grad():
        assert ddp(*inputs(0, 0)).dtype is FP16
    ddp(*inputs(0, 0)).sum().backward()
    after = [(id(p), p.data_ptr(), p.dtype, vars(p)) for p in net.parameters()]
    assert before == after
    assert net.head.weight is net.table.weight
