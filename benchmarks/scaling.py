"""Weak scaling: the same work per rank on ever more ranks.

    python benchmarks/scaling.py                   # ranks of this machine: 4 minutes
    python benchmarks/scaling.py --smoke           # does it run? no numbers
    torchrun --nnodes 4 --nproc-per-node 8 ... benchmarks/scaling.py --model resnet50

Under torchrun the ranks are those that it started, on GPUs with NCCL where there are
any, in groups of 1, 2, 4, ... up to all of them. Alone, the script starts its own
ranks, on loopback and on shaped links. What each number means is in
benchmarks/README.md.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from rich.console import Console
from support.bars import Words
from support.baselines import (
    BARE,
    SETTLING,
    TORCH,
    against_torch,
    auto,
    bare,
    has_auto,
    ours,
    theirs,
)
from support.curves import Axis, draw_curves
from support.links import Link, why_not
from support.models import GPU_MODELS, MODELS
from support.nets import Net
from support.output import check_native, results_folder, say_if_wrong
from support.ranks import run_ranks
from support.report import (
    header,
    header_table,
    native_line,
    report_console,
    write_json,
    write_markdown,
)
from support.rounds import Contest, Implementation, Measured, Plan, Where
from support.weak import Scaling

FULL = Plan(seconds=20, warm_up=4, fewest=10, most=200, check_every=30)
SMOKE = Plan(seconds=0, warm_up=3, fewest=1, most=5, check_every=3)
LOOPBACK = "loopback"
TIMEOUT = timedelta(hours=1)  # ranks outside of a group wait for it


# -- what is measured ------------------------------------------------------------------


@dataclass(frozen=True)
class Task:
    """What every rank is told.

    Args:
        model: its name.
        plan: how long.
        device: of this rank.
        is_small: at the size of a smoke test.
        native: what each rank must have of the native extension.
    """

    model: str
    plan: Plan
    device: str
    is_small: bool
    native: str

    def net(self) -> Net:
        """The model, the same on every rank."""
        torch.manual_seed(0)
        if self.is_small:
            return MODELS[self.model].smoke().to(self.device)
        if self.device != "cpu":
            return GPU_MODELS[self.model]().to(self.device)
        return MODELS[self.model].full()


def implementations(where: Where, settling: int) -> list[Implementation]:
    """Collective: who takes part in a group."""
    size = where.world_size
    wrap_ours = functools.partial(ours, process_group=where.group)
    everyone = [
        Implementation(BARE, bare),
        against_torch(TORCH, theirs(process_group=where.group), size),
        against_torch("minidp", wrap_ours(), size),
        against_torch("minidp 1 MiB", wrap_ours(bucket_cap_mb=1), size),
    ]
    if has_auto(process_group=where.group):
        best = auto(wrap_ours, size)
        everyone.append(dataclasses.replace(best, settling=settling))
    return everyone


def measure(task: Task, group: dist.ProcessGroup | None = None) -> Measured:
    """On every rank of a group."""
    check_native(task.native)
    where = Where(group, task.device)
    everyone = implementations(where, settling=2 if task.is_small else SETTLING)
    label = f"{task.model}, {where.world_size} ranks"
    return Contest(everyone, task.net(), task.plan, where, label=label).run()


def growing_sizes(most: int) -> list[int]:
    """1, 2, 4, ... and the most."""
    sizes = [2**k for k in range(most.bit_length())]
    return sizes if sizes[-1] == most else [*sizes, most]


def on_torchruns_ranks(task: Task, sizes: Sequence[int]) -> dict[int, Measured]:
    """Measure groups of growing size among the ranks that torchrun started."""
    found = {}
    for size in sizes:
        members = list(range(size))
        group = dist.new_group(members, timeout=TIMEOUT)
        if dist.get_rank() in members:
            found[size] = measure(task, group)
        dist.barrier()
    return found


def on_own_ranks(
    task: Task, sizes: Sequence[int], link: Link | None
) -> dict[int, Measured]:
    """Start new ranks for each size; one rank needs no link."""
    return {
        size: run_ranks(measure, size, task, link=link if size > 1 else None)
        for size in sizes
    }


# -- the program -----------------------------------------------------------------------


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").partition("\n")[0],
        epilog="benchmarks/README.md says what each number means.",
    )
    add = parser.add_argument
    add("--smoke", action="store_true", help="tiny and short: does everything run?")
    add("--model", choices=list(MODELS), default="mlp", help="(default: mlp)")
    add(
        "--world-sizes",
        nargs="+",
        type=int,
        metavar="N",
        help="numbers of ranks (default: 1 2 4; under torchrun 1, 2, 4, ... all)",
    )
    add(
        "--links",
        nargs="+",
        default=[LOOPBACK, "2"],
        metavar="L",
        help="networks, when alone: rates in Gbit/s, or loopback (default: both, 2)",
    )
    add(
        "--seconds",
        type=float,
        default=FULL.seconds,
        help=f"time for the rounds of each size (default: {FULL.seconds:g})",
    )
    add(
        "--out",
        type=Path,
        metavar="FOLDER",
        help="where table, numbers and chart go (default: benchmarks/results)",
    )
    return parser.parse_args()


def is_torchrun() -> bool:
    """Whether somebody else started the ranks."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def networks(args: argparse.Namespace, console: Console) -> Iterator[Link | None]:
    """Those that can be had here."""
    for name in [LOOPBACK] if args.smoke else args.links:
        reason = "" if name == LOOPBACK else why_not()
        if reason:
            console.print(f"The link of {name} Gbit/s is skipped: {reason}.\n")
        else:
            yield None if name == LOOPBACK else Link(float(name))


def measure_everything(
    args: argparse.Namespace, task: Task, console: Console
) -> list[Scaling]:
    """On all networks; under torchrun on every rank."""
    title = task.net().title
    if is_torchrun():
        most = dist.get_world_size()
        sizes = args.world_sizes or growing_sizes(most)
        title += f"; {dist.get_backend()}, {most} ranks of torchrun"
        return [Scaling(title, on_torchruns_ranks(task, sizes))]
    sizes = args.world_sizes or [1, 2, 4]
    cores = os.cpu_count() or 1
    crowded = f", {cores} cores" if max(sizes) > cores else ""
    return [
        Scaling(
            f"{title}; {link or LOOPBACK}{crowded}", on_own_ranks(task, sizes, link)
        )
        for link in networks(args, console)
    ]


def run(args: argparse.Namespace, folder: Path, device: str) -> bool:
    """Measure, print, write; return whether all gradients were right."""
    plan = SMOKE if args.smoke else dataclasses.replace(FULL, seconds=args.seconds)
    console = report_console()
    console.quiet = is_torchrun() and dist.get_rank() != 0
    lines = header(
        native=native_line(),
        backend=dist.get_backend() if is_torchrun() else "gloo, 1 thread per rank",
        device=device if device == "cpu" else torch.cuda.get_device_name(),
        timed="forward and backward; not zero_grad(set_to_none=True)",
        rounds=f"{plan.warm_up} to warm up, then {plan.seconds:g} s for each size",
    )
    console.print(header_table(lines), "")
    task = Task(args.model, plan, device, args.smoke, lines["native"])
    results = measure_everything(args, task, console)
    if console.quiet:
        return True
    for scaling in results:
        console.print(scaling.table(), "")
    lines["load after"] = f"{os.getloadavg()[0]:.1f} busy processes, last minute"
    console.print("load after", lines["load after"])
    wrong = [n for s in results for m in s.measured.values() for n in m.wrong.values()]
    is_right = say_if_wrong(console, wrong)
    stem = f"scaling_{args.model}_{device.partition(':')[0]}_{lines['date']}"
    content = {"header": lines, "networks": [scaling.as_json() for scaling in results]}
    write_json(folder / f"{stem}.json", content)
    write_markdown(folder / f"{stem}.md", "Weak scaling", console)
    words = Words(
        title="Weak scaling: throughput per rank",
        unit="%",
        footnote="100 %: one rank without communication. Dotted: ranks share cores and "
        f"memory only. {lines['date']}",
    )
    ticks = list(results[0].measured)
    axis = Axis("ranks", "efficiency, %", ticks)
    draw_curves(folder / f"{stem}.png", words, axis, [s.panel() for s in results])
    return is_right


def join_torchrun() -> str:
    """Initialise the group of all ranks; return this rank's device."""
    if torch.cuda.is_available():
        device = f"cuda:{int(os.environ.get('LOCAL_RANK', '0'))}"
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", timeout=TIMEOUT)
        return device
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=TIMEOUT)
    return "cpu"


def main() -> int:
    """Run; 1 if a gradient was wrong."""
    args = parse()
    device = join_torchrun() if is_torchrun() else "cpu"
    # Only rank 0 writes; the others need no folder.
    is_first = not is_torchrun() or dist.get_rank() == 0
    place = results_folder(args.out, smoke=args.smoke) if is_first else nullcontext()
    with place as folder:
        is_right = run(args, folder or Path(), device)
    if is_torchrun():
        dist.barrier()
        dist.destroy_process_group()
    return 0 if is_right else 1


if __name__ == "__main__":
    sys.exit(main())
