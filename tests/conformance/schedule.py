"""Several tests at a time, each with ranks of its own."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed

from tests.conformance.outcome import Outcome
from tests.conformance.records import Known
from tests.conformance.trial import run_trial


def run_all(
    tests: Sequence[Known], implementation: str, timeout: float, jobs: int
) -> Iterator[Outcome]:
    """Outcomes as they come; the longest tests start first.

    A test may take `timeout` seconds, or four times as long as it took torch.

    Workers are forked once, from a process that has imported torch and its tests, and
    fork the ranks of one test after the other. They run no torch themselves: a process
    with threads in it could not be forked safely.
    """
    ordered = sorted(tests, key=lambda known: -known.seconds)
    fork = multiprocessing.get_context("fork")
    with ProcessPoolExecutor(jobs, mp_context=fork) as workers:
        started = [
            workers.submit(
                run_trial,
                known.name,
                implementation,
                known.num_ranks,
                max(timeout, 4 * known.seconds),
            )
            for known in ordered
        ]
        for future in as_completed(started):
            yield future.result()
