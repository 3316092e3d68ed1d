"""Find, build and load the optional native extension of ``csrc/``.

Without the extension, Python kernels do the same, with the same bits. MINIDP_NATIVE
says what a process does when it first asks for it::

    auto     (the default) load a binary that fits; never compile, never fail
    0        never load one
    build    build a binary if none fits; if that is not possible, warn and go on
    1        build a binary if none fits; if that is not possible, fail

Read `state` first, which is what this process has decided, then `binary`, which is
where binaries lie, and how torch's ``cpp_extension`` builds them.
"""

from __future__ import annotations

from .state import NativeStatus, build, library, status

__all__ = ["NativeStatus", "build", "library", "status"]
