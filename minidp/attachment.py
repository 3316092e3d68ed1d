"""``minidp.attach(model)``: synchronise a model without wrapping it.

A `DataParallel` is made as ever, but nobody sees it. The model calls it by way of the
one place that torch leaves out of copies and pickles, where ``Module.compile()`` puts
what it compiled::

    model(x) -> Detour -> DataParallel.forward: checks, module buffers, rebuild
                              |- Detour, this time straight on -> the model's forward
                              '- arms the reducer
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from torch import nn

from ._comm_hook import Hook
from ._compat import DataParallel
from ._guard import is_averaged, retire
from ._managed import DETOUR
from ._untraced import untraced_itself


def attach(model: nn.Module, **options: Any) -> Attachment:
    """Collective: from now on backwards of ``model`` average its gradients over ranks.

    The model stays what it is: its type, its attributes, the keys of its
    ``state_dict()`` (no ``module.`` prefix). Copies of it (``deepcopy``, averages of
    weights, pickle, ``torch.save(model)``) are plain models that synchronise nothing.
    Gradients have the bits that they have with `DataParallel`, and everything that is
    watched there is watched here::

        handle = minidp.attach(model)            # on all ranks
        for x, y in batches:
            loss_fn(model(x), y).backward()      # call the model, not model.forward
            optimizer.step(); optimizer.zero_grad()
        handle.detach()

    Before ``attach``, or by ``torch.compile(model)``: ``model.compile()`` afterwards
    takes the place of what is attached, which the optimizer guard then reports.

    Args:
        model: the same on all ranks, with at least one trainable parameter.
        options: those of `DataParallel`.

    Returns:
        What undoes it, and the other methods of `DataParallel`. It need not be kept.

    Raises:
        RuntimeError: the model is attached already, or a live `DataParallel` averages
            some of its parameters.
        TypeError: a compiled or wrapped model instead of the model inside.
        ReplicaMismatchError: the replicas differ, or another rank raised.
    """
    return Attachment(model, options)


class Attachment:
    """What `attach` gives: the synchronisation of one model, until `detach`.

    As a context manager it detaches at the end of the block.
    """

    def __init__(self, model: nn.Module, options: dict[str, Any]) -> None:
        if isinstance(model, nn.Module):  # else DataParallel says so, on all ranks
            _check(model)
        self._detour = Detour(model)
        self._data_parallel: _Inside | None = None
        inside = _Inside(model, **options)
        inside.__dict__["_detour"] = self._detour
        self._detour.through = self._data_parallel = inside
        vars(model)[DETOUR] = self._detour

    @property
    def data_parallel(self) -> DataParallel:
        """The object inside: for ``minidp.record``, ``join``, ``step_in_backward``.

        Raises:
            RuntimeError: detached.
        """
        if self._data_parallel is None:
            raise RuntimeError("This model was detached: call minidp.attach again.")
        return self._data_parallel

    def no_sync(self) -> AbstractContextManager[None]:
        """Backwards of forwards that run inside stay local; as in `DataParallel`."""
        return self.data_parallel.no_sync()

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Forwards inside are the model's own, without any collective.

        For one rank that evaluates while others do not: what ``ddp.module(x)`` is to a
        wrapped model. Gradients of their backwards stay local.
        """
        self._detour.depth.now += 1
        try:
            yield
        finally:
            self._detour.depth.now -= 1

    def sync_gradients(self) -> None:
        """Collective: average what ``.grad`` holds now; as in `DataParallel`."""
        self.data_parallel.sync_gradients()

    def reset(self) -> None:
        """Collective: recover from a failed backward; as in `DataParallel`."""
        self.data_parallel.reset()

    def register_comm_hook(self, state: object, hook: Hook) -> None:
        """Let ``hook`` reduce the buckets; as in `DataParallel`."""
        self.data_parallel.register_comm_hook(state, hook)

    def detach(self) -> None:
        """From now on gradients stay local; nothing is left on the model.

        On all ranks, after the same step. Once more does nothing.
        """
        inside, self._data_parallel = self._data_parallel, None
        if inside is None:
            return
        own = vars(inside.module)
        if own.get(DETOUR) is self._detour:  # else model.compile() took its place
            own.pop(DETOUR)
            if self._detour.compiled is not None:
                own[DETOUR] = self._detour.compiled
        inside._remove_autograd_hooks()
        retire(inside._guard)
        if inside.gradient_as_bucket_view:
            for param in inside._reducer.params:
                param.grad = None if param.grad is None else param.grad.clone()
        self._detour.through = None

    def __enter__(self) -> Attachment:
        return self

    def __exit__(self, *error: object) -> None:
        self.detach()


class _Inside(DataParallel):
    """Runs the model's own forward, where the model would come back to us."""

    @untraced_itself
    def _run_module(self, inputs: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        depth = self.__dict__["_detour"].depth
        depth.now += 1
        try:
            return super()._run_module(inputs, kwargs)
        finally:
            depth.now -= 1


class _Depth(threading.local):
    now = 0  # calls of the model in this thread that go straight on


class Detour:
    """Called instead of the model's forward; a copy of it is None.

    Args:
        model: calls this. If it was compiled in place, that is what runs in the end.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self.compiled: Callable[..., Any] | None = getattr(model, DETOUR, None)
        self.through: DataParallel | None = None
        self.depth = _Depth()

    @untraced_itself
    def __call__(self, *inputs: Any, **kwargs: Any) -> Any:
        """Run the model, synchronised if this is not a call from inside."""
        if self.through is not None and not self.depth.now:
            return self.through(*inputs, **kwargs)
        return (self.compiled or self._model._call_impl)(*inputs, **kwargs)

    def __reduce__(self) -> tuple[Any, ...]:
        """Also for models whose ``__getstate__`` is not torch's."""
        return type(None), ()


def attached_to(model: nn.Module) -> DataParallel | None:
    """What synchronises a model that `attach` was called with; else None."""
    detour = vars(model).get(DETOUR)
    return detour.through if isinstance(detour, Detour) else None


@contextmanager
def straight_on(model: nn.Module) -> Iterator[None]:
    """Forwards inside are the model's own, whether it is attached or not."""
    detour = vars(model).get(DETOUR)
    depth = detour.depth if isinstance(detour, Detour) else _Depth()
    depth.now += 1
    try:
        yield
    finally:
        depth.now -= 1


def _check(model: nn.Module) -> None:
    """Refuse what would not be synchronised, or twice.

    Raises:
        TypeError, RuntimeError: see `attach`.
    """
    for inner, remedy in (
        ("_orig_mod", "attach to the module that was compiled, then compile it"),
        ("_reducer", "it synchronises already; attach to its .module instead"),
    ):
        if inner in model.__dict__ | model._modules:
            raise TypeError(
                f"attach() needs the model itself, but got {type(model).__name__}. "
                f"What to do: {remedy}."
            )
    if isinstance(vars(model).get(DETOUR), Detour):
        raise RuntimeError(
            f"This {type(model).__name__} is attached already. What to do: use the "
            "handle of the first attach(), or call its detach() before."
        )
    if _shares_parameters(model):
        gc.collect()  # of those that are in use no longer
        if _shares_parameters(model):
            raise RuntimeError(
                f"Parameters of this {type(model).__name__} are averaged already, by a "
                "DataParallel or another attach(). What to do: delete that object, or "
                "detach it, before."
            )


def _shares_parameters(model: nn.Module) -> bool:
    return any(is_averaged(param) for param in model.parameters())
