"""Let whoever reads a parameter wait until its new values have come.

With ``overlap_param_gather=True`` a step is over before the values of other ranks'
shares are in place, and the next forward runs while they travel. Nobody may see an old
value meanwhile. So for that time a parameter is of a class of its own, whose every use
goes through ``__torch_function__``, where it waits. Then it is a plain parameter again.
A module that hands its parameters to C++ code of its own, where torch calls nothing of
that kind, has a hook that waits before its forward.

What this cannot see are reads that torch does not tell of: ``torch.tensor(param)``,
``other.data = param``, a collective that is called on the process group itself,
transforms of ``torch.func`` of the parameter itself, and C++ code that gets the
parameter of another module. If such a use gives the memory to another tensor, `release`
finds that out.
"""

from __future__ import annotations

import functools
import operator
import os
import sys
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook

from minidp import world
from minidp.core import untraced

# Values arrive under this lock, on whatever thread needs them.
lock = world.PerProcess(threading.RLock)


class _Arrival(NamedTuple):
    """What a parameter waits for."""

    arrive: Callable[[], None]
    uses: tuple[int, int]  # how many had its memory when it began to wait


# By the id of a parameter. Whoever has put it here holds it.
_arrivals: world.PerProcess[dict[int, _Arrival]] = world.PerProcess(dict)


_grad: Any = Tensor.grad
_NEW_PARAMETER = nn.Parameter.__new__.__code__


def _getters(*names: str) -> list[Any]:
    return [getattr(Tensor, name).__get__ for name in names]


# What tells nothing of values, or is of the gradient, need not wait.
_LET_PASS = frozenset(
    [
        *_getters("shape", "dtype", "device", "layout", "ndim", "is_leaf", "grad_fn"),
        *_getters("requires_grad", "grad", "is_sparse", "is_meta", "_version"),
        *_getters("_backward_hooks", "_post_accumulate_grad_hooks", "retains_grad"),
        *(_grad.__set__, _grad.__delete__),
        *(Tensor.size, Tensor.dim, Tensor.numel, Tensor.nelement, Tensor.stride),
        *(Tensor.is_floating_point, Tensor.is_complex, Tensor.is_contiguous),
        *(Tensor.register_hook, Tensor.register_post_accumulate_grad_hook),
    ]
)


class AwaitedParameter(nn.Parameter):
    """A parameter whose values are on their way, until somebody needs them.

    No object is made of this class: it is given to parameters, and taken away again.
    """

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Wait for the values of all parameters here, unless nobody looks at them."""
        kwargs = kwargs or {}
        if func not in _LET_PASS:
            _arrive_in((args, kwargs))
            if func is Tensor.detach and sys._getframe(1).f_code is _NEW_PARAMETER:
                # `nn.Parameter(param)` insists on the class that it saw before.
                return nn.Parameter(args[0])
            if not any(issubclass(each, cls) and each is not cls for each in types):
                # Nobody is awaited any more, and other classes get their turn.
                return func(*args, **kwargs)
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)

    def __deepcopy__(self, memo: Any) -> Any:
        """Wait, and be copied as a parameter."""
        _arrive(self)
        return self.__deepcopy__(memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Wait, and be saved as a parameter."""
        _arrive(self)
        return self.__reduce_ex__(protocol)


class _ModuleHook:
    """The hook of all modules, which is there as long as parameters are awaited."""

    handle: Any = None

    def update(self) -> None:
        if _arrivals() and self.handle is None:
            self.handle = register_module_forward_pre_hook(_before_module)
        elif not _arrivals() and self.handle is not None:
            self.handle.remove()
            self.handle = None


_module_hook = world.PerProcess(_ModuleHook)


def can_be_awaited(params: Iterable[nn.Parameter]) -> bool:
    """Return whether nobody can read these but through the parameters themselves.

    Another tensor of the same memory (a view that the script keeps, an array of numpy)
    would show old values. On a device any stream may read them, and the one that has
    waited would not tell the others. And code that was compiled in this process would
    be compiled anew for every class of parameters that it meets.
    """
    if _was_compiled():
        return False
    return all(type(p) is nn.Parameter and p.is_cpu and is_alone(p) for p in params)


def is_alone(tensor: Tensor) -> bool:
    """Return whether no other tensor shares the memory of this one."""
    return _uses(tensor) == _uses_of_new_memory()


def _uses(tensor: Tensor) -> tuple[int, int]:
    """Return how many users a tensor's memory has, in C++ and in Python."""
    storage = tensor.untyped_storage()
    return torch._C._storage_Use_Count(storage._cdata), sys.getrefcount(storage)


def _was_compiled() -> bool:
    dynamo = sys.modules.get("torch._dynamo.convert_frame")
    return bool(getattr(dynamo, "FRAME_COUNTER", 0))


@functools.cache
def _uses_of_new_memory() -> tuple[int, int]:
    return _uses(torch.empty(1, device="cpu"))


def await_values(params: Sequence[nn.Parameter], arrive: Callable[[], None]) -> None:
    """Let the first who reads one of these parameters call ``arrive``.

    Args:
        params: Plain parameters.
        arrive: Writes their values, and calls `release`, also if that fails.
    """
    # An old graph that has saved such a parameter must not be run any more, as after
    # any other step.
    torch.autograd.graph.increment_version(params)
    with lock():
        for param in params:
            _arrivals()[id(param)] = _Arrival(arrive, _uses(param))
            param.__class__ = AwaitedParameter
        _module_hook().update()


def release(params: Iterable[nn.Parameter]) -> list[nn.Parameter]:
    """Make plain parameters of these again.

    Returns:
        Those whose memory another tensor has got meanwhile. It showed old values.
    """
    shown = []
    with lock():
        for param in params:
            arrival = _arrivals().pop(id(param), None)
            if arrival is None:
                continue
            param.__class__ = nn.Parameter
            if any(map(operator.gt, _uses(param), arrival.uses)):
                shown.append(param)
        _module_hook().update()
    return shown


def _arrive(param: AwaitedParameter) -> None:
    arrival = _arrivals().get(id(param))
    if arrival is not None:  # else another thread was faster
        arrival.arrive()


def _arrive_in(found: Any) -> None:
    """Let all parameters arrive in arguments of a function, however deep they are."""
    if isinstance(found, AwaitedParameter):
        _arrive(found)
    elif isinstance(found, dict):
        for each in [*found.values()]:
            _arrive_in(each)
    elif isinstance(found, list | tuple | set):
        for each in [*found]:
            _arrive_in(each)


def arrive_everywhere() -> None:
    """Let all values arrive, of all wrappers."""
    for arrival in [*_arrivals().values()]:
        arrival.arrive()


@untraced
def _before_module(module: nn.Module, _inputs: Any) -> None:
    if not torch.is_grad_enabled():
        # Torch's fast paths of evaluation look at the classes of parameters.
        arrive_everywhere()
        return
    for param in module._parameters.values():
        if type(param) is AwaitedParameter:
            _arrive(param)


# A child process inherits no values that arrive later.
os.register_at_fork(before=arrive_everywhere)
