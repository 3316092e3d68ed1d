"""Run ``python -m minidp.native build`` and ``status``."""

from __future__ import annotations

import argparse
import dataclasses
import signal
import time

from minidp.console import run_command, say, say_on_stderr
from minidp.errors import MiniDPError

from .state import attempt, build, read_mode

DESCRIPTION = "minidp's optional native kernels."
_EPILOG = """\
environment variables:
  MINIDP_NATIVE        auto (default): use a binary that fits, if there is one;
                       0: never; 1: build it if needed, and fail without it
  MINIDP_NATIVE_CACHE  folder for binaries (default: ~/.cache/minidp)
  CXX                  the C++ compiler (default: c++)
  MAX_JOBS             how many sources to compile at a time (default: one per core)
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the commands and their options to ``parser``."""
    parser.epilog = _EPILOG
    commands = parser.add_subparsers(dest="action", required=True)
    making = commands.add_parser("build", help="compile csrc/, unless it is compiled")
    making.add_argument("--force", action="store_true", help="compile in any case")
    making.add_argument(
        "--verbose", action="store_true", help="show commands and compiler output"
    )
    commands.add_parser(
        "status",
        help="say whether they load, and why; exit status 1 if not",
        description="Says whether the native kernels load, and why. Never builds.",
    )


def run(options: argparse.Namespace) -> int:
    """Run ``build`` or ``status``; return 0, 1 (failed, not loaded) or 130 (Ctrl-C)."""
    try:
        if options.action == "build":
            return _build(force=options.force, verbose=options.verbose)
        mode = read_mode()
        # Never "1": status must not start a build, which takes a minute.
        _, status = attempt("auto" if mode == "1" else mode)
        say(str(dataclasses.replace(status, mode=mode)))
        return 0 if status.is_loaded else 1
    except (MiniDPError, ValueError) as error:
        say_on_stderr(f"error: {error}")
        return 1


def _build(*, force: bool, verbose: bool) -> int:
    start = time.perf_counter()
    # These signals are to end the compilers, too.
    numbers = {signal.SIGTERM, getattr(signal, "SIGHUP", signal.SIGTERM)}
    before = {n: signal.signal(n, signal.default_int_handler) for n in numbers}
    try:
        path = build(force=force, verbose=verbose, say=say)
    except KeyboardInterrupt:
        say_on_stderr("interrupted: the compilers were ended, and nothing was built")
        return 128 + signal.SIGINT
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    say(f"done in {time.perf_counter() - start:.1f} s")
    say(str(path))
    return 0


if __name__ == "__main__":
    run_command("python -m minidp.native", DESCRIPTION, add_arguments, run)
