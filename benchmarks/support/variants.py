"""Compare variants of minidp with each other, of recording.py and replicas.py."""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable, Mapping, Sequence

import torch.distributed as dist

from support.estimates import ratio
from support.models import NETS, make
from support.ranks import run_ranks
from support.report import CPU_BACKEND, TIMED, Report, table
from support.rounds import STEP_COLUMNS, Contest, Implementation, Measured, Plan, Wrap

WORLD_SIZES = (1, 2)


def compare(
    args: argparse.Namespace,
    title: str,
    models: Sequence[str],
    wraps: Mapping[str, Wrap],
) -> tuple[Report, list[Measured]]:
    """Measure variants on models of `NETS`, on one and on two ranks; print tables.

    A smoke test takes the first model and two ranks.

    Args:
        args: of the command line.
        title: of the report.
        models: names in `NETS`.
        wraps: of each variant; all are compared with the first one.
    """
    report = Report(args, title, backend=CPU_BACKEND, timed=TIMED)
    plan = Plan.of(args.seconds, smoke=args.smoke)
    task: Callable[..., Measured] = functools.partial(_measure, smoke=args.smoke)
    found = []
    for world_size in WORLD_SIZES[args.smoke :]:
        for model in models[:1] if args.smoke else models:
            measured: Measured = run_ranks(task, world_size, model, plan, dict(wraps))
            found.append(measured)
            base = next(iter(wraps))
            columns = [*STEP_COLUMNS, f"step /\n{base} (95%)", f"CPU /\n{base} (95%)"]
            rows = [
                [
                    *measured.step_cells(name),
                    str(measured.ratio(name, base)),
                    str(ratio(measured.cpu[name], measured.cpu[base])),
                    measured.wrong_cell(name),
                ]
                for name in wraps
            ]
            columns.append("#wrong")
            report.show(table(measured.title, measured.facts, columns, rows))
            report.count_wrong(measured.wrong.values())
    return report, found


def _measure(
    model: str, plan: Plan, wraps: Mapping[str, Wrap], *, smoke: bool
) -> Measured:
    """Measure one model, on every rank."""
    net, base = make(NETS[model], smoke=smoke), next(iter(wraps))
    everyone = [Implementation(name, wrap, base) for name, wrap in wraps.items()]
    size = dist.get_world_size()
    title = f"{net.title}; {size} rank{'s' if size > 1 else ''}"
    return Contest(title, everyone, net, plan).run()
