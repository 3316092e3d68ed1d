"""Read and write gradients that distributed autograd (RPC) keeps in a context.

``torch.distributed.autograd.backward(context_id, roots)`` calls the grad hooks of a
parameter, but accumulates its gradient in the context, not in ``.grad``. A full bucket
reads its gradients there and writes the averages into the same tensors. Torch tells
only C++ hooks the context of a backward, so the forwards note their contexts here.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeGuard

import torch
from torch.autograd.graph import Node

from minidp.errors import GradientError, explain

from .communicator import Communicator

_NUM_NEWEST = 1000  # newest contexts to search if the forward ran in no context
_rpc: Any = getattr(torch._C, "_distributed_rpc", None)  # not on all platforms


def is_rpc_up() -> bool:
    """Return whether RPC runs here: after ``init_rpc()``, before ``shutdown()``."""
    return _rpc is not None and bool(_rpc._is_current_rpc_agent_set())


def is_own_rref(value: object) -> TypeGuard[Any]:
    """Return whether ``value`` is an RRef to an object that lives in this process.

    False while no RPC runs.
    """
    return is_rpc_up() and isinstance(value, _rpc.PyRRef) and value.is_owner()


class NotedContexts:
    """Record the RPC contexts of forwards, to find the context of a backward.

    One per reducer; starts empty. ``nodes`` are the AccumulateGrad nodes of ``params``,
    by parameter index; ``communicator`` gives the rank for errors.
    """

    def __init__(
        self,
        params: Sequence[torch.Tensor],
        nodes: Sequence[Node],
        communicator: Communicator,
    ) -> None:
        self._communicator = communicator
        self._params = params
        self._nodes = nodes
        self._noted: list[int] = []

    def note_forward(self) -> bool:
        """Record the RPC context that this thread is in, if any; return `is_rpc_up()`.

        If False, nothing is recorded, and no backward can run in a context.
        """
        is_up = is_rpc_up()
        if is_up:
            with suppress(RuntimeError):  # there is no current context
                context = int(_autograd()._current_context()._context_id())
                self._noted = [*{*self._noted, context}]
        return is_up

    def reset(self) -> None:
        """Forget the recorded contexts; the contexts, and gradients in them, stay."""
        self._noted.clear()

    def _is_distributed(self, i: int) -> bool:
        """Return whether the running backward is RPC's; call only in ``i``'s hook."""
        # A local backward executes the node; a distributed one only calls its hooks.
        return is_rpc_up() and not torch._C._will_engine_execute_node(self._nodes[i])

    def has_gradient(self, i: int) -> bool:
        """Return whether parameter ``i``, whose hook runs now, has a gradient.

        True in an RPC backward, without a look into its context; else whether
        ``.grad`` is not None.
        """
        return self._params[i].grad is not None or self._is_distributed(i)

    def of_backward(self, i: int) -> ContextGrads | None:
        """Return the RPC context of the running backward; None in a local backward.

        Call it in the hook of parameter ``i``. Takes the context that has a gradient of
        ``i``: a recorded one, else one of the newest; without any, the only recorded
        one that lives. GradientError if that leaves none or several.
        """
        if not self._is_distributed(i):
            return None
        rank, param = self._communicator.rank, self._params[i]
        found = alive = [one for one in self._noted if _gradients(one) is not None]
        for among in (alive, _newest_contexts()):
            holding = [one for one in among if param in (_gradients(one) or ())]
            if holding:
                found = holding
                break
        if len(found) == 1:
            return ContextGrads(found[0], rank)
        raise GradientError(
            explain(
                rank,
                "A backward of distributed autograd runs in a context that cannot be "
                "told.",
                expected="the forward to run in the context of its backward",
                found="no such context, or several with gradients of this module",
                remedy="call the model inside `with dist_autograd.context() as "
                "context_id:`, before dist_autograd.backward(context_id, ...)",
            )
        )

    def refuse_another(self, i: int, context: ContextGrads | None, name: str) -> None:
        """Raise GradientError unless this backward keeps its gradients in ``context``.

        ``context``: where earlier gradients of this reduction are (None: in ``.grad``).
        ``i``, ``name``: index and name of the parameter whose hook runs now. Also
        raises as `of_backward`.
        """
        if self.of_backward(i) == context:
            return
        raise GradientError(
            explain(
                self._communicator.rank,
                "Two backwards of one reduction put their gradients into different "
                "places: a context of distributed autograd, and .grad or another "
                "context.",
                names=[name],
                remedy="bring all gradients of a forward by one kind of backward, in "
                "one context; call reset() on all ranks to go on",
            )
        )


@dataclass(frozen=True)
class ContextGrads:
    """Hold the id of an RPC context whose gradients a reduction reads and overwrites.

    `NotedContexts.of_backward` makes it; equal for the same context.
    """

    context: int  # the RPC context's id
    rank: int  # group rank, for errors

    def read(self, params: Iterable[torch.Tensor]) -> list[torch.Tensor | None]:
        """Return the context's own gradients of ``params``, no copies; None if none."""
        found = _autograd().get_gradients(self.context)
        return [found.get(param) for param in params]

    def to_write(
        self, params: Sequence[torch.Tensor], names: Sequence[str], kept: Iterable[int]
    ) -> list[torch.Tensor | None]:
        """Return the context's own gradients of ``params``; None at positions ``kept``.

        The caller overwrites them by averages; ``kept`` ones stay. GradientError if
        the context lacks any other: Python cannot add it. ``names``: of ``params``.
        """
        grads = self.read(params)
        without = [k for k, grad in enumerate(grads) if grad is None]
        missing = [names[k] for k in without if k not in kept]
        if missing:
            raise self.partly_used(missing)
        return [None if k in kept else grad for k, grad in enumerate(grads)]

    def partly_used(self, names: Sequence[str]) -> GradientError:
        """Return, not raise, the error: only some ranks have gradients of ``names``."""
        text = explain(
            self.rank,
            "Parameters have a gradient on some ranks only, in a backward of "
            "distributed autograd.",
            names=names,
            expected="a gradient in the context of every rank, or of none",
            remedy="let every rank use them (add 0 * parameter.sum() to the loss), or "
            "train this module with loss.backward()",
        )
        return GradientError(text)

    def refuse_steps(self) -> None:
        """Raise GradientError, always: no optimizer can step inside an RPC backward."""
        text = explain(
            self.rank,
            "An optimizer steps in the backward, but this is a backward of distributed "
            "autograd, which leaves no gradients in .grad.",
            remedy="use torch.distributed.optim.DistributedOptimizer after the "
            "backward, or loss.backward()",
        )
        raise GradientError(text)


def _newest_contexts() -> list[int]:
    """Return ids of this worker's live RPC contexts, among its last 1000; newest first.

    To learn the last id, creates a context and releases it.
    """
    autograd = _autograd()
    next_id = autograd._new_context()._context_id()
    autograd._release_context(next_id)
    candidates = range(next_id - 1, next_id - 1 - _NUM_NEWEST, -1)
    return [context for context in candidates if _gradients(context) is not None]


def _gradients(context: int) -> dict[torch.Tensor, torch.Tensor] | None:
    """Return a context's own gradients, no copies, by parameter; None if it is gone."""
    try:
        found: dict[torch.Tensor, torch.Tensor] = _autograd().get_gradients(context)
    except RuntimeError:  # no such context
        return None
    return found


def _autograd() -> Any:
    return torch._C._distributed_autograd
