"""Let an optimizer step this rank's rows of a divided parameter, and know no others.

While ``step()`` runs, the optimizer's groups have a *part* in the place of the
parameter: a parameter that is a view of the own rows, whose ``.grad`` is a view of the
same rows of ``.grad``. So the optimizer makes its state for these rows only, and steps
nothing else. Before and after, groups and state have the parameter itself, as the
script has put it there::

    groups  [w, b]  --enter-->  [rows of w, b]  --step()--  leave-->  [w, b]
    state   {w: rows of exp_avg}    {rows of w: ...}                  {w: ...}

So all that a script does with an optimizer between two steps finds the parameters that
it knows: schedulers, ``zero_grad()``, a ``GradScaler``, ``add_param_group``, libraries
that look parameters up. Only the state of a divided parameter has another shape.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer


class _Part(NamedTuple):
    """What an optimizer has in the place of a parameter."""

    param: nn.Parameter
    rows: slice
    part: nn.Parameter


class Exchanged:
    """The parts that are in an optimizer now, if any. It holds nothing but these."""

    def __init__(self) -> None:
        self.groups: list[tuple[dict[str, Any], list[Tensor]]] = []
        self.parts: list[_Part] = []

    def leave(self, optimizer: Optimizer) -> None:
        """Put the parameters back."""
        for group, params in self.groups:
            group["params"] = params
        for param, rows, part in self.parts:
            _rename(optimizer.state, part, param)
            own = param.detach()[rows]
            if part.data_ptr() != own.data_ptr():  # it was given other memory
                with torch.no_grad():
                    own.copy_(part)
            if part.grad is None:
                param.grad = None
        self.groups.clear()
        self.parts.clear()


class Parts:
    """The parts of one optimizer's divided parameters.

    Args:
        rows: The rows of this rank, by parameter.
    """

    def __init__(self, rows: Mapping[nn.Parameter, slice]) -> None:
        self._rows = rows
        self.now = Exchanged()

    def enter(self, optimizer: Optimizer) -> None:
        """Put parts into the place of parameters."""
        for group in optimizer.param_groups if self._rows else ():
            params = group["params"]
            found = {p: self._part(p) for p in params if p in self._rows}
            if found:
                self.now.groups.append((group, params))
                self.now.parts += found.values()
                group["params"] = [found[p].part if p in found else p for p in params]
        for param, _, part in self.now.parts:
            _rename(optimizer.state, param, part)

    def _part(self, param: nn.Parameter) -> _Part:
        rows = self._rows[param]
        part = nn.Parameter(param.detach()[rows], requires_grad=param.requires_grad)
        if param.grad is not None:
            part.grad = param.grad[rows]
        return _Part(param, rows, part)

    def leave(self, optimizer: Optimizer) -> None:
        """Put the parameters back, if parts are in their place."""
        self.now.leave(optimizer)


def _rename(state: dict[Any, Any], old: Tensor, new: Tensor) -> None:
    if old in state:
        state[new] = state.pop(old)


def rows_of(tensor: Tensor, rows: slice | None) -> Tensor:
    """Return some rows of a tensor, or the tensor if it is not divided."""
    return tensor if rows is None else tensor[rows]
