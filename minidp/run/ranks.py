"""Start the ranks of a script, or tell which rank this process is."""

from __future__ import annotations

import argparse
import os
import re
import signal
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path

from minidp.console import say_on_stderr

from .script import Script

# Variables that a launcher sets for each rank.
_VARIABLES = re.compile(r"\b(RANK|WORLD_SIZE|LOCAL_RANK|MASTER_ADDR|MASTER_PORT)\b")


def from_environment(name: str, default: int) -> int:
    """Return an environment variable as an int, or ``default`` if it is no number."""
    text = os.environ.get(name, "")
    return int(text) if text.isdigit() else default


def say_once(text: str) -> None:
    """Print a line to standard error, but only on rank 0, or if there are no ranks."""
    if not from_environment("RANK", 0):
        say_on_stderr(text)


def add_num_ranks(parser: argparse.ArgumentParser) -> None:
    """Add the option ``-n``, the number of ranks to start, to ``parser``."""
    parser.add_argument(
        "-n",
        dest="num_ranks",
        type=_at_least_one,
        metavar="N",
        help="start the script as N ranks on this machine, as torchrun would (use "
        "torchrun itself for several machines)",
    )


def _at_least_one(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(
            f"expected how many ranks to start, 1 or more, but got {text}"
        )
    return int(text)


def why_not(script: Script, num_ranks: int | None, **files: Path | None) -> str:
    """Return why ``minidp run`` or ``tune`` cannot start a script, or "" if it can.

    Args:
        script: The script, which is looked for as in `Script.problem`.
        num_ranks: The value of -n, or None without it.
        files: The files to be written, by the option that names them. They are not
            opened here.
    """
    if problem := script.problem():
        return problem
    for name, path in files.items():
        if path and (path.is_dir() or not path.parent.is_dir()):
            why = f"there is no folder {path.parent}"
            return f"--{name} {path}: {'it is a folder' if path.is_dir() else why}"
    if num_ranks is None or "RANK" not in os.environ:
        return ""
    return (
        f"-n {num_ranks} starts ranks, but this process is one already, of torchrun or "
        "another launcher (RANK is set): leave one of the two out"
    )


def start_ranks(number: int, command: str, flags: Sequence[str], script: Script) -> int:
    """Run ``minidp COMMAND FLAGS`` on several ranks of this machine, as torchrun does.

    A rank that fails ends the others. For more than one rank OMP_NUM_THREADS=1 is set
    in ``os.environ`` if it is not set, so that the ranks do not fight for the cores.

    Args:
        number: How many ranks to start.
        command: The command of minidp that each rank runs, "run" or "tune".
        flags: The options of that command.
        script: The script, which follows the options.

    Returns:
        An exit status: 0, that of the rank that failed first, or 128 + a signal that
        this process got.
    """
    # These are not imported at the top of this file, because a script may start
    # `python -m torch.distributed.run`. In that process minidp is imported first, and
    # runpy warns of a main module that has been imported already.
    from torch.distributed import run as torchrun  # noqa: PLC0415
    from torch.distributed.elastic.multiprocessing import (  # noqa: PLC0415
        SignalException,
    )
    from torch.distributed.elastic.multiprocessing.errors import (  # noqa: PLC0415
        ChildFailedError,
    )

    threads = ""
    if number > 1 and "OMP_NUM_THREADS" not in os.environ:
        os.environ["OMP_NUM_THREADS"] = "1"
        threads = ", each with OMP_NUM_THREADS=1 because it is not set"
    say_on_stderr(f"minidp {command}: {script.target} on {number} ranks here{threads}.")
    words = ["--standalone", "--nnodes=1", f"--nproc-per-node={number}"]
    words += ["--max-restarts=0", "--local-addr=localhost", "-m", f"minidp.{command}"]
    try:
        torchrun.run(torchrun.parse_args([*words, *flags, *script.words]))
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        status = failure.exitcode if failure.exitcode > 0 else 128 - failure.exitcode
        say_on_stderr(
            f"minidp {command}: rank {rank} failed first, with exit status {status}."
        )
        return status
    except SignalException as error:
        return 128 + error.sigval
    return 0


def how_to_start(command: str, script: Script) -> str:
    """Return the command that starts a script on two ranks, for error texts."""
    return f"minidp {command} -n 2 {' '.join(script.words)}"


def run_here(command: str, script: Script) -> int:
    """Run the script in this process, and return its exit status.

    The errors of the script pass through, except for two of which a sentence says more
    than a traceback: Ctrl-C, and the lack of a variable that a launcher sets, such as
    RANK. They are told, and become a SystemExit.
    """
    try:
        return script.run()
    except KeyboardInterrupt as error:
        # Every rank would print a traceback, and most of it would be of launchers.
        say_once(f"minidp {command}: interrupted{_place_in(script, error)}.")
        sys.exit(128 + signal.SIGINT)
    except Exception as error:
        variable = _VARIABLES.search(str(error))
        is_lookup = isinstance(error, KeyError) or "environment variable" in str(error)
        has_launcher = "RANK" in os.environ
        if has_launcher or not variable or not is_lookup or variable[0] in os.environ:
            raise
        say_on_stderr(
            f"minidp {command}: {script.target} needs {variable[0]}, which a launcher "
            "of ranks sets, but this is one process without a launcher. For two ranks "
            f"on this machine: {how_to_start(command, script)}"
        )
        sys.exit(1)


def _place_in(script: Script, error: BaseException) -> str:
    """Return " at FILE:LINE" for the script's innermost frame in an error, or ""."""
    frames = traceback.extract_tb(error.__traceback__)
    ours = [each for each in frames if Path(each.filename) == Path(script.target)]
    return f" at {ours[-1].filename}:{ours[-1].lineno}" if ours else ""
