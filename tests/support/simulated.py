"""Ranks that are threads of the test process: nobody waits, and nothing is started.

    results = run(function, 2, *args)        # like Pool.run

For tests whose ranks fail, hang or leave their groups unusable, which costs real ranks
a new start, or seconds of waiting. Time is simulated, so that a wait for a limit takes
none; one seed makes all choices, so that a test does the same each time.

With ``MINIDP_NATIVE=1``, and at night, real ranks do the same (`ARE_REAL`), so a
function may use only what both have: see "Simulated ranks" in tests/README.md.
"""

from __future__ import annotations

import copy
import gc
import os
import sys
import threading
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from tests.support.worker import Context

SEED = int(os.environ.get("MINIDP_SIMULATION_SEED", "1"))  # of the order of events
LINES = 60  # of the account of a run that fails
# Ranks with the extension share real memory; and the night shows that Gloo agrees.
ARE_REAL = (
    os.environ.get("MINIDP_NATIVE") == "1"
    or os.environ.get("HYPOTHESIS_PROFILE") == "nightly"
)


def run(
    function: Callable[..., Any], ranks: int, *args: Any, seed: int = SEED
) -> list[Any]:
    """Call ``function(ctx, *args)`` on each rank, and return what it returns.

    Args:
        function: Any function.
        ranks: How many there are.
        *args: Each rank gets copies.
        seed: Of the order of events.

    Raises:
        Finding: A rank raises, or waits for ever; or somebody writes to a tensor that a
            collective is using.
    """
    # Here: real ranks do without.
    from tests.simulation import own
    from tests.simulation.scheduler import Finding

    results: list[Any] = [None] * ranks

    def on_rank(rank: int) -> None:
        world: Any = dist.group.WORLD
        everybody = tuple(range(ranks))
        ctx = Context(rank, ranks, world, rank, {everybody: world})
        vars(warnings).update(_OF_EACH_RANK)  # not before: the run itself filters some
        torch.manual_seed(0)
        results[rank] = function(ctx, *copy.deepcopy(args))

    before = {name: getattr(warnings, name) for name in _OF_EACH_RANK}
    try:
        with own.simulated_names():
            own.play(on_rank, seed, ranks=ranks)
    except Finding as finding:  # whose last events pytest shows, if the test fails
        account: str = finding.play.tell(LINES)  # type: ignore[attr-defined]
        sys.stdout.write(f"With MINIDP_SIMULATION_SEED={seed}, last:\n{account}\n")
        raise
    finally:
        vars(warnings).update(before)
        gc.collect()  # there was no collection meanwhile
        gc.freeze()  # reset() looks at all other objects, perhaps after unfreezing them
    return results


class _Caught:
    """``warnings.catch_warnings`` for one thread: other ranks may catch some, too."""

    of_thread = threading.local()

    def __init__(self, *, record: bool = False) -> None:
        self._record = record
        self._list: list[warnings.WarningMessage] = []

    def __enter__(self) -> list[warnings.WarningMessage] | None:
        if not hasattr(warnings.showwarning, "is_by_thread"):
            # The run has put its own function here, and takes it away in the end.
            warnings.showwarning = self._by_thread(warnings.showwarning)
        _lists().append(self._list)
        return self._list if self._record else None

    def __exit__(self, *_: object) -> None:
        _lists().pop()

    @staticmethod
    def _by_thread(others: Callable[..., object]) -> Any:
        def show(*args: Any, **named: Any) -> None:
            if _lists():
                _lists()[-1].append(warnings.WarningMessage(*args, **named))
            else:
                others(*args, **named)

        show.is_by_thread = True  # type: ignore[attr-defined]
        return show


def _lists() -> list[list[warnings.WarningMessage]]:
    """Return what the present thread's `_Caught` objects keep, the innermost last."""
    kept = _Caught.of_thread
    if not hasattr(kept, "lists"):
        kept.lists = []
    lists: list[list[warnings.WarningMessage]] = kept.lists
    return lists


# Ranks catch their own warnings. All are shown, whatever a rank filters.
_OF_EACH_RANK: dict[str, Any] = {
    "catch_warnings": _Caught,
    "simplefilter": lambda *_args, **_named: None,
    "filterwarnings": lambda *_args, **_named: None,
}
