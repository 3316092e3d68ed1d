"""Lines are folded where a terminal shows them, and nowhere else."""

from __future__ import annotations

import io
import os
import pty
import sys
import termios

import pytest

from minidp.__main__ import main
from minidp.console import fold, say_progress, width_of
from minidp.overlap.timeline import to_json
from minidp.report import report
from tests.support.timelines import step, timeline

LONG = "Why? " + "word " * 30 + "end."
NOTE = "  copying averages out   4.9 ms    " + "what it is about " * 4


class Terminal(io.StringIO):
    """Has no size of its own: COLUMNS tells."""

    def isatty(self):
        return True


TERMINAL = Terminal()


def test_words_stay_whole_and_none_is_lost(monkeypatch, tmp_path):
    monkeypatch.setenv("COLUMNS", "40")
    folded = fold(f"{LONG}\nshort", TERMINAL)
    assert max(map(len, folded.split("\n"))) <= 40
    assert folded.split() == f"{LONG}\nshort".split()
    assert folded.endswith("\nshort")
    for as_it_is in ("a " * 20, "x" * 50):  # just fits; cannot be broken
        assert fold(as_it_is, TERMINAL) == as_it_is
    with (tmp_path / "f").open("w") as file:
        assert fold(LONG, file) == LONG
    assert width_of(file) is None  # closed


def test_progress_is_shown_on_a_terminal_by_the_first_rank(monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")
    for stream, rank, shown in (
        (Terminal(), "0", "layout 1 of 8\n"),
        (Terminal(), "1", ""),
        (io.StringIO(), "0", ""),
    ):
        monkeypatch.setattr(sys, "stderr", stream)
        monkeypatch.setenv("RANK", rank)
        say_progress("layout 1 of 8")
        assert stream.getvalue() == shown
    monkeypatch.setattr(sys, "stderr", None)
    say_progress("nobody reads it")


@pytest.mark.parametrize(("columns", "indent"), [(80, 35), (60, 4)])
def test_a_note_goes_on_below_itself_where_there_is_room(monkeypatch, columns, indent):
    monkeypatch.setenv("COLUMNS", str(columns))
    first, second, *_ = fold(NOTE, TERMINAL).split("\n")
    assert len(first) <= columns
    assert len(second) - len(second.lstrip()) == indent


def test_a_terminal_has_a_width(monkeypatch):
    monkeypatch.delenv("COLUMNS", raising=False)
    ours, theirs = pty.openpty()
    try:
        with os.fdopen(theirs, "w", closefd=False) as terminal:
            assert width_of(terminal) is None  # it says 0: nobody told it
            termios.tcsetwinsize(theirs, (24, 57))
            assert width_of(terminal) == 57
    finally:
        os.close(ours)
        os.close(theirs)


@pytest.mark.parametrize("nonsense", ["", "0", "-3", "wide"])
def test_a_variable_that_says_nothing_is_not_asked(monkeypatch, nonsense):
    monkeypatch.setenv("COLUMNS", nonsense)
    assert width_of(TERMINAL) is None


def test_reports_are_folded(monkeypatch, tmp_path):
    monkeypatch.setenv("COLUMNS", "50")
    terminal = Terminal()
    monkeypatch.setattr(sys, "stdout", terminal)
    buckets = [(20, 20, 28, 35), (30, 30, 40, 41)]
    recorded = timeline([step(n, buckets, at=60 * n) for n in range(3)])
    (tmp_path / "f.json").write_text(to_json([recorded]))
    assert main(["report", str(tmp_path / "f.json")]) == 0
    printed = terminal.getvalue()
    assert max(map(len, printed.split("\n"))) <= 50
    assert printed.split() == report([recorded]).split()
