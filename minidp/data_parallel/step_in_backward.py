"""Optimizer steps inside the backward: that of each bucket as soon as it is reduced.

The optimizer then works while later buckets are still on their way:

    bucket 0   ...... all-reduce | copy out | step
    bucket 1   ........... all-reduce ......... | copy out | step

Meanwhile the parameter groups of the optimizer hold the parameters of one bucket only,
so that its own ``step()`` does not touch others. Step hooks run once for each bucket.
Parameters on the ignore list step at the end.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence

from torch import nn
from torch.nn.utils import clip_grad_norm_
from torch.optim.optimizer import Optimizer

from minidp.core import Observer
from minidp.guard import Guard, check_partial, step_on


class StepInBackward(Observer):
    """An observer that steps one optimizer on each bucket that was just reduced.

    Args:
        optimizer: The optimizer.
        guard: Lets these steps pass unchecked.
        clip_grad_norm: With a norm, there is one step on all parameters after the last
            bucket, because a norm needs all gradients.

    Raises:
        TypeError, ValueError: The optimizer cannot step on a part of its parameters, or
            the norm is not positive.
    """

    uses_grads = True

    def __init__(
        self,
        optimizer: Optimizer,
        guard: Guard,
        clip_grad_norm: float | None = None,
    ) -> None:
        check_partial(optimizer, clip_grad_norm)
        self.optimizer = optimizer
        self._guard: Guard = weakref.proxy(guard)  # no cycle through the reducer
        self._max_norm = clip_grad_norm
        self._reduced: set[int] = set()  # ids of parameters that are in a bucket

    def reduced(self, params: Sequence[nn.Parameter]) -> None:
        """Step on the parameters of a bucket that was just reduced, unless it clips.

        An error in the step becomes a MiniDPError (`Guard.allow`).
        """
        if self._max_norm is None:
            self._reduced.update(map(id, params))
            with self._guard.allow(self.optimizer):
                step_on(self.optimizer, params)

    def finished(self) -> None:
        """Step on those parameters of the optimizer that are in no bucket.

        If gradients are clipped, none has stepped yet. So this clips them, and steps on
        all parameters. An error in the step becomes a MiniDPError (`Guard.allow`).
        """
        held = [p for group in self.optimizer.param_groups for p in group["params"]]
        with self._guard.allow(self.optimizer):
            if self._max_norm is not None:
                clip_grad_norm_(held, self._max_norm)
                self.optimizer.step()
            else:
                step_on(self.optimizer, [p for p in held if id(p) not in self._reduced])
