"""A recorded training as report, picture and Chrome trace: torch's layout, and auto's.

    python benchmarks/timeline.py                      # 2 Gbit/s, half a minute
    python benchmarks/timeline.py --link loopback      # without root
    python benchmarks/timeline.py --smoke              # does it run? no files

What is in the files is in the project's README, under "See the overlap".
"""

from __future__ import annotations

import argparse
import functools
import sys
from pathlib import Path

import torch
from support.links import Link, why_not
from support.models import MODELS
from support.nets import Net
from support.output import check_native, results_folder
from support.ranks import run_ranks
from support.report import (
    can_draw,
    header,
    header_table,
    native_line,
    report_console,
    write_markdown,
)
from torch.optim import SGD

import minidp
from minidp._chrome_trace import chrome_trace
from minidp._picture import draw
from minidp._timeline import from_json, to_json
from minidp.report import report

LOOPBACK = "loopback"
LAYOUTS = {"default": None, "auto": "auto"}  # of bucket_cap_mb
SETTLING, STEPS = 52, 24  # until auto has chosen; recorded


def record_on_rank(cap: str | None, *, is_small: bool, native: str) -> str:
    """On every rank: train, and bring home what all ranks recorded."""
    check_native(native)
    torch.manual_seed(0)
    net: Net = MODELS["mlp"].smoke() if is_small else MODELS["mlp"].full()
    model = minidp.DataParallel(net, bucket_cap_mb=cap)
    optimizer = SGD(model.parameters(), lr=1e-6)

    def train(steps: int) -> None:
        for number in range(steps):
            data = net.data(torch.Generator().manual_seed(number))
            optimizer.zero_grad()
            model(*data).backward()
            optimizer.step()

    train(3 if is_small else SETTLING)
    with minidp.record(model) as recording:
        train(3 if is_small else STEPS)
    return to_json(recording.gather().timelines)


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    add = parser.add_argument
    add("--smoke", action="store_true", help="a tiny model on the loopback device")
    add("--link", default="2", metavar="L", help="Gbit/s, or loopback (default: 2)")
    add("--ranks", type=int, default=2, metavar="N", help="number of ranks (default 2)")
    add(
        "--out",
        type=Path,
        metavar="FOLDER",
        help="where the files go (default: benchmarks/results)",
    )
    args = parser.parse_args()
    if args.smoke:
        args.link = LOOPBACK
    return args


def run(args: argparse.Namespace, folder: Path) -> None:
    """Record, print, write."""
    console = report_console()
    link = None if args.link == LOOPBACK else Link(float(args.link))
    lines = header(
        native=native_line(), ranks=str(args.ranks), link=str(link or LOOPBACK)
    )
    console.print(header_table(lines), "")
    task = functools.partial(
        record_on_rank, is_small=args.smoke, native=lines["native"]
    )
    stem = f"timeline_cpu_{args.link}_{args.ranks}_{lines['date']}"
    for name, cap in LAYOUTS.items():
        timelines = from_json(run_ranks(task, args.ranks, cap, link=link))
        console.print(f"bucket_cap_mb: {name}", style="bold")
        console.print(report(timelines), "", markup=False, highlight=False)
        if can_draw():
            draw(timelines, folder / f"{stem}_{name}.png")
        trace = chrome_trace(timelines)
        (folder / f"{stem}_{name}_trace.json").write_text(trace)
    write_markdown(folder / f"{stem}.md", "One training, recorded", console)


def main() -> int:
    """Run; 2 where there can be no such link."""
    args = parse()
    reason = "" if args.link == LOOPBACK else why_not()
    if reason:
        print(f"No link of a limited rate: {reason}.", file=sys.stderr)
        return 2
    with results_folder(args.out, smoke=args.smoke) as folder:
        run(args, folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
