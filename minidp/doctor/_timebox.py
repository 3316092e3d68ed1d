"""Run checks that must not hang or raise: each in a thread that can be left behind."""

from __future__ import annotations

import os
import re
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from ._findings import Finding, failed

Result = TypeVar("Result")
Check = Callable[[], "Finding | list[Finding]"]
FindReason = Callable[[], str]
SLICE_SECONDS = 0.25
GRACE_SECONDS = 2.0  # a backend's own error says more than ours: it may come first


class Timebox(Generic[Result]):
    """Calls a function in a daemon thread, and waits for it a limited time.

    Args:
        function: what to call. If it never returns, its thread stays behind.
    """

    def __init__(self, function: Callable[[], Result]) -> None:
        self._function = function
        self._results: list[Result] = []
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)

    def _run(self) -> None:
        try:
            self._results.append(self._function())
        except BaseException as error:  # handed to who waits
            self._error = error

    def run(self, seconds: float, find_reason: FindReason = lambda: "") -> Result:
        """What the function returns, or raises.

        Args:
            seconds: how long to wait.
            find_reason: asked now and then; a reason not to wait any longer, or "".

        Raises:
            TimeoutError: it did not end within ``seconds``, or there was a reason.
        """
        deadline = time.monotonic() + seconds
        self._thread.start()
        while self._thread.is_alive():
            left = deadline - time.monotonic()
            self._thread.join(max(0.0, min(left, SLICE_SECONDS)))
            if not self._thread.is_alive():
                break
            if left <= 0:
                raise TimeoutError(f"did not end within {seconds:g} s")
            if reason := find_reason():
                raise TimeoutError(f"was given up: {reason}")
        if self._error is not None:
            raise self._error
        return self._results[0]


@dataclass(frozen=True)
class Limits:
    """How long things may take, in seconds.

    Args:
        check: one check.
        wait: until all ranks have come.

    Raises:
        ValueError: not positive.
    """

    check: float = 20.0
    wait: float = 30.0

    def __post_init__(self) -> None:
        if not (self.check > 0 and self.wait > 0):
            raise ValueError(
                f"limits must be positive numbers of seconds, but got {self}; leave "
                "them out for the defaults"
            )


class Runner:
    """Runs checks one after the other and keeps what they find."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.findings: list[Finding] = []
        self.is_stuck = False  # a thread was left behind, or a group is unusable
        self.current = ""  # the check that runs, or ran last

    def run(
        self,
        name: str,
        check: Check,
        seconds: float | None = None,
        find_reason: FindReason = lambda: "",
    ) -> bool:
        """Run one check; False if it raised or did not end, which is a finding.

        Args:
            name: of the check.
            check: what to call.
            seconds: how long it may take; None: the limit for checks.
            find_reason: a reason not to wait for it any longer, or "".
        """
        seconds = self.limits.check if seconds is None else seconds
        self.current = name
        try:
            result = Timebox(check).run(seconds, find_reason)
        except TimeoutError as error:
            self.is_stuck = True
            self.findings.append(failed(name, f"the check {error}", _why_late(name)))
            return False
        except Exception as error:
            remedy = "look at the settings above; --timeout and --wait give more time"
            # Who has left took its connections along: that is what was raised.
            found = "; ".join(filter(None, (in_words(error), find_reason())))
            self.findings.append(failed(name, found, remedy))
            return False
        self.findings += [result] if isinstance(result, Finding) else result
        return True

    def attempt(self, action: Callable[[], object]) -> bool:
        """Do what may fail or hang at the end of a run; False if it did."""
        try:
            Timebox(action).run(GRACE_SECONDS)
        except Exception:
            self.is_stuck = True  # nobody can be told, and nothing can be taken down
            return False
        return True


def _why_late(name: str) -> str:
    """What to look at when a check did not end."""
    is_first = any(word in name for word in ("rendezvous", "group", "NCCL"))
    firewall = " a firewall?" * is_first  # later checks use connections that there are
    load, cores = os.getloadavg()[0], os.cpu_count() or 1
    busy = f" this machine is busy (load {load:.0f} on {cores} cores);" * (load > cores)
    return f"is another rank stopped or dead?{firewall}{busy} try --timeout 60"


_PLACE_IN_SOURCE = re.compile(
    r"\[(enforce fail at )?/[^\]\s]*:\d+\] "
)  # of torch's own C++


def in_words(error: Exception) -> str:
    """An error as one line: no check ends in a traceback."""
    text = " ".join(str(error).split())
    text = _PLACE_IN_SOURCE.sub("", text).partition(". This is typically")[0]
    return f"{type(error).__name__}: {text[:300]}" if text else type(error).__name__
