"""Sum over the ranks how many items each has counted (``average_over="items"``).

The counts travel in an `Exchange`, a row of three numbers for each rank. It is started
just before the first bucket, so that it is there when the buckets are. Each rank fills
in its own row and leaves the others 0, so that the sum over the ranks brings every row
unchanged.
"""

from __future__ import annotations

import functools
import math
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from minidp.accelerator import (
    After,
    Download,
    HomeStreams,
    on_side_stream,
    use_here,
)
from minidp.comm import Communicator
from minidp.errors import ItemCountError, explain

from .autograd import untraced
from .exchange import Exchange
from .item_mistakes import EACH, FEWER, SILENT, STALE, refuse_counts
from .item_numbers import number_of, total
from .observer import Observer

_FLAGS, _COUNT, _LOSS = range(3)  # the columns of the message


@dataclass(frozen=True, eq=False)
class ItemTotals:
    """How many items a synchronised backward had, and their mean loss, all float64."""

    count: Tensor  # items of all ranks and micro-batches, shape ()
    mean_loss: Tensor  # over these items, shape (); NaN if a rank gave no loss
    of_ranks: Tensor  # items of each rank, shape (ranks,)


@dataclass(eq=False)
class _Step:
    """What this rank has counted since it last sent its counts."""

    # For each call of `add` the count and the loss. A number on a device is a float64
    # tensor.
    said: list[tuple[Tensor | float, Tensor | float]] = field(default_factory=list)
    # Averages on which a backward began: the parameter, its .grad, the version of that,
    # and whether it is not all zeros.
    averages: list[tuple[Tensor, Tensor, int, Tensor]] = field(default_factory=list)
    # When the tensors in `said` are computed, on the streams that do it.
    moments: list[After] = field(default_factory=list)
    # Of what holds back those who add to `averages`, until these have been looked at.
    handles: list[RemovableHandle] = field(default_factory=list)
    forwards: int = 0  # in grad mode

    def note_average(self, param: Tensor, grad: Tensor, home: HomeStreams) -> None:
        """Note that a ``.grad`` holds an average now, unless it is all zeros."""
        home.follow(grad.device)
        self.averages.append((param, grad, grad._version, grad.detach().any()))
        if grad.is_cpu:
            return
        looked = After(grad.device)

        @untraced
        def wait(_grads: object) -> None:
            looked.hold_back()

        # The stream that adds to this .grad may be another one.
        node = torch.autograd.graph.get_gradient_edge(param).node
        self.handles.append(node.register_prehook(wait))

    def ended(self) -> None:
        """Let gradients no longer wait for `note_average`."""
        for handle in self.handles:
            handle.remove()

    def is_stale(self) -> Tensor | bool:
        """Return whether a ``.grad`` with averages was changed since `look`.

        Zeros do not count. The answer is a bool tensor, which is not read here, or
        False if no ``.grad`` was changed at all.
        """
        found = [
            is_average
            for param, grad, version, is_average in self.averages
            if param.grad is not grad or grad._version != version
        ]
        if not found:
            return False
        device = found[0].device  # a module may be on several
        return torch.stack([each.to(device) for each in found]).any()

    @property
    def flags(self) -> int:
        """The flags of this rank added up, without STALE, which a device may have."""
        calls = len(self.said)
        flags = SILENT * (not calls)
        if calls == self.forwards > 1:
            flags += EACH
        elif 0 < calls < self.forwards:
            flags += FEWER
        return flags


class ItemCounts(Observer):
    """Count this rank's items, send them with a reduction, and read those of all ranks.

    A reducer has one only with ``average_over="items"``. In `finishing` it sets `scale`
    to what makes sums of gradients means over all items.

    Args:
        communicator: The communicator of the ranks.
        device: The device of the gradients, on which the counts travel.
        sampled: Returns parameters whose gradients have arrived when counts are sent.
        home: The script's streams on the devices of the module.
    """

    def __init__(
        self,
        communicator: Communicator,
        device: torch.device,
        sampled: Callable[[], Sequence[Tensor]],
        home: HomeStreams,
    ) -> None:
        self.exchange = Exchange(
            "the sum of item counts",
            (3, torch.float64),
            device,
            communicator,
            by_rank=True,
        )
        self._communicator, self._device = communicator, device
        self._sampled, self.home = sampled, home
        self._lock = threading.Lock()
        self.divisor = 1  # by which gradients were divided before they travelled
        # What reduced gradients are multiplied by: a tensor if only the device knows.
        self.scale: float | Tensor = 1.0
        self._step = _Step()
        # Averages are in .grad, or about to be written there, and no backward has begun
        # since.
        self.holds_averages = False
        # What the ranks said for the last reduction: a float64 tensor of the shape
        # (ranks, 3), on the device.
        self._facts: Tensor | None = None
        self._late: Download | None = None  # see `check`
        # The id of a graph task, and whether all its losses are for 0 items: a tensor
        # on a device.
        self._weighed: tuple[int, list[Mapping[torch.device, Tensor]]] | None = None

    # -- what this rank says -----------------------------------------------------------

    def add(self, count: object, loss: object = None) -> None:
        """Add the items of one micro-batch to this rank's.

        Args:
            count: The number of items, or a tensor of it. A tensor is copied, and the
                host reads it only if it is on the CPU.
            loss: The sum of their losses, a number or a tensor of one, which is needed
                only for the mean loss. Items without a loss make that NaN.

        Raises:
            TypeError: An argument is no real number.
            ItemCountError: This rank's counts were sent already, and the backward that
                sent them still runs.
        """
        if self.exchange.is_open:
            raise ItemCountError(
                explain(
                    self._communicator.rank,
                    "Items are counted after this step's counts were sent.",
                    remedy="count all items of a step before its first synchronised "
                    "backward(); after one that failed, call reset() on all ranks",
                )
            )
        n = number_of("The number of items", count)
        if loss is not None:
            told = number_of("The loss", loss)
        elif isinstance(n, Tensor):
            told = torch.where(n == 0, 0.0, math.nan)
        else:
            told = math.nan if n else 0.0
        numbers = [each for each in (n, told) if isinstance(each, Tensor)]
        self._step.moments += map(After, {n.device for n in numbers if not n.is_cpu})
        self._step.said.append((n, told))

    def note_forward(self) -> None:
        """Count a forward in grad mode; `flags` compares it with the calls of `add`."""
        self._step.forwards += 1

    def look(self) -> None:
        """Note which ``.grad`` hold averages, when a backward begins.

        New gradients that are added to averages would give a sum that is no mean. So if
        such a ``.grad`` changes before the counts are sent, the step fails on all ranks
        (STALE). It may hold zeros, and it may hold averages that the backward leaves
        alone. To save time only three parameters are looked at, the smallest ones that
        ``sampled()`` returns, and only in the first backward after a reduction.
        """
        if self.holds_averages:
            self.holds_averages = False
            for param in sorted(self._sampled(), key=Tensor.numel)[:3]:
                if (grad := param.grad) is not None and grad.layout is torch.strided:
                    self._step.note_average(param, grad, self.home)

    def note_weighed(self, task: int, is_zero: Mapping[torch.device, Tensor]) -> None:
        """Note that a backward has begun on a loss that was weighed by a count.

        Args:
            task: The id of the graph task.
            is_zero: Whether the loss is for 0 items, for each device of the module: a
                bool tensor there, which is not read.
        """
        with self._lock:  # losses on two devices come in two threads
            if self._weighed is None or self._weighed[0] != task:
                self._weighed = task, []
            self._weighed[1].append(is_zero)

    def cleaned(self, task: int, grads: Sequence[Any]) -> tuple[Any, ...] | None:
        """Return gradients that are zeros if all losses of a backward are for 0 items.

        In that case they might be NaN. Nothing is read on the host.

        Args:
            task: The id of the graph task.
            grads: Gradients in it, each a tensor or None.

        Returns:
            As many gradients, or None if nothing may have to change, because no loss of
            the task was weighed by a count on a device (`note_weighed`).
        """
        if self._weighed is None or self._weighed[0] != task:
            return None
        losses = self._weighed[1]
        return tuple(
            None
            if grad is None
            else grad.masked_fill(_are_zero(losses, grad.device), 0)
            for grad in grads
        )

    @contextmanager
    def counting_zero(self) -> Iterator[None]:
        """Return a context in which this rank has 0 items; its own stay for later."""
        mine = self._step, self.holds_averages
        self._step = _Step([(0.0, 0.0)])
        try:
            yield
        finally:
            self._step, self.holds_averages = mine

    def set_aside(self) -> Callable[[], None]:
        """Count from 0, as if nothing had been counted or averaged in this step.

        Returns:
            A function that forgets what was counted since, and goes on with this step.
        """
        mine = self._step, self.holds_averages, self._weighed
        self._step = _Step()

        def put_back() -> None:
            self._step.ended()
            self._step, self.holds_averages, self._weighed = mine

        return put_back

    # -- what travels ------------------------------------------------------------------

    def launching(self) -> None:
        """Start to exchange the counts, and count from 0 for the next step.

        All ranks call it together. Until `finishing`, `add` raises. It waits for no
        GPU.
        """
        step, self._step = self._step, _Step()
        step.ended()
        message = self.exchange.blank()
        row = message.view(-1, 3)[self._communicator.rank]
        if row.is_cpu:
            self._write(step, row)
        else:
            self._write_on_device(step, row)
        self.exchange.start(message)

    def _write(self, step: _Step, row: Tensor) -> None:
        """Write this rank's flags, count and loss to its row of the message."""
        for moment in step.moments:  # the module is on the CPU, a count on a device
            moment.wait()
        flags = step.flags + STALE * bool(step.is_stale())
        counts = [float(count) for count, _ in step.said]
        losses = [float(loss) for _, loss in step.said]
        said = [flags, sum(counts), sum(losses)]
        row.copy_(torch.tensor(said, dtype=torch.float64, device="cpu"))

    def _write_on_device(self, step: _Step, row: Tensor) -> None:
        """Write what `_write` does, without waiting for the device."""
        counts = [count for count, _ in step.said]
        losses = [loss for _, loss in step.said]
        for moment in step.moments:
            moment.hold_back()
        # From here on this stream reads what others have computed.
        use_here(*counts, *losses, *(is_average for *_, is_average in step.averages))
        is_stale = step.is_stale()
        row[_FLAGS].fill_(step.flags)  # what is assigned comes from the host, on CUDA
        if isinstance(is_stale, Tensor):
            row[_FLAGS] += is_stale.to(row, non_blocking=True) * STALE
        row[_COUNT] = total(counts, row.device)
        row[_LOSS] = total(losses, row.device)

    def finishing(self, *, applies_grads: bool) -> None:
        """Take all ranks' counts, and set the scale that makes means of sums.

        From now on `add` counts again. On the CPU this waits for the counts. On a
        device the scale is a tensor, and the host does not wait, so that only `check`
        can raise. With ``applies_grads`` that would
        be too late, and it is called here.

        Raises:
            ItemCountError: As `refuse_counts` says.
        """
        self.holds_averages = True
        if self._device.type == "cpu":
            self._facts = facts = self.exchange.take().view(-1, 3)
            rows = facts.tolist()
            refuse_counts(self._communicator.rank, rows)
            self.scale = self.divisor / sum([row[_COUNT] for row in rows])
            return
        # The counts are there long before the last gradient. A stream of our own brings
        # them to the host, so that `check` does not wait for the rest of the backward.
        with on_side_stream(self._device):
            self._facts = facts = self.exchange.take().view(-1, 3)
            self._late = Download(facts)
            arrived = After(self._device)
        arrived.hold_back()
        use_here(facts)
        self.scale = torch.reciprocal(facts[:, _COUNT].sum()) * self.divisor
        if applies_grads:
            self.check()

    @property
    def totals(self) -> ItemTotals | None:
        """The items of the last backward, even if it raised; None before the first."""
        if (facts := self._facts) is None:
            return None
        use_here(facts)  # the next step drops it
        count = facts[:, _COUNT].sum()
        return ItemTotals(count, facts[:, _LOSS].sum() / count, facts[:, _COUNT])

    def check(self) -> None:
        """Wait for the last backward's counts on a device; raise if they give no mean.

        On the CPU `finishing` has done that, and there is nothing left to do. The same
        is true of a second call.

        Raises:
            ItemCountError: As `refuse_counts` says.
        """
        late, self._late = self._late, None
        if late is not None:
            refuse_counts(self._communicator.rank, late.wait().tolist())

    def abandon(self) -> None:
        """Forget what was counted and sent, but keep `totals`."""
        self._step.ended()
        self._step, self._late, self._weighed = _Step(), None, None
        self.holds_averages = False


def _are_zero(
    losses: Sequence[Mapping[torch.device, Tensor]], device: torch.device
) -> Tensor:
    """Return whether all losses are for 0 items, as a bool tensor on a device.

    Each loss has an answer for the devices of the module. It is computed there in the
    forward, because a backward on one device cannot follow streams of another.
    """
    found = [
        each[device] if device in each else next(iter(each.values())).to(device)
        for each in losses
    ]
    use_here(*found)  # a forward on another stream may have made them
    return functools.reduce(torch.logical_and, found)
