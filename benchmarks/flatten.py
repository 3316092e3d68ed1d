"""Flatten and unflatten alone: the copies between gradients and a bucket's buffer.

    python benchmarks/flatten.py                 # everything: about 3 minutes
    python benchmarks/flatten.py --seconds 2     # while working
    python benchmarks/flatten.py --smoke         # does it run? no numbers

All ways of copying take their turn in one run, on the same memory; the ceiling is a
plain copy of as many bytes. What the columns mean is in benchmarks/README.md.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import gc
import math
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
from rich.table import Table
from rich.text import Text
from support.comparison import short, with_interval
from support.copies import (
    CEILING,
    DIVISOR,
    Bucket,
    Way,
    call_python_kernels,
    flatten_ways,
    unflatten_ways,
)
from support.estimates import Estimate, Times, difference, ratio
from support.nets import resnet50_shapes
from support.report import (
    ROOT,
    header,
    header_table,
    native_line,
    report_console,
    write_json,
    write_markdown,
)
from support.rounds import Plan, turn
from support.verdicts import Verdict, print_verdicts

from minidp import native

FULL = Plan(seconds=8, warm_up=3, fewest=30, most=3000, check_every=0)
SMOKE = Plan(seconds=0, warm_up=1, fewest=1, most=12, check_every=0)
ROTATED_BYTES = 256 * 2**20  # gradients and buffers together: no cache holds them
# Targets of the native kernels.
SMALL_LIMIT = 0.1  # us per parameter of 64 elements
LARGE_LIMIT = 0.95  # of the ceiling's speed, from LARGE_BYTES on
LARGE_BYTES = 24 * 2**20


# -- what is measured ------------------------------------------------------------------


@dataclass(frozen=True)
class Cell:
    """One bucket."""

    what: str
    shapes: Sequence[tuple[int, ...]]
    dtype: torch.dtype = torch.float32
    device: str = "cpu"

    @property
    def num_bytes(self) -> int:
        """Of the bucket."""
        size = torch.empty((), dtype=self.dtype).element_size()
        return size * sum(map(math.prod, self.shapes))

    @property
    def num_buckets(self) -> int:
        """How many take turns: one that fits into caches is alone and stays there."""
        if self.num_bytes < 2**23:
            return 1
        return max(2, -(-ROTATED_BYTES // (2 * self.num_bytes)))

    @property
    def title(self) -> str:
        """For people."""
        place = " on the GPU" * (self.device == "cuda")
        return f"{self.what}, {str(self.dtype).removeprefix('torch.')}{place}"


def cells(device: str, *, smoke: bool) -> list[Cell]:
    """The buckets of a device; the first and the last kind in bfloat16 too."""
    kinds = [
        Cell("1000 x 64", [(64,)] * 1000),
        Cell("1000 x 1024", [(1024,)] * 1000),
        Cell("160 x 160,000", [(400, 400)] * 160),
        Cell("12 x 589,824", [(768, 768)] * 12),
        Cell("first 25 MiB of ResNet-50", _first(resnet50_shapes(), 25 * 2**18)),
    ]
    halves = [kinds[0], Cell(kinds[-1].what, _first(resnet50_shapes(), 25 * 2**19))]
    if smoke:
        kinds = [Cell("9 x 8", [(8,)] * 9), Cell("mixed", [(3, 5), (2, 200, 90), (7,)])]
        halves = kinds
    elif device == "cuda":
        kinds = [kinds[0], kinds[-1]]
    kinds += [dataclasses.replace(each, dtype=torch.bfloat16) for each in halves]
    return [dataclasses.replace(each, device=device) for each in kinds]


def _first(shapes: Sequence[tuple[int, ...]], numel: int) -> list[tuple[int, ...]]:
    """Shapes from the start, until they have so many elements."""
    before = np.cumsum([0, *map(math.prod, shapes)])
    return [shape for shape, n in zip(shapes, before, strict=False) if n < numel]


def race(
    ways: Sequence[Way], buckets: Sequence[Bucket], plan: Plan
) -> dict[str, Times]:
    """Seconds of each round. Each call meets another bucket than the one before."""
    clock = buckets[0].seconds
    count = len(ways)
    trial = [
        sum(
            clock(way.call, buckets[(k + n) % len(buckets)])
            for k, way in enumerate(ways)
        )
        for n in range(plan.warm_up)
    ]
    wanted = min(max(plan.seconds / min(trial), plan.fewest), plan.most)
    num_rounds = max(1, round(wanted / count)) * count
    gc.collect()
    times = np.empty((count, num_rounds))
    for number in range(num_rounds):
        for place, k in enumerate(turn(number, count)):
            bucket = buckets[(number + place) % len(buckets)]
            times[k, number] = clock(ways[k].call, bucket)
    return {way.name: times[k] for k, way in enumerate(ways)}


def measure(cell: Cell, library: ModuleType | None, plan: Plan) -> list[Race]:
    """Both directions of one cell."""
    torch.manual_seed(0)
    make = functools.partial(Bucket, cell.shapes, cell.dtype, cell.device, library)
    buckets = [make() for _ in range(cell.num_buckets)]
    found = []
    for direction, make_ways in (
        ("flatten", flatten_ways),
        ("unflatten", unflatten_ways),
    ):
        ways = make_ways(library)
        wrong = {way.name: way.num_wrong(buckets[0]) for way in ways}
        times = race(ways, buckets, plan)
        for way in ways:
            wrong[way.name] = _sum(wrong[way.name], way.num_wrong(buckets[-1]))
        found.append(Race(cell, direction, times, wrong))
    return found


def _sum(before: int | None, after: int | None) -> int | None:
    return None if before is None or after is None else before + after


# -- what it means ---------------------------------------------------------------------


@dataclass(frozen=True)
class Race:
    """One direction of one cell."""

    cell: Cell
    direction: str
    times: Mapping[str, Times]
    wrong: Mapping[str, int | None]

    @property
    def title(self) -> str:
        """For people."""
        return f"{self.direction}, {self.cell.title}"

    def speed(self, name: str) -> Estimate:
        """Of a way of copying, in units of the ceiling's."""
        return ratio(self.times[CEILING], self.times[name])

    def micros_per_tensor(self, name: str) -> Estimate:
        """The median."""
        times = self.times[name]
        nothing = np.zeros_like(times)
        return difference(times, nothing).scaled(1e6 / len(self.cell.shapes))

    def gigabytes(self, name: str) -> float:
        """Read and written in a second."""
        return 2e-9 * self.cell.num_bytes / float(np.median(self.times[name]))

    def table(self) -> Table:
        """For printing."""
        cell, num_rounds = self.cell, len(self.times[CEILING])
        facts = (
            f"{len(cell.shapes)} tensors, {cell.num_bytes / 2**20:.3g} MiB; "
            f"{cell.num_buckets} in turn; {num_rounds} rounds"
        )
        title = Text.assemble((self.title, "bold"), "\n", (facts, "dim"))
        table = Table(title=title, title_justify="left", box=None, padding=(0, 1))
        table.add_column("\nway", no_wrap=True)
        for column in (
            "us\nmedian",
            "\np10-p90",
            "us per\ntensor",
            "\nGB/s",
            f"speed /\n{CEILING} (95%)",
            "\n#wrong",
        ):
            table.add_column(column, justify="right", no_wrap=True)
        for name, times in self.times.items():
            low, median, high = (short(us) for us in _percentiles(times))
            wrong = self.wrong[name]
            table.add_row(
                name,
                median,
                f"{low}-{high}",
                f"{self.micros_per_tensor(name).value:.3f}",
                f"{self.gigabytes(name):.2f}",
                with_interval(self.speed(name)),
                "-" if wrong is None else str(wrong),
                style="bold" if name.startswith("native") else "",
            )
        return table

    def as_json(self) -> dict[str, Any]:
        """For a file; of thousands of calls every twentieth part."""
        rows = []
        for name, times in self.times.items():
            parts = np.percentile(1e6 * times, range(0, 101, 5))
            rows.append(
                {
                    "name": name,
                    "p10_median_p90_microseconds": _percentiles(times),
                    "microseconds_per_tensor": vars(self.micros_per_tensor(name)),
                    "gigabytes_per_second": self.gigabytes(name),
                    "speed_over_ceiling": vars(self.speed(name)),
                    "wrong": self.wrong[name],
                    "rounds": len(times),
                    "microseconds_at_0_5_to_100_percent": _words(parts),
                }
            )
        return {
            "title": self.title,
            "num_tensors": len(self.cell.shapes),
            "num_bytes": self.cell.num_bytes,
            "buckets_in_turn": self.cell.num_buckets,
            "rows": rows,
        }


def _words(micros: Times) -> str:
    return " ".join(f"{each:.1f}" for each in micros)


def _percentiles(times: Times) -> list[float]:
    """10th, 50th and 90th, in microseconds."""
    return [1e6 * float(each) for each in np.percentile(times, [10, 50, 90])]


def verdicts(found: Race) -> Iterator[Verdict]:
    """The targets of the native kernels."""
    kernels = [n for n in found.times if n.startswith("native")]
    for name in kernels:
        what = f"{name}; {found.title}"
        if max(found.cell.shapes) == (64,):
            micros = found.micros_per_tensor(name)
            yield Verdict(f"us per tensor, {what}", micros, SMALL_LIMIT)
        elif found.cell.num_bytes >= LARGE_BYTES:
            speed = found.speed(name)
            yield Verdict(f"of {CEILING}, {what}", speed, LARGE_LIMIT, at_least=True)


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
        help="tiny buckets and a few rounds, to see that everything runs and all bits "
        "are right; leaves no files unless --out is given",
    )
    add(
        "--devices",
        nargs="+",
        choices=["cpu", "cuda"],
        metavar="DEVICE",
        help="cpu, cuda (default: cuda too if there is a GPU and a native extension "
        "that serves it)",
    )
    add(
        "--threads",
        type=int,
        default=1,
        metavar="N",
        help="for the kernels (default: 1)",
    )
    add(
        "--seconds",
        type=float,
        default=FULL.seconds,
        help=f"time for each table (default: {FULL.seconds:g})",
    )
    add(
        "--out",
        type=Path,
        metavar="FOLDER",
        help="where table and numbers go (default: benchmarks/results)",
    )
    return parser.parse_args()


def why_no_cuda(library: ModuleType | None) -> str:
    """Why the GPU is not measured; empty when it can be."""
    if not torch.cuda.is_available():
        return "torch sees no GPU"
    if library is None or not library.has_cuda:
        return "there is no native extension with CUDA kernels"
    return ""


def run(args: argparse.Namespace, folder: Path | None) -> bool:
    """Measure, print, write; return whether all bits were right."""
    plan = SMOKE if args.smoke else dataclasses.replace(FULL, seconds=args.seconds)
    torch.set_num_threads(args.threads)
    call_python_kernels()
    library, console = native.library(), report_console()
    no_cuda = why_no_cuda(library)
    devices = args.devices or (["cpu"] if no_cuda else ["cpu", "cuda"])
    if no_cuda and "cuda" in devices:
        sys.exit(f"The GPU cannot be measured: {no_cuda}.")
    lines = header(
        native=native_line(),
        gpu=torch.cuda.get_device_name() if "cuda" in devices else "not measured",
        threads=str(args.threads),
        divisor=f"{DIVISOR}; unflatten only copies",
        rounds=f"{plan.warm_up} to warm up, then {plan.seconds:g} s for each table",
    )
    console.print(header_table(lines), "")
    if no_cuda:
        console.print(f"The GPU is skipped: {no_cuda}.\n")
    races: list[Race] = []
    for device in devices:
        for cell in cells(device, smoke=args.smoke):
            for found in measure(cell, library, plan):
                console.print(found.table(), "")
                races.append(found)
    targets = [verdict for found in races for verdict in verdicts(found)]
    if targets:
        print_verdicts(console, "native kernels, one call", targets)
    lines["load after"] = f"{os.getloadavg()[0]:.1f} busy processes, last minute"
    console.print("load after", lines["load after"])
    is_right = not any(n for found in races for n in found.wrong.values())
    if not is_right:
        console.print("Some bits are WRONG: see the last column.", style="bold red")
    if folder is not None:
        content = {
            "header": lines,
            "targets": [verdict.as_json() for verdict in targets],
            "cells": [found.as_json() for found in races],
        }
        stem = f"flatten_{'_'.join(devices)}_{lines['date']}"
        write_json(folder / f"{stem}.json", content)
        title = "Flatten and unflatten: gradients and a bucket's buffer"
        write_markdown(folder / f"{stem}.md", title, console)
    return is_right


def main() -> int:
    """Run; 1 if a bit was wrong, whatever the targets say."""
    args = parse()
    folder = args.out or (None if args.smoke else ROOT / "benchmarks" / "results")
    return 0 if run(args, folder) else 1


if __name__ == "__main__":
    sys.exit(main())
