"""``minidp.swapped()``: torch's class becomes ours, under all its names, for a while.

What is swapped, and put back at the end, also after an error:

1. the name ``DistributedDataParallel`` of ``torch.nn.parallel`` and of its module
   ``distributed``, for whoever asks for it, now or in an import;
2. names of modules that imported it before (or import it meanwhile), at module level;
3. torch's class itself, for those who kept it elsewhere (a dict, a default argument):
   to call it makes ours, to derive from it derives from ours.

``isinstance`` and ``issubclass`` with either class say yes to objects of ours. Torch's
own modules go on to see torch's class: what they do with it stays as it is, and objects
that were made before go on to work. Processes that multiprocessing starts meanwhile are
swapped as well (those of ``subprocess`` are not).

Not swapped: classes that were derived from torch's before (a warning names them), names
that were imported inside functions that still run, and torch's ``replicate()``. Objects
of torch's class cannot be pickled meanwhile, and ``isinstance`` by a swapped name says
no to them. What is made inside stays what it is afterwards: objects, derived classes.
"""

from __future__ import annotations

import multiprocessing.process
import opcode
import sys
import threading
from abc import ABCMeta
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType, ModuleType
from typing import Any

import torch.nn.parallel
from torch.nn.parallel import distributed

from ._compat import DataParallel
from ._warn import warn

TORCHS = distributed.DistributedDataParallel
NAME = "DistributedDataParallel"
_MODULES = (torch.nn.parallel, distributed)
_STARS = ("IMPORT_STAR", "CALL_INTRINSIC_1")  # up to Python 3.11, and since
_PASSED_ON = "minidp"  # key of multiprocessing's settings, which children inherit


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
        self._bound: list[tuple[dict[str, Any], str]] = []  # namespaces, names

    def begin(self) -> None:
        """Swap, if that is not done yet."""
        with self._lock:
            self.depth += 1
            if self.depth > 1:
                return
            _warn_of_subclasses()
            self.reached_children = False
            for names in _namespaces():
                for name in [n for n, value in names.items() if value is TORCHS]:
                    names[name] = DataParallel
                    self._bound.append((names, name))
            for module in _MODULES:
                _give_class(module, _Names)
            _give_class(TORCHS, _Caught)
            _settings()[_PASSED_ON] = _PassedOn()

    def end(self) -> None:
        """Put everything back, if this was the outermost block."""
        with self._lock:
            self.depth -= 1
            if self.depth:
                return
            _settings().pop(_PASSED_ON, None)
            _give_class(TORCHS, ABCMeta)
            for module in _MODULES:
                _give_class(module, ModuleType)
            for names, name in self._bound:
                if names.get(name) is DataParallel:
                    names[name] = TORCHS
            self._bound.clear()

    def note_import(self, frame: FrameType) -> None:
        """Somebody asks for the name: if it is about to be bound, put it back later."""
        name = _bound_next(frame)
        if name:
            self._bound.append((frame.f_globals, name))


class _Names(ModuleType):
    """A module of torch while swapped; its own code sees what it always saw."""

    @property
    def DistributedDataParallel(self) -> Any:
        """Ours for others, torch's for torch."""
        there = self.__dict__[NAME]
        frame = sys._getframe(1)
        if there is not TORCHS or _is_torchs(frame.f_globals.get("__name__")):
            return there
        _swapping.note_import(frame)
        return DataParallel

    @DistributedDataParallel.setter
    def DistributedDataParallel(self, value: Any) -> None:
        """Somebody patches it; to put back what was read here is no patch."""
        self.__dict__[NAME] = TORCHS if value is DataParallel else value


class _Caught(ABCMeta):
    """The class of torch's class while swapped."""

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        caller = sys._getframe(1).f_globals.get("__name__")
        if cls is TORCHS and not _is_torchs(caller):
            return DataParallel(*args, **kwargs)
        return super().__call__(*args, **kwargs)

    def __new__(
        cls, name: str, bases: tuple[type, ...], members: dict[str, Any], **more: Any
    ) -> Any:
        """Derive from ours."""
        ours = tuple(DataParallel if base is TORCHS else base for base in bases)
        return ABCMeta(name, ours, members, **more)


class _PassedOn:
    """Swaps in processes that are started by ``spawn`` or ``forkserver``."""

    def __reduce__(self) -> tuple[Any, ...]:
        _swapping.reached_children = True
        return _swap_here, ()


def _swap_here() -> _PassedOn:
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


def _namespaces() -> Iterator[dict[str, Any]]:
    """Of all modules but torch's and ours, without waking up lazy ones."""
    for name, module in list(sys.modules.items()):
        if isinstance(module, ModuleType) and not _is_torchs(name):
            yield module.__dict__


def _is_torchs(name: object) -> bool:
    """Whether a module is one of torch's (or ours), by its name."""
    return isinstance(name, str) and name.partition(".")[0] in ("torch", "minidp")


def _bound_next(frame: FrameType) -> str:
    """The name at module level that a running import or assignment will bind."""
    code, at = frame.f_code, frame.f_lasti
    if code.co_name != "<module>":
        return ""
    if opcode.opname[code.co_code[at]] in _STARS:
        return NAME  # from torch.nn.parallel import *
    index = 0
    while (at := at + 2) < len(code.co_code):
        name = opcode.opname[code.co_code[at]]
        index = index << 8 | code.co_code[at + 1]
        if name in ("STORE_NAME", "STORE_GLOBAL"):
            return code.co_names[index]
        if name != "EXTENDED_ARG":
            index = 0
        if name not in ("EXTENDED_ARG", "CACHE"):
            break
    return ""


def _warn_of_subclasses() -> None:
    early = [c for c in TORCHS.__subclasses__() if not _is_torchs(c.__module__)]
    if early:
        names = ", ".join(f"{c.__module__}.{c.__qualname__}" for c in early)
        warn(
            f"Derived from torch's DistributedDataParallel before it was swapped, and "
            f"so still torch's: {names}. Swap before they are defined.",
        )


_swapping = _Swapping()
