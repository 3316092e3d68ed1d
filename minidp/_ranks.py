"""Who starts the ranks of a script: ``minidp run -n 2``, torchrun, or the script."""

from __future__ import annotations

import argparse
import os
import re
import sys
import uuid
from collections.abc import Sequence
from types import TracebackType

from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from ._script import Script, say

# What launchers tell each rank.
_TOLD = re.compile(r"\b(RANK|WORLD_SIZE|LOCAL_RANK|MASTER_ADDR|MASTER_PORT)\b")
_NOT_THE_SCRIPTS = ("torch", "minidp", "runpy", "os", "importlib")


def is_rank() -> bool:
    """Whether a launcher has started this process as one of several ranks."""
    return "RANK" in os.environ


def add_num_ranks(parser: argparse.ArgumentParser) -> None:
    """The option ``-n``."""
    parser.add_argument(
        "-n",
        dest="num_ranks",
        type=_at_least_one,
        metavar="N",
        help="start the script N times on this machine, as N ranks (as torchrun does; "
        "use that for several machines)",
    )


def _at_least_one(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"at least one rank, but got {number}")
    return number


def why_no_ranks(number: int | None) -> str:
    """Why ``-n`` cannot be; empty if it can."""
    if number is None or not is_rank():
        return ""
    return (
        f"-n {number} starts ranks, but this process is one already, of torchrun or "
        "another launcher (RANK is set): leave one of the two out"
    )


def start_ranks(number: int, command: str, flags: Sequence[str], script: Script) -> int:
    """Run a script in several processes on this machine, as torchrun does.

    Args:
        number: of ranks.
        command: of ours, which each of them runs.
        flags: of that command.
        script: what it runs.

    Returns:
        The exit status of the first rank that failed, or 0.
    """
    threads = ""
    if number > 1 and "OMP_NUM_THREADS" not in os.environ:
        os.environ["OMP_NUM_THREADS"] = "1"
        threads = "; each with OMP_NUM_THREADS=1, as it is not set"
    s = "s" * (number > 1)
    say(
        f"minidp {command}: {number} rank{s} of {script.target} on this machine"
        f"{threads}."
    )
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=number,
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",  # any port that is free
        local_addr="localhost",
        max_restarts=0,
    )
    words = ["-u", "-m", f"minidp.{command}", *flags, *script.words]
    try:
        elastic_launch(config, sys.executable)(*words)
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        status = failure.exitcode if failure.exitcode > 0 else 128 - failure.exitcode
        say(f"minidp {command}: rank {rank} failed first, with exit status {status}.")
        return status
    except SignalException as error:
        return 128 + error.sigval
    return 0


def how_to_start(command: str, script: Script) -> str:
    """The words for two ranks."""
    return f"minidp {command} -n 2 {' '.join(script.words)}"


def lacks_launcher(error: BaseException, command: str, script: Script) -> str:
    """Why a script failed, if that is because nobody has started ranks; else empty."""
    told = _TOLD.search(str(error))
    is_lookup = isinstance(error, KeyError) or "environment variable" in str(error)
    if is_rank() or told is None or not is_lookup or told[0] in os.environ:
        return ""
    place = _place(error.__traceback__) or script.target
    return (
        f"{place} needs {told[0]}, which a launcher of ranks sets, but this is one "
        f"process without a launcher. For two ranks on this machine: "
        f"{how_to_start(command, script)}"
    )


def _place(traceback: TracebackType | None) -> str:
    """The innermost line of the script itself, or of what it imports."""
    place = ""
    while traceback is not None:
        frame = traceback.tb_frame
        module = str(frame.f_globals.get("__name__", "")).partition(".")[0]
        if module not in _NOT_THE_SCRIPTS and "frozen" not in frame.f_code.co_filename:
            place = f"{frame.f_code.co_filename}, line {traceback.tb_lineno},"
        traceback = traceback.tb_next
    return place
