"""Find, build and load the optional native extension of ``csrc/``.

MINIDP_NATIVE is read when a process first asks for the extension: ``auto`` (default)
loads a binary that fits and never compiles or fails, ``0`` never loads, ``build``
builds a missing binary and warns if it cannot, ``1`` fails then. Without one, Python
kernels do the same.

Read `state` (what this process has decided), then `binary` (where binaries lie, and how
torch's ``cpp_extension`` builds them).
"""

from __future__ import annotations

from .state import NativeStatus, build, library, status

__all__ = ["NativeStatus", "build", "library", "status"]
