"""Sum over the ranks how many items each has counted (``average_over="items"``).

The counts travel in a message of their own, a row of three numbers for each rank. It is
launched just before the first bucket, so that it is there when the buckets are. Each
rank fills in its own row and leaves the others 0, so that the sum over the ranks brings
every row unchanged.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from minidp.comm import (
    Communicator,
    Work,
    all_reduce,
)
from minidp.errors import MAX_NAMES, ItemCountError, explain
from minidp.shared_memory import SharedBuffer

from .observer import Observer

_FLAGS, _COUNT, _LOSS = range(3)  # the columns of the message
_SILENT = 1  # flag: this rank has counted nothing
_STALE = 2  # flag: its backward added to averages
_EACH = 4  # flag: it has counted once for each of several forwards
_FEWER = 8  # flag: it has counted, but less often than it ran forwards
_MOST = sys.float_info.max  # of the sum of all counts


@dataclass(frozen=True, eq=False)
class ItemTotals:
    """Hold the ranks' items of one synchronised backward, and mean loss; float64."""

    count: Tensor  # items of all ranks and micro-batches, shape ()
    mean_loss: Tensor  # over these items, shape (); NaN if a rank gave no loss
    of_ranks: Tensor  # items of each rank, shape (ranks,)


@dataclass(eq=False)
class _Step:
    """Hold this rank's counts, losses and forwards since its counts were last sent."""

    # Per call count, loss, and when they are computed. A tensor if on a GPU: float64.
    said: list[tuple[Tensor | float, Tensor | float, torch.cuda.Event | None]] = field(
        default_factory=list
    )
    # Averages that a backward began on: parameter, .grad, its version, is it not zero?
    averages: list[tuple[Tensor, Tensor, int, Tensor]] = field(default_factory=list)
    forwards: int = 0  # in grad mode

    def is_stale(self) -> Tensor | bool:
        """Return whether a nonzero ``.grad`` in `averages` was changed since `look`.

        A bool tensor, not read here; False if no ``.grad`` has changed.
        """
        found = [
            is_average
            for param, grad, version, is_average in self.averages
            if param.grad is not grad or grad._version != version
        ]
        return torch.stack(found).any() if found else False

    @property
    def flags(self) -> int:
        """Those of _SILENT, _EACH, _FEWER that apply, added up; not _STALE."""
        calls = len(self.said)
        flags = _SILENT * (not calls)
        if calls == self.forwards > 1:
            flags += _EACH
        elif 0 < calls < self.forwards:
            flags += _FEWER
        return flags


class ItemCounts(Observer):
    """Count this rank's items, send them with a reduction, and read those of all ranks.

    A reducer has one only with ``average_over="items"``. In `finishing` it sets `scale`
    to what makes sums of gradients means over all items. ``sampled()`` returns
    parameters whose gradients have arrived when counts are sent.
    """

    def __init__(
        self,
        communicator: Communicator,
        device: torch.device,
        sampled: Callable[[], Sequence[Tensor]],
    ) -> None:
        self._communicator = communicator
        self._device = device  # of the gradients
        self._sampled = sampled
        self.divisor = 1  # by which gradients were divided before they travelled
        # What reduced gradients are multiplied by: a tensor if only the device knows.
        self.scale: float | Tensor = 1.0
        self._step = _Step()
        self.is_sent = False  # in the reduction that is open
        self.holds_averages = False  # no backward began since averages were written
        # Of the last reduction, by rank: flags, count, loss. Float64, on the device.
        self._facts: Tensor | None = None
        self._message: Tensor | None = None  # the sum that travels, or has arrived
        self._work: Work | None = None  # of `_message`
        self._shared: SharedBuffer | None = None  # through which it goes; None: group
        self._late: tuple[Tensor, torch.cuda.Event] | None = None  # see `check`
        # A graph task, and whether all losses in it were weighed by 0, on a device.
        self._weighed: tuple[int, Tensor] | None = None

    @property
    def shape(self) -> tuple[int, torch.dtype]:
        """Number of elements of the message, and their dtype."""
        return 3 * self._communicator.size, torch.float64

    def use(self, shared: SharedBuffer | None) -> None:
        """Send counts through ``shared`` memory from now on; None: the process group.

        First waits for counts in flight.
        """
        self.settle()
        self._shared = shared

    # -- what this rank says -----------------------------------------------------------

    def add(self, count: object, loss: object = None) -> None:
        """Add ``count`` items of one micro-batch; ``loss``: the sum of theirs, to log.

        Tensors are copied, and not read on the host unless they are on the CPU. Items
        without a loss make the mean loss NaN. TypeError: no real number, nor a tensor
        of one; RuntimeError: this rank's counts were sent, and the backward still runs.
        """
        if self.is_sent:
            raise RuntimeError(
                f"[rank {self._communicator.rank}] Items are counted after this step's "
                "counts were sent. What to do: count all items of a step before its "
                "first synchronised backward(); after one that failed, call reset() on "
                "all ranks."
            )
        n = _number("The number of items", count)
        if loss is not None:
            told = _number("The loss", loss)
        elif isinstance(n, Tensor):
            told = torch.where(n == 0, 0.0, math.nan)
        else:
            told = math.nan if n else 0.0
        event = None
        for each in (n, told):
            if isinstance(each, Tensor) and each.is_cuda:
                event = torch.cuda.Event()
                event.record(torch.cuda.current_stream(each.device))
        self._step.said.append((n, told, event))

    def note_forward(self) -> None:
        """Count a forward in grad mode; `flags` compares it with the calls of `add`."""
        self._step.forwards += 1

    def look(self) -> None:
        """Note which gradients hold averages; called when a backward begins.

        It looks at the three smallest parameters that ``sampled()`` returns.
        Does something only in the first call after averages were written. Adding new
        gradients to averages would give a sum that is no mean: if a ``.grad`` that is
        not all 0 changes before the counts are sent, the step fails on all ranks.
        Averages that the backward leaves alone may stay.
        """
        if self.holds_averages:
            self.holds_averages = False
            for param in sorted(self._sampled(), key=Tensor.numel)[:3]:
                if (grad := param.grad) is not None and grad.layout is torch.strided:
                    found = param, grad, grad._version, grad.detach().any()
                    self._step.averages.append(found)

    def note_weighed(self, task: int, is_zero: Tensor) -> None:
        """Note that graph task ``task`` has begun on a loss, and if it is for 0 items.

        ``is_zero`` is on a device, and not read.
        """
        if self._weighed is not None and self._weighed[0] == task:
            is_zero = is_zero.logical_and(self._weighed[1])
        self._weighed = task, is_zero

    def cleaned(self, task: int, grads: Sequence[Any]) -> tuple[Any, ...] | None:
        """Return ``grads``, but zeros if all losses of ``task`` are for 0 items.

        None if no loss of the task was weighed by a count on a device (`note_weighed`).
        """
        if self._weighed is None or self._weighed[0] != task:
            return None
        is_zero = self._weighed[1]
        return tuple(
            grad.masked_fill(is_zero.to(grad.device), 0) if grad is not None else None
            for grad in grads
        )

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Return a context in which this rank counts 0 items; then restore its own."""
        mine = self._step, self.holds_averages
        self._step = _Step([(0.0, 0.0, None)])
        try:
            yield
        finally:
            self._step, self.holds_averages = mine

    # -- what travels ------------------------------------------------------------------

    def launching(self) -> None:
        """Collective: start to sum the counts; count anew from 0, for the next step.

        `add` raises from now until `finishing`. Waits for no GPU.
        """
        self.settle()
        step, self._step = self._step, _Step()
        self.is_sent = True
        rank = self._communicator.rank
        if self._shared is not None:
            message = self._shared.values.view(-1, 3).zero_()
        else:
            message = torch.zeros(
                self._communicator.size, 3, dtype=torch.float64, device=self._device
            )
        self._write(step, message[rank])
        self._message = message
        with self._communicator.watching("launching the sum of item counts"):
            if self._shared is not None:
                self._work = self._shared.all_reduce()
            else:
                self._work = all_reduce(message, self._communicator.group)
            self._communicator.note_started(self._work)

    def _write(self, step: _Step, row: Tensor) -> None:
        """Write this rank's flags, count and loss into its ``row`` of the message."""
        counts = [count for count, _, _ in step.said]
        losses = [loss for _, loss, _ in step.said]
        if row.is_cpu and not any(isinstance(n, Tensor) for n in counts + losses):
            flags = step.flags + _STALE * bool(step.is_stale())
            said = [flags, sum(counts), sum(losses)]
            row.copy_(torch.tensor(said, dtype=torch.float64, device="cpu"))
            return
        for _, _, event in step.said:
            if event is not None:
                torch.cuda.current_stream(row.device).wait_event(event)
        is_stale = torch.as_tensor(step.is_stale(), device=row.device).to(row)
        row[_FLAGS] = is_stale * _STALE + step.flags
        row[_COUNT] = _sum(counts, row.device)
        row[_LOSS] = _sum(losses, row.device)

    def settle(self) -> None:
        """Wait for the counts in flight, if there are any. Reads none."""
        if self._work is not None:
            with self._communicator.watching("waiting for the sum of item counts"):
                self._communicator.wait(self._work)
            self._work = None

    def finishing(self, *, applies_grads: bool) -> None:
        """Wait for all ranks' counts; set the scale by which sums become means.

        Lets `add` count again. On the CPU raises ItemCountError in the cases of
        `check`. On CUDA the scale is a tensor, and the host waits for nothing unless
        ``applies_grads``: `check` raises later.
        """
        self.settle()
        assert self._message is not None
        facts, self._message = self._message, None
        self.is_sent, self.holds_averages = False, True
        if facts.is_cpu:
            self._facts = facts.clone() if self._shared is not None else facts
            rows = facts.tolist()
            self._refuse(rows)
            self.scale = self.divisor / sum([row[_COUNT] for row in rows])
            return
        self._facts = facts
        copied = torch.empty_like(facts, device="cpu", pin_memory=True)
        copied.copy_(facts, non_blocking=True)
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(facts.device))
        self._late = copied, event
        self.scale = torch.reciprocal(facts[:, _COUNT].sum()) * self.divisor
        if applies_grads:
            self.check()

    @property
    def totals(self) -> ItemTotals | None:
        """What the last backward got, even if it raised; None before the first."""
        if (facts := self._facts) is None:
            return None
        count = facts[:, _COUNT].sum()
        return ItemTotals(count, facts[:, _LOSS].sum() / count, facts[:, _COUNT])

    def check(self) -> None:
        """Wait for the last backward's counts on CUDA; raise if they give no mean.

        No-op on the CPU, where `finishing` has raised, and in a second call.
        ItemCountError if a rank never counted, or its number is negative, NaN or too
        large; if a backward added to averages; if one rank counted less often than it
        ran forwards, though another counted once for each of several; or if all counts
        are 0.
        """
        late, self._late = self._late, None
        if late is not None:
            late[1].synchronize()
            self._refuse(late[0].tolist())

    def abandon(self) -> None:
        """Forget what was counted and sent, a sum in flight, too; keep `totals`."""
        self._step, self._late, self._weighed = _Step(), None, None
        self._work = self._message = None
        self.is_sent = self.holds_averages = False

    def _refuse(self, rows: Sequence[Sequence[float]]) -> None:
        """Raise ItemCountError if the ranks' (flags, count, loss) give no mean.

        In which cases: see `_problem`.
        """
        told = [(r, int(row[_FLAGS]), row[_COUNT]) for r, row in enumerate(rows)]
        if (problem := _problem(told)) is None:
            return
        what, expected, remedy = problem
        found = [
            f"rank {r}: {'nothing' if flags & _SILENT else f'{n:g}'}"
            for r, flags, n in told
        ]
        raise ItemCountError(
            explain(
                self._communicator.rank,
                f"{what}.",
                expected=expected,
                found=_few(found),
                remedy=f"{remedy}; then call reset() on all ranks, and zero_grad()",
            )
        )


def _problem(told: Sequence[tuple[int, int, float]]) -> tuple[str, str, str] | None:
    """Return texts of the first problem: what is wrong, was expected, and is to do.

    None if a mean can be taken. ``told``: per rank its number, flags (the module's
    constants) and count of items.
    """
    silent, stale, each, few = (
        [r for r, flags, _ in told if flags & flag]
        for flag in (_SILENT, _STALE, _EACH, _FEWER)
    )
    wrong = [r for r, _, n in told if not 0 <= n <= _MOST / len(told)]
    expected = "the number of its items from each rank"
    if stale:
        return (
            f"A backward added to averages of an earlier one, on {_names(stale)}",
            "zeros, or None, in .grad",
            "call zero_grad() after each step; to accumulate, run all but the last "
            "forward and backward inside no_sync()",
        )
    if silent:
        return (
            f"No number of items was said on {_names(silent)}",
            expected,
            "on every rank call count_items(n) or weigh_loss(loss, n) before "
            "backward(), with 0 where a rank has no items",
        )
    if few and each:
        return (
            "Items were counted fewer times than the model was called on "
            f"{_names(few)}, but once per call on {_names(each)}",
            expected,
            "count items once for each forward on all ranks; for one whose loss has no "
            "items count_items(0), or call it under no_grad()",
        )
    if wrong:
        return (
            f"The number of items is negative, too large or NaN on {_names(wrong)}",
            expected,
            "look at how it is computed there",
        )
    if sum(n for _, _, n in told) > 0:
        return None
    return (
        "All ranks counted 0 items: there is nothing to average",
        expected,
        "skip this step on all ranks; if there should be items, look at n",
    )


def weighted(loss: Tensor, count: object) -> Tensor | None:
    """Return ``loss * count``, a sum of losses; None if ``count`` is known to be 0.

    On an accelerator it is not known here: there 0 items give 0, and to ``loss`` a
    gradient of 0, even for NaN. Counts nothing. TypeError unless ``loss`` is one
    floating-point number, and ``count`` a real one.
    """
    is_one = isinstance(loss, Tensor) and loss.numel() == 1
    if not is_one or not loss.is_floating_point():
        is_tensor = isinstance(loss, Tensor)
        found = f"{loss.dtype}, shape {tuple(loss.shape)}" if is_tensor else repr(loss)
        raise TypeError(
            "weigh_loss needs a loss of one floating-point number, a mean, but got "
            f"{found}. What to do: take the mean; or for a sum count_items(n, loss)."
        )
    n = _number("The number of items", count)
    if isinstance(n, Tensor):
        n = n.to(loss.device, loss.dtype, non_blocking=True)
        product = loss * n.reshape(())
        return torch.where(n == 0, torch.zeros_like(product), product)
    return loss * n if n else None


def is_known(tensor: Tensor) -> bool:
    """Return whether the host can read a tensor without waiting for a device."""
    return tensor.is_cpu


def _number(what: str, value: object) -> Tensor | float:
    """Return a number, or a CPU tensor of one, as a float; of a GPU tensor a copy.

    The copy is a detached float64 tensor of shape (), not waited for. TypeError for
    anything that is no real number; its text begins with ``what``.
    """
    if isinstance(value, Tensor):
        if value.numel() == 1 and not value.is_complex() and not value.is_meta:
            if is_known(value):
                return float(value.item())
            return value.detach().reshape(()).to(torch.float64, copy=True)
        found = f"a {value.dtype} tensor of shape {tuple(value.shape)}"
    elif not isinstance(value, bool) and hasattr(type(value), "__float__"):
        try:
            return float(value)  # type: ignore[arg-type]
        except OverflowError:
            return math.inf
    else:
        found = f"{value!r} ({type(value).__name__})"
    raise TypeError(
        f"{what} must be a real number, or a tensor with one, but got {found}."
    )


def _sum(numbers: Sequence[Tensor | float], device: torch.device) -> Tensor:
    """Return the sum of floats and 0-D tensors as a float64 tensor on ``device``."""
    on_host = sum(n for n in numbers if isinstance(n, float))
    total = torch.full((), on_host, dtype=torch.float64, device=device)
    for n in numbers:
        if isinstance(n, Tensor):
            total += n.to(device, non_blocking=True)
    return total


def _names(ranks: Sequence[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {_few(ranks)}"


def _few(items: Sequence[object]) -> str:
    """Return text: at most 10 items, joined by commas, and how many more there are."""
    more = len(items) - MAX_NAMES
    text = ", ".join(map(str, items[:MAX_NAMES]))
    return f"{text} and {more} more" if more > 0 else text
