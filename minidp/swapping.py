"""``minidp.swapped()``: replace torch's ``DistributedDataParallel`` for a while.

The replacement has the same name, which registries and summaries know. It is the class
`minidp.DataParallel` once more, under that name, and not derived from it. Code that
calls ``super(DistributedDataParallel, self).__init__()`` means to reach `nn.Module`,
and would not reach it through one more base. These are swapped, and put back at the
end, also after an error:

1. the name in ``torch.nn.parallel`` and in its module ``distributed``;
2. names of other modules that imported the class before, or import it meanwhile;
3. calls of torch's class itself, for references kept elsewhere (a dict, a default
   argument, torch's ``replicate()``).

``isinstance`` and ``issubclass`` with either class accept objects of ours. Code of
torch's own class keeps it, so objects that were made before continue to work. Processes
that multiprocessing starts meanwhile are swapped as well (those of ``subprocess`` under
``minidp run`` only).

Some things are not swapped: classes that were derived from torch's before (a warning
names them) or from a kept reference, and names that were imported inside functions
which still run. Objects of torch's class cannot be pickled meanwhile, and are no
instances of the swapped name. Objects and classes that are made inside stay what they
are afterwards.
"""

from __future__ import annotations

import functools
import multiprocessing.process
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch.nn.parallel
from torch.nn.parallel import distributed

from .config import note_swapped
from .console import warn
from .data_parallel import DataParallel

TORCHS = distributed.DistributedDataParallel
NAME = "DistributedDataParallel"
_TORCHS_INIT = TORCHS.__init__


def _under_torchs_name() -> Any:
    """Return a class with the bases and the body of `DataParallel`, and torch's name.

    Instances of either class are instances of both, because scripts may wrap in either.
    """

    def init(self: Any, *given: Any, **options: Any) -> None:
        # This is looked up at each call, because ``minidp run`` replaces it, to be told
        # of each model.
        DataParallel.__init__(self, *given, **options)

    def subclasshook(cls: type, other: type) -> Any:
        is_ours = cls is twin and DataParallel in other.__mro__
        return True if is_ours else NotImplemented

    plain: Any = DataParallel.__init__
    body = dict(vars(DataParallel))
    for name in ("__dict__", "__weakref__", "_abc_impl", "__abstractmethods__"):
        body.pop(name, None)  # each class has its own
    body |= {
        "__module__": __name__,
        "__qualname__": NAME,
        "__init__": functools.wraps(plain)(init),
    }
    kind: Any = type(DataParallel)
    twin = kind(NAME, DataParallel.__bases__, body)
    DataParallel.register(
        twin
    )  # `abc` refuses the other direction: it would be a circle
    twin.__subclasshook__ = classmethod(subclasshook)
    TORCHS.register(twin)
    return twin


DistributedDataParallel = _under_torchs_name()


def swap() -> None:
    """Replace ``DistributedDataParallel`` by `minidp.DataParallel`, for good.

    Call this before the modules that use the class are imported, if you can. The end of
    a `swapped` block does not undo it. A second call warns and does nothing.
    """
    if _swapping.is_for_good:
        warn(
            "minidp.swap(): torch's DistributedDataParallel is swapped already (by an "
            "earlier swap(), or by minidp run), so this call does nothing.",
        )
    swap_here()


@contextmanager
def swapped() -> Iterator[None]:
    """Replace ``DistributedDataParallel`` by `minidp.DataParallel` inside the block.

        with minidp.swapped():
            from torch.nn.parallel import DistributedDataParallel as DDP
            model = DDP(Net())           # a minidp.DataParallel

    Blocks may be nested. The end of the outermost one puts torch's class back, unless
    `swap` was called.
    """
    _swapping.begin()
    try:
        yield
    finally:
        _swapping.end()


class _Swapping:
    """Swap at the start of the outermost of nested blocks, and undo it at its end."""

    depth = 0  # how many blocks are open
    is_for_good = False  # whether `swap` was called: a block that never ends
    _lock = threading.RLock()

    def begin(self) -> None:
        """Enter a block. The outermost one swaps, and warns of earlier subclasses."""
        with self._lock:
            self.depth += 1
            if self.depth > 1:
                return
            _warn_of_subclasses()
            _rebind(TORCHS, DistributedDataParallel, "torch", "minidp")
            vars(torch.nn.parallel)[NAME] = DistributedDataParallel
            distributed.__class__ = _Module
            _patch(_init, _PassedOn())
            note_swapped(is_swapped=True)

    def end(self) -> None:
        """Leave a block. The outermost one puts everything back."""
        with self._lock:
            self.depth -= 1
            if self.depth:
                return
            note_swapped(is_swapped=False)
            _patch(_TORCHS_INIT, None)
            distributed.__class__ = ModuleType
            _rebind(DistributedDataParallel, TORCHS, "minidp")


_swapping = _Swapping()


class _Module(ModuleType):
    """The type of ``torch.nn.parallel.distributed`` while its class is swapped.

    The code of that module keeps torch's class, because globals do not pass through
    properties.
    """

    @property
    def DistributedDataParallel(self) -> Any:
        """The swapped class, or what a user has assigned to the name meanwhile."""
        there = vars(self)[NAME]
        return DistributedDataParallel if there is TORCHS else there

    @DistributedDataParallel.setter
    def DistributedDataParallel(self, value: Any) -> None:
        vars(self)[NAME] = TORCHS if value is DistributedDataParallel else value


@functools.wraps(TORCHS.__init__)
def _init(self: Any, *given: Any, **options: Any) -> None:
    # An object of torch's class becomes one of minidp's, a derived one stays torch's.
    if type(self) is TORCHS:
        self.__class__ = DistributedDataParallel
        DistributedDataParallel.__init__(self, *given, **options)
    else:
        _TORCHS_INIT(self, *given, **options)


class _PassedOn:
    """Swap torch's class in a process that unpickles this, as children of spawn do."""

    def __reduce__(self) -> tuple[Any, ...]:
        return swap_here, ()


def swap_here() -> _PassedOn:
    """Swap for good, and return an object that swaps where it is unpickled."""
    if not _swapping.is_for_good:
        _swapping.is_for_good = True
        _swapping.begin()
    return _PassedOn()


def _patch(init: Any, passed_on: _PassedOn | None) -> None:
    """Set torch's constructor, and what new processes of multiprocessing unpickle."""
    TORCHS.__init__ = init  # type: ignore[method-assign]
    settings: dict[str, Any] = vars(multiprocessing.process.current_process())[
        "_config"
    ]
    settings.pop("minidp", None)
    if passed_on is not None:
        settings["minidp"] = passed_on


def _rebind(old: type, new: type, *skipped: str) -> None:
    """Replace ``old`` by ``new`` in all loaded modules, but not in some packages."""
    for name, module in list(sys.modules.items()):
        # A lazy module is not woken up by a look at its __dict__.
        if name.partition(".")[0] not in skipped and isinstance(module, ModuleType):
            names = module.__dict__
            for key in [key for key, value in list(names.items()) if value is old]:
                names[key] = new


def _warn_of_subclasses() -> None:
    classes = [(c.__module__, c.__qualname__) for c in TORCHS.__subclasses__()]
    early = [".".join(names) for names in classes if not names[0].startswith("torch.")]
    if early:
        warn(
            "These classes were derived from torch's DistributedDataParallel before it "
            f"was swapped, and so are still torch's: {', '.join(early)}. What to do: "
            "swap before they are defined.",
        )
