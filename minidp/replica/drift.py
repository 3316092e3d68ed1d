"""Compare the replicas every so many steps (``check_replicas_every``).

    forward    each rank sums up the bits of its parameters (and broadcast buffers)
    backward   at its end, ranks compare one number each: the group is idle then
    step       if they differed: once more, after optimizer.step()

The second look is for weights that are moved with local gradients, or disturbed by
random numbers of each rank, and moved back before the step or inside it. Each optimizer
answers for the parameters that it holds.

"auto" accepts updates in no_sync(), a user's comm hook, ``unsynced`` not "raise".

Every way back to training begins the schedule anew (`ReplicaCheck.restart`), because
there replicas are most likely to differ. Where not all ranks are known to compare, each
one puts its checksum into the store and never waits for the others (`meet`)::

    forward    put mine into the store
    backward   cannot end before all ranks have begun it: who wants to compare has put
               its checksum there by now. All ranks have: compare. Else: forget it
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from contextlib import suppress
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
from minidp.errors import MAX_NAMES, ReplicaMismatchError, explain

from .digest import digest_of, sum_of_bits
from .rounding import are_close_on_all_ranks

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store

    from minidp.core import Ledger
    from minidp.hooks import CommHook

# What "auto" compares: a checkpoint that one rank has loaded shows in the first step.
AUTO_STEPS = frozenset({0, 1, 100})  # each costs a step of a tiny model
AUTO_EVERY = 1000
PATIENCE = 10  # steps in which replicas differ, and no optimizer steps
CONFIRM_SECONDS = 10.0  # for other ranks to step, too
POLL_SECONDS = 0.005
ROUNDING = 1e-3  # of the largest element; or a few times what the dtype can tell

# Bits that ranks exchange: why replicas may differ legally.
LOCAL_UPDATES = 1  # parameters changed inside no_sync()
# A foreign comm hook; or unsynced="ignore" made no error of a mistake.
ON_PURPOSE = 2
WARNED = 4  # unsynced="warn" made a warning of a mistake


class _Cause(NamedTuple):
    """Hold a sentence on why replicas differ ("": not known), and the remedy."""

    text: str
    remedy: str


_UNKNOWN = _Cause(
    "",
    "look for what changes parameters on some ranks only: a checkpoint that was loaded "
    "on one rank (load it on all, or on rank 0 before wrapping, which broadcasts), "
    "other seeds with init_sync=False, updates by hand, random numbers, "
    "unsynced='ignore'; what is to differ belongs to the parameters to ignore "
    "(_set_params_and_buffers_to_ignore_for_model), or pass check_replicas_every=0; "
    "load the last checkpoint on all ranks and call reset(), or call "
    "reset(copy_from=0) to copy rank 0's state, or wrap the module again",
)
_ROUNDING = _Cause(
    " The difference is as small as rounding: other hardware, or kernels that are not "
    "deterministic, may be the cause.",
    "nothing, if that is so; else look at what changes parameters on some ranks only. "
    "check_replicas_every=100 makes any difference an error. This is said once",
)
_LOCAL = _Cause(
    " Parameters were updated inside no_sync(), where gradients stay local, and nobody "
    "has averaged them since.",
    "if the update was to use averaged gradients, take optimizer.step() and "
    "zero_grad() out of the no_sync() block (an indentation too deep); for local SGD "
    "average the parameters before the next forward outside no_sync(); then load the "
    "last checkpoint on all ranks. This is said once",
)
_MISSED = _Cause(
    " A rank has missed steps that others have made ({}), and nothing has made the "
    "replicas equal since.",
    "call reset(copy_from=0) on all ranks, which copies rank 0's parameters, buffers "
    "and optimizer state; or load the same checkpoint of model and optimizers on all "
    "ranks, and call reset()",
)
_EXCUSED = _Cause(
    " Before, a mistake was only warned of, because of unsynced='warn': the replicas "
    "have trained apart since.",
    "mend what that warning named, then load the last checkpoint on all ranks; if the "
    "replicas are meant to differ, pass unsynced='ignore'. This is said once",
)
# Sums of bits on each rank, by rank, of the tensors that differ.
_Differences = Mapping[str, Sequence[int]]


class _Snapshot(NamedTuple):
    """Hold one replica's checksum before a forward, and the tensors it was taken of.

    The tensors themselves, no copies: optimizers may change them later.
    """

    step: int  # number of synchronised backwards finished
    tensors: Mapping[str, torch.Tensor]  # parameters, by name, to be compared once more
    buffer_sums: Mapping[str, int]  # of module buffers: the forward changes them
    digest: torch.Tensor
    was_hooked: bool  # a foreign comm hook made averages that came before
    place: str = ""  # in the store, where all ranks put their row; "": a collective


class ReplicaCheck(Observer):
    """Compare replicas every so many steps (``every``); at most one per wrapper.

    The wrapper calls `begin` before forwards for which `is_due`. Only then this is an
    observer of ``queue``, whose `finished` compares at the backward's end. After a
    difference the optimizer guard calls `confirm` after a step.
    """

    awaits_step = True  # optimizers step after backwards, not inside them
    _under_way: _Snapshot | None = None  # what the next backward's end compares

    def __init__(
        self,
        queue: BucketQueue,
        ledger: Ledger,
        every: int | Literal["auto"],
    ) -> None:
        self._queue: BucketQueue = weakref.proxy(queue)  # a cycle would keep buckets
        self._every, self._is_auto = every, every == AUTO
        self._ledger = ledger
        self._has_warned = False
        self._has_agreed = False  # replicas were equal in some comparison, ever
        self._hook_agrees = False  # also after averages of the comm hook
        # Replicas were equal in a forward, not only once their optimizers had stepped.
        self._agrees_before_steps = False
        self.has_optimizer = False  # that steps parameters of the wrapper
        self.warns = False  # unsynced="warn"
        self.name = ""  # in the store: new, and equal on all ranks; "": no store
        self.meets_at = ""  # the store's place of the next comparison, see `meet`
        self._base = 0  # the step at which the schedule began
        self._is_shared = True  # all ranks are known to compare at the same steps
        self.missed_steps = ""  # on which ranks an optimizer made fewer steps
        self._has_met_excuse = False
        self.reset()

    def reset(self) -> None:
        """Forget pending checksums and differences, and when replicas agreed last."""
        self.postpone()
        self.meets_at = ""
        self._agreed = -1  # the last step at whose beginning all replicas were equal
        self.suspect: _Snapshot | None = None  # differed, and nobody has stepped since
        self._waited = 0  # steps, for an optimizer

    @property
    def is_due(self) -> bool:
        """Return whether to compare in this step: scheduled, or after a difference."""
        return self._is_scheduled or bool(self.meets_at)

    @property
    def _is_scheduled(self) -> bool:
        """Return whether all ranks compare in this step, so that it is a collective."""
        if not self._is_shared:
            return False
        step = self._ledger.finalized - self._base
        every = AUTO_EVERY if isinstance(self._every, str) else self._every
        is_early = self._is_auto and step in AUTO_STEPS
        return self.suspect is not None or is_early or step % every == 0

    def restart(self, *, missed_steps: str = "") -> None:
        """Begin the schedule anew in the next step; all ranks do so.

        ``missed_steps``: on which ranks optimizers made fewer steps, as text; then no
        difference is taken for rounding, and errors say so.
        """
        self._base, self._is_shared = self._ledger.finalized, True
        self.missed_steps = missed_steps

    def compare_soon(self) -> None:
        """Compare in this step or the next one; all ranks call it."""
        if self._under_way is None:
            self.restart(missed_steps=self.missed_steps)

    def meet(self, place: str, *, is_first: bool = False) -> None:
        """Compare in the next synchronised step, if all ranks do; wait for none.

        ``place``: in the group's store; new, and equal on all ranks. ``is_first``: this
        begins the schedule: before, other ranks are not known to compare at all.
        """
        self.meets_at = place
        if is_first:
            self.restart()
            self._is_shared, self.name = False, ""

    def meet_after_excuse(self) -> None:
        """Compare soon, because a mistake was excused; no-op if the user ignores all.

        Ranks that made no mistake do not meet: then the schedule has to find it.
        """
        if self.warns and self.name and not self._has_met_excuse:
            self._has_met_excuse = True
            self.meet(f"{self.name}/excused/{self._ledger.finalized}")

    @property
    def are_comparable(self) -> bool:
        """Whether replicas have to be equal in each forward, as far as is known."""
        hook = self._queue.averaging.comm_hook
        is_hooked = hook is not None and hook.has_run and is_foreign(hook)
        return self._agrees_before_steps and (self._hook_agrees or not is_hooked)

    @property
    def excuses(self) -> int:
        """Return why this rank's replica may differ legally: 0, or bits."""
        hook = self._queue.averaging.comm_hook
        is_hooked = hook is not None and hook.has_run and is_foreign(hook)
        return self._excuses(was_hooked=is_hooked)

    def _excuses(self, *, was_hooked: bool) -> int:
        ledger = self._ledger
        # A step that some rank has missed is no doing of a hook that kept them equal.
        was_hooked &= not (self._hook_agrees and self.missed_steps)
        reasons = LOCAL_UPDATES * ledger.was_local | ON_PURPOSE * was_hooked
        return reasons | (WARNED if self.warns else ON_PURPOSE) * ledger.was_excused

    def begin(
        self,
        params: Mapping[str, torch.Tensor],
        frozen: Mapping[str, torch.Tensor],
        buffers: Mapping[str, torch.Tensor],
    ) -> None:
        """Store this replica's checksum before a forward; `finished` will compare it.

        Replaces an earlier one; no communication. "auto" omits module buffers and, once
        replicas agreed, frozen parameters. ``params``: those that are averaged.
        """
        if self._is_auto:
            buffers = {}
            # Once replicas agreed, one rank may keep averaged weights in frozen ones.
            frozen = {} if self._has_agreed else frozen
        tensors = {**params, **frozen}
        if self.suspect is not None:  # others were equal after their optimizer's step
            suspected = self.suspect.tensors.keys()
            tensors = {n: t for n, t in tensors.items() if n in suspected} or tensors
        buffer_sums = {name: int(sum_of_bits(each)) for name, each in buffers.items()}
        digest = digest_of([*tensors.values(), *buffers.values()])
        hook = self._queue.averaging.comm_hook
        was_hooked = hook is not None and hook.has_run and is_foreign(hook)
        self.postpone()
        place = "" if self._is_scheduled else self.meets_at
        step, self.meets_at = self._ledger.finalized, ""
        snapshot = _Snapshot(step, tensors, buffer_sums, digest, was_hooked, place)
        if place:
            with suppress(RuntimeError):  # a lost store: then nobody compares
                group = self._queue.communicator.group
                row = self._row(snapshot)
                post_json(group_store(group, place), "row", group.rank(), row)
        self._under_way = snapshot
        self._queue.observers.append(
            self, first=True
        )  # before those that step optimizers

    def postpone(self) -> None:
        """Drop the checksum of `begin`, if any: no backward's end will compare it."""
        self._under_way = None
        self._queue.observers.remove(self)

    # -- at the end of a backward ------------------------------------------------------

    def finished(self) -> None:
        """Collective: end a backward by comparing the checksums that `begin` stored.

        ReplicaMismatchError if ranks are at different steps. "auto" accepts a
        difference with a known reason (and warns once of updates in no_sync()). Any
        other is compared again: by `confirm` in the next step; or at once by
        `_confirm`, if module buffers are compared, optimizers step in backwards, or
        none has come for 10 steps (1 without "auto", or if some rank has no optimizer).
        """
        snapshot, ledger = self._under_way, self._ledger
        assert snapshot is not None
        self.postpone()
        if snapshot.place:
            if not (rows := self._rows_met(snapshot.place)):
                return
            if not self._is_shared:  # now it is
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
            ledger.was_local = ledger.was_excused = False
        elif self._is_auto and any(all_reasons):
            self.suspect = None
            # Local updates alone may be a mistake as well.
            if not any(r & ON_PURPOSE for r in all_reasons) and not self._has_warned:
                was_warned = any(reasons & WARNED for reasons in all_reasons)
                cause = _EXCUSED if was_warned else _LOCAL
                self._warn(snapshot.step, self._find_differences(snapshot), cause)
        else:  # the next step compares again; or this one, after a long wait
            self.suspect = snapshot
            self._waited += 1
            # All ranks decide alike: what follows is a collective.
            limit = PATIENCE if self._is_auto and all(have_optimizers) else 1
            is_late = self._waited > limit or not self.awaits_step
            if is_late or self._have_buffers_drifted(snapshot):
                self._confirm(snapshot)

    def _row(self, snapshot: _Snapshot) -> list[int]:
        """Return step of the schedule, excuses, whether one optimizes, and checksum."""
        reasons = self._excuses(was_hooked=snapshot.was_hooked)
        step, has_optimizer = snapshot.step - self._base, int(self.has_optimizer)
        return [step, reasons, has_optimizer, int(snapshot.digest)]

    def _rows_met(self, place: str) -> list[list[int]]:
        """Return all ranks' rows at a place of the store; [] if some put none there."""
        group = self._queue.communicator.group
        with suppress(RuntimeError):
            rows = read_json(group_store(group, place), "row", range(group.size()))
            return [*rows.values()] if len(rows) == group.size() else []
        return []

    def _agree(self, step: int) -> None:
        self._agreed, self._has_agreed, self.missed_steps = step, True, ""
        self._has_met_excuse = False
        self.suspect, self._waited = None, 0

    # -- after a step ------------------------------------------------------------------

    def confirm(self, held: Sequence[str]) -> None:
        """Compare again after an optimizer step, if `finished` saw a difference.

        ``held``: names of the parameters that the optimizer holds; only these are
        compared, and frozen ones, which no optimizer will change. Raises or warns as
        `_confirm`. Waits up to 10 s until all ranks have stepped; if some do not come,
        or ranks share no store to find that out, returns: the next backwards compare
        again, and the last of them confirms a difference itself.
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
        if not all_come(group_store(group, place), group.size()):
            return
        rest = {n: t for n, t in tensors.items() if n not in stepped}
        left = self.suspect._replace(tensors=rest, buffer_sums={}) if rest else None
        self._confirm(self.suspect._replace(tensors=stepped, buffer_sums={}))
        self.suspect, self._waited = left, 0

    def _have_buffers_drifted(self, snapshot: _Snapshot) -> bool:
        """Collective: return whether module buffers differ, which no step mends."""
        if not snapshot.buffer_sums:
            return False
        rows = self._gather([*snapshot.buffer_sums.values()])
        return any(row != rows[0] for row in rows)

    def _confirm(self, snapshot: _Snapshot) -> None:
        """Collective: compare again; ReplicaMismatchError if replicas still differ.

        With "auto", a difference that rounding explains is only warned of, once. Clears
        `suspect`, and drops a later checksum of `begin`.
        """
        # A digest under way may be of a forward that not all ranks ran.
        self.suspect = None
        self.postpone()
        found = self._find_differences(snapshot)
        if not found:
            self._agree(snapshot.step)
        elif self.missed_steps:  # what rounding does is not to be found out
            missed = _MISSED._replace(text=_MISSED.text.format(self.missed_steps))
            raise ReplicaMismatchError(self._explain(snapshot.step, found, missed))
        elif self._is_auto and self._are_close(
            [snapshot.tensors[name] for name in found if name in snapshot.tensors]
        ):
            self._warn(snapshot.step, found, _ROUNDING)
        else:
            raise ReplicaMismatchError(self._explain(snapshot.step, found, _UNKNOWN))

    def _warn(self, step: int, found: _Differences, cause: _Cause) -> None:
        """Warn of ``found``, once for this object; not if no tensor differs."""
        if found and not self._has_warned:
            self._has_warned = True
            warn(self._explain(step, found, cause))

    def _explain(self, step: int, found: _Differences, cause: _Cause) -> str:
        """Return a message: which tensors differ, on which ranks, since when, why."""
        names = [*found]
        sums = found[names[0]]
        usual = max(sums, key=sums.count)
        odd = [str(rank) for rank, value in enumerate(sums) if value != usual]
        rest = [str(rank) for rank, value in enumerate(sums) if value == usual]
        more = f" (and {len(names) - 1} more)" if len(names) > 1 else ""
        since = "" if self._agreed < 0 else f" They agreed at step {self._agreed}."
        return explain(
            self._queue.communicator.rank,
            f"The replicas differ: at the beginning of step {step}, {names[0]} is not "
            f"the same on all ranks{more}.{since}{cause.text}",
            names=names[:MAX_NAMES],
            expected=f"the bits of rank {', '.join(rest)}",
            found=f"other ones on rank {', '.join(odd)}",
            remedy=cause.remedy,
        )

    def _gather(self, row: Sequence[int]) -> list[list[int]]:
        """Collective: exchange one row of integers per rank, equally long; wait.

        Return them by rank.
        """
        group, device = self._queue.communicator.group, self._queue.specs[0].device
        with self._queue.communicator.blocking("comparing the replicas"):
            return gather_integers(row, group, exchange_device(group, device))

    def _find_differences(self, snapshot: _Snapshot) -> _Differences:
        """Collective: return all ranks' checksums of each tensor that differs, by name.

        Of parameters as they are now, and of buffers as at `begin`.
        """
        own = [sum_of_bits(tensor).cpu() for tensor in snapshot.tensors.values()]
        names = [*snapshot.tensors, *snapshot.buffer_sums]
        sums = [*torch.stack(own).tolist(), *snapshot.buffer_sums.values()]
        columns = zip(names, zip(*self._gather(sums), strict=True), strict=True)
        return {name: sums for name, sums in columns if len(set(sums)) > 1}

    def knows_rounding(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Collective, perhaps: return whether only rounding, warned of before, differs.

        ``tensors``: those whose bits differ.
        """
        return self._is_auto and self._has_warned and self._are_close(tensors)

    def _are_close(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Collective: return whether only rounding makes the ranks' tensors differ."""
        communicator = self._queue.communicator
        return are_close_on_all_ranks(tensors, communicator, ROUNDING, num_eps=16)


def is_foreign(hook: CommHook) -> bool:
    """Return whether a comm hook may give other averages to some ranks.

    False only for a plain function of minidp or ``torch.distributed.algorithms``. True
    for a wrapper of one, and for torch's post-local SGD and no-op hooks.
    """
    place = getattr(hook.hook, "__module__", None) or ""
    name = getattr(hook.hook, "__qualname__", "")
    is_known = place.startswith(("minidp.", "torch.distributed.algorithms."))
    is_wrapper = not name.isidentifier()  # a function in a function, or with arguments
    is_local = "post_localSGD" in name or name == "noop_hook"
    return not is_known or is_wrapper or is_local


def all_come(store: Store, num_ranks: int) -> bool:
    """Wait up to 10 s for all ranks to call this; return whether they did.

    The answer is the same on all ranks. It stays in ``store``, so that each question
    needs a new prefix.
    """
    deadline = world.now() + CONFIRM_SECONDS
    if store.add("come", 1) == num_ranks:
        store.compare_set("verdict", "", "all")
    with waiting():
        while not store.check(["verdict"]):
            if world.now() > deadline:
                store.compare_set("verdict", "", "not all")
            world.sleep(POLL_SECONDS)
    return store.get("verdict") == b"all"
