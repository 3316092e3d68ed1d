"""Comm hooks: torch's own on minidp, bit for bit as on torch's DDP; and ours."""

from __future__ import annotations

import random
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import (
    debugging_hooks,
    default_hooks,
    powerSGD_hook,
    quantization_hooks,
)

from minidp import DataParallel, comm_hooks
from tests.support import both, oracle
from tests.support.both import error_of, grads, same, wrapped
from tests.support.combined import combined
from tests.support.ranks import as_in_torch, on_ranks

MODES = [*both.MODES, {"batched_grad_copy": True}]
modes = pytest.mark.parametrize("mode", MODES, ids=lambda m: "-".join(m) or "default")

SMALL = {"bucket_cap_mb": 64 / 2**20}  # several buckets


class Net(nn.Module):
    """Matrices and vectors; the first layer is used in even steps only."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.sometimes = nn.Linear(7, 7, dtype=dtype)
        self.layers = nn.ModuleList([nn.Linear(7, 7, dtype=dtype) for _ in range(3)])
        self.scale = nn.Parameter(torch.ones(1, dtype=dtype))

    def forward(self, x: torch.Tensor, *, skip: bool = False) -> torch.Tensor:
        if not skip:
            x = x + self.sometimes(x)
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x * self.scale


def inputs(rank: int, step: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(5, 7, generator=generator).to(dtype)


def train(
    ddp: Any, ctx: Any, steps: range, *, skips: bool = False, keeps: bool = False
) -> list[Any]:
    """Gradients after each step; with ``keeps``, zeroed in place."""
    history = []
    for step in steps:
        ddp.zero_grad(set_to_none=not keeps)
        out = ddp(inputs(ctx.rank, step), skip=skips and step % 2 == 1)
        out.pow(2).sum().backward()
        history.append(grads(ddp))
    return history


# -- torch's hooks, unmodified ---------------------------------------------------------

SUM, FP16 = default_hooks.allreduce_hook, default_hooks.fp16_compress_hook
HOOKS = {  # name -> hook on torch's DDP, on minidp
    "allreduce": (SUM, SUM),
    "fp16": (FP16, FP16),
    "fp16(allreduce)": (default_hooks.fp16_compress_wrapper(SUM),) * 2,
    "noop": (debugging_hooks.noop_hook,) * 2,
    "our allreduce": (SUM, comm_hooks.all_reduce_hook),
    "our fp16": (FP16, comm_hooks.fp16_compress_hook),
}


@as_in_torch(2, 3)
@pytest.mark.parametrize(("name", "mode"), combined(HOOKS, MODES, always={}))
def test_hooks_with_torchs_bits(ctx, wrap, name, mode):
    """Registered at once, and after two backwards (one of them after the rebuild)."""
    histories = []
    for after in (0, 2):
        ddp = wrap(Net(), **SMALL, **mode)
        how = {"skips": "find_unused_parameters" in mode, "keeps": after == 2}
        histories += train(ddp, ctx, range(after), **how)
        ddp.register_comm_hook(ctx.group, HOOKS[name][isinstance(ddp, DataParallel)])
        histories += train(ddp, ctx, range(after, 5), **how)
    return histories


def power_sgd_state(ctx: Any, **options: Any) -> Any:
    return powerSGD_hook.PowerSGDState(
        ctx.group, start_powerSGD_iter=2, min_compression_rate=0.5, **options
    )


@as_in_torch(2, 3)
@pytest.mark.parametrize("feedback", [False, True])
@pytest.mark.parametrize("options", [{}, SMALL], ids=["one bucket", "many"])
def test_power_sgd(ctx, wrap, options, feedback):
    """It starts collectives in callbacks: many buckets have to go one at a time."""
    ddp, hook = wrap(Net(), **options), powerSGD_hook.powerSGD_hook
    if options:
        hook = comm_hooks.one_at_a_time(hook)
        if not isinstance(ddp, DataParallel):
            # Torch's wrapper reads this annotation, and wants its own class there.
            hook.__annotations__.clear()
    ddp.register_comm_hook(power_sgd_state(ctx, use_error_feedback=feedback), hook)
    return train(ddp, ctx, range(8))


class Images(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
        self.end = nn.Linear(4, 2)

    def forward(self, x: torch.Tensor, **_: Any) -> torch.Tensor:
        images = x.flatten()[:27].reshape(1, 3, 3, 3) * torch.ones(2, 1, 1, 1)
        return self.end(self.conv(images).flatten(1))


class PlainImages(Images):
    def __init__(self) -> None:
        super().__init__()
        self.conv.to(memory_format=torch.contiguous_format)


@as_in_torch(2)
@pytest.mark.parametrize("name", ["pertensor", "perchannel"])
@pytest.mark.parametrize("lazy", [False, True])
@pytest.mark.skipif(
    "lazy_bucket_allocation" not in oracle.TAKES,
    reason="fail on Gloo before torch 2.15",
)
def test_quantization_hooks(ctx, wrap, name, lazy):
    """In one bucket: they wait in callbacks, and with several torch's DDP hangs."""
    ddp = wrap(Net(), lazy_bucket_allocation=lazy, bucket_cap_mb=25)
    hook = getattr(quantization_hooks, f"quantization_{name}_hook")
    ddp.register_comm_hook(ctx.group, hook)
    return train(ddp, ctx, range(4))


@on_ranks(2)
def test_row_major_lets_power_sgd_have_channels_last_weights(ctx):
    """Error of the bare hook; gradients of channels_last and of row-major weights."""
    bare, histories = wrapped(ctx, Images()), []
    bare.register_comm_hook(power_sgd_state(ctx), powerSGD_hook.powerSGD_hook)
    error = error_of(lambda: train(bare, ctx, range(3)))
    assert "view size is not compatible" in error
    assert "comm hook powerSGD_hook raised RuntimeError" in error
    for kind in (Images, PlainImages):
        torch.manual_seed(0)
        ddp = wrapped(ctx, kind())
        hook = comm_hooks.row_major(powerSGD_hook.powerSGD_hook)
        ddp.register_comm_hook(power_sgd_state(ctx), hook)
        histories.append(train(ddp, ctx, range(6)))
    for step, expected in zip(*histories, strict=True):
        for grad, other in zip(step, expected, strict=True):
            # Convolutions of the two layouts round differently.
            torch.testing.assert_close(grad, other, rtol=1e-4, atol=1e-4)


def resizing_hook(state, bucket):  # torch wants no annotation as a string
    """As batched_powerSGD_hook does: the buffer's memory moves."""
    buffer = bucket.buffer()
    numel = buffer.numel()
    buffer.resize_(3 * numel + 10_000)
    buffer.resize_(numel)
    return default_hooks.allreduce_hook(state, bucket)


@as_in_torch(2)
@modes
def test_hook_that_resizes_the_buffer(ctx, wrap, mode):
    ddp = wrap(Net(), **SMALL, **mode)
    ddp.register_comm_hook(ctx.group, resizing_hook)
    return train(ddp, ctx, range(2)) + train(ddp, ctx, range(2, 5), keeps=True)


# -- unusual gradients -----------------------------------------------------------------


class Waves(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(7, 7, dtype=torch.complex64))
        self.b = nn.Parameter(torch.randn(7))

    def forward(self, x: torch.Tensor, **_: Any) -> torch.Tensor:
        return torch.view_as_real(x.to(torch.complex64) @ self.w) + self.b.unsqueeze(1)


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(9, 3, sparse=True)
        self.end = nn.Linear(3, 2)

    def forward(self, x: torch.Tensor, **_: Any) -> torch.Tensor:
        return self.end(self.table(x.flatten().abs().mul(10).long() % 9))


FP32, INT8 = comm_hooks.fp32_accumulate_hook, comm_hooks.int8_error_feedback_hook
EVERYTHING = comm_hooks.one_at_a_time(
    comm_hooks.fp16_compress_wrapper(comm_hooks.row_major(FP32))
)
OURS: dict[str, Any] = {  # name -> how to make the state, hook
    "all_reduce": (lambda _: None, comm_hooks.all_reduce_hook),
    "all_reduce on a group": (lambda ctx: ctx.group, comm_hooks.all_reduce_hook),
    "fp16": (lambda _: None, comm_hooks.fp16_compress_hook),
    "bf16": (lambda _: None, comm_hooks.bf16_compress_hook),
    "fp32 accumulate": (lambda _: comm_hooks.Fp32State(), FP32),
    "bf16(fp32 accumulate)": (
        lambda _: comm_hooks.Fp32State(),
        comm_hooks.bf16_compress_wrapper(FP32),
    ),
    "int8": (lambda _: comm_hooks.Int8State(), INT8),
    "int8 in odd blocks": (lambda ctx: comm_hooks.Int8State(ctx.group, block=13), INT8),
    "row_major": (lambda _: None, comm_hooks.row_major(comm_hooks.bf16_compress_hook)),
    "everything": (lambda _: comm_hooks.Fp32State(), EVERYTHING),
}


def register(ddp: Any, ctx: Any, name: str) -> None:
    state, hook = OURS[name]
    ddp.register_comm_hook(state(ctx), hook)


class InTurn(nn.Module):
    def __init__(self, parts: nn.ModuleList) -> None:
        super().__init__()
        self.parts = parts

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        total = torch.zeros((), dtype=torch.float64)
        for part in self.parts:
            dtype = part.scale.dtype if isinstance(part, Net) else x.dtype
            total = total + part(x.to(dtype)).pow(2).sum().double()
        return total


VIEWS = {"gradient_as_bucket_view": True}


PLACES: list[Any] = [(1, {}), (2, VIEWS), (2, {"bucket_cap_mb": 0})]
PLACES += [(3, SMALL), (3, SMALL | VIEWS)]


@on_ranks()
@pytest.mark.parametrize(
    ("hook", "where", "mode"),
    [
        pytest.param(hook, *place, marks=pair.marks, id=pair.id)
        for pair in combined(OURS, PLACES, always=PLACES[-1])
        for hook, place in [pair.values]
    ],
)
def test_our_hooks_average_all_kinds_of_gradients(ctx, hook, mode):
    """About right (the rounding is bounded elsewhere), and the same on all ranks.

    Buckets that a hook can shrink, and some that it cannot, in turns.
    """
    parts = [Images(), Words(), Net(torch.bfloat16), Net(torch.float64), Waves()]
    net = nn.ModuleList(parts)
    ddp = wrapped(ctx, InTurn(net), **mode)
    register(ddp, ctx, hook)
    history = []
    for step in range(4):
        ddp.zero_grad()
        ddp(inputs(ctx.rank, step)).backward()
        history.append([g.to_dense() for g in grads(ddp)])
        net.zero_grad()
        for rank in range(ctx.world_size):
            ddp.module(inputs(rank, step)).backward()
        means = [g.to_dense() / ctx.world_size for g in grads(ddp)]
        largest = max(mean.abs().max().item() for mean in means)
        for grad, mean in zip(history[-1], means, strict=True):
            tolerance = 0.03 * largest
            if "int8" not in hook:  # there a block's error is relative to its largest
                tolerance = min(tolerance, 0.04 * mean.abs().max().item() + 0.02)
            torch.testing.assert_close(grad, mean, rtol=0.0, atol=tolerance)
    return history


# -- our hooks -------------------------------------------------------------------------

BF16 = {
    "ours": comm_hooks.bf16_compress_hook,
    "torchs": default_hooks.bf16_compress_hook,
    "composed": comm_hooks.bf16_compress_wrapper(default_hooks.allreduce_hook),
}


@on_ranks(2)
@pytest.mark.parametrize("name", BF16)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_bf16_on_gloo(ctx, name, dtype):
    """The hook brings what the formula says; torch's DDP refuses it on the CPU."""
    net = Net(dtype)
    ddp = wrapped(ctx, net)
    ddp.register_comm_hook(ctx.group, BF16[name])
    for step in range(3):
        expected = []
        net(inputs(ctx.rank, step, dtype)).pow(2).sum().backward()
        # Torch's hook: one flat buffer, cast, divided, summed, cast back.  Two ranks
        # add alike wherever an element lies in the message.
        for param in net.parameters():
            small = param.grad.to(torch.bfloat16).div_(ctx.world_size)
            dist.all_reduce(small, group=ctx.group)
            expected.append(small.to(dtype))
        net.zero_grad()
        ddp(inputs(ctx.rank, step, dtype)).pow(2).sum().backward()
        assert same(grads(net), expected)
        net.zero_grad()


# -- speed and uneven inputs -----------------------------------------------------------


@on_ranks(4)
def test_two_stages_keep_their_order_at_any_speed(ctx):
    """Sleeps before each of many buckets, longer or shorter on each rank."""

    def hook(state, bucket):
        time.sleep(speed.choice([0, 0, 0.001, 0.005]))
        return comm_hooks.fp32_accumulate_hook(state, bucket)

    histories = []
    for seed in range(0, 40, 10):
        speed = random.Random(seed + ctx.rank)
        torch.manual_seed(0)
        ddp = wrapped(ctx, Net(), bucket_cap_mb=0)
        ddp.register_comm_hook(comm_hooks.Fp32State(), hook)
        histories.append(train(ddp, ctx, range(6)))
        assert same(histories[-1], histories[0])
    return histories


@on_ranks(3)
@pytest.mark.parametrize("hook", OURS)
@pytest.mark.parametrize("by_initial", [True, False])
def test_our_hooks_divide_by_the_ranks_that_count(ctx, hook, by_initial):
    """Rank r has r + 1 inputs."""
    net = Net()
    ddp = wrapped(ctx, net, **SMALL)
    register(ddp, ctx, hook)
    with ddp.join(divide_by_initial_world_size=by_initial):
        for step in range(ctx.rank + 1):
            ddp.zero_grad()
            ddp(inputs(ctx.rank, step)).pow(2).sum().backward()
            found = grads(net)
            net.zero_grad()
            for rank in range(step, ctx.world_size):
                net(inputs(rank, step)).pow(2).sum().backward()
            count = ctx.world_size if by_initial else ctx.world_size - step
            means = [g / count for g in grads(net)]
            tolerance = 0.03 * max(mean.abs().max().item() for mean in means)
            for grad, mean in zip(found, means, strict=True):
                torch.testing.assert_close(grad, mean, rtol=0.0, atol=tolerance)
