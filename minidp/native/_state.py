"""Whether this process uses the binary, decided once, and the reason in words."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import logging
import os
import threading
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from minidp.errors import NativeError

from ._cache import Cache, Entry, Say
from ._compile import build_into
from ._recipe import EXTENSION, Recipe, describe

_LOG = logging.getLogger(__name__)
MODES = ("auto", "0", "1")
BUILD = "python -m minidp.native build"


@dataclass(frozen=True)
class Status:
    """Whether the native kernels are in use, and why.

    Args:
        mode: value of MINIDP_NATIVE: ``"auto"``, ``"0"`` or ``"1"``.
        is_loaded: whether this process uses them.
        path: the binary that was loaded or did not load, if there is one.
        reason: why it is as it is, and what to do next.
        cache: folder that was searched.
        key: name of the folder in the cache that a binary for this process has.
        torch: version, CUDA version and commit of torch.
        flags: wanted flags; the log beside the binary has the whole commands.
    """

    mode: str
    is_loaded: bool
    path: Path | None
    reason: str
    cache: Path | None = None
    key: str = ""
    torch: str = ""
    flags: str = ""

    def __str__(self) -> str:
        """One fact per line."""
        facts = {
            "native kernels": "loaded" if self.is_loaded else "not loaded",
            "reason": self.reason,
            "MINIDP_NATIVE": self.mode,
            "binary": self.path,
            "cache": self.cache,
            "key": self.key,
            "torch": self.torch,
            "flags": self.flags,
        }
        return "\n".join(
            f"{name + ':':16}{fact or '-'}" for name, fact in facts.items()
        )


@dataclass(frozen=True)
class Outcome:
    """What came of the attempt to load: a module, or none and an error if required."""

    module: ModuleType | None
    status: Status
    error: str = ""


def read_mode() -> str:
    """The value of MINIDP_NATIVE.

    Raises:
        ValueError: it is none of the three.
    """
    mode = os.environ.get("MINIDP_NATIVE") or "auto"
    if mode not in MODES:
        raise ValueError(
            f"MINIDP_NATIVE must be one of {', '.join(MODES)}, but is {mode!r}."
        )
    return mode


def attempt(
    mode: str, source: Path | None = None, cache: Path | None = None
) -> Outcome:
    """Try to get the native kernels; never raises.

    Args:
        mode: ``"auto"`` loads what is there, ``"1"`` builds it first if needed.
        source: folder of the sources, csrc/ if not given.
        cache: folder of the binaries, the user's if not given.
    """
    if mode == "0":
        reason = "MINIDP_NATIVE=0 says not to load them."
        return Outcome(None, Status(mode, is_loaded=False, path=None, reason=reason))
    # Whatever is wrong with a folder, a file or a binary is a reason for people to
    # read, and `library` raises it if the kernels are required.
    try:
        recipe = describe(source)
        place = Cache(cache)
        return _attempt(mode, recipe, place)
    except Exception as error:
        reason = f"Looking for them failed: {type(error).__name__}: {error}"
        status = Status(mode, is_loaded=False, path=None, reason=reason)
        return Outcome(None, status, reason)


def _attempt(mode: str, recipe: Recipe, cache: Cache) -> Outcome:
    module = None
    path = None
    try:
        if mode == "1":
            there = cache.find_intact(recipe)
            # A build takes a minute: silence would look like a hang.
            path = there.binary if there else build_into(cache, recipe, _LOG.warning)
        else:
            entry = _usable_entry(recipe, cache)
            path = entry.binary
        module = load(path)
        reason = "A binary of these sources, this torch and this CPU was found."
    except NativeError as error:
        reason = str(error)
    status = Status(
        mode=mode,
        is_loaded=module is not None,
        path=path,
        reason=reason,
        cache=cache.folder,
        key=recipe.key,
        torch=recipe.torch,
        flags=recipe.parts["flags"],
    )
    return Outcome(module, status, "" if module else reason)


def _usable_entry(recipe: Recipe, cache: Cache) -> Entry:
    if not recipe.cpp_files:
        raise NativeError(f"There are no C++ sources in {recipe.folder}.")
    entry = cache.find(recipe)
    if entry is None:
        stale = cache.nearest_changes(recipe)
        if stale:
            _LOG.warning("The native extension is stale and not used: %s.", stale[0])
            raise NativeError(
                f"The binary is stale: {'; '.join(stale)}. What to do: {BUILD}"
            )
        raise NativeError(f"They are not built. What to do: {BUILD}")
    if not entry.is_intact:
        raise NativeError(
            f"{entry.binary} is not the file that was built: it is damaged. "
            f"What to do: {BUILD}"
        )
    return entry


def load(path: Path) -> ModuleType:
    """Load a binary under the extension's name, wherever it is.

    Raises:
        NativeError: the loader, or the module's own initialisation, failed.
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


class Decision:
    """The outcome for one process: the first to ask finds out, all get the same.

    Args:
        source: folder of the sources, csrc/ if not given.
        cache: folder of the binaries, the user's if not given.
    """

    def __init__(self, source: Path | None = None, cache: Path | None = None) -> None:
        self._source = source
        self._cache = cache
        self._lock = threading.Lock()
        self._outcome: Outcome | None = None

    def outcome(self) -> Outcome:
        """What came of it, whether good or bad.

        Raises:
            ValueError: MINIDP_NATIVE has no meaning.
        """
        with self._lock:
            if self._outcome is None:
                self._outcome = attempt(read_mode(), self._source, self._cache)
                status = self._outcome.status
                log = _LOG.debug if status.is_loaded else _LOG.info
                log("%s", status.reason)
            return self._outcome

    def library(self) -> ModuleType | None:
        """The module, or None if it is not there and not required.

        Raises:
            NativeError: it is required and not there.
            ValueError: MINIDP_NATIVE has no meaning.
        """
        # Asked in every backward, so without the lock once it is known.
        outcome = self._outcome or self.outcome()
        if outcome.error and outcome.status.mode == "1":
            raise NativeError(
                f"MINIDP_NATIVE=1 requires the native kernels. {outcome.error}"
            )
        return outcome.module


def build(
    *,
    source: Path | None = None,
    cache: Path | None = None,
    force: bool = False,
    verbose: bool = False,
    say: Say = _LOG.info,
) -> Path:
    """Build the native kernels unless they are built; this process keeps what it has.

    Args:
        source: folder of the sources, csrc/ if not given.
        cache: folder of the binaries, the user's if not given.
        force: build even if an intact binary is there.
        verbose: say the commands and the compiler's output too.
        say: called with every line of progress.

    Returns:
        The binary.

    Raises:
        NativeError: something is missing, or a command failed.
    """
    recipe = describe(source)
    return build_into(Cache(cache), recipe, say, force=force, verbose=verbose)
