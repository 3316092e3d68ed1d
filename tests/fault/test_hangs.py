"""Ranks that do not come are named by those that wait, within the limit."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.futures import Future

from minidp import DataParallel, comm_hooks
from tests.fault.test_faults import TwoLayers, attempt, trains
from tests.support.fresh import run_fresh

LIMIT = 2.0  # hang_timeout; that of the group is 60 s
SLOW_MACHINE = 10.0  # seconds that we allow on top


def wait_for_others(ctx: Any) -> None:
    """Until every rank is here; no collective. (Killed ones are not waited for.)"""
    store = dist.distributed_c10d._get_default_store()
    store.add("here", 1)
    while store.add("here", 0) < ctx.world_size:
        time.sleep(0.05)


def killed(ctx: Any, ddp: DataParallel) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def stopped(ctx: Any, ddp: DataParallel) -> None:
    stop(ctx)


def stop(ctx: Any) -> None:
    """Until `end_the_stopped`."""
    store = dist.distributed_c10d._get_default_store()
    store.set("stopped", str(os.getpid()))
    os.kill(os.getpid(), signal.SIGSTOP)


def end_the_stopped() -> None:
    """Nobody has to wait for it any more."""
    pid = int(dist.distributed_c10d._get_default_store().get("stopped"))
    with contextlib.suppress(ProcessLookupError):  # another rank did it
        os.kill(pid, signal.SIGKILL)


def loads_data(ctx: Any, ddp: DataParallel) -> None:
    wait_for_others(ctx)


def takes_another_branch(ctx: Any, ddp: DataParallel) -> None:
    ddp(torch.ones(1, 4), skip=True).sum().backward()
    wait_for_others(ctx)


def forgets_the_backward(ctx: Any, ddp: DataParallel) -> None:
    ddp(torch.ones(1, 4))
    wait_for_others(ctx)


def raises(ctx: Any, ddp: DataParallel) -> None:
    def fail(_: torch.Tensor) -> None:
        raise ValueError("bad sample")

    ddp.module.a.weight.register_hook(fail)
    attempt(lambda: ddp(torch.ones(1, 4)).sum().backward())
    attempt(lambda: ddp(torch.ones(1, 4)))
    wait_for_others(ctx)


def lets_go_of_it(ctx: Any, ddp: DataParallel) -> None:
    ddp._reducer.pipeline.watch.lookout.give_up("it has seen enough")
    wait_for_others(ctx)


# What rank 1 does instead of its fourth step, and what the others say about it.
ABSENCES: dict[str, tuple[Callable[[Any, DataParallel], None], str]] = {
    "killed": (killed, "does not answer (killed, stopped, or cut off)"),
    "stopped": (stopped, "does not answer (killed, stopped, or cut off)"),
    "data loader": (loads_data, "in wait_for_others (test_hangs.py:"),
    "another branch": (takes_another_branch, "without gradients of b.weight, b.bias"),
    "no backward": (forgets_the_backward, "after a forward, before its backward"),
    "alarm": (lets_go_of_it, "gave up: it has seen enough."),
}


def absent_once(ctx: Any, how: str, options: dict[str, Any]) -> Any:
    """Rank 1 is absent from the fourth step; what the others get to know."""
    torch.manual_seed(0)
    ddp = DataParallel(TwoLayers(), hang_timeout=LIMIT, **options)
    x = torch.ones(1, 4)
    for _ in range(3):
        ddp(x).sum().backward()
    if ctx.rank == 1:
        ABSENCES[how][0](ctx, ddp)
        return None
    begin = time.monotonic()
    error = attempt(lambda: ddp(x).sum().backward())
    seconds = time.monotonic() - begin
    if how == "stopped":
        store = dist.distributed_c10d._get_default_store()
        store.add("know", 1)
        while store.add("know", 0) < ctx.world_size - 1:
            time.sleep(0.05)
        end_the_stopped()
    elif how != "killed":
        wait_for_others(ctx)
    return error, seconds


@pytest.mark.parametrize("how", ABSENCES)
def test_who_is_absent_is_named(how: str) -> None:
    results = run_fresh(
        absent_once, 3, how, {}, group_timeout=60.0, timeout=15.0, errors="return"
    )
    for rank in (0, 2):
        error, seconds = results[rank]
        assert error.startswith(f"CollectiveError: [rank {rank}] A collective failed ")
        assert "Missing: rank 1. Rank 1 " in error
        assert ABSENCES[how][1] in error
        assert seconds < LIMIT + SLOW_MACHINE


def test_who_is_absent_from_a_broadcast_is_named() -> None:
    """Rank 0 sends module buffers, rank 2 waits for a bucket: rank 1 does nothing."""
    results = run_fresh(absent_with_module_buffers, 3, group_timeout=60.0, timeout=15.0)
    for rank in (0, 2):
        assert "Missing: rank 1. Rank 1 runs, but does something else" in results[rank]


def absent_with_module_buffers(ctx: Any) -> str:
    module = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    ddp = DataParallel(module, hang_timeout=LIMIT)
    x = torch.randn(3, 4)
    for _ in range(2):
        ddp(x).sum().backward()
    error = ""
    if ctx.rank != 1:
        error = attempt(lambda: ddp(x).sum().backward())
    wait_for_others(ctx)
    return error


def absent_from_the_constructor(ctx: Any) -> str:
    error = ""
    if ctx.rank != 1:
        error = attempt(lambda: DataParallel(TwoLayers(), hang_timeout=LIMIT))
    wait_for_others(ctx)
    return error


def test_who_is_absent_from_the_constructor_is_named() -> None:
    results = run_fresh(
        absent_from_the_constructor, 3, group_timeout=60.0, timeout=15.0
    )
    for rank in (0, 2):
        assert "while comparing the replicas. Missing: rank 1." in results[rank]
        assert (
            "Missing: rank 1. Rank 1 never said that it wrapped this module."
            in results[rank]
        )


def store_host_stops(ctx: Any) -> str:
    """Rank 0 hosts the store: without it nothing is known about anybody."""
    ddp = DataParallel(TwoLayers(), hang_timeout=LIMIT)
    ddp(torch.ones(1, 4)).sum().backward()
    if ctx.rank == 0:
        os.kill(os.getpid(), signal.SIGSTOP)
    return attempt(lambda: ddp(torch.ones(1, 4)).sum().backward())


def test_a_stopped_host_of_the_store_does_not_hold_up_the_report() -> None:
    _, error = run_fresh(
        store_host_stops, 2, group_timeout=60.0, timeout=15.0, errors="return"
    )
    assert error.startswith("CollectiveError: [rank 1] ")


def a_slow_rank(ctx: Any) -> Any:
    """Later than a slice, earlier than the limit: nothing happens."""
    torch.manual_seed(0)
    ddp = DataParallel(TwoLayers(), hang_timeout=15.0)
    ddp(torch.ones(1, 4)).sum().backward()
    if ctx.rank == 1:
        done = threading.Event()
        done.wait(1.5)
    return trains(ctx, ddp), ddp._reducer.pipeline.watch.has_failed


def test_a_slow_rank_is_waited_for() -> None:
    assert run_fresh(a_slow_rank, 2, group_timeout=60.0) == [(True, False)] * 2


def hook_never_brings(ctx: Any) -> Any:
    torch.manual_seed(0)
    ddp = DataParallel(TwoLayers(), hang_timeout=LIMIT)
    stuck = [False]

    def stuck_hook(state: Any, bucket: Any) -> Any:
        return Future() if stuck[0] else comm_hooks.all_reduce_hook(state, bucket)

    ddp.register_comm_hook(None, stuck_hook)
    ddp(torch.ones(1, 4)).sum().backward()
    stuck[0] = True
    error = attempt(lambda: ddp(torch.ones(1, 4)).sum().backward())
    stuck[0] = False
    ddp.reset()
    return error, trains(ctx, ddp)


def test_a_hook_that_never_brings_its_result_is_named() -> None:
    for error, is_right in run_fresh(hook_never_brings, 2, group_timeout=60.0):
        assert (
            "waiting for the comm hook hook_never_brings.<locals>.stuck_hook" in error
        )
        assert "it did not finish within 2 s" in error
        assert is_right


def comes_back(ctx: Any) -> Any:
    """Everybody is alive: after reset() on all ranks the object trains."""
    torch.manual_seed(0)
    ddp = DataParallel(TwoLayers(), hang_timeout=LIMIT)
    ddp(torch.ones(1, 4)).sum().backward()
    error = ""
    if ctx.rank == 0:
        error = attempt(lambda: ddp(torch.ones(1, 4)).sum().backward())
    ddp.reset()
    ok = trains(ctx, ddp)
    # Old alarms are forgotten, new ones are heard: once more.
    if ctx.rank == 1:
        error = attempt(lambda: ddp(torch.ones(1, 4)).sum().backward())
    ddp.reset()
    return error, ok and trains(ctx, ddp)


def test_reset_after_a_hang() -> None:
    results = run_fresh(comes_back, 2, group_timeout=60.0)
    for rank, (error, is_right) in enumerate(results):
        assert f"Missing: rank {1 - rank}." in error
        assert is_right


# -------------------------------------------------------------- the end of the process

SCRIPT = """
import os, signal, sys, time
import torch, torch.distributed as dist
from torch import nn
from minidp import DataParallel

dist.init_process_group("gloo")
rank = dist.get_rank()
ddp = DataParallel(nn.Linear(2, 2), hang_timeout=1.5)
ddp(torch.ones(1, 2)).sum().backward()
if rank == 1:
    {rank1}
try:
    ddp(torch.ones(1, 2)).sum().backward()
except RuntimeError as error:
    print("ERROR", error)
{end}
print("END", flush=True)
"""
ENDS = {
    "nothing": "",
    "destroy": "dist.destroy_process_group()",
    "destroy, object gone": "del ddp; dist.destroy_process_group()",
}


@pytest.mark.parametrize("end", ENDS)
def test_the_process_ends_after_a_failure(end: str) -> None:
    """Also while a collective is in flight that never ends: rank 1 is stopped."""
    script = textwrap.dedent(SCRIPT).format(
        rank1="os.kill(os.getpid(), signal.SIGSTOP)", end=ENDS[end]
    )
    first, second = (_start(script, rank) for rank in range(2))
    try:
        output, _ = first.communicate(timeout=60)
    finally:
        for process in (first, second):
            process.kill()
            process.communicate()
    assert first.returncode == 0, output
    assert "Missing: rank 1. Rank 1 does not answer" in output
    assert output.rstrip().endswith("END")


def test_a_process_that_ends_with_an_error_says_so() -> None:
    script = textwrap.dedent(SCRIPT).format(
        rank1="raise ValueError('no more disk')", end=""
    )
    first, second = (_start(script, rank) for rank in range(2))
    try:
        output, _ = first.communicate(timeout=60)
        second.communicate(timeout=60)
    finally:
        for process in (first, second):
            process.kill()
            process.communicate()
    assert (first.returncode, second.returncode) == (0, 1)
    assert "Rank 1 gave up: its process ended: ValueError: no more disk." in output


def _start(script: str, rank: int) -> subprocess.Popen[str]:
    environment = {
        **os.environ,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(_port()),
        "RANK": str(rank),
        "WORLD_SIZE": "2",
    }
    return subprocess.Popen(
        [sys.executable, "-c", script],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


_ports: list[int] = []


def _port() -> int:
    """The same for two calls in a row."""
    if not _ports:
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        _ports.extend([store.port] * 2)
        del store
    return _ports.pop()


def test_threads_have_a_moment_before_the_interpreter_goes() -> None:
    """Gloo's drop tensors then; one that asks for the interpreter later aborts."""
    late = (
        "import atexit, os, threading; del ddp; dist.destroy_process_group(); "
        "drop = lambda: (time.sleep(0.02), os.write(1, b'DROPPED')); "
        "atexit.register(threading.Thread(target=drop, daemon=True).start)"
    )
    script = textwrap.dedent(SCRIPT).format(rank1="pass", end=late)
    both = [_start(script, rank) for rank in range(2)]
    try:
        outputs = [process.communicate(timeout=60)[0] for process in both]
    finally:
        for process in both:
            process.kill()
            process.communicate()
    for process, output in zip(both, outputs, strict=True):
        assert process.returncode == 0, output
        assert output.rstrip().endswith("DROPPED")
