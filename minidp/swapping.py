"""``minidp.swapped()``: torch's class becomes ours, under all its names, for a while.

What takes its place is a class of the same name, `DistributedDataParallel`, derived
from `minidp.DataParallel` without anything of its own: registries, summaries and checks
of class names meet the name that they know. What is swapped, and put back at the end,
also after an error:

1. the name ``DistributedDataParallel`` of ``torch.nn.parallel`` and of its module
   ``distributed``, for whoever asks for it, now or in an import;
2. names of modules that imported it before (or import it meanwhile), at module level;
3. torch's class itself, for those who kept it elsewhere (a dict, a default argument):
   to call it makes ours, to derive from it derives from ours.

``isinstance`` and ``issubclass`` with either class say yes to objects of ours. Torch's
own modules go on to see torch's class: what they do with it stays as it is, and objects
that were made before go on to work. Processes that multiprocessing starts meanwhile are
swapped as well (those of ``subprocess`` under ``minidp run`` only).

Not swapped: classes that were derived from torch's before (a warning names them), names
that were imported inside functions that still run, and torch's ``replicate()``. Objects
of torch's class cannot be pickled meanwhile, and ``isinstance`` by a swapped name says
no to them. What is made inside stays what it is afterwards: objects, derived classes.
"""

from __future__ import annotations

import multiprocessing.process
import sys
import threading
from abc import ABCMeta
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch.nn.parallel
from torch.nn.parallel import distributed

from ._compat import DataParallel
from ._overrides import note_swapped
from ._warn import warn

TORCHS = distributed.DistributedDataParallel
NAME = "DistributedDataParallel"
_MODULES = (torch.nn.parallel, distributed)
_PASSED_ON = "minidp"  # key of multiprocessing's settings, which children inherit


class DistributedDataParallel(DataParallel):
    """`minidp.DataParallel`, where torch's class is swapped; see there."""

    @classmethod
    def __subclasshook__(cls, other: type) -> Any:
        """`minidp.DataParallel` counts as well, for scripts that wrap in either."""
        is_ours = cls is DistributedDataParallel and DataParallel in other.__mro__
        return True if is_ours else NotImplemented


def swap() -> None:
    """From now on ``DistributedDataParallel`` is `minidp.DataParallel`, for good.

    Call it before the modules that use the class are imported, if you can. A second
    call does nothing, and warns.
    """
    if _swapping.depth:
        warn(
            "minidp.swap(): torch's DistributedDataParallel is swapped already (by an "
            "earlier swap(), a swapped() around, or minidp run); nothing to do.",
        )
        return
    _swapping.begin()


@contextmanager
def swapped() -> Iterator[None]:
    """Inside, ``DistributedDataParallel`` is `minidp.DataParallel`.

    ::

        with minidp.swapped():
            from torch.nn.parallel import DistributedDataParallel as DDP
            model = DDP(Net())           # a minidp.DataParallel

    Blocks may be nested, also inside `swap`: the outermost counts.
    """
    _swapping.begin()
    try:
        yield
    finally:
        _swapping.end()


class _Swapping:
    """What is swapped at present."""

    def __init__(self) -> None:
        self.depth = 0
        self.reached_children = False
        self._lock = threading.RLock()

    def begin(self) -> None:
        """Swap, if that is not done yet."""
        with self._lock:
            self.depth += 1
            if self.depth > 1:
                return
            _warn_of_subclasses()
            self.reached_children = False
            _rebind(TORCHS, DistributedDataParallel)
            for module in _MODULES:
                _give_class(module, _Names)
            _give_class(TORCHS, _Caught)
            _settings()[_PASSED_ON] = _PassedOn()
            note_swapped(is_swapped=True)

    def end(self) -> None:
        """Put everything back, if this was the outermost block."""
        with self._lock:
            self.depth -= 1
            if self.depth:
                return
            note_swapped(is_swapped=False)
            _settings().pop(_PASSED_ON, None)
            _give_class(TORCHS, ABCMeta)
            for module in _MODULES:
                _give_class(module, ModuleType)
            _rebind(DistributedDataParallel, TORCHS)


class _Names(ModuleType):
    """A module of torch while swapped; its own code sees what it always saw."""

    @property
    def DistributedDataParallel(self) -> Any:
        """Ours for others, torch's for torch."""
        there = self.__dict__[NAME]
        asker = sys._getframe(1).f_globals.get("__name__")
        if there is not TORCHS or _is_torchs(asker):
            return there
        return DistributedDataParallel

    @DistributedDataParallel.setter
    def DistributedDataParallel(self, value: Any) -> None:
        """Somebody patches it; to put back what was read here is no patch."""
        self.__dict__[NAME] = TORCHS if value is DistributedDataParallel else value


class _Caught(ABCMeta):
    """The class of torch's class while swapped."""

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        caller = sys._getframe(1).f_globals.get("__name__")
        if cls is TORCHS and not _is_torchs(caller):
            return DistributedDataParallel(*args, **kwargs)
        return super().__call__(*args, **kwargs)

    def __new__(
        cls, name: str, bases: tuple[type, ...], members: dict[str, Any], **more: Any
    ) -> Any:
        """Derive from ours."""
        ours = (DistributedDataParallel if base is TORCHS else base for base in bases)
        return ABCMeta(name, tuple(ours), members, **more)


class _PassedOn:
    """Swaps in processes that are started by ``spawn`` or ``forkserver``."""

    def __reduce__(self) -> tuple[Any, ...]:
        _swapping.reached_children = True
        return swap_here, ()


def swap_here() -> _PassedOn:
    """Swap for good, in a process that was started by a swapped one."""
    if not _swapping.depth:
        _swapping.begin()
    return _PassedOn()


def has_reached_children() -> bool:
    """Whether a process was started since the swap that is swapped as well."""
    return _swapping.reached_children


def _give_class(thing: Any, kind: type) -> None:
    thing.__class__ = kind


def _settings() -> dict[str, Any]:
    """What processes hand on to the processes they start."""
    current: Any = multiprocessing.process.current_process()
    settings: dict[str, Any] = current._config
    return settings


def _rebind(old: type, new: type) -> None:
    """In all modules but torch's and ours, without waking up lazy ones."""
    for module_name, module in list(sys.modules.items()):
        if isinstance(module, ModuleType) and not _is_torchs(module_name):
            names = module.__dict__
            for name in [n for n, value in list(names.items()) if value is old]:
                names[name] = new


def _is_torchs(name: object) -> bool:
    """Whether a module is one of torch's (or ours), by its name."""
    return isinstance(name, str) and name.partition(".")[0] in ("torch", "minidp")


def _warn_of_subclasses() -> None:
    early = [c for c in TORCHS.__subclasses__() if not _is_torchs(c.__module__)]
    if early:
        names = ", ".join(f"{c.__module__}.{c.__qualname__}" for c in early)
        warn(
            f"Derived from torch's DistributedDataParallel before it was swapped, and "
            f"so still torch's: {names}. Swap before they are defined.",
        )


_swapping = _Swapping()
