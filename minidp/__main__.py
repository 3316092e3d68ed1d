"""The command ``minidp``: its parts, and how they are told apart."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from . import doctor, run, tune
from ._chrome_trace import chrome_trace
from ._console import parse, say, say_on_stderr
from ._picture import draw
from ._terminal import fold
from ._timeline import Timeline, from_json, to_json
from ._version import __version__
from .native import __main__ as native
from .report import report

_REPORT = """\
Says whether communication is hidden behind the backward, if not, why, and what to
change. Make the file in your training script, on one rank or on all of them:

    with minidp.record(model) as rec:
        ...                              # a few dozen steps
    rec.gather()                         # optional, on all ranks: see them together
    rec.save("steps.json")               # on rank 0; without gather: on each rank,
                                         # to a file of another name, and pass all
"""


@dataclass(frozen=True)
class Command:
    """One word after ``minidp``."""

    help: str
    description: str | None  # None: add_arguments sets it
    add_arguments: Callable[[argparse.ArgumentParser], None]
    main: Callable[[argparse.Namespace], int]


def main(arguments: list[str] | None = None) -> int:
    """Run one command; the exit status is 0 if it went well, else 1 (usage: 2)."""
    parser = _parser()
    options = parse(parser, arguments)
    if options.command is None:
        say(parser.format_help())
        return 2
    return COMMANDS[options.command].main(options)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="minidp", description="Tools around minidp.DataParallel."
    )
    parser.add_argument("--version", action="version", version=f"minidp {__version__}")
    commands = parser.add_subparsers(
        dest="command", title="commands", metavar="COMMAND"
    )
    for name, command in COMMANDS.items():
        added = commands.add_parser(
            name,
            help=command.help,
            description=command.description,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        command.add_arguments(added)
    return parser


def _add_report_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "files",
        metavar="FILE",
        nargs="+",
        help="written by Recording.save(); several are ranks of one run",
    )
    for name, what in (
        ("png", "a picture of the typical step (needs matplotlib)"),
        ("trace", "a trace for https://ui.perfetto.dev or chrome://tracing"),
        ("json", "all FILEs together in one"),
    ):
        parser.add_argument(f"--{name}", metavar="PATH", help=f"also write {what}")


def _report(options: argparse.Namespace) -> int:
    try:
        _show(options)
    except OSError as error:
        say_on_stderr(f"error: {error.filename}: {error.strerror}")
        return 1
    except (ValueError, ModuleNotFoundError) as error:
        say_on_stderr(f"error: {error}")
        return 1
    return 0


def _show(options: argparse.Namespace) -> None:
    timelines = [each for name in options.files for each in _read(name)]
    say(fold(report(timelines), sys.stdout) + "\n")
    if options.trace:
        Path(options.trace).write_text(chrome_trace(timelines))
        say(f"wrote {options.trace}")
    if options.json:
        Path(options.json).write_text(to_json(timelines))
        say(f"wrote {options.json}")
    if options.png:  # last: matplotlib may be missing
        draw(timelines, options.png)
        say(f"wrote {options.png}")


def _read(name: str) -> tuple[Timeline, ...]:
    try:
        text = Path(name).read_text()
    except UnicodeDecodeError:
        raise ValueError(
            f"{name} is no text: pass a file that Recording.save() wrote."
        ) from None
    if not text.strip():
        raise ValueError(f"{name} is empty: was the script that wrote it killed?")
    return from_json(text, name)


COMMANDS = {
    "doctor": Command(
        "what is wrong with this machine, this job, this script?",
        None,
        doctor.add_arguments,
        doctor.main,
    ),
    "native": Command(
        "build the optional C++ extension, or say whether it loads",
        "minidp's optional native kernels.",
        native.add_arguments,
        native.run,
    ),
    "report": Command(
        "is communication hidden, if not, why, and what to change",
        _REPORT,
        _add_report_arguments,
        _report,
    ),
    "run": Command(
        "run an unmodified script that uses torch's DDP, on minidp",
        run.__doc__ or "",
        run.add_arguments,
        run.main,
    ),
    "tune": Command(
        "run a script once, and write the best bucket layout to a file",
        tune.__doc__ or "",
        tune.add_arguments,
        tune.main,
    ),
}

if __name__ == "__main__":
    sys.exit(main())
