"""A copy of the folder that a script runs in, so that it finds no files of another run.

Virtual environments and repositories of git are linked, not copied, and so are files
that cannot be read.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

MAX_BYTES, MAX_FILES = 500 * 2**20, 20_000  # copied without being asked


def too_large(folder: Path) -> str:
    """Why a folder is not copied unless somebody asks for it; empty: no reason."""
    num_bytes = 0
    for num_files, entry in enumerate(_entries(folder), 1):
        if entry.is_file(follow_symlinks=False):
            num_bytes += _size(entry)
        if num_files > MAX_FILES:
            return f"it holds more than {MAX_FILES} files"
        if num_bytes > MAX_BYTES:
            return f"it holds more than {MAX_BYTES // 2**20} MiB"
    return ""


def copy(folder: Path, to: Path) -> None:
    """Copy what is in a folder to another, which is made."""
    entries = list(_entries(folder))  # the copy may lie in the folder itself
    to.mkdir(parents=True)
    for entry in entries:
        place = to / Path(entry.path).relative_to(folder)
        if entry.is_symlink():
            place.symlink_to(_moved(Path(entry.path), folder, to))
        elif _is_apart(entry):
            place.symlink_to(entry.path)
        elif entry.is_dir():
            place.mkdir()
        elif entry.is_file():
            _copy_file(entry.path, place)


def _entries(folder: Path) -> Iterator[os.DirEntry[str]]:
    """All that is in a folder, each one after the folder it is in."""
    try:
        inside = sorted(os.scandir(folder), key=lambda entry: entry.name)
    except OSError:
        return  # may not be read
    for entry in inside:
        yield entry
        if entry.is_dir(follow_symlinks=False) and not _is_apart(entry):
            yield from _entries(Path(entry.path))


def _size(entry: os.DirEntry[str]) -> int:
    try:
        return entry.stat(follow_symlinks=False).st_size
    except OSError:
        return 0  # gone meanwhile


def _is_apart(entry: os.DirEntry[str]) -> bool:
    """A folder that a script only reads, if at all, and that may be large."""
    if not entry.is_dir(follow_symlinks=False):
        return False
    marks = ("pyvenv.cfg", "conda-meta")
    return entry.name == ".git" or any(
        os.path.exists(os.path.join(entry.path, mark)) for mark in marks
    )


def _moved(link: Path, folder: Path, to: Path) -> str:
    """Where the copy of a link leads: into the copy if the link stays in the folder."""
    target = os.path.normpath(link.parent / os.readlink(link))
    if Path(target).is_relative_to(folder):
        return str(to / Path(target).relative_to(folder))
    return target


def _copy_file(path: str, place: Path) -> None:
    try:
        shutil.copy2(path, place)
    except PermissionError:
        place.unlink(missing_ok=True)
        place.symlink_to(path)
    except FileNotFoundError:  # gone meanwhile
        place.unlink(missing_ok=True)
