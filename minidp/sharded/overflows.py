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

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from minidp.accelerator import to_host, upload
from minidp.comm import way_of_hosts
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
        self._everybody = [
            [i for i, each in enumerate(owners.stepper) if each == stepper]
            for stepper in steppers
        ]
        # By optimizer: the parameter that gets a stand-in, and the stand-in if it has.
        self._standing = [self._choose(owners, stepper) for stepper in steppers]
        self._stand_ins: dict[int, Tensor] = {}
        # For each optimizer: has a rank what is not finite, and has it any gradient?
        part, communicator = (len(self._own), torch.int64), reducer.communicator
        self._device = self._queue.averaging.device
        what = "which gradients are not finite"
        self._infinities = Exchange(what, part, self._device, communicator)
        what = "which optimizers have gradients"
        _, device = way_of_hosts(communicator.group, communicator.device)
        self._presence = Exchange(what, part, device, communicator)
        self.exchanges = self._infinities, self._presence

    @torch.no_grad()
    def share(self) -> None:
        """Tell the other ranks, and hear from them; all ranks call it together."""
        self._forget_unused()
        mine = self._infinities.blank()
        for number, own in enumerate(self._own):
            _note_infinity(self._grads(own), mine[number])
        before = mine.clone()
        self._infinities.start(mine)
        having = self._having()
        # On a device no host reads it.
        lacking = (self._infinities.take() > 0) & (before == 0)
        for number, own in enumerate(self._own):
            grads = self._grads(own)
            if having[number] and not grads:
                grads = [self._stand_in(number)]
            large = [grad for grad in grads if grad.numel()]
            if large:
                chosen = min(large, key=Tensor.numel)
                is_lacking = lacking[number].to(chosen.device, non_blocking=True)
                chosen.masked_fill_(is_lacking, torch.inf)

    def _having(self) -> list[bool]:
        """Return for each optimizer whether some rank has a gradient of it.

        Owners have those that this reduction has written, which all ranks know. About
        older ones they ask each other.
        """
        untouched = {*self._queue.untouched}
        found = [not untouched.issuperset(each) for each in self._everybody]
        if not all(found):
            mine = [int(bool(self._grads(own))) for own in self._own]
            self._presence.start(upload(mine, torch.int64, self._presence.device))
            found = [count > 0 for count in to_host(self._presence.take()).tolist()]
        return found

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
        some = self._own[stepper] or self._everybody[stepper]
        sizes = {i: self._params[i].numel() for i in some}
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


def _note_infinity(grads: Sequence[Tensor], to: Tensor) -> None:
    """Set a number, 0 so far, to 1 if gradients are not finite, and read no device."""
    if all(grad.is_cpu for grad in grads):
        to.fill_(not all(map(_is_finite, grads)))
        return
    kinds: dict[object, list[Tensor]] = {}
    for grad in grads:
        if grad.numel():
            kinds.setdefault((grad.device, grad.dtype), []).append(grad)
    for of_kind in kinds.values():
        # A kernel for all, which writes no copy.
        largest = torch.stack(torch._foreach_norm(of_kind, torch.inf))
        is_infinite = largest.isfinite().all().logical_not()
        to.bitwise_or_(is_infinite.to(to, non_blocking=True))


def _is_finite(grad: Tensor) -> bool:
    # The sum of what is not finite is not finite; a sum that overflows looks closer.
    return bool(grad.sum().isfinite()) or bool(grad.isfinite().all())
