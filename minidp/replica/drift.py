"""Compare the replicas every so many steps (``check_replicas_every``).

Nothing makes replicas equal after the construction; they stay equal because all of them
apply the same averages. If one rank loads a checkpoint alone, or changes a parameter by
hand, the training goes on, and the loss gets worse without an error. So the ranks
compare a checksum of their parameters now and then::

    forward    each rank computes the checksum of its parameters and broadcast buffers
    backward   at its end, when the group is idle, the ranks compare one number each
    step       if they differed, they compare once more, after optimizer.step()

The second look is for training loops that move the weights on purpose, with local
gradients or with random numbers of each rank, and move them back before the step or
inside it. Each optimizer answers for the parameters that it holds. Where no step comes,
the ends of the next backwards have to do. There such weights are still moved, so with
"auto" a difference is refused only if it lasts from one backward to the next
(`lasting`).

With ``check_replicas_every="auto"`` a difference is accepted if there is a reason for
it: updates inside no_sync(), a comm hook of the user, or ``unsynced`` other than
"raise".

Every way back to training begins the schedule anew (`ReplicaCheck.restart`), because
there the replicas are most likely to differ. Where not all ranks are known to compare,
a collective could wait for ever. There each rank puts its checksum into the store, and
waits for nobody (`ReplicaCheck.meet`)::

    forward    each rank that wants to compare puts its checksum into the store
    backward   it cannot end before all ranks have begun it. So at its end all checksums
               are in the store, and are compared; or some rank does not want to
               compare, and the others forget theirs
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Literal, NamedTuple

import torch

from minidp import world
from minidp.comm import (
    exchange_device,
    gather_integers,
    group_store,
    has_store,
    post_json,
    read_json,
    waiting,
)
from minidp.config import AUTO
from minidp.console import warn
from minidp.core import BucketQueue, Observer
from minidp.errors import ReplicaMismatchError, explain, shortened

from .digest import digest_of, sum_of_bits
from .lasting import Deviation
from .rounding import are_close_on_all_ranks

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store

    from minidp.core import Ledger
    from minidp.hooks import CommHook

# In which steps "auto" compares. Steps 0 and 1 show a checkpoint that one rank has
# loaded; a comparison costs about as much as a step of a tiny model.
AUTO_STEPS = frozenset({0, 1, 100})
AUTO_EVERY = 1000
# In how many steps the replicas may differ before the second look, if no optimizer
# steps that could make them equal again.
PATIENCE = 10
CONFIRM_SECONDS = 10.0  # how long a rank waits for the others to step, too
POLL_SECONDS = 0.005
ROUNDING = 1e-3  # what counts as rounding, as a fraction of a tensor's largest element

# Why replicas may differ legally: bits, which the ranks exchange.
LOCAL_UPDATES = 1  # parameters were changed inside no_sync()
ON_PURPOSE = 2  # a foreign comm hook has run, or unsynced="ignore" excused a mistake
WARNED = 4  # unsynced="warn" made a warning of a mistake


class _Cause(NamedTuple):
    """Why replicas differ, as a sentence or "" if it is not known, and the remedy."""

    text: str
    remedy: str


_UNKNOWN = _Cause(
    "",
    "find what changes parameters on some ranks only: a checkpoint that was loaded on "
    "one rank (load it on all, or on rank 0 before wrapping, which broadcasts), "
    "a different seed with init_sync=False, an update by hand, random numbers, or "
    "unsynced='ignore'. Then load the last checkpoint on all ranks and call reset(), "
    "or call reset(copy_from=0) to copy rank 0's state, or wrap the module again. If "
    "parameters are meant to differ, put them on the list of ignored ones "
    "(_set_params_and_buffers_to_ignore_for_model), or pass check_replicas_every=0",
)
_ROUNDING = _Cause(
    " The difference is as small as rounding: different hardware, or kernels that are "
    "not deterministic, may be the cause.",
    "nothing, if that is the cause; else find what changes parameters on some ranks "
    "only. check_replicas_every=100 makes any difference an error. This is reported "
    "once",
)
_LOCAL = _Cause(
    " Parameters were updated inside no_sync(), where gradients stay local, and nobody "
    "has averaged them since.",
    "if the update was meant to use averaged gradients, take optimizer.step() and "
    "zero_grad() out of the no_sync() block (an indentation too deep). For local SGD, "
    "average the parameters before the next forward outside no_sync(). Then load the "
    "last checkpoint on all ranks. This is reported once",
)
_MISSED = _Cause(
    " A rank has missed steps that others have made ({}), and nothing has made the "
    "replicas equal since.",
    "call reset(copy_from=0) on all ranks, which copies rank 0's parameters, buffers "
    "and optimizer state, or load the same checkpoint of model and optimizers on all "
    "ranks, and call reset()",
)
_EXCUSED = _Cause(
    " Before, a mistake was only warned of, because of unsynced='warn': the replicas "
    "have trained apart since.",
    "fix what that warning named, then load the last checkpoint on all ranks. If the "
    "replicas are meant to differ, pass unsynced='ignore'. This is reported once",
)
_MOVED = _Cause(
    " Each rank moves its parameters by itself, to other values in each step, so it is "
    "not known whether the replicas would differ without that.",
    "nothing, if weights are moved for a forward and put back before the update, as "
    "noise of each rank is; else find what changes parameters on some ranks only. "
    "check_replicas_every=100 makes any difference an error. This is reported once",
)
# The checksums of all ranks, for each tensor that differs, by its name.
_Differences = Mapping[str, Sequence[int]]


class _Snapshot(NamedTuple):
    """One replica's checksum before a forward, and the tensors that it was taken of.

    It holds the tensors themselves and no copies, so optimizers may change them later.
    """

    step: int  # how many synchronised backwards have finished
    tensors: Mapping[str, torch.Tensor]  # parameters, by name, to be compared once more
    buffer_sums: Mapping[str, int]  # taken now, because a forward changes buffers
    digest: torch.Tensor
    was_hooked: bool  # whether a foreign comm hook made averages before
    place: str = ""  # where in the store the ranks compare; "" if by a collective


@dataclass
class Doubts:
    """Why replicas may differ since they were last found to be equal.

    The optimizer guard writes it, and a comparison that finds them equal clears it.
    """

    was_local: bool = False  # parameters changed inside no_sync()
    was_excused: bool = False  # a complaint did not become an error


class ReplicaCheck(Observer):
    """Compare the replicas of one wrapper every so many steps.

    The wrapper calls `begin` before each forward for which `is_due` holds. From then to
    the end of the backward this object is an observer of ``queue``, and its `finished`
    compares. If the replicas differed, the optimizer guard calls `confirm` after the
    next optimizer step.
    """

    awaits_step = True  # whether optimizers step after backwards, not inside them
    _under_way: _Snapshot | None = None  # what the end of the next backward compares

    def __init__(
        self,
        queue: BucketQueue,
        ledger: Ledger,
        every: int | Literal["auto"],
        doubts: Doubts,
    ) -> None:
        self._queue: BucketQueue = weakref.proxy(queue)  # a cycle would keep buckets
        self._every, self._is_auto = every, every == AUTO
        self._ledger, self._doubts = ledger, doubts
        self._warned: set[_Cause] = set()
        self._has_agreed = False  # whether replicas were ever equal in a comparison
        self._hook_agrees = False  # whether they were, after averages of the comm hook
        # Whether replicas were equal in a forward, not only after their optimizers had
        # stepped.
        self._agrees_before_steps = False
        self.has_optimizer = False  # whether one steps parameters of the wrapper
        self.warns = False  # whether unsynced="warn"
        # A new name in the store, equal on all ranks; "" without a store.
        self.name = ""
        self.meets_at = ""  # where in the store the next comparison is, see `meet`
        self._base = 0  # the step at which the schedule began
        self._is_shared = True  # whether all ranks are known to compare in these steps
        self.missed_steps = ""  # on which ranks an optimizer made fewer steps
        self._has_met_excuse = False
        self.reset()

    def reset(self) -> None:
        """Forget pending checksums and differences, and when replicas agreed last."""
        self.postpone()
        self.meets_at = ""
        self._agreed = -1  # the last step at whose beginning all replicas were equal
        self._steps_are_alike = True  # whether optimizers hold the same on all ranks
        # Whether each rank moved its parameters by itself when they were compared last.
        self._are_moved = False
        self._clear()

    def _clear(self) -> None:
        """Forget the difference that was seen last."""
        # What differed, as long as nobody has stepped since.
        self.suspect: _Snapshot | None = None
        self._waited = 0  # for how many steps no optimizer has stepped since
        self._deviation = Deviation()  # and by how much the replicas differed then

    @property
    def is_due(self) -> bool:
        """Whether this rank compares in this step."""
        return self._is_scheduled or bool(self.meets_at)

    @property
    def _is_scheduled(self) -> bool:
        """Whether all ranks compare in this step, so that a collective can do it."""
        if not self._is_shared:
            return False
        step = self._ledger.finalized - self._base
        every = AUTO_EVERY if isinstance(self._every, str) else self._every
        is_early = self._is_auto and step in AUTO_STEPS
        return self.suspect is not None or is_early or step % every == 0

    def restart(self, *, missed_steps: str = "") -> None:
        """Begin the schedule anew in the next step, as all ranks must do together.

        Args:
            missed_steps: On which ranks optimizers made fewer steps than on others, as
                a text. If it is not empty, errors say so, and no difference is taken
                for rounding.
        """
        self._base, self._is_shared = self._ledger.finalized, True
        self._are_moved = False
        self.missed_steps = missed_steps

    def compare_soon(self) -> None:
        """Compare in this step or the next one. All ranks must call it together.

        While each rank moves its parameters by itself, this would prove nothing, and
        could be wanted in every step. Then only the schedule compares.
        """
        if self._under_way is None and not self._are_moved:
            self.restart(missed_steps=self.missed_steps)

    def meet(self, place: str, *, is_first: bool = False) -> None:
        """Compare in the next synchronised step if all ranks want to, without waiting.

        Args:
            place: Where the ranks put their checksums into the group's store. It must
                be new, and equal on all ranks.
            is_first: Whether this begins the schedule, because until now the other
                ranks were not known to compare at all.
        """
        self.meets_at = place
        if is_first:
            self.restart()
            self._is_shared, self.name = False, ""

    def meet_after_excuse(self) -> None:
        """Compare in the next step, because ``unsynced="warn"`` has excused a mistake.

        If only some ranks made the mistake, only these come here, and nothing is
        compared. Then the schedule has to find the difference.
        """
        if self.warns and self.name and not self._has_met_excuse:
            self._has_met_excuse = True
            self.meet(f"{self.name}/excused/{self._ledger.finalized}")

    def meet_after_local_steps(self) -> None:
        """Compare in the next step, because the replicas have trained apart before it.

        If only some ranks have, only these come here, and nothing is compared.
        """
        if self.name:
            self.meet(f"{self.name}/local/{self._ledger.finalized}")

    @property
    def are_comparable(self) -> bool:
        """Whether replicas have to be equal in each forward, as far as is known."""
        return self._agrees_before_steps and (self._hook_agrees or not self._is_hooked)

    @property
    def excuses(self) -> int:
        """Why this rank's replica may differ legally, as bits, or 0 without reason."""
        return self._excuses(was_hooked=self._is_hooked)

    @property
    def _is_hooked(self) -> bool:
        """Whether a foreign comm hook has made averages."""
        hook = self._queue.averaging.comm_hook
        return hook is not None and hook.has_run and is_foreign(hook)

    def _excuses(self, *, was_hooked: bool) -> int:
        doubts = self._doubts
        # If the hook has kept the replicas equal before, it does not explain a
        # difference after a step that some rank has missed.
        was_hooked &= not (self._hook_agrees and self.missed_steps)
        reasons = LOCAL_UPDATES * doubts.was_local | ON_PURPOSE * was_hooked
        return reasons | (WARNED if self.warns else ON_PURPOSE) * doubts.was_excused

    def begin(
        self,
        params: Mapping[str, torch.Tensor],
        frozen: Mapping[str, torch.Tensor],
        buffers: Mapping[str, torch.Tensor],
    ) -> None:
        """Compute this replica's checksum before a forward, for `finished` to compare.

        It replaces an earlier checksum, and waits for no other rank. With "auto" it
        leaves out the module buffers and, once replicas have agreed, frozen parameters.

        Args:
            params: The parameters that are averaged, by name.
            frozen: The other parameters that are not ignored.
            buffers: The module buffers that forwards broadcast.
        """
        if self._is_auto:
            buffers = {}
            # Once replicas agreed, one rank may keep averaged weights in frozen ones.
            frozen = {} if self._has_agreed else frozen
        tensors = {**params, **frozen}
        # After a difference, only the suspects are left to compare: all other
        # parameters were equal after their optimizer had stepped.
        if self.suspect is not None:
            suspected = self.suspect.tensors.keys()
            tensors = {n: t for n, t in tensors.items() if n in suspected} or tensors
        buffer_sums = {name: int(sum_of_bits(each)) for name, each in buffers.items()}
        digest = digest_of([*tensors.values(), *buffers.values()])
        self.postpone()
        place = "" if self._is_scheduled else self.meets_at
        step, self.meets_at = self._ledger.finalized, ""
        snapshot = _Snapshot(step, tensors, buffer_sums, digest, self._is_hooked, place)
        self._under_way = snapshot
        self._queue.observers.append(
            self, first=True
        )  # before those that step optimizers

    def postpone(self) -> None:
        """Drop the checksum of `begin`, so that no backward's end will compare it."""
        self._under_way = None
        self._queue.observers.remove(self)

    def put_off(self) -> None:
        """Do the same, but meet the other ranks later, if that was the plan."""
        dropped = self._under_way
        self.postpone()
        if dropped is not None and dropped.place and not self.meets_at:
            self._withdraw(dropped.place)
            self.meets_at = dropped.place

    # -- in a backward -----------------------------------------------------------------

    def begins(self) -> None:
        """Put what the ranks exchange where they meet, if they do that in the store.

        All ranks have done so before any backward ends. A forward without a backward
        puts nothing there, because a wrapper of this rank alone may run it. Neither
        does a backward that torch's ``noop_hook`` lets end alone.
        """
        snapshot, hook = self._under_way, self._queue.averaging.comm_hook
        if hook is not None and averages_nothing(hook):
            return
        if snapshot is not None and snapshot.place:
            group, row = self._queue.communicator.group, self._row(snapshot)
            with suppress(RuntimeError):  # if the store is lost, nobody compares
                post_json(group_store(group, snapshot.place), "row", group.rank(), row)

    def finished(self) -> None:
        """Compare the checksums that `begin` has computed, at the end of a backward.

        With "auto" a difference that has a reason is accepted, with one warning after
        updates inside no_sync(). Any other difference is looked at a second time, by
        `confirm` after the next optimizer step. It is looked at here and now if nothing
        can be hoped from such a step: module buffers differ, optimizers step inside
        backwards, or no optimizer has stepped for 10 steps (for 1 step without "auto",
        if some rank has no optimizer, or if the ranks' optimizers hold different
        parameters). In the last case "auto" asks for a proof that the difference lasts.

        Raises:
            ReplicaMismatchError: The ranks are at different steps, or the second look
                was taken here, and the replicas differ.
        """
        snapshot, doubts = self._under_way, self._doubts
        assert snapshot is not None
        self.postpone()
        if snapshot.place:
            if not (rows := self._rows_met(snapshot.place)):
                self._withdraw(snapshot.place)
                return
            # All ranks have met, so from now on all of them have the same schedule.
            if not self._is_shared:
                self._is_shared, self.name = True, snapshot.place
        else:
            rows = self._gather(self._row(snapshot))
        steps, all_reasons, have_optimizers, digests = zip(*rows, strict=True)
        if len(set(steps)) > 1:
            text = explain(
                self._queue.communicator.rank,
                "The ranks are at different steps.",
                expected="equally many synchronised backwards on all ranks",
                found=", ".join(f"{n} on rank {rank}" for rank, n in enumerate(steps)),
                remedy="look for a rank that skipped or repeated a step; load the last "
                "checkpoint on all ranks, or wrap the module again",
            )
            raise ReplicaMismatchError(text)
        if len(set(digests)) == 1:
            self._agree(snapshot.step)
            self._agrees_before_steps = True
            self._hook_agrees |= snapshot.was_hooked
            doubts.was_local = doubts.was_excused = False
        elif self._is_auto and any(all_reasons):
            self._clear()
            # Local updates may be meant (local SGD), or a step in the wrong block.
            was_warned = any(reasons & WARNED for reasons in all_reasons)
            cause = _EXCUSED if was_warned else _LOCAL
            is_known = any(r & ON_PURPOSE for r in all_reasons) or cause in self._warned
            if not is_known:
                self._warn(snapshot.step, self._find_differences(snapshot), cause)
        else:  # the next step compares again; or this one, after a long wait
            self.suspect = snapshot
            self._waited += 1
            # What follows is a collective, so this decision must be the same on all
            # ranks. It is made of what all ranks have exchanged.
            limit = PATIENCE if self._is_auto and all(have_optimizers) else 1
            is_late = self._waited > limit
            needs_proof = self._is_auto and not self.missed_steps
            must_be_equal = not self.awaits_step or (is_late and not needs_proof)
            if must_be_equal or self._have_buffers_drifted(snapshot):
                self._confirm(snapshot)
            elif self._is_auto:
                self._refuse_if_it_lasts(snapshot, is_late=is_late)

    def _refuse_if_it_lasts(self, snapshot: _Snapshot, *, is_late: bool) -> None:
        """Look at a difference again if it ``is_late``, and else prepare for that.

        All ranks must call this, at the end of each backward that finds a difference.
        If after 10 of them it is not proved that the difference lasts, the ranks warn,
        and compare no more until the schedule wants it.

        Raises:
            ReplicaMismatchError: The replicas differ, as in the backward before.
        """
        found = self._find_differences(snapshot)
        tensors = {name: snapshot.tensors[name] for name in found}
        communicator = self._queue.communicator
        lasts = not found or self._deviation.has_lasted(tensors, communicator)
        if is_late and lasts:
            self._confirm(snapshot)
        elif self._waited > PATIENCE:
            self._clear()
            self._are_moved = True
            self._warn(snapshot.step, found, _MOVED)

    def _row(self, snapshot: _Snapshot) -> list[int]:
        """Return what the ranks exchange, as integers.

        These are the step (counted from the start of the schedule), the excuses,
        whether there is an optimizer after whose step the ranks can compare, and the
        checksum.
        """
        reasons = self._excuses(was_hooked=snapshot.was_hooked)
        step = snapshot.step - self._base
        has_optimizer = int(self.has_optimizer and self._steps_are_alike)
        return [step, reasons, has_optimizer, int(snapshot.digest)]

    def _rows_met(self, place: str) -> list[list[int]]:
        """Return the rows of all ranks from the store, or [] if one is missing."""
        group = self._queue.communicator.group
        with suppress(RuntimeError):
            rows = read_json(group_store(group, place), "row", range(group.size()))
            return [*rows.values()] if len(rows) == group.size() else []
        return []

    def _withdraw(self, place: str) -> None:
        """Take back what this rank has put into the store, where nobody has met it.

        Else another wrapper of another rank might take it for that of its counterpart.
        """
        group = self._queue.communicator.group
        with suppress(RuntimeError):
            group_store(group, place).delete_key(f"row/{group.rank()}")

    def _agree(self, step: int) -> None:
        self._agreed, self._has_agreed, self.missed_steps = step, True, ""
        self._has_met_excuse = self._are_moved = False
        self._clear()

    # -- after a step ------------------------------------------------------------------

    def confirm(self, held: Sequence[str]) -> None:
        """Compare again after an optimizer step, if `finished` has seen a difference.

        It compares the parameters that the optimizer ``held``, given by name, and the
        frozen ones, which no optimizer will change. For this it waits up to 10 s until
        all ranks have stepped. If some do not come, if their optimizers hold different
        parameters, or if there is no store to find that out, it returns. The next
        backwards will then compare again, and the last of them takes the second look
        itself.

        Raises:
            ReplicaMismatchError: The replicas still differ.
        """
        if self.suspect is None:
            return
        tensors = self.suspect.tensors
        names = {*held} | {n for n, t in tensors.items() if not t.requires_grad}
        stepped = {name: value for name, value in tensors.items() if name in names}
        if not stepped:
            return
        group = self._queue.communicator.group
        if not (self.name and has_store(group)):
            return
        place = f"{self.name}/{self.suspect.step}/{self._ledger.steps}"
        come = all_come(group_store(group, place), group.size(), ",".join(stepped))
        self._steps_are_alike &= come is not _Come.UNLIKE
        if come is not _Come.ALL:
            return
        rest = {n: t for n, t in tensors.items() if n not in stepped}
        left = self.suspect._replace(tensors=rest, buffer_sums={}) if rest else None
        self._confirm(self.suspect._replace(tensors=stepped, buffer_sums={}))
        self.suspect = left

    def _have_buffers_drifted(self, snapshot: _Snapshot) -> bool:
        # No optimizer step makes module buffers equal again.
        if not snapshot.buffer_sums:
            return False
        rows = self._gather([*snapshot.buffer_sums.values()])
        return any(row != rows[0] for row in rows)

    def _confirm(self, snapshot: _Snapshot) -> None:
        """Compare a second time, and refuse a difference. All ranks must call this.

        With "auto", a difference that rounding explains is only warned of, and only
        once.

        Raises:
            ReplicaMismatchError: The replicas still differ.
        """
        # A checksum under way may be of a forward that not all ranks have run.
        self._steps_are_alike = True
        self._clear()
        self.postpone()
        found = self._find_differences(snapshot)
        if not found:
            self._agree(snapshot.step)
        elif self.missed_steps:  # then even a small difference is an error
            missed = _MISSED._replace(text=_MISSED.text.format(self.missed_steps))
            raise ReplicaMismatchError(self._explain(snapshot.step, found, missed))
        elif self._is_auto and self._are_close(
            [snapshot.tensors[name] for name in found if name in snapshot.tensors]
        ):
            self._warn(snapshot.step, found, _ROUNDING)
        else:
            raise ReplicaMismatchError(self._explain(snapshot.step, found, _UNKNOWN))

    def _warn(self, step: int, found: _Differences, cause: _Cause) -> None:
        if found and cause not in self._warned:
            self._warned.add(cause)
            warn(self._explain(step, found, cause))

    def _explain(self, step: int, found: _Differences, cause: _Cause) -> str:
        names = [*found]
        sums = found[names[0]]
        usual = max(sums, key=sums.count)
        odd = [str(rank) for rank, value in enumerate(sums) if value != usual]
        rest = [str(rank) for rank, value in enumerate(sums) if value == usual]
        more = f" (and {len(names) - 1} more)" if len(names) > 1 else ""
        since = (
            "" if self._agreed < 0 else f" They agreed before backward {self._agreed}."
        )
        return explain(
            self._queue.communicator.rank,
            f"The replicas differ: before averaged backward {step}, {names[0]} is not "
            f"the same on all ranks{more}.{since}{cause.text}",
            names=[shortened(names)],
            expected=f"the bits of rank {', '.join(rest)}",
            found=f"different bits on rank {', '.join(odd)}",
            remedy=cause.remedy,
        )

    def _gather(self, row: Sequence[int]) -> list[list[int]]:
        """Exchange equally long rows of integers, and return them by rank."""
        group, device = self._queue.communicator.group, self._queue.specs[0].device
        with self._queue.communicator.blocking("comparing the replicas"):
            return gather_integers(row, group, exchange_device(group, device))

    def _find_differences(self, snapshot: _Snapshot) -> _Differences:
        """Return all ranks' checksums of each tensor that differs, by name.

        Parameters are compared as they are now, buffers as they were at `begin`.
        """
        own = [int(sum_of_bits(tensor)) for tensor in snapshot.tensors.values()]
        names = [*snapshot.tensors, *snapshot.buffer_sums]
        sums = [*own, *snapshot.buffer_sums.values()]
        columns = zip(names, zip(*self._gather(sums), strict=True), strict=True)
        return {name: sums for name, sums in columns if len(set(sums)) > 1}

    def knows_rounding(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Return whether the tensors, whose bits differ, differ only by known rounding.

        That is rounding of which this object has warned before. All ranks must call
        this together: it may be a collective.
        """
        return _ROUNDING in self._warned and self._are_close(tensors)

    def _are_close(self, tensors: Sequence[torch.Tensor]) -> bool:
        communicator = self._queue.communicator
        return are_close_on_all_ranks(tensors, communicator, ROUNDING, num_eps=16)


def averages_nothing(hook: CommHook) -> bool:
    """Return whether a comm hook is the one of torch that does not communicate."""
    place = getattr(hook.hook, "__module__", None) or ""
    is_torchs = place.startswith("torch.distributed.algorithms.")
    return is_torchs and getattr(hook.hook, "__qualname__", "") == "noop_hook"


def is_foreign(hook: CommHook) -> bool:
    """Return whether a comm hook may give some ranks other averages than others.

    Only a plain function of minidp or of ``torch.distributed.algorithms`` is known not
    to. A wrapper of one may do anything, and torch's hooks for post-local SGD and for
    no reduction at all are made to let replicas differ.
    """
    place = getattr(hook.hook, "__module__", None) or ""
    name = getattr(hook.hook, "__qualname__", "")
    is_known = place.startswith(("minidp.", "torch.distributed.algorithms."))
    is_wrapper = not name.isidentifier()  # a function in a function, or with arguments
    is_local = "post_localSGD" in name or averages_nothing(hook)
    return not is_known or is_wrapper or is_local


class _Come(Enum):
    """Whether all ranks have come to compare the same tensors."""

    ALL = "all"
    NOT_ALL = "not all"
    UNLIKE = "unlike"  # some would compare other tensors than others


def all_come(store: Store, num_ranks: int, names: str) -> _Come:
    """Wait up to 10 s for all ranks to call this, and return whether they did.

    The answer is the same on all ranks. It stays in ``store``, so each question needs a
    store with a new prefix.

    Args:
        store: The store.
        num_ranks: How many ranks there are.
        names: What this rank would compare. A collective over tensors of unequal sizes
            could end the process.
    """
    deadline = world.now() + CONFIRM_SECONDS
    if store.compare_set("names", "", names) != names.encode():
        store.compare_set("verdict", "", _Come.UNLIKE.value)
    if store.add("come", 1) == num_ranks:
        store.compare_set("verdict", "", _Come.ALL.value)
    with waiting():
        while not store.check(["verdict"]):
            if world.now() > deadline:
                store.compare_set("verdict", "", _Come.NOT_ALL.value)
            world.sleep(POLL_SECONDS)
    return _Come(store.get("verdict").decode())
