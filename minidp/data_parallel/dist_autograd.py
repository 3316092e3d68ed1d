"""Average gradients that distributed autograd (RPC) keeps in a context.

``torch.distributed.autograd.backward(context_id, roots)`` calls the grad hooks of a
parameter, but accumulates its gradient in the context, not in ``.grad``. So its
tensors are lent to ``.grad`` while a bucket reads them, and while averages are written
to them (`GradStore`). Torch tells only C++ hooks the context of a backward, so the
forwards note their contexts here.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import Any

import torch
from torch import Tensor, nn

from minidp.accelerator import NO_CONTEXT, to_host
from minidp.core import GradStore, Reducer, is_rpc_up
from minidp.errors import GradientError, explain

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
        # The context of this reduction, or None if its gradients are in ``.grad``.
        self._context: int | None = None
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
        """Forget the contexts that were noted, but leave their gradients alone."""
        self._noted.clear()
        self._left.clear()
        self._context, self.is_external = None, False

    def has_grad_elsewhere(self, i: int) -> bool:
        """Return whether the running backward is one of distributed autograd.

        This must be asked in the hook of parameter ``i``.
        """
        # A local backward executes the node; a distributed one only calls its hooks.
        return is_rpc_up() and not torch._C._will_engine_execute_node(self._nodes[i])

    def open(self, i: int) -> None:
        """Find the context of the backward that begins in the hook of parameter ``i``.

        Raises:
            GradientError: An optimizer is to step in this backward, which would look
                for gradients in ``.grad``. Or the context cannot be told
                (`_context_of`).
        """
        if not is_rpc_up():
            return
        self._context = self._context_of(i)
        self.is_external = self._context is not None
        if self.is_external and any(
            each.uses_grads for each in self._observers.everybody
        ):
            raise self._refusal(
                "An optimizer steps in the backward, but this is a backward of "
                "distributed autograd, which leaves no gradients in .grad.",
                remedy="use torch.distributed.optim.DistributedOptimizer after the "
                "backward, or loss.backward()",
            )

    def resume(self, i: int) -> None:
        """Check that this backward has the context of the one that was paused.

        Raises:
            GradientError: It has another one, or none.
        """
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
        """Return the context of the running backward, or None if it is a local one.

        This must be asked in the hook of parameter ``i``. It is the context that has a
        gradient of this parameter, among those of the forwards or else among the
        newest. If none has one, it is the context of the forward, if only one lives.

        Raises:
            GradientError: This leaves no context, or several.
        """
        if not self.has_grad_elsewhere(i):
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

    def as_grads(self, params: Sequence[nn.Parameter]) -> AbstractContextManager[None]:
        """Return a context manager in which ``.grad`` are the context's own tensors.

        They are no copies, so that what is written reaches the context.

        Raises:
            GradientError: At the end of the block, if an average was written for a
                parameter that has no gradient in the context. Python cannot add one.
        """
        return self._as_grads(params) if self.is_external else NO_CONTEXT

    @contextmanager
    def _as_grads(self, params: Sequence[nn.Parameter]) -> Iterator[None]:
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
        """Check that no parameter was used by some of the ranks only.

        All ranks raise the same error, before any of them has written averages.

        Raises:
            GradientError: Some parameter was.
        """
        counted = zip(self._params, to_host(counts).tolist(), strict=True)
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
    """Return the ids of this worker's contexts that live, the newest first.

    It looks at the last 1000. To learn the last id, it creates a context and releases
    that.
    """
    autograd = _autograd()
    next_id = autograd._new_context()._context_id()
    autograd._release_context(next_id)
    candidates = range(next_id - 1, next_id - 1 - _NUM_NEWEST, -1)
    return [context for context in candidates if _gradients(context) is not None]


def _gradients(context: int) -> dict[Tensor, Tensor] | None:
    """Return a context's own gradients by parameter, or None if the context is gone."""
    try:
        found: dict[Tensor, Tensor] = _autograd().get_gradients(context)
    except RuntimeError:  # no such context
        return None
    return found


def _autograd() -> Any:
    return torch._C._distributed_autograd
