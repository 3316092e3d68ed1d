"""Parameters and module buffers that follow one rank: when, which, from whom."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import nn

from . import _managed, _replicas
from ._desync import ReplicaCheck
from ._groups import group_of_forwards, is_builtin
from ._reducer import Reducer
from .config import AUTO

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class SharedState:
    """The part of `DataParallel` that keeps the state of replicas equal."""

    module: nn.Module
    process_group: ProcessGroup
    parameters_to_ignore: set[str]
    named_module_buffers: dict[str, torch.Tensor]
    modules_buffers: list[torch.Tensor]
    forward_sync_buffers: bool  # broadcast module buffers before forwards
    # Torch's schedule is one forward late: whether a forward broadcasts depends on
    # whether the one before it was to be synchronised.
    require_forward_param_sync: bool
    _reducer: Reducer
    _key: str  # of this object, on all ranks
    _num_resets: int
    _replica_check: ReplicaCheck | None
    _join_config: Any  # of Joinable

    def will_sync_module_buffers(self) -> bool:
        """Whether the next forward broadcasts module buffers (a collective)."""
        return bool(
            self.require_forward_param_sync
            and self.forward_sync_buffers
            and self.modules_buffers
        )

    def _sync_module_buffers(self, root: int = 0) -> None:
        """Collective: take the module buffers of a rank."""
        self._collect_module_buffers()  # some may have been re-assigned or added
        with self._reducer.pipeline.watch.whole("broadcasting module buffers"):
            group = group_of_forwards(self.process_group)
            _replicas.broadcast_state(self.modules_buffers, group, root)

    def _collect_module_buffers(self) -> None:
        """Look which module buffers there are."""
        self.named_module_buffers = _managed.module_buffers(
            self.module, frozenset(self.parameters_to_ignore)
        )
        self.modules_buffers = list(self.named_module_buffers.values())

    def _take_state_of(self, root: int) -> None:
        """Collective: take all parameters of a rank, and its module buffers if due."""
        ignored = self.parameters_to_ignore
        own = [p for n, p in self.module.named_parameters() if n not in ignored]
        # Also delayed ones of other modules; each once.
        state = list({id(p): p for p in (*own, *self._reducer.params)}.values())
        with self._reducer.pipeline.watch.whole("broadcasting parameters"):
            _replicas.broadcast_state(state, self.process_group, root)
        if self.forward_sync_buffers:
            self._sync_module_buffers(root)

    def _watch_values(self, every: int | Literal["auto"], *, is_verified: bool) -> None:
        """Compare the replicas every so many steps; 0: never.

        Args:
            every: steps. "auto": now and then, where several ranks agree on the steps.
            is_verified: all ranks were wrapped together, with the same options.
        """
        self._replica_check = None
        agrees = is_verified and is_builtin(self.process_group)
        if every and (agrees or every != AUTO):
            reducer = self._reducer
            ledger = reducer.ledger
            check = ReplicaCheck(reducer.pipeline, reducer.names, every, ledger)
            reducer.pipeline.observers.append(check)
            self._replica_check = check

    def _stop_comparing(self) -> None:
        """Ranks do not count steps alike any more."""
        if self._replica_check is not None:
            self._reducer.pipeline.observers.remove(self._replica_check)
            self._replica_check.start_over()  # the guard knows it, too
            self._replica_check = None

    def _connect(self) -> None:
        """Collective: make the groups now, while all ranks are here."""
        group_of_forwards(self.process_group)
        if self._replica_check is not None:
            self._replica_check.name = f"replicas/{self._key}/{self._num_resets}"
            self._replica_check.start_over()

    def _compare_if_due(self, *, with_module_buffers: bool) -> None:
        """Look at this replica before a forward, to compare it after its backward."""
        check, step = self._replica_check, self._reducer.ledger.finalized
        if check is None or not check.is_due(step) or self._join_config.enable:
            return
        managed, ignored = set(self._reducer.names), self.parameters_to_ignore
        frozen = {
            name: param
            for name, param in self.module.named_parameters()
            if name not in managed and name not in ignored and check.compares_frozen
        }
        # Else they may differ, and that is meant so.
        is_equal = with_module_buffers and check.compares_buffers
        buffers = self.named_module_buffers if is_equal else {}
        check.begin(step, self._reducer.params, frozen, buffers)

    @property
    def broadcast_buffers(self) -> bool:
        """Deprecated alias of ``forward_sync_buffers``."""
        return self.forward_sync_buffers

    @broadcast_buffers.setter
    def broadcast_buffers(self, enabled: bool) -> None:
        self.forward_sync_buffers = enabled
