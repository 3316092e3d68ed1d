"""Compare the replicas every so many steps (``check_replicas_every``).

    forward    each rank sums up the bits of its parameters (and broadcast buffers)
    backward   at its end, ranks compare one number each: the group is idle then
    step       if they differed: once more, before optimizer.step()

The second look is for weights that are moved with local gradients, or disturbed by
random numbers of each rank, and moved back before the step.

"auto" accepts updates in no_sync(), a user's comm hook, ``unsynced`` not "raise".
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Literal, NamedTuple

import torch

from minidp.comm import (
    broadcast_coalesced,
    exchange_device,
    gather_integers,
    group_store,
    has_store,
)
from minidp.config import AUTO
from minidp.console import warn
from minidp.core import BucketQueue, Observer
from minidp.errors import MAX_NAMES, ReplicaMismatchError, explain

from .digest import digest_of, sum_of_bits

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store

    from minidp.comm import CommHook
    from minidp.core import Ledger

# What "auto" compares: a checkpoint that one rank has loaded shows in the first step.
AUTO_STEPS = frozenset({0, 1, 100})  # each costs a step of a tiny model
AUTO_EVERY = 1000
PATIENCE = 10  # steps in which replicas differ, and no optimizer steps
CONFIRM_SECONDS = 10.0  # for other ranks to step, too
POLL_SECONDS = 0.005
ROUNDING = 1e-3  # of the largest element; or a few times what the dtype can tell
MOST_BYTES = 64 * 2**20  # to be broadcast and compared element by element

# Bits that ranks exchange: why replicas may differ legally.
LOCAL_UPDATES = 1  # parameters changed inside no_sync()
# A foreign comm hook; or unsynced="warn" or "ignore" made no error of a mistake.
ON_PURPOSE = 2


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
    "load the last checkpoint on all ranks and call reset(), or wrap the module again",
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


class ReplicaCheck(Observer):
    """Compare replicas every so many steps (``every``); at most one per wrapper.

    The wrapper calls `begin` before forwards for which `is_due`. Only then this is an
    observer of ``queue``, whose `finished` compares at the backward's end. After a
    difference the optimizer guard calls `confirm` before a step.
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
        self.name = ""  # in the store: new, and equal on all ranks; "": no store
        self.reset()

    def reset(self) -> None:
        """Forget pending checksums and differences, and when replicas agreed last."""
        self.postpone()
        self._agreed = -1  # the last step at whose beginning all replicas were equal
        self.suspect: _Snapshot | None = None  # differed, and nobody has stepped since
        self._waited = 0  # steps, for an optimizer

    @property
    def is_due(self) -> bool:
        """Return whether to compare in this step: scheduled, or after a difference."""
        step = self._ledger.finalized
        every = AUTO_EVERY if isinstance(self._every, str) else self._every
        is_early = self._is_auto and step in AUTO_STEPS
        return self.suspect is not None or is_early or step % every == 0

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
            frozen = {} if self._agreed >= 0 else frozen
        tensors = {**params, **frozen}
        buffer_sums = {name: int(sum_of_bits(each)) for name, each in buffers.items()}
        digest = digest_of([*tensors.values(), *buffers.values()])
        hook = self._queue.averaging.comm_hook
        was_hooked = hook is not None and hook.has_run and is_foreign(hook)
        self.postpone()
        step = self._ledger.finalized
        self._under_way = _Snapshot(step, tensors, buffer_sums, digest, was_hooked)
        self._queue.observers.insert(0, self)  # before those that step optimizers

    def postpone(self) -> None:
        """Drop the checksum of `begin`, if any: no backward's end will compare it."""
        self._under_way = None
        if self in self._queue.observers:
            self._queue.observers.remove(self)

    # -- at the end of a backward ------------------------------------------------------

    def finished(self) -> None:
        """Collective: end a backward by comparing the checksums that `begin` stored.

        ReplicaMismatchError if ranks are at different steps. "auto" accepts a
        difference with a known reason (and warns once of updates in no_sync()). Any
        other is compared again: by `confirm` in the next step; or at once by
        `_confirm`, if module buffers are compared, optimizers step in backwards, or
        none has come for 10 steps (without "auto" 1).
        """
        snapshot, ledger = self._under_way, self._ledger
        assert snapshot is not None
        self.postpone()
        reasons = LOCAL_UPDATES * ledger.was_local
        reasons |= ON_PURPOSE * (snapshot.was_hooked or ledger.was_excused)
        rows = self._gather([snapshot.step, reasons, int(snapshot.digest)])
        steps, all_reasons, digests = zip(*rows, strict=True)
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
            ledger.was_local = ledger.was_excused = False
        elif self._is_auto and any(all_reasons):
            self.suspect = None
            # Local updates alone may be a mistake as well.
            if {*all_reasons} <= {0, LOCAL_UPDATES} and not self._has_warned:
                self._warn(snapshot.step, self._find_differences(snapshot), _LOCAL)
                ledger.was_told = True
        else:  # the next step compares again; or this one, after a long wait
            self.suspect = snapshot
            self._waited += 1
            limit = PATIENCE if self._is_auto else 1
            if self._waited > limit or snapshot.buffer_sums or not self.awaits_step:
                self._confirm(snapshot)

    def _agree(self, step: int) -> None:
        self._agreed = step
        self.suspect, self._waited = None, 0

    # -- before a step -----------------------------------------------------------------

    def confirm(self) -> None:
        """Compare again before an optimizer step, if `finished` saw a difference.

        Raises or warns as `_confirm`. Waits up to 10 s until all ranks want to step; if
        some do not come, or ranks share no store to find that out, returns: the next
        backwards compare again, and the last of them confirms a difference itself.
        """
        if self.suspect is None:
            return
        group = self._queue.communicator.group
        if not (self.name and has_store(group)):
            return
        store = group_store(group, f"{self.name}/{self.suspect.step}")
        if all_come(store, group.size()):
            self._confirm(self.suspect)

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
        elif self._is_auto and self._is_rounding(snapshot, [*found]):
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

    def _is_rounding(self, snapshot: _Snapshot, names: Sequence[str]) -> bool:
        """Collective: return whether parameters now are close to rank 0's on all ranks.

        Compares those of ``names`` by `_is_close`, in order, until 64 MiB are compared;
        the rest is taken to be close.
        """
        communicator, are_close, left = self._queue.communicator, True, MOST_BYTES
        for mine in (snapshot.tensors[name].detach() for name in names):
            if left > 0:
                root = mine.clone()
                with communicator.blocking("finding out how much replicas differ"):
                    broadcast_coalesced([root], communicator.group)
                are_close &= _is_close(mine, root)
                left -= mine.nbytes
        return all(is_small for (is_small,) in self._gather([are_close]))


def _is_close(mine: torch.Tensor, root: torch.Tensor) -> bool:
    """Return whether no element is off by more than rounding may explain.

    That is 1e-3 (or 16 eps of the dtype) of the largest finite element of ``root``.
    """
    if mine.is_complex():
        mine, root = torch.view_as_real(mine), torch.view_as_real(root)
    eps = torch.finfo(mine.dtype).eps if mine.is_floating_point() else 0.0
    mine, root = mine.double(), root.double()
    largest = float(root.abs().nan_to_num(nan=0.0, posinf=0.0).max())
    limit = max(ROUNDING, 16 * eps) * largest
    return torch.allclose(mine, root, rtol=0.0, atol=limit, equal_nan=True)


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
    deadline = time.monotonic() + CONFIRM_SECONDS
    if store.add("come", 1) == num_ranks:
        store.compare_set("verdict", "", "all")
    while not store.check(["verdict"]):
        if time.monotonic() > deadline:
            store.compare_set("verdict", "", "not all")
        time.sleep(POLL_SECONDS)
    return store.get("verdict") == b"all"
