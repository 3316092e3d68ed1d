"""Where results go, and what is said of wrong ones: the end of every benchmark."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console

from support.report import ROOT, native_line


@contextmanager
def results_folder(out: Path | None, *, smoke: bool) -> Iterator[Path]:
    """The folder for files: ``out``, or the project's; a smoke test leaves none."""
    with tempfile.TemporaryDirectory() as scratch:
        if smoke:
            os.environ.setdefault("MPLCONFIGDIR", scratch)  # matplotlib's font cache
        folder = out or (Path(scratch) if smoke else ROOT / "benchmarks" / "results")
        folder.mkdir(parents=True, exist_ok=True)
        yield folder


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
