"""``minidp.record(model)``: record steps of training, to see what they wait for.

A `Recording` is the public side of `overlap/`: it starts and stops a stopwatch, brings
the steps of all ranks together, and writes them as a report, a page or a trace.
"""

from __future__ import annotations

import platform
import sys
import weakref
from pathlib import Path
from typing import Any

import torch
from torch import nn

from . import accelerator, world
from ._version import __version__
from .attachment import Attachment, attached_to
from .comm import (
    Communicator,
    barrier,
    exchange_device,
    gather_bytes,
    gather_integers,
)
from .console import fold, warn
from .core import Reducer
from .data_parallel import DataParallel
from .errors import CollectiveError, explain
from .overlap import (
    ClockOffset,
    Param,
    Stopwatch,
    Timeline,
    Where,
    chrome_trace,
    compare_clocks,
    from_json,
    html_page,
    report,
    to_json,
)

KEEP_STEPS = 200
ROUNDS = 20  # barriers that compare clocks
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_recorded: weakref.WeakSet[Reducer] = weakref.WeakSet()  # those that are recorded now


def record(
    model: DataParallel | Attachment | nn.Module, *, keep: int = KEEP_STEPS
) -> Recording:
    """Return a `Recording` that records the model's steps while its block runs.

        with minidp.record(model) as rec:
            for x, y in batches:
                ...                      # train as usual
        print(rec.report())

    Recording costs about 1 % of a step (benchmarks/recording.py), and changes no
    gradient.

    Args:
        model: A `DataParallel`, an `Attachment`, or an attached model. Each rank may
            record or not. For a report of all ranks, all must record the same steps and
            call `Recording.gather`.
        keep: How many steps to keep; older ones are dropped. A step takes about 100
            bytes for each bucket, and one step in four also 40 bytes for each
            parameter.

    Raises:
        TypeError: The model is not synchronised by minidp.
        ValueError: ``keep`` is less than 1.
    """
    found = wrapper_of(model, "record")
    if keep < 1:
        raise ValueError(f"keep must be at least 1 step, but is {keep!r}.")
    return Recording(found, keep)


def wrapper_of(model: object, function: str) -> DataParallel:
    """Return the `DataParallel` behind what a user has passed to a function.

    Args:
        model: A `DataParallel`, an `Attachment`, or an attached model.
        function: The name of that function, for errors.

    Raises:
        TypeError: It is none of these.
    """
    found: object = model
    if isinstance(model, Attachment):
        found = model.data_parallel
    elif isinstance(model, nn.Module):
        found = attached_to(model) or model
    kind = type(model)
    if isinstance(found, DataParallel):
        # mmengine's MMSeparateDistributedDataParallel, for one, skips the constructor.
        if "_reducer" not in vars(found):
            inside = [n for n, m in found.named_modules() if "_reducer" in vars(m)]
            remedy = "call the constructor, or wrap what it holds"
            if inside:
                one = f"{function}(model.get_submodule({inside[0]!r}))"
                remedy = (
                    f"choose one of those, {one}; or start the script by minidp run "
                    "--report, which records each of them"
                )
            raise TypeError(
                f"{function}() needs one minidp.DataParallel, but this {kind.__name__} "
                "averages nothing itself, because its class does not call the "
                "constructor of DataParallel. Wrapped inside it are: "
                f"{', '.join(inside) or 'none'}. What to do: {remedy}."
            )
        return found
    raise TypeError(
        f"{function}() needs a minidp.DataParallel, but got {kind.__module__}."
        f"{kind.__qualname__}. What to do: wrap the module with minidp.DataParallel, "
        "and pass the wrapper itself, not what holds it or was compiled from it; or "
        "start a script that you do not want to edit by minidp run --report."
    )


class Recording:
    """Recorded steps, which `record` returns and its ``with`` block fills.

    The times of buckets are taken in all steps. When each gradient came is timed in one
    of four steps, or of eight if all parameters are on one GPU. After the block the
    recording keeps neither model nor gradients alive.
    """

    def __init__(self, model: DataParallel, keep: int) -> None:
        # This does not hold the model, because `minidp run` looks whether its script
        # has dropped it. None says that the block is over.
        self._reducer: Reducer | None = model._reducer
        reducer = model._reducer
        self._stopwatch = Stopwatch(reducer.queue, reducer.hooks, keep=keep)
        specs = reducer.queue.specs
        kinds = [f"{'sparse ' * s.sparse}{s.dtype} on {s.device}" for s in specs]
        self._params = tuple(
            Param(spec.name, spec.nbytes, kind.replace("torch.", ""))
            for spec, kind in zip(specs, kinds, strict=True)
        )
        self._device = specs[0].device
        self._gathered: tuple[Timeline, ...] = ()
        self._num_gathered = 0  # how many steps had ended by then
        self._note_group(reducer)

    def _note_group(self, reducer: Reducer) -> None:
        communicator = reducer.communicator
        self._group, self._limit = communicator.group, communicator.limit
        self._where = where_of(reducer)

    def __enter__(self) -> Recording:
        """Record from the next forward on, and return this object.

        Raises:
            RuntimeError: A block records this model already, or this one is over.
        """
        if self._reducer is None:
            raise RuntimeError(
                "This recording is over and no longer holds its model: call "
                "minidp.record(model) again for another one."
            )
        if self._reducer in _recorded:
            raise RuntimeError(
                "This model is being recorded already: use the Recording of the "
                "minidp.record() block around, or leave that block first."
            )
        _recorded.add(self._reducer)
        self._stopwatch.start()
        return self

    def __exit__(self, *_error: object) -> None:
        """Stop recording. Steps that were recorded before an error are kept."""
        assert self._reducer is not None
        self._stopwatch.stop()
        self._note_group(self._reducer)  # reset() may have changed it
        _recorded.discard(self._reducer)
        self._reducer = None
        later = self._stopwatch.num_ended - self._num_gathered
        if self._gathered and later > 1:  # one was under way
            warn(
                f"{later} steps were recorded after gather(), and what it gathered "
                "lacks them: reports and files show the steps before it. What to do: "
                "call gather() after the block, once more."
            )

    @property
    def timelines(self) -> tuple[Timeline, ...]:
        """The timeline of this rank, or after `gather` those of all ranks.

        Gathered timelines lack the steps that were recorded afterwards.
        """
        return self._gathered or (self._timeline(),)

    def _timeline(self, clock: ClockOffset | None = None) -> Timeline:
        """Return the steps of this rank on its own clock.

        Args:
            clock: How far that clock is ahead of rank 0's, which the timeline tells.
        """
        steps, layouts = self._stopwatch.steps()
        num_dropped = self._stopwatch.num_ended - len(steps)
        return Timeline(
            self._where, self._params, tuple(layouts), tuple(steps), num_dropped, clock
        )

    def gather(self) -> Recording:
        """Gather the steps of all ranks on every rank, and compare their clocks.

        All ranks of the model's process group must call this together, outside of a
        backward. Afterwards reports and exports cover all ranks. It returns this
        object.

        Raises:
            CollectiveError: A rank did not call it within the model's ``hang_timeout``,
                or the exchange failed. This rank's own steps are kept.
            ValueError: The model is one of `minidp.torchft`, whose replicas have no
                group for this.
        """
        self._timeline()  # raises what the device reports
        self._num_gathered = self._stopwatch.num_ended
        if self._where.world_size > self._group.size():
            raise ValueError(
                "gather() does not reach the other replicas: only their manager does. "
                "What to do: save() on each, and give all files to minidp report."
            )
        communicator = Communicator(self._group, self._limit, device=self._device)
        try:
            with communicator.blocking("gathering recordings"):
                self._gathered = self._of_all_ranks()
        except RuntimeError as error:
            cause = str(error.__context__ or error)  # the backend's own error
            text = explain(
                self._group.rank(),
                "The recordings of all ranks could not be gathered.",
                expected="gather() on all ranks of the model's process group",
                found=cause.partition("\n")[0].rstrip("."),
                remedy="call it on all ranks; or save() on each rank, and give all "
                "files to minidp report",
            )
            raise CollectiveError(text) from error.__context__
        return self

    def _of_all_ranks(self) -> tuple[Timeline, ...]:
        """Compare the clocks of all ranks, and return the timeline of each rank."""
        group, device = self._group, exchange_device(self._group, self._device)
        mine, now = [], world.timer()
        for _ in range(ROUNDS):
            mine.append(now())
            barrier(group, device)
            mine.append(now())
        everyone = gather_integers(mine, group, device)
        rounds = [list(zip(row[::2], row[1::2], strict=True)) for row in everyone]
        clock = compare_clocks(rounds[0], rounds[group.rank()])
        payload = to_json([self._timeline(clock)]).encode()
        files = gather_bytes(payload, group, device)
        return tuple(line for file in files for line in from_json(file.decode()))

    def report(self) -> str:
        """Return a text that says whether communication is hidden, and what to change.

        Long lines are folded if standard output is a terminal.
        """
        return fold(report(self.timelines), sys.stdout)

    def save(self, path: str | Path) -> None:
        """Write `timelines` to a file as JSON, for ``minidp report``."""
        Path(path).write_text(to_json(self.timelines))

    def save_trace(self, path: str | Path) -> None:
        """Write a trace file for https://ui.perfetto.dev or ``chrome://tracing``."""
        Path(path).write_text(chrome_trace(self.timelines))

    def save_page(self, path: str | Path) -> None:
        """Write the report, all steps and what-if sliders as a page for the browser."""
        Path(path).write_text(html_page(self.timelines), encoding="utf-8")

    def __getattr__(self, name: str) -> Any:
        """Say what replaces ``save_picture``, which earlier versions had."""
        what = f"'Recording' object has no attribute {name!r}"
        if name == "save_picture":
            what += (
                ": minidp draws no pictures any more. What to do: call save_page(), "
                "and open the page in a browser."
            )
        raise AttributeError(what)


def where_of(reducer: Reducer) -> Where:
    """Return who records: rank, machine, versions and settings of a reducer."""
    device, averaging = reducer.queue.specs[0].device, reducer.queue.averaging
    name = accelerator.name_of(device)
    (rank, size), hook = averaging.seat, averaging.comm_hook
    # The boot id is equal in all containers of a host, which share its clock. Their
    # host names differ.
    boot = _BOOT_ID.read_text().strip() if _BOOT_ID.exists() else ""
    versions = {"minidp": __version__, "torch": str(torch.__version__)}
    versions["python"] = platform.python_version()
    return Where(
        rank=rank,
        world_size=size,
        backend=str(reducer.communicator.group.name()),
        device=f"{device} {name}".strip(),
        host=boot or platform.node(),
        versions=versions,
        comm_hook="" if hook is None else hook.name,
        layout_by=reducer.rebuild_policy.layout_by,
        no_shared_memory=averaging.no_shared_memory if size > 1 else None,
        logical_ranks=averaging.leaves,
    )
