"""Whether gradients fit their slots: a copy would convert or broadcast in silence."""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter

import torch

from ._layout import BucketPlan

# For map(): these run once per gradient.
_dtype = attrgetter("dtype")
_numel = torch.Tensor.numel


class Fit:
    """Compares gradients with the views of one bucket.

    Args:
        plan: the slots.
        views: their windows.
    """

    def __init__(self, plan: BucketPlan, views: Sequence[torch.Tensor]) -> None:
        self._views = views
        self._numels = [slot.numel for slot in plan.slots]
        self._dtypes = {plan.dtype}

    def allows(self, view: torch.Tensor, grad: torch.Tensor) -> bool:
        """Whether one gradient fits its view."""
        is_plain = grad.layout is torch.strided
        return is_plain and grad.dtype is view.dtype and grad.shape == view.shape

    def is_likely(
        self, views: Sequence[torch.Tensor], grads: Sequence[torch.Tensor]
    ) -> bool:
        """A cheap look: same dtype and sizes. Shapes show when they are copied."""
        is_everything = views is self._views
        numels = self._numels if is_everything else list(map(_numel, views))
        return set(map(_dtype, grads)) <= self._dtypes and (
            list(map(_numel, grads)) == numels
        )

    def first_misfit(
        self, views: Sequence[torch.Tensor], grads: Sequence[torch.Tensor]
    ) -> tuple[int, str, str] | None:
        """Slot of the first gradient that does not fit; what was expected and found."""
        for view, grad in zip(views, grads, strict=True):
            kinds = [
                (t.dtype, t.layout, tuple(t.shape), t.device) for t in (view, grad)
            ]
            if kinds[0] != kinds[1]:
                k = next(k for k, mine in enumerate(self._views) if mine is view)
                expected, found = ("{}, {}, shape {}, on {}".format(*k) for k in kinds)
                return k, expected, found
        return None


def can_tie(param: torch.Tensor, view: torch.Tensor) -> bool:
    """Whether a view may take the place of ``param.grad``, which is not None.

    Not if it misfits the gradient (refused when the bucket is full) or the parameter
    (cast after wrapping: torch refuses), or if there is a history to lose.
    """
    grad = param.grad
    assert grad is not None
    kinds = {(t.dtype, t.layout, t.device, t.shape) for t in (param, grad, view)}
    return len(kinds) == 1 and not grad.requires_grad
