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

pytestmark = pytest.mark.laws

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


def gradients(ctx, spec, options, hook, state=None):
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


plain = comm_hooks.all_reduce_hook
to_bf16 = comm_hooks.bf16_compress_wrapper
# Two comm hooks; None: there is none.
EQUAL: dict[str, tuple[Any, Any]] = {
    "wrapping twice is wrapping once": (to_bf16(to_bf16(plain)), to_bf16(plain)),
    "waiting changes nothing": (comm_hooks.one_at_a_time(plain), plain),
    "row_major of nothing is nothing": (comm_hooks.row_major(noop_hook), noop_hook),
    "a no-op hook leaves local gradients": (noop_hook, None),
}


def both_hooks(ctx, law, spec, options):
    return [gradients(ctx, spec, options, hook) for hook in EQUAL[law]]


@pytest.mark.parametrize("law", EQUAL)
def test_equal_hooks(pool, law):
    @quick
    @given(models(), options, world_sizes)
    def run(spec, options, world_size):
        for left, right in pool.run(both_hooks, world_size, law, spec, options):
            assert same(left, right)

    run()


# -- order -----------------------------------------------------------------------------


def calls(ctx, spec, options):
    """Per backward and bucket: was it the last one, how many gradients were in it."""
    backwards = []

    def hook(state, bucket):
        if bucket.index() == 0:
            backwards.append([])
        assert bucket.index() == len(backwards[-1])
        backwards[-1].append((bucket.is_last(), len(bucket.gradients())))
        return plain(state, bucket)

    gradients(ctx, spec, options, hook)
    assert len(backwards) == 3
    for backward in backwards:
        lasts, counts = zip(*backward, strict=True)
        assert [*lasts] == [False] * (len(lasts) - 1) + [True]
        assert sum(counts) == len(spec.params)
    return backwards


def test_buckets_come_in_order_and_the_last_one_says_so(pool):
    @quick
    @given(models(), options, world_sizes)
    def run(spec, options, world_size):
        first, *others = pool.run(calls, world_size, spec, options)
        assert all(each == first for each in others)

    run()


# -- bounds ----------------------------------------------------------------------------


class Rows(torch.nn.Module):
    """Parameters whose gradient in step s on a rank is a given row."""

    def __init__(self, numels):
        super().__init__()
        self.parts = torch.nn.ParameterList([torch.zeros(n) for n in numels])

    def forward(self, rows):
        pieces = rows.split([p.numel() for p in self.parts])
        return sum((p * g).sum() for p, g in zip(self.parts, pieces, strict=True))


def decoded(ctx, rows, numels, hook, **state):
    """What the hook makes of ``rows[rank, step]``, per step."""
    module = Rows(numels)
    ddp = DataParallel(module, process_group=ctx.group, bucket_cap_mb=256 / 2**20)
    if hook == "int8":
        state, hook = comm_hooks.Int8State(**state), comm_hooks.int8_error_feedback_hook
    else:
        state = comm_hooks.Fp32State(wire_dtype=getattr(torch, hook))
        hook = comm_hooks.fp32_accumulate_hook
    ddp.register_comm_hook(state, hook)
    steps = []
    for row in rows[ctx.rank]:
        ddp.zero_grad()
        ddp(row).backward()
        steps.append(torch.cat([p.grad.clone() for p in ddp.parameters()]))
    return torch.stack(steps)


@st.composite
def streams(draw, num_steps):
    """Gradients [rank, step, element] of many magnitudes, zeros among them."""
    world_size = draw(world_sizes)
    numels = tuple(draw(st.lists(st.integers(1, 70), min_size=1, max_size=4)))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 10**6)))
    shape = (world_size, num_steps, sum(numels))
    exponents = torch.randint(-12, 6, shape, generator=generator)
    rows = torch.randn(shape, generator=generator) * 2.0**exponents
    rows[:, :, torch.rand(sum(numels), generator=generator) < 0.2] = 0
    return rows, numels


@pytest.mark.parametrize("name", ["bfloat16", "float16"])
def test_fp32_accumulation_rounds_twice_at_most(pool, name):
    u = torch.finfo(getattr(torch, name)).eps / 2
    tiny = torch.finfo(getattr(torch, name)).smallest_normal * u

    @quick
    @given(streams(3))
    def run(stream):
        rows, numels = stream
        results = pool.run(decoded, len(rows), rows, numels, name)
        mean, size = rows.double().mean(0), rows.double().abs().mean(0)
        bound = (u + u * u) * size + u * mean.abs() + 1e-6 * size + 2 * tiny
        for found in results:
            assert same(found, results[0])
            assert ((found - mean).abs() <= bound).all()

    run()


def with_int8(ctx, rows, numels, block):
    return decoded(ctx, rows, numels, "int8", block=block)


def test_int8_loses_nothing_in_the_long_run(pool):
    """The sums of decoded and true gradients differ by one residual per rank.

    Two, as the rebuild after the first step gives buckets other parameters.
    """

    @quick
    @given(streams(12), st.sampled_from([1, 5, 64, 256]))
    def run(stream, block):
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


@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan")])
def test_int8_shows_what_is_not_finite_and_recovers(pool, value):
    rows = torch.ones(3, 4, 40)
    rows[0, 2, 19] = value  # one rank has a bad gradient in step 2
    for found in pool.run(with_int8, 3, rows, (40,), 8):
        finite = found.isfinite()
        assert finite[[0, 1, 3]].all()
        assert finite[2].tolist() == [not 16 <= i < 24 for i in range(40)]
        torch.testing.assert_close(found[3], torch.ones(40))
