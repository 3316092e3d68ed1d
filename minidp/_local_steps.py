"""Optimizer steps inside no_sync(): local SGD, or an indentation too deep?

::

    local SGD   no_sync: backward, step | backward, step | average parameters | ...
    mistake     no_sync: backward, step | backward, step | backward, step | ...

Who averages changes parameters between a step and the next forward, which nothing else
does. If that never happens, replicas train apart. (Where synchronised backwards come in
between, `_desync` compares the replicas.)
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Sequence

import torch

from ._overrides import passing
from ._reducer import Reducer
from ._warn import warn
from .errors import explain

logger = logging.getLogger("minidp")
PATIENCE = 1000  # steps: more than local SGD makes before it averages
_MOST_PARAMS, _MOST_ELEMENTS = 8, 256  # to recognise that somebody averaged


class LocalSteps:
    """Counts them, and looks whether somebody averages.

    Args:
        reducer: of the parameters; when it goes, it is too late to average.
    """

    def __init__(self, reducer: Reducer) -> None:
        self._rank, self._ledger = reducer.rank, reducer.ledger
        self._params = reducer.params
        self._after: list[torch.Tensor] = []  # a sample of them, after the last step
        self._others: list[torch.Tensor] = []  # 0-D: it had changed by the next forward
        self._count = 0
        self._since = 0  # synchronised backwards
        self._is_over = reducer.pipeline.group.size() == 1  # nothing to say any more
        weakref.finalize(reducer, self._end)

    def note(self, finalized: int) -> None:
        """An optimizer has stepped, inside no_sync(), with our local gradients."""
        if self._is_over:
            return
        if finalized != self._since:
            self._since, self._count = finalized, 0
        self._count += 1
        self._after = [part.clone() for part in _sample_of(self._params)]
        if self._count == PATIENCE:
            if not self._ledger.was_told and not self._was_averaged():
                warn(self._text())
            self._is_over = True

    def look(self) -> None:
        """Before a forward. The device is not waited for."""
        if self._after and not self._is_over:
            now = _sample_of(self._params)
            pairs = zip(self._after, now, strict=True)
            self._others += [(a != b).any().to(now[0].device) for a, b in pairs]
            self._others = [torch.stack(self._others).any()]
            self._after = []

    def _was_averaged(self) -> bool:
        self.look()
        return any(map(bool, self._others))

    def _end(self) -> None:
        """The object is gone, or the process ends."""
        try:
            is_told = self._is_over or self._ledger.was_told
            if not is_told and self._count and not self._was_averaged():
                logger.warning(self._text())
        except RuntimeError:
            return  # the device went first
        finally:
            self._is_over = True

    def _text(self) -> str:
        return explain(
            self._rank,
            "An optimizer stepped inside no_sync(), with gradients that stayed local "
            f"(steps: {self._count}), and nobody averaged parameters in between: the "
            "replicas have trained apart, unless gradients are averaged by hand.",
            remedy="take the last forward and backward before optimizer.step(), and "
            "the step itself, out of the no_sync() block (an indentation too deep); "
            "for local SGD average the parameters now and then; if gradients are "
            f"averaged by hand, {passing(unsynced='ignore')}. This is said once",
        )


def _sample_of(params: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Corners of some parameters: they are copied after each local step.

    Not of one alone: biases may have the same gradient on all ranks.
    """
    some = params[:: max(1, len(params) // _MOST_PARAMS)]
    return [corner_of(param) for param in some]


def corner_of(tensor: torch.Tensor) -> torch.Tensor:
    """A few hundred elements at most; a view."""
    tensor = tensor.detach()
    if not tensor.dim():
        return tensor.view(1)
    return tensor[(slice(round(_MOST_ELEMENTS ** (1 / tensor.dim()))),) * tensor.dim()]
