"""Swap torch's class also in the processes that a script starts.

Some launchers start the other ranks as ``python train.py`` (Lightning, ``accelerate
launch``), so minidp has to come into a process that it does not start. Such a process
inherits two environment variables: PYTHONPATH leads Python to minidp's
``sitecustomize`` (`at_start`), and `RUN` tells `join` what to do there.

Processes that are started by ``python -I``, ``-E`` or ``-S``, or with a new
environment, are not reached. Their ranks stay on torch's class, which the constructor
notices on the other ranks (`replica/verify`).
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
    """Let Python processes that are started inside the block call `join`.

    They do so once they have imported torch. For this PYTHONPATH and `RUN` are set in
    ``os.environ``.

    Args:
        command: The command of minidp that remedies in error texts name.
        swaps: Whether these processes swap torch's class, or keep it.
        is_compared: Whether they belong to a comparison, and are seeded as its ranks
            are.
    """
    orders = {"command": command, "swaps": swaps, "is_compared": is_compared}
    paths = filter(None, [str(START), os.environ.get("PYTHONPATH")])
    with setting({"PYTHONPATH": os.pathsep.join(paths), RUN: json.dumps(orders)}):
        yield


_joined = ExitStack()  # what `join` has begun; it is never closed


def join() -> None:
    """Do in a child process what `reached_children` has written to the variable `RUN`.

    A child that keeps torch's class is one of a run on torch. It is killed when its
    parent ends, and does not destroy torch's reducers (`never_take_down`).
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
    """Seed torch, random and numpy with the rank, for equal numbers in both runs."""
    torch.manual_seed(rank)
    random.seed(rank)
    numpy.random.seed(rank)


def never_take_down(ddp: Any) -> None:
    """Keep the reducer, logger and group of a torch DDP alive for good.

    Their destructors may deadlock when the process ends. The hooks of the reducer still
    go when ``ddp`` does.
    """
    reducer = getattr(ddp, "reducer", None)
    if reducer is None:
        return
    for part in (reducer, ddp.logger, ddp.process_group):
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(part))
    # The module may be wrapped again after this wrapper is gone, so the hooks must go.
    weakref.finalize(ddp, reducer._remove_autograd_hooks).atexit = False


def die_with_parent() -> None:
    """Ask Linux to SIGKILL this process when its parent ends.

    On other systems this does nothing.
    """
    processes: Any = torch.multiprocessing
    processes._prctl_pr_set_pdeathsig(signal.SIGKILL)
