"""Where results go, what pictures weigh, what is said of wrong gradients."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console

from support.report import ROOT, native_line

COLOURS = 96  # of a chart: those of bars and lines, and their edges


@contextmanager
def results_folder(out: Path | None, *, smoke: bool) -> Iterator[Path]:
    """The folder for files: ``out``, or the project's; a smoke test leaves none."""
    with tempfile.TemporaryDirectory() as scratch:
        if smoke:
            os.environ.setdefault("MPLCONFIGDIR", scratch)  # matplotlib's font cache
        folder = out or (Path(scratch) if smoke else ROOT / "benchmarks" / "results")
        folder.mkdir(parents=True, exist_ok=True)
        yield folder


def shrink_png(path: Path) -> None:
    """Write a chart again in a palette: git keeps a third of the bytes for ever."""
    from PIL import Image  # matplotlib needs it; not above: ranks import this, too

    with Image.open(path) as chart:
        few = chart.convert("RGB").quantize(COLOURS, dither=Image.Dither.NONE)
    few.save(path, optimize=True)


def say_if_wrong(console: Console, counts: Iterable[int | None]) -> bool:
    """Say so if a gradient was wrong; return whether all were right."""
    if any(counts):
        console.print("Some gradients are WRONG: see #wrong.", style="bold red")
        return False
    return True


def check_native(expected: str) -> None:
    """On a rank: it must have of the native extension what the header says.

    Raises:
        RuntimeError: the sources were changed since the run started.
    """
    if native_line() != expected:
        raise RuntimeError(
            f"native extension {expected}, but on a rank {native_line()}"
        )
