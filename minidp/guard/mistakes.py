"""Check an optimizer step or a forward for mistakes; each check writes its own text."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import cached_property
from itertools import chain
from operator import attrgetter, is_
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.optim.optimizer import Optimizer

from minidp.config import passing
from minidp.core import NO_TASK, Origin, Phase, Reducer, current_task
from minidp.errors import (
    ReducerFailedError,
    UnfinishedReductionError,
    UnsyncedGradientsError,
    explain,
)
from minidp.replica import Replica

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


class StepCheck:
    """Find mistakes in a coming optimizer step, by `find_problem`; made for each step.

    ``last``: the ledger's (`armed`, `finalized`) at that optimizer's last step. The
    constructor compares them with the present ones, and looks for nothing.
    """

    def __init__(
        self, guard: Guard, optimizer: Optimizer, last: tuple[int, int]
    ) -> None:
        self._guard, self._optimizer = guard, optimizer
        self._reducer, self._ledger = guard.reducer, guard.reducer.ledger
        self._is_armed = self._ledger.armed > last[0]
        self._is_reduced = self._ledger.finalized != last[1]

    @cached_property
    def held(self) -> dict[int, str]:
        """Names, by index, of averaged parameters that the step changes.

        Those of the optimizer that have a ``.grad``.
        """
        index = self._guard.index
        found = [index[id(p)] for p in self._params() if id(p) in index]
        return {i: self._reducer.names[i] for i in found}

    def _params(self) -> Iterator[nn.Parameter]:
        """Yield the optimizer's parameters that have a gradient, averaged or not."""
        for group in self._optimizer.param_groups:
            yield from (param for param in group["params"] if param.grad is not None)

    def find_problem(self, late: dict[str, nn.Parameter]) -> str:
        """Return an error text if the step would make replicas differ, else "".

        ``late``: trainable parameters that joined the module after wrapping. May wait
        for ranks, and send them the error: `_find_left_out_backward`. Drops local
        gradients of zeros from the ledger.
        """
        cast = find_cast(self._reducer)
        return (
            self._find_late_parameters(late)
            or (cast if cast and self.held else "")
            or self._find_unfinished_reduction()
            or self._find_local_gradients()
            or self._find_left_out_backward()
        )

    def _explain(self, what: str, **parts: Any) -> str:
        parts.setdefault("names", self.held.values())
        return explain(self._reducer.rank, what, **parts)

    def _find_late_parameters(self, found: dict[str, nn.Parameter]) -> str:
        """Return an error text if the step changes parameters added after wrapping.

        ``found``: those that are trainable; also an error if the step leaves them
        alone, but changes averaged ones. Never for those that another wrapper averages.
        Else "".
        """
        if frozen := self._guard.late_parameters.frozen:
            found = {n: p for n, p in frozen.items() if p.grad is not None} | found
        if not found:
            return ""
        ids, others = set(map(id, self._params())), self._guard.others()
        names = [
            name
            for name, param in found.items()
            # The optimizer may hold those that were replaced, on this rank perhaps.
            if (id(param) in ids or (param.requires_grad and self.held))
            and not any(id(param) in other.index for other in others)
        ]
        return explain_late(self._reducer.rank, names) if names else ""

    def _find_unfinished_reduction(self) -> str:
        """Return an error text if a reduction runs, lacks gradients, or has failed.

        "" if not, or if the step changes no averaged parameter.
        """
        phase = self._reducer.phase.now
        if phase is Phase.IDLE or not self.held:
            return ""
        is_inside = phase in (Phase.ARMED, Phase.REDUCING) and current_task() != NO_TASK
        if is_inside or phase is Phase.FINALIZING:
            what = (
                "An optimizer steps inside the backward, before its gradients are "
                "averaged over ranks."
            )
            return self._explain(what, remedy="step after backward() returned")
        if self._reducer.awaits_user:
            what = f"Gradients are not averaged over ranks yet: {_NOT_FINALIZED}."
            return self._explain(what, remedy=_FINALIZE)
        if phase in (Phase.REDUCING, Phase.PAUSED):
            what = "Gradients are not averaged over ranks."
            return _explain_missing(self._reducer, what)
        if phase is Phase.ARMED:
            return ""
        how = _how_it_failed(self._reducer)
        what = f"{how}; gradients are not averaged over ranks."
        return self._explain(what, remedy=_RESET)

    def _find_local_gradients(self) -> str:
        """Return an error text if gradients that the step applies are local, else "".

        Drops those of zeros from the ledger, for which it may wait for a GPU. Not for
        gradients that another wrapper has averaged.
        """
        ledger, params = self._ledger, self._reducer.params
        if not ledger.unsynced:
            return ""
        for i in ledger.unsynced & self.held.keys():
            if not is_nonzero(params[i].grad):  # zero_grad(set_to_none=False)
                ledger.drop(i)
        others = self._guard.others()
        local = [
            i
            for i in self.held
            if i in ledger.unsynced
            and not any(other.has_averaged(params[i]) for other in others)
        ]
        if not local:
            return ""
        origins = [ledger.origins[i] for i in local]
        what, remedy = explain_origins(origins, model_ran=self._is_armed)
        what = f"Gradients were never averaged over ranks: {what}."
        return self._explain(what, names=[self.held[i] for i in local], remedy=remedy)

    def _find_left_out_backward(self) -> str:
        """Return an error text if a forward's backward was left out, else "".

        If all gradients are zeros, this is legal if all ranks do so: ask them (unless
        ``unsynced="ignore"``, or one rank) and wait; if some do not, or cannot be
        asked, send them the error. CollectiveError if ranks do not answer in time.
        """
        reducer = self._reducer
        if not self._is_armed or self._is_reduced or not self.held:
            return ""
        what = "A forward announced a synchronised backward that never came"
        if any(is_nonzero(reducer.params[i].grad) for i in self.held):
            return self._explain(
                f"{what}, so the gradients present are not those of this step.",
                remedy="call backward() on what the forward returned (not "
                "torch.autograd.grad), and do not cast or replace parameters after "
                "wrapping",
            )
        communicator = reducer.communicator
        if self._guard.policy == "ignore" or communicator.size == 1:
            return ""
        finalized, steps = self._ledger.finalized, self._ledger.steps
        skip = communicator.peers.ask_who_skips(finalized, steps)
        found = (
            "Whether the others do the same cannot be found out: ranks tell each other "
            "nothing with hang_timeout=None, or where this is a copy of a wrapper."
        )
        if skip is not None:
            doing = "finding out whether all ranks leave out a backward"
            with communicator.watching(doing):
                found = str(communicator.wait(skip))
        if not found:
            return ""
        problem = self._explain(
            f"{what} on this rank, and an optimizer is about to step with gradients of "
            f"zeros. {found}",
            expected="a backward that all ranks leave out, or none",
            remedy="decide on all ranks alike, for example by an all_reduce of the "
            "condition; or run backward() on a loss multiplied by zero",
        )
        reducer.communicator.tell_others(UnsyncedGradientsError(problem))
        return problem


class LateParameters:
    """Find trainable parameters that a module has got since it was wrapped."""

    def __init__(self, replica: Replica) -> None:
        self._ignored = replica.ignored
        # Also by id: names change when a module is compiled or put into another one.
        named = replica.module.named_parameters()
        known = [p for n, p in named if n in self._ignored]
        known += replica.managed.values()
        self._known = {id(param): param for param in known}  # alive: ids stay taken
        self.accept(replica.module)

    def find(self, module: nn.Module | None = None) -> dict[str, nn.Parameter]:
        """Return trainable leaf parameters, by name, neither averaged nor ignored.

        {} at once if ``module`` (None: the last accepted) is as at the last `accept`.
        If none is found, `accept` it, unless a functional_call now lends it non-leaves.
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

    def accept(self, module: nn.Module) -> None:
        """Remember the state of ``module``: `find` returns {} until it changes.

        A parameter that was frozen and becomes trainable is a change, too.
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


def explain_late(rank: int, names: Iterable[str]) -> str:
    """Return the error text for parameters that joined the module after wrapping."""
    return explain(
        rank,
        "Parameters joined the module after it was wrapped (added, replaced, unfrozen, "
        "or given by functional_call), so nobody averages their gradients over ranks.",
        names=[*names],
        remedy="wrap the module again after such a change, with everything trainable "
        "that will be; or wrap it with these on its ignore list, if they are meant to "
        "differ between ranks",
    )


def find_cast(reducer: Reducer) -> str:
    """Return an error text if the first or last parameter changed dtype, else ""."""
    params, specs = reducer.params, reducer.queue.specs
    # A cast of a module changes all parameters: two are enough to see it.
    cast = [i for i in (0, -1) if params[i].dtype is not specs[i].dtype]
    if not cast:
        return ""
    return explain(
        reducer.rank,
        "Parameters were cast after wrapping; on other ranks they may not be.",
        names=[reducer.names[i] for i in cast],
        remedy="wrap the module again after a cast (.double(), .half(), .to())",
    )


def refuse_forward(reducer: Reducer) -> None:
    """Raise ReducerFailedError if the last backward failed; no-op if it is done.

    UnfinishedReductionError if it lacks gradients; that is sent to other ranks, which
    may wait for these.
    """
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
    """Return an error text: ``what``, names of missing gradients, torch's advice."""
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
    expected, indices = reducer.expected, " ".join(map(str, missing))
    return explain(
        rank,
        f"{what} This error indicates that {expected.cause_of_missing}.\n"
        f"Parameter indices which did not receive grad for rank {rank}: {indices}\n"
        f"Parameters which did not receive grad for rank {rank}: {', '.join(names)}.\n",
        remedy=f"{expected.remedy_for_missing}; then call reset() on all ranks, and "
        "zero_grad(). To log the unused parameters of every backward, set the "
        "environment variable TORCH_DISTRIBUTED_DEBUG to either INFO or DETAIL",
    )


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

    ``model_ran``: the wrapper's forward ran, too; OUTSIDE may be an additional loss.
    """
    texts = _ORIGINS | ({Origin.OUTSIDE: _BESIDES_THE_MODEL} if model_ran else {})
    whats, remedies = zip(*(texts[o] for o in Origin if o in set(origins)), strict=True)
    # At the time of the error: how to pass an option depends on how the script runs.
    do = "; ".join(remedies).replace("{ignore}", passing(unsynced="ignore"))
    return "; and ".join(whats), do


def is_nonzero(grad: torch.Tensor | None) -> bool:
    """Return whether a gradient is not all zeros: NaN yes, None no. Waits for a GPU."""
    if grad is None:
        return False
    values = grad._values() if grad.layout is torch.sparse_coo else grad
    return bool(values.any())
