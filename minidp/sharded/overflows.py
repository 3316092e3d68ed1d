"""Let a ``GradScaler`` find on all ranks what one of them has: infinity or NaN.

A scaler looks at the gradients of its rank, and skips the step if one is not finite.
With DDP all ranks see the same averages. Here each sees its share, so that they would
do different things. So a rank whose share is finite gets an infinity into one of its
gradients if another rank has one. All ranks then skip the step, and lower their scale.
"""

from __future__ import annotations

import torch
from torch import Tensor

from minidp.core import Exchange, Reducer

from .owners import Owners


class Overflows:
    """Which optimizers have gradients that are not finite, on some rank.

    Args:
        reducer: The reducer.
        owners: Who owns which parameter.
    """

    def __init__(self, reducer: Reducer, owners: Owners) -> None:
        self._params = reducer.params
        self._own = [
            owners.owned_by(reducer.rank, stepper)
            for stepper in sorted(set(owners.stepper))
        ]
        part = len(self._own), torch.int64
        cpu = torch.device("cpu")
        what = "which gradients are not finite"
        self.exchange = Exchange(what, part, cpu, reducer.communicator)

    @torch.no_grad()
    def share(self) -> None:
        """Tell the other ranks, and hear from them; all ranks call it together."""
        mine = self.exchange.blank()
        for number, own in enumerate(self._own):
            mine[number] = not all(map(_is_finite, self._grads(own)))
        self.exchange.start(mine)
        for number, count in enumerate(self.exchange.take().tolist()):
            grads = [grad for grad in self._grads(self._own[number]) if grad.numel()]
            if count and grads:
                grads[0].fill_(torch.inf)

    def _grads(self, own: list[int]) -> list[Tensor]:
        grads = (self._params[i].grad for i in own)
        return [grad for grad in grads if grad is not None]


def _is_finite(grad: Tensor) -> bool:
    # The sum of what is not finite is not finite; a sum that overflows looks closer.
    return bool(grad.sum().isfinite()) or bool(grad.isfinite().all())
