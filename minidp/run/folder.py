"""Copy the working directory, so that a run finds no files of the other run.

Virtual environments, git repositories and unreadable files are linked, not copied.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

MAX_BYTES, MAX_FILES = 500 * 2**20, 20_000  # limits without --copy


def too_large(folder: Path) -> str:
    """Return why a folder is too large to copy; "" up to 20,000 files and 500 MiB."""
    num_bytes = 0
    for num_files, path in enumerate(_entries(folder), 1):
        with suppress(OSError):  # removed meanwhile
            num_bytes += path.lstat().st_size if path.is_file() else 0
        if num_files > MAX_FILES:
            return f"it holds more than {MAX_FILES} files"
        if num_bytes > MAX_BYTES:
            return f"it holds more than {MAX_BYTES // 2**20} MiB"
    return ""


def copy(folder: Path, to: Path) -> None:
    """Copy a folder to a new one; link environments, .git and unreadable files."""
    entries = list(_entries(folder))  # first: the copy may lie in the folder itself
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
            _copy_file(path, place)


def _copy_file(path: Path, place: Path) -> None:
    try:
        shutil.copy2(path, place)
    except (PermissionError, FileNotFoundError):  # not readable, or removed meanwhile
        place.unlink(missing_ok=True)
        if path.exists():
            place.symlink_to(path)


def _entries(folder: Path) -> Iterator[Path]:
    """Yield what is below a folder, parents first; nothing inside `_is_linked` ones."""
    for where, folders, files in os.walk(folder):
        yield from (Path(where, name) for name in (*folders, *files))
        folders[:] = [name for name in folders if not _is_linked(Path(where, name))]


def _is_linked(folder: Path) -> bool:
    """Return whether `copy` links a folder: a Python environment, or .git."""
    marks = ("pyvenv.cfg", "conda-meta")
    return folder.name == ".git" or any((folder / mark).exists() for mark in marks)
