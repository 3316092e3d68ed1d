"""How much communication does a step wait for? minidp, torch's DDP, and the bound.

    python benchmarks/overlap.py                        # all 24 cells: 90 minutes
    python benchmarks/overlap.py --cells "mlp:*:2" --name mlp    # 5 minutes
    python benchmarks/overlap.py --cells mlp:loopback:2          # without root
    python benchmarks/overlap.py --smoke                # does it run? no numbers

A cell is MODEL:LINK:RANKS. Links are rates in Gbit/s (they need root), or loopback.

One step is forward, backward and communication. All implementations take it in turn, in
the same processes, on replicas of one model; ratios are paired by round (see the --help
of overhead.py).

Rows:
  no communication     the bare model; the other ranks compute at the same time
  no overlap           one all-reduce of all gradients, after the backward
  torch, torch again   DDP in default mode, twice: how far equal things differ here
  torch view, batched copy, last bucket cap
                       gradient_as_bucket_view, batched_grad_copy,
                       DDP_SET_LAST_BUCKET_CAP=1
  minidp, 1 MiB        default, and bucket_cap_mb=1
  minidp auto          bucket_cap_mb="auto", after the 52 steps in which it chooses

Columns:
  step, p10-p90        on the slowest rank
  step / torch         median over the rounds, and its 95% interval (bootstrap)
  exposed              step - step without communication in the same round
  CPU                  of all threads of a rank, Gloo's among them, the mean over ranks
  bound, step / bound  see below; medians over the rounds
  buckets              minidp: how many, the smallest and the largest
  #wrong               parameters whose gradient ever differed from torch's default: in
                       any bit; from three ranks on, where other buckets add up in
                       another order, by more than 1e-5 of the largest element

The bound of a step is the least time that it could take, with its gradients ready when
they were: what is ready at some moment or later is sent after that, at no more than the
rate of the link, in any bucket layout. A hook on each parameter, the same for torch and
minidp, takes these times in every timed step. Communication slows the backward down,
which is in the times; so each row has a bound of its own. No step may be below its
bound: the line above a table says how near the nearest came. Loopback has no rate, and
no bound.

Batches are small: there is little arithmetic to hide communication behind. Four ranks
on two cores take turns on the cores: a step takes twice as long, and so does the time
to hide communication in. The titles say so.
"""

from __future__ import annotations

import argparse
import functools
import os
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import groupby
from pathlib import Path

import numpy as np
from support.baselines import (
    AFTER,
    AUTO,
    BARE,
    LAST_CAP,
    TORCH,
    TORCH_AGAIN,
    AfterBackward,
    against_torch,
    auto,
    bare,
    ours,
    theirs,
)
from support.charts import (
    COMPUTE,
    OTHER,
    OURS,
    THEIRS,
    Bar,
    Words,
    colour_of,
    draw_bars,
)
from support.links import LOOPBACK, Link, why_not
from support.models import MODELS, make
from support.overlap import noise, overlap_table
from support.ranks import run_ranks
from support.report import CPU_BACKEND, TIMED, Report, Verdict, command_line
from support.rounds import Contest, Implementation, Measured, Plan

LINKS, WORLD_SIZES = (LOOPBACK, "10", "2", "1"), (2, 4)
SMOKE_CELLS = ["mlp:loopback:2", "resnet50:2:3"]
# Targets, for `auto`: torch's steps over its own on the MLP at 2 Gbit/s; its steps over
# the bound at two ranks on slow links.
SPEEDUP_CELL, SPEEDUP = "mlp:2:2", 1.25
BOUND_LINKS, BOUND_LIMIT = ("1", "2"), 1.15


# -- what is measured ------------------------------------------------------------------


@dataclass(frozen=True)
class Cell:
    """One model, one link (Gbit/s or loopback), one number of ranks."""

    model: str
    link: str
    world_size: int

    def __str__(self) -> str:
        return f"{self.model}:{self.link}:{self.world_size}"

    @classmethod
    def of(cls, text: str) -> Cell:
        """Parse MODEL:LINK:RANKS.

        Raises:
            ValueError: it is no such cell.
        """
        model, link, world_size = text.split(":")
        if model not in MODELS or int(world_size) < 2:
            raise ValueError(text)
        Link.of(link)
        return cls(model, link, int(world_size))

    @property
    def place(self) -> str:
        """Ranks and link, for titles."""
        cores = os.cpu_count() or 1
        crowded = f" on {cores} cores" if self.world_size > cores else ""
        return f"{self.world_size} ranks{crowded}, {Link.of(self.link) or LOOPBACK}"


def implementations(world_size: int) -> list[Implementation]:
    """List what is measured."""
    mine = functools.partial(against_torch, world_size=world_size)
    view = theirs(gradient_as_bucket_view=True)
    return [
        bare(),
        mine(AFTER, AfterBackward),
        mine(TORCH, theirs()),
        mine(TORCH_AGAIN, theirs()),
        mine("torch view", view),
        mine("torch batched copy", theirs(batched_grad_copy=True)),
        mine("torch last bucket cap", theirs(), environment=LAST_CAP),
        mine("minidp", ours()),
        mine("minidp 1 MiB", ours(bucket_cap_mb=1)),
        auto(world_size),
    ]


def measure(cell: Cell, plan: Plan, *, smoke: bool) -> Measured:
    """Measure a cell, on every rank."""
    net, everyone = (
        make(MODELS[cell.model], smoke=smoke),
        implementations(cell.world_size),
    )
    title = f"{net.title}; {cell.place}"
    return Contest(title, everyone, net, plan, link=Link.of(cell.link)).run()


# -- what it means ---------------------------------------------------------------------


def verdicts(cell: Cell, measured: Measured) -> Iterator[Verdict]:
    """Yield the targets of a cell."""
    title = measured.title
    if str(cell) == SPEEDUP_CELL:
        what, found = f"torch's step over auto's; {title}", measured.ratio(TORCH, AUTO)
        yield Verdict(what, found, SPEEDUP, at_least=True)
    what = f"auto's step over torch's, p90 of torch over itself; {title}"
    limit = max(1.0, noise(measured)[1])
    yield Verdict(what, measured.ratio(AUTO, TORCH), limit)
    over_bound = measured.over_bound(AUTO)
    if cell.world_size == 2 and cell.link in BOUND_LINKS and over_bound is not None:
        yield Verdict(f"auto's step over the bound; {title}", over_bound, BOUND_LIMIT)


def bars(measured: Measured) -> Iterator[Bar]:
    """Yield a bar for each implementation: what it computes, and what it waits."""
    alone = measured.milliseconds(BARE)[1]
    for name in measured.times:
        low, middle, high = measured.milliseconds(name)
        if name not in (BARE, TORCH_AGAIN):
            bound = None
            if name in measured.bounds:
                bound = 1e3 * float(np.median(measured.bounds[name]))
            exposed = (max(0.0, middle - alone), colour_of(name))
            parts = [(min(alone, middle), COMPUTE), exposed]
            yield Bar(name, parts, (low, high), bound)


def chart(path: Path, results: Mapping[Cell, Measured], note: str) -> None:
    """Draw a row for each model and number of ranks, a column for each link."""
    words = Words(
        "What a step computes, and what it waits for communication",
        "ms for each step: median, p10-p90",
        f"{note} Blue: the bound; no bucket layout could have ended the step earlier.",
    )
    legend = {
        "step without communication": COMPUTE,
        "exposed, torch": THEIRS,
        "exposed, minidp": OURS,
        "exposed, after backward": OTHER,
    }
    rows = groupby(results, key=lambda cell: (cell.model, cell.world_size))
    panels = [
        {results[cell].title: list(bars(results[cell])) for cell in row}
        for _, row in rows
    ]
    draw_bars(path, words, legend, panels)


# -- the program -----------------------------------------------------------------------


def parse() -> argparse.Namespace:
    """Parse the command line."""
    parser = command_line(__doc__, seconds=30)
    parser.add_argument(
        "--cells",
        nargs="+",
        metavar="CELL",
        help="what to measure: MODEL:LINK:RANKS, or patterns with * of models "
        f"{' '.join(MODELS)}, links {' '.join(LINKS)} and 2 or 4 ranks (default: all)",
    )
    parser.add_argument(
        "--name",
        default="",
        help="goes into the names of the files, to tell them apart",
    )
    args = parser.parse_args()
    try:
        args.cells = chosen_cells(args.cells or (SMOKE_CELLS if args.smoke else ["*"]))
    except ValueError as error:
        parser.error(f"--cells: expected MODEL:LINK:RANKS, but got {error}")
    return args


def chosen_cells(patterns: list[str]) -> list[Cell]:
    """Return the cells that match, in the order of the chart.

    Raises:
        ValueError: a pattern matches no cell.
    """
    known = [
        Cell(model, link, world_size)
        for model in MODELS
        for world_size in WORLD_SIZES
        for link in LINKS
    ]
    chosen: dict[Cell, None] = {}
    for pattern in patterns:
        matches = [cell for cell in known if fnmatchcase(str(cell), pattern)]
        chosen.update(dict.fromkeys(matches or [Cell.of(pattern)]))
    order = {cell: n for n, cell in enumerate(known)}
    return sorted(chosen, key=lambda cell: order.get(cell, len(order)))


def main() -> int:
    """Measure and report. Return 1 if a gradient was wrong."""
    args = parse()
    plan = Plan.of(args.seconds, smoke=args.smoke)
    title = "How much communication a step waits for"
    report = Report(args, title, backend=CPU_BACKEND, timed=TIMED)
    cells = args.cells
    if any(cell.link != LOOPBACK for cell in cells) and (reason := why_not()):
        report.show(f"The cells on shaped links are skipped: {reason}.")
        cells = [cell for cell in cells if cell.link == LOOPBACK]
    results: dict[Cell, Measured] = {}
    task = functools.partial(measure, smoke=args.smoke)
    for cell in cells:
        link = Link.of(cell.link)
        measured = run_ranks(task, cell.world_size, cell, plan, link=link)
        results[cell] = measured
        report.show(overlap_table(measured))
        report.count_wrong(measured.wrong.values())
        report.judge(verdicts(cell, measured))
    note = f"{CPU_BACKEND}. {report.header['date']}, torch {report.header['torch']}."
    name = f"_{args.name}" if args.name else ""
    content = {"cells": {str(c): each.as_json() for c, each in results.items()}}
    return report.finish(
        f"overlap_cpu{name}", content, lambda path: chart(path, results, note)
    )


if __name__ == "__main__":
    sys.exit(main())
