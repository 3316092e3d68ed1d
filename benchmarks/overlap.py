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
import os
import sys
from collections.abc import Iterator, Mapping
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
    bounded,
    has_auto,
    ours,
    search,
    torch_variants,
)
from support.estimates import ratio
from support.exposure import Exposure
from support.links import Link, measured_rate, why_not
from support.memory import Memory, measure_memory
from support.models import GPU_MODELS, MODELS
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
from support.rounds import Contest, Implementation, Plan, Where
from support.stacks import draw_stacks
from support.verdicts import Verdict, print_verdicts
from support.wire import ModelledWire, over_wire, write_trace

from minidp._schedule import Network

FULL = Plan(seconds=30, warm_up=4, fewest=11, most=220, check_every=30)
SMOKE = Plan(seconds=0, warm_up=3, fewest=1, most=11, check_every=5)
SMOKE_CELLS = ["mlp:loopback:2", "resnet50:2:3"]
LOOPBACK = "loopback"
SMALL_CAP = "minidp 1 MiB"
BACKENDS = {
    "cpu": "CPU, Gloo, 1 thread per rank, float32",
    "cuda": "one GPU, NCCL with one rank, a comm hook that waits, float32",
}
WIRE_LINKS, WIRE_LATENCY = ("400", "100", "25"), 20e-6  # Gbit/s; seconds
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
        if self.world_size == 1:
            return f"one GPU, a modelled wire of {self.link} Gbit/s"
        cores = os.cpu_count() or 1
        crowded = f" on {cores} cores" if self.world_size > cores else ""
        return f"{self.world_size} ranks{crowded}, {self.shaped or LOOPBACK}"


@dataclass(frozen=True)
class Options:
    """What every rank is told.

    Args:
        device: cpu, or cuda: then the link is modelled.
        is_small: models at the size of a smoke test.
        native: what each rank must have of the native extension.
        is_brief: auto need not have its best layout, for memory: any is as large.
    """

    device: str
    is_small: bool
    native: str
    is_brief: bool = False

    @property
    def where(self) -> Where:
        """All ranks."""
        return Where(device=self.device)

    @property
    def settling(self) -> int:
        """Steps until `auto` has its layout."""
        return 2 if self.is_small else SETTLING

    def net(self, cell: Cell) -> Net:
        """The model of a cell, the same on every rank."""
        torch.manual_seed(0)
        if self.is_small:
            return MODELS[cell.model].smoke().to(self.device)
        if self.device == "cuda":
            return GPU_MODELS[cell.model]().cuda()
        return MODELS[cell.model].full()

    def best(self, world_size: int, net: Net) -> Implementation:
        """Collective: auto, with the layout that it finds now."""
        if self.is_brief:  # nothing may run in this process before
            return dataclasses.replace(
                auto(ours, world_size), settling=min(self.settling, BRIEF)
            )
        chosen = search(net, self.where, self.settling)
        return against_torch(AUTO, ours(bucket_layout=chosen), world_size)

    def implementations(self, cell: Cell, net: Net) -> list[Implementation]:
        """Collective: everything that takes part, on the cell's network.

        On a GPU auto, which has nothing to measure with one rank, does not take part.
        """
        if self.device == "cpu":
            best = self.best(cell.world_size, net) if has_auto() else None
            return bounded(implementations(cell.world_size, best), cell.shaped)
        everyone = implementations(cell.world_size, None)
        network = Network(WIRE_LATENCY, float(cell.link) * 1e9 / 8)
        wire = ModelledWire(network)
        after = functools.partial(AfterBackward, carry=wire.carry)
        wraps = {BARE: bare, AFTER: after}
        hooked = over_wire(wire)
        return [
            dataclasses.replace(each, wrap=wraps.get(each.name, hooked(each.wrap)))
            for each in everyone
        ]


def implementations(
    world_size: int, best: Implementation | None
) -> list[Implementation]:
    """Collective: everything that takes part.

    Args:
        world_size: of the cell.
        best: auto; None: there is none.
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
    return everyone if best is None else [*everyone, best]


def measure(cell: Cell, plan: Plan, options: Options) -> Exposure:
    """On every rank."""
    check_native(options.native)
    net = options.net(cell)
    everyone = options.implementations(cell, net)
    note = ""
    if options.device == "cpu":
        note = f"; alone: {measured_rate(2**20 if options.is_small else 2**24)}"
    contest = Contest(everyone, net, plan, options.where, label=str(cell))
    return Exposure(f"{net.title}; {cell.place}", contest.run(), note)


def measure_peaks(cell: Cell, options: Options) -> dict[str, Memory]:
    """On every rank: memory, which does not depend on the link."""
    options, net = dataclasses.replace(options, is_brief=True), options.net(cell)
    everyone = options.implementations(cell, net)
    return measure_memory(everyone, net, options.where)


def trace(cell: Cell, options: Options, folder: Path) -> None:
    """On a GPU: write a Chrome trace of a step, of torch's and of minidp's best."""
    net = options.net(cell)
    everyone = options.implementations(cell, net)
    for each in everyone:
        if each.name in (TORCH, everyone[-1].name):
            name = f"trace_{cell.model}_{cell.link}_{each.name.replace(' ', '_')}"
            write_trace(folder / f"{name}.json.gz", each, net, options.where)


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


def chart(path: Path, results: Mapping[Cell, Exposure], date: str, device: str) -> None:
    """Write the bar chart: a row per model and number of ranks, a column per link."""
    words = Words(
        title="What a step computes, and what it waits for communication",
        unit="ms for each step: median, p10-p90",
        footnote=f"{BACKENDS[device]}. {date}, torch {torch.__version__}.\n"
        "Bound: no layout could have ended a step earlier, its gradients coming when "
        "they did; the median over the steps.",
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
        metavar="L",
        help="networks: rates in Gbit/s, and loopback (default: loopback 10 2 1; on a "
        "GPU, where they are modelled: 400 100 25)",
    )
    add(
        "--world-sizes",
        nargs="+",
        type=int,
        metavar="N",
        help="numbers of ranks (default: 2 4; on a GPU always 1)",
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
        "--name",
        default="",
        help="goes into the names of the files, so that some cells do not overwrite "
        "others of the same day",
    )
    add(
        "--out",
        type=Path,
        metavar="FOLDER",
        help="where table, numbers and chart go (default: benchmarks/results)",
    )
    args = parser.parse_args()
    if args.device == "cuda":
        args.links, args.world_sizes = args.links or list(WIRE_LINKS), [1]
    else:
        args.links = args.links or [LOOPBACK, "10", "2", "1"]
        args.world_sizes = args.world_sizes or [2, 4]
    return args


def chosen_cells(args: argparse.Namespace, console: Console) -> list[Cell]:
    """Cells in the order of the chart, without those that cannot be measured here."""
    every = [
        Cell(model, link, world_size)
        for model in MODELS
        for world_size in args.world_sizes
        for link in args.links
    ]
    if args.smoke and args.device == "cpu":
        every = [Cell(m, link, int(n)) for m, link, n in map(_parts, SMOKE_CELLS)]
    patterns = args.cells or ["*"]
    cells = [c for c in every if any(fnmatchcase(str(c), p) for p in patterns)]
    if not cells:
        known = ", ".join(map(str, every))
        raise SystemExit(f"No cell is called {' or '.join(patterns)}, but: {known}")
    is_shaped = args.device == "cpu" and any(cell.shaped for cell in cells)
    reason = why_not() if is_shaped else ""
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
        backend=BACKENDS[args.device],
        timed="forward and backward; not zero_grad(set_to_none=True)",
        memory=" ".join(f"{name}={value}" for name, value in KEEP_MEMORY.items()),
        rounds=f"{plan.warm_up} to warm up, then {plan.seconds:g} s for each cell",
    )
    console.print(header_table(lines), "")
    options = Options(args.device, args.smoke, lines["native"])
    is_cuda = args.device == "cuda"
    results: dict[Cell, Exposure] = {}
    peaks: dict[tuple[str, int], dict[str, Memory]] = {}
    for cell in chosen_cells(args, console):
        key, size = (cell.model, cell.world_size), cell.world_size
        if key not in peaks:
            peaks[key] = run_ranks(measure_peaks, size, cell, options, is_cuda=is_cuda)
            if is_cuda:
                run_ranks(trace, size, cell, options, folder, is_cuda=True)
        link = None if is_cuda else cell.shaped
        exposure = run_ranks(
            measure, size, cell, plan, options, link=link, is_cuda=is_cuda
        )
        results[cell] = dataclasses.replace(exposure, memory=peaks[key])
        console.print(results[cell].table(), "")
    found = [verdict for result in results.items() for verdict in verdicts(*result)]
    if not args.smoke:
        print_verdicts(console, "paired by round", found)
    lines["load after"] = f"{os.getloadavg()[0]:.1f} busy processes, last minute"
    console.print("load after", lines["load after"])
    counts = [n for e in results.values() for n in e.measured.wrong.values()]
    is_right = say_if_wrong(console, counts)
    name = f"_{args.name}" if args.name else ""
    stem = f"overlap_{args.device}{name}_{lines['date']}"
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
    chart(folder / f"{stem}.png", results, lines["date"], args.device)
    return is_right


def main() -> int:
    """Run; 1 if a gradient was wrong, whatever the targets say; 2 without a GPU."""
    args = parse()
    if args.device == "cuda" and not torch.cuda.is_available():
        print("No GPU here: torch.cuda.is_available() is False.", file=sys.stderr)
        return 2
    with results_folder(args.out, smoke=args.smoke) as folder:
        return 0 if run(args, folder) else 1


if __name__ == "__main__":
    sys.exit(main())
