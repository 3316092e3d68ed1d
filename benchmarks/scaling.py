"""Does throughput per rank survive more ranks? Weak scaling, on your cluster.

    torchrun --nnodes 4 --nproc-per-node 8 ... benchmarks/scaling.py --model resnet50
    torchrun --nproc-per-node 2 benchmarks/scaling.py    # ranks of this machine
    python benchmarks/scaling.py --smoke                 # does it run? no numbers

The ranks are those that torchrun started: with GPUs each has one, NCCL and the full
models; without, Gloo, one thread and small batches. Groups of 1, 2, 4, ... and all
ranks are measured one after the other. Every rank has the same work, however many there
are. All implementations take their steps in turn (see the --help of overhead.py).

Columns:
  step, p10-p90     on the slowest rank
  efficiency        step of one rank without communication over this step
  bare step / step  the same, but the bare model runs on as many ranks: what is left if
                    ranks share cores and memory; median and 95% interval
  CPU               of all threads of a rank, the mean over the ranks
  #wrong            parameters whose gradient ever differed from torch's default; see
                    the --help of overlap.py

Ranks that share cores say nothing about a cluster: on this machine more ranks than
cores halve the efficiency even without communication. So no result is published here.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from support.baselines import AUTO, BARE, TORCH, against_torch, auto, bare, ours, theirs
from support.charts import COMPUTE, DARK, OTHER, OURS, THEIRS, Line, Words, draw_lines
from support.estimates import short
from support.models import MODELS, make
from support.ranks import run_ranks
from support.report import TIMED, Report, command_line, table
from support.rounds import STEP_COLUMNS, Contest, Measured, Plan, Where

TIMEOUT = timedelta(hours=1)  # ranks outside of a group wait for it
SMALL_CAP = "minidp 1 MiB"
COLOURS = {BARE: COMPUTE, TORCH: THEIRS, "minidp": OURS, SMALL_CAP: OTHER, AUTO: DARK}


def sizes_up_to(most: int) -> list[int]:
    """List 1, 2, 4, ... and the most."""
    sizes = [2**k for k in range(most.bit_length())]
    return sizes if sizes[-1] == most else [*sizes, most]


def measure(args: argparse.Namespace, where: Where) -> Measured:
    """Measure one group, on each of its ranks."""
    size, group = where.world_size, {"process_group": where.group}
    everyone = [
        bare(),
        against_torch(TORCH, theirs(**group), size),
        against_torch("minidp", ours(**group), size),
        against_torch(SMALL_CAP, ours(bucket_cap_mb=1, **group), size),
        auto(size, **group),
    ]
    net = make(MODELS[args.model], smoke=args.smoke, device=where.device)
    plan = Plan.of(args.seconds, smoke=args.smoke)
    title = f"{net.title}; {size} rank{'s' if size > 1 else ''}"
    return Contest(title, everyone, net, plan, where=where).run()


def efficiency(found: Mapping[int, Measured], size: int, name: str) -> float:
    """Compute the throughput per rank over that of one rank without communication."""
    alone = found[min(found)].milliseconds(BARE)[1]
    return alone / found[size].milliseconds(name)[1]


def rows(found: Mapping[int, Measured], size: int) -> list[list[str]]:
    """Format the table of a group."""
    measured = found[size]
    return [
        [
            *measured.step_cells(name),
            f"{efficiency(found, size, name):.0%}",
            str(measured.ratio(BARE, name)),
            short(1e3 * float(np.median(measured.cpu[name]))),
            measured.wrong_cell(name),
        ]
        for name in measured.times
    ]


def chart(path: Path, found: Mapping[int, Measured], note: str) -> None:
    """Draw the efficiency over the number of ranks."""
    sizes = list(found)
    lines = {
        name: Line(colour, sizes, [100 * efficiency(found, n, name) for n in sizes])
        for name, colour in COLOURS.items()
    }
    words = Words("Weak scaling: throughput per rank", "efficiency, %", note)
    draw_lines(path, words, ("ranks", sizes), {found[sizes[0]].title: lines})


def run(args: argparse.Namespace, device: str) -> int:
    """Measure growing groups; rank 0 reports. Return 1 if a gradient was wrong."""
    backend, most = dist.get_backend(), dist.get_world_size()
    report = None
    if dist.get_rank() == 0:
        kind = "cpu" if device == "cpu" else torch.cuda.get_device_name()
        report = Report(args, "Weak scaling", backend=backend, device=kind, timed=TIMED)
    found: dict[int, Measured] = {}
    for size in sizes_up_to(most):
        group = dist.new_group(list(range(size)), timeout=TIMEOUT)
        if dist.get_rank() < size:
            found[size] = measure(args, Where(group, device))
        dist.barrier()
        if report is not None:
            measured = found[size]
            columns = [*STEP_COLUMNS, "efficiency", "bare step /\nstep (95%)"]
            columns += ["CPU, ms\nper rank", "#wrong"]
            facts = f"{measured.facts}; {backend}"
            report.show(table(measured.title, facts, columns, rows(found, size)))
            report.count_wrong(measured.wrong.values())
    if report is None:
        return 0
    content = {"groups": [each.as_json() for each in found.values()]}
    note = f"100%: one rank without communication. {report.header['date']}"
    stem = f"scaling_{args.model}_{device.partition(':')[0]}_{most}"
    return report.finish(stem, content, lambda path: chart(path, found, note))


def main() -> int:
    """Join torchrun's ranks. Return 1 if a gradient was wrong, 2 without torchrun."""
    parser = command_line(__doc__, seconds=20)
    parser.add_argument("--model", choices=list(MODELS), default="mlp")
    args = parser.parse_args()
    if "RANK" not in os.environ:
        if args.smoke:
            status: int = run_ranks(run, 2, args, "cpu")
            return status
        print("Start this script by torchrun; see --help.", file=sys.stderr)
        return 2
    device, backend = "cpu", "gloo"
    if torch.cuda.is_available():
        device, backend = f"cuda:{os.environ.get('LOCAL_RANK', '0')}", "nccl"
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(1)
    dist.init_process_group(backend, timeout=TIMEOUT)
    status = run(args, device)
    dist.destroy_process_group()
    return status


if __name__ == "__main__":
    sys.exit(main())
