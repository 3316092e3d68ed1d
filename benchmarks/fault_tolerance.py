"""What does surviving cost while nobody dies? minidp and torchft's DDP on its manager.

    python benchmarks/fault_tolerance.py                      # 4 minutes
    python benchmarks/fault_tolerance.py --cells mlp:2:4  # 2 Gbit/s, buckets of 4 MiB
    python benchmarks/fault_tolerance.py --smoke              # does it run? no numbers

Needs the extra minidp[torchft]. Two replicas train on torchft's own DDP, on
minidp.torchft, and on plain minidp (which ends when a replica dies), in turn, in the
same processes. A step is all of it: zero_grad(), which starts to look for a quorum,
forward, backward, and the optimizer's step, which asks the manager. Each of the first
two has a lighthouse and managers of its own. Ratios are paired by round (see the --help
of overhead.py). Plain minidp sends messages, too: torchft's groups share no memory.

Targets: at most 0.95 times torchft's step on the loopback device and 0.75 times at 2
Gbit/s, at most 1.03 times plain minidp's.
"""

from __future__ import annotations

import copy
import os
import sys
import time
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from support.estimates import median, ratio
from support.links import LOOPBACK, Link, address, why_not
from support.models import MODELS, make
from support.ranks import TIMEOUT, run_ranks
from support.report import (
    CPU_BACKEND,
    Report,
    Verdict,
    command_line,
    native_word,
    table,
)
from torch import nn

import minidp
from minidp.console import say_progress

os.environ.setdefault("RUST_LOG", "error")  # else torchft tells all it does
try:
    import torchft
    from torchft.coordination import LighthouseServer

    from minidp.torchft import DataParallel
except ImportError as error:
    print(f"This benchmark needs the extra minidp[torchft]: {error}")
    sys.exit(0 if "--smoke" in sys.argv else 1)

CELLS = ("mlp:loopback", "mlp:loopback:4", "mlp:2", "mlp:2:4")
TORCHFT, OURS, PLAIN = "torchft", "minidp.torchft", "plain minidp"
WARM_UP = 8
LIMITS = {LOOPBACK: 0.95, "2": 0.75}
OVER_PLAIN = 1.03


class Contestant:
    """A replica on one of the three, with its optimizer."""

    def __init__(self, name: str, net: nn.Module, where: str, cap: Any) -> None:
        net = copy.deepcopy(net)
        self.params = list(net.parameters())
        inner = torch.optim.SGD(self.params, lr=1e-4)
        if name == PLAIN:
            self.model: nn.Module = minidp.DataParallel(net, bucket_cap_mb=cap)
            self.optimizer: Any = inner
            return
        self.manager = self._manager(where)
        wrap = DataParallel if name == OURS else torchft.DistributedDataParallel
        self.model = wrap(self.manager, net, bucket_cap_mb=cap)
        self.optimizer = torchft.Optimizer(self.manager, inner)

    def _manager(self, where: str) -> Any:
        rank, box = dist.get_rank(), [""]
        if rank == 0:
            # Nobody dies, however long a busy machine lets a heartbeat wait.
            self.lighthouse = LighthouseServer(
                bind="0.0.0.0:0", min_replicas=2, heartbeat_timeout_ms=60_000
            )
            port = self.lighthouse.address().rpartition(":")[2]
            first = "127.0.0.1" if where == LOOPBACK else address(0)
            box = [f"http://{first}:{port}"]
        dist.broadcast_object_list(box)
        mine = "127.0.0.1" if where == LOOPBACK else address(rank)
        self.store = dist.TCPStore(mine, 0, is_master=True, wait_for_workers=False)
        return torchft.Manager(
            pg=torchft.ProcessGroupGloo(timeout=TIMEOUT),
            load_state_dict=print,  # never called
            state_dict=dict,
            min_replica_size=2,
            init_sync=False,  # the replicas start equal
            replica_id=f"replica_{rank}",
            store_addr=mine,
            store_port=self.store.port,
            rank=0,
            world_size=1,
            lighthouse_addr=box[0],
            hostname=mine,
            timeout=TIMEOUT,
        )

    def step(self, data: tuple[torch.Tensor, ...]) -> float:
        """Take a step; return its seconds."""
        dist.barrier()
        began = time.perf_counter()
        self.optimizer.zero_grad()
        self.model(*data).backward()
        self.optimizer.step()
        return time.perf_counter() - began


def measure(cell: str, seconds: float) -> dict[str, Any]:
    """Measure on every rank; return seconds by round, and wrong parameters, by name.

    ``cell`` is as in `CELLS`; 0 seconds: a smoke test.
    """
    model, where, cap = (*cell.split(":"), "25")[:3]
    smoke = not seconds
    net = make(MODELS[model], smoke=smoke)
    contestants = {
        name: Contestant(name, net, where, float(cap))
        for name in (TORCHFT, OURS, PLAIN)
    }

    generator = torch.Generator().manual_seed(dist.get_rank())
    times: dict[str, list[float]] = {name: [] for name in contestants}
    order, goes_on = list(contestants), torch.ones(1)
    number = 0
    while goes_on:
        data, number = net.data(generator), number + 1
        order.append(order.pop(0))
        for name in order:
            taken = contestants[name].step(data)
            if number > WARM_UP:
                times[name].append(taken)
        if number == WARM_UP:
            began = time.perf_counter()
        is_over = number > WARM_UP + 4 and (
            smoke or time.perf_counter() - began > seconds
        )
        goes_on = torch.tensor([0.0 if is_over else 1.0])
        dist.broadcast(goes_on, 0)
    expected = contestants[PLAIN].params
    wrong = {
        name: sum(
            not torch.allclose(mine, theirs, rtol=1e-3, atol=1e-5)
            for mine, theirs in zip(each.params, expected, strict=True)
        )
        for name, each in contestants.items()
    }
    both = {}
    for name, own in times.items():  # a step is as long as on the slower rank
        row = torch.tensor(own, dtype=torch.float64)
        dist.all_reduce(row, dist.ReduceOp.MAX)
        both[name] = row.tolist()
    for each in contestants.values():
        if hasattr(each, "manager"):
            each.manager.shutdown(wait=False)
    return {"title": net.title, "times": both, "wrong": wrong}


def main() -> int:
    """Measure and report. Return 1 if a gradient was wrong."""
    parser = command_line(__doc__, seconds=45)
    parser.add_argument("--cells", nargs="*", default=CELLS, metavar="MODEL:LINK[:MiB]")
    args = parser.parse_args()
    timed = "zero_grad, forward, backward, optimizer"
    report = Report(
        args, "What surviving costs while nobody dies", backend=CPU_BACKEND, timed=timed
    )
    results = {}
    cells = ["mlp:loopback"] if args.smoke else args.cells
    for number, cell in enumerate(cells, start=1):
        where = cell.split(":")[1]
        if where != LOOPBACK and (obstacle := why_not()):
            report.show(f"{cell} is skipped: it {obstacle}")
            continue
        os.environ["MINIDP_SHARED_MEMORY"] = "0"
        say_progress(f"cell {number} of {len(cells)}: {cell}")
        found = run_ranks(
            *(measure, 2, cell, 0 if args.smoke else args.seconds),
            link=Link.of(where),
        )
        times = {name: np.array(own) for name, own in found["times"].items()}
        rows = [
            [
                name,
                f"{median(own).value * 1e3:.2f}",
                str(ratio(own, times[TORCHFT])),
                str(ratio(own, times[PLAIN])),
                str(found["wrong"][name]),
            ]
            for name, own in times.items()
        ]
        columns = ["", "step, ms", "/ torchft (95%)", "/ plain minidp (95%)", "#wrong"]
        title, rounds = f"{found['title']}; {cell}", len(times[OURS])
        report.show(table(title, f"2 replicas, {rounds} rounds", columns, rows))
        report.count_wrong(found["wrong"].values())
        report.judge(
            [
                Verdict(
                    f"{cell}: minidp.torchft / torchft",
                    ratio(times[OURS], times[TORCHFT]),
                    LIMITS.get(where, 0.75),
                ),
                Verdict(
                    f"{cell}: minidp.torchft / plain minidp",
                    ratio(times[OURS], times[PLAIN]),
                    OVER_PLAIN,
                ),
            ]
        )
        results[cell] = found
    return report.finish(f"fault_tolerance_cpu_{native_word()}", {"results": results})


if __name__ == "__main__":
    sys.exit(main())
