"""Print to a terminal, parse command lines, and warn at the user's line.

A reader may close the pipe: ``minidp report FILE | head``. That is no error, and does
not stop what a command does besides printing: ``minidp native build | head -1`` builds.
"""

from __future__ import annotations

import argparse
import contextlib
import difflib
import io
import os
import re
import runpy
import sys
import textwrap
import warnings
from collections.abc import Callable, Iterator, Sequence
from types import FrameType, TracebackType
from typing import Any, NoReturn, TextIO

import torch

NOTE = 30  # columns that a line's last column needs to be continued below itself
INDENT = 4
OURS = (
    os.path.join(os.path.dirname(__file__), ""),
    os.path.join(os.path.dirname(torch.__file__), ""),
    contextlib.__file__,  # between a ``with`` and a generator of ours
)


def say(text: str) -> None:
    """Print a line to standard output and flush; do nothing if its pipe is closed."""
    _write(sys.stdout, text)


def say_on_stderr(text: str) -> None:
    """Print a line to standard error and flush; do nothing if its pipe is closed."""
    _write(sys.stderr, text)


def say_progress(text: str) -> None:
    """Print a line to standard error if it is a terminal, and $RANK is 0 or unset."""
    is_first = os.environ.get("RANK", "0") == "0"
    if is_first and sys.stderr is not None and width_of(sys.stderr):
        say_on_stderr(text)


def _write(stream: TextIO | None, text: str) -> None:
    """Print a line and flush; do nothing if ``stream`` is None.

    If its pipe is closed, redirect the stream's descriptor to the null device.
    """
    if stream is None:  # print() would write to standard output
        return
    try:
        print(text, file=stream, flush=True)
    except BrokenPipeError:
        # Text that the stream has not written yet goes to the null device, too.
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)


def fold(text: str, stream: TextIO) -> str:
    """Return text with lines broken at the terminal's width; unchanged for a file.

    Continuation lines are aligned with the last column of their line (columns are two
    spaces apart), or indented by 4 if there is none, or under 30 characters are left.
    """
    width = width_of(stream)
    if width is None:
        return text
    wrapper = textwrap.TextWrapper(
        width, break_long_words=False, break_on_hyphens=False
    )
    lines = []
    for line in text.split("\n"):
        column = line.rfind("  ") + 2
        fits = 1 < column <= width - NOTE
        wrapper.subsequent_indent = " " * (column if fits else INDENT)
        lines += [line] if len(line) <= width else wrapper.wrap(line)
    return "\n".join(lines)


def width_of(stream: TextIO) -> int | None:
    """Return a terminal's width ($COLUMNS first); None if no terminal, or unknown."""
    told = os.environ.get("COLUMNS", "")
    try:
        if not stream.isatty():
            return None
        if told.isdecimal() and int(told):
            return int(told)
        return os.get_terminal_size(stream.fileno()).columns or None
    except (OSError, ValueError):  # closed, or without a file descriptor
        return None


class Parser(argparse.ArgumentParser):
    """Parse arguments as argparse does, and say what a misspelt one may mean.

    Each subcommand answers for its own options, with its own usage: argparse would
    pass an unknown one on to the parser of the whole command.
    """

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> tuple[Any, list[str]]:
        """Return the options and []; exit if a word is unknown."""
        options, unknown = super().parse_known_args(args, namespace)
        if unknown:
            known = [
                word
                for action in self._actions
                if action.help != argparse.SUPPRESS
                for word in action.option_strings
            ]
            words = [word.partition("=")[0] for word in unknown]
            hint = _did_you_mean(words, known)
            self.error(
                f"unrecognized arguments: {' '.join(unknown)}{hint} "
                f"(`{self.prog} --help` lists all)"
            )
        return options, unknown

    def error(self, message: str) -> NoReturn:
        """Exit with status 2, after the usage and ``message``."""
        choice = re.search(r"invalid choice: '([^']*)' \(choose from (.*)\)", message)
        if choice is not None:
            known = re.findall(r"[\w-]+", choice[2])
            message += _did_you_mean([choice[1]], known)
        super().error(message)


def _did_you_mean(words: Sequence[str], known: Sequence[str]) -> str:
    """Return "; did you mean X, Y?", or "" if no word resembles a known one."""
    similar = [
        name
        for word in words
        for name in difflib.get_close_matches(word.lower(), known, n=1)
    ]
    return f"; did you mean {', '.join(similar)}?" if similar else ""


def run_command(
    name: str,
    add_arguments: Callable[[argparse.ArgumentParser], None],
    main: Callable[[argparse.Namespace], int],
) -> NoReturn:
    """Parse the arguments of command ``name``; exit with the status ``main`` returns.

    ``add_arguments`` gets the parser, ``main`` the parsed arguments.
    """
    raw = argparse.RawDescriptionHelpFormatter
    parser = Parser(name, formatter_class=raw)
    add_arguments(parser)
    sys.exit(main(parse(parser)))


def positive_seconds(text: str) -> float:
    """Return ``text`` as float, for argparse; raise if no number, <= 0 or infinite."""
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < float("inf"):
        raise argparse.ArgumentTypeError(f"a positive number of seconds, not {text}")
    return seconds


def parse(
    parser: argparse.ArgumentParser, arguments: Sequence[str] | None = None
) -> argparse.Namespace:
    """Parse ``arguments`` (None: those of ``sys.argv``) as argparse does.

    Exits after --help or a usage error; printing these to a closed pipe raises nothing.
    """
    out, err = io.StringIO(), io.StringIO()
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            return parser.parse_args(arguments)
    finally:
        for stream, told in ((sys.stdout, out), (sys.stderr, err)):
            if told.getvalue():
                _write(stream, told.getvalue().removesuffix("\n"))


def warn(text: str, category: type[Warning] = UserWarning) -> None:
    """Issue a warning at the line of the nearest caller outside minidp and torch."""
    frame = user_frame(sys._getframe(1))
    names = frame.f_globals
    warnings.warn_explicit(
        text,
        category,
        frame.f_code.co_filename,
        frame.f_lineno,
        names.get("__name__"),  # the outermost frame may have none
        names.setdefault("__warningregistry__", {}),
    )


def user_frame(frame: FrameType) -> FrameType:
    """Return ``frame`` or its nearest caller outside minidp and torch.

    Skips also contextlib and generated code. The outermost frame if there is none.
    """
    while frame.f_back is not None and (
        frame.f_code.co_filename.startswith(OURS)
        or "__name__" not in frame.f_globals  # code generated by dynamo
    ):
        frame = frame.f_back
    return frame


def trim_tracebacks(of: type[BaseException]) -> None:
    """From now on let uncaught errors of a class show the user's frames only.

    Without it, thirty lines of our frames and torch's stand above the line that says
    what is wrong. Other errors, and those that somebody catches, keep all frames.
    """
    global _is_trimming
    if _is_trimming:
        return
    _is_trimming, below = True, sys.excepthook

    def trim(
        kind: type[BaseException], error: BaseException, traceback: TracebackType | None
    ) -> None:
        if isinstance(error, of):
            traceback = _of_user(traceback)
            error.__traceback__ = traceback  # Python's own hook prints this one
        below(kind, error, traceback)

    sys.excepthook = trim


_is_trimming = False  # once per process


def _of_user(traceback: TracebackType | None) -> TracebackType | None:
    """Return a copy without minidp, torch and runpy; itself if nothing is left."""
    shown = None
    for each in reversed([*_each(traceback)]):
        file = each.tb_frame.f_code.co_filename
        if not file.startswith((*OURS, "<frozen runpy>", runpy.__file__)):
            shown = TracebackType(shown, each.tb_frame, each.tb_lasti, each.tb_lineno)
    return shown or traceback


def _each(traceback: TracebackType | None) -> Iterator[TracebackType]:
    while traceback is not None:
        yield traceback
        traceback = traceback.tb_next
