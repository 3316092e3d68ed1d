"""Fold long lines at the width of the terminal that shows them."""

from __future__ import annotations

import os
import textwrap
from typing import TextIO

NOTE = 30  # columns that the last column of a line needs, to be continued below itself
INDENT = 4


def fold(text: str, stream: TextIO) -> str:
    """Break the lines of a text between words, if ``stream`` writes to a terminal.

    What follows stands below the last column of its line, where columns are two spaces
    apart. Where there is no terminal, lines stay long: whoever reads a file folds them.
    """
    width = width_of(stream)
    if width is None:
        return text
    return "\n".join(_folded(line, width) for line in text.split("\n"))


def width_of(stream: TextIO) -> int | None:
    """Return the columns of the terminal that ``stream`` writes to; None: it is none.

    The variable COLUMNS says more than the terminal, as for other programs.
    """
    told = os.environ.get("COLUMNS", "")
    try:
        if not stream.isatty():
            return None
        if told.isdecimal() and int(told):
            return int(told)
        return os.get_terminal_size(stream.fileno()).columns or None
    except (OSError, ValueError):  # closed, or a terminal in name only
        return None


def _folded(line: str, width: int) -> str:
    if len(line) <= width:
        return line
    column = line.rfind("  ") + 2
    lines = textwrap.wrap(
        line,
        width,
        subsequent_indent=" " * (column if 1 < column <= width - NOTE else INDENT),
        break_long_words=False,
        break_on_hyphens=False,
    )
    return "\n".join(lines)
