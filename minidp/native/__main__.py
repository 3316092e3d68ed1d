"""``python -m minidp.native build`` and ``status``."""

from __future__ import annotations

import argparse
import dataclasses
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

from minidp._console import parse, say, say_on_stderr
from minidp.errors import MiniDPError

from ._state import attempt, build, read_mode

_EPILOG = """\
environment variables:
  MINIDP_NATIVE        auto (default): use a binary that fits, if there is one;
                       0: never; 1: build it if needed, and fail without it
  MINIDP_NATIVE_CACHE  folder for binaries (default: ~/.cache/minidp)
  CXX                  the C++ compiler (default: c++)
  MAX_JOBS             how many sources to compile at a time (default: one per core)
"""


def main(arguments: list[str] | None = None) -> int:
    """Run one command; the exit status is 0 if it went well, else 1."""
    return run(parse(_parser(), arguments))


def run(options: argparse.Namespace) -> int:
    """What `add_arguments` asked for; the exit status."""
    try:
        if options.action == "build":
            return _build(force=options.force, verbose=options.verbose)
        return _status()
    except (MiniDPError, ValueError) as error:
        say_on_stderr(f"error: {error}")
        return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m minidp.native",
        description="minidp's optional native kernels.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_arguments(parser)
    return parser


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Describe the command to ``parser``."""
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


def _build(*, force: bool, verbose: bool) -> int:
    start = time.perf_counter()
    try:
        with _interrupted_by("SIGTERM", "SIGHUP"):
            path = build(force=force, verbose=verbose, say=say)
    except KeyboardInterrupt:
        say_on_stderr("interrupted: the compilers were ended, and nothing was built")
        return 128 + signal.SIGINT
    say(f"done in {time.perf_counter() - start:.1f} s")
    say(str(path))
    return 0


@contextmanager
def _interrupted_by(*names: str) -> Iterator[None]:
    """Treat signals as Ctrl-C: else they would leave compilers behind."""
    numbers = [getattr(signal, name) for name in names if hasattr(signal, name)]
    before = [signal.signal(n, signal.default_int_handler) for n in numbers]
    try:
        yield
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)


def _status() -> int:
    mode = read_mode()
    # Not "1": a question should not take the minute that a build takes.
    outcome = attempt("auto" if mode == "1" else mode)
    say(str(dataclasses.replace(outcome.status, mode=mode)))
    return 0 if outcome.status.is_loaded else 1


if __name__ == "__main__":
    sys.exit(main())
