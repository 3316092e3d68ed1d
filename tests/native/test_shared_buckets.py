"""Training with buckets in shared memory: when it happens, torch's bits, failures."""

from __future__ import annotations

import copy
import gc
import os
import threading
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from minidp import DataParallel, native
from minidp.errors import MiniDPError
from tests.support.both import Scalars, grads, on_both, same, x_of
from tests.support.fresh import run_fresh

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
    shared += [each._shared is not None for each in (queue.used_map, queue.reach_map)]
    assert all(shared) if not reason else not any(shared)
    return reason


def train(ddp: Any, ctx: Any, steps: int = 3) -> list[Any]:
    history = []
    for _ in range(steps):
        ddp.zero_grad()
        ddp(x_of(ctx)).backward()
        history.append(grads(ddp))
    return history


def plain_hook(group: Any, bucket: Any) -> Any:
    future = dist.all_reduce(bucket.buffer(), group=group, async_op=True).get_future()
    return future.then(lambda done: done.value()[0] / group.size())


def where_buckets_lie(ctx: Any) -> list[str]:
    """The reason after wrapping and after a rebuild, for several ways to wrap."""
    found = []

    def both(ddp: Any) -> None:
        found.append(why_not(ddp))
        train(ddp, ctx)
        found.append(why_not(ddp))

    both(DataParallel(Scalars(3), process_group=ctx.group))
    both(DataParallel(Scalars(3), process_group=ctx.group, init_sync=False))
    both(copy.deepcopy(DataParallel(Scalars(3), process_group=ctx.group)))
    hooked = DataParallel(Scalars(3), process_group=ctx.group)
    hooked.register_comm_hook(ctx.group, plain_hook)
    both(hooked)
    late = DataParallel(Scalars(3), process_group=ctx.group)
    train(late, ctx)
    late.register_comm_hook(ctx.group, plain_hook)
    both(late)
    return found


def test_where_buckets_lie(pool):
    expected = ["", "", NOT_ASKED, "", NOT_ASKED, "", HOOK, HOOK, HOOK, HOOK]
    assert pool.run(where_buckets_lie, 2) == [expected] * 2


class Mixed(nn.Module):
    """Parameters of five dtypes, one with a sparse gradient."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.words = nn.Embedding(7, 3, sparse=True)
        dtypes = (torch.float64, torch.bfloat16, torch.float16, torch.complex64)
        self.rest = nn.ParameterList(
            [nn.Parameter(torch.randn(n, 5, dtype=t)) for n, t in enumerate(dtypes, 1)]
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        total = (self.words(x.long()) * x).sum()
        for parameter in self.rest:
            total = total + (parameter * parameter).abs().sum().float() * x.sum()
        return total


def mixed_dtypes(ctx: Any, wrap: Any, options: dict[str, Any]) -> Any:
    ddp = wrap(Mixed(), **options)
    return [
        [g.to_dense() if g.is_sparse else g for g in found] for found in train(ddp, ctx)
    ]


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize(
    "option", ["", "gradient_as_bucket_view", "find_unused_parameters", "static_graph"]
)
def test_dtypes(pool, size, option):
    options = {option: True} if option else {}
    for theirs, ours in pool.run(on_both, size, mixed_dtypes, options):
        assert same(theirs, ours)


def after_a_failure(ctx: Any) -> Any:
    """Rank 1 raises when rank 0 has posted its bucket; both reset, and go on."""
    ddp = DataParallel(Scalars(2), process_group=ctx.group, hang_timeout=20.0)
    train(ddp, ctx)
    out = ddp(x_of(ctx))
    if ctx.rank == 1:
        out.register_hook(_raise)
    try:
        out.backward()
        said = ""
    except (MiniDPError, ZeroDivisionError) as error:
        said = type(error).__name__
    if ctx.rank == 1:
        ddp._reducer.communicator.tell_others(ZeroDivisionError("on purpose"))
    ddp.reset()
    ddp.zero_grad()
    return said, why_not(ddp), train(ddp, ctx), why_not(ddp)


def _raise(_: Any) -> None:
    raise ZeroDivisionError("on purpose")


def test_after_a_failure(pool):
    for rank, (said, first, history, last) in enumerate(pool.run(after_a_failure, 2)):
        assert said == ["CollectiveError", "ZeroDivisionError"][rank]
        assert (first, last) == ("", "")
        assert same(history, [[torch.tensor([1.5])] * 2] * 3)


def several_at_once(ctx: Any) -> Any:
    """Two wrappers in turn on one group, and two more in threads on their own."""
    pair = [DataParallel(Scalars(2), process_group=ctx.group) for _ in range(2)]
    total = pair[0](x_of(ctx)) + pair[1](2 * x_of(ctx))
    total.backward()
    found = [grads(ddp) for ddp in pair]
    groups = [dist.new_group(list(range(ctx.world_size))) for _ in range(2)]
    apart = [DataParallel(Scalars(2), process_group=group) for group in groups]
    results: list[Any] = [None, None]

    def work(k: int) -> None:
        results[k] = train(apart[k], ctx, steps=20)[-1]

    threads = [threading.Thread(target=work, args=(k,)) for k in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [why_not(ddp) for ddp in pair + apart] == [""] * 4
    return found + results


def test_several_at_once():
    one, two = torch.tensor([1.5]), torch.tensor([3.0])
    expected = [[one] * 2, [two] * 2, [one] * 2, [one] * 2]
    for found in run_fresh(several_at_once, 2):
        assert same(found, expected)


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


def large_buckets(ctx: Any, dtype: torch.dtype, options: dict[str, Any]) -> list[int]:
    """Train with messages and in shared memory; return the steps that differ."""
    found = []
    for mode in ("0", "auto"):
        os.environ["MINIDP_SHARED_MEMORY"] = mode
        ddp = DataParallel(
            Weighted(dtype), process_group=ctx.group, bucket_cap_mb=0.5, **options
        )
        history = []
        for step in range(4):
            ddp.zero_grad(set_to_none=step != 2)
            ddp(10 * step + ctx.rank).backward()
            history.append(grads(ddp))
        assert why_not(ddp) == ("" if mode == "auto" else "rank 0: " + OFF)
        found.append(history)
    del os.environ["MINIDP_SHARED_MEMORY"]
    return [s for s, pair in enumerate(zip(*found, strict=True)) if not same(*pair)]


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "options", [{}, {"gradient_as_bucket_view": True}, {"find_unused_parameters": True}]
)
def test_large_buckets(pool, size, dtype, options):
    assert pool.run(large_buckets, size, dtype, options) == [[]] * size


def mappings() -> int:
    with open("/proc/self/maps", encoding="ascii") as lines:
        return sum("memfd:minidp" in line for line in lines)


def maps_of_training(ctx: Any) -> list[int]:
    """How many buckets' files are mapped: wrapped, after the rebuild, and freed."""
    ddp = DataParallel(Scalars(2), process_group=ctx.group)
    found = [mappings()]
    train(ddp, ctx, steps=1)
    out = ddp(x_of(ctx))  # rebuilds the buckets
    found.append(mappings())
    out.backward()
    del ddp, out
    gc.collect()
    return [*found, mappings()]


def test_a_rebuild_frees_the_old_buckets():
    assert run_fresh(maps_of_training, 2) == [[2, 2, 0]] * 2


def moved_gradients(ctx: Any) -> str:
    ddp = DataParallel(
        Scalars(2), process_group=ctx.group, gradient_as_bucket_view=True
    )
    train(ddp, ctx)
    for param in ddp.parameters():
        param.grad.share_memory_()
    try:
        train(ddp, ctx)
    except MiniDPError as error:
        return str(error)
    return ""


def test_a_buffer_that_was_moved_is_refused(pool):
    for text in pool.run(moved_gradients, 2):
        assert "no longer in shared memory: do not call share_memory_()" in text


def wrapped_in_mode(ctx: Any, modes: list[str]) -> str:
    os.environ["MINIDP_SHARED_MEMORY"] = modes[ctx.rank]
    try:
        return why_not(DataParallel(Scalars(2), process_group=ctx.group))
    except (RuntimeError, ValueError) as error:
        return f"{type(error).__name__}: {error}"


def test_modes():
    assert run_fresh(wrapped_in_mode, 2, ["1", "1"]) == ["", ""]
    off = ["rank 0: MINIDP_SHARED_MEMORY=0"] * 2
    assert run_fresh(wrapped_in_mode, 2, ["0", "auto"]) == off
    wrong = run_fresh(wrapped_in_mode, 2, ["auto", "2"])
    assert all("must be one of auto, 0, 1" in text for text in wrong), wrong


def test_one_rank(lone_group):
    ddp = DataParallel(Scalars(2))
    assert why_not(ddp) == "one rank: nothing travels"


def test_the_status_of_the_extension_says_so(monkeypatch):
    status = native.Status("auto", is_loaded=True, path=None, reason="")
    assert status.shared_memory.startswith("where CPU ranks share a host")
    assert "needs the native kernels" in str(replace(status, is_loaded=False))
    monkeypatch.setenv("MINIDP_SHARED_MEMORY", "0")
    assert status.shared_memory == "no: MINIDP_SHARED_MEMORY=0"
