"""What a person sees: prints, folded lines, usage errors, warnings, tracebacks.

Three things are done here rather than where they are needed:

* A reader may close the pipe, as in ``minidp report FILE | head``. That is no error,
  and it does not stop what a command does besides printing: ``minidp native build |
  head -1`` builds.
* A warning or a traceback points at the user's line, and not at one of ours.
* A misspelt option is answered by the one that may have been meant.
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

NOTE = 30  # a last column of fewer characters is not continued below itself
INDENT = 4  # of such a line's continuation
OURS = (
    os.path.join(os.path.dirname(__file__), ""),
    os.path.join(os.path.dirname(torch.__file__), ""),
    contextlib.__file__,  # between a ``with`` and a generator of ours
)


def say(text: str) -> None:
    """Print a line to standard output and flush, unless its pipe is closed."""
    _write(sys.stdout, text)


def say_on_stderr(text: str) -> None:
    """Print a line to standard error and flush, unless its pipe is closed."""
    _write(sys.stderr, text)


def say_progress(text: str) -> None:
    """Print a line to standard error on rank 0, if it is a terminal."""
    is_first = os.environ.get("RANK", "0") == "0"
    if is_first and sys.stderr is not None and width_of(sys.stderr):
        say_on_stderr(text)


def _write(stream: TextIO | None, text: str) -> None:
    """Print a line and flush, unless there is no stream or its pipe is closed."""
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
    """Break the lines of a text at the width of a terminal.

    If the stream is no terminal, the text stays as it is. A table stays one: a line is
    continued below its last column, where columns are two spaces apart. If there is no
    column, or too little room behind it, the continuation is indented by four spaces.
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
    """Return the width of a terminal in characters.

    It is None if the stream is no terminal, or if the width is unknown. The environment
    variable COLUMNS comes first.
    """
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
        """Return the options and an empty list, or exit if a word is unknown."""
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
        """Print the usage and the message, and exit with status 2."""
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
    """Run a command, and exit with its status.

    Args:
        name: The command, for its usage.
        add_arguments: Adds its arguments to a parser.
        main: Gets the parsed arguments, and returns the exit status.
    """
    raw = argparse.RawDescriptionHelpFormatter
    parser = Parser(name, formatter_class=raw)
    add_arguments(parser)
    sys.exit(main(parse(parser)))


def positive_seconds(text: str) -> float:
    """Parse a finite, positive number of seconds, for argparse."""
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
    """Parse arguments as argparse does, which exits after --help or a usage error.

    With None these are the arguments of the process. A closed pipe raises nothing.
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
    """Issue a warning that points at the user's line, which `user_frame` finds."""
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
    """Return the frame itself, or its nearest caller outside of minidp and torch.

    Frames of contextlib and of generated code are skipped, too. If nothing else is
    there, it is the outermost frame.
    """
    while frame.f_back is not None and (
        frame.f_code.co_filename.startswith(OURS)
        or "__name__" not in frame.f_globals  # code generated by dynamo
    ):
        frame = frame.f_back
    return frame


def trim_tracebacks(of: type[BaseException]) -> None:
    """Let uncaught errors of a class show only the user's frames, from now on.

    Otherwise thirty lines of our frames and torch's stand above the line that says what
    is wrong. Other errors, and those that somebody catches, keep all their frames.
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


_is_trimming = False  # whether this process does so already


def _of_user(traceback: TracebackType | None) -> TracebackType | None:
    """Return a copy of a traceback without our frames, torch's and runpy's.

    If none is left, it is the traceback itself.
    """
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
