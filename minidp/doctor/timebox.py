"""Run checks in threads with a time limit, so that no check hangs or raises.

A check that hangs cannot be stopped in Python. Its thread is left behind, and the
command ends the process in the end without waiting for it (`Runner.is_stuck`).
"""

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
# How much longer we wait than a backend does, whose own error is more precise.
GRACE_SECONDS = 2.0


class Late(Exception):
    """A function did not end in time. It may raise a TimeoutError of its own."""


def run_within(seconds: float, function: Callable[[], Result]) -> Result:
    """Call a function in a daemon thread, and return its result or raise its error.

    Raises:
        Late: It did not end within ``seconds``. Its thread stays behind.
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
    """Run checks, each for ``seconds`` at most, and collect their findings."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.findings: list[Finding] = []
        # Whether a thread was left behind, or a group is unusable.
        self.is_stuck = False
        self.current = "the first check"  # the name of the check that runs, or ran last

    def run(self, name: str, check: Check, seconds: float | None = None) -> bool:
        """Run one check, add its findings, and return whether it came to its end.

        If it raised or was late, one failed finding is added, which says so. A check is
        late after ``seconds``, or after those of this runner if they are None.
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
        """Add a finding, which gets the check's ``name`` if it has none."""
        self.findings += named(name, finding)

    def attempt(self, action: Callable[[], Result], seconds: float = 0) -> list[Result]:
        """Call an action that is no check, and return [its result], or [] if it failed.

        It fails if it raises, or does not end within ``seconds`` and some grace. No
        finding tells of it.
        """
        try:
            return [run_within(seconds + GRACE_SECONDS, action)]
        except Exception:
            self.is_stuck = True  # the store does not answer, or a group cannot end
            return []


def _why_late(name: str) -> str:
    # Only the first checks open connections; later ones use these. The backend of a
    # device opens them with its first collectives.
    what, _, backend = name.partition(", ")
    is_first = "group" in what or "rendezvous" in what or backend not in ("", "Gloo")
    firewall = " does a firewall block the ports?" * is_first
    load, cores = os.getloadavg()[0], os.cpu_count() or 1
    busy = f" this machine is busy (load {load:.0f} on {cores} cores);" * (load > cores)
    return f"is another rank stopped or dead?{firewall}{busy} try --timeout 60"
