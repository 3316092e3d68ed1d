"""Print for a person who may stop reading: ``minidp report FILE | head``.

Whoever closes the pipe has seen enough: that is no error, and no reason to stop what a
command does besides printing (``minidp native build | head -1`` builds).
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from typing import TextIO


def say(text: str) -> None:
    """Print a line to standard output at once; once its reader has gone, nothing."""
    _write(sys.stdout, text)


def say_on_stderr(text: str) -> None:
    """The same, for errors and for what is not part of a command's output."""
    _write(sys.stderr, text)


def parse(
    parser: argparse.ArgumentParser, arguments: Sequence[str] | None = None
) -> argparse.Namespace:
    """Parse a command line; also ``--help | head`` ends with the right exit status.

    Args:
        parser: of the command.
        arguments: those of this process if not given.

    Raises:
        SystemExit: as argparse: help was asked for (0), or a wrong argument given (2).
    """
    try:
        return _parse_and_flush(parser, arguments)
    except BrokenPipeError:
        for stream in _streams():
            _mute(stream)
        return _parse_and_flush(parser, arguments)


def _parse_and_flush(
    parser: argparse.ArgumentParser, arguments: Sequence[str] | None
) -> argparse.Namespace:
    try:
        return parser.parse_args(arguments)
    finally:
        # What argparse printed. When the interpreter ends, a failure would be an exit
        # status of 120 and a message.
        for stream in _streams():
            stream.flush()


def _streams() -> list[TextIO]:
    """Standard output and error, as far as the process was started with them."""
    return [stream for stream in (sys.stdout, sys.stderr) if stream is not None]


def _write(stream: TextIO | None, text: str) -> None:
    if stream is None:  # print() would take standard output instead
        return
    try:
        print(text, file=stream, flush=True)
    except BrokenPipeError:
        _mute(stream)


def _mute(stream: TextIO) -> None:
    """Let all that is written from now on, or is waiting in a buffer, go nowhere."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, stream.fileno())
    os.close(nowhere)
