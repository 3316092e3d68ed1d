"""``minidp report``: what was recorded, for a person."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from ._chrome_trace import chrome_trace
from ._picture import draw
from ._timeline import Timeline, from_json, to_json
from .report import report

_REPORT = """\
Says whether communication is hidden behind the backward, if not, why, and what to
change. Make the file in your training script, on one rank or on all of them:

    with minidp.record(model) as rec:
        ...                              # a few dozen steps
    rec.gather()                         # optional, on all ranks: see them together
    rec.save("steps.json")               # without gather: a file for each rank
"""


def main(arguments: list[str] | None = None) -> int:
    """Run one command; the exit status is 0 if it went well, else 1 (usage: 2)."""
    options = _parser().parse_args(arguments)
    try:
        return _report(options)
    except OSError as error:
        print(f"error: {error.filename}: {error.strerror}", file=sys.stderr)
    except (ValueError, ModuleNotFoundError) as error:
        print(f"error: {error}", file=sys.stderr)
    return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="minidp", description="Tools around minidp.DataParallel."
    )
    commands = parser.add_subparsers(
        dest="command", required=True, title="commands", metavar="COMMAND"
    )
    reporting = commands.add_parser(
        "report",
        help="is communication hidden, if not, why, and what to change",
        description=_REPORT,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    reporting.add_argument(
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
        reporting.add_argument(f"--{name}", metavar="PATH", help=f"also write {what}")
    return parser


def _report(options: argparse.Namespace) -> int:
    timelines = [each for name in options.files for each in _read(name)]
    print(report(timelines))
    if options.png:
        draw(timelines, options.png)
    if options.trace:
        Path(options.trace).write_text(chrome_trace(timelines))
    if options.json:
        Path(options.json).write_text(to_json(timelines))
    return 0


def _read(name: str) -> tuple[Timeline, ...]:
    try:
        text = Path(name).read_text()
    except UnicodeDecodeError:
        raise ValueError(
            f"{name} is no text: pass a file that Recording.save() wrote."
        ) from None
    return from_json(text, name)


if __name__ == "__main__":
    sys.exit(main())
