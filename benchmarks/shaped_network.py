"""A network between ranks of this machine, with every rank's link limited to a rate.

    python benchmarks/shaped_network.py --check               # does it keep the rates?
    python benchmarks/shaped_network.py --gbit 2 --ranks 4 -- python train.py

The second starts the command once per rank, with torchrun's variables (RANK,
WORLD_SIZE, MASTER_ADDR, ...) and with Gloo and NCCL told which device to use; if one
rank fails, the others are ended. Each rank lives in a network namespace without a name
that vanishes with it: nothing is left behind after Ctrl-C or `kill -9`, and nothing of
the host's network is touched. The ranks reach each other and nothing else. Needs root
and iproute2.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from support.links import Link, Rate, address, measured_rate, why_not
from support.ranks import run_ranks
from support.report import header, header_table, report_console

GBIT = (1.0, 2.0, 10.0)
RANKS = (2, 3, 4)
PORT = "29500"  # of the ranks' own network: it is always free
PR_SET_PDEATHSIG = 1


# -- a command on each rank ------------------------------------------------------------


def launch(link: Link, world_size: int, command: Sequence[str]) -> int:
    """Run ``command`` as every rank; return the first exit status that is not 0."""
    with tempfile.TemporaryDirectory() as folder:
        ranks = {}
        for rank in range(world_size):
            process = os.fork()
            if process == 0:
                _become(link, rank, world_size, Path(folder) / "store", command)
            ranks[process] = rank
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, _raise_exit)
        try:
            return _first_failure(ranks)
        finally:
            _end(ranks)


def _become(
    link: Link, rank: int, world_size: int, store: Path, command: Sequence[str]
) -> NoReturn:
    """In a new process: join the network, and turn into the command."""
    try:
        # The parent may be killed at any moment, and then cannot end anybody.
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        device = link.join(rank, world_size, dist.FileStore(str(store), world_size))
        os.environ.update(
            RANK=str(rank),
            LOCAL_RANK=str(rank),
            WORLD_SIZE=str(world_size),
            LOCAL_WORLD_SIZE=str(world_size),
            MASTER_ADDR=address(0),
            MASTER_PORT=PORT,
            GLOO_SOCKET_IFNAME=device,
            NCCL_SOCKET_IFNAME=device,
        )
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        os.execvp(command[0], command)
    except Exception as error:  # a fork must not run on in its parent's code
        print(f"rank {rank}: {error}", file=sys.stderr)
    os._exit(127)


def _raise_exit(number: int, _frame: object) -> NoReturn:
    raise SystemExit(128 + number)


def _first_failure(ranks: dict[int, int]) -> int:
    """Wait for all processes, or for the first that fails; forget those that ended."""
    while ranks:
        process, status = os.wait()
        rank = ranks.pop(process)
        code = os.waitstatus_to_exitcode(status)
        if code != 0:
            if ranks:
                print(f"rank {rank}: exit status {code}", file=sys.stderr)
            return code if code > 0 else 128 - code
    return 0


def _end(ranks: dict[int, int]) -> None:
    """Ask the processes to end, and insist after a while."""
    for number, patience_s in ((signal.SIGTERM, 5.0), (signal.SIGKILL, None)):
        for process in ranks:
            os.kill(process, number)
        until = None if patience_s is None else time.monotonic() + patience_s
        while ranks and (until is None or time.monotonic() < until):
            process, _ = os.waitpid(-1, 0 if until is None else os.WNOHANG)
            ranks.pop(process, None)
            if process == 0:
                time.sleep(0.02)


# -- the check -------------------------------------------------------------------------


def check(rates: Sequence[float], sizes: Sequence[int], nbytes: int) -> Table:
    """Measure every network, and describe what it gave."""
    table = Table(title="all-reduce with Gloo", title_justify="left", box=None)
    columns = (
        "ranks",
        "link, Gbit/s",
        "each way, Gbit/s",
        "of the link",
        "4 bytes, ms",
    )
    for column in columns:
        table.add_column(column, justify="right")
    for world_size in sizes:
        for gbit in rates:
            link = Link(gbit)
            rate: Rate = run_ranks(measured_rate, world_size, nbytes, 5, link=link)
            table.add_row(
                str(world_size),
                f"{gbit:g}",
                f"{rate.gbit:.2f}",
                f"{rate.gbit / gbit:.0%}",
                f"{1e3 * rate.latency_s:.2f}",
            )
    return table


# -- the program -----------------------------------------------------------------------


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").partition("\n")[0],
        usage="%(prog)s [--gbit G ...] [--ranks N ...] (--check | -- COMMAND ...)",
        epilog="benchmarks/README.md says how the network is built.",
    )
    add = parser.add_argument
    add(
        "--check", action="store_true", help="measure what an all-reduce gets out of it"
    )
    add(
        "--smoke",
        action="store_true",
        help="a short check of one rate; if no such network can be made here, says why "
        "and counts as success",
    )
    add(
        "--gbit",
        nargs="+",
        type=float,
        metavar="G",
        help="rate of each rank's link, in Gbit/s (default: 2; for --check: 1 2 10)",
    )
    add(
        "--ranks",
        nargs="+",
        type=int,
        metavar="N",
        help="number of ranks (default: 2; for --check: 2 3 4)",
    )
    add("command", nargs="*", metavar="COMMAND", help="after `--`: what each rank runs")
    args = parser.parse_args()
    if bool(args.command) == (args.check or args.smoke):
        parser.error("expected --check, or `--` and a command (and not both)")
    if args.command and max(len(args.gbit or []), len(args.ranks or [])) > 1:
        parser.error("a command runs on one network: expected one rate, one number")
    if min(args.ranks or [2]) < 2 or max(args.ranks or [2]) > 250:
        parser.error(f"expected 2 to 250 ranks, but got {args.ranks}")
    if min(args.gbit or [1.0]) <= 0:
        parser.error(f"expected rates above 0, but got {args.gbit}")
    return args


def main() -> int:
    """Run; the command's status, or 2 where there can be no such network."""
    args = parse()
    reason = why_not()
    if reason:
        print(f"No shaped network here: {reason}.", file=sys.stderr)
        return 0 if args.smoke else 2
    if args.command:
        gbit, ranks = (args.gbit or [2.0])[0], (args.ranks or [2])[0]
        return launch(Link(gbit), ranks, args.command)
    console: Console = report_console()
    if args.smoke:
        console.print(check(args.gbit or [1.0], args.ranks or [2, 3], 2**18))
        return 0
    console.print(header_table(header(message="16 MiB, median of 5")), "")
    console.print(check(args.gbit or GBIT, args.ranks or RANKS, 16 * 2**20))
    return 0


if __name__ == "__main__":
    sys.exit(main())
