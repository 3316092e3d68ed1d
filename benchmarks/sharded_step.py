"""What does a whole step take if the ranks divide the optimizer's work among them?

    python benchmarks/sharded_step.py                   # 12 minutes
    python benchmarks/sharded_step.py --cells layers    # while working
    python benchmarks/sharded_step.py --smoke           # does it run? no numbers

A step is forward, backward, optimizer.step() and zero_grad(), with AdamW, on two ranks
of this machine with one thread each. Everybody takes turns, in the same processes, each
on weights of its own; a round has one turn of each, in an order that rotates. A turn is
four steps, and ends when all values of parameters are there: what one step leaves to
the next one is in the time, too.

Cells:
  layers    MLP, 24 layers of 4 MiB
  resnet50  the parameters of ResNet-50, 98 MiB, and no arithmetic that hides anything
  gpt2      the parameters of GPT-2 small, 475 MiB, likewise; in gpt2_rows and
            gpt2_backward with other ways to divide the step, as memory is short
  ..._fused the same models with AdamW(fused=True), for which there are no targets
  link      MLP of 27 MiB on a link of 1 Gbit/s (needs root), without shared memory.
            Where parameters from 1 MiB on are divided by rows (split), a message goes
            in both directions at once

Columns: a step's share of a turn on the slowest rank, its ratio to torch's DDP with
AdamW in the same round, the optimizer's state on the rank that has most of it, the peak
of memory beyond the weights in the first steps, and the number of weights that differ
from those of torch's DDP at the end (not 0: exit status 1). On the link there is also
the bound of any DDP: no layout of buckets could end a backward earlier whose gradients
come when those of torch's DDP came (support/bound.py). "In backward" has
step_in_backward after sharded_step: a bucket steps as soon as it is reduced.

Targets: with a divided step at most 0.45 of torch's DDP with AdamW, 0.40 of torch's DDP
with ZeroRedundancyOptimizer, and less memory; on the link 0.70 of torch's DDP, and less
than the bound.
"""

from __future__ import annotations

import gc
import os
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from support.bound import BoundWatcher
from support.estimates import Estimate, Times, ratio
from support.links import Link, why_not
from support.memory import memory_of
from support.models import NETS, Mlp, Net, make
from support.ranks import run_ranks
from support.report import (
    CPU_BACKEND,
    Report,
    Verdict,
    command_line,
    native_word,
    table,
)
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW, Optimizer

import minidp

MIB = 2**20
TORCH, ZERO = "torch, AdamW", "torch, ZeroRedundancyOptimizer"
PLAIN, SHARDED = "minidp, AdamW", "minidp, sharded_step"
OVERLAPPED = "minidp, overlap_param_gather"
SPLIT, BOTH = "minidp, split_from_mb=1", "minidp, split, overlap"
IN_BACKWARD = "minidp, sharded_step, in backward"
BOTH_IN_BACKWARD = "minidp, split, overlap, in backward"
LINK = Link(1.0)
TIMES = "forward, backward, optimizer.step() and zero_grad()"
WARM_UP = 2  # turns
STEPS = 4  # of a turn
# Whose time is compared with the targets, if it is not a plain divided step.
JUDGED = {
    "link": BOTH_IN_BACKWARD,
    "gpt2_rows": SPLIT,
    "gpt2_backward": IN_BACKWARD,
}
LIMITS = {TORCH: 0.45, ZERO: 0.40}
LIMIT_ON_LINK = 0.70


class Made(NamedTuple):
    """A model that is trained."""

    model: nn.Module
    optimizer: Optimizer
    steps_by_itself: bool = False  # inside the backward


def _torch(net: nn.Module, **options: bool) -> Made:
    return Made(DistributedDataParallel(net), AdamW(net.parameters(), **options))


def _zero(net: nn.Module, **options: bool) -> Made:
    optimizer = ZeroRedundancyOptimizer(
        net.parameters(), optimizer_class=AdamW, **options
    )
    return Made(DistributedDataParallel(net), optimizer)


def _plain(net: nn.Module, **options: bool) -> Made:
    return Made(minidp.DataParallel(net), AdamW(net.parameters(), **options))


def _sharded(
    net: nn.Module,
    *,
    overlaps: bool = False,
    split: float | None = None,
    in_backward: bool = False,
    **options: bool,
) -> Made:
    model = minidp.DataParallel(net)
    optimizer = AdamW(net.parameters(), **options)
    model.sharded_step(optimizer, overlap_param_gather=overlaps, split_from_mb=split)
    if in_backward:
        model.step_in_backward(optimizer)
    return Made(model, optimizer, steps_by_itself=in_backward)


EVERYONE: dict[str, Callable[..., Made]] = {
    TORCH: _torch,
    ZERO: _zero,
    PLAIN: _plain,
    SHARDED: _sharded,
    SPLIT: partial(_sharded, split=1.0),
    OVERLAPPED: partial(_sharded, overlaps=True),
    BOTH: partial(_sharded, overlaps=True, split=1.0),
    IN_BACKWARD: partial(_sharded, in_backward=True),
    BOTH_IN_BACKWARD: partial(_sharded, overlaps=True, split=1.0, in_backward=True),
}
CELLS: dict[str, tuple[str, ...]] = {
    "layers": (TORCH, ZERO, PLAIN, SHARDED, SPLIT, OVERLAPPED, IN_BACKWARD),
    "resnet50": (TORCH, ZERO, PLAIN, SHARDED, SPLIT, OVERLAPPED, IN_BACKWARD),
    # Four of these need more than 20 GiB.
    "gpt2": (TORCH, ZERO, SHARDED),
    "gpt2_rows": (TORCH, ZERO, SPLIT),
    "gpt2_backward": (TORCH, ZERO, IN_BACKWARD),
    "layers_fused": (TORCH, ZERO, PLAIN, SHARDED),
    "resnet50_fused": (TORCH, ZERO, PLAIN, SHARDED),
    "gpt2_fused": (TORCH, ZERO, SHARDED),
    "link": tuple(EVERYONE),
}


def _made(name: str, net: nn.Module, cell: str) -> Made:
    options = {"fused": True} if _is_fused(cell) else {}
    return EVERYONE[name](net, **options)


def _is_fused(cell: str) -> bool:
    return cell.endswith("_fused")


class Found(NamedTuple):
    """What was measured of one implementation."""

    times: Times  # seconds of a step, by round, on the slowest rank
    state: int  # bytes on the rank that has most
    wrong: int


def _net(cell: str, *, smoke: bool) -> Net:
    if smoke:
        return make(NETS["mlp"], smoke=True)
    if cell.startswith("layers"):
        return _lively(Mlp(24, 1024, 8))
    if cell == "link":
        return Mlp(7, 1005, 64)
    return make(NETS[cell.partition("_")[0]], smoke=False)


def _lively(net: Net) -> Net:
    """Return a net whose gradients do not vanish on their way through the layers.

    Their squares would be denormal numbers, with which AdamW takes four times as long,
    so that nothing else would be seen.
    """
    for param in net.parameters():
        nn.init.kaiming_normal_(param, nonlinearity="relu")
    return net


def _state_bytes(optimizer: Any) -> int:
    inner = getattr(optimizer, "optim", optimizer)
    states = inner.state.values()
    own = sum(
        v.nbytes for s in states for v in s.values() if isinstance(v, torch.Tensor)
    )
    most = torch.tensor(own)
    dist.all_reduce(most, dist.ReduceOp.MAX)
    return int(most)


def _turn(made: Made, data: Any, watcher: BoundWatcher | None = None) -> float:
    """Take some steps; return how long one took on the slowest rank."""
    model, optimizer, steps_by_itself = made
    dist.barrier()
    start = time.perf_counter()
    for _ in range(STEPS):
        begin_ns = time.perf_counter_ns()
        model(*data).backward()
        if watcher is not None:
            watcher.end_step(begin_ns)
        if not steps_by_itself:
            optimizer.step()
        optimizer.zero_grad()
    for param in model.parameters():
        param.detach()  # waits for values that are on their way
    took = (time.perf_counter() - start) / STEPS
    return float(_most(took))


def _most(value: float) -> torch.Tensor:
    """Return the largest value among the ranks."""
    found = torch.tensor(value, dtype=torch.float64)
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return found


def _peaks(cell: str, *, smoke: bool) -> dict[str, int]:
    """Return the peak of memory beyond the weights of each implementation.

    It needs processes of its own, whose C library gives back what is freed.
    """
    if cell == "link":
        os.environ["MINIDP_SHARED_MEMORY"] = "0"
    found = {}
    # The first one is measured twice: what torch and Gloo keep for good is there then.
    for name in (TORCH, *CELLS[cell]):
        net = _net(cell, smoke=smoke)
        data = net.data(torch.Generator().manual_seed(0))

        def train(name: str = name, net: Net = net, data: Any = data) -> object:
            made = _made(name, net, cell)
            _turn(made, data)
            return made

        gc.collect()
        found[name] = int(_most(memory_of(train)[0]))
    return found


def _measure(
    cell: str, seconds: float, *, smoke: bool
) -> tuple[str, dict[str, Found], Times | None]:
    """Measure one cell, on every rank: its title, what was found, and the bound."""
    if cell == "link":
        os.environ["MINIDP_SHARED_MEMORY"] = "0"
    names = CELLS[cell]
    made: dict[str, Made] = {}
    nets: dict[str, Net] = {}
    for name in names:
        torch.manual_seed(0)
        nets[name] = _net(cell, smoke=smoke)
        made[name] = _made(name, nets[name], cell)
    watcher = BoundWatcher(nets[TORCH], LINK) if cell == "link" else None
    times: dict[str, list[float]] = {name: [] for name in names}
    generator = torch.Generator().manual_seed(dist.get_rank())
    fewest = 2 if smoke else 10
    start, number = time.perf_counter(), 0
    while True:
        data = nets[TORCH].data(generator)
        turn = number % len(names)
        for name in (*names[turn:], *names[:turn]):
            took = _turn(made[name], data, watcher if name == TORCH else None)
            if number >= WARM_UP:
                times[name].append(took)
        number += 1
        goes_on = number < WARM_UP + fewest or time.perf_counter() - start < seconds
        flag = torch.tensor(int(goes_on))
        dist.broadcast(flag, 0)
        if not flag:
            break
    found = {}
    weights = [p.detach() for p in nets[TORCH].parameters()]
    for name in names:
        pairs = zip(nets[name].parameters(), weights, strict=True)
        wrong = sum(int((p != w).sum()) for p, w in pairs)
        state = _state_bytes(made[name].optimizer)
        found[name] = Found(np.array(times[name]), state, wrong)
    bounds = None
    if watcher is not None:
        each_round = watcher.result().reshape(-1, STEPS)[WARM_UP:]
        bounds = each_round.mean(axis=1)
    return nets[TORCH].title, found, bounds


def _report(
    cell: str,
    title: str,
    found: dict[str, Found],
    peaks: dict[str, int],
    bounds: Times | None,
    report: Report,
) -> None:
    columns = ["implementation", "step, ms\nmedian", "\np10-p90"]
    columns += [f"step /\n{TORCH} (95%)", "state,\nMiB", "peak,\nMiB", "#wrong"]
    rows = []
    for name, each in found.items():
        low, middle, high = np.percentile(each.times * 1000, [10, 50, 90])
        rows.append(
            [
                name,
                f"{middle:.1f}",
                f"{low:.1f}-{high:.1f}",
                str(_ratio(found, name, TORCH)),
                f"{each.state / MIB:.1f}",
                f"{peaks[name] / MIB:.1f}",
                str(each.wrong),
            ]
        )
    if bounds is not None:
        bound = f"{1e3 * float(np.median(bounds)):.1f}"
        over = str(ratio(bounds, found[TORCH].times))
        rows.append(["bound of any DDP, without AdamW", bound, "", over, "", "", ""])
    place = f"2 ranks on a {LINK} link" if cell == "link" else "2 ranks"
    rounds = f"{len(found[TORCH].times)} rounds"
    report.show(table(f"{title}; {place}", rounds, columns, rows))
    report.count_wrong(each.wrong for each in found.values())
    report.judge(_verdicts(cell, found, bounds))


def _verdicts(
    cell: str, found: dict[str, Found], bounds: Times | None
) -> list[Verdict]:
    if _is_fused(cell):
        return []
    name = JUDGED.get(cell, SHARDED)
    limits = {TORCH: LIMIT_ON_LINK} if cell == "link" else LIMITS
    verdicts = [
        Verdict(f"{cell}: {name} / {base}", _ratio(found, name, base), limit)
        for base, limit in limits.items()
    ]
    if bounds is not None:
        over_bound = ratio(found[name].times, bounds)
        verdicts.append(Verdict(f"{cell}: {name} / bound", over_bound, 1.0))
    return verdicts


def _ratio(found: dict[str, Found], name: str, base: str) -> Estimate:
    return ratio(found[name].times, found[base].times)


def main() -> int:
    """Measure and report. Return 1 if a weight was wrong."""
    parser = command_line(__doc__, seconds=40)
    parser.add_argument("--cells", default=",".join(CELLS), help="comma-separated")
    args = parser.parse_args()
    report = Report(args, "Divided steps", backend=CPU_BACKEND, timed=TIMES)
    results = {}
    for cell in args.cells.split(","):
        link = LINK if cell == "link" else None
        if link is not None and (reason := why_not()):
            report.show(f"The cell on a link is skipped: {reason}.")
            continue
        if args.smoke and cell not in ("layers", "link"):
            continue
        title, found, bounds = run_ranks(
            partial(_measure, smoke=args.smoke),
            2,
            cell,
            0.0 if args.smoke else args.seconds,
            link=link,
        )
        peaks = run_ranks(partial(_peaks, smoke=args.smoke), 2, cell, link=link)
        _report(cell, title, found, peaks, bounds, report)
        results[cell] = {
            name: {
                "seconds": each.times.tolist(),
                "state": each.state,
                "peak": peaks[name],
            }
            for name, each in found.items()
        }
    return report.finish(f"sharded_step_cpu_{native_word()}", {"results": results})


if __name__ == "__main__":
    sys.exit(main())
