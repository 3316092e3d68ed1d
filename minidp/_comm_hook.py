"""A registered comm hook: its signature checked, its mistakes named.

``hook(state, bucket) -> Future[Tensor]`` is called once per full bucket, in index order
on every rank, on the thread of the autograd engine. What its future brings replaces the
buffer; nobody else divides.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any, get_origin, get_type_hints

import torch
from torch.futures import Future

from ._grad_bucket import GradBucket
from ._waiting import Promised
from .errors import CommHookError, explain

Hook = Callable[[Any, Any], Future[torch.Tensor]]
_REMEDY = (
    "mend the hook, or look for a rank that died; then call reset() on all ranks, and "
    "zero_grad()"
)


class CommHook:
    """A hook and its state.

    Args:
        state: the hook's first argument, as given.
        hook: see the module.

    Raises:
        TypeError: not callable, or not with two arguments.
        ValueError: an annotation says that it is no comm hook.
    """

    def __init__(self, state: object, hook: Hook) -> None:
        _check_signature(hook)
        self.state = state
        self.hook = hook
        self.name = name_of(hook)

    def start(
        self, bucket: GradBucket, names: Sequence[str], rank: int
    ) -> HookInFlight:
        """Call the hook; the result has to be waited for.

        Raises:
            CommHookError: it raised, or returned no future.
        """
        call = HookInFlight(self.name, bucket, names, rank)
        try:
            future = self.hook(self.state, bucket)
        except Exception as error:
            text = _text_of(error)
            what = f"raised {type(error).__name__}" + (f": {text}" if text else "")
            raise call.problem(what) from error
        if not isinstance(future, torch._C.Future):  # works give this base class
            # From "DDP" to the type: the words that scripts and torch's tests look for.
            raise call.problem(
                "returned no future: DDP communication hook's callback must return a "
                "torch.futures.Future object, but got "
                f"{type(future).__name__}",
                expected="a future of one tensor (future.set_result(tensor) for a "
                "value that is there already)",
            )
        call.future = future
        return call


class HookInFlight(Promised):
    """One call of a hook: the `Work` of its bucket."""

    def __init__(
        self, hook_name: str, bucket: GradBucket, names: Sequence[str], rank: int
    ) -> None:
        super().__init__(Future())
        self._hook_name = hook_name
        self._index = bucket.index()
        self._payload = bucket.buffer()
        self._alias = self._payload.detach()  # the same memory, wherever that moves
        self._names = names
        self._rank = rank

    def wait(self) -> torch.Tensor:
        """What replaces the bucket's buffer.

        Raises:
            CommHookError: the future brings an error, or anything but one tensor of as
                many elements; or the bucket's buffer is not what it was.
        """
        try:
            result = self.future.wait()
        except Exception as error:
            _forget_frames(error)
            text = f"returned a future that failed: {_text_of(error)}"
            raise self.problem(text) from error
        if not _is_intact(self._payload, self._alias):
            raise self.problem(
                "has left the bucket's buffer with another size, dtype or memory",
                expected="a hook that changes the values of bucket.buffer(), or brings "
                "another tensor in its future",
            )
        expected = f"one tensor of {self._payload.numel()} elements"
        if not isinstance(result, torch.Tensor):
            raise self.problem(
                "returned a future whose value is no tensor",
                expected=expected,
                found=f"{type(result).__name__}"
                + (
                    " (take its first item in .then())"
                    if isinstance(result, list)
                    else ""
                ),
            )
        if not _fits(result, self._payload):
            raise self.problem(
                "returned a future whose tensor does not fit the bucket",
                expected=f"{expected} (layout {self._payload.layout}, a dtype that "
                f"converts to {self._payload.dtype})",
                found=f"shape {tuple(result.shape)}, {result.layout}, {result.dtype}",
            )
        if result.shape == self._payload.shape:
            return result  # as it is: the payload itself need not be copied
        return result.reshape(self._payload.shape)

    def problem(
        self, what: str, *, expected: str = "", found: str = ""
    ) -> CommHookError:
        """An error about this call."""
        return CommHookError(
            explain(
                self._rank,
                f"The comm hook {self._hook_name} {what} (bucket {self._index}).",
                names=self._names,
                expected=expected,
                found=found,
                remedy=_REMEDY,
            )
        )


def _fits(result: torch.Tensor, payload: torch.Tensor) -> bool:
    if result.is_sparse != payload.is_sparse:
        return False
    if payload.is_sparse:
        return result.shape == payload.shape
    if result.is_meta or result.is_quantized or result.is_nested:
        return False
    return (
        result.layout is torch.strided
        and result.numel() == payload.numel()
        and (not result.numel() or result.untyped_storage().nbytes() > 0)  # or a crash
        and torch.can_cast(result.dtype, payload.dtype)
    )


def _is_intact(payload: torch.Tensor, alias: torch.Tensor) -> bool:
    """Whether a buffer still is the memory that gradients are views of."""
    if payload.layout is not torch.strided:
        return True
    end = payload.storage_offset() * payload.element_size() + payload.nbytes
    return (
        payload.data_ptr() == alias.data_ptr()
        and payload.shape == alias.shape
        and payload.dtype is alias.dtype
        and payload.untyped_storage().nbytes() >= end
    )


def _text_of(error: Exception) -> str:
    """The text of a user's exception; making it may raise itself."""
    try:
        return str(error)
    except Exception:
        return f"{type(error).__name__} (its text raises)"


def _forget_frames(error: Exception) -> None:
    """Drop from an error's traceback what waiting for the future put there.

    The future holds the error, and these frames hold the future, and everything above
    them: a circle through C++ that no garbage collection sees.
    """
    trace = error.__traceback__
    ours = (__name__, torch.futures.__name__)
    while trace is not None and trace.tb_frame.f_globals.get("__name__") in ours:
        trace = trace.tb_next
    error.__traceback__ = trace


def name_of(hook: object) -> str:
    """How a hook is called in messages and logs; partials by what they wrap."""
    name = getattr(hook, "__qualname__", None)
    if name is None and hasattr(hook, "func"):  # functools.partial
        return name_of(hook.func)
    return str(name or type(hook).__name__)


def _check_signature(hook: object) -> None:
    if not callable(hook):
        raise TypeError(
            "Communication hook must be callable, as hook(state, bucket), but got "
            f"{hook!r} ({type(hook).__name__})."
        )
    try:
        signature = inspect.signature(hook)
    except (TypeError, ValueError):
        return  # a builtin: nothing is known about it
    try:
        signature.bind(None, None)
    except TypeError as error:
        raise TypeError(
            "Communication hook must take two arguments, hook(state, bucket), but "
            f"{name_of(hook)}{signature} does not: {error}."
        ) from None
    hints = _hints(hook)
    positional = list(signature.parameters.values())
    kind = hints.get(positional[1].name) if len(positional) > 1 else None
    if kind is not None and not _is_bucket(kind):
        raise ValueError(
            "Communication hook: bucket annotation should be dist.GradBucket. "
            f"({name_of(hook)} has {kind!r}; minidp.GradBucket will do as well.)"
        )
    returned = hints.get("return")
    if returned not in (None, Any) and (get_origin(returned) or returned) is not Future:
        raise ValueError(
            "Communication hook: return annotation should be "
            f"torch.futures.Future[torch.Tensor]. ({name_of(hook)} has {returned!r}.)"
        )


def _hints(hook: object) -> dict[str, Any]:
    """Annotations, as far as their names can be found."""
    function = hook if hasattr(hook, "__annotations__") else type(hook).__call__
    try:
        return get_type_hints(function)
    except Exception:  # any code may stand in a string
        return {}


def _is_bucket(kind: object) -> bool:
    """Ours, torch's, or something that says nothing (Any, object, a string)."""
    if kind is Any or not isinstance(kind, type):
        return True
    return kind.__name__ == GradBucket.__name__ or issubclass(GradBucket, kind)
