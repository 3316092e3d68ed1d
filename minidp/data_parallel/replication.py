"""Broadcast parameters and module buffers from one rank; compare them between ranks.

Averaged gradients keep replicas equal only if they were equal before. So all ranks get
the state of rank 0 at construction. Forwards broadcast module buffers, such as running
means, which each rank changes by its own batches. And now and then the replicas are
compared, because a script may change the parameters of one rank alone.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Literal

import torch
from torch import nn

from minidp.comm import (
    PeerMonitor,
    ProcessGroup,
    broadcast_coalesced,
    group_of_forwards,
    has_store,
    is_builtin,
)
from minidp.config import AUTO
from minidp.core import Observer, Reducer
from minidp.replica import Doubts, ReplicaCheck, check_writable, verify
from minidp.sync_batchnorm import connect_layers

from .arguments import Arguments


class Replication:
    """Broadcast parameters and buffers of one wrapper, and compare its replicas.

    The constructor communicates nothing. It only collects the module buffers.

    Args:
        reducer: The reducer of the wrapper.
        module: The wrapped module.
        ignored: The names of parameters and buffers on the module's ignore list.
        key: The name of this wrapper in the store.
    """

    def __init__(
        self, reducer: Reducer, module: nn.Module, ignored: set[str], key: str
    ) -> None:
        self._reducer = reducer
        self._key = key  # equal on all ranks, unless they may wrap alone
        self._num_resets = 0
        self.ignored = ignored  # names of parameters and module buffers
        self.doubts = Doubts()
        self.check: ReplicaCheck | None = None  # compares replicas now and then
        self.every: int | Literal["auto"] = 0  # every so many steps; 0 is never
        self.warns = False  # unsynced="warn": of what was excused, too
        # Whether the next synchronised step has to find out if the other ranks compare,
        # too; and whether it is the first one of a wrapper that others may not have.
        self._is_alone = self._is_new = False
        # Called instead of the broadcast of module buffers.
        self.buffer_hook: Callable[[dict[str, torch.Tensor]], None] | None = None
        # Called after the module, in forwards that would broadcast them.
        self.late_buffer_hook: Callable[[dict[str, torch.Tensor]], None] | None = None
        self._writable: dict[str, torch.Tensor] = {}  # buffers that were checked
        self.collect(module)

    def collect(self, module: nn.Module) -> None:
        """Look again which module buffers there are, without those to ignore."""
        named, ignored = module.named_buffers(), self.ignored
        self.buffers = {name: value for name, value in named if name not in ignored}

    def others(self, module: nn.Module) -> dict[str, nn.Parameter]:
        """Return by name the parameters that are neither averaged nor ignored."""
        known = {*self._reducer.names, *self.ignored}
        return {n: p for n, p in module.named_parameters() if n not in known}

    def broadcast_buffers(self, module: nn.Module, root: int = 0) -> None:
        """Give all ranks the module buffers of rank ``root``, and wait for it.

        All ranks must call it together. If the user has registered a hook for module
        buffers, that hook is called instead.
        """
        self.collect(module)  # the user may have re-assigned or added some
        if self.buffer_hook is not None:
            self.buffer_hook(self.buffers)
            return
        known = self._writable.get
        check_writable({n: b for n, b in self.buffers.items() if known(n) is not b})
        self._writable = self.buffers
        with self._reducer.communicator.blocking("broadcasting module buffers"):
            group = group_of_forwards(self._reducer.communicator.group)
            broadcast_coalesced(list(self.buffers.values()), group, root)

    def call_late_buffer_hook(self, module: nn.Module) -> None:
        """Call the user's hook that runs after forwards with the module's buffers."""
        self.collect(module)
        assert self.late_buffer_hook is not None
        self.late_buffer_hook(self.buffers)

    def broadcast_parameters(self, module: nn.Module, root: int) -> None:
        """Give all ranks the parameters of rank ``root``, and wait for it.

        All ranks must call it together. Frozen parameters are sent, too, and delayed
        ones of another module; those on the ignore list are not.
        """
        own = [p for n, p in module.named_parameters() if n not in self.ignored]
        # Delayed parameters may belong to another module; send each tensor once.
        state = list({id(p): p for p in (*own, *self._reducer.params)}.values())
        with self._reducer.communicator.blocking("broadcasting parameters"):
            broadcast_coalesced(state, self._reducer.communicator.group, root)

    def broadcast_all(self, module: nn.Module, root: int) -> None:
        """Give all ranks the parameters and buffers of rank ``root``, and wait for it.

        All ranks must call it together. Buffers that forwards do not broadcast are
        sent, too; what is on the ignore list is not.
        """
        self.broadcast_parameters(module, root)
        self.collect(module)
        with self._reducer.communicator.blocking("broadcasting module buffers"):
            group = self._reducer.communicator.group
            broadcast_coalesced(list(self.buffers.values()), group, root)

    def start(self, checked: Arguments, *, verifies: bool) -> None:
        """Compare the ranks' modules and options, and give all ranks rank 0's state.

        All ranks must call it together. Afterwards the heartbeat reports under the key
        of this wrapper, and the buckets are in shared memory if all ranks can.

        Args:
            checked: The arguments of the constructor.
            verifies: With False (``init_sync=False``) nothing of this is done, and only
                delayed parameters are sent.

        Raises:
            ReplicaMismatchError: The modules or options differ. All ranks raise it.
        """
        communicator = self._reducer.communicator
        group = communicator.group
        if verifies:  # the parameters travel in messages as large as the buckets
            self._reducer.free_buckets()
        with communicator.blocking("comparing the replicas"):
            if verifies:
                self._key = verify.start_equal(
                    checked.replica,
                    self.buffers,
                    group,
                    options=checked.compared,
                    device=checked.devices.device,
                    sends_buffers=checked.init_buffers,
                )
                self.connect(checked.replica.module)
            else:
                managed = checked.replica.managed
                delayed = [managed[name] for name in checked.replica.delayed]
                broadcast_coalesced(delayed, group)
        if verifies:
            communicator.peers.move_to(group, self._key, leaves_word=True)
            self._reducer.adopt(self._reducer.queue.layout, in_shared_memory=True)

    def connect(self, module: nn.Module) -> None:
        """Create the groups that forwards use, if need be, and begin comparisons.

        All ranks must call it together. Comparisons use a new name in the store, and
        forget checksums that are under way and differences that were seen.
        """
        communicator = self._reducer.communicator
        with communicator.watching("connecting the group of forwards"):
            group_of_forwards(communicator.group)
            connect_layers(module)
        if self.check is not None:
            self.check.name = f"replicas/{self.key_now()}"
            self.check.reset()

    def key_now(self) -> str:
        """Return the wrapper's place in the store, which is new after each reset."""
        return f"{self._key}/{self._num_resets}"

    def compare_on(self, group: ProcessGroup, *, new: bool, alone: bool) -> None:
        """Compare the replicas of a group from now on, as often as `every` says.

        This does not communicate yet.

        Args:
            group: The ranks to compare.
            new: Whether other ranks of the group may have no such wrapper, or other
                options (``init_sync=False``, another group).
            alone: Whether other ranks may not compare, so that the next synchronised
                step does it only if they do.
        """
        is_auto = self.every == AUTO
        self._is_new, self._is_alone = new, alone
        if not self.every or (is_auto and not is_builtin(group)):
            self.stop_comparing()
            return
        if self.check is None:
            ledger = self._reducer.ledger
            self.check = ReplicaCheck(
                self._reducer.queue, ledger, self.every, self.doubts
            )
            self.check.warns = self.warns
        if alone:
            self.check.reset()
            self.check.meet("", is_first=True)

    def next_reset(self) -> str:
        """Count a call of `DataParallel.reset`, and return a new key for it.

        The key is equal on all ranks if they have called `reset` equally often.
        """
        self._count_if_new()  # a rank may not have come to its first forward
        self._num_resets += 1
        return f"reset/{self._key}/{self._num_resets - 1}"

    def stop_comparing(self) -> None:
        """Stop comparing the replicas, and forget any difference that was seen."""
        if self.check is not None:
            self.check.reset()  # the optimizer guard holds it, too
            self.check = None

    def add_stepper(self, stepper: Observer) -> None:
        """Register an observer that steps optimizers inside the backward.

        Replicas that differ are then reported at the end of that backward, because
        there is no call of ``optimizer.step()`` that could do it. Some buckets may have
        stepped by then.
        """
        self._reducer.queue.observers.append(stepper)
        self.compares_at_once()

    def compares_at_once(self) -> None:
        """Report replicas that differ at the end of the backward that finds them so.

        No step is observed that could do it later.
        """
        if self.check is not None:
            self.check.awaits_step = False

    def postpone_comparison(self) -> None:
        """Forget the checksum of a forward, so that its backward compares nothing."""
        if self.check is not None:
            self.check.put_off()

    @property
    def may_compare(self) -> bool:
        """Whether `compare_if_due` has anything to do, or to look at."""
        return self._is_new or self.check is not None

    def compare_if_due(self, module: nn.Module, *, with_buffers: bool) -> None:
        """Take a checksum of this replica if a comparison is due.

        The end of the next backward compares it. The checksum is of all parameters
        except those on the ignore list, and if ``with_buffers`` also of the module
        buffers. With "auto" some of these are left out (`ReplicaCheck.begin`).
        """
        key = self._count_if_new()
        if key and self.check is not None and self._is_alone:
            self.check.meet(key, is_first=True)
        if self.check is None:
            return
        if self.doubts.was_excused:
            self.check.meet_after_excuse()
        if not self.check.is_due:
            return
        buffers = self.buffers.items() if with_buffers else ()
        with_values = {name: each for name, each in buffers if not each.is_meta}
        self.check.begin(self._reducer.named, self.others(module), with_values)

    def _count_if_new(self) -> str:
        """Return a key for the first comparison of a wrapper, or "" if it is not new.

        A rank that never compares asks for it, too, so that all ranks have asked
        equally often for other wrappers of these parameters.
        """
        if not self._is_new:
            return ""
        self._is_new = False
        return self._common_key("alone")

    def leave(self) -> None:
        """Tell the ranks of the present group that the wrapper moves to another one.

        Some of them may be in a collective that this rank has finished. They would miss
        its heartbeats, and take it for dead.
        """
        self._reducer.communicator.peers.leave()

    def move(self) -> None:
        """Follow the wrapper to another group, in whose store it needs a new place.

        Wrappers from several groups may meet there, each with a key of its old group.
        Hang reports are then about the new group's ranks, which have other numbers. If
        it has no store, there are none from now on.
        """
        communicator = self._reducer.communicator
        if not has_store(communicator.group):
            communicator.peers = PeerMonitor()  # the old ones know the old ranks
            return
        self._key, self._num_resets = self._common_key("moved"), 0
        communicator.peers.move_to(communicator.group, self._key, has_met=False)

    def _common_key(self, why: str) -> str:
        """Return a new store key for this wrapper, or "" without a store.

        Two ranks get the same key if they have asked equally often, for this reason and
        for wrappers of these parameters on the group.
        """
        group = self._reducer.communicator.group
        if not has_store(group):
            return ""
        names = hashlib.sha256(" ".join(self._reducer.names).encode()).hexdigest()[:12]
        return verify.next_key(group, f"{verify.WRAPPED}, {why}, {names}")
