"""How much communication a step waits for: minidp beside torch's DDP, and the bound.

    python benchmarks/overlap.py                        # all cells: an hour
    python benchmarks/overlap.py --cells "mlp:*:2"      # cells with targets: 6 minutes
    python benchmarks/overlap.py --device cuda          # one GPU, a modelled wire
    python benchmarks/overlap.py --smoke                # does it run? no numbers

A cell is a model, a link and a number of ranks, e.g. mlp:2:2 for the MLP on a link of
2 Gbit/s between two ranks. All implementations take their steps in turn, in the same
processes, on replicas of one model. What each number means is in benchmarks/README.md.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import gc
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import groupby
from pathlib import Path

import torch
from rich.console import Console
from support.bars import Words
from support.baselines import (
    AFTER,
    AUTO,
    BARE,
    SETTLING,
    TORCH,
    AfterBackward,
    against_torch,
    auto,
    bare,
    has_auto,
    ours,
    torch_variants,
)
from support.bound import BoundWatcher
from support.estimates import ratio
from support.exposure import Exposure
from support.links import Link, measured_rate, why_not
from support.memory import Memory, measure_memory
from support.models import MODELS
from support.nets import Net
from support.output import check_native, results_folder, say_if_wrong
from support.ranks import KEEP_MEMORY, run_ranks
from support.report import (
    header,
    header_table,
    native_line,
    report_console,
    write_json,
    write_markdown,
)
from support.rounds import Contest, Implementation, Plan
from support.stacks import draw_stacks
from support.verdicts import Verdict, print_verdicts

FULL = Plan(seconds=30, warm_up=4, fewest=11, most=220, check_every=30)
SMOKE = Plan(seconds=0, warm_up=3, fewest=1, most=11, check_every=5)
SMOKE_CELLS = ["mlp:loopback:2", "resnet50:2:3"]
LOOPBACK = "loopback"
SMALL_CAP = "minidp 1 MiB"
RECORDED = " recorded"
BRIEF = 12  # steps of `auto` before its memory is measured: any layout is as large
# Targets, for `auto`: torch's steps over its own on the MLP at 2 Gbit/s; its steps over
# the bound at two ranks on slow links.
SPEEDUP_CELL, SPEEDUP = "mlp:2:2", 1.25
BOUND_LINKS, BOUND_LIMIT = ("1", "2"), 1.15


# -- what is measured ------------------------------------------------------------------


@dataclass(frozen=True)
class Cell:
    """One model, one link, one number of ranks."""

    model: str
    link: str  # Gbit/s, or loopback
    world_size: int

    def __str__(self) -> str:
        return f"{self.model}:{self.link}:{self.world_size}"

    @property
    def shaped(self) -> Link | None:
        """The link, if it has a rate."""
        return None if self.link == LOOPBACK else Link(float(self.link))

    @property
    def place(self) -> str:
        """For people."""
        cores = os.cpu_count() or 1
        crowded = f" on {cores} cores" if self.world_size > cores else ""
        return f"{self.world_size} ranks{crowded}, {self.shaped or LOOPBACK}"

    def net(self, *, smoke: bool) -> Net:
        """The model; the same on every rank."""
        torch.manual_seed(0)
        return MODELS[self.model].smoke() if smoke else MODELS[self.model].full()


def implementations(world_size: int, *, settling: int) -> list[Implementation]:
    """Collective: everything that takes part.

    The recorded one takes part for its bound; what recording costs shows as well.
    """
    mine = functools.partial(against_torch, world_size=world_size)
    everyone = [
        Implementation(BARE, bare),
        mine(AFTER, AfterBackward),
        *(
            mine(name, wrap, environment=environment)
            for name, (wrap, environment) in torch_variants().items()
        ),
        mine("minidp", ours()),
        mine(SMALL_CAP, ours(bucket_cap_mb=1)),
    ]
    best = everyone[-1]
    if has_auto():
        best = dataclasses.replace(auto(ours, world_size), settling=settling)
        everyone.append(best)
    recorded = {"name": best.name + RECORDED, "watcher": BoundWatcher}
    return [*everyone, dataclasses.replace(best, **recorded)]


def measure(
    cells: Sequence[Cell], plan: Plan, *, smoke: bool, native: str
) -> list[Exposure]:
    """On every rank: measure cells of one place, one after the other."""
    check_native(native)
    settling = 2 if smoke else SETTLING
    found = []
    for cell in cells:
        everyone = implementations(cell.world_size, settling=settling)
        net = cell.net(smoke=smoke)
        note = f"; alone: {measured_rate(2**20 if smoke else 2**24)}"
        measured = Contest(everyone, net, plan, label=str(cell)).run()
        found.append(Exposure(f"{net.title}; {cell.place}", measured, note))
        gc.collect()
    return found


def measure_peaks(cell: Cell, *, smoke: bool) -> dict[str, Memory]:
    """On every rank: memory, which does not depend on the link."""
    everyone = implementations(cell.world_size, settling=2 if smoke else BRIEF)
    everyone = [each for each in everyone if not each.name.endswith(RECORDED)]
    return measure_memory(everyone, cell.net(smoke=smoke))


# -- what it means ---------------------------------------------------------------------


def verdicts(cell: Cell, exposure: Exposure) -> Iterator[Verdict]:
    """The targets of a cell."""
    times, title = exposure.measured.times, exposure.title
    if AUTO not in times:
        return
    if str(cell) == SPEEDUP_CELL:
        speedup = ratio(times[TORCH], times[AUTO])
        what = f"torch's step over auto's; {title}"
        yield Verdict(what, speedup, SPEEDUP, at_least=True)
    limit = max(1.0, exposure.noise[1])
    what = f"auto's step over torch's, p90 of torch over itself; {title}"
    yield Verdict(what, ratio(times[AUTO], times[TORCH]), limit)
    over_bound = exposure.over_bound(AUTO)
    if cell.world_size == 2 and cell.link in BOUND_LINKS and over_bound is not None:
        yield Verdict(f"auto's step over the bound; {title}", over_bound, BOUND_LIMIT)


def chart(path: Path, results: Mapping[Cell, Exposure], date: str) -> None:
    """Write the bar chart: a row per model and number of ranks, a column per link."""
    words = Words(
        title="What a step computes, and what it waits for communication",
        unit="ms for each step: median, p10-p90",
        footnote=f"CPU, Gloo, one thread per rank, {date}. torch {torch.__version__}. "
        "Bound: no layout of buckets can be faster.",
    )
    rows = groupby(results, key=lambda cell: (cell.model, cell.world_size))
    draw_stacks(path, words, [[results[cell] for cell in row] for _, row in rows])


# -- the program -----------------------------------------------------------------------


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").partition("\n")[0],
        epilog="benchmarks/README.md says what each number means.",
    )
    add = parser.add_argument
    add(
        "--smoke",
        action="store_true",
        help="tiny models and a few rounds, to see that everything runs and all "
        "gradients are right; leaves no files unless --out is given",
    )
    add(
        "--cells",
        nargs="+",
        metavar="MODEL:LINK:RANKS",
        help="what to measure, with * for anything, e.g. 'mlp:*:2' or mlp:2:4; models "
        f"are {', '.join(MODELS)} (default: all of --links and --world-sizes)",
    )
    add(
        "--links",
        nargs="+",
        default=[LOOPBACK, "10", "2", "1"],
        metavar="L",
        help="networks: rates in Gbit/s, and loopback (default: loopback 10 2 1)",
    )
    add(
        "--world-sizes",
        nargs="+",
        type=int,
        default=[2, 4],
        metavar="N",
        help="numbers of ranks (default: 2 4)",
    )
    add(
        "--seconds",
        type=float,
        default=FULL.seconds,
        help=f"time for the rounds of each cell (default: {FULL.seconds:g})",
    )
    add(
        "--device",
        choices=("cpu", "cuda"),
        default="cpu",
        help="cuda: one GPU, real streams, and a wire that a comm hook models",
    )
    add(
        "--out",
        type=Path,
        metavar="FOLDER",
        help="where table, numbers and chart go (default: benchmarks/results)",
    )
    return parser.parse_args()


def chosen_cells(args: argparse.Namespace, console: Console) -> list[Cell]:
    """Cells in the order of the chart, without those that cannot be measured here."""
    every = [
        Cell(model, link, world_size)
        for model in MODELS
        for world_size in args.world_sizes
        for link in args.links
    ]
    if args.smoke:
        every = [Cell(m, link, int(n)) for m, link, n in map(_parts, SMOKE_CELLS)]
    patterns = args.cells or ["*"]
    cells = [c for c in every if any(fnmatchcase(str(c), p) for p in patterns)]
    if not cells:
        known = ", ".join(map(str, every))
        raise SystemExit(f"No cell is called {' or '.join(patterns)}, but: {known}")
    reason = why_not() if any(cell.shaped for cell in cells) else ""
    if reason:
        console.print(f"The cells on shaped links are skipped: {reason}.\n")
        cells = [cell for cell in cells if not cell.shaped]
    return cells


def _parts(cell: str) -> list[str]:
    return cell.split(":")


def run(args: argparse.Namespace, folder: Path) -> bool:
    """Measure, print, write; return whether all gradients were right."""
    plan = SMOKE if args.smoke else dataclasses.replace(FULL, seconds=args.seconds)
    console = report_console()
    lines = header(
        native=native_line(),
        backend="gloo, 1 thread per rank, float32",
        timed="forward and backward; not zero_grad(set_to_none=True)",
        memory=" ".join(f"{name}={value}" for name, value in KEEP_MEMORY.items()),
        rounds=f"{plan.warm_up} to warm up, then {plan.seconds:g} s for each cell",
    )
    console.print(header_table(lines), "")
    results: dict[Cell, Exposure] = {}
    peaks: dict[tuple[str, int], dict[str, Memory]] = {}
    for cell in chosen_cells(args, console):
        key, size = (cell.model, cell.world_size), cell.world_size
        if key not in peaks:
            task = functools.partial(measure_peaks, smoke=args.smoke)
            peaks[key] = run_ranks(task, size, cell)
        task = functools.partial(measure, smoke=args.smoke, native=lines["native"])
        (exposure,) = run_ranks(task, size, [cell], plan, link=cell.shaped)
        results[cell] = dataclasses.replace(exposure, memory=peaks[key])
        console.print(results[cell].table(), "")
    found = [verdict for result in results.items() for verdict in verdicts(*result)]
    if not args.smoke:
        print_verdicts(console, "paired by round", found)
    lines["load after"] = f"{os.getloadavg()[0]:.1f} busy processes, last minute"
    console.print("load after", lines["load after"])
    counts = [n for e in results.values() for n in e.measured.wrong.values()]
    is_right = say_if_wrong(console, counts)
    stem = f"overlap_cpu_{lines['date']}"
    write_json(
        folder / f"{stem}.json",
        {
            "header": lines,
            "targets": [verdict.as_json() for verdict in found],
            "cells": {str(c): exposure.as_json() for c, exposure in results.items()},
        },
    )
    title = "How much communication a step waits for"
    write_markdown(folder / f"{stem}.md", title, console)
    chart(folder / f"{stem}.png", results, lines["date"])
    return is_right


def main() -> int:
    """Run; 1 if a gradient was wrong, whatever the targets say."""
    args = parse()
    with results_folder(args.out, smoke=args.smoke) as folder:
        return 0 if run(args, folder) else 1


if __name__ == "__main__":
    sys.exit(main())
