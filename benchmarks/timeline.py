"""How does a recorded training look? Write report and trace of two layouts.

    python benchmarks/timeline.py                      # 2 Gbit/s, 4 minutes
    python benchmarks/timeline.py --link loopback      # without root
    python benchmarks/timeline.py --smoke              # does it run? no files

The MLP of overlap.py is trained with torch's bucket layout and with the one that "auto"
chooses, five times each in turn, because trainings differ more than steps of one do. Of
each layout the training with the median step is shown: what "auto" logged, what
`minidp report` says, and a trace for Perfetto.

Layouts are compared by overlap.py, which records nothing; this script compares nothing.
"""

from __future__ import annotations

import functools
import gzip
import logging
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import torch
import torch.distributed as dist
from support.baselines import SETTLING
from support.links import LOOPBACK, Link, why_not
from support.models import MODELS, make
from support.ranks import run_ranks
from support.report import Report, command_line
from torch.optim import SGD

import minidp
from minidp.console import say_progress

LAYOUTS = {"default": None, "auto": "auto"}  # of bucket_cap_mb
STEPS, RUNS = 24, 5  # recorded; of each layout, odd: so one is the median


@dataclass(frozen=True)
class Run:
    """One recorded training; the files are in a folder of their own."""

    folder: Path
    seconds: float  # of the median step
    said: str  # what auto logged, and the report


class _Said(logging.Handler):
    """Keeps what is logged."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.words: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Keep the message."""
        self.words.append(record.getMessage())


def train(cap: str | None, folder: Path, *, smoke: bool) -> Run:
    """Train and record, on every rank; rank 0 writes the trace."""
    said = _Said()
    logging.getLogger("minidp").addHandler(said)
    logging.getLogger("minidp").setLevel(logging.INFO)
    net = make(MODELS["mlp"], smoke=smoke)
    model = minidp.DataParallel(net, bucket_cap_mb=cap)
    optimizer = SGD(model.parameters(), lr=1e-6)

    def take(steps: int) -> list[float]:
        times = [time.perf_counter()]
        for number in range(steps):
            data = net.data(torch.Generator().manual_seed(number))
            optimizer.zero_grad()
            model(*data).backward()
            optimizer.step()
            times.append(time.perf_counter())
        return [b - a for a, b in pairwise(times)]

    take(3 if smoke else SETTLING)
    with minidp.record(model) as recording:
        seconds = take(3 if smoke else STEPS)
    recording.gather()
    if dist.get_rank() == 0:
        recording.save_trace(folder / "trace.json")
    words = "\n".join([*said.words, recording.report()])
    return Run(folder, statistics.median(seconds), words)


def median_of(runs: Sequence[Run]) -> Run:
    """Return the run whose median step is the median of all runs."""
    return sorted(runs, key=lambda run: run.seconds)[len(runs) // 2]


def keep(run: Run, folder: Path, name: str) -> None:
    """Copy a run's trace to the results."""
    with gzip.open(folder / f"{name}_trace.json.gz", "wt") as file:
        file.write((run.folder / "trace.json").read_text())


def main() -> int:
    """Record and report. Return 2 where there can be no such link."""
    parser = command_line(__doc__)
    add = parser.add_argument
    add("--link", default="2", metavar="L", help=f"Gbit/s, or {LOOPBACK} (default: 2)")
    add("--ranks", type=int, default=2, metavar="N", help="(default: 2)")
    args = parser.parse_args()
    if args.smoke:
        args.link = LOOPBACK
    if args.link != LOOPBACK and (reason := why_not()):
        print(f"No shaped link here: {reason}. Try --link loopback.", file=sys.stderr)
        return 2
    link = Link.of(args.link)
    ranks, place = str(args.ranks), str(link or LOOPBACK)
    report = Report(args, "One training, recorded", ranks=ranks, link=place)
    runs: dict[str, list[Run]] = {name: [] for name in LAYOUTS}
    stem = f"timeline_cpu_{args.link}_{args.ranks}"
    task = functools.partial(train, smoke=args.smoke)
    with tempfile.TemporaryDirectory() as scratch:
        for number in range(1 if args.smoke else RUNS):
            for name, cap in LAYOUTS.items():
                folder = Path(scratch) / f"{name}{number}"
                folder.mkdir()
                say_progress(f"training {number + 1} of {RUNS}, bucket_cap_mb: {name}")
                runs[name].append(run_ranks(task, args.ranks, cap, folder, link=link))
        for name, each in runs.items():
            steps = ", ".join(f"{1e3 * run.seconds:.0f}" for run in each)
            report.show(f"bucket_cap_mb: {name}; ms of the median step: {steps}")
            report.show(median_of(each).said)
            with report.folder() as results:
                stamp = f"{stem}_{report.header['date']}_{name}"
                keep(median_of(each), results, stamp)
    content = {name: [run.seconds for run in each] for name, each in runs.items()}
    return report.finish(stem, {"seconds": content})


if __name__ == "__main__":
    sys.exit(main())
