"""Detect updates with local gradients that the check of optimizer steps cannot see.

`find_manual_update`: no optimizer made the update. A parameter's ``_version`` (in-place
changes, not those of ``param.data``) is stored when its gradient becomes local, or a
backward passes our outputs without a grad hook. If it changes afterwards, not in an
optimizer step, this was an update with a gradient that is not averaged.

`LocalSteps`: an optimizer stepped inside no_sync(), and nobody averages the results::

    local SGD   no_sync: backward, step | backward, step | average parameters | ...
    mistake     no_sync: backward, step | backward, step | backward, step | ...

Local SGD changes parameters between a step and the next forward; nothing else does.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Sequence

import torch

from minidp.config import passing
from minidp.console import warn
from minidp.core import Reducer
from minidp.errors import explain

from .mistakes import explain_origins, is_nonzero

logger = logging.getLogger("minidp")
PATIENCE = 1000  # steps: more than local SGD makes before it averages
_MOST_PARAMS, _MOST_ELEMENTS = 8, 256  # of the sample that shows an average
_TO_GO_ON = (
    "to go on, load the same parameters on all ranks, then call reset() and zero_grad()"
    ". If the change was no update (a checkpoint was loaded, models were averaged), "
    "make it inside no_sync()"
)

# By parameter index: `_version` and a few values, as they were before a local backward.
Corners = dict[int, tuple[int, torch.Tensor]]


def copy_corners(corners: Corners, params: Sequence[torch.Tensor]) -> Corners:
    """Return versions and copied values (`corner_of`) of the first and last parameter.

    ``corners``, an earlier result, is returned itself if its versions still hold.
    """
    if corners and all(params[i]._version == n for i, (n, _) in corners.items()):
        return corners
    ends = {0, len(params) - 1}
    return {i: (params[i]._version, corner_of(params[i]).clone()) for i in ends}


def corner_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return a detached view of the first elements per dimension, some 256 in all."""
    tensor = tensor.detach()
    if not tensor.dim():
        return tensor.view(1)
    return tensor[(slice(round(_MOST_ELEMENTS ** (1 / tensor.dim()))),) * tensor.dim()]


def find_manual_update(reducer: Reducer, corners: Corners) -> str:
    """Return an error text if parameters changed after an unaveraged backward.

    "" if only optimizer steps changed them, or if ``corners`` (of `copy_corners`) show
    that a change was undone: then the present versions count. First drops from the
    ledger no_sync() gradients that are None now, or zeros of changed parameters. May
    wait for a GPU.
    """
    ledger, params = reducer.ledger, reducer.params
    if not ledger.versions and ledger.bypassed is None:
        return ""
    for i in list(ledger.meant):
        grad, has_changed = params[i].grad, params[i]._version != ledger.versions.get(i)
        # Sharpness-aware training moves weights by local gradients, and back.
        if grad is None or (has_changed and not is_nonzero(grad)):
            ledger.drop(i)
    changed = sorted(i for i, n in ledger.versions.items() if params[i]._version != n)
    if changed and _were_put_back(corners, reducer):
        ledger.versions.update((i, params[i]._version) for i in changed)
        changed = []
    if changed:
        origins = [ledger.origins[i] for i in changed]
        what, remedy = explain_origins(origins, model_ran=ledger.armed > 0)
        what = f"local backward, whose gradients were never averaged over ranks: {what}"
    else:
        before = enumerate(ledger.bypassed or ())
        changed = [i for i, n in before if params[i]._version != n]
        what = (
            "backward that went through the outputs of a forward, but averaged "
            "nothing: torch.autograd.grad, or parameters that were cast after wrapping"
        )
        remedy = "use backward(), and wrap a module after it is cast or moved"
    if not changed:
        return ""
    return explain(
        reducer.rank,
        f"Parameters changed after a {what}. Replicas may differ now.",
        names=[reducer.names[i] for i in changed],
        remedy=f"{remedy}; {_TO_GO_ON}",
    )


def _were_put_back(corners: Corners, reducer: Reducer) -> bool:
    """Return whether parameters changed in place are as in ``corners`` again.

    False if gradients there are all zeros or None, which proves nothing. May wait for a
    GPU.
    """
    versions, params = reducer.ledger.versions, reducer.params
    grads = [grad for i in corners if (grad := params[i].grad) is not None]
    dense = [grad for grad in grads if grad.layout is torch.strided]
    return any(is_nonzero(corner_of(grad)) for grad in dense) and all(
        version == versions.get(i) != params[i]._version
        and corner_of(params[i]).equal(old)
        for i, (version, old) in corners.items()
    )


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
