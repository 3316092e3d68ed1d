"""Run checks in threads with a time limit, so that no check hangs or raises."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import TypeVar

from minidp.console import say_progress

from .findings import Check, Finding, failed, named
from .words import in_words

Result = TypeVar("Result")
GRACE_SECONDS = 2.0  # lets a backend report its own, more precise error first


class Late(Exception):
    """A function did not end in time; not a TimeoutError, which it may raise itself."""


def run_within(seconds: float, function: Callable[[], Result]) -> Result:
    """Call a function in a daemon thread; return its result or raise its error.

    `Late` after ``seconds``; the thread stays behind then.
    """
    future: Future[Result] = Future()

    def call() -> None:
        try:
            future.set_result(function())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=call, daemon=True).start()
    if not wait([future], seconds).done:
        raise Late(f"did not end within {seconds:g} s")
    return future.result()


class Runner:
    """Hold the findings of checks; `run` runs one, ``seconds`` at most, in a thread."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.findings: list[Finding] = []
        self.is_stuck = False  # a thread was left behind, or a group is unusable
        self.current = "the first check"  # that runs, or ran last

    def run(self, name: str, check: Check, seconds: float | None = None) -> bool:
        """Run one check; add its findings; return False if it raised or was late.

        Then add one failed finding instead. Late: after ``seconds`` (None: the
        runner's); the check's thread goes on then, and `is_stuck` is set.
        """
        self.current = name
        say_progress(f"minidp doctor: {name} ...")
        seconds = self.seconds if seconds is None else seconds
        try:
            self.findings += run_within(seconds, lambda: named(name, check()))
            return True
        except Late as error:
            self.is_stuck = True
            self.add(name, failed(f"the check {error}", _why_late(name)))
        except Exception as error:
            remedy = "look at the settings above; --timeout and --wait give more time"
            self.add(name, failed(in_words(error), remedy))
        return False

    def add(self, name: str, finding: Finding) -> None:
        """Add a finding; it gets the check's ``name`` if it has none."""
        self.findings += named(name, finding)

    def attempt(self, action: Callable[[], Result], seconds: float = 0) -> list[Result]:
        """Call an action in a thread; return [its result], [] if it raises or is late.

        Late: after ``seconds`` + 2 s. Before [] set `is_stuck`; never add a finding.
        """
        try:
            return [run_within(seconds + GRACE_SECONDS, action)]
        except Exception:
            self.is_stuck = True  # the store does not answer, or a group cannot end
            return []


def _why_late(name: str) -> str:
    """Return the remedy for a check that took too long: likely causes, --timeout."""
    is_first = any(word in name for word in ("rendezvous", "group", "NCCL"))
    firewall = " a firewall?" * is_first  # later checks use open connections
    load, cores = os.getloadavg()[0], os.cpu_count() or 1
    busy = f" this machine is busy (load {load:.0f} on {cores} cores);" * (load > cores)
    return f"is another rank stopped or dead?{firewall}{busy} try --timeout 60"
