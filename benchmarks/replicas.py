"""What comparing the replicas costs (``check_replicas_every``): one check, per step.

    python benchmarks/replicas.py                        # 6 minutes
    python benchmarks/replicas.py --seconds 5            # while working
    python benchmarks/replicas.py --smoke                # does it run? no numbers

Wrappers that compare in every step, and never, take their steps in turn, in the same
processes. The default compares in steps 0, 1, 100 and every 1000: what it adds to a
run of a thousand steps is three times the price of one check, over a thousand.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import sys
from pathlib import Path

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

from minidp._desync import AUTO_EVERY, AUTO_STEPS

FULL = Plan(seconds=20, warm_up=6, fewest=20, most=2400, check_every=100)
SMOKE = Plan(seconds=0, warm_up=3, fewest=1, most=8, check_every=4)
MODELS = ("tiny", "small", "transformer", "mlp", "resnet50", "gpt2")
WORLD_SIZES = (1, 2)
NEVER, AGAIN, AUTO, EACH = "never", "never, again", "auto (the default)", "every step"
WRAPS = {
    NEVER: ours(check_replicas_every=0),
    AGAIN: ours(check_replicas_every=0),
    AUTO: ours(),
    EACH: ours(check_replicas_every=1),
}
LIMIT = 0.002  # of a run of a thousand steps


def measure(model: str, plan: Plan, *, is_small: bool, native: str) -> Measured:
    """On every rank."""
    check_native(native)
    torch.manual_seed(0)
    net = NETS[model].smoke() if is_small else NETS[model].full()
    everyone = [Implementation(name, wrap, NEVER) for name, wrap in WRAPS.items()]
    return Contest(everyone, net, plan, label=net.title).run()


def share(each: float) -> float:
    """What the default adds to a run, of a step that is ``each`` with a check."""
    checks = len([step for step in AUTO_STEPS if step < AUTO_EVERY])
    return (each - 1) * checks / AUTO_EVERY


def table(title: str, found: Measured, steps: dict[str, Estimate]) -> Table:
    """For printing."""
    facts = f"{found.num_params} parameters, {found.num_bytes / 2**20:.3g} MiB; "
    facts += f"{found.num_rounds} timed rounds; the default adds "
    facts += f"{100 * share(steps[EACH].value):.4f} % to the first thousand steps"
    text = Text.assemble((title, "bold"), "\n", (facts, "dim"))
    shown = Table(title=text, title_justify="left", box=None, padding=(0, 1))
    shown.add_column("compares", no_wrap=True)
    for column in ("step, ms", "step / never (95%)", "#wrong"):
        shown.add_column(column, justify="right", no_wrap=True)
    for name, times in found.times.items():
        median = short(1e3 * float(sorted(times)[len(times) // 2]))
        shown.add_row(name, median, with_interval(steps[name]), str(found.wrong[name]))
    return shown


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
    results, wrong = [], []
    for world_size in WORLD_SIZES:
        for model in MODELS[:1] if args.smoke else MODELS:
            found = run_ranks(task, world_size, model, plan)
            title = f"{model}; {world_size} rank{'s' if world_size > 1 else ''}"
            steps = {n: ratio(ts, found.times[NEVER]) for n, ts in found.times.items()}
            console.print(table(title, found, steps), "")
            wrong += found.wrong.values()
            added = share(steps[EACH].value)
            results.append(
                {
                    "title": title,
                    "step": {name: vars(each) for name, each in steps.items()},
                    "added_to_1000_steps": added,
                    "is_below_limit": bool(added < LIMIT),
                }
            )
    is_native = "native" if lines["native"] == "loaded" else "python"
    stem = f"replicas_cpu_{is_native}_{lines['date']}"
    write_json(folder / f"{stem}.json", {"header": lines, "results": results})
    write_markdown(folder / f"{stem}.md", "What comparing the replicas costs", console)
    return say_if_wrong(console, wrong)


def main() -> int:
    """Run; 1 if a gradient was wrong."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    add = parser.add_argument
    add("--smoke", action="store_true", help="a tiny model: does everything run?")
    add("--seconds", type=float, default=FULL.seconds, help="of each measurement (20)")
    add(
        "--out",
        type=Path,
        metavar="FOLDER",
        help="where table and numbers go (default: benchmarks/results)",
    )
    args = parser.parse_args()
    with results_folder(args.out, smoke=args.smoke) as folder:
        return 0 if run(args, report_console(), folder) else 1


if __name__ == "__main__":
    sys.exit(main())
