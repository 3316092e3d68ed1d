"""Scale on paper: data-parallel steps on up to 16,384 ranks, simulated.

    python benchmarks/simulate.py                       # everything: 5 minutes
    python benchmarks/simulate.py --validate            # only beside real ranks
    python benchmarks/simulate.py --paper               # only simulated
    python benchmarks/simulate.py --node-gbit 25        # another network
    python benchmarks/simulate.py --smoke               # does it run? no numbers

Nothing but the validation is measured. What each number means, and what is assumed, is
in benchmarks/README.md and printed above the tables.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from support.links import Link, why_not
from support.output import results_folder, say_if_wrong
from support.progress import progress
from support.published import Comparison, compare
from support.ranks import run_ranks
from support.report import (
    header,
    header_table,
    native_line,
    report_console,
    write_json,
    write_markdown,
)
from support.scale import Assumptions, Point, Sweep, scale_table, sweep
from support.scale_chart import draw_scale
from support.simulation import RECORDED_JITTER
from support.validation import (
    LIMIT,
    SMOKE_WORK,
    WORK,
    Trial,
    Validation,
    validate_on_rank,
    validation_table,
)
from support.workloads import gpt2, resnet50

FULL_CAPS: list[float | None] = [None, 8.0, 4.0, 1.0]


# -- validation ------------------------------------------------------------------------


def validate(args: argparse.Namespace, console: Console) -> list[Validation]:
    """Measure real ranks whose computation is waited for, and predict them."""
    reason = why_not()
    if reason and not args.smoke:
        console.print(f"The validation on shaped links is skipped: {reason}.\n")
        return []
    links = [None] if reason else [Link(gbit) for gbit in args.gbit]
    work = SMOKE_WORK if args.smoke else WORK
    found: list[Validation] = []
    machines: list[str] = []
    sizes = sorted({2, *args.world_sizes})
    with progress(0, "real ranks", len(links) * len(sizes)) as advance:
        for link in links:
            place, machine = str(link or "loopback"), None
            for world_size in sizes:
                trial = Trial(work, tuple(args.caps), args.steps, args.jitter)
                measured = run_ranks(validate_on_rank, world_size, trial, link=link)
                if machine is None:  # of two ranks: it predicts all other numbers
                    machine = measured.machine
                    machines.append(f"{place}: all-reduce of 2 ranks {machine}")
                found += measured.rows(place, world_size, machine)
                advance()
    console.print(validation_table(found, work, machines), "")
    return found


# -- scale -----------------------------------------------------------------------------


def simulate(args: argparse.Namespace, console: Console) -> list[Sweep]:
    """Both models on growing clusters."""
    assumptions = args.assumptions
    sweeps = []
    for work in (
        resnet50(assumptions.resnet50_ms / 1e3),
        gpt2(assumptions.gpt2_ms / 1e3),
    ):
        sizes = [n for n in _sizes(args) if n >= assumptions.ranks_per_node]
        with progress(0, f"simulated {work.title}", len(sizes)) as advance:
            points: list[Point] = []
            for num_ranks in sizes:
                points.append(sweep(work, assumptions, num_ranks, args.jitter))
                advance()
        sweeps.append(Sweep(work, tuple(points)))
        console.print(scale_table(sweeps[-1]), "")
    return sweeps


def _sizes(args: argparse.Namespace) -> Iterator[int]:
    """Numbers of ranks: one node, then four times as many, up to the most."""
    num_ranks = args.assumptions.ranks_per_node
    while num_ranks < args.most:
        yield num_ranks
        num_ranks *= 4
    yield args.most


# -- the program -----------------------------------------------------------------------


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").partition("\n")[0],
        epilog="benchmarks/README.md says what each number means.",
    )
    add = parser.add_argument
    add(
        "--smoke",
        action="store_true",
        help="two ranks and small clusters, to see that everything runs; leaves no "
        "files unless --out is given",
    )
    parts = parser.add_mutually_exclusive_group()
    parts.add_argument(
        "--validate", action="store_true", help="only compare with real ranks"
    )
    parts.add_argument(
        "--paper", action="store_true", help="only simulate: no real ranks"
    )
    real = parser.add_argument_group("validation")
    real.add_argument(
        "--gbit",
        nargs="+",
        type=float,
        default=[1.0, 2.0],
        metavar="R",
        help="rates of the links, in Gbit/s (default: 1 2)",
    )
    real.add_argument(
        "--world-sizes",
        nargs="+",
        type=int,
        default=[2, 3, 4],
        metavar="N",
        help="numbers of real ranks (default: 2 3 4; 2 is always measured)",
    )
    real.add_argument(
        "--steps", type=int, default=12, help="timed for each row (default: 12)"
    )
    paper = parser.add_argument_group("simulated clusters")
    for name, (default, unit, meaning) in Assumptions.options().items():
        paper.add_argument(
            f"--{name}",
            type=type(default),
            default=default,
            metavar=unit,
            help=f"{meaning} (default: {default:g})",
        )
    paper.add_argument(
        "--most", type=int, default=16384, help="ranks at most (default: 16384)"
    )
    paper.add_argument(
        "--jitter",
        type=Path,
        metavar="FILE",
        help="seconds of many steps of one rank, a JSON list: stragglers are drawn "
        "from them (default: recorded on two shared cores, see the README)",
    )
    add(
        "--out",
        type=Path,
        metavar="FOLDER",
        help="where tables, numbers and chart go (default: benchmarks/results)",
    )
    args = parser.parse_args(arguments)
    args.assumptions = Assumptions.of(args)
    _check(parser, args)
    args.jitter_name = str(args.jitter or "72 recorded steps of a transformer, CPU")
    args.jitter = read_jitter(args.jitter) if args.jitter else RECORDED_JITTER
    args.caps = FULL_CAPS
    if args.smoke:
        args.gbit, args.world_sizes, args.caps = [1.0], [2], [None, 0.1]
        args.steps, args.most = 3, 64
    return args


def _check(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """End the program if something cannot be simulated."""
    assumptions = args.assumptions
    if args.ranks_per_node < 1 or args.most % args.ranks_per_node:
        parser.error(
            f"--most {args.most} is not a number of whole nodes of "
            f"--ranks-per-node {args.ranks_per_node}"
        )
    try:
        assumptions.cluster(args.most)
    except ValueError as error:
        parser.error(str(error))
    if min(assumptions.resnet50_ms, assumptions.gpt2_ms) <= 0 or args.steps < 1:
        parser.error("--resnet50-ms, --gpt2-ms and --steps must be positive")
    if min(args.world_sizes) < 2:
        parser.error("--world-sizes: a link has 2 ranks or more")


def read_jitter(path: Path) -> tuple[float, ...]:
    """Steps over their median, sorted.

    Raises:
        SystemExit: the file is not a list of at least 10 positive numbers.
    """
    try:
        seconds = sorted(float(each) for each in json.loads(path.read_text()))
    except (OSError, ValueError, TypeError) as error:
        raise SystemExit(
            f"--jitter {path}: expected a JSON list, but {error}"
        ) from None
    if len(seconds) < 10 or seconds[0] <= 0:
        raise SystemExit(
            f"--jitter {path}: expected 10 positive numbers or more, "
            f"but got {len(seconds)}, the least {seconds[0] if seconds else 'none'}"
        )
    median = seconds[len(seconds) // 2]
    return tuple(each / median for each in seconds)


def run(args: argparse.Namespace, folder: Path) -> bool:
    """Measure, simulate, print, write; return whether all gradients were right."""
    console = report_console()
    lines = header(
        native=native_line(),
        **args.assumptions.lines(),
        stragglers=f"{args.jitter_name}; the slowest took "
        f"{args.jitter[-1]:.2f} of the median",
    )
    console.print(header_table(lines), "")
    validations = [] if args.paper else validate(args, console)
    comparisons: list[Comparison] = []
    sweeps: list[Sweep] = []
    if not args.validate:
        comparisons = compare(args.assumptions, console)
        sweeps = simulate(args, console)
    if validations and not args.smoke:
        worst = max(validations, key=lambda each: abs(each.error))
        word = "met" if abs(worst.error) <= LIMIT else "MISSED"
        console.print(
            f"[bold]target[/]: {word:8}largest error of a predicted step "
            f"{worst.error:+.1%} ({worst.name}), limit {LIMIT:.0%}"
        )
    lines["load after"] = f"{os.getloadavg()[0]:.1f} busy processes, last minute"
    console.print("load after", lines["load after"])
    is_right = say_if_wrong(console, (each.wrong for each in validations))
    stem = f"simulate_{lines['date']}"
    content: dict[str, Any] = {
        "header": lines,
        "validation": [each.as_json() for each in validations],
        "published": [dataclasses.asdict(each) for each in comparisons],
        "simulated": [each.as_json() for each in sweeps],
    }
    write_json(folder / f"{stem}.json", content)
    write_markdown(folder / f"{stem}.md", "Scale on paper", console)
    draw_scale(folder / f"{stem}.png", validations, sweeps, lines["date"])
    return is_right


def main() -> int:
    """Run; 1 if a gradient of the validation was wrong, whatever was predicted."""
    args = parse()
    with results_folder(args.out, smoke=args.smoke) as folder:
        return 0 if run(args, folder) else 1


if __name__ == "__main__":
    sys.exit(main())
