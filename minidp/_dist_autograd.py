"""Distributed autograd (RPC): gradients live in a context, not in ``.grad``.

``torch.distributed.autograd.backward(context_id, roots)`` calls the grad hooks of a
parameter, but adds its gradient up in the context. The gradients of a bucket are read
there when all of them have arrived, and their averages are written into the same
tensors. Torch tells a hook which context its backward runs in only in C++; here the
forward notes its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeGuard

import torch
from torch.autograd.graph import Node

from .errors import GradientError, explain

_NUM_NEWEST = 1000  # contexts to look at if a forward ran in none


_rpc: Any = getattr(torch._C, "_distributed_rpc", None)  # not on all platforms


def is_rpc_up() -> bool:
    """Whether this process has called ``init_rpc()``."""
    return _rpc is not None and bool(_rpc._is_current_rpc_agent_set())


def is_own_rref(value: object) -> TypeGuard[Any]:
    """Whether ``value`` is a reference of RPC to an object in this process."""
    return is_rpc_up() and isinstance(value, _rpc.PyRRef) and value.is_owner()


class NotedContexts:
    """The contexts that forwards ran in, to find that of the backward.

    Args:
        params: managed parameters, in parameter-index order.
        nodes: their AccumulateGrad nodes.
        rank: group rank, for errors.
    """

    def __init__(
        self, params: Sequence[torch.Tensor], nodes: Sequence[Node], rank: int
    ) -> None:
        self.rank = rank
        self._params = params
        self._nodes = nodes
        self._noted: list[int] = []

    def note_forward(self) -> None:
        """A forward runs on this thread, perhaps in a context."""
        if not is_rpc_up():
            return
        with suppress(RuntimeError):  # torch's answer outside of any context
            context = int(_autograd()._current_context()._context_id())
            self._noted = [*{*self._noted, context}]

    def forget(self) -> None:
        """The forwards noted so far have had their backward."""
        self._noted.clear()

    def has_gradient(self, i: int) -> bool:
        """Whether the running hook of parameter ``i`` fired with a gradient."""
        return self._params[i].grad is not None or _is_distributed(self._nodes[i])

    def of_backward(self, i: int) -> ContextGrads | None:
        """Where this backward puts its gradients; None: into ``.grad``.

        Args:
            i: the parameter whose hook runs now. Its gradient is in the context, unless
                the gradient is undefined.

        Raises:
            GradientError: no context, or more than one, may be meant.
        """
        if not _is_distributed(self._nodes[i]):
            return None
        param = self._params[i]
        alive = [context for context in self._noted if _gradients(context) is not None]
        for among in (alive, _newest_contexts()):
            holding = [one for one in among if param in (_gradients(one) or ())]
            if len(holding) == 1:
                return ContextGrads(holding[0], self.rank)
            if holding:
                raise GradientError(unknown_context(self.rank))
        if len(alive) != 1:
            raise GradientError(unknown_context(self.rank))
        return ContextGrads(alive[0], self.rank)


@dataclass(frozen=True)
class ContextGrads:
    """The gradients of one backward, in its context."""

    context: int  # its id
    rank: int  # group rank, for errors

    def read(self, params: Iterable[torch.Tensor]) -> list[torch.Tensor | None]:
        """The gradients of ``params``, as far as the context has them."""
        found = _autograd().get_gradients(self.context)
        return [found.get(param) for param in params]

    def to_write(
        self, params: Sequence[torch.Tensor], names: Sequence[str], kept: Iterable[int]
    ) -> list[torch.Tensor | None]:
        """The tensors that averages are written into.

        Args:
            params: of one bucket, in slot order.
            names: theirs.
            kept: slots that are not written.

        Raises:
            GradientError: the context has no gradient for a slot that is written. From
                Python, gradients can be changed there, but not added.
        """
        grads = self.read(params)
        without = [k for k, grad in enumerate(grads) if grad is None]
        missing = [names[k] for k in without if k not in kept]
        if missing:
            raise GradientError(partly_used(self.rank, missing))
        return [None if k in kept else grad for k, grad in enumerate(grads)]


def partly_used(rank: int, names: Sequence[str]) -> str:
    """The text for parameters that only some ranks have gradients of."""
    return explain(
        rank,
        "Parameters have a gradient on some ranks only, in a backward of distributed "
        "autograd.",
        names=names,
        expected="a gradient in the context of every rank, or of none",
        remedy="let every rank use them (add 0 * parameter.sum() to the loss), or "
        "train this module with loss.backward()",
    )


def mixed_backwards(rank: int, name: str) -> str:
    """The text for gradients of one reduction that live in two places."""
    return explain(
        rank,
        "Two backwards of one reduction put their gradients into different places: a "
        "context of distributed autograd, and .grad or another context.",
        names=[name],
        remedy="bring all gradients of a forward by one kind of backward, in one "
        "context; call reset() on all ranks to go on",
    )


def stepping(rank: int) -> str:
    """The text for optimizers in the backward, which read ``.grad``."""
    return explain(
        rank,
        "An optimizer steps in the backward, but this is a backward of distributed "
        "autograd, which leaves no gradients in .grad.",
        remedy="use torch.distributed.optim.DistributedOptimizer after the backward, "
        "or loss.backward()",
    )


def unknown_context(rank: int) -> str:
    """The text for a backward whose context cannot be told."""
    return explain(
        rank,
        "A backward of distributed autograd runs in a context that cannot be told.",
        expected="the forward to run in the context of its backward",
        found="no such context, or several with gradients of this module",
        remedy="call the model inside `with dist_autograd.context() as context_id:`, "
        "before dist_autograd.backward(context_id, ...)",
    )


def _is_distributed(node: Node) -> bool:
    """Whether the backward that calls the hooks of ``node`` now is a distributed one.

    A local backward executes the node; a distributed one only calls its hooks.
    """
    return is_rpc_up() and not torch._C._will_engine_execute_node(node)


def _newest_contexts() -> list[int]:
    """Ids of contexts that this process made and has not left, newest first."""
    autograd = _autograd()
    next_id = autograd._new_context()._context_id()
    autograd._release_context(next_id)
    candidates = range(next_id - 1, next_id - 1 - _NUM_NEWEST, -1)
    return [context for context in candidates if _gradients(context) is not None]


def _gradients(context: int) -> dict[torch.Tensor, torch.Tensor] | None:
    """What a context has by now; None if it has ended."""
    try:
        found: dict[torch.Tensor, torch.Tensor] = _autograd().get_gradients(context)
    except RuntimeError:  # no such context
        return None
    return found


def _autograd() -> Any:
    return torch._C._distributed_autograd
