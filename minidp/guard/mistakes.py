"""Look at a coming optimizer step or forward for what may be a mistake.

Each check writes its own text. What it finds is either certain, or a `Suspicion`, which
becomes an error only if a comparison of the ranks proves it (`comparison`).
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from operator import attrgetter, is_
from types import CodeType, FrameType
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.optim.optimizer import Optimizer

from minidp import world
from minidp.config import passing
from minidp.core import NO_TASK, Phase, Reducer, current_task
from minidp.errors import (
    ReducerFailedError,
    UnfinishedReductionError,
    explain,
)
from minidp.replica import ManagedParameters

from .local_acts import Origin

if TYPE_CHECKING:
    from .optimizer_guard import Guard

_requires_grad, _is_leaf = attrgetter("requires_grad"), attrgetter("is_leaf")
_values = dict[str, object].values
_RESET = "call reset() on all ranks, then zero_grad()"
_NOT_FINALIZED = (
    "with require_manual_backward_finalization the user ends a backward, and "
    "finalize_backward() was not called for the last one"
)
_FINALIZE = "call finalize_backward() after each synchronised backward()"


@dataclass(frozen=True)
class Suspicion:
    """What may be a mistake, as the parts of an error text, except what was found."""

    what: str
    names: Sequence[str]
    remedy: str
    expected: str = "the same gradients on all ranks"
    # It is about who makes the step: what the gradients are is beyond doubt.
    is_of_coming: bool = False
    # Ranks that went on without this step prove that it is a mistake. Not if it may
    # change nothing, as a second step of gradients of zeros does.
    blames_absent: bool = True

    def to_text(self, rank: int, found: str) -> str:
        """Return the text of the error, once a comparison has ``found`` a proof."""
        return explain(
            rank,
            self.what,
            names=self.names,
            expected=self.expected,
            found=found,
            remedy=self.remedy,
        )


class StepCheck:
    """Find mistakes in one coming optimizer step.

    Args:
        guard: The guard that checks the step.
        optimizer: The optimizer that steps.
        last: The ledger's `armed` and `finalized` at that optimizer's last step. They
            tell which forwards and averages have come since.
    """

    def __init__(
        self, guard: Guard, optimizer: Optimizer, last: tuple[int, int]
    ) -> None:
        self._guard, self._optimizer = guard, optimizer
        self._acts = guard.acts
        self._reducer, self._ledger = guard.reducer, guard.reducer.ledger
        self._is_armed = self._ledger.armed > last[0]
        self._is_reduced = self._ledger.finalized != last[1]

    @cached_property
    def held(self) -> dict[int, str]:
        """Names, by index, of averaged parameters that the step changes.

        These are the ones of the optimizer that have a ``.grad``.
        """
        index = self._guard.index
        found = [index[id(p)] for p in self._params() if id(p) in index]
        return {i: self._reducer.names[i] for i in found}

    def _params(self) -> Iterator[nn.Parameter]:
        """Yield the optimizer's parameters that have a gradient, averaged or not."""
        for group in self._optimizer.param_groups:
            yield from (param for param in group["params"] if param.grad is not None)

    def find_certain(self) -> str:
        """Return an error text if a reduction runs or has failed, else "".

        The gradients of such a reduction are not averaged yet, or only some of them.
        """
        phase = self._reducer.phase.now
        if phase in (Phase.IDLE, Phase.PAUSED) or not self.held:
            return ""
        names, rank = [*self.held.values()], self._reducer.rank
        is_inside = phase in (Phase.ARMED, Phase.REDUCING) and current_task() != NO_TASK
        if is_inside or phase is Phase.FINALIZING:
            if not self._guard.comparison.is_needed:
                return ""  # one rank's gradients are their own average
            what = (
                "An optimizer steps inside the backward, before its gradients are "
                "averaged over ranks."
            )
            remedy = "step after backward() returned"
            return explain(rank, what, names=names, remedy=remedy)
        if self._reducer.awaits_user:
            what = f"Gradients are not averaged over ranks yet: {_NOT_FINALIZED}."
            return explain(rank, what, names=names, remedy=_FINALIZE)
        if phase is Phase.REDUCING:
            what = "Gradients are not averaged over ranks."
            return _explain_missing(self._reducer, what)
        if phase is Phase.ARMED:
            return ""
        what = (
            f"{_how_it_failed(self._reducer)}; gradients are not averaged over ranks."
        )
        return explain(rank, what, names=names, remedy=_RESET)

    def find_suspicion(self, late: dict[str, nn.Parameter]) -> Suspicion | None:
        """Return what may make replicas differ in this step, or None.

        Local gradients that are all zeros are no suspicion, and `LocalActs` forgets
        them here. To see that they are zeros may mean waiting for a GPU.

        Args:
            late: Trainable parameters that joined the module after it was wrapped.
        """
        return (
            self._find_late_parameters(late)
            or self._find_cast()
            or self._find_missing_gradients()
            or self._find_local_gradients()
            or self._find_left_out_backward()
            or self._find_other_gradients()
        )

    def acquit(self) -> None:
        """Take the gradients of this step for averages, as all ranks have the same."""
        for i in self.held:
            self._acts.drop(i)

    def _find_late_parameters(self, found: dict[str, nn.Parameter]) -> Suspicion | None:
        """Suspect a step of parameters that joined the module, or were lent to it.

        Those that another wrapper averages are left out.

        Args:
            found: The trainable ones that are in the module now.
        """
        late = self._guard.late_parameters
        names = {id(p): name for name, p in (late.frozen | found).items()} | late.lent()
        if not names:
            return None
        others = self._guard.others()
        held = {
            names[id(param)]: param
            for param in self._params()
            if id(param) in names
            and not any(id(param) in other.index for other in others)
        }
        return suspect_late(self._reducer, held) if held else None

    def _find_cast(self) -> Suspicion | None:
        return find_cast(self._reducer) if self.held else None

    def _find_missing_gradients(self) -> Suspicion | None:
        """Suspect a step after a backward that left gradients missing."""
        if self._reducer.phase.now is not Phase.PAUSED or not self.held:
            return None
        what, names, remedy = _describe_missing(self._reducer)
        what = f"Gradients are not averaged over ranks. {what}"
        return Suspicion(what, names, remedy)

    def _find_local_gradients(self) -> Suspicion | None:
        """Suspect gradients that are local, except those of another wrapper."""
        acts, params = self._acts, self._reducer.params
        if not acts.unsynced:
            return None
        for i in acts.unsynced & self.held.keys():
            if not is_nonzero(params[i].grad):  # zero_grad(set_to_none=False)
                acts.drop(i)
        others = self._guard.others()
        local = [
            i
            for i in self.held
            if i in acts.unsynced
            and not any(other.has_averaged(params[i]) for other in others)
        ]
        if not local:
            return None
        origins = [acts.origins[i] for i in local]
        what, remedy = explain_origins(origins, model_ran=self._is_armed)
        what = f"Gradients were never averaged over ranks: {what}."
        return Suspicion(what, [self.held[i] for i in local], remedy)

    def _find_left_out_backward(self) -> Suspicion | None:
        """Suspect a step after a forward whose backward was left out.

        If all ranks leave it out, they step with the same gradients, and all is well,
        although only the ranks that ran the forward suspect anything. Otherwise the
        others would take this rank's next gradients for those of it.
        """
        if not self._is_armed or self._is_reduced or not self.held:
            return None
        are_zeros = not any(is_nonzero(self._reducer.params[i].grad) for i in self.held)
        where = " on this rank" if are_zeros else ""
        return Suspicion(
            f"A forward announced a synchronised backward that never came{where}, so "
            "the gradients present are not those of this step.",
            [*self.held.values()],
            "call backward() on what the forward returned (not torch.autograd.grad), "
            "and do not cast or replace parameters after wrapping; to leave out a "
            "backward, decide on all ranks alike, for example by an all_reduce of the "
            "condition, or run backward() on a loss multiplied by zero",
            "the same step on all ranks, without a backward",
            # Zeros, or averages of an earlier backward, if none were made elsewhere.
            is_of_coming=self._acts.bypassed is None,
        )

    def _find_other_gradients(self) -> Suspicion | None:
        """Suspect a step that no averaged backward came before, and no local one.

        The script has set ``.grad`` itself, or steps twice after one backward. That is
        right in most scripts, so nothing is suspected if the ranks have no store to
        compare it, or if all gradients are zeros: a step like that allocates the state
        of an optimizer.
        """
        is_right = self._is_reduced or not self.held or is_nested(self._optimizer)
        if is_right or not self._guard.comparison.can_ask:
            return None
        others, params = self._guard.others(), self._reducer.params
        names = [
            name
            for i, name in self.held.items()
            if not any(other.has_averaged(params[i]) for other in others)
        ]
        if not names or not any(is_nonzero(params[i].grad) for i in self.held):
            return None
        return Suspicion(
            "An optimizer steps although no backward has averaged gradients since its "
            "last step.",
            names,
            "if the script sets .grad itself (by torch.func or torch.autograd.grad), "
            "average the gradients with torch.distributed.all_reduce before the step; "
            "if it steps twice after one backward(), do so on all ranks",
            blames_absent=False,
        )


class LateParameters:
    """Find trainable parameters that a module has got since it was wrapped.

    Some of them are only *lent* to it, for one forward: by `functional_call`, or other
    weights for an evaluation. The module has them no more when its forward is over.
    """

    def __init__(self, replica: ManagedParameters) -> None:
        self._ignored = replica.ignored
        # Also by id: names change when a module is compiled or put into another one.
        named = replica.module.named_parameters()
        known = [p for n, p in named if n in self._ignored]
        known += replica.managed.values()
        self._known = {id(param): param for param in known}  # alive: ids stay taken
        self._lent: dict[int, tuple[str, weakref.ref[nn.Parameter]]] = {}
        self.accept(replica.module)

    def find(self, module: nn.Module | None = None) -> dict[str, nn.Parameter]:
        """Return trainable leaf parameters, by name, neither averaged nor ignored.

        This is called before every step and forward. So it returns {} at once if the
        module is as it was at the last `accept`. If it finds nothing in another state,
        it calls `accept`, unless a functional_call now lends the module tensors that
        are no leaves.

        Args:
            module: The module, by default the one that was accepted last.
        """
        module = self._module if module is None else module
        now = [*chain.from_iterable(map(_values, self._dicts))]
        is_same = module is self._module and len(now) == len(self._objects)
        is_same = is_same and all(map(is_, now, self._objects))
        if is_same and not any(map(_requires_grad, self.frozen.values())):
            return {}
        named = self._unknown(module)
        # What is no leaf is calculated from managed parameters.
        late = {n: p for n, p in named.items() if p.requires_grad and p.is_leaf}
        if not late and all(map(_is_leaf, module.parameters())):
            self.accept(module)  # not what a functional_call lends for a moment
        return late

    def note_lent(self, found: dict[str, nn.Parameter]) -> None:
        """Remember parameters that a forward has found, and that may be lent."""
        for name, param in found.items():
            self._lent[id(param)] = name, weakref.ref(param)

    def lent(self) -> dict[int, str]:
        """Return the names, by id, of the noted parameters that still live."""
        for key, (_, param) in [*self._lent.items()]:
            if param() is None:
                del self._lent[key]
        return {key: name for key, (name, _) in self._lent.items()}

    def accept(self, module: nn.Module) -> None:
        """Remember the state of ``module``, so that `find` is fast until it changes.

        If a parameter that was frozen becomes trainable, that is a change, too.
        """
        self._module = module
        unknown = self._unknown(module).items()
        # Neither averaged nor ignored; an optimizer may hold them.
        self.frozen = {name: p for name, p in unknown if not p.requires_grad}
        holders: list[Any] = [
            each for m in module.modules() for each in (m._parameters, m._modules)
        ]
        # A scripted module holds its parameters elsewhere.
        self._dicts = [each for each in holders if isinstance(each, dict)]
        self._objects = [*chain.from_iterable(map(_values, self._dicts))]

    def _unknown(self, module: nn.Module) -> dict[str, nn.Parameter]:
        """Return the module's parameters that were neither averaged nor ignored."""
        return {
            name: param
            for name, param in module.named_parameters()
            if name not in self._ignored and id(param) not in self._known
        }


def suspect_late(reducer: Reducer, late: Mapping[str, nn.Parameter]) -> Suspicion:
    """Return the suspicion that parameters that nobody averages differ.

    A move such as ``model.to("meta")`` puts new parameters into the module, too, and is
    called what it is.
    """
    known = {spec.name: (spec.dtype, spec.device) for spec in reducer.queue.specs}
    if all(known.get(name, _kind(p)) != _kind(p) for name, p in late.items()):
        moved = {name: (known[name], _kind(param)) for name, param in late.items()}
        return _suspect_move("which made new ones of them, so", moved)
    return Suspicion(
        "Parameters joined the module after it was wrapped (added, replaced, unfrozen, "
        "or given by functional_call), so nobody averages their gradients over ranks.",
        [*late],
        "wrap the module again after such a change, with everything trainable "
        "that will be; or wrap it with these on its ignore list, if they are meant to "
        "differ between ranks",
        "equal values and gradients of these parameters on all ranks",
    )


def find_cast(reducer: Reducer) -> Suspicion | None:
    """Suspect that parameters have changed their dtype or device.

    A cast or a move of a module changes all of its parameters, so looking at two of
    them is enough to see it; the text then names every one that changed.
    """
    params, specs = reducer.params, reducer.queue.specs
    if not any(_kind(params[i]) != (specs[i].dtype, specs[i].device) for i in (0, -1)):
        return None
    both = {
        spec.name: ((spec.dtype, spec.device), _kind(param))
        for spec, param in zip(specs, params, strict=True)
    }
    moved = {name: (was, now) for name, (was, now) in both.items() if was != now}
    return _suspect_move("so", moved)


_Kind = tuple[torch.dtype, torch.device]


def _kind(param: nn.Parameter) -> _Kind:
    return param.dtype, param.device


def _suspect_move(so: str, moved: Mapping[str, tuple[_Kind, _Kind]]) -> Suspicion:
    texts = [
        [f"{dtype} on {device}" for dtype, device in row] for row in moved.values()
    ]
    before, now = (", ".join(dict.fromkeys(each)) for each in zip(*texts, strict=True))
    return Suspicion(
        f"Parameters were cast or moved after wrapping ({before} before, {now} now), "
        f"{so} nobody averages their gradients over ranks.",
        [*moved],
        "wrap the module again after a cast or a move (.double(), .half(), .to())",
        "the same dtype, values and gradients on all ranks",
    )


def refuse_forward(reducer: Reducer) -> None:
    """Refuse a forward if the last backward failed, or did not come to its end.

    Raises:
        CollectiveError: A collective was given up on a device.
        ReducerFailedError: It failed.
        UnfinishedReductionError: It lacks gradients. The error is sent to the other
            ranks, too, because they may wait for these. Or it waits for the user's
            finalize_backward().
    """
    reducer.check()
    phase = reducer.phase.now
    if phase in (Phase.IDLE, Phase.ARMED):
        return
    if phase is Phase.FAILED:
        what = f"{_how_it_failed(reducer)}; its gradients are not synchronised."
        raise ReducerFailedError(explain(reducer.rank, what, remedy=_RESET))
    what = (
        "Expected to have finished reduction in the prior iteration before starting a "
        "new one."
    )
    if reducer.awaits_user:  # the user may catch this and finalize: tell nobody else
        what = f"{what} {_NOT_FINALIZED[0].upper()}{_NOT_FINALIZED[1:]}."
        raise UnfinishedReductionError(explain(reducer.rank, what, remedy=_FINALIZE))
    error = UnfinishedReductionError(_explain_missing(reducer, what))
    reducer.communicator.tell_others(error)
    try:
        raise error
    finally:
        del error  # it would keep this frame alive, and with it the reducer


def _how_it_failed(reducer: Reducer) -> str:
    is_ctrl_c = reducer.failure.startswith(KeyboardInterrupt.__name__)
    return f"An earlier backward {'was interrupted' if is_ctrl_c else 'failed'}"


def _explain_missing(reducer: Reducer, what: str) -> str:
    """Return an error text of ``what``, the missing gradients, and what to do."""
    rank, missing = reducer.rank, reducer.pending.missing()
    names = [reducer.names[i] for i in missing]
    if reducer.phase.now is Phase.REDUCING:
        return explain(
            rank,
            f"{what} The last backward raised, or was interrupted, before it brought "
            "all gradients.",
            names=names,
            remedy=f"{_RESET}; the next batch may follow",
        )
    described, _, remedy = _describe_missing(reducer)
    return explain(rank, f"{what} {described}", remedy=remedy)


def _describe_missing(reducer: Reducer) -> tuple[str, list[str], str]:
    """Return torch's words about missing gradients, their names, and the remedy."""
    rank, missing = reducer.rank, reducer.pending.missing()
    names = [reducer.names[i] for i in missing]
    mode, indices = reducer.mode, " ".join(map(str, missing))
    what = (
        f"This error indicates that {mode.cause_of_missing}.\n"
        f"Parameter indices which did not receive grad for rank {rank}: {indices}\n"
        f"Parameters which did not receive grad for rank {rank}: {', '.join(names)}.\n"
    )
    remedy = (
        f"{mode.remedy_for_missing}; then call reset() on all ranks, and "
        "zero_grad(). To log the unused parameters of every backward, set the "
        "environment variable TORCH_DISTRIBUTED_DEBUG to either INFO or DETAIL"
    )
    return what, names, remedy


_ON_ALL_RANKS = "call sync_gradients() on all ranks before the update"
_ALONE = (
    "the module ran without its wrapper (model.module(x), another method, a part; "
    "after attach() model.forward(x), or inside alone())"
)
# Where local gradients came from, and what to do instead.
_ORIGINS = {
    Origin.QUIET: (
        "every backward since the last averaged one belongs to a forward inside "
        "no_sync()",
        "run the last forward and backward before the update outside no_sync(), or "
        f"{_ON_ALL_RANKS}; if replicas are meant to differ for a while (local SGD), "
        "update inside no_sync(), too (or {ignore})",
    ),
    Origin.AGAIN: (
        "a backward through outputs of the wrapper came after the one that averaged "
        "(two forwards, then two backwards; or one graph twice)",
        f"run one backward over the sum of the losses, or {_ON_ALL_RANKS}",
    ),
    Origin.NESTED: (
        "a layer runs several times under checkpoint(..., use_reentrant=True)",
        "pass use_reentrant=False",
    ),
    Origin.OUTSIDE: (
        f"{_ALONE} instead of model(x)",
        "call the wrapper, model(x); other methods can be called from forward()",
    ),
}
_BESIDES_THE_MODEL = (
    f"{_ALONE}, or a loss was made of its parameters alone, besides model(x)",
    "add that loss to the one of model(x), for one backward over the sum, or "
    f"{_ON_ALL_RANKS}; run a penalty that is equal on all ranks inside no_sync()",
)


def explain_origins(origins: Iterable[Origin], *, model_ran: bool) -> tuple[str, str]:
    """Return two texts: how gradients stayed local, and what to do about it.

    Args:
        origins: Where the gradients came from.
        model_ran: Whether the wrapper's forward ran, too. A gradient from OUTSIDE may
            then be that of an additional loss.
    """
    texts = _ORIGINS | ({Origin.OUTSIDE: _BESIDES_THE_MODEL} if model_ran else {})
    whats, remedies = zip(*(texts[o] for o in Origin if o in set(origins)), strict=True)
    # At the time of the error: how to pass an option depends on how the script runs.
    do = "; ".join(remedies).replace("{ignore}", passing(unsynced="ignore"))
    return "; and ".join(whats), do


# The code in which torch runs the hooks around every `step`.
_STEP = next(
    (
        each
        for each in Optimizer.profile_hook_step.__code__.co_consts
        if isinstance(each, CodeType)
    ),
    None,
)


def num_running(optimizer: Optimizer) -> int:
    """Return how many steps of an optimizer run now, one inside the other.

    Two of them run if its class calls ``super().step()`` in its own ``step``.
    """
    frame: FrameType | None = sys._getframe()
    num_steps = 0
    while frame is not None:
        is_step = frame.f_code is _STEP and frame.f_locals.get("self") is optimizer
        num_steps += is_step
        frame = frame.f_back
    return num_steps


def is_in_step(thread: int) -> bool:
    """Return whether another thread is in a step of any optimizer."""
    with world.frame_of(thread) as frame:
        while frame is not None and frame.f_code is not _STEP:
            frame = frame.f_back
        return frame is not None


def is_nested(optimizer: Optimizer) -> bool:
    """Return whether the step whose hook runs is a part of another one."""
    return num_running(optimizer) > 1


def is_nonzero(grad: torch.Tensor | None) -> bool:
    """Return whether a gradient is not all zeros, which may mean waiting for a GPU.

    NaN is not zero. A gradient that is None counts as zeros.
    """
    if grad is None:
        return False
    values = grad._values() if grad.layout is torch.sparse_coo else grad
    return bool(values.any())
