"""Swap torch's class also in the processes that a script starts.

Launchers start the other ranks as ``python train.py`` (Lightning, ``accelerate
launch``). Such a process inherits two environment variables: PYTHONPATH leads to
minidp's ``sitecustomize`` (`at_start`), and `RUN` tells `join` what to do. Not reached:
``python -I``, ``-E`` and ``-S``, and processes with a new environment; the constructor
reports such a rank (`replica/verify`).
"""

from __future__ import annotations

import ctypes
import json
import os
import random
import signal
import weakref
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy
import torch
import torch.multiprocessing

from minidp.config import RUN, setting
from minidp.swapping import TORCHS, swap_here

from .script import after_wrapping

START = Path(__file__).with_name("at_start")


@contextmanager
def reached_children(
    command: str = "run", *, swaps: bool, is_compared: bool = False
) -> Iterator[None]:
    """In the block, let child processes (of Python) call `join` once they import torch.

    Set PYTHONPATH and `RUN` in ``os.environ`` for it. ``swaps``: they swap torch's
    class, else keep it; ``is_compared``: they are seeded as runs of a comparison are.
    Error messages name ``command`` in remedies.
    """
    orders = {"command": command, "swaps": swaps, "is_compared": is_compared}
    paths = filter(None, [str(START), os.environ.get("PYTHONPATH")])
    with setting({"PYTHONPATH": os.pathsep.join(paths), RUN: json.dumps(orders)}):
        yield


_joined = ExitStack()  # never closed: until the process ends


def join() -> None:
    """Do in a child process what `reached_children` has written to the variable `RUN`.

    ``swaps``: swap torch's class for good. Else keep it, have this process killed when
    its parent ends, and leak torch's reducers (`never_take_down`). ``is_compared``:
    also seed with the rank.
    """
    orders = json.loads(os.environ[RUN])
    if orders["swaps"]:
        swap_here()
    else:
        die_with_parent()
        _joined.enter_context(after_wrapping(TORCHS, never_take_down))
    if orders["is_compared"]:
        seed(int(os.environ.get("RANK", os.environ.get("LOCAL_RANK", "0"))))


def seed(rank: int) -> None:
    """Seed torch, random and numpy with ``rank``, for equal numbers in both runs."""
    torch.manual_seed(rank)
    random.seed(rank)
    numpy.random.seed(rank)


def never_take_down(ddp: Any) -> None:
    """Leak reducer, logger and group of a torch DDP: destructors may deadlock.

    The reducer's hooks still go when ``ddp`` does. No-op without a reducer.
    """
    reducer = getattr(ddp, "reducer", None)
    if reducer is None:
        return
    for part in (reducer, ddp.logger, ddp.process_group):
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(part))
    # Remove the reducer's hooks with the wrapper: its module may be wrapped again.
    weakref.finalize(ddp, reducer._remove_autograd_hooks).atexit = False


def die_with_parent() -> None:
    """Ask Linux to SIGKILL this process when its parent ends; no-op on other OSs."""
    processes: Any = torch.multiprocessing
    processes._prctl_pr_set_pdeathsig(signal.SIGKILL)
