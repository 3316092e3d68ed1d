"""Parameters and module buffers that follow one rank: when, which, from whom."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn

from . import _managed, _replicas
from ._reducer import Reducer

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
            _replicas.broadcast_state(self.modules_buffers, self.process_group, root)

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

    @property
    def broadcast_buffers(self) -> bool:
        """Deprecated alias of ``forward_sync_buffers``."""
        return self.forward_sync_buffers

    @broadcast_buffers.setter
    def broadcast_buffers(self, enabled: bool) -> None:
        self.forward_sync_buffers = enabled
