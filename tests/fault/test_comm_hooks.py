"""Comm hooks that fail: a named error, promptly on other ranks too, and recovery."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from torch import nn
from torch.futures import Future
from torch.nn.parallel.distributed import _MixedPrecision

from minidp import CommHookError, DataParallel, MiniDPError, comm_hooks
from tests.fault.test_faults import TwoLayers, attempt, trains
from tests.support.fresh import run_fresh

SECONDS = 3.0  # timeout of the process group


def failed(error: Exception) -> Future[torch.Tensor]:
    future: Future[torch.Tensor] = Future()
    future.set_exception(error)
    return future


def brought(value: Any) -> Future[Any]:
    future: Future[Any] = Future()
    future.set_result(value)
    return future


def raises(_: torch.Tensor) -> Any:
    raise ValueError("boo")


def raises_in_callback(buffer: torch.Tensor) -> Any:
    return brought(buffer).then(lambda _: raises(buffer))


# What a bad hook returns, and what the error says about it.
BAD: dict[str, tuple[Any, str]] = {
    "None": (lambda _: None, "returned no future"),
    "a tensor": (lambda buffer: buffer, "but got Tensor (bucket"),
    "a future of None": (lambda _: brought(None), "Found: NoneType."),
    "a future of a list": (
        lambda buffer: brought([buffer]),
        "Found: list (take its first item in .then()).",
    ),
    "a shorter tensor": (
        lambda buffer: brought(buffer[1:]),
        "does not fit the bucket",
    ),
    "a longer tensor": (
        lambda buffer: brought(torch.cat([buffer, buffer])),
        "does not fit the bucket",
    ),
    "a complex tensor": (
        lambda buffer: brought(buffer.to(torch.complex64)),
        "torch.complex64",
    ),
    "a sparse tensor": (
        lambda buffer: brought(buffer.to_sparse()),
        "torch.sparse_coo",
    ),
    "an exception": (raises, "raised ValueError: boo"),
    "a future that failed": (
        lambda _: failed(RuntimeError("boo")),
        "returned a future that failed: ",
    ),
    "a callback that failed": (raises_in_callback, "returned a future that failed: "),
}


class Breakable:
    """Our hook, but once ``how`` is set, bucket 1 goes wrong on the given ranks."""

    __qualname__ = "Breakable"

    def __init__(self, hook: Any) -> None:
        self.hook = hook
        self.how: str | None = None

    def __call__(self, state: Any, bucket: Any) -> Any:
        if self.how is not None and bucket.index() == 1:
            return BAD[self.how][0](bucket.buffer())
        return self.hook(state, bucket)


def breaks(ctx: Any, how: str, ranks: list[int], own_state: bool) -> Any:
    torch.manual_seed(0)
    ddp = DataParallel(TwoLayers(), process_group=ctx.group, bucket_cap_mb=64 / 2**20)
    state: Any = comm_hooks.Fp32State() if own_state else None
    hook = Breakable(
        comm_hooks.fp32_accumulate_hook if own_state else comm_hooks.all_reduce_hook
    )
    ddp.register_comm_hook(state, hook)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    for _ in range(2):  # past the rebuild
        ddp.zero_grad()
        ddp(torch.ones(1, 4)).sum().backward()
    ddp.zero_grad()
    hook.how = how if ctx.rank in ranks else None
    begin = time.monotonic()
    errors = [attempt(lambda: ddp(torch.ones(1, 4)).sum().backward())]
    seconds = time.monotonic() - begin
    errors.append(attempt(optimizer.step))
    errors.append(attempt(lambda: ddp(torch.ones(1, 4))))
    hook.how = None
    ddp.reset()
    for param in ddp.parameters():  # whole numbers: exact in bfloat16
        param.data.copy_(torch.eye(4)[: len(param)] if param.dim() > 1 else param * 0)
    return errors, seconds, trains(ctx, ddp)


def check(results: list[Any], how: str, ranks: list[int]) -> None:
    for rank, (errors, seconds, ok) in enumerate(results):
        assert errors[1].startswith(f"UnsyncedGradientsError: [rank {rank}] ")
        assert errors[2].startswith(f"ReducerFailedError: [rank {rank}] ")
        assert seconds < 2 * SECONDS
        assert ok
        if rank in ranks:
            start = f"CommHookError: [rank {rank}] The comm hook Breakable "
            assert errors[0].startswith(start), errors[0]
            assert BAD[how][1] in errors[0]
            assert "(bucket 1)" in errors[0]
            assert "Parameters: a." in errors[0]
        else:  # it waited for a collective that its peer never started
            assert errors[0].startswith(
                (f"CommHookError: [rank {rank}] ", f"CollectiveError: [rank {rank}] ")
            ), errors[0]


@pytest.mark.parametrize(
    "how", ["None", "a shorter tensor", "an exception", "a future that failed"]
)
def test_bad_hook_on_one_rank(how: str) -> None:
    results = run_fresh(breaks, 2, how, [1], False, group_timeout=SECONDS)
    check(results, how, [1])


@pytest.mark.parametrize("how", BAD)
def test_bad_hook_on_all_ranks(how: str) -> None:
    results = run_fresh(breaks, 2, how, [0, 1], False, group_timeout=SECONDS)
    check(results, how, [0, 1])


@pytest.mark.parametrize("ranks", [[1], [0, 1]])
def test_a_half_done_exchange_is_forgotten(ranks: list[int]) -> None:
    """Bucket 0 of `fp32_accumulate_hook` waits for a call that never comes."""
    how = "an exception"
    results = run_fresh(breaks, 2, how, ranks, True, group_timeout=SECONDS)
    check(results, how, ranks)


def never_completes(ctx: Any) -> Any:
    """All ranks: bucket 0 is in flight for ever, and the backward raises."""
    torch.manual_seed(0)
    ddp = DataParallel(TwoLayers(), process_group=ctx.group, bucket_cap_mb=64 / 2**20)
    stuck = [False]

    def hook(state: Any, bucket: Any) -> Any:
        if stuck[0]:
            return Future()
        return comm_hooks.all_reduce_hook(state, bucket)

    ddp.register_comm_hook(None, hook)
    for _ in range(2):
        ddp(torch.ones(1, 4)).sum().backward()
    ddp.zero_grad()
    stuck[0] = True
    handle = ddp.module.a.weight.register_hook(raises)
    error = attempt(lambda: ddp(torch.ones(1, 4)).sum().backward())
    handle.remove()
    stuck[0] = False
    old = ddp.process_group
    ddp.reset()
    return error, ddp.process_group is old, trains(ctx, ddp)


def test_reset_does_not_wait_for_a_future_that_never_completes() -> None:
    for error, kept, ok in run_fresh(never_completes, 2, group_timeout=SECONDS):
        assert error == "ValueError: boo"
        assert not kept, "what was in flight is abandoned, with its group"
        assert ok


def test_a_comm_hook_error_is_an_error_of_minidp() -> None:
    assert issubclass(CommHookError, MiniDPError)


def stalled(ctx: Any, how: str) -> str:
    """Rank 1 does not come in time; rank 0 must not go on with local numbers."""
    net = nn.Linear(2, 1, bias=False)
    options: dict[str, Any] = {"hang_timeout": None}  # the backend alone has to tell
    if how == "mixed_precision":
        options["mixed_precision"] = _MixedPrecision(
            torch.float32, torch.float32, torch.float32
        )
    ddp = DataParallel(net, **options)
    if how == "reducer":
        ddp.register_comm_hook(None, lambda _, b: ddp.reducer._run_allreduce_hook(b))
    for _ in range(2):  # the second forward rebuilds the buckets
        ddp.zero_grad()
        ddp(torch.ones(1, 2)).sum().backward()
    if ctx.rank == 1:
        return ""
    ddp.zero_grad()
    try:
        ddp(torch.ones(1, 2)).sum().backward()
    except RuntimeError as error:
        return f"{type(error).__name__}: {error}"
    return "went on"


@pytest.mark.parametrize("how", ["mixed_precision", "reducer"])
def test_failed_collectives_are_not_swallowed(how: str) -> None:
    first, _ = run_fresh(stalled, 2, how, group_timeout=2.0)
    assert first.startswith("CommHookError: [rank 0] ")
    assert "returned a future that failed" in first
