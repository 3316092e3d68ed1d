"""Say in words what recorded steps show (``minidp report FILE``).

The report says whether communication is hidden behind the backward, why it is not, and
what to change. Your training script makes the file:

    with minidp.record(model) as rec:
        ...                              # train for a few dozen steps
    rec.gather()                         # on all ranks, to see them together
    rec.save("steps.json")               # on rank 0

Without gather(), save a file of another name on each rank, and pass all of them.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from .console import fold, run_command, say, say_on_stderr
from .overlap import chrome_trace, from_json, html_page, report, to_json

__all__ = ["add_arguments", "main", "report"]

EXPORTS = (("html", html_page), ("trace", chrome_trace), ("json", to_json))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``minidp report`` to ``parser``."""
    parser.description = __doc__
    parser.add_argument(
        "files",
        metavar="FILE",
        nargs="+",
        help="a file that Recording.save() has written; several must be of different "
        "ranks of one run",
    )
    for name, what in (
        ("html", "a page for the browser, with all steps and what-if sliders"),
        ("trace", "a trace for https://ui.perfetto.dev or chrome://tracing"),
        ("json", "one file with the recordings of all FILEs"),
    ):
        parser.add_argument(f"--{name}", metavar="PATH", help=f"also write {what}")
    # Earlier versions drew pictures: `main` says what replaces them.
    parser.add_argument("--png", help=argparse.SUPPRESS)


def main(options: argparse.Namespace) -> int:
    """Print the report, write the exports, and return the exit status.

    The status is 0, or 1 after an error, which is printed.
    """
    if options.png:
        say_on_stderr(
            "error: --png: minidp draws no pictures any more. What to do: write a page "
            "for the browser, with --html PATH."
        )
        return 1
    try:
        contents = [(Path(name).read_bytes(), name) for name in options.files]
        timelines = [each for file in contents for each in from_json(*file)]
        say(fold(report(timelines), sys.stdout) + "\n")
        for name, write in EXPORTS:
            if path := getattr(options, name):
                Path(path).write_text(write(timelines), encoding="utf-8")
                say(f"wrote {path}")
    except OSError as error:
        say_on_stderr(f"error: {error.filename}: {error.strerror}")
        return 1
    except ValueError as error:
        say_on_stderr(f"error: {error}")
        return 1
    return 0


if __name__ == "__main__":
    run_command("minidp report", add_arguments, main)
