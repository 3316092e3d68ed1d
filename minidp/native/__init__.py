"""The optional native kernels: find, build and load the extension in ``csrc/``.

MINIDP_NATIVE decides, when a process first asks: ``auto`` (default) loads a binary that
fits and never compiles or fails, ``0`` never loads, ``1`` builds what is missing and
fails if it cannot. Without them, the reference kernels in Python do the same.
"""

from __future__ import annotations

from types import ModuleType

from ._state import Decision, Status, build

__all__ = ["Status", "build", "library", "status"]

_HERE = Decision()


def library() -> ModuleType | None:
    """The loaded extension, or None if this process does without.

    Raises:
        NativeError: MINIDP_NATIVE=1 and it cannot be built or loaded.
        ValueError: MINIDP_NATIVE is none of auto, 0 and 1.
    """
    return _HERE.library()


def status() -> Status:
    """Whether the extension is loaded, and why; asks for it first, as `library` does.

    Raises:
        ValueError: MINIDP_NATIVE is none of auto, 0 and 1.
    """
    return _HERE.outcome().status
