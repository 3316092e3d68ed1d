"""Let a trial write nothing of the user's: run it in a copy of the working directory.

A trial (``minidp tune``) runs the user's script only to measure it. The script does not
know that, and would replace the user's last checkpoint by that of a few steps. In a
copy it finds all that it reads by a relative path, and what it writes by one is deleted
afterwards. What it writes by another path (absolute, in the home directory, over the
network) is not held up: nobody can copy that, and the user is told so.
"""

from __future__ import annotations

import os
import signal
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from minidp.comm import gather_json, launcher_store, post_json
from minidp.config import setting

from .copies import moved_environment, working_copy
from .ranks import from_environment
from .script import Script, moved

COPY_SECONDS = 600.0  # how long a rank waits for the copy that another one makes
LEAVE_SECONDS = 60.0  # how long the copy is kept for ranks that have not ended


class NoCopyError(Exception):
    """The working directory was not copied. The text says why, and what to do."""


@contextmanager
def apart(script: Script, *, is_wished: bool | None) -> Iterator[Script]:
    """Work in a copy of the working directory inside the block.

    The block gets the script in the copy. The ranks that torchrun starts on one host
    share a copy.

    Args:
        script: The script in the working directory.
        is_wished: As in `working_copy`. If it is False there is no copy, and the block
            changes nothing.

    Raises:
        NoCopyError: The directory is too large to be copied without being asked, or
            cannot be copied, or the ranks cannot agree on a copy.
    """
    if is_wished is False:
        yield script
        return
    here = Path.cwd()
    path = list(sys.path)
    with _copy_of_host(here, is_wished=is_wished) as folder:
        script = script.moved(here, folder)
        environment = moved_environment(here, folder)
        sys.path[:] = [moved(entry, here, folder) for entry in path]
        os.chdir(folder)
        try:
            with setting(environment):
                yield script
        finally:
            os.chdir(here)
            sys.path[:] = path


@contextmanager
def _copy_of_host(here: Path, *, is_wished: bool | None) -> Iterator[Path]:
    """Yield the copy that the first rank of this host makes, and deletes at the end.

    Before it does, it waits up to 60 s for the others to leave the block.
    """
    rank = from_environment("LOCAL_RANK", 0)
    size = from_environment("LOCAL_WORLD_SIZE", 1) if "RANK" in os.environ else 1
    store = launcher_store("apart") if size > 1 else None
    if size > 1 and store is None:
        raise NoCopyError("the ranks of this launcher cannot agree on a copy of it")
    host = os.environ.get("GROUP_RANK", "0")
    if rank:
        told = gather_json(store, f"{host}/copy", [0], COPY_SECONDS)
        where, why_not = told.get(0, ("", "the first rank of this host made none"))
        if why_not:
            raise NoCopyError(why_not)
        try:
            yield Path(where)
        finally:
            post_json(store, f"{host}/left", rank, "")
        return
    with ExitStack() as stack:
        if store is not None:
            usual = signal.signal(signal.SIGTERM, _leave)
            stack.callback(signal.signal, signal.SIGTERM, usual)
        made = stack.enter_context(
            tempfile.TemporaryDirectory(
                prefix="minidp-apart-", ignore_cleanup_errors=True
            )
        )
        if store is not None:
            stack.callback(_ignore_sigterm)  # while the copy is deleted, which is next
        copy = Path(made, here.name)
        where, why_not = working_copy(here, copy, is_wished=is_wished)
        if store is not None:
            post_json(store, f"{host}/copy", 0, [where, why_not])
        if why_not:
            raise NoCopyError(why_not)
        yield Path(where)
        if store is not None:
            gather_json(store, f"{host}/left", range(1, size), LEAVE_SECONDS)


def _leave(number: int, _frame: object) -> None:
    """Let the copy be deleted if another rank failed: torchrun then sends SIGTERM."""
    _ignore_sigterm()
    sys.exit(128 + number)


def _ignore_sigterm() -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
