"""``minidp.record(model)``: see when gradients were ready and when they travelled."""

from __future__ import annotations

from types import TracebackType
from typing import TYPE_CHECKING

from ._stopwatch import KEEP_STEPS, Stopwatch
from ._timeline import Timeline, to_json
from .data_parallel import DataParallel

if TYPE_CHECKING:
    from pathlib import Path


def record(model: DataParallel, *, keep: int = KEEP_STEPS) -> Recording:
    """Record the steps of a model while a ``with`` block runs.

    ::

        with minidp.record(model) as rec:
            for x, y in batches:
                ...                      # train as ever
        print(rec.report())

    Args:
        model: on this rank; other ranks may record or not.
        keep: how many steps; older ones are dropped.

    Raises:
        TypeError: not a `DataParallel`.
        ValueError: nothing would be kept.
    """
    if not isinstance(model, DataParallel):
        raise TypeError(_not_ours(model))
    if keep < 1:
        raise ValueError(f"keep must be at least 1 step, but is {keep!r}.")
    return Recording(model, keep)


class Recording:
    """What `record` gives: empty at first, filled by the ``with`` block, then yours.

    After the block it holds plain data and keeps neither model nor gradients alive.
    """

    def __init__(self, model: DataParallel, keep: int) -> None:
        self._stopwatch = Stopwatch(model._reducer, keep=keep)
        self._gathered: tuple[Timeline, ...] = ()

    def __enter__(self) -> Recording:
        """Begin.

        Raises:
            RuntimeError: the model is being recorded already.
        """
        self._stopwatch.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """End; what was recorded before an error stays."""
        self._stopwatch.stop()

    @property
    def timeline(self) -> Timeline:
        """This rank's steps."""
        return self._stopwatch.timeline()

    def save(self, path: str | Path) -> None:
        """Write all there is, as JSON; ``minidp report`` reads it."""
        with open(path, "w") as file:
            file.write(to_json(self._gathered or (self.timeline,)))


def _not_ours(model: object) -> str:
    kind = type(model)
    hint = "wrap the module with minidp.DataParallel, and pass the wrapper"
    if isinstance(getattr(model, "_orig_mod", None), DataParallel):
        hint = "this is a compiled one: pass the DataParallel that was compiled"
    elif isinstance(getattr(model, "module", None), DataParallel):
        hint = "pass its .module"
    return (
        f"record() needs a minidp.DataParallel, but got {kind.__module__}."
        f"{kind.__qualname__}. What to do: {hint}."
    )
