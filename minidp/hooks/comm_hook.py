"""Call a registered comm hook, and check its signature and its results.

A comm hook is a function of the user that takes the place of the all-reduce, for
example to compress gradients: ``hook(state, bucket) -> Future[Tensor]``. It is called
for each full bucket, in index order, on an autograd thread. The value of its future
replaces the buffer, and is not divided any further.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, get_origin

import torch
from torch.futures import Future

from minidp.comm import FutureWork, ProcessGroup, joined_group
from minidp.errors import CommHookError, explain

from .grad_bucket import GradBucket

Hook = Callable[[Any, Any], Future[torch.Tensor]]
_TORCHS = "torch.distributed.algorithms.ddp_comm_hooks.default_hooks"
_TORCHS_HOOKS = "torch.distributed.algorithms."  # modules with known states
_GROUP_HOOKS = {"allreduce_hook", "fp16_compress_hook", "bf16_compress_hook"}


class CommHook:
    """A user's comm hook and its state, which `start` calls for one bucket.

    Args:
        state: What the hook gets as its first argument.
        hook: The hook, which is checked here, but not called.

    Raises:
        TypeError: It is not callable with two arguments.
        ValueError: An annotation of its signature does not fit.
    """

    def __init__(self, state: object, hook: Hook) -> None:
        _check_signature(hook)
        self.state = state
        self.hook = hook
        self.name = name_of(hook)
        self.has_run = False  # it was called, once or more often

    def replace_group(self, old: ProcessGroup, new: ProcessGroup) -> None:
        """Let the hook use another process group, where its state is the old one.

        Torch's hooks that take a group as their state, wrapped or not, understand None
        as the default group. So if that one is replaced, None is, too. A state of
        another kind gets the new group in those of its attributes that are the old one
        (``PowerSGDState.process_group``). Everything else in it is kept.
        """
        is_default = self.state is None and old is joined_group(None)
        if self.state is old or (is_default and _takes_group(self.hook)):
            self.state = new
            return
        for name, value in _attributes(self.state).items():
            if value is old:
                setattr(self.state, name, new)

    @property
    def counts(self) -> dict[str, int]:
        """How many backwards a state of torch's has counted (``PowerSGDState.iter``).

        It decides what the hook does next, and so must be equal on all ranks. In a
        state of the user's own nobody knows what is meant to differ.
        """
        if not type(self.state).__module__.startswith(_TORCHS_HOOKS):
            return {}
        attributes = _attributes(self.state)
        return {name: attributes[name] for name in ("iter",) if name in attributes}

    def count_as(self, counts: Mapping[str, int]) -> None:
        """Set what `counts` has returned, on this rank or on another one."""
        for name in self.counts.keys() & counts.keys():
            setattr(self.state, name, counts[name])

    def start(
        self, bucket: GradBucket, names: Sequence[str], rank: int
    ) -> HookInFlight:
        """Call the hook for one bucket, and return its future as work to wait for.

        Args:
            bucket: What the hook gets as its second argument.
            names: The names of the bucket's parameters, for errors.
            rank: This rank, for errors.

        Raises:
            CommHookError: The hook raises, or does not return a future.
        """
        call = HookInFlight(self.name, bucket, names, rank)
        self.has_run = True
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


def _takes_group(hook: Any) -> bool:
    """Return whether a hook takes a group as its state, and None for the default one.

    It does if it is torch's hook for all-reduce, fp16 or bf16, or if torch or minidp
    has wrapped one of these.
    """
    place = getattr(hook, "__module__", None)
    if place == _TORCHS and hook.__qualname__ in _GROUP_HOOKS:
        return True
    if place not in (_TORCHS, "minidp.comm_hooks"):
        return False
    return any(_takes_group(cell.cell_contents) for cell in hook.__closure__ or ())


class HookInFlight(FutureWork):
    """The work of one hook call: a future, whose value `wait` checks.

    `CommHook.start` makes it before it calls the hook, so that it knows where the
    memory of the buffer was, and then sets `future`.
    """

    def __init__(
        self, hook_name: str, bucket: GradBucket, names: Sequence[str], rank: int
    ) -> None:
        super().__init__(Future())
        self._hook_name = hook_name
        self._index = bucket.index()
        self._buffer = bucket.buffer()
        self._alias = self._buffer.detach()  # keeps pointing to the original memory
        self._names = names
        self._rank = rank

    def wait(self) -> torch.Tensor:
        """Wait for the hook's future, and return its value in the shape of the buffer.

        Nothing is copied to the buffer.

        Raises:
            CommHookError: The future has failed. Or its value is no tensor that can
                replace the buffer, by number of elements, layout and dtype. Or the hook
                has moved or resized the buffer.
        """
        buffer = self._buffer
        try:
            result = self.future.wait()
        except Exception as error:
            _forget_frames(error)
            text = f"returned a future that failed: {_text_of(error)}"
            raise self.problem(text) from error
        if not _is_intact(buffer, self._alias):
            raise self.problem(
                "has left the bucket's buffer with a different size, dtype or memory",
                expected="a hook that changes the values of bucket.buffer(), or brings "
                "a different tensor in its future",
            )
        expected = f"one tensor of {buffer.numel()} elements"
        if not isinstance(result, torch.Tensor):
            hint = " (take its first item in .then())" * isinstance(result, list)
            what = "returned a future whose value is no tensor"
            found = f"{type(result).__name__}{hint}"
            raise self.problem(what, expected=expected, found=found)
        if not _fits(result, buffer):
            raise self.problem(
                "returned a future whose tensor does not fit the bucket",
                expected=f"{expected} (layout {buffer.layout}, a dtype that "
                f"converts to {buffer.dtype})",
                found=f"shape {tuple(result.shape)}, {result.layout}, {result.dtype}",
            )
        # Perhaps the buffer itself: then nothing is copied.
        return result if result.shape == buffer.shape else result.reshape(buffer.shape)

    def has_failed(self) -> bool:
        """Return whether the future has failed by now. This waits for nothing."""
        if not self.future.done():
            return False
        try:
            self.future.value()
        except Exception as error:
            _forget_frames(error)
            return True
        return False

    def problem(
        self, what: str, *, expected: str = "", found: str = ""
    ) -> CommHookError:
        """Return an error, to be raised, that says what the hook has done wrong.

        Args:
            what: Completes the sentence "The comm hook NAME ...".
            expected: What it should have done.
            found: What was found instead.
        """
        return CommHookError(
            explain(
                self._rank,
                f"The comm hook {self._hook_name} {what} (bucket {self._index}).",
                names=self._names,
                expected=expected,
                found=found,
                remedy="fix the hook, or look for a rank that died; then call reset() "
                "on all ranks, and zero_grad()",
            )
        )


def _fits(result: torch.Tensor, buffer: torch.Tensor) -> bool:
    """Return whether the result of a hook can replace the buffer.

    For a dense buffer the shape does not matter if the number of elements is equal, nor
    does the dtype if it can be cast. A tensor without memory of its own (meta, or
    freed), a quantized and a nested one never fit.
    """
    if buffer.is_sparse:
        return result.is_sparse and result.shape == buffer.shape
    if result.is_meta or result.is_quantized or result.is_nested:
        return False
    return (
        result.layout is torch.strided
        and result.numel() == buffer.numel()
        and (not result.numel() or result.untyped_storage().nbytes() > 0)  # or a crash
        and torch.can_cast(result.dtype, buffer.dtype)
    )


def _is_intact(buffer: torch.Tensor, alias: torch.Tensor) -> bool:
    """Return whether a buffer still has the memory, shape and dtype that it had.

    ``alias`` was made of it earlier. A sparse buffer is not checked.
    """
    if buffer.layout is not torch.strided:
        return True
    end = buffer.storage_offset() * buffer.element_size() + buffer.nbytes
    return (
        buffer.data_ptr() == alias.data_ptr()
        and buffer.shape == alias.shape
        and buffer.dtype is alias.dtype
        and buffer.untyped_storage().nbytes() >= end
    )


def _text_of(error: Exception) -> str:
    """Return the text of an exception, or name its type if ``__str__`` raises."""
    try:
        return str(error)
    except Exception:
        return f"{type(error).__name__} (its text raises)"


def _forget_frames(error: Exception) -> None:
    """Cut the outermost frames of a traceback off: this module's and torch.futures'.

    They hold the future, and the future holds the error. This cycle goes through C++,
    so that it would never be collected.
    """
    trace = error.__traceback__
    ours = (__name__, torch.futures.__name__)
    while trace is not None and trace.tb_frame.f_globals.get("__name__") in ours:
        trace = trace.tb_next
    error.__traceback__ = trace


def _attributes(state: object) -> dict[str, Any]:
    """Return an object's own attributes, those in slots, too (``PowerSGDState``)."""
    slots = [getattr(kind, "__slots__", ()) for kind in type(state).__mro__]
    names = [name for some in slots if not isinstance(some, str) for name in some]
    found = {name: getattr(state, name) for name in names if hasattr(state, name)}
    return found | getattr(state, "__dict__", {})


def name_of(hook: object) -> str:
    """Return the name of a hook for messages, which is its ``__qualname__``.

    A partial has that of its function. Another object without one has the name of its
    type.
    """
    name = getattr(hook, "__qualname__", None)
    if name is None and hasattr(hook, "func"):  # functools.partial
        return name_of(hook.func)
    return str(name or type(hook).__name__)


def _check_signature(hook: object) -> None:
    """Check that a hook can be called as ``hook(state, bucket)``, as torch does.

    Annotations that are strings are not read. A hook whose signature cannot be found
    passes.

    Raises:
        TypeError: It is not callable with two positional arguments.
        ValueError: The annotation of the bucket is a class, but neither GradBucket nor
            a base of it. Or that of the result is no Future.
    """
    if not callable(hook):
        raise TypeError(
            "Communication hook must be callable, as hook(state, bucket), but got "
            f"{hook!r} ({type(hook).__name__})."
        )
    try:
        signature = inspect.signature(hook)
    except (TypeError, ValueError):
        return  # a builtin without a signature
    try:
        signature.bind(None, None)
    except TypeError as error:
        raise TypeError(
            "Communication hook must take two arguments, hook(state, bucket), but "
            f"{name_of(hook)}{signature} does not: {error}."
        ) from None
    parameters, empty = [*signature.parameters.values()], signature.empty
    kind = parameters[1].annotation if len(parameters) > 1 else empty  # as (*args)
    is_class = isinstance(kind, type) and kind not in (Any, empty)
    is_bucket = not is_class or kind.__name__ == "GradBucket"  # torch's, too
    if not is_bucket and not issubclass(GradBucket, kind):
        raise ValueError(
            "Communication hook: bucket annotation should be dist.GradBucket. "
            f"({name_of(hook)} has {kind!r}; minidp.GradBucket will do as well.)"
        )
    returned = signature.return_annotation
    is_given = returned not in (Any, empty) and not isinstance(returned, str)
    if is_given and (get_origin(returned) or returned) is not Future:
        raise ValueError(
            "Communication hook: return annotation should be "
            f"torch.futures.Future[torch.Tensor]. ({name_of(hook)} has {returned!r}.)"
        )
