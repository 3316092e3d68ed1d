"""What `minidp.record` costs: the same steps with and without it.

    python benchmarks/recording.py                        # 3 minutes
    python benchmarks/recording.py --seconds 5            # while working
    python benchmarks/recording.py --smoke                # does it run? no numbers

All take their steps in turn, in the same processes. What each number means is in
benchmarks/README.md.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text
from support.baselines import ours
from support.comparison import short, with_interval
from support.estimates import Estimate, ratio
from support.nets import NETS
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
from support.rounds import Contest, Implementation, Measured, Plan
from support.verdicts import Verdict, print_verdicts
from torch import nn

import minidp

FULL = Plan(seconds=25, warm_up=6, fewest=40, most=2400, check_every=100)
SMOKE = Plan(seconds=0, warm_up=3, fewest=1, most=8, check_every=4)
MODELS = ("small", "mlp", "transformer")
WORLD_SIZES = (1, 2)
OFF, AGAIN, ON, AFTER = "off", "off again", "on", "off, was on"
LIMITS = {ON: 1.01, AFTER: 1.005}  # of a step without
OPEN: list[minidp.Recording] = []  # until the process ends


# -- what is measured ------------------------------------------------------------------


def recorded(module: nn.Module) -> nn.Module:
    """On for good: a recording keeps the last steps."""
    model = ours()(module)
    OPEN.append(minidp.record(model).__enter__())
    return model


def was_recorded(module: nn.Module) -> nn.Module:
    """Off again: nothing of it may stay behind."""
    model = ours()(module)
    with minidp.record(model):
        pass
    return model


WRAPS = {OFF: ours(), AGAIN: ours(), ON: recorded, AFTER: was_recorded}


def measure(model: str, plan: Plan, *, is_small: bool, native: str) -> Result:
    """On every rank."""
    check_native(native)
    torch.manual_seed(0)
    net = NETS[model].smoke() if is_small else NETS[model].full()
    everyone = [Implementation(name, wrap, OFF) for name, wrap in WRAPS.items()]
    world_size = torch.distributed.get_world_size()
    title = f"{net.title}; {world_size} rank{'s' if world_size > 1 else ''}"
    return Result(title, Contest(everyone, net, plan, label=title).run())


# -- what it means ---------------------------------------------------------------------


@dataclass(frozen=True)
class Result:
    """One model on some ranks.

    Args:
        title: of both.
        measured: the times.
    """

    title: str
    measured: Measured

    def ratios(self, what: Mapping[str, Any]) -> dict[str, Estimate]:
        """Of wall-clock or CPU time, over `OFF`, paired by round."""
        return {name: ratio(times, what[OFF]) for name, times in what.items()}

    def table(self) -> Table:
        """For printing."""
        found = self.measured
        facts = f"{found.num_params} parameters, {found.num_bytes / 2**20:.3g} MiB; "
        facts += f"{found.num_rounds} timed rounds"
        title = Text.assemble((self.title, "bold"), "\n", (facts, "dim"))
        table = Table(title=title, title_justify="left", box=None, padding=(0, 1))
        table.add_column("recorder", no_wrap=True)
        for column in ("step, ms", "step / off (95%)", "CPU / off (95%)", "#wrong"):
            table.add_column(column, justify="right", no_wrap=True)
        steps, cpu = self.ratios(found.times), self.ratios(found.cpu)
        for name, times in found.times.items():
            table.add_row(
                name,
                short(1e3 * float(np.median(times))),
                with_interval(steps[name]),
                with_interval(cpu[name]),
                str(found.wrong[name]),
            )
        return table

    def verdicts(self) -> list[Verdict]:
        """Whether it is as cheap as it should be."""
        steps = self.ratios(self.measured.times)
        return [
            Verdict(f"{self.title}: {name}", steps[name], limit)
            for name, limit in LIMITS.items()
        ]

    def as_json(self) -> dict[str, Any]:
        """For a file, with the raw times."""
        found = self.measured
        return {
            "title": self.title,
            "step": {n: vars(e) for n, e in self.ratios(found.times).items()},
            "cpu": {n: vars(e) for n, e in self.ratios(found.cpu).items()},
            "microseconds_of_each_round": {
                name: " ".join(f"{1e6 * s:.0f}" for s in times)
                for name, times in found.times.items()
            },
            "wrong": found.wrong,
        }


# -- the program -----------------------------------------------------------------------


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").partition("\n")[0],
        epilog="benchmarks/README.md says what each number means.",
    )
    add = parser.add_argument
    add("--smoke", action="store_true", help="tiny models: does everything run?")
    add("--seconds", type=float, default=FULL.seconds, help="of each measurement (25)")
    add(
        "--out",
        type=Path,
        metavar="FOLDER",
        help="where table and numbers go (default: benchmarks/results)",
    )
    return parser.parse_args()


def run(args: argparse.Namespace, console: Console, folder: Path) -> bool:
    """Measure, print, write; False if a gradient was wrong."""
    plan = SMOKE if args.smoke else dataclasses.replace(FULL, seconds=args.seconds)
    lines = header(
        native=native_line(),
        backend="CPU, Gloo, 1 thread per rank, float32",
        timed="forward and backward; not zero_grad(set_to_none=True)",
        memory=" ".join(f"{name}={value}" for name, value in KEEP_MEMORY.items()),
    )
    console.print(header_table(lines), "")
    task = functools.partial(measure, is_small=args.smoke, native=lines["native"])
    results = []
    for world_size in WORLD_SIZES:
        for model in MODELS[:1] if args.smoke else MODELS:
            results.append(run_ranks(task, world_size, model, plan))
            console.print(results[-1].table(), "")
    verdicts = [verdict for result in results for verdict in result.verdicts()]
    if not args.smoke:
        print_verdicts(console, "steps over steps without a recorder", verdicts)
    is_native = "native" if lines["native"] == "loaded" else "python"
    stem = f"recording_cpu_{is_native}_{lines['date']}"
    content = {
        "header": lines,
        "results": [result.as_json() for result in results],
        "targets": [verdict.as_json() for verdict in verdicts],
    }
    write_json(folder / f"{stem}.json", content)
    write_markdown(folder / f"{stem}.md", "What recording costs", console)
    return say_if_wrong(
        console, [n for r in results for n in r.measured.wrong.values()]
    )


def main() -> int:
    """Run; 1 if a gradient was wrong, whatever the targets say."""
    args = parse()
    with results_folder(args.out, smoke=args.smoke) as folder:
        return 0 if run(args, report_console(), folder) else 1


if __name__ == "__main__":
    sys.exit(main())
