"""``minidp.record(model)``: see when gradients were ready and when they travelled."""

from __future__ import annotations

import importlib
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from torch import nn

from ._chrome_trace import chrome_trace
from ._collectives import gather_bytes, gather_integers, meet
from ._groups import exchange_device
from ._picture import draw
from ._skew import compare_clocks
from ._stopwatch import KEEP_STEPS, Stopwatch
from ._terminal import fold
from ._timeline import Timeline, from_json, to_json
from ._watch import Watch
from .attachment import Attachment, attached_to
from .data_parallel import DataParallel
from .errors import CollectiveError, explain

if TYPE_CHECKING:
    import torch
    from torch.distributed import ProcessGroup

ROUNDS = 20  # barriers that compare clocks; the tightest count


def record(
    model: DataParallel | Attachment | nn.Module, *, keep: int = KEEP_STEPS
) -> Recording:
    """Record the steps of a model while a ``with`` block runs.

    ::

        with minidp.record(model) as rec:
            for x, y in batches:
                ...                      # train as ever
        print(rec.report())

    It costs about 1 % of a step (benchmarks/recording.py), and changes no bit of any
    gradient.

    Args:
        model: a `DataParallel`, what `attach` gave, or a model that is attached; on
            this rank. Other ranks may record or not; to see them together all
            record the same steps, and call `Recording.gather`.
        keep: how many steps; older ones are dropped. A step takes about 100 bytes for
            each bucket, one in four also 40 bytes for each parameter.

    Raises:
        TypeError: nothing synchronises it.
        ValueError: nothing would be kept.
    """
    found: object = model
    if isinstance(model, Attachment):
        found = model.data_parallel
    elif isinstance(model, nn.Module):
        found = attached_to(model) or model
    if not isinstance(found, DataParallel):
        raise TypeError(_not_ours(model))
    if keep < 1:
        raise ValueError(f"keep must be at least 1 step, but is {keep!r}.")
    return Recording(found, keep)


class Recording:
    """What `record` gives: filled by its ``with`` block, and yours afterwards.

    It then holds plain data, and keeps neither the model nor gradients alive. Of
    parameters the times are taken in one of four steps (on CUDA: of eight).
    """

    def __init__(self, model: DataParallel, keep: int) -> None:
        self._stopwatch = Stopwatch(model._reducer, keep=keep)
        self._gathered: tuple[Timeline, ...] = ()
        self._group: ProcessGroup = model.process_group
        self._device: torch.device = model._reducer.pipeline.specs[0].device
        self._limit = model._reducer.pipeline.watch.limit

    def __enter__(self) -> Recording:
        """Begin.

        Raises:
            RuntimeError: the model is being recorded already, or this was used before.
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
        self._group = self._stopwatch.stop()

    @property
    def timelines(self) -> tuple[Timeline, ...]:
        """What there is: this rank's steps, or after `gather` those of all, by rank."""
        return self._gathered or (self._stopwatch.timeline(),)

    def gather(self) -> Recording:
        """Collective: bring the steps of all ranks together, on every rank.

        All ranks of the model's process group call it, outside of a backward. Compares
        their clocks first. From then on reports and exports are of all ranks.

        Returns:
            Itself, for ``rec.gather().report()``.

        Raises:
            CollectiveError: not all ranks called it within ``hang_timeout``. What this
                rank recorded is kept.
        """
        self._stopwatch.timeline()  # what the device says is not about other ranks
        try:
            with Watch(self._group, self._limit).whole("gathering recordings"):
                self._gathered = self._of_all_ranks()
        except RuntimeError as error:
            text = _alone(self._group.rank(), error)
            raise CollectiveError(text) from error.__cause__
        return self

    def _of_all_ranks(self) -> tuple[Timeline, ...]:
        group, device = self._group, exchange_device(self._group, self._device)
        mine = [ns for _ in range(ROUNDS) for ns in _cross_barrier(group)]
        everyone = gather_integers(mine, group, device)
        rounds = [list(zip(row[::2], row[1::2], strict=True)) for row in everyone]
        clock = compare_clocks(rounds[0], rounds[group.rank()])
        payload = to_json([self._stopwatch.timeline(clock)]).encode()
        lengths = [row[0] for row in gather_integers([len(payload)], group, device)]
        files = gather_bytes(payload, lengths, group, device)
        return tuple(line for file in files for line in from_json(file.decode()))

    def report(self) -> str:
        """Is communication hidden, if not, why, and what to change; a few tables.

        Long lines are folded at the width of the terminal, if there is one.
        """
        # Imported with the package, it would run twice in `python -m minidp.report`.
        words: Any = importlib.import_module("minidp.report")
        return fold(words.report(self.timelines), sys.stdout)

    def save(self, path: str | Path) -> None:
        """Write all there is as JSON, for ``minidp report``."""
        Path(path).write_text(to_json(self.timelines))

    def save_trace(self, path: str | Path) -> None:
        """Write a trace for https://ui.perfetto.dev or ``chrome://tracing``."""
        Path(path).write_text(chrome_trace(self.timelines))

    def save_picture(self, path: str | Path) -> None:
        """Write a PNG: the buckets of the typical step, hidden and exposed.

        Raises:
            ModuleNotFoundError: matplotlib is not installed.
            ValueError: no recorded step sent anything.
        """
        draw(self.timelines, path)


def _cross_barrier(group: ProcessGroup) -> tuple[int, int]:
    """When this rank entered a barrier, and when it left."""
    enter = time.perf_counter_ns()
    meet(group)
    return enter, time.perf_counter_ns()


def _alone(rank: int, error: RuntimeError) -> str:
    cause = str(error.__cause__ or error)  # of a collective: what its backend says
    return explain(
        rank,
        "The recordings of all ranks could not be brought together.",
        expected="gather() on all ranks of the model's process group",
        found=cause.partition("\n")[0].rstrip("."),
        remedy="call it on all ranks; or save() on each rank, and give all files to "
        "minidp report",
    )


def _not_ours(model: object) -> str:
    kind = type(model)
    hint = (
        "wrap the module with minidp.DataParallel, and pass the wrapper; or start a "
        "script that you do not want to edit by minidp run --report"
    )
    if isinstance(getattr(model, "_orig_mod", None), DataParallel):
        hint = "this is a compiled one: pass the DataParallel that was compiled"
    elif isinstance(getattr(model, "module", None), DataParallel):
        hint = "pass its .module"
    return (
        f"record() needs a minidp.DataParallel, but got {kind.__module__}."
        f"{kind.__qualname__}. What to do: {hint}."
    )
