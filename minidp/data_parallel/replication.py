"""Broadcast parameters and module buffers from one rank; compare them between ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
from torch import nn

from minidp.comm import group_of_forwards
from minidp.core import Observer, Reducer
from minidp.replica import ReplicaCheck, parameters, verify

from .arguments import Arguments


class Replication:
    """Broadcast and compare the tensors of one module, when its methods are called."""

    def __init__(
        self, reducer: Reducer, module: nn.Module, ignored: set[str], key: str
    ) -> None:
        self._reducer = reducer
        self._key = key  # equal on all ranks, unless they may wrap alone
        self._num_resets = 0
        self.ignored = ignored  # names of parameters and module buffers
        self.check: ReplicaCheck | None = None  # compares replicas now and then
        # Called instead of the broadcast of module buffers.
        self.buffer_hook: Callable[[dict[str, torch.Tensor]], None] | None = None
        self.collect(module)

    def collect(self, module: nn.Module) -> None:
        """Set `buffers` to the module buffers of ``module`` that are not ignored."""
        self.buffers = parameters.module_buffers(module, frozenset(self.ignored))

    def broadcast_buffers(self, module: nn.Module, root: int = 0) -> None:
        """Collective: copy rank ``root``'s module buffers, or call `buffer_hook`."""
        self.collect(module)  # the user may have re-assigned or added some
        if self.buffer_hook is not None:
            self.buffer_hook(self.buffers)
            return
        with self._reducer.communicator.blocking("broadcasting module buffers"):
            group = group_of_forwards(self._reducer.queue.communicator.group)
            verify.broadcast_state(list(self.buffers.values()), group, root)

    def broadcast_parameters(self, module: nn.Module, root: int) -> None:
        """Collective: copy rank ``root``'s parameters, frozen and delayed ones, too."""
        own = [p for n, p in module.named_parameters() if n not in self.ignored]
        # Delayed parameters may belong to another module; send each tensor once.
        state = list({id(p): p for p in (*own, *self._reducer.params)}.values())
        with self._reducer.communicator.blocking("broadcasting parameters"):
            verify.broadcast_state(state, self._reducer.queue.communicator.group, root)

    def start(self, checked: Arguments, *, verifies: bool) -> None:
        """Collective: verify that replicas are alike, copy rank 0's state, `connect`.

        ``verifies=False``: copy delayed parameters only. Gives the heartbeat a new key.
        """
        group, communicator = (
            self._reducer.queue.communicator.group,
            self._reducer.communicator,
        )
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
                verify.take_delayed(checked.replica, group)
        communicator.peers.move_to(group, self._key)

    def connect(self) -> None:
        """Collective: create the group for forwards; rename and reset `check`."""
        group_of_forwards(self._reducer.queue.communicator.group)
        if self.check is not None:
            self.check.name = f"replicas/{self._key}/{self._num_resets}"
            self.check.reset()

    def next_reset(self) -> str:
        """Return a new store key for `DataParallel.reset`, equal on all ranks."""
        self._num_resets += 1
        return f"reset/{self._key}/{self._num_resets - 1}"

    def compare_every(self, every: int | Literal["auto"]) -> None:
        """Create `check`, an observer that compares replicas every so many steps."""
        queue, names = self._reducer.queue, self._reducer.names
        self.check = ReplicaCheck(queue, names, every, self._reducer.ledger)
        queue.observers.append(self.check)

    def stop_comparing(self) -> None:
        """Remove `check`, if any: ranks no longer count the same steps."""
        if self.check is not None:
            self._reducer.queue.observers.remove(self.check)
            self.check.reset()  # the optimizer guard holds it, too
            self.check = None

    def add_stepper(self, stepper: Observer) -> None:
        """Let backwards call ``stepper``, and `check` confirm a difference at once."""
        self._reducer.queue.observers.append(stepper)
        if self.check is not None:
            self.check.awaits_step = False

    def postpone_comparison(self) -> None:
        """Drop the checksum of a forward, if any: its backward will not compare."""
        if self.check is not None:
            self.check.postpone()

    def compare_if_due(self, module: nn.Module, *, with_buffers: bool) -> None:
        """Take a checksum before a forward, if due; ranks compare it in the backward.

        Not of ignored tensors. ``with_buffers``: with module buffers, just broadcast.
        """
        check, step = self.check, self._reducer.ledger.finalized
        if check is None or not check.is_due(step):
            return
        known = {*self._reducer.names, *self.ignored}
        named = dict(module.named_parameters())
        frozen = {name: param for name, param in named.items() if name not in known}
        check.begin(
            step, self._reducer.params, frozen, self.buffers if with_buffers else {}
        )
