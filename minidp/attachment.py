"""``minidp.attach(model)``: synchronise a model without wrapping it.

A call of the model must reach a hidden `DataParallel`, although the model keeps its
type. Torch has an attribute for the result of ``Module.compile()``, which a call of the
module goes through, and which torch leaves out of copies and pickles. The `Detour` is
put there:

    model(x) -> Detour -> DataParallel.forward: checks, module buffers, rebuild
                              |- Detour, which now calls the model's own forward
                              '- arms the reducer
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from torch import Tensor, nn
from torch.optim.optimizer import Optimizer

from .core import ItemTotals, is_exporting, untraced_itself
from .data_parallel import DataParallel
from .errors import UnavailableError
from .guard import is_averaged
from .hooks import Hook
from .replica import DETOUR


def attach(model: nn.Module, **options: Any) -> Attachment:
    """Let backwards of a model average its gradients over ranks, without a wrapper.

    All ranks must call this together. The model keeps its type, its attributes, and its
    ``state_dict()`` keys. Copies (``deepcopy``, pickle, ``torch.save(model)``) are
    plain models that synchronise nothing. Gradients have the same bits, and the same
    checks, as with `DataParallel`:

        handle = minidp.attach(model)            # on all ranks
        for x, y in batches:
            loss_fn(model(x), y).backward()      # call the model, not model.forward
            optimizer.step(); optimizer.zero_grad()
        handle.detach()

    Call ``model.compile()`` before this. Later it would replace the synchronisation,
    which the optimizer guard then reports. You may drop the handle that is returned.

    Args:
        model: The model, the same on all ranks, with at least one trainable parameter.
        options: The options of `DataParallel`.

    Raises:
        RuntimeError: The model is attached already, or a live `DataParallel` averages
            some of its parameters.
        TypeError: The model is compiled or wrapped, and the one inside is needed.
        ReplicaMismatchError: The replicas differ, or another rank raised.
    """
    return Attachment(model, options)


Number = float | Tensor


class Attachment:
    """The handle of an attached model, whose gradients are averaged until `detach`.

    As a context manager it detaches the model at the end of the block. What belongs to
    `DataParallel` raises an UnavailableError after that.
    """

    def __init__(self, model: nn.Module, options: dict[str, Any]) -> None:
        if isinstance(model, nn.Module):  # if not, DataParallel says so, on all ranks
            _check(model)
        self._detour = Detour(model)
        self._data_parallel: _Inside | None = None
        inside = _Inside(model, **options)
        inside._depth = self._detour.depth
        self._detour.through = self._data_parallel = inside
        vars(model)[DETOUR] = self._detour

    @property
    def data_parallel(self) -> DataParallel:
        """The hidden wrapper, for what this handle does not have.

        Raises:
            UnavailableError: The model was detached.
        """
        if self._data_parallel is None:
            raise UnavailableError(
                "This model was detached, and nothing averages its gradients any more. "
                "What to do: call minidp.attach(model) again, on all ranks."
            )
        return self._data_parallel

    def no_sync(self) -> AbstractContextManager[None]:
        """Keep gradients local in backwards of forwards that run inside the block."""
        return self.data_parallel.no_sync()

    def each_logical_rank(self, step: int | None = None) -> Iterator[int]:
        """Go through this rank's logical ranks, as `DataParallel.each_logical_rank`."""
        return self.data_parallel.each_logical_rank(step)

    @property
    def logical_block(self) -> range:
        """This rank's logical ranks, as `DataParallel.logical_block` has them."""
        block: range = self.data_parallel.logical_block
        return block

    @property
    def logical_state(self) -> dict[str, Any]:
        """What a checkpoint needs of them, as `DataParallel.logical_state` has it."""
        state: dict[str, Any] = self.data_parallel.logical_state
        return state

    def alone(self) -> AbstractContextManager[None]:
        """Run forwards inside the block without collectives, as ``ddp.module(x)`` does.

        This lets one rank evaluate alone, in this thread. Backwards of these forwards
        average nothing. ``torch.export`` and ``torch.jit.trace`` do this by themselves.
        """
        return self._detour.depth.deeper()

    def sync_gradients(self) -> None:
        """Average what ``.grad`` holds now, for all parameters and on all ranks.

        All ranks must call this together, as `DataParallel.sync_gradients` says.
        """
        self.data_parallel.sync_gradients()

    def count_items(self, n: Number, loss: Number | None = None) -> None:
        """Add ``n`` items to this step, as `DataParallel.count_items` does."""
        self.data_parallel.count_items(n, loss)

    def weigh_loss(self, loss: Tensor, n: Number) -> Tensor:
        """Count ``n`` items of a mean ``loss``, as `DataParallel.weigh_loss` does."""
        return self.data_parallel.weigh_loss(loss, n)

    @property
    def item_totals(self) -> ItemTotals:
        """Items and losses of the last step, as `DataParallel.item_totals` has them."""
        totals: ItemTotals = self.data_parallel.item_totals
        return totals

    def sharded_step(self, *optimizers: Optimizer, **options: Any) -> None:
        """Let each rank step its share, as `DataParallel.sharded_step` does."""
        self.data_parallel.sharded_step(*optimizers, **options)

    def step_in_backward(self, optimizer: Optimizer, **options: Any) -> None:
        """Let an optimizer step in backwards: see `DataParallel.step_in_backward`."""
        self.data_parallel.step_in_backward(optimizer, **options)

    def clip_grad_norm_(
        self, max_norm: float, norm_type: float = 2.0, **options: Any
    ) -> Tensor:
        """Clip by the norm over all ranks, as `DataParallel.clip_grad_norm_` does."""
        return self.data_parallel.clip_grad_norm_(max_norm, norm_type, **options)

    def whole_optimizer_state(
        self, optimizer: Optimizer, to: int = 0
    ) -> dict[str, Any] | None:
        """Collect all shares, as `DataParallel.whole_optimizer_state` does."""
        return self.data_parallel.whole_optimizer_state(optimizer, to)

    def sharded_optimizer_state(self, optimizer: Optimizer) -> Any:
        """Return what DCP saves, as `DataParallel.sharded_optimizer_state` does."""
        return self.data_parallel.sharded_optimizer_state(optimizer)

    def reset(self, *, copy_from: int | None = None) -> None:
        """Recover from a failed backward on all ranks, as `DataParallel.reset` does."""
        self.data_parallel.reset(copy_from=copy_from)

    def register_comm_hook(self, state: object, hook: Hook) -> None:
        """Let a hook reduce the buckets, as `DataParallel.register_comm_hook` does."""
        self.data_parallel.register_comm_hook(state, hook)

    def detach(self) -> None:
        """Stop averaging gradients, and remove all that `attach` put on the model.

        Call it on all ranks after the same step, although it does not communicate.
        Gradients that are views of buckets become copies. A second call does nothing.
        """
        inside: Any = self._data_parallel
        self._data_parallel = None
        if inside is None:
            return
        own = vars(inside.module)
        if own.get(DETOUR) is self._detour:  # else model.compile() took its place
            own.pop(DETOUR)
            if self._detour.compiled is not None:
                own[DETOUR] = self._detour.compiled
        if inside._sharded is not None:
            inside._sharded.bring_rest()
        inside._remove_autograd_hooks()
        if inside.gradient_as_bucket_view:
            for param in inside._reducer.params:
                param.grad = None if param.grad is None else param.grad.clone()
        self._detour.through = None

    def __enter__(self) -> Attachment:
        return self

    def __exit__(self, *error: object) -> None:
        self.detach()


class _Depth(threading.local):
    """How many blocks in which calls skip the wrapper are open, for each thread."""

    now = 0  # how many are open in this thread

    @contextmanager
    def deeper(self) -> Iterator[None]:
        """Let calls of the model in this block and thread skip the wrapper."""
        self.now += 1
        try:
            yield
        finally:
            self.now -= 1


class _Inside(DataParallel):
    """The hidden wrapper, which calls the model's own forward, and not its `Detour`."""

    _depth: _Depth

    @untraced_itself
    def _run_ddp_forward(self, *inputs: Any, **kwargs: Any) -> Any:
        with self._depth.deeper():
            return super()._run_ddp_forward(*inputs, **kwargs)


class Detour:
    """Pass calls of a model to the hidden wrapper, and from inside it to the model."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        # What the model called before, if it was compiled in place.
        self.compiled: Callable[..., Any] | None = getattr(model, DETOUR, None)
        self.through: DataParallel | None = None
        self.depth = _Depth()

    @untraced_itself
    def __call__(self, *inputs: Any, **kwargs: Any) -> Any:
        """Call the wrapper, or where that is to be skipped, the model's own forward."""
        if self.through is not None and not self.depth.now and not is_exporting():
            return self.through(*inputs, **kwargs)
        return (self.compiled or self._model._call_impl)(*inputs, **kwargs)

    def __reduce__(self) -> tuple[Any, ...]:
        # A model with a ``__getstate__`` of its own may pickle this, too.
        return type(None), ()


def attached_to(model: nn.Module) -> DataParallel | None:
    """Return the hidden wrapper of a model, or None if the model is not attached."""
    detour = vars(model).get(DETOUR)
    return detour.through if isinstance(detour, Detour) else None


def straight_on(model: nn.Module) -> AbstractContextManager[None]:
    """Return a context in which this thread's calls of a model skip its wrapper."""
    detour = vars(model).get(DETOUR)
    return detour.depth.deeper() if isinstance(detour, Detour) else nullcontext()


def _check(model: nn.Module) -> None:
    name = type(model).__name__
    for inner, remedy in (
        ("_orig_mod", "attach to the module that was compiled, then compile it"),
        ("_reducer", "it synchronises already; attach to its .module instead"),
    ):
        if inner in vars(model) | model._modules:
            raise TypeError(
                f"attach() needs the model itself, not {name}. What to do: {remedy}."
            )
    if isinstance(vars(model).get(DETOUR), Detour):
        raise RuntimeError(
            f"This {name} is attached already. What to do: use the handle of the first "
            "attach(), or call its detach() before."
        )
    if any(map(is_averaged, model.parameters())):
        gc.collect()  # drop wrappers that are in use no longer
        if any(map(is_averaged, model.parameters())):
            raise RuntimeError(
                f"Parameters of this {name} are averaged already, by a DataParallel or "
                "another attach(). What to do: delete or detach that object before."
            )
