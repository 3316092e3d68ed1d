"""``bucket_cap_mb="auto"``: layouts change, gradients do not, ranks never differ."""

from __future__ import annotations

import gc
import random
import weakref
from typing import Any

import pytest
import torch
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

from minidp import DataParallel, comm_hooks
from minidp.autotune import tuner
from minidp.autotune.trials import NUM_TRIALS, Search
from minidp.autotune.tuner import STEPS, AutotunePolicy
from minidp.layout.plan import Layout, build_layout, delayed
from minidp.overlap import Stopwatch
from minidp.overlap.timeline import AUTO, AUTO_TRIES
from tests.layout.test_resume import Net
from tests.support.ranks import on_ranks

LAST = 1 + STEPS * NUM_TRIALS  # backwards until the layout stays

MODES: dict[str, dict[str, Any]] = {
    "default": {},
    "find_unused": {"find_unused_parameters": True},
    "skip_unused": {
        "find_unused_parameters": True,
        "skip_all_reduce_unused_params": True,
    },
    "static_graph": {"static_graph": True},
    "view": {"gradient_as_bucket_view": True},
    "batched": {"batched_grad_copy": True},
}


def made(kind: Any, ctx: Any, **options: Any) -> Any:
    torch.manual_seed(1)
    return kind(Net(), process_group=ctx.group, **options)


def step(ctx: Any, ddp: Any, number: int, *, with_spare: bool = True) -> Any:
    """One step of SGD; the gradients it applied."""
    generator = torch.Generator().manual_seed(100 * number + ctx.rank)
    x = torch.randn(5, 7, generator=generator)
    ddp(x, with_spare=with_spare).backward()
    grads = [None if p.grad is None else p.grad.clone() for p in ddp.parameters()]
    with torch.no_grad():
        for param in ddp.parameters():
            if param.grad is not None:
                param.add_(param.grad, alpha=-0.1)
            param.grad = None
    return grads


def wild(seed: int) -> Any:
    """Proposals that have nothing to do with what was measured."""

    def proposal(search: Search, trial: int) -> Layout:
        rng = random.Random(1000 * seed + trial)
        specs = search._specs
        order = [i for i, spec in enumerate(specs) if not spec.delayed]
        rng.shuffle(order)
        groups, begin = [], 0
        while begin < len(order):
            length = rng.randint(1, 4)
            groups.append(order[begin : begin + length])
            begin += length
        return build_layout(specs, groups + delayed(specs))

    return proposal


def buckets_of(ddp: DataParallel) -> tuple[tuple[str, ...], ...]:
    return tuple(map(tuple, ddp.bucket_layout["buckets"]))


@on_ranks()
@pytest.mark.parametrize(("where", "mode"), [*((2, m) for m in MODES), (3, "default")])
def test_bits_are_torchs_whatever_the_layout_and_ranks_have_equal_ones(ctx, mode):
    """On three ranks sums are added in another order in another layout."""
    options = MODES[mode]
    theirs = made(DistributedDataParallel, ctx, **options)
    ours = made(DataParallel, ctx, bucket_cap_mb="auto", **options)
    with_all = mode not in ("find_unused", "skip_unused")
    layouts, settled, tolerance = [], 0, 1e-6 if ctx.world_size > 2 else 0.0
    with pytest.MonkeyPatch.context() as patch:
        # Another seed on each rank: only rank 0's layouts may count.
        patch.setattr(Search, "proposal", wild(ctx.rank))
        for number in range(LAST + 3):
            with_spare = with_all or number % 3 != 0
            a = step(ctx, theirs, number, with_spare=with_spare)
            b = step(ctx, ours, number, with_spare=with_spare)
            for left, right in zip(a, b, strict=True):
                assert (left is None) == (right is None)
                assert left is None or (left - right).abs().max() <= tolerance
            layouts.append(buckets_of(ours))
            order = ours._reducer.rebuild_policy
            settled += not order.is_settled
            assert order.layout_by == (AUTO if order.is_settled else AUTO_TRIES)
    assert len(set(layouts)) >= 5  # else this has shown nothing
    first = 1 if mode != "static_graph" else 2  # the first one counts uses
    assert settled == LAST - 1 + first
    assert len(set(layouts[settled:])) == 1
    return layouts


@on_ranks(2)
@pytest.mark.parametrize("hook", ["", "stateless", "stateful"])
def test_rank_0_tries_several_layouts_and_says_once_what_was_chosen(ctx, hook):
    """A hook with a state keeps its buckets."""
    ours = made(DataParallel, ctx, bucket_cap_mb="auto")
    fixed = made(DataParallel, ctx)
    for ddp in (ours, fixed):
        if hook == "stateless":
            ddp.register_comm_hook(ctx.group, default_hooks.fp16_compress_hook)
        elif hook == "stateful":
            state = comm_hooks.Int8State(process_group=ctx.group)
            ddp.register_comm_hook(state, comm_hooks.int8_error_feedback_hook)
    lines: list[str] = []
    layouts = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            tuner.logger, "warning", lambda *text: lines.append(text[0] % text[1:])
        )
        for number in range(LAST + 2):
            step(ctx, ours, number)
            step(ctx, fixed, number)
            layouts.append(buckets_of(ours))
    torchs = buckets_of(fixed)
    assert len(lines) == (ctx.rank == 0)
    for line in lines:
        assert ("comm hook" in line) == (hook == "stateful")
        assert hook or "exposed communication" in line
    if hook == "stateful":
        assert set(layouts[1:]) == {torchs}
    else:
        assert hook or layouts[STEPS - 1] == torchs
        assert len(set(layouts)) >= 3
    return layouts


@on_ranks(2)
@pytest.mark.parametrize("long_seconds", [0.0, 1e9])
def test_long_trials_say_how_far_they_are(ctx, long_seconds):
    """What a rank would print on a terminal, if trials that take so long are long."""
    ddp = made(DataParallel, ctx, bucket_cap_mb="auto")
    lines: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tuner, "say_progress", lines.append)
        patch.setattr(tuner, "LONG_SECONDS", long_seconds)
        for number in range(LAST + 2):
            step(ctx, ddp, number)
    assert [line.partition(", ")[0] for line in lines] == [
        f'minidp: bucket_cap_mb="auto" tries layout {number} of 8'
        for number in range(2, 9 if long_seconds == 0 else 2)
    ]
    assert all(line.endswith(" s to go") for line in lines)


@on_ranks(2)
def test_uneven_inputs(ctx):
    """Ranks that run out keep the others company through all rebuilds."""
    ddp = made(DataParallel, ctx, bucket_cap_mb="auto")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Search, "proposal", wild(3))
        with ddp.join():
            for number in range(LAST + 2 if ctx.rank == 1 else 9):
                step(ctx, ddp, number)
    assert ddp.bucket_layout["rebuilt"]
    return buckets_of(ddp)


def is_timed(ddp: DataParallel) -> bool:
    observers = ddp._reducer.queue.observers
    return any(isinstance(each, Stopwatch) for each in observers.everybody)


@on_ranks(2)
def test_reset_starts_over(ctx):
    ddp = made(DataParallel, ctx, bucket_cap_mb="auto")
    for number in range(STEPS * 2):
        step(ctx, ddp, number)
    ddp.reset()
    order = ddp._reducer.rebuild_policy
    assert (order.is_settled, order.has_rebuilt, is_timed(ddp)) == (False, False, False)
    for number in range(LAST + 1):
        step(ctx, ddp, number)
    assert (order.is_settled, is_timed(ddp)) == (True, False)


@on_ranks(2)
def test_a_tuned_layout_stays_on_another_group(ctx):
    # A bucket for each parameter, as no rebuild makes them.
    numel = {name: param.numel() for name, param in Net().named_parameters()}
    layout = made(DataParallel, ctx).bucket_layout | {
        "buckets": [[name] for name in numel],
        "elements": [[n] for n in numel.values()],
        "rebuilt": True,
    }
    ddp = made(DataParallel, ctx, bucket_cap_mb="auto", bucket_layout=layout)
    ddp._update_process_group(ctx.group)
    for number in range(3):
        step(ctx, ddp, number)
        assert ddp.bucket_layout == layout


@on_ranks(2)
@pytest.mark.parametrize("steps", [0, 1, STEPS + 2, LAST + 1])
def test_no_object_survives(ctx, steps):
    gc.collect()
    gc.disable()
    try:
        # No hang reports: their thread may hold the reducer for a moment.
        ddp = made(DataParallel, ctx, bucket_cap_mb="auto", hang_timeout=None)
        for number in range(steps):
            step(ctx, ddp, number)
        reducer = ddp._reducer
        parts = (ddp, reducer, reducer.queue, reducer.rebuild_policy, reducer.hooks)
        seen = [weakref.ref(part) for part in parts]
        del ddp, reducer, parts
        assert [type(ref()).__name__ for ref in seen if ref() is not None] == []
    finally:
        gc.enable()


@on_ranks(2)
def test_a_layout_is_final_when_it_has_settled(ctx):
    ddp = made(DataParallel, ctx, bucket_cap_mb="auto")
    found = []
    for number in range(LAST + 2):
        step(ctx, ddp, number)
        found.append(ddp.bucket_layout["rebuilt"])
    again = made(
        DataParallel, ctx, bucket_cap_mb="auto", bucket_layout=ddp.bucket_layout
    )
    assert found == [False] * LAST + [True] * 2
    for number in range(3):
        step(ctx, again, number)
        assert again.bucket_layout == ddp.bucket_layout


def test_one_rank_has_nothing_to_tune(lone_group):
    ddp = DataParallel(Net(), process_group=lone_group, bucket_cap_mb="auto")
    assert not isinstance(ddp._reducer.rebuild_policy, AutotunePolicy)
