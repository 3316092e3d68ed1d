"""Let other ranks compute again what a rank has computed, and name one that is wrong.

Broken hardware computes wrong numbers without an error, and a repeat on the same device
may repeat the fault. But a logical rank has the same bits on any rank. So in an audited
step the ranks compare checksums::

    begin    of the parameters, which are equal on all ranks
    before   each rank first does a logical rank of another one, and drops its gradients
    loop     of the gradients where that other rank does it
    after    slices of buckets are added up once more, each by another rank. Then all
             checksums are gathered. Only if some differ, logical ranks are computed
             once more, also by a third rank, which decides
    judge    every rank raises, or warns, with the same words

What a rank does for others leaves no trace in gradients, buffers, counts of items and
the guard's notes (`Audit.set_aside`). `digests` has the checksums, `verdicts` and
`inquiry` decide.
"""

from __future__ import annotations

import json
import logging
import socket
import zlib
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field

import torch
from torch import Tensor
from torch.autograd.grad_mode import _unsafe_preserve_version_counter

from minidp import comm
from minidp.comm import ProcessGroup
from minidp.console import warn
from minidp.core import Observer, Reducer
from minidp.errors import LogicalRankError, explain
from minidp.layout import BucketPlan

from .arrived import Grads
from .averaging import TreeAveraging
from .digests import Digests, digests_of, total
from .inquiry import Details, Inquiry, Row, Settings, other_settings
from .options import AuditOptions, conditions
from .start import Start
from .tree import block
from .verdicts import Pair, pairs

logger = logging.getLogger("minidp")
# Does a logical rank, and returns its gradients, or None after `reset`.
Turn = Callable[[int], Generator[int, None, Grads | None]]


@dataclass(eq=False)
class _Step:
    """What this rank has seen of a step that is audited."""

    number: int
    pairs: list[Pair]  # by owner
    own: Pair  # this rank is the owner
    other: Pair  # this rank is the auditor
    is_last: bool  # our logical rank that is audited is the last one of this rank
    weights: Digests = field(default_factory=Digests)  # by name
    own_grads: Digests = field(default_factory=Digests)  # by index of the parameter
    own_buffers: Digests = field(default_factory=Digests)  # by name
    other_grads: Mapping[int, int] = field(default_factory=dict)
    other_buffers: Mapping[str, int] = field(default_factory=dict)
    # What ``.grad`` held when the other rank's logical rank began.
    began_with: Grads | None = None
    # By number: the bucket, and copies of what this rank has brought to it.
    pieces: dict[int, tuple[BucketPlan, list[Tensor]]] = field(default_factory=dict)
    received: Digests = field(default_factory=Digests)  # by bucket and slice
    # Parameters as they were, if the backward steps them.
    params: list[Tensor] | None = None
    stepped: list[Tensor] | None = None  # what they are now, while they are put aside
    start: Start | None = None  # once the ranks have reduced


class Audit:
    """Audits some steps of the logical ranks of one wrapper.

    Args:
        reducer: The reducer of the wrapper, or a weak proxy of it.
        leaves: How many logical ranks there are.
        options: Which steps are audited, and what happens if ranks differ.
        weights: Returns what has to be equal on all ranks, by name.
        remember: Returns a function that lets the wrapper be as it is now.
    """

    def __init__(
        self,
        reducer: Reducer,
        leaves: int,
        options: AuditOptions,
        weights: Callable[[], Mapping[str, Tensor]],
        remember: Callable[[], Callable[[], None]],
    ) -> None:
        self._reducer, self._communicator = reducer, reducer.communicator
        averaging = reducer.queue.averaging
        assert isinstance(averaging, TreeAveraging)
        self._averaging = averaging
        self._leaves, self._options = leaves, options
        self._weights, self._remember = weights, remember
        self._now: _Step | None = None
        self._alarm = ""  # what `judge` says
        # By subject, the step of the first alarm, and how many there were.
        self._alarms: dict[tuple[object, ...], tuple[int, int]] = {}
        self._last_good: int | None = None  # the last step without a difference
        self._told: Sequence[int] = ()  # settings of the ranks, when a warning told it

    def connect(self) -> None:
        """Create what an audit needs; all ranks call it, and wait for each other."""
        if self._communicator.size > 1:
            with self._communicator.blocking("connecting the ranks for their audit"):
                self._group()
            return
        logger.warning(
            "[rank 0] audit_every=%d audits nothing: there is one rank, and nobody else"
            " who could compute its logical ranks again.",
            self._options.every,
        )

    # -- an audited step, in the order of events ---------------------------------------

    def begin(self, step: int) -> bool:
        """Return whether a step is audited, and begin with that."""
        self.abandon()
        rank, ranks = self._communicator.rank, self._communicator.size
        if ranks == 1 or step % self._options.every:
            return False
        everybody = pairs(step // self._options.every, self._leaves, ranks)
        other = next(each for each in everybody if each.auditor == rank)
        is_last = everybody[rank].leaf == block(self._leaves, ranks, rank)[-1]
        now = self._now = _Step(step, everybody, everybody[rank], other, is_last)
        now.weights.add(self._weights())
        if any(each.uses_grads for each in self._reducer.queue.observers.everybody):
            now.params = [param.detach().clone() for param in self._reducer.params]
        self._averaging.watch = self
        return True

    def before(self, start: Start, turn: Turn) -> Generator[int, None, None]:
        """Do a logical rank of another rank, before this rank's own."""
        assert self._now is not None
        now = self._now
        grads = yield from turn(now.other.leaf)
        if grads is not None:
            now.other_grads = digests_of(dict(enumerate(grads)))
            now.other_buffers = digests_of(start.buffers())
            now.began_with = start.begin_again()

    def has_computed(self, leaf: int, grads: Grads) -> None:
        """Look at the gradients of a logical rank that is not this rank's last one."""
        if self._now is not None and leaf == self._now.own.leaf:
            self._now.own_grads.add(dict(enumerate(grads)))

    def filled(self, plan: BucketPlan, views: Sequence[Tensor]) -> None:
        """Look at the gradients of this rank's last logical rank, in a bucket."""
        if self._now is not None and self._now.is_last:
            self._now.own_grads.add(dict(zip(plan.indices, views, strict=True)))

    def has_left(self, leaf: int, buffers: Callable[[], Mapping[str, Tensor]]) -> None:
        """Look at the module buffers that a logical rank of this rank has left."""
        if self._now is not None and leaf == self._now.own.leaf:
            self._now.own_buffers.add(buffers())

    def launched(self, plan: BucketPlan, pieces: Sequence[Tensor]) -> None:
        """Keep what this rank brings to a bucket."""
        if self._now is not None and plan.numel:
            kept = [*pieces[:-1], pieces[-1].clone()]
            self._now.pieces[plan.number] = plan, kept

    def arrived(self, plan: BucketPlan, payload: Tensor) -> None:
        """Look at the sums of a bucket."""
        if self._now is not None and plan.numel:
            width = self._averaging.slices([payload], self._group()).width
            parts = enumerate(payload.split(width))
            self._now.received.add({(plan.number, k): part for k, part in parts})

    def after(
        self, start: Start, turn: Turn, *, may_repeat: bool
    ) -> Generator[int, None, None]:
        """Compare what the ranks have; find out who is wrong if they differ.

        Args:
            start: What logical ranks begin with.
            turn: Does one.
            may_repeat: Whether there may be further turns on this rank.
        """
        assert self._now is not None
        now, now.start = self._now, start
        # Streams of buckets may have made checksums and copies, all of it before the
        # sums for which this stream has waited.
        is_comparable = start.began_with(now.began_with)
        if not is_comparable:
            _warn_of_late_zeros(self._communicator.rank)
        summed = self._add_up_again(1)
        received = now.received.read()
        settings = _settings(self._communicator.device)
        mine = Row(
            int(may_repeat),
            zlib.crc32(json.dumps(settings).encode()),
            _total_by_name(now.weights.read()),
            total(now.own_grads.read().items()),
            _total_by_name(now.own_buffers.read()),
            int(is_comparable),
            total(now.other_grads.items()),
            _total_by_name(now.other_buffers),
            total(summed.items()),
            tuple(
                total((n, found) for (n, k), found in received.items() if k == owner)
                for owner in range(self._communicator.size)
            ),
        )
        rows = [Row.read(each) for each in self._gather(mine.plain)]
        inquiry = Inquiry(now.number, now.pairs, rows)
        told = [row.settings for row in rows]
        is_told = len({*told}) == 1 or told == self._told
        if inquiry.is_needed or not is_told:
            details = self._gather_details(settings, summed, received)
            if not is_told:
                self._told = told
                self._warn_of_settings([each.settings for each in details])
            inquiry.begin(details)
        if inquiry.is_needed:
            yield from self._inquire(inquiry, turn)
        else:
            self._last_good = now.number
        if self._now is now:
            self._end()

    def _inquire(self, inquiry: Inquiry, turn: Turn) -> Generator[int, None, None]:
        now = self._now
        assert now is not None
        assert now.start is not None
        while (pair := inquiry.next_pair()) is not None:
            judges, mine = inquiry.judges(pair), [0, 0]
            if self._communicator.rank in judges:
                grads = yield from turn(pair.leaf)
                if grads is None:
                    return
                mine[0] = total(digests_of(dict(enumerate(grads))).items())
                mine[1] = _total_by_name(digests_of(now.start.buffers()))
            votes = self._gather(mine)
            inquiry.judge_pair(pair, {r: (votes[r][0], votes[r][1]) for r in judges})
        if inquiry.slices:
            shifts = range(min(3, self._communicator.size))
            sums = [_with_texts(self._add_up_again(shift)) for shift in shifts]
            by_rank = [json.loads(each) for each in self._gather_text(json.dumps(sums))]
            by_shift = {shift: [each[shift] for each in by_rank] for shift in shifts}
            has_owners, names = self._averaging.has_owners, self._names_of_slices()
            inquiry.judge_sums(by_shift, names, has_owners=has_owners)
        rank, has_stepped = self._communicator.rank, now.params is not None
        first, count = self._alarms.get(inquiry.subject, (now.number, 0))
        self._alarms[inquiry.subject] = first, count + 1
        if count and self._options.action == "warn":
            self._alarm = inquiry.text_again(rank, first, count)
        else:
            self._alarm = inquiry.text(rank, self._last_good, has_stepped=has_stepped)

    def judge(self) -> None:
        """Raise or warn, as the options say, if the ranks have differed.

        Raises:
            LogicalRankError: They have.
        """
        alarm, self._alarm = self._alarm, ""
        if alarm and self._options.action == "raise":
            raise LogicalRankError(alarm)
        if alarm:
            warn(alarm)

    def abandon(self) -> None:
        """Forget the step that is audited."""
        self._alarm = ""
        if self._now is not None:
            self._end()

    def _put_parameters_back(self) -> None:
        now = self._now
        if now is not None and now.stepped is not None:
            _overwrite(self._reducer.params, now.stepped)
            now.stepped = None

    def _end(self) -> None:
        self._put_parameters_back()
        self._now, self._averaging.watch = None, None
        self._reducer.queue.observers.tell_all()

    # -- turns that leave no trace -----------------------------------------------------

    def set_aside(self, witness: Observer) -> Callable[[], None]:
        """Let the next forwards and backwards be as if they had not been.

        Args:
            witness: The only observer that is told of gradients meanwhile.

        Returns:
            A function that ends this.
        """
        assert self._now is not None
        reducer, start, params = self._reducer, self._now.start, self._now.params
        items, observers = reducer.queue.averaging.items, reducer.queue.observers
        ends = [reducer.ledger.set_aside(), self._remember(), observers.tell_all]
        observers.tell_only(witness)
        if items is not None:
            ends.append(items.set_aside())
        if start is not None:
            averages = start.set_aside()
            ends.append(lambda: start.put_back(averages))
            if params is not None:
                stepped = [param.detach().clone() for param in reducer.params]
                self._now.stepped = stepped
                _overwrite(reducer.params, params)
                ends.append(self._put_parameters_back)

        def put_back() -> None:
            for end in ends:
                end()

        return put_back

    # -- what travels ------------------------------------------------------------------

    def _group(self) -> ProcessGroup:
        return comm.side_group(self._communicator.group, "audit of logical ranks")

    def _device(self) -> torch.device:
        """Return where small messages lie. A side group is Gloo."""
        is_side = self._group() is not self._communicator.group
        return torch.device("cpu") if is_side else self._communicator.device

    @contextmanager
    def _meeting(self) -> Iterator[None]:
        """Let an error in the block mark the reducer as failed."""
        try:
            with self._communicator.blocking("comparing what the ranks have computed"):
                yield
        except BaseException as error:
            self._reducer.fail(error)
            raise

    def _gather(self, numbers: Sequence[int]) -> list[list[int]]:
        with self._meeting():
            return comm.gather_integers(numbers, self._group(), self._device())

    def _gather_text(self, text: str) -> list[bytes]:
        with self._meeting():
            return comm.gather_bytes(text.encode(), self._group(), self._device())

    def _gather_details(
        self,
        settings: Settings,
        summed: Mapping[int, int],
        received: Mapping[tuple[int, int], int],
    ) -> list[Details]:
        now, names = self._now, self._reducer.names
        assert now is not None
        mine = Details(
            host=socket.gethostname(),
            settings=settings,
            weights=now.weights.read(),
            own={names[i]: found for i, found in now.own_grads.read().items()},
            own_buffers=now.own_buffers.read(),
            other={names[i]: found for i, found in now.other_grads.items()},
            other_buffers=now.other_buffers,
            summed=_with_texts(summed),
            received={f"{n}/{k}": found for (n, k), found in received.items()},
        )
        texts = self._gather_text(json.dumps(asdict(mine)))
        return [Details(**json.loads(each)) for each in texts]

    def _add_up_again(self, shift: int) -> dict[int, int]:
        """Add up slice ``rank + shift`` of each bucket, and return their checksums.

        All ranks call it together.
        """
        now, found = self._now, Digests()
        assert now is not None
        with self._meeting():
            for number, (plan, pieces) in sorted(now.pieces.items()):
                group = self._group() if plan.device.type == "cpu" else None
                group = group or self._communicator.group
                slices = self._averaging.slices(pieces, group)
                arrived, work = slices.exchange(shift)
                comm.wait_for_message(work, plan.device, group)
                total_of_slice = slices.add_up(arrived)
                owner = (self._communicator.rank + shift) % self._communicator.size
                # Without the zeros that fill it up, as `arrived` has seen it.
                length = max(0, pieces[-1].numel() - owner * slices.width)
                found.add({number: total_of_slice[:length]})
        return found.read()

    def _names_of_slices(self) -> dict[str, list[str]]:
        """Return the parameters that each slice of each bucket has a part of."""
        assert self._now is not None
        found: dict[str, list[str]] = {}
        for number, (plan, pieces) in self._now.pieces.items():
            width = self._averaging.slices(pieces, self._group()).width
            reals = 2 if plan.dtype.is_complex else 1
            for owner in range(self._communicator.size):
                found[f"{number}/{owner}"] = [
                    self._reducer.names[i]
                    for i, slot in zip(plan.indices, plan.slots, strict=True)
                    if reals * slot.offset < (owner + 1) * width
                    and owner * width < reals * (slot.offset + slot.numel)
                ]
        return found

    def _warn_of_settings(self, settings: Sequence[Settings]) -> None:
        texts = other_settings(settings, range(len(settings)))
        remedy = "give all ranks the same ones, if audits find differences"
        what = f"The ranks compute in different ways. {'. '.join(texts)}."
        warn(explain(self._communicator.rank, what, remedy=remedy))


def _settings(device: torch.device) -> dict[str, str]:
    """Return what decides about the bits that this rank computes, as texts by name."""
    kernels = torch.backends.cpu.get_cpu_capability()
    return {**conditions(device), "CPU kernels": kernels}


def _total_by_name(found: Mapping[str, int]) -> int:
    return total((zlib.crc32(name.encode()), number) for name, number in found.items())


def _with_texts(found: Mapping[int, int]) -> dict[str, int]:
    return {str(number): value for number, value in found.items()}


@torch.no_grad()
def _overwrite(params: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    """Give parameters other values for a while, of which nobody is to take note."""
    with _unsafe_preserve_version_counter(tuple(params)):
        for param, value in zip(params, values, strict=True):
            param.copy_(value)


def _warn_of_late_zeros(rank: int) -> None:
    warn(
        explain(
            rank,
            "This step was audited in part only: .grad held other values when the first"
            " logical rank of this rank began than when it began one of another rank.",
            remedy="call zero_grad() after the optimizer's step, or in the first turn "
            "of the loop, whatever logical rank that is",
        )
    )
