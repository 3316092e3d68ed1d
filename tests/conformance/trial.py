"""One test: fork its ranks, watch them, and say how it went.

    run_trial --fork--> rank 0    one pipe each, for the traceback of a failure
              --fork--> rank 1    exit code 0: passed, 10: failed, 72 to 89: skipped

Pipes and exit codes are those of torch's own harness.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import tempfile
import time
from dataclasses import dataclass
from multiprocessing import connection
from pathlib import Path
from typing import Any

from torch.testing._internal.common_distributed import TEST_SKIPS

from tests.conformance import suite
from tests.conformance.outcome import Outcome
from tests.conformance.rank import Setup, be_rank

# Peers of a failed rank mostly wait for it in a collective. They get this long to fail
# by themselves, as their text may be the better one.
_GRACE_SECONDS = 3.0
_LAST_WORDS_SECONDS = 0.2
_SKIP_REASONS = {skip.exit_code: skip.message for skip in TEST_SKIPS.values()}
_FORK = multiprocessing.get_context("fork")


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
    if why := suite.why_skipped(name):
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
            name=name,
            verdict=verdict,
            seconds=time.monotonic() - start,
            num_ranks=num_ranks,
            reason=reason,
            details=_details(setup, ranks) if verdict == "FAILED" else "",
            wraps_module=setup.reached.exists(),
        )


def _start(setup: Setup, rank: int) -> _Rank:
    ours, theirs = _FORK.Pipe()
    process = _FORK.Process(target=be_rank, args=(setup, rank, theirs))
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
            else:
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
    for line in frames.splitlines():
        if line and not line.startswith(" "):
            return line
    return rank.traceback.splitlines()[-1]


def _details(setup: Setup, ranks: list[_Rank]) -> str:
    parts = []
    for rank in ranks:
        printed = setup.log(rank.number).read_text(errors="replace")
        parts.append(f"--- rank {rank.number}\n{printed[-4000:]}\n{rank.traceback}")
    return "\n".join(parts)
