"""A recorded training as report, picture and Chrome trace: torch's layout, and auto's.

    python benchmarks/timeline.py                      # 2 Gbit/s, 4 minutes
    python benchmarks/timeline.py --link loopback      # without root
    python benchmarks/timeline.py --smoke              # does it run? no files

Runs differ more than steps of one run. So there are several, layouts in turn, and of
each layout the one with the median step is shown. What is in the files is in the
project's README, under "See the overlap".
"""

from __future__ import annotations

import argparse
import functools
import gzip
import json
import logging
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from rich.console import Console
from support.links import Link, why_not
from support.models import MODELS
from support.nets import Net
from support.output import check_native, results_folder, shrink_png
from support.ranks import run_ranks
from support.report import (
    can_draw,
    header,
    header_table,
    native_line,
    report_console,
    write_markdown,
)
from torch.optim import SGD

import minidp
from minidp._analysis import Overlap, most_exposed, overlaps_of
from minidp._chrome_trace import chrome_trace
from minidp._picture import draw
from minidp._skew import common_steps
from minidp._timeline import Timeline, from_json, to_json
from minidp.report import report

LOOPBACK = "loopback"
LAYOUTS = {"default": None, "auto": "auto"}  # of bucket_cap_mb
SETTLING, STEPS = 52, 24  # until auto has chosen; recorded
RUNS = 5  # of each layout; odd, so that one is the median
BESIDE = 2  # steps in the trace before and after the typical one


@dataclass(frozen=True)
class Run:
    """One training.

    Args:
        timelines: of all ranks.
        said: what auto logged.
    """

    timelines: tuple[Timeline, ...]
    said: list[str]

    @property
    def shown(self) -> Overlap:
        """What the report shows: the rank that waits most, in its typical step."""
        return most_exposed(overlaps_of(self.timelines))

    def trace(self) -> str:
        """Of the typical step, and those around it."""
        number = self.shown.step
        near = common_steps(self.timelines)[max(0, number - BESIDE) :][: 2 * BESIDE + 1]
        steps = zip(*near, strict=True)
        pairs = zip(self.timelines, steps, strict=True)
        return chrome_trace([replace(one, steps=tuple(some)) for one, some in pairs])


class _Said(logging.Handler):
    """Keeps what is logged."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.words: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Keep it."""
        self.words.append(record.getMessage())


def record_on_rank(cap: str | None, *, is_small: bool, native: str) -> str:
    """On every rank: train, and bring home what all ranks recorded."""
    check_native(native)
    said = _Said()
    logging.getLogger("minidp").addHandler(said)
    logging.getLogger("minidp").setLevel(logging.INFO)
    torch.manual_seed(0)
    net: Net = MODELS["mlp"].smoke() if is_small else MODELS["mlp"].full()
    model = minidp.DataParallel(net, bucket_cap_mb=cap)
    optimizer = SGD(model.parameters(), lr=1e-6)

    def train(steps: int) -> None:
        for number in range(steps):
            data = net.data(torch.Generator().manual_seed(number))
            optimizer.zero_grad()
            model(*data).backward()
            optimizer.step()

    train(3 if is_small else SETTLING)
    with minidp.record(model) as recording:
        train(3 if is_small else STEPS)
    recorded = to_json(recording.gather().timelines)
    return json.dumps({"recorded": recorded, "said": said.words})


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    add = parser.add_argument
    add("--smoke", action="store_true", help="a tiny model on the loopback device")
    add("--link", default="2", metavar="L", help="Gbit/s, or loopback (default: 2)")
    add("--ranks", type=int, default=2, metavar="N", help="number of ranks (default 2)")
    add(
        "--runs",
        type=int,
        default=RUNS,
        metavar="N",
        help=f"of each layout; the one with the median step is shown (default {RUNS})",
    )
    add(
        "--out",
        type=Path,
        metavar="FOLDER",
        help="where the files go (default: benchmarks/results)",
    )
    args = parser.parse_args()
    if args.smoke:
        args.link = LOOPBACK
    return args


def run(args: argparse.Namespace, folder: Path) -> None:
    """Record, print, write."""
    console = report_console()
    link = None if args.link == LOOPBACK else Link(float(args.link))
    lines = header(
        native=native_line(), ranks=str(args.ranks), link=str(link or LOOPBACK)
    )
    console.print(header_table(lines), "")
    task = functools.partial(
        record_on_rank, is_small=args.smoke, native=lines["native"]
    )
    stem = f"timeline_cpu_{args.link}_{args.ranks}_{lines['date']}"
    runs: dict[str, list[Run]] = {name: [] for name in LAYOUTS}
    for _ in range(1 if args.smoke else args.runs):
        for name, cap in LAYOUTS.items():
            found = json.loads(run_ranks(task, args.ranks, cap, link=link))
            timelines = from_json(found["recorded"])
            runs[name].append(Run(timelines, found["said"]))
    _print_runs(console, runs)
    for name, each in runs.items():
        run = median_of(each)
        console.print(f"bucket_cap_mb: {name}", style="bold")
        for words in run.said:
            console.print(words, markup=False, highlight=False)
        console.print(f"{report(run.timelines)}\n", markup=False, highlight=False)
        if can_draw():
            picture = folder / f"{stem}_{name}.png"
            draw(run.timelines, picture)
            shrink_png(picture)
        with gzip.open(folder / f"{stem}_{name}_trace.json.gz", "wt") as file:
            file.write(run.trace())
    write_markdown(folder / f"{stem}.md", "One training, recorded", console)


def median_of(runs: Sequence[Run]) -> Run:
    """The run whose typical step is neither long nor short."""
    return sorted(runs, key=lambda run: run.shown.typical.seconds)[len(runs) // 2]


def _print_runs(console: Console, runs: dict[str, list[Run]]) -> None:
    """How far runs differ."""
    console.print("typical step of each run, and how much of it is exposed, in ms:")
    for name, each in runs.items():
        typical = [run.shown.typical for run in each]
        cells = [f"{1e3 * t.seconds:.0f} ({1e3 * t.exposed_s:.0f})" for t in typical]
        console.print(f"  {name:<8} {'  '.join(cells)}", highlight=False)
    console.print("Of each layout the run with the median step is shown.\n")


def main() -> int:
    """Run; 2 where there can be no such link."""
    args = parse()
    reason = "" if args.link == LOOPBACK else why_not()
    if reason:
        print(f"No link of a limited rate: {reason}.", file=sys.stderr)
        return 2
    with results_folder(args.out, smoke=args.smoke) as folder:
        run(args, folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
