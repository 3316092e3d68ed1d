"""Run the command ``minidp``."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from . import doctor, report, run, tune
from ._version import __version__
from .console import Parser, parse, say
from .native import __main__ as native

# The room of each command, and what the command is for.
COMMANDS: dict[str, tuple[Any, str]] = {
    "doctor": (doctor, "find out what is wrong with this machine or this job"),
    "native": (native, "build the optional C++ extension, or say whether it loads"),
    "report": (report, "say whether communication is hidden, and what to change"),
    "run": (run, "run an unmodified script that uses torch's DDP, on minidp"),
    "tune": (tune, "run a script once, and write the best bucket layout to a file"),
}


def main(arguments: list[str] | None = None) -> int:
    """Run a subcommand and return its exit status.

    Without a subcommand this prints the help, and the status is 2.
    """
    parser = Parser(
        prog="minidp",
        description="Tools around minidp.DataParallel, which averages gradients over "
        "ranks. `minidp COMMAND --help` says more about each.",
    )
    parser.add_argument("--version", action="version", version=f"minidp {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")
    raw = argparse.RawDescriptionHelpFormatter
    for name, (room, purpose) in COMMANDS.items():
        added = commands.add_parser(name, help=purpose, formatter_class=raw)
        room.add_arguments(added)
        added.set_defaults(main=room.main)
    options = parse(parser, arguments)
    if "main" not in options:
        say(parser.format_help())
        return 2
    status: int = options.main(options)
    return status


if __name__ == "__main__":
    sys.exit(main())
