"""Limit the rate of each rank's link on this machine: for a program, or to check it.

    python benchmarks/shaped_network.py --gbit 2 --ranks 4 -- python train.py
    python benchmarks/shaped_network.py --check               # does it keep the rates?

The first starts the command once per rank, with torchrun's variables (RANK, WORLD_SIZE,
MASTER_ADDR, ...) and with Gloo and NCCL told which device to use. If one rank fails,
the others are ended. Each rank lives in a network namespace without a name, which
vanishes with the rank, also after Ctrl-C or `kill -9`. The host's network is not
touched. The ranks reach each other and nothing else. Needs root and iproute2;
support/links.py says how the network is built.

--check compares what an all-reduce of 16 MiB achieves with the rate. "Each way" is what
a rank sends, and receives: 2 (n - 1) / n times the bytes of the message, over the time.
At 10 Gbit/s two cores are the limit, not the link.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NoReturn

import torch.distributed as dist
from support.links import Link, Rate, address, measured_rate, why_not
from support.ranks import run_ranks
from support.report import Report, command_line, table

from minidp.console import say_progress

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
    """In a new process: join the network, and exec the command."""
    try:
        # If the parent is killed, nobody else ends this rank.
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
        print(f"[rank {rank}] {error}", file=sys.stderr)
    os._exit(127)


def _raise_exit(number: int, _frame: object) -> NoReturn:
    raise SystemExit(128 + number)


def _first_failure(ranks: dict[int, int]) -> int:
    """Wait for all processes or the first failure; remove those that ended."""
    while ranks:
        process, status = os.wait()
        rank = ranks.pop(process)
        code = os.waitstatus_to_exitcode(status)
        if code != 0:
            if ranks:
                print(f"[rank {rank}] exit status {code}", file=sys.stderr)
            return code if code > 0 else 128 - code
    return 0


def _end(ranks: dict[int, int]) -> None:
    """Terminate the processes; kill them after 5 seconds."""
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


def rows(args: argparse.Namespace, nbytes: int) -> Iterator[list[str]]:
    """Measure every network; yield the rows of the table."""
    for world_size in args.ranks or RANKS:
        for gbit in args.gbit or GBIT:
            link = Link(gbit)
            say_progress(f"measuring {world_size} ranks at {gbit:g} Gbit/s")
            rate: Rate = run_ranks(measured_rate, world_size, nbytes, 5, link=link)
            share, latency = f"{rate.gbit / gbit:.0%}", f"{1e3 * rate.latency_s:.2f}"
            yield [str(world_size), f"{gbit:g}", f"{rate.gbit:.2f}", share, latency]


# -- the program -----------------------------------------------------------------------


def parse() -> argparse.Namespace:
    """Parse the command line."""
    usage = "%(prog)s [--gbit G ...] [--ranks N ...] (--check | -- COMMAND ...)"
    parser = command_line(__doc__, usage=usage)
    add = parser.add_argument
    add("--check", action="store_true", help="measure what an all-reduce achieves")
    rates = "Gbit/s of each rank's link (default: 2; for --check: 1 2 10)"
    add("--gbit", nargs="+", type=float, metavar="G", help=rates)
    sizes = "number of ranks (default: 2; for --check: 2 3 4)"
    add("--ranks", nargs="+", type=int, metavar="N", help=sizes)
    add("command", nargs="*", metavar="COMMAND", help="after `--`: what each rank runs")
    args = parser.parse_args()
    if bool(args.command) == (args.check or args.smoke):
        parser.error("expected --check, or `--` and a command (and not both)")
    if args.command and max(len(args.gbit or []), len(args.ranks or [])) > 1:
        parser.error("a command runs on one network: expected one rate, one number")
    if min(args.ranks or [2]) < 2 or max(args.ranks or [2]) > 250:
        parser.error(f"--ranks: expected 2 to 250, but got {args.ranks}")
    if min(args.gbit or [1.0]) <= 0:
        parser.error(f"--gbit: expected rates above 0, but got {args.gbit}")
    return args


def main() -> int:
    """Run; return the command's status, or 2 where there can be no such network."""
    args = parse()
    if reason := why_not():
        print(f"No shaped network here: {reason}.", file=sys.stderr)
        return 0 if args.smoke else 2
    if args.command:
        gbit, ranks = (args.gbit or [2.0])[0], (args.ranks or [2])[0]
        return launch(Link(gbit), ranks, args.command)
    nbytes = 16 * 2**20
    if args.smoke:
        args.gbit, args.ranks, nbytes = args.gbit or [1.0], args.ranks or [2, 3], 2**18
    title = "All-reduce with Gloo on links of a limited rate"
    report = Report(args, title, message=f"{nbytes / 2**20:g} MiB, median of 5")
    columns = ["ranks", "link,\nGbit/s", "each way,\nGbit/s", "of the\nlink"]
    found = list(rows(args, nbytes))
    report.show(table("all-reduce", "", [*columns, "4 bytes,\nms"], found))
    return report.finish("shaped_network", {"rows": found})


if __name__ == "__main__":
    sys.exit(main())
