"""Sum over the ranks how many items each has counted, inside a bucket.

A bucket has more elements than its gradients need: the *tail*. Each rank owns `ROW` of
these: a number of flags, then the bytes of two float64 numbers, one byte in each. Other
ranks leave them zero: the sum brings every rank's row unchanged, also in bfloat16.
"""

from __future__ import annotations

import math
import struct
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from minidp import native
from minidp.errors import MAX_NAMES, ItemCountError, explain

from .collectives import all_reduce
from .communicator import Communicator
from .work import Work

_ROW = struct.Struct("=Bdd")  # flags, count, loss
ROW = _ROW.size  # elements of a bucket per rank
# Flags: no count; began on averages; counted once per forward, of several; less often.
_SILENT, _STALE, _EACH, _FEWER = 1, 2, 4, 8
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


class ItemCounts:
    """Count this rank's items, send them with a reduction, and read those of all ranks.

    A reducer has one only with ``average_over="items"``. `read` returns by what to
    multiply gradients for the mean over all items.
    """

    def __init__(self, communicator: Communicator) -> None:
        self._communicator = communicator
        self._step = _Step()
        self.samples: Sequence[Tensor] = ()  # parameters at which `look` looks
        self.is_sent = False  # in the reduction that is open
        self.holds_averages = False  # no backward began since averages were written
        # Of the last reduction, by rank: flags, count, loss. A tensor on CUDA.
        self._facts: list[tuple[float, ...]] | Tensor | None = None
        self._work: Work | None = None  # of `_message`
        self._message: Tensor | None = None  # if no bucket carries the counts
        self._late: tuple[Tensor, torch.cuda.Event] | None = None  # see `check`
        # A graph task, and whether all losses in it were weighed by 0, on a device.
        self._weighed: tuple[int, Tensor] | None = None

    @property
    def tail(self) -> int:
        """How many elements counts take at the end of the first dense bucket."""
        return ROW * self._communicator.size

    # -- what this rank says -----------------------------------------------------------

    def add(self, count: object, loss: object = None) -> None:
        """Add ``count`` items of one micro-batch; ``loss``: the sum of theirs, to log.

        Tensors are copied, and not read on the host unless they are on the CPU. Items
        without a loss make the mean loss NaN. TypeError: no real number, nor a tensor
        of one; RuntimeError: this rank's counts were sent, and not `read` yet.
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
        """Note which ``.grad`` of `samples` hold averages; call when a backward begins.

        No-op except for the first call after `read`. If one that is not all 0 changes
        before the counts are sent, all ranks' next `read` (CUDA: `check`) raises: the
        sum is no mean. Averages that the backward leaves alone may stay.
        """
        if self.holds_averages:
            self.holds_averages = False
            for param in self.samples:
                if (grad := param.grad) is not None:
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

    def write(self, tail: Tensor) -> None:
        """Write this rank's counts into ``tail``, zeros elsewhere; count anew from 0.

        Sets `is_sent`: `add` raises until `read`. ``tail``: the end of a bucket's
        buffer: 1-D, real, `tail` elements or more. No collective; no wait for a GPU.
        """
        step, self._step = self._step, _Step()
        self.is_sent = True
        said, start = step.said, ROW * self._communicator.rank
        counts, losses = [count for count, _, _ in said], [loss for _, loss, _ in said]
        if tail.is_cpu and not any(isinstance(n, Tensor) for n in counts + losses):
            flags = step.flags + _STALE * bool(step.is_stale())
            message = bytearray(len(tail))
            _ROW.pack_into(message, start, flags, sum(counts), sum(losses))
            _put(message, tail)
            return
        for _, _, event in said:
            if event is not None:
                torch.cuda.current_stream(tail.device).wait_event(event)
        words = torch.stack([_sum(counts, tail.device), _sum(losses, tail.device)])
        tail.zero_()
        row = tail[start : start + ROW]
        row[1:] = words.view(torch.uint8)
        row[0] = (
            torch.as_tensor(step.is_stale(), device=row.device).to(row) * _STALE
            + step.flags
        )

    def send(self, device: torch.device) -> None:
        """Collective: start to sum the counts, which no bucket carries; as `write`."""
        self._message = torch.empty(self.tail, dtype=torch.float32, device=device)
        self.write(self._message)
        with self._communicator.watching("launching the sum of item counts"):
            self._work = all_reduce(self._message, self._communicator.group)
            self._communicator.note_started(self._work)

    def settle(self) -> None:
        """Wait for the sum that `send` started; no-op without one. Reads no counts."""
        if self._work is not None:
            with self._communicator.watching("waiting for the sum of item counts"):
                self._communicator.wait(self._work)
            self._work = None

    def read(self, tail: Tensor | None, divisor: int) -> float | Tensor:
        """Store all ranks' counts, for `totals`; return ``divisor`` / total.

        ``tail``: of a bucket that is reduced; None: wait for the message of `send`.
        ``divisor``: what gradients were divided by. Lets `add` count again. On the CPU
        a float; ItemCountError in the cases of `check`. On CUDA a tensor, without a
        wait: `check` raises later.
        """
        self.settle()
        sums = self._message if tail is None else tail[: self.tail]
        assert sums is not None
        self._message, self.is_sent = None, False
        self.holds_averages = True
        if sums.is_cpu:
            facts: list[tuple[float, ...]]
            self._facts = facts = [*_ROW.iter_unpack(_taken(sums))]
            self._refuse(facts)
            return divisor / sum([count for _, count, _ in facts])
        self._facts = on_gpu = _decoded(sums)
        copied = torch.empty_like(on_gpu, device="cpu", pin_memory=True)
        copied.copy_(on_gpu, non_blocking=True)
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(on_gpu.device))
        self._late = copied, event
        return torch.reciprocal(on_gpu[:, 1].sum()) * divisor

    @property
    def totals(self) -> ItemTotals | None:
        """What the last `read` got, even if it raised; None before the first."""
        if self._facts is None:
            return None
        facts = self._facts
        if not isinstance(facts, Tensor):
            facts = torch.tensor(facts, dtype=torch.float64, device="cpu")
        count = facts[:, 1].sum()
        return ItemTotals(count, facts[:, 2].sum() / count, facts[:, 1])

    def check(self) -> None:
        """Wait for the counts of the last `read` on CUDA; raise if they give no mean.

        No-op on the CPU, where `read` has raised, and in a second call. ItemCountError
        if a rank never counted, or its number is negative, NaN or too large; if a
        backward added to averages; if one rank counted less often than it ran forwards,
        though another counted once for each of several; or if all counts are 0.
        """
        late, self._late = self._late, None
        if late is not None:
            late[1].synchronize()
            self._refuse(late[0].tolist())

    def reset(self) -> None:
        """Forget what was counted and sent, a sum in flight, too; keep `totals`."""
        self._step, self._late, self._weighed = _Step(), None, None
        self._work = self._message = None
        self.is_sent = self.holds_averages = False

    def _refuse(self, rows: Sequence[Sequence[float]]) -> None:
        """Raise ItemCountError if the ranks' (flags, count, loss) give no mean.

        In which cases: see `_problem`.
        """
        told = [(rank, int(row[0]), row[1]) for rank, row in enumerate(rows)]
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


def _put(message: bytearray, tail: Tensor) -> None:
    """Set each element of ``tail`` (CPU) to the number in that byte of ``message``."""
    library = native.library()
    if library is None or not library.put_bytes(bytes(message), tail):
        tail.copy_(torch.frombuffer(message, dtype=torch.uint8))


def _taken(tail: Tensor) -> bytes:
    """Return ``tail``'s elements (CPU; whole numbers to 255) as bytes: undo `_put`."""
    library = native.library()
    message: bytes = b"" if library is None else library.take_bytes(tail)
    return message or bytes(map(int, tail.tolist()))


def _sum(numbers: Sequence[Tensor | float], device: torch.device) -> Tensor:
    """Return the sum of floats and 0-D tensors as a float64 tensor on ``device``."""
    on_host = sum(n for n in numbers if isinstance(n, float))
    total = torch.full((), on_host, dtype=torch.float64, device=device)
    for n in numbers:
        if isinstance(n, Tensor):
            total += n.to(device, non_blocking=True)
    return total


def _decoded(sums: Tensor) -> Tensor:
    """Return flags, count, loss of each rank: (ranks, 3), float64, still on the GPU."""
    table = sums.view(-1, ROW).to(torch.uint8)
    words = table[:, 1:].clone(memory_format=torch.contiguous_format)
    return torch.cat([table[:, :1], words.view(torch.float64)], 1)


def _names(ranks: Sequence[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {_few(ranks)}"


def _few(items: Sequence[object]) -> str:
    """Return text: at most 10 items, joined by commas, and how many more there are."""
    more = len(items) - MAX_NAMES
    text = ", ".join(map(str, items[:MAX_NAMES]))
    return f"{text} and {more} more" if more > 0 else text
