"""Run ``python -m minidp.native build`` and ``status``."""

from __future__ import annotations

import argparse
import dataclasses
import signal
import time

from minidp.console import run_command, say, say_on_stderr
from minidp.errors import MiniDPError

from .state import attempt, build, read_mode

_EPILOG = """\
environment variables:
  MINIDP_NATIVE        what a training script does with the extension:
                       auto (default): use a binary that fits, if there is one;
                       build: build it if needed, go on in Python if that fails;
                       0: never use it; 1: build it if needed, and fail without it
  MINIDP_NATIVE_CACHE  the folder for binaries (default: ~/.cache/minidp)
  CXX                  the C++ compiler (default: c++)
  MAX_JOBS             how many files to compile at a time (default: all cores)
  CUDA_HOME            the CUDA toolkit for the kernels on GPUs, if torch has CUDA
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the commands ``build`` and ``status`` and their options to ``parser``."""
    parser.description = (
        "Builds minidp's optional C++ extension, or says whether it loads. With it a\n"
        "step takes less time; gradients have the same bits without it."
    )
    parser.epilog = _EPILOG
    commands = parser.add_subparsers(dest="action", required=True)
    making = commands.add_parser(
        "build", help="compile the extension, unless that is done already"
    )
    making.add_argument(
        "--force", action="store_true", help="compile also if that is done already"
    )
    making.add_argument(
        "--verbose", action="store_true", help="show commands and compiler output"
    )
    making.add_argument(
        "--optional",
        action="store_true",
        help="for scripts: say nothing if it is built already, and exit with status 0 "
        "also if it cannot be built",
    )
    commands.add_parser(
        "status",
        help="say whether the extension loads, and why; the exit status is 1 if not",
        description="Says whether the native kernels load, and why. It never builds "
        "them.",
    )


def main(options: argparse.Namespace) -> int:
    """Run ``build`` or ``status``, and return the exit status."""
    try:
        if options.action == "build":
            return _build(options)
        mode = read_mode()
        # In the modes "1" and "build" this would build. To ask must not do that.
        _, status = attempt("0" if mode == "0" else "auto")
        say(str(dataclasses.replace(status, mode=mode)))
        return 0 if status.is_loaded else 1
    except (MiniDPError, ValueError) as error:
        say_on_stderr(f"error: {error}")
        return 1


def _build(options: argparse.Namespace) -> int:
    """Run ``build``, and return the exit status.

    Raises:
        MiniDPError: It failed, and ``--optional`` was not given.
    """
    if options.optional and (
        read_mode() == "0" or (not options.force and attempt("auto")[0])
    ):
        return 0
    start = time.perf_counter()
    # These signals are to act as Ctrl-C does, which ends the compilers, too.
    for number in (signal.SIGTERM, getattr(signal, "SIGHUP", signal.SIGTERM)):
        signal.signal(number, signal.default_int_handler)
    try:
        path = build(force=options.force, verbose=options.verbose, say=say)
    except KeyboardInterrupt:
        say_on_stderr("interrupted: nothing was built")
        return 128 + signal.SIGINT
    except MiniDPError as error:
        if not options.optional:
            raise
        say(f"minidp runs in pure Python, with the same bits: {error}")
        return 0
    say(f"done in {time.perf_counter() - start:.1f} s")
    say(str(path))
    return 0


if __name__ == "__main__":
    run_command("python -m minidp.native", add_arguments, main)
