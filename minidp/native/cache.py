"""Keep binaries in one folder per key, written by one process at a time.

::

    ~/.cache/minidp/
        lock                        held by the process that builds
        building-k3j2x/             used by that process only; stays if it is killed
        4f1c.../recipe.json         names the binary, its hash and its inputs
        4f1c.../_minidp_native-91ab.so
        4f1c....log                 commands and output of the compiler

The JSON is put in place last and in one step, so a reader sees a whole entry or none.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from .recipe import EXTENSION, Recipe, hash_file

_PREFIX = "building-"
_RECORD = "recipe.json"


def folder() -> Path:
    """Return the cache's folder, which may not exist yet.

    It is MINIDP_NATIVE_CACHE, else ``minidp`` in the user's cache folder.
    """
    if chosen := os.environ.get("MINIDP_NATIVE_CACHE"):
        return Path(chosen).expanduser().absolute()
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "minidp"


def find(recipe: Recipe) -> tuple[Path | None, str]:
    """Return a recipe's intact binary in the cache, and ""; else None, and why.

    Why: nothing is built, the binary is damaged, or stale; that names the inputs by
    which the most similar binary differs.
    """
    records = {}
    for path in sorted(folder().glob(f"*/{_RECORD}")):
        # What cannot be read is no record, or not one of this version of minidp.
        with suppress(OSError, ValueError, KeyError, TypeError):
            facts = json.loads(path.read_text())
            changes = recipe.changes_since(dict(facts["parts"]))
            records[path.with_name(facts["binary"])] = (changes, facts["digest"])
    if not records:
        return None, "The native kernels are not built."
    binary, (changes, digest) = min(records.items(), key=lambda each: len(each[1][0]))
    if changes:
        return None, f"The binary is stale: built with another {', '.join(changes)}."
    # To map a truncated file kills the process.
    if not binary.exists() or hash_file(binary) != digest:
        return None, f"The binary {binary} is damaged."
    return binary, ""


@contextmanager
def workspace() -> Iterator[Path]:
    """Yield an empty folder for a build, deleted at exit; the lock must be held.

    First delete the folders that killed builds have left.
    """
    for leftover in folder().glob(f"{_PREFIX}*"):
        # Its builder is dead: a living one would hold the lock.
        shutil.rmtree(leftover, ignore_errors=True)
    with tempfile.TemporaryDirectory(
        prefix=_PREFIX, dir=folder(), ignore_cleanup_errors=True
    ) as made:
        yield Path(made)


def left_out(binary: Path) -> tuple[str, ...]:
    """Return what a build left out of a binary in the cache, and why."""
    with suppress(OSError, ValueError, KeyError, TypeError):
        return tuple(json.loads(binary.with_name(_RECORD).read_text())["left_out"])
    return ()


def publish(recipe: Recipe, built: Path, left_out: Sequence[str] = ()) -> Path:
    """Move a new binary into the cache, where `find` sees it; return its path there.

    Replaces the record and the binaries that the recipe's key had. ``left_out``: what
    the binary lacks, and why.
    """
    home = folder() / recipe.key
    home.mkdir(exist_ok=True)
    digest = hash_file(built)
    # A new name for a new binary, which readers find by the record.
    binary = home / f"{EXTENSION}-{digest[:12]}.so"
    os.replace(built, binary)
    record = {"binary": binary.name, "digest": digest, "parts": recipe.parts}
    record["left_out"] = list(left_out)
    draft = built.with_name(_RECORD)
    draft.write_text(json.dumps(record, indent=2))
    os.replace(draft, home / _RECORD)
    for other in set(home.glob("*.so")) - {binary}:
        other.unlink()
    return binary
