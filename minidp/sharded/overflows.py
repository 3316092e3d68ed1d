"""Let a ``GradScaler`` find on all ranks what one of them has: infinity or NaN.

A scaler looks at the gradients of its rank, and skips the step if one is not finite.
With DDP all ranks see the same averages. Here each sees its share, so that they would
do different things. So a rank whose share is finite gets an infinity into one of its
gradients if another rank has one. All ranks then skip the step, and lower their scale.

A scaler refuses a step if there is no gradient to look at. With DDP that means that no
rank has any. Here the share of one rank may be without gradients, for example because
this step has used another branch of the module. Then that rank gets a gradient of zeros
to be looked at, a *stand-in*, which is gone again when the optimizer steps, or, if it
does not, at the end of the next backward.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

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
        self._params, self._queue = reducer.params, reducer.queue
        steppers = range(max(owners.stepper) + 1)
        self._own = [owners.owned_by(reducer.rank, stepper) for stepper in steppers]
        # By optimizer: the parameter that gets a stand-in, and the stand-in if it has.
        self._standing = [self._choose(owners, stepper) for stepper in steppers]
        self._stand_ins: dict[int, Tensor] = {}
        # For each optimizer: is something not finite, and is there any gradient?
        part = 2 * len(self._own), torch.int64
        cpu = torch.device("cpu")
        what = "which gradients are not finite"
        self.exchange = Exchange(what, part, cpu, reducer.communicator)

    @torch.no_grad()
    def share(self) -> None:
        """Tell the other ranks, and hear from them; all ranks call it together."""
        self._forget_unused()
        mine = self.exchange.blank()
        are_infinite = []
        for number, own in enumerate(self._own):
            grads = self._grads(own)
            are_infinite.append(not all(map(_is_finite, grads)))
            mine[2 * number] = are_infinite[-1]
            mine[2 * number + 1] = bool(grads)
        self.exchange.start(mine)
        counts = self.exchange.take().view(-1, 2).tolist()
        for number, (not_finite, having) in enumerate(counts):
            grads = self._grads(self._own[number])
            if having and not grads:
                grads = [self._stand_in(number)]
            large = [grad for grad in grads if grad.numel()]
            if not_finite and large and not are_infinite[number]:
                large[0].fill_(torch.inf)

    def drop(self, number: int | None = None) -> None:
        """Take away the stand-in of an optimizer that steps now, or of all."""
        for each in [*self._stand_ins] if number is None else [number]:
            grad = self._stand_ins.pop(each, None)
            param = self._params[self._standing[each]]
            if grad is not None and param.grad is grad:
                param.grad = None

    def _forget_unused(self) -> None:
        """Take away stand-ins of the last reduction that this one has not replaced."""
        for number in [*self._stand_ins]:
            if self._standing[number] in self._queue.untouched:
                self.drop(number)
        self._stand_ins.clear()

    @contextmanager
    def hidden(self) -> Iterator[None]:
        """Take the stand-ins away while the block runs."""
        params = {n: self._params[self._standing[n]] for n in self._stand_ins}
        there = [n for n, p in params.items() if p.grad is self._stand_ins[n]]
        for number in there:
            params[number].grad = None
        try:
            yield
        finally:
            for number in there:
                params[number].grad = self._stand_ins[number]

    def _choose(self, owners: Owners, stepper: int) -> int:
        """Return the smallest parameter of an optimizer, an own one if there is any."""
        everybody = [i for i, each in enumerate(owners.stepper) if each == stepper]
        sizes = {i: self._params[i].numel() for i in self._own[stepper] or everybody}
        not_empty: Iterable[int] = [i for i in sizes if sizes[i]] or sizes
        return min(not_empty, key=sizes.__getitem__, default=0)

    def _stand_in(self, number: int) -> Tensor:
        param = self._params[self._standing[number]]
        param.grad = grad = torch.zeros_like(param)
        self._stand_ins[number] = grad
        return grad

    def _grads(self, own: list[int]) -> list[Tensor]:
        grads = (self._params[i].grad for i in own)
        return [grad for grad in grads if grad is not None]


def _is_finite(grad: Tensor) -> bool:
    # The sum of what is not finite is not finite; a sum that overflows looks closer.
    return bool(grad.sum().isfinite()) or bool(grad.isfinite().all())
