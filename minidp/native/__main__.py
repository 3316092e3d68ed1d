"""Run ``python -m minidp.native build`` and ``status``."""

from __future__ import annotations

import argparse
import dataclasses
import signal
import sys
import time

from minidp.console import run_command, say, say_on_stderr, width_of
from minidp.errors import MiniDPError

from .state import attempt, build, read_mode

_ERASE = "\r\x1b[K"  # the line in which the terminal's cursor is
_EPILOG = """\
environment variables:
  MINIDP_NATIVE        auto (default): use a binary that fits, if there is one;
                       build: build it if needed, go on in Python if that fails;
                       0: never; 1: build it if needed, and fail without it
  MINIDP_NATIVE_CACHE  folder for binaries (default: ~/.cache/minidp)
  CXX                  the C++ compiler (default: c++)
  MAX_JOBS             how many sources to compile at a time (default: one per core)
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the commands and their options to ``parser``."""
    parser.description = "minidp's optional native kernels."
    parser.epilog = _EPILOG
    commands = parser.add_subparsers(dest="action", required=True)
    making = commands.add_parser("build", help="compile csrc/, unless it is compiled")
    making.add_argument("--force", action="store_true", help="compile in any case")
    making.add_argument(
        "--verbose", action="store_true", help="show commands and compiler output"
    )
    making.add_argument(
        "--optional",
        action="store_true",
        help="say nothing if it is built; exit with status 0 also if it cannot be",
    )
    commands.add_parser(
        "status",
        help="say whether they load, and why; exit status 1 if not",
        description="Says whether the native kernels load, and why. Never builds.",
    )


def main(options: argparse.Namespace) -> int:
    """Run ``build`` or ``status``; return 0, 1 (failed, not loaded) or 130 (Ctrl-C)."""
    try:
        if options.action == "build":
            return _build(options)
        mode = read_mode()
        # Not as in "1" and "build": to ask must not start a build.
        _, status = attempt("0" if mode == "0" else "auto")
        say(str(dataclasses.replace(status, mode=mode)))
        return 0 if status.is_loaded else 1
    except (MiniDPError, ValueError) as error:
        say_on_stderr(f"error: {error}")
        return 1


def _build(options: argparse.Namespace) -> int:
    """Run ``build``; return 0 (on failure if ``--optional``, else raise) or 130."""
    if options.optional and (read_mode() == "0" or attempt("auto")[0]):
        return 0
    display = _Display()
    # These signals are to end the compilers, too.
    numbers = {signal.SIGTERM, getattr(signal, "SIGHUP", signal.SIGTERM)}
    before = {n: signal.signal(n, signal.default_int_handler) for n in numbers}
    try:
        tick = display.tick if width_of(sys.stdout) else None
        path = build(
            force=options.force, verbose=options.verbose, say=display.say, tick=tick
        )
    except KeyboardInterrupt:
        say_on_stderr("interrupted: the compilers were ended, and nothing was built")
        return 128 + signal.SIGINT
    except MiniDPError as error:
        if not options.optional:
            raise
        display.say(f"minidp runs in pure Python, with the same bits: {error}")
        return 0
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    display.say(f"done in {display.seconds:.1f} s")
    display.say(str(path))
    return 0


class _Display:
    """Print lines; on a terminal, below them, one that counts commands and seconds."""

    def __init__(self) -> None:
        self._start = time.perf_counter()
        self._shown = ""  # the line that counts

    @property
    def seconds(self) -> float:
        return time.perf_counter() - self._start

    def say(self, text: str) -> None:
        """Print a line that stays."""
        say(f"{_ERASE if self._shown else ''}{text}")
        self._shown = ""

    def tick(self, done: int, count: int, running: list[str]) -> None:
        """Replace the line that counts; never wider than the terminal."""
        text = f"{self.seconds:.0f} s, {done} of {count} done: {', '.join(running)}"
        text = text[: (width_of(sys.stdout) or 80) - 1]
        if text != self._shown:
            sys.stdout.write(f"{_ERASE}{text}")
            sys.stdout.flush()
            self._shown = text


if __name__ == "__main__":
    run_command("python -m minidp.native", add_arguments, main)
