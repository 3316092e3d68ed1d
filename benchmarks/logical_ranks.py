"""What do logical ranks cost? Time steps with them beside plain accumulation.

    python benchmarks/logical_ranks.py                    # 5 minutes
    python benchmarks/logical_ranks.py --smoke            # does it run? no numbers

Every implementation does the same forwards and backwards on each rank: one accumulates
them with no_sync(), the other has as many logical ranks. Ratios are paired by round
(see the --help of overhead.py). With 4 logical ranks for each rank, each rank brings
one sum; with 3 it brings two sums, so that more has to be added up.

Target: a step with logical ranks takes at most 1.05 times one of plain accumulation.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from support.models import NETS, make
from support.ranks import run_ranks
from support.report import (
    CPU_BACKEND,
    TIMED,
    Report,
    Verdict,
    command_line,
    native_word,
    table,
)
from support.rounds import STEP_COLUMNS, Contest, Implementation, Measured, Plan
from torch import nn

import minidp

MODELS = ("small", "mlp", "transformer")
CELLS = ((1, 4), (2, 4), (2, 3))  # ranks, and logical ranks for each of them
PLAIN, AGAIN, LOGICAL = "no_sync()", "no_sync() again", "logical ranks"
LIMIT = 1.05


class Accumulates(nn.Module):
    """Runs some backwards inside no_sync(), and returns the loss of the last one."""

    def __init__(self, module: nn.Module, count: int) -> None:
        super().__init__()
        self.count = count
        self.ddp: Any = minidp.DataParallel(module)

    def forward(self, *data: torch.Tensor) -> Any:
        """Return the last loss; the mean over all is what the gradients are of."""
        with self.ddp.no_sync():
            for _ in range(self.count - 1):
                (self.ddp(*data) / self.count).backward()
        return self.ddp(*data) / self.count


class HasLogicalRanks(nn.Module):
    """Does as many logical ranks on each rank, the last one in `finish_step`."""

    def __init__(self, module: nn.Module, count: int) -> None:
        super().__init__()
        self.count = count
        total = count * dist.get_world_size()
        self.ddp: Any = minidp.DataParallel(module, logical_ranks=total)
        self._turns: Iterator[int] = iter(())

    def forward(self, *data: torch.Tensor) -> Any:
        """Return the loss of the last logical rank of this rank."""
        self._turns = self.ddp.each_logical_rank()
        for _ in range(self.count - 1):
            next(self._turns)
            self.ddp(*data).backward()
        next(self._turns)
        return self.ddp(*data)

    def finish_step(self) -> None:
        """End the loop over logical ranks."""
        for _ in self._turns:
            pass


def _measure(model: str, plan: Plan, count: int, *, smoke: bool) -> Measured:
    """Measure one model, on every rank."""
    net = make(NETS[model], smoke=smoke)
    plain = functools.partial(Accumulates, count=count)
    logical = functools.partial(HasLogicalRanks, count=count)
    everyone = [
        Implementation(PLAIN, plain, PLAIN),
        Implementation(AGAIN, plain, PLAIN),
        Implementation(LOGICAL, logical, PLAIN, is_exact=False),
    ]
    size = dist.get_world_size()
    ranks = f"{size} rank{'s' if size > 1 else ''}"
    title = f"{net.title}; {ranks}, {count * size} logical ranks"
    return Contest(title, everyone, net, plan).run()


def main() -> int:
    """Measure and report. Return 1 if a gradient was wrong."""
    args = command_line(__doc__, seconds=25).parse_args()
    report = Report(args, "What logical ranks cost", backend=CPU_BACKEND, timed=TIMED)
    plan = Plan.of(args.seconds, smoke=args.smoke)
    found = []
    for size, count in CELLS[1:] if args.smoke else CELLS:
        for model in MODELS[:1] if args.smoke else MODELS:
            task: Callable[..., Measured] = functools.partial(
                _measure, smoke=args.smoke
            )
            measured: Measured = run_ranks(task, size, model, plan, count)
            found.append(measured)
            columns = [*STEP_COLUMNS, f"step /\n{PLAIN} (95%)", "#wrong"]
            rows = [
                [
                    *measured.step_cells(name),
                    str(measured.ratio(name, PLAIN)),
                    measured.wrong_cell(name),
                ]
                for name in (PLAIN, AGAIN, LOGICAL)
            ]
            report.show(table(measured.title, measured.facts, columns, rows))
            report.count_wrong(measured.wrong.values())
            ratio = measured.ratio(LOGICAL, PLAIN)
            report.judge([Verdict(measured.title, ratio, LIMIT)])
    content = {"results": [each.as_json() for each in found]}
    return report.finish(f"logical_ranks_cpu_{native_word()}", content)


if __name__ == "__main__":
    sys.exit(main())
