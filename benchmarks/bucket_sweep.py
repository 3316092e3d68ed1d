"""Which bucket size is best? Time a step with caps of 0.25 to 100 MiB, and "auto".

    python benchmarks/bucket_sweep.py                    # MLP, 2 Gbit/s: 3 minutes
    python benchmarks/bucket_sweep.py --model resnet50 --link 1
    python benchmarks/bucket_sweep.py --link loopback    # without root
    python benchmarks/bucket_sweep.py --smoke            # does it run? no numbers

All caps take their steps in turn, in the same processes, with torch's DDP among them.
Columns and bound are those of overlap.py; see its --help.

The target is a step of "auto" of at most 1.10 times that of the cap with the least
median. The best of ten medians is a little better by luck, which makes the target a
little harder. Below the size of one parameter (2.25 MiB in the MLP) a smaller cap
changes nothing.
"""

from __future__ import annotations

import argparse
import functools
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from support.baselines import (
    AUTO,
    BARE,
    TORCH,
    TORCH_AGAIN,
    against_torch,
    auto,
    bare,
    ours,
    theirs,
)
from support.charts import BOUND, COMPUTE, DARK, OURS, THEIRS, Line, Words, draw_lines
from support.links import LOOPBACK, Link, why_not
from support.models import MODELS, make
from support.overlap import overlap_table
from support.ranks import run_ranks
from support.report import CPU_BACKEND, TIMED, Report, Verdict, command_line
from support.rounds import Contest, Measured, Plan

CAPS = (0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 25.0, 50.0, 100.0)  # MiB
SMOKE_CAPS = (0.01, 0.25, 1.0)
LIMIT = 1.10  # of auto's step over that of the best cap


def name_of(cap: float) -> str:
    """Name minidp with this cap."""
    return f"minidp {cap:g} MiB"


def measure(args: argparse.Namespace, plan: Plan, caps: Sequence[float]) -> Measured:
    """Measure every cap, on every rank."""
    net, link = make(MODELS[args.model], smoke=args.smoke), Link.of(args.link)
    mine = functools.partial(against_torch, world_size=args.ranks)
    everyone = [
        bare(),
        mine(TORCH, theirs()),
        mine(TORCH_AGAIN, theirs()),
        *(mine(name_of(cap), ours(bucket_cap_mb=cap)) for cap in caps),
        auto(args.ranks),
    ]
    title = f"{net.title}; {args.ranks} ranks, {link or LOOPBACK}"
    return Contest(title, everyone, net, plan, link=link).run()


def chart(path: Path, measured: Measured, caps: Sequence[float], note: str) -> None:
    """Draw the step over the cap."""

    def level(name: str, colour: str, style: str) -> Line:
        return Line(colour, caps, [measured.milliseconds(name)[1]] * len(caps), style)

    names = [name_of(cap) for cap in caps]
    low, middle, high = zip(*map(measured.milliseconds, names), strict=True)
    lines = {
        "minidp: median, p10-p90": Line(OURS, caps, middle, "o-", low, high),
        'minidp, "auto"': level(AUTO, DARK, "-"),
        "torch, default (25 MiB)": level(TORCH, THEIRS, "-"),
        "no communication": level(BARE, COMPUTE, "--"),
    }
    if measured.bounds:
        bounds = [1e3 * float(np.median(measured.bounds[n])) for n in names]
        lines["bound of these steps"] = Line(BOUND, caps, bounds, "--")
    words = Words("Which bucket size is best", "ms for each step", note)
    draw_lines(path, words, ("bucket_cap_mb (MiB)", caps), {measured.title: lines})


def main() -> int:
    """Measure and report. Return 1 if a gradient was wrong, 2 without such a link."""
    parser = command_line(__doc__, seconds=75)
    add = parser.add_argument
    add("--model", choices=list(MODELS), default="mlp", help="(default: mlp)")
    link_help = f"Gbit/s of each rank's link, or {LOOPBACK} (default: 2)"
    add("--link", default="2", metavar="L", help=link_help)
    add("--ranks", type=int, default=2, metavar="N", help="(default: 2)")
    args = parser.parse_args()
    if args.smoke:
        args.link = LOOPBACK
    if args.link != LOOPBACK and (reason := why_not()):
        print(f"No shaped link here: {reason}. Try --link loopback.", file=sys.stderr)
        return 2
    report = Report(args, "Which bucket size is best", backend=CPU_BACKEND, timed=TIMED)
    caps = SMOKE_CAPS if args.smoke else CAPS
    plan = Plan.of(args.seconds, smoke=args.smoke)
    link = Link.of(args.link)
    measured: Measured = run_ranks(measure, args.ranks, args, plan, caps, link=link)
    report.show(overlap_table(measured))
    report.count_wrong(measured.wrong.values())
    best = min(caps, key=lambda cap: measured.milliseconds(name_of(cap))[1])
    what = f"auto's step over that of {best:g} MiB, the best cap"
    report.judge([Verdict(what, measured.ratio(AUTO, name_of(best)), LIMIT)])
    note = f"{CPU_BACKEND}. {report.header['date']}, torch {report.header['torch']}."
    return report.finish(
        f"bucket_sweep_{args.model}_{args.link}_{args.ranks}_cpu",
        {"caps_mib": caps, "sweep": measured.as_json()},
        lambda path: chart(path, measured, caps, note),
    )


if __name__ == "__main__":
    sys.exit(main())
