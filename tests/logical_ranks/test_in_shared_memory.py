"""Sums over logical ranks of one host: where they lie, and the bits of messages."""

from __future__ import annotations

import os
import time

import pytest
import torch

from minidp.layout import build_layout
from tests.logical_ranks.trainings import batch, net, wrapped
from tests.shared_memory.test_buckets import OFF, Weighted, why_not
from tests.support.both import same
from tests.support.combined import combined
from tests.support.fresh import run_fresh
from tests.support.ranks import on_ranks

pytestmark = [
    pytest.mark.usefixtures("library"),  # skips without a compiler
    pytest.mark.skipif(
        "0" in map(os.environ.get, ("MINIDP_NATIVE", "MINIDP_SHARED_MEMORY")),
        reason="MINIDP_NATIVE=0 or MINIDP_SHARED_MEMORY=0: ranks must not share memory",
    ),
]


def trained(model, step=0):
    for leaf in model.each_logical_rank():
        model(batch(step, leaf)).square().mean().backward()


def num_apart(model):
    """Return how many rows there are beside each bucket."""
    return {len(bucket.shared.apart) for bucket in model._reducer.queue.buckets}


@pytest.mark.parametrize(
    ("number", "expected"),
    [
        (4, {2: [0, 0], 3: [0, 0, 0]}),
        (5, {2: [1, 1], 3: [0, 0, 0]}),
        (6, {2: [1, 1], 3: [0, 0, 0]}),
        (7, {2: [0, 0], 3: [1, 1, 1]}),
    ],
)
@on_ranks(2, 3)
def test_where_sums_lie(ctx, number, expected):
    """After wrapping, after the rebuild of the buckets, and after reset()."""
    model = wrapped(ctx, net(), number, find_unused_parameters=True)
    for act in (lambda: None, lambda: [trained(model, step) for step in (0, 1)]):
        act()
        assert why_not(model) == ""
        assert num_apart(model) == {expected[ctx.world_size][ctx.rank]}
        model.reset()
        assert why_not(model) == ""


@on_ranks(2, fresh={})
@pytest.mark.parametrize(
    ("modes", "expected"),
    [
        (["1", "1"], ""),
        (["0", "auto"], f"rank 0: {OFF}"),
    ],
)
def test_modes(ctx, modes, expected):
    """All ranks use messages if one of them cannot share, and know why."""
    os.environ["MINIDP_SHARED_MEMORY"] = modes[ctx.rank]
    model = wrapped(ctx, net(), 6)
    assert why_not(model) == expected
    trained(model)
    return [param.grad for param in model.module.parameters()]


def large(ctx, number, dtype, options):
    """Train with buckets of 256 KiB and more, in shared memory and with messages."""
    found = []
    for mode in ("0", "auto"):
        os.environ["MINIDP_SHARED_MEMORY"] = mode
        module = Weighted(dtype)
        model = wrapped(ctx, module, number, **{"bucket_cap_mb": 0.5, **options})
        history = []
        for step in range(4):
            model.zero_grad(set_to_none=step != 2)
            for leaf in model.each_logical_rank():
                loss = model(10 * step + leaf)
                if "average_over" in options:
                    loss = model.weigh_loss(loss, 1 + leaf)
                loss.backward()
            history += [param.grad.clone() for param in module.parameters()]
        found.append(history)
    del os.environ["MINIDP_SHARED_MEMORY"]
    assert same(*found)
    return found[0]


DTYPES = [torch.float32, torch.bfloat16, torch.float16]
LARGE = [{}, {"gradient_as_bucket_view": True}, {"average_over": "items"}]


@pytest.mark.parametrize(("dtype", "options"), combined(DTYPES, LARGE))
def test_large_buckets(pool, dtype, options):
    for number in (5, 6):
        expected = pool.run(large, 1, number, dtype, options)
        for size in (2, 3):
            assert same(expected * size, pool.run(large, size, number, dtype, options))


def of_new_buckets(ctx, number, turn):
    """New buckets in the middle of a loop; first sums lie in the memory before."""
    module = net().eval()
    model = wrapped(ctx, module, number)
    for now, leaf in enumerate(model.each_logical_rank()):
        if now == turn:
            specs = model._reducer.queue.specs
            one_bucket = build_layout(specs, [list(range(len(specs)))])
            model._reducer.adopt(one_bucket, in_shared_memory=True)
        model(batch(0, leaf)).square().mean().backward()
    assert why_not(model) == ("" if ctx.world_size > 1 else "one rank: nothing travels")
    return [param.grad.clone() for param in module.parameters()]


@pytest.mark.parametrize("turn", [1, 2])
def test_new_buckets_in_a_loop(pool, turn):
    expected = pool.run(of_new_buckets, 1, 6, turn)
    assert same(expected * 2, pool.run(of_new_buckets, 2, 6, turn))


def ended(ctx):
    model = wrapped(ctx, net(), 7, hang_timeout=20)
    for _ in range(2):  # buckets are rebuilt
        trained(model)
    for leaf in model.each_logical_rank():
        if ctx.rank == 1 and leaf == model.logical_block[-1]:
            os._exit(0)
        model(batch(1, leaf)).square().mean().backward()


@pytest.mark.fault
def test_a_rank_that_ends_in_the_loop_is_named():
    begin = time.monotonic()
    found = run_fresh(ended, 3, errors="return")
    assert "the process of rank 1 ended" in str(found[0])
    assert "the process of rank 1 ended" in str(found[2])
    assert time.monotonic() - begin < 40


@on_ranks(2, fresh={})
def test_a_forked_child_changes_no_sums(ctx):
    """It is forked in the loop, and writes to its gradients and sums."""
    model = wrapped(ctx, net().eval(), 6)
    trained(model)
    expected = [param.grad.clone() for param in model.module.parameters()]
    for param in model.module.parameters():
        param.grad = None
    for leaf in model.each_logical_rank():
        if leaf == model.logical_block[-1]:
            child = os.fork()
            if child == 0:
                for bucket in model._reducer.queue.buckets:
                    for row in (bucket.shared.values, *bucket.shared.apart):
                        row.fill_(100.0)
                os._exit(0)
            os.waitpid(child, 0)
        model(batch(0, leaf)).square().mean().backward()
    assert same(expected, [param.grad for param in model.module.parameters()])
