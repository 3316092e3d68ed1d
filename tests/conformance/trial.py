"""Tests, several at a time: fork the ranks of each, watch them, and say how it went.

    run_trial --fork--> rank 0    one pipe each, for the traceback of a failure
              --fork--> rank 1    exit code 0: passed, 10: failed, 72 to 89: skipped

Pipes and exit codes are those of torch's own harness.
"""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from multiprocessing import connection
from pathlib import Path
from typing import Any

import torch
from torch.testing._internal.common_distributed import TEST_SKIPS

from minidp.hang import the_watchdog
from tests.conformance import cases
from tests.conformance.lists import Known, Outcome

# Peers of a failed rank mostly wait for it in a collective. They get this long to fail
# by themselves, as their text may be the better one.
_GRACE_SECONDS = 3.0
_LAST_WORDS_SECONDS = 0.2
_SKIP_REASONS = {skip.exit_code: skip.message for skip in TEST_SKIPS.values()}
_FORK = multiprocessing.get_context("fork")


def run_all(
    tests: Sequence[Known], implementation: str, timeout: float, jobs: int
) -> Iterator[Outcome]:
    """Outcomes as they come; the longest tests start first.

    A test may take `timeout` seconds, or four times as long as it took torch.

    Workers are forked once, from a process that has imported torch and its tests, and
    fork the ranks of one test after the other. They run no torch themselves: a process
    with threads in it could not be forked safely.
    """
    with ProcessPoolExecutor(jobs, mp_context=_FORK) as workers:
        started = [
            workers.submit(
                *(run_trial, known.name, implementation, known.num_ranks),
                max(timeout, 4 * known.seconds),
            )
            for known in sorted(tests, key=lambda known: -known.seconds)
        ]
        for future in as_completed(started):
            yield future.result()


# -- one rank --------------------------------------------------------------------------


@dataclass(frozen=True)
class Setup:
    """One test, the same for all of its ranks."""

    name: str
    implementation: str
    num_ranks: int
    timeout: float  # seconds, for the whole test
    folder: Path  # of this test alone: rendezvous, torch's barrier, logs

    def log(self, rank: int) -> Path:
        """What a rank prints."""
        return self.folder / f"rank{rank}.log"

    @property
    def reached(self) -> Path:
        """Exists afterwards if the test wrapped a module."""
        return self.folder / "reached"


def _be_rank(setup: Setup, rank: int, errors: connection.Connection) -> None:
    """Run the test and exit with the code that torch's harness chose."""
    log = os.open(setup.log(rank), os.O_WRONLY | os.O_CREAT)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
        os.dup2(log, stream.fileno())
    sys.stdout.reconfigure(line_buffering=True)  # a killed rank flushes nothing
    # The parent asks ranks that take too long where they are, and kills them. Should
    # there be no parent any more, they end by themselves.
    faulthandler.register(signal.SIGUSR1)
    faulthandler.dump_traceback_later(setup.timeout + 10, exit=True)
    code = 1
    try:
        torch.set_num_threads(1)
        os.environ["WORLD_SIZE"] = str(setup.num_ranks)
        os.environ["TEMP_DIR"] = str(setup.folder)
        if "profiling" in setup.name:  # looks for Gloo's events in a profile
            os.environ["MINIDP_SHARED_MEMORY"] = "0"
        cases.place_on_cpu()
        cases.bind(setup.implementation, at_instance=setup.reached.touch)
        case = cases.CASE_OF[setup.name]
        case._run(rank, setup.name, str(setup.folder / "rendezvous"), errors)
        code = 0  # torch's main tests leave by sys.exit() instead
    except SystemExit as request:
        code = request.code
    except BaseException:  # torch's harness sends those of the test itself
        errors.send(traceback.format_exc())
    sys.stdout.flush()
    sys.stderr.flush()
    # No interpreter shutdown: process groups whose peers are gone may hang in it. But
    # the watchdog must not be cut off while it writes to the rendezvous file: half a
    # record there makes the other rank wait for the other half, for ever.
    the_watchdog._leave_with_the_process()
    os._exit(code)


# -- one test --------------------------------------------------------------------------


@dataclass
class _Rank:
    number: int
    process: Any
    errors: connection.Connection
    traceback: str = ""


def run_trial(
    name: str, implementation: str, num_ranks: int, timeout: float
) -> Outcome:
    """Run a test on as many processes as it needs; kill what is left of it."""
    if why := cases.why_skipped(name):
        return Outcome(name, "skipped", 0.0, num_ranks, why)
    start = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="conformance-") as folder:
        setup = Setup(name, implementation, num_ranks, timeout, Path(folder))
        for expected_by_torch in ("barrier", "init_dir", "test_dir"):
            (setup.folder / expected_by_torch).mkdir()
        ranks = [_start(setup, rank) for rank in range(num_ranks)]
        try:
            first_failed = _watch(ranks, start + timeout)
        finally:
            late = _kill(ranks)
        verdict, reason = _judge(ranks, first_failed, late, timeout)
        return Outcome(
            *(name, verdict, time.monotonic() - start, num_ranks, reason),
            details=_details(setup, ranks) if verdict == "FAILED" else "",
            wraps_module=setup.reached.exists(),
        )


def _start(setup: Setup, rank: int) -> _Rank:
    ours, theirs = _FORK.Pipe()
    process = _FORK.Process(target=_be_rank, args=(setup, rank, theirs))
    process.start()
    theirs.close()
    return _Rank(rank, process, ours)


def _watch(ranks: list[_Rank], deadline: float) -> _Rank | None:
    """Wait until all are gone, or too late; returns the first that went wrong."""
    running = list(ranks)
    first_failed = None
    while running and (left := deadline - time.monotonic()) > 0:
        sentinels = {rank.process.sentinel: rank for rank in running}
        pipes = {rank.errors: rank for rank in running if not rank.errors.closed}
        for ready in connection.wait([*sentinels, *pipes], left):
            if ready in pipes:
                _read(pipes[ready])
                continue
            rank = sentinels[ready]
            rank.process.join()
            running.remove(rank)
            if rank.process.exitcode != 0 and first_failed is None:
                first_failed = rank
                deadline = min(deadline, time.monotonic() + _GRACE_SECONDS)
    return first_failed


def _read(rank: _Rank) -> None:
    try:
        rank.traceback += rank.errors.recv()
    except (EOFError, OSError):
        rank.errors.close()


def _kill(ranks: list[_Rank]) -> list[_Rank]:
    """Kill who still runs, and return them; read what the others left."""
    late = [rank for rank in ranks if rank.process.exitcode is None]
    for rank in late:
        os.kill(rank.process.pid, signal.SIGUSR1)  # prints where it is
    for rank in late:
        rank.process.join(_LAST_WORDS_SECONDS)
        rank.process.kill()
        rank.process.join()
    for rank in ranks:
        while not rank.errors.closed and rank.errors.poll():
            _read(rank)
        rank.errors.close()
    return late


def _judge(
    ranks: list[_Rank], first_failed: _Rank | None, late: list[_Rank], timeout: float
) -> tuple[str, str]:
    codes = {rank.process.exitcode for rank in ranks}
    if codes == {0}:
        return "ok", ""
    if len(codes) == 1 and codes <= _SKIP_REASONS.keys():
        return "skipped", _SKIP_REASONS[codes.pop()]
    if first_failed is None:
        numbers = ", ".join(str(rank.number) for rank in late)
        return "FAILED", f"rank {numbers} still running after {timeout:.0f} s"
    return "FAILED", f"rank {first_failed.number}: {_first_line(first_failed)}"


def _first_line(rank: _Rank) -> str:
    """The exception of the last traceback, without torch's C++ stack."""
    code = rank.process.exitcode
    if not rank.traceback:
        return signal.Signals(-code).name if code < 0 else f"exit code {code}"
    frames = rank.traceback.split("Traceback (most recent call last):\n")[-1]
    lines = [line for line in frames.splitlines() if line and not line.startswith(" ")]
    return lines[0] if lines else rank.traceback.splitlines()[-1]


def _details(setup: Setup, ranks: list[_Rank]) -> str:
    parts = []
    for rank in ranks:
        printed = setup.log(rank.number).read_text(errors="replace")
        parts.append(f"--- rank {rank.number}\n{printed[-4000:]}\n{rank.traceback}")
    return "\n".join(parts)
