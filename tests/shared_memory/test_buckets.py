"""Training with buckets in shared memory: when it happens, and the bits of messages."""

from __future__ import annotations

import copy
import functools
import gc
import os
import time
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from minidp import DataParallel, comm_hooks, native
from minidp.errors import MiniDPError
from tests.shared_memory.test_sums import mapped
from tests.support.both import Scalars, error_of, grads, same, wrapped, x_of
from tests.support.ranks import on_ranks

pytestmark = [
    pytest.mark.usefixtures("library"),  # skips without a compiler
    pytest.mark.skipif(
        "0" in map(os.environ.get, ("MINIDP_NATIVE", "MINIDP_SHARED_MEMORY")),
        reason="MINIDP_NATIVE=0 or MINIDP_SHARED_MEMORY=0: ranks must not share memory",
    ),
]

OFF = "MINIDP_SHARED_MEMORY=0"
HOOK = "a comm hook is registered"
NOT_ASKED = "ranks have not looked for it yet"


def why_not(ddp: Any) -> str:
    queue = ddp._reducer.queue
    reason: str = queue.averaging.no_shared_memory
    shared = [bucket.shared is not None for bucket in queue.buckets]
    shared += [each._shared is not None for each in queue.exchanges]
    assert all(shared) if not reason else not any(shared)
    return reason


def train(ddp: Any, ctx: Any, steps: int = 3) -> list[Any]:
    history = []
    for _ in range(steps):
        ddp.zero_grad()
        ddp(x_of(ctx)).backward()
        history.append(grads(ddp))
    return history


@on_ranks(2)
def test_where_buckets_lie(ctx):
    """The reason after wrapping and after a rebuild, for several ways to wrap.

    `many_objects/` and `comm_hooks/` have threads, and failures within a reduction.
    """

    def both(ddp: Any) -> list[str]:
        before = why_not(ddp)
        train(ddp, ctx)
        return [before, why_not(ddp)]

    ddp = wrapped(ctx, Scalars(3))
    assert both(ddp) == ["", ""]
    ddp.reset()
    assert both(ddp) == ["", ""]
    assert both(wrapped(ctx, Scalars(3), init_sync=False)) == [NOT_ASKED, ""]
    assert both(copy.deepcopy(wrapped(ctx, Scalars(3)))) == [NOT_ASKED, ""]
    for is_late in (False, True):
        hooked = wrapped(ctx, Scalars(3))
        if is_late:
            train(hooked, ctx)
        hooked.register_comm_hook(ctx.group, comm_hooks.all_reduce_hook)
        assert both(hooked) == [HOOK, HOOK]


class Weighted(nn.Module):
    """Gradients that differ in every element; some buckets of 256 KiB and more."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        sizes = [100_001, 7, 65_536, 1, 200_003]
        self.weights = nn.ParameterList(torch.zeros(n, dtype=dtype) for n in sizes)

    def forward(self, seed: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(seed)
        return sum(
            (w * torch.randn(w.numel(), generator=generator).to(w.dtype)).sum()
            for w in self.weights
        )


@on_ranks(2, 3)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "options", [{}, {"gradient_as_bucket_view": True}, {"find_unused_parameters": True}]
)
def test_large_buckets(ctx, dtype, options):
    """Train with messages and in shared memory."""
    found = []
    for mode in ("0", "auto"):
        os.environ["MINIDP_SHARED_MEMORY"] = mode
        ddp = wrapped(ctx, Weighted(dtype), bucket_cap_mb=0.5, **options)
        history = []
        for step in range(4):
            ddp.zero_grad(set_to_none=step != 2)
            ddp(10 * step + ctx.rank).backward()
            history.append(grads(ddp))
        assert why_not(ddp) == ("" if mode == "auto" else "rank 0: " + OFF)
        found.append(history)
    del os.environ["MINIDP_SHARED_MEMORY"]
    assert same(*found)


@on_ranks(2, fresh={})
def test_a_rebuild_frees_the_old_buckets(ctx):
    """How many buckets' files are mapped: wrapped, after the rebuild, and freed."""
    ddp = wrapped(ctx, Scalars(2))
    found = [len(mapped())]
    train(ddp, ctx, steps=1)
    out = ddp(x_of(ctx))  # rebuilds the buckets
    found.append(len(mapped()))
    out.backward()
    del ddp, out
    gc.collect()
    assert [*found, len(mapped())] == [2, 2, 0]


def all_reduces(profiler: Any) -> list[Any]:
    inner = getattr(profiler, "profiler", profiler)  # torch.profiler's holds autograd's
    return [e for e in inner.function_events if e.name == "gloo:all_reduce"]


@on_ranks(2)
@pytest.mark.parametrize("kind", ["torch", "autograd"])
def test_a_profile_shows_sums_as_messages_are_shown(ctx, kind):
    """Asynchronous ranges of Gloo's name: one per bucket and step, and of the used-map.

    Each lasts at least as long as a rank waits for the one that comes late.
    """
    profile = {
        "torch": functools.partial(
            torch.profiler.profile,
            activities=[torch.profiler.ProfilerActivity.CPU],
            record_shapes=True,
        ),
        "autograd": functools.partial(
            torch.autograd.profiler.profile, record_shapes=True
        ),
    }[kind]
    store = torch.distributed.distributed_c10d._get_default_store()
    ddp = wrapped(ctx, Scalars(3), find_unused_parameters=True)
    train(ddp, ctx)
    with profile() as profiler:
        train(ddp, ctx, steps=2)
    assert why_not(ddp) == ""
    events = all_reduces(profiler)
    assert all(event.is_async for event in events)
    # Steps times (one bucket, the used-map). Of messages the last may be missing: now
    # and then a thread of Gloo ends it after the profile.
    assert [event.input_shapes for event in events] == [[[3]]] * (2 * 2)
    # An exchange of the used-map outlives the profile in which it began: nobody waits
    # for it before the next step. Its end must not be written there any more.
    for _ in range(30):
        with profile():
            train(ddp, ctx, steps=1)
    train(ddp, ctx)
    with profile() as profiler:
        loss = ddp(x_of(ctx))
        if ctx.rank:
            store.wait(["rank 0 has begun"])
            store.delete_key("rank 0 has begun")  # for the next test on these ranks
            time.sleep(0.5)
        else:  # it launches within 0.3 s
            store.set("rank 0 has begun", "")
        loss.backward()
    if not ctx.rank:
        assert max(e.time_range.elapsed_us() for e in all_reduces(profiler)) > 2e5


@on_ranks(2)
def test_a_buffer_that_was_moved_is_refused(ctx):
    ddp = wrapped(ctx, Scalars(2), gradient_as_bucket_view=True)
    train(ddp, ctx)
    for param in ddp.parameters():
        param.grad.share_memory_()
    with pytest.raises(MiniDPError, match="no longer in shared memory: do not call sh"):
        train(ddp, ctx)


CANNOT = f"but these ranks cannot share memory: rank 0: {OFF}. "


@on_ranks(2, fresh={})
@pytest.mark.parametrize(
    ("modes", "expected"),
    [
        (["1", "1"], ["", ""]),
        (["0", "auto"], [f"rank 0: {OFF}"] * 2),
        (
            ["0", "1"],
            [
                f"NativeError: [rank 0] MINIDP_SHARED_MEMORY=1 on rank 1, {CANNOT}",
                f"NativeError: [rank 1] MINIDP_SHARED_MEMORY=1, {CANNOT}",
            ],
        ),
        (["auto", "2"], ["must be one of auto, 0"] * 2),
    ],
)
def test_modes(ctx, modes, expected):
    """All ranks hear why they do not share memory, and all raise it if one insists."""
    os.environ["MINIDP_SHARED_MEMORY"] = modes[ctx.rank]
    made: list[Any] = []
    error = error_of(lambda: made.append(wrapped(ctx, Scalars(2))))
    found = error or why_not(*made)
    assert expected[ctx.rank] in found
    assert bool(expected[ctx.rank]) == bool(found)


def test_one_rank(lone_group):
    ddp = DataParallel(Scalars(2))
    assert why_not(ddp) == "one rank: nothing travels"


def test_the_status_of_the_extension_says_so(monkeypatch):
    status = native.NativeStatus("auto", is_loaded=True, path=None, reason="")
    assert status.shared_memory.startswith("where CPU ranks share a host")
    assert "needs the native kernels" in str(replace(status, is_loaded=False))
    monkeypatch.setenv("MINIDP_SHARED_MEMORY", "0")
    assert status.shared_memory == "no: MINIDP_SHARED_MEMORY=0"
