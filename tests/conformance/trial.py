"""Run torch's tests by torch's harness, several at a time, and say how each went."""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import time
import unittest
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from unittest import mock

from torch.testing._internal import common_distributed

from tests.conformance import cases
from tests.conformance.lists import Known, Outcome


def run_all(
    tests: Sequence[Known], implementation: str, timeout: float, jobs: int
) -> Iterator[Outcome]:
    """Run tests, the longest first; yield each outcome as it comes.

    A test may take `timeout` seconds, or four times as long as it took torch.

    Workers are forked once, from a process that has imported torch and its tests, and
    fork the ranks of one test after the other.
    """
    fork = multiprocessing.get_context("fork")
    with ProcessPoolExecutor(jobs, mp_context=fork) as workers:
        started = [
            workers.submit(
                *(run_trial, known.name, implementation, known.num_ranks),
                max(timeout, 4 * known.seconds),
            )
            for known in sorted(tests, key=lambda known: -known.seconds)
        ]
        for future in as_completed(started):
            yield future.result()


def run_trial(
    name: str, implementation: str, num_ranks: int, timeout: float
) -> Outcome:
    """Run one test on ``num_ranks`` processes; ``timeout`` is in seconds."""
    start, case, result = time.monotonic(), cases.CASE_OF[name], unittest.TestResult()
    os.environ["WORLD_SIZE"] = str(num_ranks)
    with (
        tempfile.TemporaryDirectory(prefix="conformance-") as folder,
        mock.patch.object(tempfile, "tempdir", folder),
        mock.patch.dict(common_distributed.TIMEOUT_OVERRIDE, {name: timeout}),
    ):
        case.implementation, case.folder = implementation, Path(folder)
        case(name).run(result)
        verdict, reason, details = "ok", "", ""
        if result.skipped:
            verdict, reason = "skipped", result.skipped[0][1]
        elif not result.wasSuccessful():
            details = (result.errors + result.failures)[0][1]
            verdict, reason = "FAILED", _first_line(details)
            for log in sorted(case.folder.glob("rank*.log")):
                printed = log.read_text(errors="replace")[-4000:]
                details += f"--- {log.stem}\n{printed}\n"
        return Outcome(
            *(name, verdict, time.monotonic() - start, num_ranks, reason),
            details=details,
            wraps_module=(case.folder / "reached").exists(),
        )


def _first_line(text: str) -> str:
    """Return the first line of the last exception in a text of tracebacks."""
    frames = text.split("Traceback (most recent call last):\n")[-1]
    lines = [line for line in frames.splitlines() if line and not line.startswith(" ")]
    return lines[0] if lines else text.splitlines()[-1]
