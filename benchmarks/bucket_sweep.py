"""Which bucket size is best: a step with caps from 0.25 to 100 MiB, and with "auto".

    python benchmarks/bucket_sweep.py                    # MLP, 2 Gbit/s: 3 minutes
    python benchmarks/bucket_sweep.py --model resnet50 --link 1
    python benchmarks/bucket_sweep.py --smoke            # does it run? no numbers

All caps take their steps in turn, in the same processes, with torch's DDP among them.
What each number means is in benchmarks/README.md.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from support.bars import Words
from support.baselines import (
    AUTO,
    BARE,
    SETTLING,
    TORCH,
    TORCH_AGAIN,
    against_torch,
    bare,
    bounded,
    has_auto,
    ours,
    search,
    theirs,
)
from support.curves import Axis, Level, Line, Panel, draw_curves
from support.estimates import ratio
from support.exposure import Exposure
from support.links import Link, measured_rate, why_not
from support.models import MODELS
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
from support.verdicts import Verdict, print_verdicts

CAPS = (0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 25.0, 50.0, 100.0)  # MiB
SMOKE_CAPS = (0.01, 0.25, 1.0)
FULL = Plan(seconds=75, warm_up=4, fewest=15, most=300, check_every=30)
SMOKE = Plan(seconds=0, warm_up=3, fewest=1, most=10, check_every=5)
LOOPBACK = "loopback"
LIMIT = 1.10  # of auto's step over that of the best cap
DEFAULT_CAP = 25.0  # MiB: torch's
GREY, ORANGE, DARK, BLUE, LIGHT = "#8a94a3", "#e4632d", "#7a2e12", "#2b6cb0", "#b0b6bf"


# -- what is measured ------------------------------------------------------------------


def name_of(cap: float) -> str:
    """Of minidp with this cap."""
    return f"minidp {cap:g} MiB"


def implementations(
    world_size: int, caps: Sequence[float], chosen: Mapping[str, Any] | None
) -> list[Implementation]:
    """Collective: every cap, and what it is compared with.

    Args:
        world_size: number of ranks.
        caps: in MiB.
        chosen: the layout that auto chose; None: there is no auto.
    """
    mine = functools.partial(against_torch, world_size=world_size)
    everyone = [
        Implementation(BARE, bare),
        mine(TORCH, theirs()),
        mine(TORCH_AGAIN, theirs()),
        *(mine(name_of(cap), ours(bucket_cap_mb=cap)) for cap in caps),
    ]
    if chosen is not None:
        everyone.append(mine(AUTO, ours(bucket_layout=chosen)))
    return everyone


def measure(
    args: argparse.Namespace, plan: Plan, caps: Sequence[float], native: str
) -> Exposure:
    """On every rank."""
    check_native(native)
    torch.manual_seed(0)
    sizes = MODELS[args.model]
    net = sizes.smoke() if args.smoke else sizes.full()
    steps = 2 if args.smoke else SETTLING
    chosen = search(net, Where(), steps) if has_auto() else None
    link = None if args.link == LOOPBACK else Link(float(args.link))
    everyone = bounded(implementations(args.ranks, caps, chosen), link)
    note = f"; alone: {measured_rate(2**20 if args.smoke else 2**24)}"
    measured = Contest(everyone, net, plan, label="bucket sweep").run()
    place = f"{args.ranks} ranks, {link or LOOPBACK}"
    return Exposure(f"{net.title}; {place}", measured, note)


# -- what it means ---------------------------------------------------------------------


def best_cap(exposure: Exposure, caps: Sequence[float]) -> float:
    """The one with the least median of a step, in MiB."""
    return min(caps, key=lambda cap: exposure.rows[name_of(cap)].seconds[1])


def verdicts(exposure: Exposure, caps: Sequence[float]) -> Iterator[Verdict]:
    """The target."""
    times = exposure.measured.times
    if AUTO in times:
        best = name_of(best_cap(exposure, caps))
        found = ratio(times[AUTO], times[best])
        yield Verdict(f"auto's step over that of {best}, the best cap", found, LIMIT)


def chart(path: Path, exposure: Exposure, caps: Sequence[float], date: str) -> None:
    """Write the curve."""
    rows = exposure.rows

    def ms(name: str) -> list[float]:
        return [1e3 * seconds for seconds in rows[name].seconds]

    low, median, high = zip(*(ms(name_of(cap)) for cap in caps), strict=True)
    levels = {
        "torch, default": Level(GREY, ms(TORCH)[1], "-", DEFAULT_CAP, "s"),
        "no communication": Level(LIGHT, ms(BARE)[1], ":"),
    }
    if AUTO in rows:
        best = best_cap(exposure, caps)
        levels['minidp, "auto"'] = Level(DARK, ms(AUTO)[1], "-", best, "*")
    lines = {"minidp: median, p10-p90": Line(ORANGE, caps, median, low, high)}
    bounds = [1e3 * (rows[name_of(cap)].bound or 0.0) for cap in caps]
    if all(bounds):
        lines["bound of these steps"] = Line(BLUE, caps, bounds, style="--")
    panel = Panel(exposure.title, lines, levels)
    words = Words(
        title="Which bucket size is best",
        unit="ms",
        footnote=f"CPU, Gloo, one thread per rank, {date}. torch {torch.__version__}. "
        "Bound: no layout could have ended a step earlier (median).\n"
        'The star of "auto" is drawn at the best cap; its buckets may differ in size.',
    )
    axis = Axis("bucket_cap_mb (MiB)", "ms for each step", caps)
    draw_curves(path, words, axis, [panel])


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
        help="a tiny model, few caps and rounds, on loopback: does everything run? "
        "Leaves no files unless --out is given",
    )
    add("--model", choices=list(MODELS), default="mlp", help="(default: mlp)")
    add(
        "--link",
        default="2",
        metavar="L",
        help="rate of each rank's link in Gbit/s, or loopback (default: 2)",
    )
    add("--ranks", type=int, default=2, metavar="N", help="(default: 2)")
    add(
        "--seconds",
        type=float,
        default=FULL.seconds,
        help=f"time for the rounds (default: {FULL.seconds:g})",
    )
    add(
        "--out",
        type=Path,
        metavar="FOLDER",
        help="where table, numbers and chart go (default: benchmarks/results)",
    )
    args = parser.parse_args()
    if args.smoke:
        args.link = LOOPBACK
    return args


def run(args: argparse.Namespace, folder: Path) -> bool:
    """Measure, print, write; return whether all gradients were right."""
    plan = SMOKE if args.smoke else dataclasses.replace(FULL, seconds=args.seconds)
    caps = SMOKE_CAPS if args.smoke else CAPS
    link = None if args.link == LOOPBACK else Link(float(args.link))
    console = report_console()
    lines = header(
        native=native_line(),
        backend="gloo, 1 thread per rank, float32",
        timed="forward and backward; not zero_grad(set_to_none=True)",
        memory=" ".join(f"{name}={value}" for name, value in KEEP_MEMORY.items()),
        rounds=f"{plan.warm_up} to warm up, then {plan.seconds:g} s",
    )
    console.print(header_table(lines), "")
    exposure: Exposure = run_ranks(
        measure, args.ranks, args, plan, caps, lines["native"], link=link
    )
    console.print(exposure.table(), "")
    found = list(verdicts(exposure, caps))
    if not args.smoke:
        console.print(f"best cap: {best_cap(exposure, caps):g} MiB\n")
        print_verdicts(console, "paired by round", found)
    lines["load after"] = f"{os.getloadavg()[0]:.1f} busy processes, last minute"
    console.print("load after", lines["load after"])
    is_right = say_if_wrong(console, exposure.measured.wrong.values())
    stem = f"bucket_sweep_{args.model}_{args.link}_{args.ranks}_cpu_{lines['date']}"
    write_json(
        folder / f"{stem}.json",
        {
            "header": lines,
            "caps_mib": caps,
            "targets": [verdict.as_json() for verdict in found],
            "sweep": exposure.as_json(),
        },
    )
    write_markdown(folder / f"{stem}.md", "Which bucket size is best", console)
    chart(folder / f"{stem}.png", exposure, caps, lines["date"])
    return is_right


def main() -> int:
    """Run; 1 if a gradient was wrong, 2 where there can be no such link."""
    args = parse()
    reason = why_not() if args.link != LOOPBACK else ""
    if reason:
        print(f"No shaped link here: {reason}. Try --link loopback.", file=sys.stderr)
        return 2
    with results_folder(args.out, smoke=args.smoke) as folder:
        return 0 if run(args, folder) else 1


if __name__ == "__main__":
    sys.exit(main())
