"""Load the C++ extension at most once per process, and keep the reason if it does not.

The first call of `library` or `status` decides for the whole process. A reducer must
not find the extension in one backward, and not in the next.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import logging
import os
import sys
import threading
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from minidp.errors import NativeError

from . import binary
from .binary import EXTENSION, Say

_LOG = logging.getLogger(__name__)
BUILD = "python -m minidp.native build"


@dataclass(frozen=True)
class NativeStatus:
    """The result of an attempt to load the native kernels, and what it was based on."""

    mode: str  # the value of MINIDP_NATIVE: "auto", "build", "0" or "1"
    is_loaded: bool
    path: Path | None  # the binary that was loaded, or that failed to load
    reason: str  # why the kernels are loaded or not, and what to do next
    cache: Path | None = None  # the folder that was searched for a binary
    key: str = ""  # the name of the folder in it for a binary that fits this process
    torch: str = ""  # its version, CUDA version and commit
    flags: str = ""  # those of the compilers, optional ones included
    left_out: tuple[str, ...] = ()  # what the binary lacks, and why

    @property
    def shared_memory(self) -> str:
        """Whether CPU ranks may share the memory of buckets, or why not, as a text."""
        if os.environ.get("MINIDP_SHARED_MEMORY") == "0":
            return "no: MINIDP_SHARED_MEMORY=0"
        if not self.is_loaded or sys.platform != "linux":
            return "no: needs the native kernels, on Linux"
        return "where CPU ranks share a host (torchrun -m minidp.doctor asks them)"

    def __str__(self) -> str:
        """Return a line for each field."""
        facts = {
            "native kernels": "loaded" if self.is_loaded else "not loaded",
            "reason": self.reason,
            "shared memory": self.shared_memory,
            "MINIDP_NATIVE": self.mode,
            "binary": self.path,
            "cache": self.cache,
            "key": self.key,
            "torch": self.torch,
            "flags": self.flags,
            "left out": "; ".join(self.left_out),
        }
        return "\n".join(
            f"{name + ':':16}{fact or '-'}" for name, fact in facts.items()
        )


_lock = threading.Lock()
_decided: tuple[ModuleType | None, NativeStatus] | None = None  # set once, by `_decide`


def library() -> ModuleType | None:
    """Return the extension, or None to run without it.

    The first call decides that for the process, and loads the extension. With
    MINIDP_NATIVE=build or 1 it builds it if needed, which takes a while.

    Raises:
        NativeError: MINIDP_NATIVE is 1, but there is no extension.
        ValueError: MINIDP_NATIVE is none of auto, build, 0 and 1.
    """
    module, found = _decided or _decide()
    if module is None and found.mode == "1":
        raise NativeError(
            f"MINIDP_NATIVE=1 requires the native kernels. {found.reason}"
        )
    return module


def status() -> NativeStatus:
    """Try to load the extension if nobody has, and say whether it is loaded, and why.

    As `library` does, this decides for the process, and may build the extension. But if
    that fails, nothing is raised, and the error is the reason that is told.

    Raises:
        ValueError: MINIDP_NATIVE is none of auto, build, 0 and 1.
    """
    return _decide()[1]


def build(*, force: bool = False, verbose: bool = False, say: Say = _LOG.info) -> Path:
    """Build the native kernels unless the cache has them.

    They are not loaded. The result is the path of the binary.

    Args:
        force: Whether to build also if the cache has an intact binary.
        verbose: Whether ninja and the compilers write to the standard output.
        say: Is called with each line of progress.

    Raises:
        NativeError: The build failed, or the cache cannot be written.
    """
    wanted = binary.inputs()
    return binary.build_into_cache(wanted, say, force=force, verbose=verbose).path


def _decide() -> tuple[ModuleType | None, NativeStatus]:
    """Return the extension, or None, and the status, as the first call finds them.

    That call also logs the reason. Other threads wait for it.
    """
    global _decided  # one process, one extension
    with _lock:
        if _decided is None:
            _decided = attempt(read_mode())
            found = _decided[1]
            missed = _notable() if found.mode == "build" else logging.INFO
            _LOG.log(logging.DEBUG if found.is_loaded else missed, found.reason)
        return _decided


def read_mode() -> str:
    """Return the value of MINIDP_NATIVE, or "auto" if it is not set.

    Raises:
        ValueError: It is none of auto, build, 0 and 1.
    """
    mode = os.environ.get("MINIDP_NATIVE") or "auto"
    if mode not in ("auto", "build", "0", "1"):
        raise ValueError(
            f"MINIDP_NATIVE must be one of auto, build, 0, 1, but is {mode!r}."
        )
    return mode


def attempt(mode: str) -> tuple[ModuleType | None, NativeStatus]:
    """Try to load the extension, and return it, or None, and the status.

    No error is raised. It becomes the ``reason`` of the status. In the modes "1" and
    "build" this builds a binary if none fits.
    """
    if mode == "0":
        reason = "MINIDP_NATIVE=0 says not to load native kernels."
        return None, NativeStatus(mode, is_loaded=False, path=None, reason=reason)
    module = path = None
    facts: dict[str, Any] = {}
    try:
        wanted = binary.inputs()
        facts["key"] = binary.key(wanted)
        facts.update({name: wanted[name] for name in ("torch", "flags")})
        found, why_not = binary.find(wanted)
        if found is None and mode in ("1", "build"):
            # Without a word the process would seem to hang.
            _LOG.log(
                _notable(), "Building the C++ extension, once: it takes about 25 s."
            )
            found = binary.build_into_cache(wanted, _LOG.info)
        elif found is None:
            if "stale" in why_not:  # whoever has built one expects to use it
                _LOG.log(_notable(), "The native extension is not used. %s", why_not)
            raise NativeError(f"{why_not} What to do: {BUILD}")
        path, facts["left_out"] = found.path, found.left_out
        module = load(path)
        reason = "A binary of these sources, this torch and this CPU was found."
    except NativeError as error:
        reason = str(error)
    except Exception as error:  # if the extension is required, `library` raises it
        reason = f"Looking for a binary failed: {type(error).__name__}: {error}"
    is_loaded = module is not None
    return module, NativeStatus(mode, is_loaded, path, reason, binary.cache(), **facts)


def _notable() -> int:
    """Return the log level for what only one process of each host is to show."""
    is_first = os.environ.get("LOCAL_RANK", "0") == "0"
    return logging.WARNING if is_first else logging.INFO


def load(path: Path) -> ModuleType:
    """Load a binary as the extension module.

    Raises:
        NativeError: It does not load.
    """
    loader = importlib.machinery.ExtensionFileLoader(EXTENSION, str(path))
    spec = importlib.util.spec_from_file_location(EXTENSION, path, loader=loader)
    assert spec is not None  # a loader was given
    try:
        module = importlib.util.module_from_spec(spec)
        loader.exec_module(module)
    except Exception as error:  # a module's initialisation can raise anything
        raise NativeError(
            f"{path} did not load: {type(error).__name__}: {error}. "
            f"What to do: {BUILD} --force"
        ) from error
    return module
