"""What do logical ranks cost? Time steps with them beside plain accumulation.

    python benchmarks/logical_ranks.py                    # 5 minutes
    python benchmarks/logical_ranks.py --smoke            # does it run? no numbers

Every implementation does the same forwards and backwards on each rank: one accumulates
them with no_sync(), the other has as many logical ranks. Ratios are paired by round
(see the --help of overhead.py). With 4 logical ranks for each rank, each rank brings
one sum; with 3 it brings two sums, so that more has to be added up.

A fourth row has steps with logical ranks of which each is audited. In training one of
many is, and the mean step is computed from both (the others are those of logical
ranks). All ranks train on the same data here, so that a logical rank has the same
gradients wherever it is computed.

Targets: a step with logical ranks takes at most 1.05 times one of plain accumulation;
with audit_every="auto" at most 1.01 times one without audits.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from support.estimates import Estimate
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
from minidp.config import AUDIT_STEPS

MODELS = ("small", "mlp", "transformer")
# Ranks, and logical ranks for each of them.
CELLS = ((1, 4), (2, 4), (2, 3), (2, 1))
PLAIN, AGAIN, LOGICAL = "no_sync()", "no_sync() again", "logical ranks"
AUDITED = "an audited step"
LIMIT, LIMIT_OF_AUDIT = 1.05, 1.01


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

    def __init__(self, module: nn.Module, count: int, audit_every: int = 0) -> None:
        super().__init__()
        total = count * dist.get_world_size()
        self.ddp: Any = minidp.DataParallel(
            module, logical_ranks=total, audit_every=audit_every
        )
        self._turns: Iterator[int] = iter(())

    def forward(self, *data: torch.Tensor) -> Any:
        """Return the loss of the last logical rank of this rank."""
        self._turns = self.ddp.each_logical_rank()
        while next(self._turns) != self.ddp.logical_block[-1]:
            self.ddp(*data).backward()
        return self.ddp(*data)

    def finish_step(self) -> None:
        """End the loop over logical ranks."""
        for _ in self._turns:
            pass


class SameData(Contest):
    """Lets all ranks train on the same data."""

    def _next_data(self) -> tuple[torch.Tensor, ...]:
        self._rounds += 1
        return self._net.data(torch.Generator().manual_seed(self._rounds))


def _with_audits(audited: Estimate) -> Estimate:
    """Return the mean step at ``audit_every="auto"``, relative to one without audits.

    Args:
        audited: an audited step, relative to one that is not.
    """
    numbers = audited.value, audited.low, audited.high
    return Estimate(*(1 + (number - 1) / AUDIT_STEPS for number in numbers))


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
    if size > 1:
        audited = functools.partial(logical, audit_every=1)
        everyone.append(Implementation(AUDITED, audited, PLAIN, is_exact=False))
    ranks = f"{size} rank{'s' if size > 1 else ''}"
    title = f"{net.title}; {ranks}, {count * size} logical ranks"
    return SameData(title, everyone, net, plan).run()


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
                for name in measured.times
            ]
            report.show(table(measured.title, measured.facts, columns, rows))
            report.count_wrong(measured.wrong.values())
            ratio = measured.ratio(LOGICAL, PLAIN)
            verdicts = [Verdict(measured.title, ratio, LIMIT)]
            if AUDITED in measured.times:
                what = f"{measured.title}, with an audit in {AUDIT_STEPS} steps"
                mean = _with_audits(measured.ratio(AUDITED, LOGICAL))
                verdicts.append(Verdict(what, mean, LIMIT_OF_AUDIT))
            report.judge(verdicts)
    content = {"results": [each.as_json() for each in found]}
    return report.finish(f"logical_ranks_cpu_{native_word()}", content)


if __name__ == "__main__":
    sys.exit(main())
