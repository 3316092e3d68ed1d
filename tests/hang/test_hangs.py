"""Ranks that do not come are named by those that wait, within the limit.

Who is named when, in any order of events, is the simulated ranks' matter: the scenarios
"hangs", "leave_out" and "faults" of `tests.simulation`. Here are what is said of the
stacks of real ranks, signals, stores, groups of Gloo, and the end of a process; and a
few programs of which more is known than that nobody waits, on simulated ranks.
"""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Collection
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.futures import Future

from minidp import DataParallel, comm, comm_hooks
from minidp.config import options as config_options
from minidp.guard import comparison
from tests.support import simulated
from tests.support.both import error_of
from tests.support.combined import in_turns
from tests.support.fresh import run_fresh
from tests.support.ports import free_port
from tests.support.ranks import on_ranks, on_simulated_ranks
from tests.support.two_layers import TwoLayers, backward, trains
from tests.support.warm import warm_python

pytestmark = [pytest.mark.fault, pytest.mark.fresh]

LIMIT = 2.0  # hang_timeout
HEARD_SECONDS = 1.5  # a rank that waits has heard within it that another one is gone
# Of new ranks: who waits for the group's own limit is taken to hang before it is over.
PATIENT: dict[str, Any] = {"group_timeout": 600.0}


def wait_for_others(ctx: Any) -> None:
    """Wait in the store until every rank calls this."""
    store = dist.distributed_c10d._get_default_store()
    store.add("here", 1)
    while store.add("here", 0) < ctx.world_size:
        time.sleep(0.05)


def absent_once(ctx: Any) -> Any:
    """Let ranks 1 and 2 stay away from the fourth step; return the others' error."""
    ddp = DataParallel(TwoLayers(), hang_timeout=LIMIT)
    for _ in range(3):
        backward(ddp)
    error = None
    if ctx.rank == 1:  # it takes another branch
        backward(ddp, skip=True)
    elif ctx.rank == 2:  # it has no backward
        ddp(torch.ones(1, 4))
    else:
        error = error_of(lambda: backward(ddp))
    wait_for_others(ctx)
    return error


def test_who_is_absent_is_named() -> None:
    for rank, error in enumerate(run_fresh(absent_once, 4, **PATIENT)):
        if rank in (1, 2):
            continue
        told = f"CollectiveError: [rank {rank}] Missing: rank 1, 2. Rank 1 "
        assert error.startswith(told)  # who is missing comes first
        assert " A collective failed while " in error
        first, second = error.split(" Rank 2 ", 1)
        assert "without gradients of b.weight, b.bias" in first
        assert "after a forward, before its backward" in second
        assert "in wait_for_others (test_hangs.py:" in second


# ------------------------------------------------------------- hang_timeout="auto"


def patient(module: nn.Module, seconds: float = LIMIT, **options: Any) -> DataParallel:
    """Wrap with hang_timeout="auto", but with another limit than 5 minutes."""
    config_options.HANG_SECONDS = seconds
    return DataParallel(module, **options)


class Counts(logging.Handler):
    """Counts warnings in the store, where all ranks can see them."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.store = dist.distributed_c10d._get_default_store()
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())
        self.store.add("warned", 1)


def evaluates(store: Any, ctx: Any) -> None:
    """Compute without gradients until every other rank has been warned."""
    with torch.no_grad():
        while store.add("warned", 0) < ctx.world_size - 1:
            nn.Linear(4, 4)(torch.ones(1, 4))


@on_ranks(3, fresh={"group_timeout": 60.0, "timeout": 60.0})
@pytest.mark.parametrize("place", ["before wrapping", "before a backward"])
def test_a_rank_that_evaluates_alone_is_only_warned_of(ctx, place):
    counts = Counts()
    logging.getLogger("minidp").addHandler(counts)
    if place == "before wrapping" and ctx.rank == 1:
        evaluates(counts.store, ctx)
    ddp = patient(TwoLayers())
    backward(ddp)
    if place != "before wrapping" and ctx.rank == 1:
        evaluates(counts.store, ctx)
    assert trains(ctx, ddp)
    assert not ddp._reducer.communicator.has_failed
    if ctx.rank != 1:
        text = counts.texts[0]
        assert text.startswith(f"[rank {ctx.rank}] Still ")
        assert "Missing: rank 1" in text
        assert "until the process group's own limit (60 s)" in text
        if place != "before wrapping":
            assert "Rank 1 runs, but does something else: step 1" in text
            assert "evaluates (test_hangs.py:" in text


def patiently_absent(ctx: Any, how: str) -> Any:
    """Let rank 1 be killed or wait elsewhere; return rank 0's error."""
    other_group = dist.new_group()
    # On one group, gloo would take one object's gradients for the other's.
    first, second = (
        patient(TwoLayers()),
        # It still waits when the first one gives up.
        patient(TwoLayers(), 10 * LIMIT, process_group=other_group),
    )
    # In the first steps forwards are collectives, too: later only backwards wait.
    for ddp in (first, second) * (4 if how == "another object" else 1):
        backward(ddp)
    if ctx.rank == 1:
        if how == "barrier":
            dist.barrier(other_group)
            return None
        if how == "another object":
            return error_of(lambda: backward(second))
        os.kill(os.getpid(), signal.SIGKILL)
    error = error_of(lambda: backward(first))
    if how == "barrier":
        dist.barrier(other_group)
    return error


WHERE_IT_IS = {
    "killed": "does not answer (killed, stopped, or cut off)",
    "barrier": "Rank 1 runs, but waits for other ranks elsewhere: step 1, between two "
    "steps, in barrier (distributed_c10d.py:",
    "another object": "Rank 1 runs, but waits for other ranks elsewhere: ",
}


@pytest.mark.parametrize("how", WHERE_IT_IS)
def test_a_rank_that_will_not_come_is_an_error_all_the_same(how: str) -> None:
    error, _ = run_fresh(patiently_absent, 2, how, errors="return", **PATIENT)
    assert error.startswith("CollectiveError: [rank 0] Missing: rank 1. Rank 1 ")
    assert WHERE_IT_IS[how] in error


def absent_early(ctx: Any) -> str:
    """Let rank 1 stay away from the constructor."""
    make = lambda: DataParallel(TwoLayers(), hang_timeout=LIMIT)  # noqa: E731
    error = "" if ctx.rank == 1 else error_of(make)
    wait_for_others(ctx)
    return error


def test_who_does_not_wrap_is_named() -> None:
    results = run_fresh(absent_early, 3, **PATIENT)
    for rank in (0, 2):
        words = "Missing: rank 1. Rank 1 never said that it wrapped this module."
        assert words in results[rank]


def store_host_stops(ctx: Any) -> str:
    """Stop rank 0, which hosts the store: nothing is known about any rank then."""
    pids = [0, 0]
    dist.all_gather_object(pids, os.getpid())
    ddp = DataParallel(TwoLayers(), hang_timeout=LIMIT)
    backward(ddp)
    if ctx.rank == 0:
        os.kill(os.getpid(), signal.SIGSTOP)
    error = error_of(lambda: backward(ddp))
    os.kill(pids[0], signal.SIGKILL)  # or the test would wait for an answer
    return error


def test_a_stopped_host_of_the_store_does_not_hold_up_the_report() -> None:
    _, error = run_fresh(store_host_stops, 2, errors="return", **PATIENT)
    assert error.startswith("CollectiveError: [rank 1] ")


@on_ranks(2, fresh={"group_timeout": 5.0})
def test_a_wait_of_less_than_a_millisecond_has_a_limit(ctx):
    """To torch no millisecond is no limit: who waited had to wait for the group's."""
    store = dist.distributed_c10d._get_default_store()
    if ctx.rank == 1:
        store.wait(["rank 0 has looked"])
    work = comm.all_reduce(torch.ones(2), dist.group.WORLD)
    if ctx.rank == 0:
        assert not [s for s in (0.0009, 0.0001, 0.0) if comm.is_done_within(work, s)]
        store.set("rank 0 has looked", "")
    work.wait()


@on_simulated_ranks(2, fresh={"group_timeout": 60.0})
def test_a_hook_that_never_brings_its_result_is_named(ctx):
    ddp = DataParallel(TwoLayers(), hang_timeout=LIMIT)
    stuck = [False]

    def stuck_hook(state: Any, bucket: Any) -> Any:
        return Future() if stuck[0] else comm_hooks.all_reduce_hook(state, bucket)

    ddp.register_comm_hook(None, stuck_hook)
    backward(ddp)
    stuck[0] = True
    error = error_of(lambda: backward(ddp))
    stuck[0] = False
    ddp.reset()
    assert f"waiting for the comm hook {stuck_hook.__qualname__}" in error
    assert "it did not finish within 2 s" in error
    assert trains(ctx, ddp)


@on_simulated_ranks(2, fresh={"group_timeout": 60.0})
def test_reset_after_a_hang(ctx):
    """Everybody is alive: after reset() on all ranks the object trains."""
    ddp = DataParallel(TwoLayers(), hang_timeout=LIMIT)
    backward(ddp)
    for rank in (0, 1):  # Old alarms are forgotten, new ones are heard: once more.
        if ctx.rank == rank:
            assert f"Missing: rank {1 - rank}." in error_of(lambda: backward(ddp))
        ddp.reset()
        assert trains(ctx, ddp)


# -------------------------------------------------------------- the end of the process

SCRIPT = """
import os, signal, sys, time
import torch, torch.distributed as dist
from torch import nn
from minidp import DataParallel

dist.init_process_group("gloo")
rank = dist.get_rank()
for seconds in (600, 1.5):  # what is imported late, and takes long, is there by then
    ddp = DataParallel(nn.Linear(2, 2), hang_timeout=seconds)
    ddp(torch.ones(1, 2)).sum().backward()
if rank == {rank}:
    {does}
try:
    ddp(torch.ones(1, 2)).sum().backward()
except {catches} as error:
    print("ERROR", error)
{end}
print("END", flush=True)
"""
ENDS = {"nothing": "", "destroy": "del ddp; dist.destroy_process_group()"}


def run_two(
    does: str,
    end: str = "",
    catches: str = "RuntimeError",
    rank: int = 1,
    new_ranks: Collection[int] = (0,),
) -> list[tuple[int, str]]:
    """Run SCRIPT on two ranks; return exit status and output of each that ends.

    ``does``: what ``rank`` does instead of the second step. ``new_ranks``: those whose
    interpreter is to end as a new one does. The others are forks.
    """
    script = textwrap.dedent(SCRIPT).format(
        does=does, end=end, catches=catches, rank=rank
    )
    environment = {
        **os.environ,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "WORLD_SIZE": "2",
    }
    both = []
    for each in (0, 1):
        python = sys.executable if each in new_ranks else warm_python()
        both.append(start([python, "-c", script], RANK=str(each), **environment))
    try:
        outputs = [both[0].communicate(timeout=200)[0]]
        if "SIGSTOP" not in does:
            outputs.append(both[1].communicate(timeout=200)[0])
    finally:
        for process in both:
            process.kill()
            process.communicate()
    return [
        (process.returncode, text) for process, text in zip(both, outputs, strict=False)
    ]


def start(command: list[str], **environment: str) -> subprocess.Popen[str]:
    pipe = subprocess.PIPE
    return subprocess.Popen(
        command,
        env=environment or None,
        stdin=pipe,
        stdout=pipe,
        stderr=subprocess.STDOUT,
        text=True,
    )


@pytest.mark.parametrize("end", in_turns(reversed(ENDS)))
def test_the_process_ends_after_a_failure(end: str) -> None:
    """Also while a collective is in flight that never ends: rank 1 is stopped."""
    ((status, output),) = run_two("os.kill(os.getpid(), signal.SIGSTOP)", ENDS[end])
    assert status == 0, output
    assert "Missing: rank 1. Rank 1 does not answer" in output
    assert output.rstrip().endswith("END")


def test_a_process_that_ends_with_an_error_says_so() -> None:
    raises = "raise ValueError('no more disk')"
    (first, output), (second, _) = run_two(raises, new_ranks=[1])
    assert (first, second) == (0, 1)
    assert "Rank 1 gave up: its process ended: ValueError: no more disk." in output


@pytest.mark.parametrize(
    "end",
    ["", pytest.param("dist.destroy_process_group()", marks=pytest.mark.nightly)],
)
def test_a_rank_that_ran_out_of_inputs(end: str) -> None:
    """The answer is all that rank 0 prints, under the one line of its own code."""
    does = f"{end or 'pass'}; sys.exit()"
    both = run_two(does, catches="KeyError", new_ranks=[0, 1])
    (first, output), (second, _) = both
    assert (first, second) == (1, 0), output
    lines = output.replace("[rank0]: ", "").rstrip().splitlines()  # torch's mark
    *above, answer = lines
    assert answer.startswith(
        "minidp.errors.CollectiveError: [rank 0] Missing: rank 1. "
    )
    assert "Rank 1 is gone: its process ended without an error. " in answer
    assert "train inside `with model.join():`" in answer
    assert "gave up" not in answer
    assert "Traceback (most recent call last):" in above[0]
    assert len(above) == 2, output  # no source line: it is python -c


@on_simulated_ranks(2, fresh=PATIENT)
def test_a_function_that_ran_out_of_inputs(ctx):
    """It lets the wrapper go at its end, on rank 1 first."""

    def train() -> None:
        net, options = nn.Linear(4, 1), {"process_group": ctx.group}
        ddp = DataParallel(net, hang_timeout=120, **options)
        for _ in range(4 - 2 * ctx.rank):
            ddp(torch.ones(1, 4)).sum().backward()

    if ctx.rank:
        train()
    else:
        said = error_of(train)
        gone = "Rank 1 is gone: its DataParallel object was deleted, perhaps at the end"
        assert gone in said
        assert "train inside `with model.join():`" in said
        assert "gave up" not in said
    wait_for_others(ctx)


@on_simulated_ranks(2, fresh=PATIENT)
@pytest.mark.parametrize(("odd", "keeps"), [(0, "always"), (1, "for a while")])
def test_a_wrapper_that_only_one_rank_has_had(ctx, odd, keeps):
    """Nobody takes its end for that of another wrapper (``init_sync=False``).

    Rank ``odd`` wraps once more, and is late in the training of the next one.
    """
    if simulated.ARE_REAL:
        comparison.PATIENCE_SECONDS = 1.0  # for which the guard waits in vain here
    options: dict[str, Any] = {"process_group": ctx.group, "init_sync": False}
    if ctx.rank == odd:
        more = DataParallel(TwoLayers(), **options)
        with torch.no_grad():
            more(torch.ones(1, 4))
    torch.manual_seed(0)
    ddp = DataParallel(TwoLayers(), **options)
    for step in range(3):
        if ctx.rank == odd and step == 1:
            more = more if keeps == "always" else None
            time.sleep(2 * HEARD_SECONDS)
        backward(ddp)
        ddp.zero_grad()
    wait_for_others(ctx)


@on_simulated_ranks(2, fresh=PATIENT)
def test_the_end_of_a_wrapper_that_has_averaged_is_told(ctx):
    options: dict[str, Any] = {"process_group": ctx.group, "init_sync": False}
    ddp = DataParallel(TwoLayers(), hang_timeout=120, **options)
    backward(ddp)
    if ctx.rank:
        del ddp
    else:
        said = error_of(lambda: backward(ddp))
        assert "Rank 1 is gone: its DataParallel object was deleted" in said
    wait_for_others(ctx)


@pytest.mark.parametrize(
    "does",
    [
        pytest.param("sys.exit()", marks=pytest.mark.nightly),
        "os.kill(os.getpid(), signal.SIGKILL)",
    ],
)
def test_rank_0_takes_the_store_with_it_and_nothing_false_is_said(does: str) -> None:
    """It had wrapped the module, and trained. Its last words are read, or lost."""
    (_, _), (status, output) = run_two(does, rank=0, new_ranks=())
    assert status == 0, output
    lost = "ERROR [rank 1] Nothing is known about the other ranks: the " in output
    read = "ERROR [rank 1] Missing: rank 0. Rank 0 is gone: its process" in output
    assert lost or (read and "exit" in does), output
    # It may have read the last words, and then have lost the store.
    assert not lost or "(rank 0, or torchrun's agent)" in output
    assert "never said" not in output


def test_threads_have_a_moment_before_the_interpreter_goes() -> None:
    """Gloo's drop tensors then; one that asks for the interpreter later aborts."""
    late = (
        "import atexit, os, threading; del ddp; dist.destroy_process_group(); "
        "from minidp.comm import endings; endings.SETTLE_SECONDS *= 20; "
        "drop = lambda: (time.sleep(0.02), os.write(1, b'DROPPED')); "
        "atexit.register(threading.Thread(target=drop, daemon=True).start)"
    )
    (status, output), _ = run_two("pass", late)
    assert status == 0, output
    assert output.rstrip().endswith("DROPPED")


# ------------------------------------------------------------- noise

LEAVES_FIRST = """
import sys, threading, torch, torch.distributed as dist, torch.multiprocessing as mp
from minidp import DataParallel
def work(rank, path):
    store = dist.FileStore(path)
    host = dist.TCPStore("127.0.0.1", 0, None, True) if rank == 0 else None
    if host:
        store.set("port", str(host.port))
    client = host or dist.TCPStore("127.0.0.1", int(store.get("port")))
    dist.init_process_group("gloo", store=client, rank=rank, world_size=2)
    ddp = DataParallel(torch.nn.Linear(2, 2))
    ddp(torch.ones(1, 2)).sum().backward()
    place = ddp._reducer.communicator.peers._channel
    while rank == 1 and not place.problem:
        threading.Event().wait(0.01)
if __name__ == "__main__":
    mp.spawn(work, (sys.argv[1],), nprocs=2)
    print("trained")
"""


def test_nothing_is_printed_when_rank_0_leaves_first(tmp_path: Any) -> None:
    script = tmp_path / "leaves_first.py"
    script.write_text(LEAVES_FIRST)
    command = [warm_python(), str(script), str(tmp_path / "store")]
    run = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert (run.returncode, run.stdout, run.stderr) == (0, "trained\n", "")


INTERRUPTED = """
import os, signal, sys
import torch, torch.distributed as dist
from minidp import DataParallel
dist.init_process_group("gloo", init_method=f"file://{sys.argv[1]}", rank=RANK,
                        world_size=2)
ddp = DataParallel(torch.nn.Linear(2, 2))
ddp(torch.ones(1, 2)).sum().backward()
output = ddp(torch.ones(1, 2)).sum()
if RANK == 1:
    sys.stdin.read()
else:
    signal.signal(signal.SIGALRM, signal.default_int_handler)
    signal.setitimer(signal.ITIMER_REAL, 1.5)  # in the backward, which waits for rank 1
output.backward()
"""


def test_ctrl_c_shows_the_users_line_not_where_we_wait(tmp_path: Any) -> None:
    ranks = []
    for rank in (0, 1):
        script = tmp_path / f"rank{rank}.py"
        script.write_text(INTERRUPTED.replace("RANK", str(rank)))
        ranks.append(start([warm_python(), str(script), str(tmp_path / "store")]))
    printed, _ = ranks[0].communicate(timeout=200)
    ranks[1].kill()
    ranks[1].communicate()
    lines = printed.splitlines()
    assert lines[-1].endswith("KeyboardInterrupt")
    assert "output.backward()" in printed
    ours = [line for line in lines if "/minidp/" in line]
    assert len(ours) <= 3  # the gradient hook's, in which rank 0 asks about a step
    assert all("/minidp/core/" in line for line in ours)
    assert printed.count("Traceback") == 1
