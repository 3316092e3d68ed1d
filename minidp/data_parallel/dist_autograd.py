"""Average gradients that distributed autograd (RPC) keeps in a context.

``torch.distributed.autograd.backward(context_id, roots)`` calls the grad hooks of a
parameter, but accumulates its gradient in the context, not in ``.grad``. So its
tensors are lent to ``.grad`` while a bucket reads them, and while averages are written
to them (`GradStore`). Torch tells only C++ hooks the context of a backward, so the
forwards note their contexts here.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from typing import Any

import torch
from torch import Tensor, nn

from minidp.core import GradStore, Reducer, is_rpc_up
from minidp.errors import GradientError, explain

_AS_IT_IS: AbstractContextManager[None] = nullcontext()
_NUM_NEWEST = 1000  # newest contexts to search if the forward ran in no context


class RpcStore(GradStore):
    """Find the context of each backward, and lend its gradients to ``.grad``.

    One per reducer, which holds it; so it holds only parts of the reducer.
    """

    def __init__(self, reducer: Reducer) -> None:
        self._params = reducer.params
        self._nodes = reducer.hooks.nodes
        self._communicator = reducer.communicator
        self._observers = reducer.queue.observers
        self._uses_views = reducer.queue.config.gradient_as_bucket_view
        self._names: dict[Tensor, str] = {p: n for n, p in reducer.named.items()}
        self._noted: list[int] = []  # contexts of forwards
        self._context: int | None = None  # of this reduction; None: ``.grad``
        # What the last block has left in ``.grad``: the context's own tensor, or with
        # gradient_as_bucket_view perhaps a view of the bucket.
        self._left: dict[Tensor, Tensor | None] = {}

    def note_forward(self) -> None:
        """Record the RPC context that this thread is in, if there is one."""
        if is_rpc_up():
            with suppress(RuntimeError):  # there is no current context
                context = int(_autograd()._current_context()._context_id())
                self._noted = [*{*self._noted, context}]

    def close(self) -> None:
        """Forget the recorded contexts; the contexts, and gradients in them, stay."""
        self._noted.clear()
        self._left.clear()
        self._context, self.is_elsewhere = None, False

    def has_gradient(self, i: int) -> bool:
        """Return whether the running backward is RPC's; call only in ``i``'s hook."""
        # A local backward executes the node; a distributed one only calls its hooks.
        return is_rpc_up() and not torch._C._will_engine_execute_node(self._nodes[i])

    def open(self, i: int) -> None:
        """Find the context of the backward that begins in ``i``'s hook, if it has one.

        GradientError if an optimizer is to step in it, which would look for gradients
        in ``.grad``; else as `_context_of`.
        """
        self._context = self._context_of(i)
        self.is_elsewhere = self._context is not None
        if self.is_elsewhere and any(each.uses_grads for each in self._observers):
            raise self._refusal(
                "An optimizer steps in the backward, but this is a backward of "
                "distributed autograd, which leaves no gradients in .grad.",
                remedy="use torch.distributed.optim.DistributedOptimizer after the "
                "backward, or loss.backward()",
            )

    def resume(self, i: int) -> None:
        """Raise GradientError if this backward has another context, or none."""
        if self._context_of(i) != self._context:
            raise self._refusal(
                "Two backwards of one reduction put their gradients into different "
                "places: a context of distributed autograd, and .grad or another "
                "context.",
                [self._params[i]],
                remedy="bring all gradients of a forward by one kind of backward, in "
                "one context; call reset() on all ranks to go on",
            )

    def _context_of(self, i: int) -> int | None:
        """Return the context that has a gradient of ``i``; None in a local backward.

        Call it in the hook of parameter ``i``. A recorded context, else one of the
        newest; without any, the only recorded one that lives. GradientError if that
        leaves none or several.
        """
        if not self.has_gradient(i):
            return None
        param = self._params[i]
        found = alive = [one for one in self._noted if _gradients(one) is not None]
        for among in (alive, _newest_contexts()):
            holding = [one for one in among if param in (_gradients(one) or ())]
            if holding:
                found = holding
                break
        if len(found) == 1:
            return found[0]
        raise self._refusal(
            "A backward of distributed autograd runs in a context that cannot be told.",
            expected="the forward to run in the context of its backward",
            found="no such context, or several with gradients of this module",
            remedy="call the model inside `with dist_autograd.context() as "
            "context_id:`, before dist_autograd.backward(context_id, ...)",
        )

    def lent(self, params: Sequence[nn.Parameter]) -> AbstractContextManager[None]:
        """Return a block in which ``.grad`` are the context's own tensors, no copies.

        After it GradientError if an average was written for a parameter that has no
        gradient in the context: Python cannot add one.
        """
        return self._lent(params) if self.is_elsewhere else _AS_IT_IS

    @contextmanager
    def _lent(self, params: Sequence[nn.Parameter]) -> Iterator[None]:
        held = _autograd().get_gradients(self._context)
        outside = [param.grad for param in params]
        if self._uses_views:  # the bucket's memory is about to be filled
            outside = [None if grad is None else grad.clone() for grad in outside]
        for param in params:
            param.grad = self._left.get(param, held.get(param))
        try:
            yield
        finally:
            for param, grad in zip(params, outside, strict=True):
                self._left[param], param.grad = param.grad, grad
        for param in params:
            mine, left = held.get(param), self._left[param]
            if left is not None and left is not mine:
                if mine is None:
                    raise self._partly_used([param])
                mine.copy_(left)

    def check_used(self, counts: Tensor) -> None:
        """Raise GradientError if some ranks, not all, used a parameter.

        All ranks raise, before any of them has written averages.
        """
        counted = zip(self._params, counts.tolist(), strict=True)
        size = self._communicator.size
        if partly := [param for param, n in counted if 0 < n < size]:
            raise self._partly_used(partly)

    def _partly_used(self, params: Sequence[Tensor]) -> GradientError:
        return self._refusal(
            "Parameters have a gradient on some ranks only, in a backward of "
            "distributed autograd.",
            params,
            expected="a gradient in the context of every rank, or of none",
            remedy="let every rank use them (add 0 * parameter.sum() to the loss), or "
            "train this module with loss.backward()",
        )

    def _refusal(
        self, what: str, params: Sequence[Tensor] = (), **parts: str
    ) -> GradientError:
        names = [self._names[param] for param in params]
        rank = self._communicator.rank
        return GradientError(explain(rank, what, names=names, **parts))


def _newest_contexts() -> list[int]:
    """Return ids of this worker's live RPC contexts, among its last 1000; newest first.

    To learn the last id, creates a context and releases it.
    """
    autograd = _autograd()
    next_id = autograd._new_context()._context_id()
    autograd._release_context(next_id)
    candidates = range(next_id - 1, next_id - 1 - _NUM_NEWEST, -1)
    return [context for context in candidates if _gradients(context) is not None]


def _gradients(context: int) -> dict[Tensor, Tensor] | None:
    """Return a context's own gradients, no copies, by parameter; None if it is gone."""
    try:
        found: dict[Tensor, Tensor] = _autograd().get_gradients(context)
    except RuntimeError:  # no such context
        return None
    return found


def _autograd() -> Any:
    return torch._C._distributed_autograd
