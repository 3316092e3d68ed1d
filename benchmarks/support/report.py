"""Header, console, files: what every benchmark's report has."""

from __future__ import annotations

import datetime
import importlib.util
import json
import os
import platform
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

import minidp
from minidp import native

ROOT = Path(__file__).parents[2]
MEASURED = ("minidp", "csrc", "benchmarks/**/*.py")
NO_PICTURES = "matplotlib is not installed (pip install matplotlib)"
WIDTH = 128  # columns, where there is no terminal or a narrower one


def report_console() -> Console:
    """Prints plain text when piped; `write_markdown` writes what was printed."""
    console = Console(record=True, highlight=False)
    console.width = max(console.width if console.is_terminal else 0, WIDTH)
    return console


def can_draw() -> bool:
    """Whether there will be pictures; without matplotlib, table and numbers will do."""
    return importlib.util.find_spec("matplotlib") is not None


def header(**more: str) -> dict[str, str]:
    """What a reader needs to judge the numbers; ``more`` is the benchmark's own."""
    return {
        "date": datetime.date.today().isoformat(),
        "commit": _commit(),
        "torch": torch.__version__,
        "minidp": minidp.__version__,
        "python": platform.python_version(),
        "numpy": np.__version__,
        "system": f"{platform.system()} {platform.release()}",
        "processor": f"{_processor()}, {os.cpu_count()} cores",
        **more,
        **({} if can_draw() else {"pictures": f"none: {NO_PICTURES}"}),
        "load before": f"{os.getloadavg()[0]:.1f} busy processes, last minute",
    }


def header_table(lines: dict[str, str]) -> Table:
    """The header, for printing."""
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    table.add_column(style="dim")
    table.add_column()
    for name, value in lines.items():
        table.add_row(name, value)
    return table


def native_line() -> str:
    """Whether this process has the native extension, for the header."""
    status = native.status()
    if status.is_loaded:
        return "loaded"
    return f"not loaded: {status.reason}"


def write_markdown(path: Path, title: str, console: Console) -> None:
    """Write what was printed, under a title."""
    lines = (line.rstrip() for line in console.export_text().strip().split("\n"))
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join([f"# {title}", "", "```text", *lines, "```", ""]))


def write_json(path: Path, content: Any) -> None:
    """Write a file that people can read as well."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=1) + "\n")


def _commit() -> str:
    """The checked out commit, and whether what is measured differs from it."""
    try:
        commit = _git("rev-parse", "--short=10", "HEAD")
        changed = _git("status", "--porcelain", "--", *MEASURED)
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return commit + (" with uncommitted changes" if changed else "")


def _git(*arguments: str) -> str:
    done = subprocess.run(
        ["git", "-C", str(ROOT), *arguments],
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.strip()


def _processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
