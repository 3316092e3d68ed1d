"""Laws of comm hooks, on real ranks; every example is drawn in the parent."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.algorithms.ddp_comm_hooks.debugging_hooks import noop_hook

from minidp import DataParallel, comm_hooks
from tests.support.both import same
from tests.support.models import ModelSpec, ParamShape, Patchwork

params = st.builds(
    ParamShape,
    shape=st.sampled_from([(), (1,), (7,), (0, 3), (2, 3), (2, 3, 2, 2), (33,)]),
    dtype=st.sampled_from(["fp32"] * 3 + ["fp64", "bf16", "complex64"]),
    strides=st.sampled_from(["contiguous"] * 2 + ["transposed", "channels_last"]),
)


@st.composite
def models(draw: st.DrawFn) -> ModelSpec:
    chosen = tuple(draw(st.lists(params, min_size=1, max_size=5)))
    indices = tuple(range(len(chosen)))
    return ModelSpec(chosen, (indices, draw(st.permutations(indices))[:2]))


options = st.fixed_dictionaries(
    {"bucket_cap_mb": st.sampled_from([0, 64 / 2**20, 25])},
    optional={
        "gradient_as_bucket_view": st.just(True),
        "find_unused_parameters": st.just(True),
    },
)
world_sizes = st.integers(1, 4)
quick = settings(max_examples=25)


def gradients(
    ctx: Any, spec: ModelSpec, options: dict[str, Any], hook: Any, state: Any = None
) -> list[list[torch.Tensor]]:
    """Of three steps, past the rebuild; ``hook=None``: local gradients."""
    net = Patchwork(spec)
    model: Any = net
    if hook is not None:
        model = DataParallel(net, process_group=ctx.group, **options)
        model.register_comm_hook(state, hook)
    history = []
    for step in range(3):
        net.zero_grad()
        generator = torch.Generator().manual_seed(10 * step + ctx.rank)
        x = torch.randn(4, 3, generator=generator)
        sum(model(x, (True, step % 2 == 0))).backward()
        history.append([p.grad.clone() for p in net.parameters()])
    return history


# -- composition -----------------------------------------------------------------------

EQUAL: dict[str, tuple[Any, Any]] = {
    "a wrapper is the hook (bf16)": (
        comm_hooks.bf16_compress_wrapper(comm_hooks.all_reduce_hook),
        comm_hooks.bf16_compress_hook,
    ),
    "a wrapper is the hook (fp16)": (
        comm_hooks.fp16_compress_wrapper(comm_hooks.all_reduce_hook),
        comm_hooks.fp16_compress_hook,
    ),
    "wrapping twice is wrapping once": (
        comm_hooks.bf16_compress_wrapper(
            comm_hooks.bf16_compress_wrapper(comm_hooks.all_reduce_hook)
        ),
        comm_hooks.bf16_compress_hook,
    ),
    "waiting changes nothing": (
        comm_hooks.one_at_a_time(comm_hooks.all_reduce_hook),
        comm_hooks.all_reduce_hook,
    ),
    "row_major of nothing is nothing": (comm_hooks.row_major(noop_hook), noop_hook),
}


def both_hooks(ctx: Any, law: str, spec: ModelSpec, options: dict[str, Any]) -> Any:
    return [gradients(ctx, spec, options, hook) for hook in EQUAL[law]]


@pytest.mark.parametrize("law", EQUAL)
def test_equal_hooks(pool: Any, law: str) -> None:
    @quick
    @given(models(), options, world_sizes)
    def run(spec: ModelSpec, options: dict[str, Any], world_size: int) -> None:
        for left, right in pool.run(both_hooks, world_size, law, spec, options):
            assert same(left, right)

    run()


def with_no_op(ctx: Any, spec: ModelSpec, options: dict[str, Any]) -> Any:
    return (
        gradients(ctx, spec, options, noop_hook),
        gradients(ctx, spec, options, None),
    )


def test_a_no_op_hook_leaves_local_gradients(pool: Any) -> None:
    @quick
    @given(models(), options, world_sizes)
    def run(spec: ModelSpec, options: dict[str, Any], world_size: int) -> None:
        for found, local in pool.run(with_no_op, world_size, spec, options):
            assert same(found, local)

    run()


FUNCTIONS: dict[str, Any] = {
    "negative": torch.neg,
    "clipped": lambda t: t.clamp(-0.1, 0.1),
    "sign": torch.sign,
    "cubed": lambda t: t * t * t,
}


def then(function: Any, hook: Any) -> Any:
    def chained(state, bucket):
        return hook(state, bucket).then(lambda done: function(done.value()))

    return chained


def with_function(ctx: Any, name: str, spec: ModelSpec, options: dict[str, Any]) -> Any:
    """(f after the all-reduce in the hook, f of the averaged gradients)."""
    function, plain = FUNCTIONS[name], comm_hooks.all_reduce_hook
    inside = gradients(ctx, spec, options, then(function, plain))
    outside = [
        [
            torch.view_as_complex(function(torch.view_as_real(g)))
            if g.is_complex()
            else function(g)
            for g in step
        ]
        for step in gradients(ctx, spec, options, plain)
    ]
    return inside, outside


def test_what_comes_after_the_all_reduce_comes_out(pool: Any) -> None:
    @quick
    @given(models(), options, world_sizes, st.sampled_from(sorted(FUNCTIONS)))
    def run(
        spec: ModelSpec, options: dict[str, Any], world_size: int, name: str
    ) -> None:
        for left, right in pool.run(with_function, world_size, name, spec, options):
            assert same(left, right)

    run()


# -- order -----------------------------------------------------------------------------


def calls(ctx: Any, spec: ModelSpec, options: dict[str, Any]) -> Any:
    seen: list[tuple[int, bool, int, int]] = []

    def hook(state, bucket):
        numbers = bucket.index(), bucket.is_last(), bucket.buffer().numel()
        seen.append((*numbers, len(bucket.gradients())))
        return comm_hooks.all_reduce_hook(state, bucket)

    gradients(ctx, spec, options, hook)
    return seen


def test_buckets_come_in_order_and_the_last_one_says_so(pool: Any) -> None:
    @quick
    @given(models(), options, world_sizes)
    def run(spec: ModelSpec, options: dict[str, Any], world_size: int) -> None:
        per_rank = pool.run(calls, world_size, spec, options)
        assert all(seen == per_rank[0] for seen in per_rank)
        backwards: list[list[Any]] = []
        for call in per_rank[0]:
            if call[0] == 0:
                backwards.append([])
            backwards[-1].append(call)
        assert len(backwards) == 3
        for backward in backwards:
            count = len(backward)
            assert [call[0] for call in backward] == list(range(count))
            assert [call[1] for call in backward] == [False] * (count - 1) + [True]
            assert sum(call[3] for call in backward) == len(spec.params)

    run()


# -- bounds ----------------------------------------------------------------------------


class Given(torch.nn.Module):
    """Parameters whose gradient in step s on a rank is a given row."""

    def __init__(self, numels: tuple[int, ...]) -> None:
        super().__init__()
        self.parts = torch.nn.ParameterList([torch.zeros(n) for n in numels])

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        pieces = rows.split([p.numel() for p in self.parts])
        return sum((p * g).sum() for p, g in zip(self.parts, pieces, strict=True))


def decoded(
    ctx: Any, rows: torch.Tensor, numels: tuple[int, ...], hook: Any, state: Any
) -> torch.Tensor:
    """What the hook makes of ``rows[rank, step]``, per step."""
    ddp = DataParallel(
        Given(numels), process_group=ctx.group, bucket_cap_mb=256 / 2**20
    )
    ddp.register_comm_hook(state, hook)
    steps = []
    for row in rows[ctx.rank]:
        ddp.zero_grad()
        ddp(row).backward()
        steps.append(torch.cat([p.grad.clone() for p in ddp.parameters()]))
    return torch.stack(steps)


@st.composite
def streams(draw: st.DrawFn, num_steps: int) -> tuple[torch.Tensor, tuple[int, ...]]:
    """Gradients [rank, step, element] of many magnitudes, zeros among them."""
    world_size = draw(world_sizes)
    numels = tuple(draw(st.lists(st.integers(1, 70), min_size=1, max_size=4)))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 10**6)))
    shape = (world_size, num_steps, sum(numels))
    exponents = torch.randint(-12, 6, shape, generator=generator)
    rows = torch.randn(shape, generator=generator) * 2.0**exponents
    rows[:, :, torch.rand(sum(numels), generator=generator) < 0.2] = 0
    return rows, numels


def with_fp32(
    ctx: Any, rows: torch.Tensor, numels: tuple[int, ...], name: str
) -> torch.Tensor:
    state = comm_hooks.Fp32State(wire_dtype=getattr(torch, name))
    return decoded(ctx, rows, numels, comm_hooks.fp32_accumulate_hook, state)


@pytest.mark.parametrize("name", ["bfloat16", "float16"])
def test_fp32_accumulation_rounds_twice_at_most(pool: Any, name: str) -> None:
    u = torch.finfo(getattr(torch, name)).eps / 2
    tiny = torch.finfo(getattr(torch, name)).smallest_normal * u

    @quick
    @given(streams(3))
    def run(stream: Any) -> None:
        rows, numels = stream
        results = pool.run(with_fp32, len(rows), rows, numels, name)
        mean, size = rows.double().mean(0), rows.double().abs().mean(0)
        bound = (u + u * u) * size + u * mean.abs() + 1e-6 * size + 2 * tiny
        for found in results:
            assert same(found, results[0])
            assert ((found - mean).abs() <= bound).all()

    run()


def with_int8(
    ctx: Any, rows: torch.Tensor, numels: tuple[int, ...], block: int
) -> torch.Tensor:
    state = comm_hooks.Int8State(block=block)
    return decoded(ctx, rows, numels, comm_hooks.int8_error_feedback_hook, state)


def test_int8_loses_nothing_in_the_long_run(pool: Any) -> None:
    """The sums of decoded and true gradients differ by one residual per rank.

    Two, as the rebuild after the first step gives buckets other parameters.
    """

    @quick
    @given(streams(12), st.sampled_from([1, 5, 64, 256]))
    def run(stream: Any, block: int) -> None:
        rows, numels = stream
        results = pool.run(with_int8, len(rows), rows, numels, block)
        true_sum = rows.double().sum(1).mean(0)
        # A residual is half a scale; a scale is max|g + residual| / 127 at most.
        half_scale = rows.abs().max().item() * (1 + 1 / 100) / 254
        for found in results:
            assert same(found, results[0])
            missing = (found.double().sum(0) - true_sum).abs().max().item()
            assert missing <= 2.01 * half_scale
            first = (found[0] - rows[:, 0].mean(0)).abs().max().item()
            assert first <= 1.01 * half_scale

    run()


def not_finite(ctx: Any, value: float, where: int) -> Any:
    """One rank has a bad gradient in step 2."""
    rows = torch.ones(ctx.world_size, 4, 40)
    rows[0, 2, where] = value
    state = comm_hooks.Int8State(block=8)
    return decoded(ctx, rows, (40,), comm_hooks.int8_error_feedback_hook, state)


@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan")])
def test_int8_shows_what_is_not_finite_and_recovers(pool: Any, value: float) -> None:
    for found in pool.run(not_finite, 3, value, 19):
        finite = found.isfinite()
        assert finite[[0, 1, 3]].all()
        assert finite[2].tolist() == [not 16 <= i < 24 for i in range(40)]
        torch.testing.assert_close(found[3], torch.ones(40))
