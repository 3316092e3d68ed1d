"""What data parallelism adds to a training step: minidp beside torch's DDP, on CPU.

    python benchmarks/overhead.py                       # everything: 9 minutes
    python benchmarks/overhead.py --cells small --seconds 5
    python benchmarks/overhead.py --smoke               # does it run? no numbers

All implementations take their steps in turn, in the same processes, on replicas of one
model: what slows the machine down slows all of them down. Gradients are compared bit
by bit. What each number means is in benchmarks/README.md.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import gc
import inspect
import json
import os
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from support.bars import Words
from support.comparison import PLAIN, Comparison
from support.estimates import Estimate, ratio
from support.links import Link, measured_rate, why_not
from support.nets import NETS
from support.pairs import Pair, draw_pairs
from support.ranks import KEEP_MEMORY, run_ranks
from support.report import (
    ROOT,
    header,
    header_table,
    native_line,
    report_console,
    write_json,
    write_markdown,
)
from support.rounds import Contest, Implementation, Plan
from support.verdicts import Verdict, print_verdicts
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import minidp
import minidp.native

FULL = Plan(seconds=30, warm_up=5, fewest=18, most=450, check_every=50)
SMOKE = Plan(seconds=0, warm_up=3, fewest=1, most=9, check_every=5)
# Targets. For the small model: minidp's extra time per parameter over torch's, with and
# without the native extension, by world size. Everywhere else: the time of a step over
# torch's in the same mode. For models of large parameters: of minidp's fastest mode to
# torch's fastest.
EXTRA_LIMITS = {True: {1: 0.25, 2: 0.35}, False: {1: 0.5, 2: 0.9}}
STEP_LIMIT = 1.03
FASTEST_LIMIT = 1.0
LARGE = ("mlp", "resnet50", "gpt2")


# -- what is measured ------------------------------------------------------------------


def implementations(world_size: int) -> list[Implementation]:
    """Everything that takes part, with its reference for gradients.

    Minidp must reproduce torch in the same mode. Torch's other modes are compared with
    its default only up to two ranks: they lay out buckets differently, which from
    three ranks on changes bits. Without a wrapper nothing is averaged.
    """
    view = {"gradient_as_bucket_view": True}
    unused = {"find_unused_parameters": True}
    last_cap = {"DDP_SET_LAST_BUCKET_CAP": "1"}  # torch reads it at its rebuild
    theirs = functools.partial(functools.partial, DistributedDataParallel)
    ours = functools.partial(functools.partial, minidp.DataParallel)
    same = "torch" if world_size <= 2 else None
    everyone = [
        Implementation(PLAIN, _no_wrapper, "torch" if world_size == 1 else None),
        Implementation("torch", theirs(), "torch"),
        Implementation("torch view", theirs(**view), same),
        Implementation("torch find unused", theirs(**unused), same),
        Implementation("torch batched copy", theirs(batched_grad_copy=True), same),
        Implementation("torch last bucket cap", theirs(), same, last_cap),
        Implementation("minidp", ours(), "torch"),
        Implementation("minidp view", ours(**view), "torch view"),
        Implementation("minidp find unused", ours(**unused), "torch find unused"),
    ]
    known = inspect.signature(DistributedDataParallel).parameters
    if "batched_grad_copy" not in known:  # not in torch 2.11
        everyone = [each for each in everyone if each.name != "torch batched copy"]
    return everyone


def _no_wrapper(module: nn.Module) -> nn.Module:
    return module


@dataclass(frozen=True)
class Cell:
    """One model at one world size."""

    net: str
    world_size: int
    link: Link | None = None

    @property
    def place(self) -> str:
        """For people."""
        ranks = "1 rank" if self.world_size == 1 else f"{self.world_size} ranks"
        return ranks + (f" on a {self.link.gbit:g} Gbit/s link" if self.link else "")

    @property
    def base(self) -> str:
        """The implementation that all are compared with."""
        return "torch find unused" if self.net == "unused" else "torch"

    def implementations(self) -> list[Implementation]:
        """Who takes part: with an unused layer, only who can do without a gradient."""
        everyone = implementations(self.world_size)
        if self.net == "gpt2":  # half a GiB of buckets for each of them on each rank
            names = [PLAIN, "torch", "torch view", "minidp", "minidp view"]
            names += ["torch batched copy"] * (self.world_size == 1)
            return [each for each in everyone if each.name in names]
        if self.net != "unused":
            return everyone
        return [
            dataclasses.replace(each, reference=each.reference and self.base)
            for each in everyone
            if each.name in (PLAIN, self.base, "minidp find unused")
        ]

    def adapted(self, plan: Plan) -> Plan:
        """The plan for this cell: a round of the largest model takes seconds."""
        if self.net != "gpt2":
            return plan
        return dataclasses.replace(
            plan, warm_up=min(plan.warm_up, 3), fewest=min(plan.fewest, 10)
        )


def measure(
    cells: Sequence[Cell], plan: Plan, *, smoke: bool, native: str
) -> list[Comparison]:
    """On every rank: measure cells of one world size, one after the other."""
    if native_line() != native:  # its sources were changed since this run started
        raise RuntimeError(f"native extension {native}, but on a rank {native_line()}")
    found = []
    for cell in cells:
        torch.manual_seed(0)
        net = NETS[cell.net].smoke() if smoke else NETS[cell.net].full()
        note = f"; measured rate {measured_rate().gbit:.2f} Gbit/s" if cell.link else ""
        measured = Contest(cell.implementations(), net, cell.adapted(plan)).run()
        title = f"{net.title}; {cell.place}"
        found.append(Comparison(title, cell.base, measured, note))
        gc.collect()
    return found


# -- what it means ---------------------------------------------------------------------


def verdicts(cell: Cell, comparison: Comparison) -> Iterator[Verdict]:
    """The targets of a cell."""
    rows, title = comparison.rows, comparison.title
    if cell.net == "small":
        extra, limits = rows["minidp"].extra_ratio, EXTRA_LIMITS[is_native()]
        if extra is not None and cell.world_size in limits:
            limit = limits[cell.world_size]
            yield Verdict(f"extra per parameter of minidp; {title}", extra, limit)
        return
    for name, row in rows.items():
        if row.same_mode is not None:
            yield Verdict(f"step of {name}; {title}", row.same_mode, STEP_LIMIT)
    if cell.net in LARGE:
        ours, theirs = comparison.fastest("minidp"), comparison.fastest("torch")
        times = comparison.measured.times
        yield Verdict(
            f"step of {ours} over {theirs}, the fastest modes; {title}",
            ratio(times[ours], times[theirs]),
            FASTEST_LIMIT,
        )


def is_native() -> bool:
    """Whether minidp runs with its native extension."""
    return minidp.native.library() is not None


def chart(path: Path, content: Mapping[str, Any]) -> None:
    """Write the chart of a result file: a row per model and number of ranks."""
    groups: dict[str, list[Pair]] = {}
    for cell in content["cells"]:
        rows = {row["name"]: row for row in cell["rows"]}
        model, _, place = cell["title"].partition("; ")
        if "torch" not in rows or "minidp" not in rows:  # on the slow link
            continue
        ms = 1e3 * cell["num_params"]
        extra = {who: Estimate(**rows[who]["extra"]) for who in ("torch", "minidp")}
        bars = {who: estimate.scaled(ms) for who, estimate in extra.items()}
        groups.setdefault(place, []).append(Pair(model, bars))
    header = content["header"]
    native = "with" if header["native"] == "loaded" else "without"
    words = Words(
        title="What data parallelism adds to a step (forward and backward), in ms",
        unit="ms added to each step (logarithmic)",
        footnote="Default mode. Median difference to the bare model in the same round, "
        f"and its 95% interval.\nCPU, Gloo on loopback, 1 thread per rank; torch "
        f"{header['torch']}; minidp {native} its native extension; {header['date']}.",
    )
    if groups:
        draw_pairs(path, words, groups)


# -- the program -----------------------------------------------------------------------


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").partition("\n")[0],
        epilog="benchmarks/README.md says what each number means.",
    )
    add, cells = parser.add_argument, list(NETS)
    cells[cells.index("unused")] = "link"
    add(
        "--smoke",
        action="store_true",
        help="tiny models and a few rounds, to see that everything runs and all "
        "gradients are right; leaves no files unless --out is given",
    )
    add(
        "--cells",
        nargs="+",
        choices=cells,
        default=cells,
        metavar="CELL",
        help=f"what to measure, of: {', '.join(cells)} (default: all); link is a model "
        "with an unused layer on a slow network",
    )
    add(
        "--world-sizes",
        nargs="+",
        type=int,
        default=[1, 2],
        metavar="N",
        help="numbers of ranks (default: 1 2); link always has 2",
    )
    add(
        "--seconds",
        type=float,
        default=FULL.seconds,
        help=f"time for each cell (default: {FULL.seconds:g})",
    )
    add(
        "--gbit",
        type=float,
        default=2.0,
        help="rate of the slow network, in Gbit/s (default: 2)",
    )
    add(
        "--out",
        type=Path,
        metavar="FOLDER",
        help="where table, numbers and chart go (default: benchmarks/results)",
    )
    add(
        "--redraw",
        type=Path,
        metavar="FILE",
        help="measure nothing: draw the chart of a .json that is there",
    )
    return parser.parse_args()


def groups_of(args: argparse.Namespace, console: Console) -> Iterator[list[Cell]]:
    """Cells by the rank processes they share: none in a full run."""
    sizes = args.world_sizes
    cells = [Cell(net, n) for net in args.cells if net != "link" for n in sizes]
    if args.smoke:
        groups = ([cell for cell in cells if cell.world_size == n] for n in sizes)
        yield from filter(None, groups)
    else:
        yield from ([cell] for cell in cells)
    if "link" in args.cells:
        reason = why_not()
        if reason:
            console.print(f"The cell on a slow network is skipped: {reason}.\n")
        else:
            yield [Cell("unused", 2, Link(args.gbit))]


def run(args: argparse.Namespace, folder: Path) -> bool:
    """Measure, print, write; return whether all gradients were right."""
    plan = SMOKE if args.smoke else dataclasses.replace(FULL, seconds=args.seconds)
    console = report_console()
    lines = header(
        native=native_line(),
        backend="gloo on the loopback device, 1 thread per rank, float32",
        ranks=" and ".join(map(str, args.world_sizes)),
        timed="forward and backward; not zero_grad(set_to_none=True)",
        memory=" ".join(f"{name}={value}" for name, value in KEEP_MEMORY.items()),
        rounds=f"{plan.warm_up} to warm up, then {plan.seconds:g} s for each cell",
    )
    console.print(header_table(lines), "")
    results: list[tuple[Cell, Comparison]] = []
    for group in groups_of(args, console):
        size, link = group[0].world_size, group[0].link
        task = functools.partial(measure, smoke=args.smoke, native=lines["native"])
        comparisons = run_ranks(task, size, group, plan, link=link)
        for cell, comparison in zip(group, comparisons, strict=True):
            console.print(comparison.table(), "")
            results.append((cell, comparison))
    found = [verdict for result in results for verdict in verdicts(*result)]
    if not args.smoke:
        print_verdicts(console, "ratio to torch in the same mode", found)
    lines["load after"] = f"{os.getloadavg()[0]:.1f} busy processes, last minute"
    console.print("load after", lines["load after"])
    wrong = [n for _, c in results for n in c.measured.wrong.values() if n]
    if wrong:
        console.print(
            "Some gradients are WRONG: see the last column.", style="bold red"
        )

    folder.mkdir(parents=True, exist_ok=True)
    kind = "native" if is_native() else "python"
    stem = f"overhead_cpu_{kind}_{lines['date']}"
    content = {
        "header": lines,
        "targets": [verdict.as_json() for verdict in found],
        "cells": [comparison.as_json() for _, comparison in results],
    }
    write_json(folder / f"{stem}.json", content)
    title = "What data parallelism adds to a training step"
    write_markdown(folder / f"{stem}.md", title, console)
    chart(folder / f"{stem}.png", content)  # may lack matplotlib
    return not wrong


def main() -> int:
    """Run; 1 if a gradient was wrong, whatever the targets say."""
    args = parse()
    if args.redraw:
        chart(args.redraw.with_suffix(".png"), json.loads(args.redraw.read_text()))
        return 0
    with tempfile.TemporaryDirectory() as scratch:
        if not args.smoke:
            folder = args.out or ROOT / "benchmarks" / "results"
        else:
            folder = args.out or Path(scratch)
            os.environ.setdefault("MPLCONFIGDIR", scratch)  # matplotlib's font cache
        return 0 if run(args, folder) else 1


if __name__ == "__main__":
    sys.exit(main())
