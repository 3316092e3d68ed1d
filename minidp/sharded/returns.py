"""Bring the new values of parameters from their owners back to all ranks.

Each owner sends its stretch of each bucket, which the others write to their parameters.
In between the values lie in the bucket's buffer, whose gradients nobody needs any more.
(Rows of a divided parameter need no buffer: `split_bucket`.)
The buckets go in the order in which the next forward needs their parameters: the last
one first. Either the step waits for all of them, or each parameter for its own bucket
when it is used (`awaited`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from collections.abc import Set as AbstractSet
from contextlib import AbstractContextManager, suppress
from functools import partial
from itertools import chain, zip_longest

import torch
from torch import Tensor, nn
from torch.autograd.grad_mode import _unsafe_preserve_version_counter

from minidp import comm
from minidp.console import warn
from minidp.core import Reducer, copy_each, traced, without_user_modes
from minidp.errors import explain
from minidp.shared_memory import SharedBuffer
from minidp.trace import Moment

from .awaited import await_values, can_be_awaited, lock, release
from .bucket import Room, ShardedBucket
from .owners import Stretch
from .pieces import Piece, Pieces, cut

CHUNK_BYTES = 4 * 2**20  # of one rank's parameters, at least, that come together

_DOING = "waiting for the new values of parameters"


class Returns:
    """The ways back of all parameters.

    Args:
        reducer: The reducer, which holds this object.
        are_awaited: Whether parameters wait for their values when they are used.
    """

    def __init__(self, reducer: Reducer, *, are_awaited: bool = False) -> None:
        self._reducer = reducer
        self._are_awaited = are_awaited
        self._open: list[Return] = []

    def start(self, stepper: int | None) -> None:
        """Start to send what this rank owns, and to get what the others own.

        All ranks must call it together, when no values of this optimizer are on their
        way any more.

        Args:
            stepper: The number of the optimizer whose parameters are meant; None for
                all.
        """
        for number in reversed(range(len(self._reducer.queue.buckets))):
            self.start_bucket(number, stepper)

    def start_bucket(self, number: int, stepper: int | None) -> None:
        """Start to bring the parameters of one bucket back; see `start`."""
        bucket = self._reducer.queue.buckets[number]
        assert isinstance(bucket, ShardedBucket)
        stretches = bucket.stretches(stepper)
        if any(each.numel for each in stretches):
            self._open += _returns_of(
                bucket, stretches, stepper, may_wait=self._are_awaited
            )

    def settle(self) -> None:
        """Let parameters wait for values that are on their way, or wait for them here.

        Raises:
            CollectiveError: Another rank does not send its share.
        """
        if not self._are_awaited:
            self.finish()
            return
        for each in self._open:
            each.let_wait(self._finish)
        for each in [*self._open]:
            if each.brings_values and not each.is_awaited:
                self._finish(each)

    def finish(self, stepper: int | None = None) -> None:
        """Wait for values that are on their way, and write them to parameters.

        Args:
            stepper: The number of the optimizer whose parameters are meant; None for
                all.

        Raises:
            CollectiveError: Another rank does not send its share.
        """
        for each in [*self._open]:
            if stepper is None or each.stepper in (None, stepper):
                self._finish(each)

    def _finish(self, one: Return) -> None:
        with lock():
            if one not in self._open:  # another thread was faster
                return
            try:
                one.finish()
            except BaseException as error:
                self.drop()
                with suppress(ReferenceError):  # the wrapper is gone
                    self._reducer.fail(error)
                raise
            self._open.remove(one)

    def drop(self) -> None:
        """Forget what is on its way, without waiting."""
        with lock():
            for each in self._open:
                each.drop()
            self._open = []


def _returns_of(
    bucket: ShardedBucket,
    stretches: Sequence[Stretch],
    stepper: int | None,
    *,
    may_wait: bool,
) -> list[Return]:
    """Start to bring the parameters of one bucket back.

    Messages bring some parameters at a time, those first that a forward needs first.
    """
    plan, shared = bucket.plan, bucket.shared
    chunks: Iterable[Sequence[Stretch]] = [stretches]
    # On a device no parameter waits for its own, and one that is divided is alone.
    if shared is None and plan.device.type == "cpu" and len(plan.slots) > 1:
        limit = CHUNK_BYTES // plan.dtype.itemsize
        of_ranks = [each.chunks(plan, limit) for each in stretches]
        chunks = zip_longest(*of_ranks, fillvalue=Stretch(range(0), 0, 0))
    # Before there are tensors of our own in the memory of a parameter.
    can_wait = {p for p in bucket.params if may_wait and can_be_awaited([p])}
    room = bucket.room() if shared is None else bucket.given_room(shared)
    return [Return(bucket, chunk, stepper, room, can_wait=can_wait) for chunk in chunks]


class Return:
    """The way back of parameters in one bucket, which the constructor starts.

    Args:
        bucket: The bucket.
        stretches: What each rank owns of it, or a part of that.
        stepper: The number of the optimizer whose parameters these are; None for all.
        room: The memory through which the values travel.
        can_wait: The parameters of the bucket that can wait for their values.
    """

    def __init__(
        self,
        bucket: ShardedBucket,
        stretches: Sequence[Stretch],
        stepper: int | None,
        room: Room,
        *,
        can_wait: AbstractSet[nn.Parameter] = frozenset(),
    ) -> None:
        self._bucket, self._stretches, self.stepper = bucket, stretches, stepper
        self._communicator = communicator = bucket.communicator
        self.plan, self.observers = bucket.plan, bucket.observers  # to be `traced`
        self._foreign = [  # from where this rank gets values
            (rank, stretch)
            for rank, stretch in enumerate(stretches)
            if rank != communicator.rank
        ]
        slots = dict.fromkeys(k for _, each in self._foreign for k in each.slots)
        self._params: list[nn.Parameter] = [bucket.params[k] for k in slots]
        self._can_wait = bool(self._params) and can_wait >= {*self._params}
        self.brings_values = bool(self._params)  # or this rank only sends
        self.is_awaited = False
        self._room = room
        self._works: list[comm.Work] = []
        self._start()

    @traced("send values", before=Moment.VALUES_STARTED, after=Moment.VALUES_SENT)
    def _start(self) -> None:
        bucket, communicator = self._bucket, self._communicator
        if bucket.shared is not None:
            self._give(bucket, bucket.shared)
        elif communicator.size > 1:
            own = self._pack(self._stretches[communicator.rank])
            group = communicator.group
            if comm.streams_wait(group, self.plan.device):
                self._spread(own)
            elif comm.is_python_group(group):
                self._broadcast(own)
            else:
                self._send_in_pieces(own)

    def _broadcast(self, own: Tensor) -> None:
        """Send with what any group has."""
        communicator = self._communicator
        for rank, stretch in enumerate(self._stretches):
            if stretch.numel:
                is_own = rank == communicator.rank
                flat = own if is_own else self._room.real(stretch)
                with self._sending():
                    work = comm.start_broadcast(flat, communicator.group, rank)
                    communicator.note_started(work, self._bucket.plan.device)
                self._works.append(work)

    def _spread(self, own: Tensor) -> None:
        """Send to where the values are written to parameters from, in one launch."""
        flats = [self._room.real(stretch) for stretch in self._stretches]
        flats[self._communicator.rank] = own
        with self._sending():
            work = comm.start_spreading(flats, self._communicator.group)
            self._communicator.note_started(work, self.plan.device)
        self._works.append(work)

    def _send_in_pieces(self, own: Tensor) -> None:
        group = self._communicator.group
        flats = [self._room.real(stretch) for stretch in self._stretches]
        pieces = []
        for parts in cut([len(flat) for flat in flats], own):
            mine = parts[group.rank()]
            sent = own[mine.start : mine.stop]
            widths = [part.stop - part.start for part in parts]
            with self._sending():
                arrived, work = comm.start_sharing(sent, widths, group)
                self._communicator.note_started(work, self._bucket.plan.device)
            places = [
                flat[part.start : part.stop]
                for flat, part in zip(flats, parts, strict=True)
            ]
            write = partial(_write, places, arrived)
            pieces.append(Piece(work, write, sent))
        self._works.append(Pieces(pieces, group))

    def _sending(self) -> AbstractContextManager[object]:
        number = self._bucket.plan.number
        return self._communicator.watching("sending new values of parameters", number)

    def _give(self, bucket: ShardedBucket, shared: SharedBuffer) -> None:
        """Write own values to memory from which the other ranks read them."""
        number = bucket.plan.number
        with self._communicator.watching("giving new values of parameters", number):
            self._pack(self._stretches[self._communicator.rank])
            work = shared.give()
            self._communicator.note_started(work, bucket.plan.device)
        self._works.append(work)

    def _pack(self, stretch: Stretch) -> Tensor:
        """Return this rank's new values in memory that stays as it is."""
        views, flat = self._room.own(stretch)
        if views:
            copy_each(views, self._bucket.values(stretch))
        return flat

    def let_wait(self, finish: Callable[[Return], None]) -> None:
        """Let parameters wait for their values, if nobody can read these otherwise.

        Args:
            finish: What they call when they are used.
        """
        if self._can_wait and not self.is_awaited:
            await_values(self._params, partial(finish, self))
            self.is_awaited = True

    @traced("wait for values", before=Moment.VALUES_AWAITED, after=Moment.VALUES_BACK)
    def finish(self) -> None:
        """Wait for the values of the other ranks, and write them to parameters."""
        communicator = self._communicator
        for work in self._works:
            with communicator.watching(_DOING, self._bucket.plan.number):
                communicator.wait(work)
        self._works = []
        if self._params and communicator.size > 1:
            if self.is_awaited:
                self._write_where_used()
            elif self._room.is_home:
                torch.autograd.graph.increment_version(self._params)
            else:
                self._bring()

    def _bring(self) -> None:
        places = [p for _, each in self._foreign for p in self._bucket.values(each)]
        pairs = (self._room.arrived(rank, each) for rank, each in self._foreign)
        copy_each(places, [*chain.from_iterable(pairs)])

    def _write_where_used(self) -> None:
        params = tuple(self._params)
        with (
            torch._C.DisableTorchFunctionSubclass(),
            without_user_modes(),
            torch.no_grad(),
            # The step has counted this change already.
            _unsafe_preserve_version_counter(params),
        ):
            if not self._room.is_home:
                self._bring()
        if shown := release(params):
            names = dict(zip(self._bucket.params, self._bucket.names, strict=True))
            warn(_shown_early(self._communicator.rank, [names[p] for p in shown]))

    def drop(self) -> None:
        """Forget the values that are on their way."""
        self._works = []
        if self.is_awaited:
            release(self._params)


def _shown_early(rank: int, names: Sequence[str]) -> str:
    return explain(
        rank,
        "another tensor has got the memory of a parameter while its new values were on "
        "their way, and showed old values until now.",
        expected="uses of which torch tells, so that they wait: `other.data = "
        "param.data`, `param.detach()`",
        found="one of which it tells nobody, as `other.data = param`, "
        "`other.set_(param)` and `torch.Tensor(param)`",
        names=names,
        remedy="name `param.data` there, or call sharded_step without "
        "overlap_param_gather",
    )


def _write(places: Sequence[Tensor], arrived: Sequence[Tensor]) -> None:
    # Gradients may lie in the same memory, and somebody may count their changes.
    with _unsafe_preserve_version_counter(tuple(places)):
        for place, values in zip(places, arrived, strict=True):
            if len(values):
                place.copy_(values)
