"""Start the ranks of a script; tell which rank this process is."""

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
    """Return an environment variable as an int; ``default`` if unset or no number."""
    text = os.environ.get(name, "")
    return int(text) if text.isdigit() else default


def say_once(text: str) -> None:
    """Print a line to standard error if RANK is 0 or not set; no-op on other ranks."""
    if not from_environment("RANK", 0):
        say_on_stderr(text)


def add_num_ranks(parser: argparse.ArgumentParser) -> None:
    """Add the option ``-n`` (number of ranks to start) to ``parser``."""
    parser.add_argument(
        "-n",
        dest="num_ranks",
        type=_at_least_one,
        metavar="N",
        help="start the script N times on this machine, as N ranks (as torchrun does; "
        "use that for several machines)",
    )


def _at_least_one(text: str) -> int:
    """Argparse type: return the number in ``text``; raise if below 1, or no number."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"at least one rank, but got {text}")
    return int(text)


def why_not(script: Script, num_ranks: int | None, **files: Path | None) -> str:
    """Return why ``minidp run`` or ``tune`` cannot start the script; "" if it can.

    ``num_ranks``: -n; ``files``: by option, an output file, which is not opened.
    Imports and raises as `Script.problem` does.
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

    Wait for all (one that fails ends the others); return 0, 128 + a signal that came,
    or the status of the first that failed. For more than one rank, set
    OMP_NUM_THREADS=1 in ``os.environ`` if it is not set.
    """
    # Not at the top of this file: a script may start `python -m torch.distributed.run`.
    # In that process minidp is imported first, and runpy warns of a main module that
    # has been imported already.
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
        threads = "; each with OMP_NUM_THREADS=1, as it is not set"
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
    """Return, for error texts, the command that starts the script on two ranks."""
    return f"minidp {command} -n 2 {' '.join(script.words)}"


def run_here(command: str, script: Script) -> int:
    """Run the script in this process; return its exit status; let its errors pass.

    But print a text and raise SystemExit if somebody interrupted it (Ctrl-C), or if it
    raised because a variable that a launcher sets (RANK, ...) is not set.
    """
    try:
        return script.run()
    except KeyboardInterrupt as error:
        # A traceback per rank, mostly of launchers, says nothing that Ctrl-C does not.
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
    """Return " at FILE:LINE" of the script's innermost frame of an error, or ""."""
    frames = traceback.extract_tb(error.__traceback__)
    ours = [each for each in frames if Path(each.filename) == Path(script.target)]
    return f" at {ours[-1].filename}:{ours[-1].lineno}" if ours else ""
