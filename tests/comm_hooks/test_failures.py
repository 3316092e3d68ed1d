"""Comm hooks that fail: a named error, promptly on other ranks too, and recovery."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.futures import Future

from minidp import CommHookError, DataParallel, comm_hooks
from tests.support.both import done, error_of, wrapped
from tests.support.ranks import on_ranks, on_simulated_ranks
from tests.support.two_layers import TwoLayers, backward, trains
from tests.wrong_uses.bad_hooks import fail, failed

pytestmark = [pytest.mark.fault, pytest.mark.fresh]

# Timeouts of process groups. A rank whose peer did not start a collective, but says so
# nowhere, waits for the first; to wait for the second is taken for a hang before.
SECONDS, NEVER = 8.0, 120.0
BOO = ValueError("boo")
# What a bad hook returns, of the buffer, and what the error says about it. More of them
# go wrong in `patterns` (one bucket), and at random in `bad_hooks` (one rank).
BAD = {
    "None": (lambda _: None, "returned no future"),
    "a shorter tensor": (lambda b: done(b[1:]), "does not fit the bucket"),
    "an exception": (lambda _: fail(BOO), "raised ValueError: boo"),
    "a future that failed": (lambda _: failed(BOO), "returned a future that failed: "),
}


class Breakable:
    """Our hook, but once ``how`` is set, bucket 1 goes wrong on the given ranks."""

    __qualname__ = "Breakable"

    def __init__(self, hook):
        self.hook = hook
        self.how = None

    def __call__(self, state, bucket):
        if self.how is not None and bucket.index() == 1:
            return BAD[self.how][0](bucket.buffer())
        return self.hook(state, bucket)


def past_the_rebuild(ctx: Any, hook: Any, state: Any = None) -> DataParallel:
    ddp = wrapped(ctx, TwoLayers(), bucket_cap_mb=64 / 2**20)
    ddp.register_comm_hook(state, hook)
    for _ in range(2):
        ddp.zero_grad()
        backward(ddp)
    ddp.zero_grad()
    return ddp


on_two_ranks = on_simulated_ranks(2, fresh={"group_timeout": SECONDS})


@on_two_ranks
@pytest.mark.parametrize(
    ("how", "ranks", "own_state"),
    [
        ("None", [1], False),
        ("a shorter tensor", [0, 1], False),
        ("a future that failed", [0, 1], False),
        # Bucket 0 of `fp32_accumulate_hook` waits for a call that never comes.
        *(("an exception", ranks, True) for ranks in ([1], [0, 1])),
        ("a future that failed", [1], True),
    ],
)
def test_bad_hook(ctx, how, ranks, own_state):
    state = comm_hooks.Fp32State() if own_state else None
    hook = Breakable(
        comm_hooks.fp32_accumulate_hook if own_state else comm_hooks.all_reduce_hook
    )
    ddp = past_the_rebuild(ctx, hook, state)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    hook.how = how if ctx.rank in ranks else None
    first = error_of(lambda: backward(ddp))
    second, third = error_of(optimizer.step), error_of(lambda: ddp(torch.ones(1, 4)))
    assert second.startswith(f"UnsyncedGradientsError: [rank {ctx.rank}] ")
    assert third.startswith(f"ReducerFailedError: [rank {ctx.rank}] ")
    named = f"CommHookError: [rank {ctx.rank}] "
    if ctx.rank in ranks:
        assert first.startswith(f"{named}The comm hook Breakable ")
        for text in (BAD[how][1], "(bucket 1)", "Parameters: a."):
            assert text in first
    else:  # it waited for a collective that its peer never started
        assert first.startswith((named, f"CollectiveError: [rank {ctx.rank}] "))
    hook.how = None
    ddp.reset()
    for param in ddp.parameters():  # whole numbers: exact in bfloat16
        param.data.copy_(torch.eye(4)[: len(param)] if param.dim() > 1 else param * 0)
    assert trains(ctx, ddp)


@on_two_ranks
def test_reset_does_not_wait_for_a_future_that_never_completes(ctx):
    """All ranks: bucket 0 is in flight for ever, and the backward raises."""
    stuck = False

    def hook(state, bucket):
        return Future() if stuck else comm_hooks.all_reduce_hook(state, bucket)

    ddp = past_the_rebuild(ctx, hook)
    stuck = True
    handle = ddp.module.a.weight.register_hook(lambda _: fail(BOO))
    assert error_of(lambda: backward(ddp)) == "ValueError: boo"
    handle.remove()
    stuck = False
    old = ddp.process_group
    ddp.reset()
    assert ddp.process_group is not old  # abandoned, with what was in flight
    assert trains(ctx, ddp)


@on_ranks(2, fresh={"group_timeout": 4.0})
def test_failed_collectives_are_not_swallowed(ctx):
    """Rank 1 does not come in time; rank 0 must not go on with local numbers."""
    # The backend alone has to tell.
    ddp = DataParallel(nn.Linear(2, 1, bias=False), hang_timeout=None)
    ddp.register_comm_hook(None, lambda _, b: ddp.reducer._run_allreduce_hook(b))
    for _ in range(2):  # the second forward rebuilds the buckets
        ddp.zero_grad()
        ddp(torch.ones(1, 2)).sum().backward()
    if ctx.rank == 0:
        ddp.zero_grad()
        with pytest.raises(CommHookError, match=r"^\[rank 0\] .*a future that failed"):
            ddp(torch.ones(1, 2)).sum().backward()


# Simulated ranks have torch's own hooks: the scenario "reset".
READY_MADE: dict[str, tuple[Callable[[], Any], Any]] = {  # what makes a state, hook
    "torch's, wrapped": (
        lambda: None,
        default_hooks.fp16_compress_wrapper(default_hooks.allreduce_hook),
    ),
    "in the hook": (comm_hooks.Fp32State, comm_hooks.fp32_accumulate_hook),
}


@on_simulated_ranks(2, fresh={"group_timeout": NEVER})
@pytest.mark.parametrize("name", READY_MADE)
def test_ready_made_hooks_fail_in_time_and_recover(ctx, name):
    """Rank 1 raises in its backward; both ranks recover, and train on."""
    make_state, hook = READY_MADE[name]
    options: dict[str, Any] = {"bucket_cap_mb": 64 / 2**20, "hang_timeout": 4}
    ddp = DataParallel(TwoLayers(), **options)  # the default group
    ddp.register_comm_hook(make_state(), hook)
    backward(ddp)
    backward(ddp)  # after the rebuild
    handle = None
    if ctx.rank == 1:
        handle = next(ddp.parameters()).register_hook(lambda _: fail(BOO))
    error = error_of(lambda: backward(ddp))
    if handle is not None:
        handle.remove()
    else:
        assert "rank 1" in error
    ddp.reset()
    ddp.zero_grad()
    backward(ddp)
    return [param.grad for param in ddp.parameters()]
