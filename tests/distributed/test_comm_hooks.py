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
    post_localSGD_hook,
    powerSGD_hook,
)

from minidp import DataParallel, comm_hooks
from tests.support import both, oracle
from tests.support.both import both_equal, grads, same

MODES = [*both.MODES, {"batched_grad_copy": True}]
modes = pytest.mark.parametrize("mode", MODES, ids=lambda m: "-".join(m) or "default")
world_sizes = pytest.mark.parametrize("world_size", [2, 3])
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


def on_both_ranks(pool: Any, scenario: Any, world_size: int, *args: Any) -> list[Any]:
    ours = both_equal(pool, scenario, *args, world_size=world_size)
    assert not any(isinstance(each, str) for each in ours), f"both fail: {ours}"
    return ours


# -- torch's hooks, unmodified ---------------------------------------------------------

TORCHS = {
    "allreduce": default_hooks.allreduce_hook,
    "fp16": default_hooks.fp16_compress_hook,
    "fp16(allreduce)": default_hooks.fp16_compress_wrapper(
        default_hooks.allreduce_hook
    ),
    "noop": debugging_hooks.noop_hook,
}


def with_torchs_hook(
    ctx: Any, wrap: Any, name: str, mode: dict[str, Any], after: int
) -> Any:
    ddp = wrap(Net(), **SMALL, **mode)
    skips, keeps = "find_unused_parameters" in mode, after == 2
    history = train(ddp, ctx, range(after), skips=skips, keeps=keeps)
    ddp.register_comm_hook(ctx.group, TORCHS[name])
    return history + train(ddp, ctx, range(after, 5), skips=skips, keeps=keeps)


@modes
@world_sizes
@pytest.mark.parametrize("name", TORCHS)
def test_stateless_hook_of_torch(
    pool: Any, name: str, world_size: int, mode: dict[str, Any]
) -> None:
    """Registered at once, and after two backwards (one of them after the rebuild)."""
    oracle.skip_unless_torch_takes(mode)
    for after in (0, 2):
        on_both_ranks(pool, with_torchs_hook, world_size, name, mode, after)


def with_local_sgd(ctx: Any, wrap: Any, averages_in_subgroup: bool) -> Any:
    ddp = wrap(Net(), **SMALL)
    pair = ctx.subgroups.get((0, 1)) if ctx.rank < 2 else None
    state = post_localSGD_hook.PostLocalSGDState(
        process_group=ctx.group,
        subgroup=pair or ctx.group,
        start_localSGD_iter=3,
        post_local_gradient_allreduce=averages_in_subgroup and pair is not None,
    )
    ddp.register_comm_hook(state, post_localSGD_hook.post_localSGD_hook)
    return train(ddp, ctx, range(6))


@pytest.mark.parametrize("averages_in_subgroup", [True, False])
def test_post_local_sgd(pool: Any, averages_in_subgroup: bool) -> None:
    """First all three ranks average, then ranks 0 and 1 do, or nobody."""
    ours = on_both_ranks(pool, with_local_sgd, 3, averages_in_subgroup)
    assert same(ours[0][2], ours[2][2])
    assert not same(ours[0][5], ours[2][5])
    assert same(ours[0][5], ours[1][5]) == averages_in_subgroup


def with_power_sgd(ctx: Any, wrap: Any, options: dict[str, Any]) -> Any:
    """One bucket: it starts collectives in callbacks, see `one_at_a_time`."""
    ddp = wrap(Net())
    state = power_sgd_state(ctx, **options)
    ddp.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    return train(ddp, ctx, range(6))


def power_sgd_state(ctx: Any, **options: Any) -> Any:
    return powerSGD_hook.PowerSGDState(
        ctx.group, start_powerSGD_iter=2, min_compression_rate=0.5, **options
    )


@world_sizes
@pytest.mark.parametrize("rank", [1, 2])
@pytest.mark.parametrize("feedback", [False, True])
@pytest.mark.parametrize("warm_start", [False, True])
def test_power_sgd_on_the_same_gradients(
    pool: Any, world_size: int, rank: int, feedback: bool, warm_start: bool
) -> None:
    options = {
        "matrix_approximation_rank": rank,
        "use_error_feedback": feedback,
        "warm_start": warm_start,
    }
    ours = on_both_ranks(pool, with_power_sgd, world_size, options)
    assert all(same(ours[0], other) for other in ours)


def with_power_sgd_in_many_buckets(ctx: Any, wrap: Any) -> Any:
    ddp = wrap(Net(), **SMALL)
    hook = comm_hooks.one_at_a_time(powerSGD_hook.powerSGD_hook)
    if not isinstance(ddp, DataParallel):
        # Torch's wrapper reads this annotation, and wants its own class there.
        hook.__annotations__.clear()
    ddp.register_comm_hook(power_sgd_state(ctx), hook)
    return train(ddp, ctx, range(8))


@world_sizes
def test_one_at_a_time_lets_power_sgd_have_many_buckets(
    pool: Any, world_size: int
) -> None:
    on_both_ranks(pool, with_power_sgd_in_many_buckets, world_size)


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


def power_sgd_on_images(ctx: Any) -> Any:
    """Error of the bare hook; gradients of channels_last and of row-major weights."""
    torch.manual_seed(0)
    bare = DataParallel(Images(), process_group=ctx.group)
    bare.register_comm_hook(power_sgd_state(ctx), powerSGD_hook.powerSGD_hook)
    error, histories = "", []
    try:
        train(bare, ctx, range(3))
    except RuntimeError as caught:
        error = str(caught)
    for kind in (Images, PlainImages):
        torch.manual_seed(0)
        ddp = DataParallel(kind(), process_group=ctx.group)
        hook = comm_hooks.row_major(powerSGD_hook.powerSGD_hook)
        ddp.register_comm_hook(power_sgd_state(ctx), hook)
        histories.append(train(ddp, ctx, range(6)))
    return error, *histories


def test_row_major_lets_power_sgd_have_channels_last_weights(pool: Any) -> None:
    for error, channels_last, plain in pool.run(power_sgd_on_images, 2):
        assert "view size is not compatible" in error
        assert "comm hook powerSGD_hook raised RuntimeError" in error
        for step, expected in zip(channels_last, plain, strict=True):
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


def with_resizing_hook(ctx: Any, wrap: Any, mode: dict[str, Any]) -> Any:
    ddp = wrap(Net(), **SMALL, **mode)
    ddp.register_comm_hook(ctx.group, resizing_hook)
    return train(ddp, ctx, range(2)) + train(ddp, ctx, range(2, 5), keeps=True)


@modes
def test_hook_that_resizes_the_buffer(pool: Any, mode: dict[str, Any]) -> None:
    oracle.skip_unless_torch_takes(mode)
    on_both_ranks(pool, with_resizing_hook, 2, mode)


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


KINDS = {"complex": Waves, "channels_last": Images, "sparse": Words}


def of_kind(ctx: Any, wrap: Any, kind: str, name: str, mode: Any) -> Any:
    ddp = wrap(KINDS[kind](), **mode)
    ddp.register_comm_hook(ctx.group, TORCHS[name])
    history = train(ddp, ctx, range(3))
    return [[g.to_dense() for g in step] for step in history]


@world_sizes
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", TORCHS)
@pytest.mark.parametrize("view", [False, True])
def test_unusual_gradients(
    pool: Any, kind: str, name: str, view: bool, world_size: int
) -> None:
    if kind == "sparse" and name.startswith("fp16"):
        pytest.skip("torch's hook adds sparse halves, which it cannot")
    mode = {"gradient_as_bucket_view": view}
    on_both_ranks(pool, of_kind, world_size, kind, name, mode)


FP32, INT8 = comm_hooks.fp32_accumulate_hook, comm_hooks.int8_error_feedback_hook
EVERYTHING = comm_hooks.one_at_a_time(
    comm_hooks.fp16_compress_wrapper(comm_hooks.row_major(FP32))
)
OURS: dict[str, Any] = {  # name -> how to make the state, hook
    "all_reduce": (lambda _: None, comm_hooks.all_reduce_hook),
    "all_reduce on a group": (lambda ctx: ctx.group, comm_hooks.all_reduce_hook),
    "fp16": (lambda _: None, comm_hooks.fp16_compress_hook),
    "bf16": (lambda _: None, comm_hooks.bf16_compress_hook),
    "fp16 wrapper": (
        lambda _: None,
        comm_hooks.fp16_compress_wrapper(comm_hooks.all_reduce_hook),
    ),
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


def mixed_buckets(ctx: Any, hook: str, mode: dict[str, Any]) -> Any:
    """(gradients with the hook, the mean of all ranks' local gradients) per step.

    Buckets that a hook can shrink, and some that it cannot, in turns.
    """
    torch.manual_seed(0)
    parts = [Images(), Words(), Net(torch.bfloat16), Net(torch.float64), Waves()]
    net = nn.ModuleList(parts)
    ddp = DataParallel(InTurn(net), process_group=ctx.group, **mode)
    register(ddp, ctx, hook)
    history = []
    for step in range(4):
        ddp.zero_grad()
        ddp(inputs(ctx.rank, step)).backward()
        averaged = [g.to_dense() for g in grads(ddp)]
        net.zero_grad()
        for rank in range(ctx.world_size):
            ddp.module(inputs(rank, step)).backward()
        means = [g.to_dense() / ctx.world_size for g in grads(ddp)]
        history.append((averaged, means))
    return history


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


@pytest.mark.parametrize(
    ("world_size", "mode"),
    [(1, {}), (2, VIEWS), (2, {"bucket_cap_mb": 0}), (3, SMALL), (3, SMALL | VIEWS)],
    ids=str,
)
@pytest.mark.parametrize("hook", OURS)
def test_our_hooks_average_all_kinds_of_gradients(
    pool: Any, hook: str, world_size: int, mode: dict[str, Any]
) -> None:
    """About right (the rounding is bounded elsewhere), and the same on all ranks."""
    results = pool.run(mixed_buckets, world_size, hook, mode)
    first = [averaged for averaged, _ in results[0]]
    for history in results:
        assert same(first, [averaged for averaged, _ in history])
        for averaged, means in history:
            largest = max(mean.abs().max().item() for mean in means)
            for grad, mean in zip(averaged, means, strict=True):
                tolerance = 0.03 * largest
                if (
                    "int8" not in hook
                ):  # there a block's error is relative to its largest
                    tolerance = min(tolerance, 0.04 * mean.abs().max().item() + 0.02)
                torch.testing.assert_close(grad, mean, rtol=0.0, atol=tolerance)


# -- our hooks -------------------------------------------------------------------------

SAME_AS_TORCHS = {
    "allreduce": comm_hooks.all_reduce_hook,
    "fp16": comm_hooks.fp16_compress_hook,
    "fp16(allreduce)": comm_hooks.fp16_compress_wrapper(comm_hooks.all_reduce_hook),
}


def ours_and_torchs(ctx: Any, name: str, mode: dict[str, Any]) -> tuple[Any, Any]:
    results = []
    for hook in (TORCHS[name], SAME_AS_TORCHS[name]):
        torch.manual_seed(0)
        ddp = DataParallel(Net(), process_group=ctx.group, **SMALL, **mode)
        ddp.register_comm_hook(None if hook is not TORCHS[name] else ctx.group, hook)
        results.append(train(ddp, ctx, range(4), skips=bool(mode)))
    return results[0], results[1]


@world_sizes
@pytest.mark.parametrize("name", SAME_AS_TORCHS)
@pytest.mark.parametrize("mode", [{}, {"find_unused_parameters": True}], ids=str)
def test_our_hook_has_the_bits_of_torchs(
    pool: Any, name: str, mode: dict[str, Any], world_size: int
) -> None:
    for torchs, ours in pool.run(ours_and_torchs, world_size, name, mode):
        assert same(torchs, ours)


def bf16_and_formula(ctx: Any, name: str, dtype: torch.dtype) -> list[Any]:
    """(what the hook brings, the formula) per step; torch's DDP refuses it on CPU."""
    torch.manual_seed(0)
    net = Net(dtype)
    ddp = DataParallel(net, process_group=ctx.group)
    ddp.register_comm_hook(ctx.group, BF16[name])
    pairs = []
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
        pairs.append((grads(net), expected))
        net.zero_grad()
    return pairs


BF16 = {
    "ours": comm_hooks.bf16_compress_hook,
    "torchs": default_hooks.bf16_compress_hook,
    "composed": comm_hooks.bf16_compress_wrapper(default_hooks.allreduce_hook),
}


@pytest.mark.parametrize("name", BF16)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_bf16_on_gloo(pool: Any, name: str, dtype: torch.dtype) -> None:
    for pairs in pool.run(bf16_and_formula, 2, name, dtype):
        for found, expected in pairs:
            assert same(found, expected)


# -- speed and uneven inputs -----------------------------------------------------------


def at_random_speed(ctx: Any, seed: int) -> Any:
    """Sleeps before each of many buckets, longer or shorter on each rank."""
    speed = random.Random(seed + ctx.rank)
    state = comm_hooks.Fp32State()

    def hook(state, bucket):
        time.sleep(speed.choice([0, 0, 0.001, 0.005]))
        return comm_hooks.fp32_accumulate_hook(state, bucket)

    torch.manual_seed(0)
    ddp = DataParallel(Net(), process_group=ctx.group, bucket_cap_mb=0)
    ddp.register_comm_hook(state, hook)
    return train(ddp, ctx, range(6))


def test_two_stages_keep_their_order_at_any_speed(pool: Any) -> None:
    expected = None
    for seed in range(0, 40, 10):
        for history in pool.run(at_random_speed, 4, seed):
            expected = expected or history
            assert same(history, expected)


def runs_out(ctx: Any, hook: str, by_initial: bool) -> Any:
    """Rank r has r + 1 inputs; (gradients, mean over the ranks that count)."""
    torch.manual_seed(0)
    net = Net()
    ddp = DataParallel(net, process_group=ctx.group, **SMALL)
    register(ddp, ctx, hook)
    pairs = []
    with ddp.join(divide_by_initial_world_size=by_initial):
        for step in range(ctx.rank + 1):
            ddp.zero_grad()
            ddp(inputs(ctx.rank, step)).pow(2).sum().backward()
            found = grads(net)
            net.zero_grad()
            for rank in range(step, ctx.world_size):
                net(inputs(rank, step)).pow(2).sum().backward()
            count = ctx.world_size if by_initial else ctx.world_size - step
            pairs.append((found, [g / count for g in grads(net)]))
    return pairs


@pytest.mark.parametrize("hook", OURS)
@pytest.mark.parametrize("by_initial", [True, False])
def test_our_hooks_divide_by_the_ranks_that_count(
    pool: Any, hook: str, by_initial: bool
) -> None:
    for pairs in pool.run(runs_out, 3, hook, by_initial):
        for found, means in pairs:
            tolerance = 0.03 * max(mean.abs().max().item() for mean in means)
            for grad, mean in zip(found, means, strict=True):
                torch.testing.assert_close(grad, mean, rtol=0.0, atol=tolerance)
