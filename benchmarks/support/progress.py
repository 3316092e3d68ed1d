"""A progress bar on the terminal, for rank 0, redrawn only between measurements."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn


@contextmanager
def progress(rank: int, label: str, total: int) -> Iterator[Callable[[], None]]:
    """Show a bar while inside; what is yielded says that one of ``total`` is done.

    On other ranks, and where nobody looks, nothing is shown.
    """
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    # No thread that redraws it: that would run in the middle of what is measured.
    bar = Progress(*columns, console=console, transient=True, auto_refresh=False)
    if rank != 0 or not label or total < 1 or not console.is_terminal:
        yield _nothing
        return
    with bar:
        task = bar.add_task(label, total=total)

        def advance() -> None:
            bar.advance(task)
            bar.refresh()

        yield advance


def _nothing() -> None:
    pass
