"""Copy the working directory, so that a run of a script leaves the user's files alone.

A script reads its data, and writes its checkpoints, by relative paths. A directory of
symbolic links would let it find the data, but what it opened for writing would be the
user's own file. So files are copied. Only Python environments and git repositories,
which a training does not write, are links to the originals.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from .script import moved

MAX_BYTES, MAX_FILES = 500 * 2**20, 20_000  # a larger folder is copied only with --copy


def working_copy(here: Path, to: Path, *, is_wished: bool | None) -> tuple[str, str]:
    """Copy a folder, unless it is too large or that is not wished.

    Args:
        here: The folder to copy.
        to: The copy, which must not exist yet.
        is_wished: True to copy a folder of any size, False to copy none, None to copy
            one that is not too large.

    Returns:
        The path of the copy and "", or that of the folder itself and why it was not
        copied.
    """
    why_not = "" if is_wished is not False else "--no-copy"
    if is_wished is None and (why_not := too_large(here)):
        why_not += "; --copy copies it"
    try:
        if not why_not:
            copy(here, to)
    except OSError as error:
        shutil.rmtree(to, ignore_errors=True)
        why_not = f"it cannot be copied: {error}"
    return str(here if why_not else to), why_not


def moved_environment(here: Path, to: Path) -> dict[str, str]:
    """Return variables to set for a process that runs in a copy ``to`` of ``here``.

    They make Python import modules from the copy if PYTHONPATH finds them in the
    folder.
    """
    path = moved(os.environ.get("PYTHONPATH", ""), here, to)
    return {"PWD": str(to)} | ({"PYTHONPATH": path} if path else {})


def too_large(folder: Path) -> str:
    """Return why a folder is too large to be copied unasked, or "" if it is not."""
    num_bytes = 0
    for num_files, path in enumerate(_entries(folder), 1):
        with suppress(OSError):  # the file may have been removed meanwhile
            num_bytes += path.lstat().st_size if path.is_file() else 0
        if num_files > MAX_FILES:
            return f"it holds more than {MAX_FILES} files"
        if num_bytes > MAX_BYTES:
            return f"it holds more than {MAX_BYTES // 2**20} MiB"
    return ""


def copy(folder: Path, to: Path) -> None:
    """Copy a folder to a new one, with links to Python environments and to .git.

    Raises:
        OSError: Something cannot be read or written.
    """
    # The copy may lie in the folder itself, so the entries are listed before it is
    # made.
    entries = list(_entries(folder))
    to.mkdir(parents=True)
    for path in entries:
        place = to / path.relative_to(folder)
        if path.is_symlink():
            target = Path(os.path.normpath(path.parent / os.readlink(path)))
            is_inside = target.is_relative_to(folder)
            place.symlink_to(to / target.relative_to(folder) if is_inside else target)
        elif path.is_dir() and _is_linked(path):
            place.symlink_to(path)
        elif path.is_dir():
            place.mkdir()
        elif path.is_file():
            shutil.copy2(path, place)


def _entries(folder: Path) -> Iterator[Path]:
    """Yield what is below a folder, parents first, but nothing inside linked ones."""
    for where, folders, files in os.walk(folder):
        yield from (Path(where, name) for name in (*folders, *files))
        folders[:] = [name for name in folders if not _is_linked(Path(where, name))]


def _is_linked(folder: Path) -> bool:
    """Return whether `copy` only makes a link to a folder."""
    marks = ("pyvenv.cfg", "conda-meta")
    return folder.name == ".git" or any((folder / mark).exists() for mark in marks)
