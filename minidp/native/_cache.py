"""Where binaries are kept: one folder per key, written by one process at a time.

::

    ~/.cache/minidp/
        lock                        held by whoever builds
        building-k3j2x/             private to that builder; a leftover if it was killed
        4f1c.../recipe.json         names the binary, its hash and what it was made of
        4f1c.../_minidp_native-91ab.so
        4f1c....log                 what the compiler said

The JSON is put in place last and in one step, so a reader sees a whole entry or none.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock, Timeout

from minidp.errors import NativeError

from ._recipe import EXTENSION, Recipe, changes

_PREFIX = "building-"
_LOOK_AGAIN_SECONDS = 0.25
_RECORD = "recipe.json"

Say = Callable[[str], None]


@dataclass(frozen=True)
class Entry:
    """A binary and what it was made of."""

    binary: Path
    digest: str  # SHA-256 of the binary
    parts: dict[str, str]

    @property
    def is_intact(self) -> bool:
        """Whether the file is the one that was built.

        Asked before loading, because mapping a truncated file kills the process.
        """
        try:
            return _hash(self.binary) == self.digest
        except OSError:
            return False


class Cache:
    """The folder with all binaries.

    Args:
        folder: MINIDP_NATIVE_CACHE or a folder of the user's cache if not given.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self.folder = default_folder() if folder is None else folder

    def log_of(self, recipe: Recipe) -> Path:
        """Where a build's output goes; it stays when the build fails."""
        return self.folder / f"{recipe.key}.log"

    def find(self, recipe: Recipe) -> Entry | None:
        """The binary for a recipe, damaged or not."""
        entry = _read(self.folder / recipe.key)
        if entry is not None:
            return entry
        for other in self._entries():
            if not changes(other.parts, recipe.parts):
                return other
        return None

    def nearest_changes(self, recipe: Recipe) -> list[str]:
        """What has changed since the build that is most like the recipe, if any."""
        found = [changes(entry.parts, recipe.parts) for entry in self._entries()]
        return min(found, key=len, default=[])

    def find_intact(self, recipe: Recipe) -> Entry | None:
        """The binary for a recipe, if it can be loaded."""
        entry = self.find(recipe)
        return entry if entry is not None and entry.is_intact else None

    @contextmanager
    def locked(
        self, say: Say, find: Callable[[], Entry | None]
    ) -> Iterator[Entry | None]:
        """Wait until this process is the only builder, or need not build.

        Args:
            say: told whom it waits for, and how far that one is.
            find: what would make a build needless. Asked before the lock is, and again
                while somebody holds it: who builds now may build something else.

        Yields:
            What was found, perhaps without the lock; None under the lock.
        """
        lock, said = FileLock(self.folder / "lock"), ""
        found = find()
        while found is None and not lock.is_locked:
            try:
                self.folder.mkdir(parents=True, exist_ok=True)
                lock.acquire(timeout=_LOOK_AGAIN_SECONDS if said else 0)
            except Timeout:
                count = len(list(self.folder.glob(f"{_PREFIX}*/*.o")))
                now = f"another process is building (files compiled so far: {count})"
                if now != said:
                    say(f"waiting for the lock of {self.folder}: {now}")
                said = now
            except OSError as error:
                raise NativeError(
                    f"The cache folder {self.folder} is not writable: {error}. What to "
                    "do: set MINIDP_NATIVE_CACHE to a folder that is."
                ) from error
            found = find()
        try:
            yield found
        finally:
            lock.release()  # the kernel does if this process is killed

    @contextmanager
    def workspace(self) -> Iterator[Path]:
        """An empty folder for one build; call only under the lock."""
        for leftover in self.folder.glob(f"{_PREFIX}*"):
            # Its builder is dead: a living one would hold the lock.
            shutil.rmtree(leftover, ignore_errors=True)
        folder = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=self.folder))
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def publish(self, recipe: Recipe, built: Path) -> Path:
        """Move a finished binary into place; call only under the lock."""
        home = self.folder / recipe.key
        home.mkdir(exist_ok=True)
        digest = _hash(built)
        # A new name for a new binary: a process may have mapped the old file.
        binary = home / f"{EXTENSION}-{digest[:12]}.so"
        os.replace(built, binary)
        record = {"binary": binary.name, "digest": digest, "parts": recipe.parts}
        draft = built.with_name(_RECORD)
        draft.write_text(json.dumps(record, indent=2))
        os.replace(draft, home / _RECORD)
        for other in home.glob("*.so"):
            if other != binary:
                other.unlink()
        return binary

    def _entries(self) -> list[Entry]:
        records = sorted(self.folder.glob(f"*/{_RECORD}"))
        entries = (_read(record.parent) for record in records)
        return [entry for entry in entries if entry is not None]


def default_folder() -> Path:
    """Where binaries go unless a caller says otherwise."""
    if chosen := os.environ.get("MINIDP_NATIVE_CACHE"):
        return Path(chosen).expanduser().absolute()
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "minidp"


def _read(home: Path) -> Entry | None:
    try:
        record = json.loads((home / _RECORD).read_text())
        return Entry(home / record["binary"], record["digest"], dict(record["parts"]))
    except (OSError, ValueError, KeyError, TypeError):
        return None  # not an entry, or not one of this version of minidp


def _hash(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
