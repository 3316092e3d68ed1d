"""Broadcast parameters and module buffers from one rank; compare them between ranks."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Literal

import torch
from torch import nn

from minidp.comm import (
    ProcessGroup,
    broadcast_coalesced,
    group_of_forwards,
    has_store,
    is_builtin,
)
from minidp.config import AUTO
from minidp.core import Observer, Reducer
from minidp.replica import Doubts, ReplicaCheck, check_writable, verify

from .arguments import Arguments


class Replication:
    """Broadcast one wrapper's parameters and buffers; hold its `ReplicaCheck`, if any.

    The constructor only collects module buffers. ``ignored``: names of parameters and
    buffers; ``key``: of this wrapper in the store.
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
        self.every: int | Literal["auto"] = 0  # how often; 0: never
        self.warns = False  # unsynced="warn": of what was excused, too
        # The other ranks are not known to compare: find out in the next step.
        self.is_alone = False
        # Called instead of the broadcast of module buffers.
        self.buffer_hook: Callable[[dict[str, torch.Tensor]], None] | None = None
        # Called after the module, in forwards that would broadcast them.
        self.late_buffer_hook: Callable[[dict[str, torch.Tensor]], None] | None = None
        self._writable: dict[str, torch.Tensor] = {}  # buffers that were checked
        self.collect(module)

    def collect(self, module: nn.Module) -> None:
        """Set `buffers` to the module's buffers now, by name, without ignored ones."""
        named, ignored = module.named_buffers(), self.ignored
        self.buffers = {name: value for name, value in named if name not in ignored}

    def others(self, module: nn.Module) -> dict[str, nn.Parameter]:
        """Return parameters by name that are neither averaged nor ignored: frozen."""
        known = {*self._reducer.names, *self.ignored}
        return {n: p for n, p in module.named_parameters() if n not in known}

    def broadcast_buffers(self, module: nn.Module, root: int = 0) -> None:
        """Collective: give rank ``root``'s module buffers to all ranks; wait.

        `collect` them first. If the user has set `buffer_hook`, only call it with them.
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
        """Call `late_buffer_hook`, which is set, with the module's buffers now."""
        self.collect(module)
        assert self.late_buffer_hook is not None
        self.late_buffer_hook(self.buffers)

    def broadcast_parameters(self, module: nn.Module, root: int) -> None:
        """Collective: give rank ``root``'s parameters to all ranks; wait.

        Also frozen ones, and delayed ones of another module; not those on the ignore
        list.
        """
        own = [p for n, p in module.named_parameters() if n not in self.ignored]
        # Delayed parameters may belong to another module; send each tensor once.
        state = list({id(p): p for p in (*own, *self._reducer.params)}.values())
        with self._reducer.communicator.blocking("broadcasting parameters"):
            broadcast_coalesced(state, self._reducer.communicator.group, root)

    def broadcast_all(self, module: nn.Module, root: int) -> None:
        """Collective: give rank ``root``'s parameters and buffers to all ranks; wait.

        Also buffers that forwards do not broadcast; none on the ignore list.
        """
        self.broadcast_parameters(module, root)
        self.collect(module)
        with self._reducer.communicator.blocking("broadcasting module buffers"):
            group = self._reducer.communicator.group
            broadcast_coalesced(list(self.buffers.values()), group, root)

    def start(self, checked: Arguments, *, verifies: bool) -> None:
        """Collective: compare the ranks' modules and options; send out rank 0's state.

        ReplicaMismatchError on all ranks if they differ. Then `connect`, move the
        heartbeat to this wrapper's store key, and the buckets to shared memory if all
        ranks can. ``verifies=False`` (``init_sync``): instead of all that only send
        delayed parameters.
        """
        communicator = self._reducer.communicator
        group = communicator.group
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
                self.connect()
            else:
                managed = checked.replica.managed
                delayed = [managed[name] for name in checked.replica.delayed]
                broadcast_coalesced(delayed, group)
        if verifies:
            communicator.peers.move_to(group, self._key)
            self._reducer.adopt(self._reducer.queue.layout, shares=True)

    def connect(self) -> None:
        """Collective: create the group that forwards use, if lacking; restart `check`.

        `check` gets a new store name, and forgets pending checksums and differences.
        """
        group_of_forwards(self._reducer.communicator.group)
        if self.check is not None:
            self.check.name = f"replicas/{self.key_now()}"
            self.check.reset()

    def key_now(self) -> str:
        """Return the wrapper's place in the store, a new one after each reset."""
        return f"{self._key}/{self._num_resets}"

    def compare_on(self, group: ProcessGroup, *, alone: bool) -> None:
        """Compare replicas on ``group`` from now on, as often as `every` says.

        Not communicating. ``alone``: other ranks of the group may not compare, or may
        have no such wrapper (``init_sync=False``, another group, a copy): with "auto"
        the next synchronised step compares only if they do.
        """
        is_auto = self.every == AUTO
        if not self.every or (is_auto and not is_builtin(group)):
            self.stop_comparing()
            return
        if self.check is None:
            ledger = self._reducer.ledger
            self.check = ReplicaCheck(
                self._reducer.queue, ledger, self.every, self.doubts
            )
            self.check.warns = self.warns
        self.is_alone = alone
        if alone:
            self.check.reset()
            self.check.meet("", is_first=True)

    def next_reset(self) -> str:
        """Count a `DataParallel.reset`; return a new store key for it.

        The same on all ranks, if they have called `reset` equally often.
        """
        self._num_resets += 1
        return f"reset/{self._key}/{self._num_resets - 1}"

    def stop_comparing(self) -> None:
        """Drop `check` and any difference it has seen: never compare replicas again."""
        if self.check is not None:
            self.check.reset()  # the optimizer guard holds it, too
            self.check = None

    def add_stepper(self, stepper: Observer) -> None:
        """Register an observer that steps optimizers inside the backward.

        Replicas that differ are then reported at the end of that backward: no call of
        ``optimizer.step()`` could. Some buckets may have stepped by then.
        """
        self._reducer.queue.observers.append(stepper)
        if self.check is not None:
            self.check.awaits_step = False

    def postpone_comparison(self) -> None:
        """Drop a forward's checksum, if any: its backward compares no replicas."""
        if self.check is not None:
            self.check.postpone()

    def compare_if_due(self, module: nn.Module, *, with_buffers: bool) -> None:
        """If a comparison is due, take a checksum: the next backward's end compares it.

        Of all parameters but ignored ones; ``with_buffers``: of `buffers`, too; "auto"
        leaves out some (`ReplicaCheck.begin`). No-op without a `check`.
        """
        if self.check is None:
            return
        if self.is_alone:
            self.is_alone = False
            self.check.meet(self._common_key(), is_first=True)
        if self.doubts.was_excused:
            self.check.meet_after_excuse()
        if not self.check.is_due:
            return
        buffers = self.buffers.items() if with_buffers else ()
        with_values = {name: each for name, each in buffers if not each.is_meta}
        self.check.begin(self._reducer.named, self.others(module), with_values)

    def _common_key(self) -> str:
        """Return a new store key for the next comparison; "" without a store.

        Equal on ranks that have compared equally many wrappers of these parameters on
        the group since each was alone.
        """
        group = self._reducer.communicator.group
        if not has_store(group):
            return ""
        names = hashlib.sha256(" ".join(self._reducer.names).encode()).hexdigest()[:12]
        return verify.next_key(group, f"{verify.WRAPPED}, alone, {names}")
