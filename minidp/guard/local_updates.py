"""Detect updates with local gradients that the check of optimizer steps cannot see.

`find_change`: no optimizer made the update. A parameter's ``_version`` (in-place
changes, not those of ``param.data``) is stored when its gradient becomes local, or goes
to the caller of `torch.autograd.grad`. If it changes afterwards, not in an optimizer
step, this may be an update with a gradient that is not averaged.

`LocalSteps`: an optimizer stepped inside no_sync(), and nobody averages the results::

    local SGD   no_sync: backward, step | backward, step | average parameters | ...
    mistake     no_sync: backward, step | backward, step | backward, step | ...

Local SGD changes parameters between a step and the next forward; nothing else does.
"""

from __future__ import annotations

import logging
import weakref
from dataclasses import dataclass

import torch

from minidp.config import passing
from minidp.console import warn
from minidp.core import Reducer
from minidp.errors import explain

from .mistakes import Suspicion, explain_origins

logger = logging.getLogger("minidp")
PATIENCE = 1000  # steps: more than local SGD makes before it averages
_MOST_PARAMS, _MOST_ELEMENTS = 8, 256  # of the sample that shows an average
_TO_GO_ON = (
    "to go on, load the same parameters on all ranks, then call reset() and zero_grad()"
    ". If replicas are meant to differ for a while, change them inside no_sync()"
)


def corner_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return a detached view of the first elements per dimension, some 256 in all."""
    tensor = tensor.detach()
    if not tensor.dim():
        return tensor.view(1)
    return tensor[(slice(round(_MOST_ELEMENTS ** (1 / tensor.dim()))),) * tensor.dim()]


@dataclass(frozen=True)
class Change:
    """Parameters that changed although their gradients were not averaged.

    That is wrong if it was an update, and right if all ranks changed them alike, or
    change them back before they are stepped (other weights for one evaluation, or
    sharpness-aware training). So it is judged later, by a comparison of the ranks.
    """

    indices: frozenset[int]
    finalized: int  # number of averaged backwards before the change was seen
    is_for_good: bool  # nobody averages any more, so waiting for it is no use
    suspicion: Suspicion


def find_change(reducer: Reducer) -> Change | None:
    """Return what has changed since gradients became local, except by optimizer steps.

    What is returned is not found again: the present versions count from now on.
    """
    ledger, params = reducer.ledger, reducer.params
    changed = {i for i, n in ledger.versions.items() if params[i]._version != n}
    passed = ledger.bypassed or {}
    bypassed = {i for i, n in passed.items() if params[i]._version != n}
    if changed:
        origins = [ledger.origins[i] for i in changed]
        what, remedy = explain_origins(origins, model_ran=ledger.armed > 0)
        what = f"local backward, whose gradients were never averaged over ranks: {what}"
    elif bypassed:
        what = (
            "backward that went through the outputs of a forward, but averaged "
            "nothing: torch.autograd.grad, a functional_call, or parameters that were "
            "cast after wrapping"
        )
        remedy = "use backward(), and wrap a module after it is cast or moved"
    else:
        return None
    is_for_good = ledger.has_lost_hooks
    for i in changed:
        ledger.versions[i] = params[i]._version
    for i in bypassed:
        passed[i] = params[i]._version
    suspicion = Suspicion(
        f"Parameters changed after a {what}. Replicas differ now.",
        names=tuple(reducer.names[i] for i in sorted(changed | bypassed)),
        expected="the same parameters on all ranks",
        remedy=f"{remedy}; {_TO_GO_ON}",
    )
    found = frozenset(changed | bypassed)
    return Change(found, ledger.finalized, is_for_good, suspicion)


class LocalSteps:
    """Warn once if optimizers step inside no_sync() and nobody averages parameters.

    `Guard` tells it of steps and forwards. It warns at the 1000th step, or at exit, or
    when the model is gone.
    """

    def __init__(self, reducer: Reducer) -> None:
        self._rank, self._ledger = reducer.rank, reducer.ledger
        # One is not enough: a bias may have the same gradient on all ranks.
        self._params = reducer.params[:: max(1, len(reducer.params) // _MOST_PARAMS)]
        self._sample: list[torch.Tensor] = []  # of parameters, after the last step
        self._was_averaged: torch.Tensor | bool = False  # a sample changed afterwards
        self._count = 0
        self._finalized = 0  # synchronised backwards before these steps
        self._is_over = reducer.communicator.size == 1
        weakref.finalize(reducer, self._end)

    def note_step(self) -> None:
        """Count an optimizer step inside no_sync(); copy some parameter values.

        The 1000th after an averaged backward warns, unless values have changed between
        some step and the next forward, as by averaging; later calls do nothing. No-op
        for one rank.
        """
        if self._is_over:
            return
        if self._ledger.finalized != self._finalized:
            self._finalized, self._count = self._ledger.finalized, 0
        self._count += 1
        self._sample = [corner_of(param).clone() for param in self._params]
        if self._count == PATIENCE:
            if self._is_due():
                warn(self._text())
            self._is_over = True

    def note_forward(self) -> None:
        """Record whether parameters changed since the last step; wait for no GPU.

        No-op if no step was counted since the last call.
        """
        if self._sample and not self._is_over:
            for old, param in zip(self._sample, self._params, strict=True):
                differs = (corner_of(param) != old).any().to(self._sample[0].device)
                self._was_averaged = differs | self._was_averaged
            self._sample = []

    def _is_due(self) -> bool:
        """Return whether to warn: steps were counted, and no average was seen.

        False if the comparison of replicas has warned (`was_told`). May wait for a GPU.
        """
        if self._ledger.was_told or not self._count:
            return False
        self.note_forward()
        return not self._was_averaged

    def _end(self) -> None:
        """At exit, or when the model is gone, log that nobody averaged steps, if so.

        Not if `note_step` has warned, or for one rank.
        """
        try:
            if not self._is_over and self._is_due():
                logger.warning(self._text())
        except RuntimeError:
            return  # the device has shut down before
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
