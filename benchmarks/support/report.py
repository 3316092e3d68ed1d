"""What every benchmark's report has: command line, header, tables, targets, files."""

from __future__ import annotations

import argparse
import datetime
import importlib.util
import json
import os
import platform
import subprocess
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Table
from rich.text import Text

import minidp
from minidp import native
from support.estimates import Estimate

RESULTS = Path(__file__).parents[1] / "results"
WIDTH = 128  # columns, where there is no terminal or a narrower one
CPU_BACKEND = "CPU, Gloo, 1 thread per rank, float32"
TIMED = "forward and backward; not zero_grad(set_to_none=True)"


def command_line(
    doc: str | None, *, seconds: float | None = None, **more: Any
) -> argparse.ArgumentParser:
    """Make a parser with the options that all benchmarks have.

    Args:
        doc: the script's docstring, which ``--help`` prints.
        seconds: the default of ``--seconds``; None: there is no such option.
        **more: for `argparse.ArgumentParser`.
    """
    parser = argparse.ArgumentParser(
        description=doc,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        **more,
    )
    parser.add_argument(
        "--smoke",
        action="store_true",
        help="tiny models and a few rounds: check that everything runs and that no "
        "gradient is wrong; writes no files unless --out is given",
    )
    parser.add_argument(
        "--out",
        type=Path,
        metavar="FOLDER",
        help="where table, numbers and chart go (default: benchmarks/results)",
    )
    if seconds is not None:
        parser.add_argument(
            "--seconds",
            type=float,
            default=seconds,
            help=f"time for each measurement (default: {seconds:g})",
        )
    return parser


@dataclass(frozen=True)
class Verdict:
    """A target, and whether it was met.

    Args:
        what: was measured.
        found: the measurement.
        limit: of the target.
        at_least: the limit is a lower one.
    """

    what: str
    found: Estimate
    limit: float
    at_least: bool = False

    @property
    def word(self) -> str:
        """``met``, ``MISSED``, or ``unclear`` if the interval contains the limit."""
        if self.found.low <= self.limit < self.found.high:
            return "unclear"
        return "met" if (self.found.value > self.limit) is self.at_least else "MISSED"

    def __str__(self) -> str:
        sign = ">=" if self.at_least else "<="
        return f"{self.word:8}{self.found!s:22} {sign} {self.limit:g}  {self.what}"


class Report:
    """Prints a benchmark's report, and writes it to files at the end.

    Args:
        args: of a `command_line`.
        title: of the report.
        **lines: what this benchmark adds to the header.
    """

    def __init__(self, args: argparse.Namespace, title: str, **lines: str) -> None:
        self._args, self._title = args, title
        self.header = header(**lines)
        self.console = Console(record=True, highlight=False)
        is_wide = self.console.is_terminal and self.console.width > WIDTH
        self.console.width = self.console.width if is_wide else WIDTH
        self._verdicts: list[Verdict] = []
        self._wrong = 0
        facts = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
        for name, value in self.header.items():
            facts.add_row(Text(name, "dim"), value)
        self.show(facts)

    def show(self, what: Any) -> None:
        """Print a table or text, and an empty line."""
        self.console.print(what, "", markup=False)

    def count_wrong(self, counts: Iterable[int | None]) -> None:
        """Add numbers of wrong gradients; any makes the exit status 1."""
        self._wrong += sum(count or 0 for count in counts)

    def judge(self, verdicts: Iterable[Verdict]) -> None:
        """Add targets, which are printed at the end. They change no exit status."""
        self._verdicts += verdicts

    def finish(
        self,
        stem: str,
        content: Mapping[str, Any],
        draw: Callable[[Path], None] | None = None,
    ) -> int:
        """Print the targets, write the files, return the exit status.

        Args:
            stem: of the files' names; the date is added.
            content: of the JSON file, beside header and targets.
            draw: writes the chart to a path.
        """
        if self._verdicts and not self._args.smoke:  # tiny models meet no target
            self.console.print("targets (95% intervals)", style="bold")
            for verdict in self._verdicts:
                colour = {"met": "green", "MISSED": "red"}.get(verdict.word, "")
                self.console.print(str(verdict), style=colour, soft_wrap=True)
        if self._wrong:
            words = f"{self._wrong} gradients are WRONG: see #wrong."
            self.console.print(words, style="bold red")
        self.header["load after"] = _load()
        self.console.print("load after", self.header["load after"])
        targets = [{**vars(each), "found": vars(each.found)} for each in self._verdicts]
        everything = {"header": self.header, "targets": targets, **content}
        with self.folder() as folder:
            name = f"{stem}_{self.header['date']}"
            numbers = json.dumps(everything, indent=1)
            (folder / f"{name}.json").write_text(f"{numbers}\n")
            text = self.console.export_text().strip().split("\n")
            lines = [f"# {self._title}", "", "```text", *map(str.rstrip, text), "```"]
            (folder / f"{name}.md").write_text("\n".join([*lines, ""]))
            if draw is not None and can_draw():
                draw(folder / f"{name}.png")
        return 1 if self._wrong else 0

    @contextmanager
    def folder(self) -> Iterator[Path]:
        """Yield the folder for files; that of a smoke test is removed."""
        with tempfile.TemporaryDirectory() as scratch:
            if self._args.smoke:
                os.environ.setdefault("MPLCONFIGDIR", scratch)  # the font cache
            default = Path(scratch) if self._args.smoke else RESULTS
            folder: Path = self._args.out or default
            folder.mkdir(parents=True, exist_ok=True)
            yield folder


def table(
    title: str, facts: str, columns: Sequence[str], rows: Iterable[Sequence[str]]
) -> Table:
    """Make a table: the first column to the left, numbers to the right.

    Rows of minidp are bold.
    """
    heading = Text.assemble((title, "bold"), "\n", (facts, "dim"))
    made = Table(title=heading, title_justify="left", box=None, padding=(0, 1))
    for number, column in enumerate(columns):
        justify = "right" if number else "left"
        made.add_column(column, justify=justify, no_wrap=True, vertical="bottom")
    for row in rows:
        is_ours = row[0].startswith(("minidp", "native"))
        made.add_row(*row, style="bold" if is_ours else "")
    return made


def header(**more: str) -> dict[str, str]:
    """Collect what a reader needs to judge the numbers."""
    lines = {
        "date": datetime.date.today().isoformat(),
        "commit": _commit(),
        "torch": torch.__version__,
        "minidp": minidp.__version__,
        "python": platform.python_version(),
        "numpy": np.__version__,
        "system": f"{platform.system()} {platform.release()}",
        "processor": f"{_processor()}, {os.cpu_count()} cores",
        "native": native_line(),
        **more,
        "load before": _load(),
    }
    if not can_draw():
        lines["pictures"] = "none: matplotlib is not installed (pip install matplotlib)"
    return lines


def native_line() -> str:
    """Say whether this process has the native extension."""
    status = native.status()
    return "loaded" if status.is_loaded else f"not loaded: {status.reason}"


def native_word() -> str:
    """Return ``native`` or ``python``, for the names of files."""
    return "python" if native.library() is None else "native"


def can_draw() -> bool:
    """Return whether matplotlib is installed; without it there are no charts."""
    return importlib.util.find_spec("matplotlib") is not None


def _load() -> str:
    return f"{os.getloadavg()[0]:.1f} busy processes, last minute"


def _commit() -> str:
    """Name the commit of the tree that minidp was imported from."""
    tree = Path(minidp.__file__).parents[1]

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(tree), *arguments]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        return done.stdout.strip()

    try:
        commit = git("rev-parse", "--short=10", "HEAD")
        changed = git("status", "--porcelain", "--", "minidp", "csrc")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return commit + (" with uncommitted changes" if changed else "")


def _processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


@contextmanager
def progress(rank: int, label: str, total: int) -> Iterator[Callable[[], None]]:
    """Show a progress bar on rank 0's terminal; yield what advances it by one."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    # No thread that redraws the bar: that would run in the middle of timed steps.
    bar = Progress(*columns, console=console, transient=True, auto_refresh=False)
    if rank != 0 or not console.is_terminal:
        yield lambda: None
        return
    with bar:
        task = bar.add_task(label, total=total)

        def advance() -> None:
            bar.advance(task)
            bar.refresh()

        yield advance
