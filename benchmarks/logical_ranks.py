"""What do logical ranks cost? Time steps with them beside plain accumulation.

    python benchmarks/logical_ranks.py                    # 10 minutes
    python benchmarks/logical_ranks.py --smoke            # does it run? no numbers

Every implementation does the same forwards and backwards on each rank: one accumulates
them with no_sync(), the other has as many logical ranks. Ratios are paired by round
(see the --help of overhead.py). With 4 logical ranks for each rank, each rank brings
one sum; with 3 it brings two sums, so that more has to be added up.

A fourth row has steps with logical ranks of which each is audited. In training one of
many is, and the mean step is computed from both (the others are those of logical
ranks). All ranks train on the same data here, so that a logical rank has the same
gradients wherever it is computed.

Two cells are on links of 1 Gbit/s (they need root), without shared memory: what do the
messages of sums in the order of the tree cost beside those of an all-reduce?

Targets: a step with logical ranks takes at most 1.05 times one of plain accumulation,
and 1.10 times on a link; with audit_every="auto" at most 1.01 times one without audits.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from support.estimates import Estimate
from support.links import Link, why_not
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


class Cell(NamedTuple):
    """How many ranks there are, how many logical ranks for each, and their link."""

    ranks: int
    count: int
    link: Link | None = None

    @property
    def models(self) -> tuple[str, ...]:
        """The models: on a link one whose messages take most of the time."""
        return MODELS if self.link is None else ("mlp",)

    @property
    def limit(self) -> float:
        """The target: this ratio at most."""
        return 1.05 if self.link is None else 1.10

    def __str__(self) -> str:
        ranks = f"{self.ranks} rank{'s' if self.ranks > 1 else ''}"
        where = f" on links of {self.link}" if self.link else ""
        return f"{ranks}, {self.count * self.ranks} logical ranks{where}"


LINKED = (Cell(3, 1, Link(1.0)), Cell(4, 2, Link(1.0)))
CELLS = (Cell(1, 4), Cell(2, 4), Cell(2, 3), Cell(2, 1))
PLAIN, AGAIN, LOGICAL = "no_sync()", "no_sync() again", "logical ranks"
AUDITED = "an audited step"
LIMIT_OF_AUDIT = 1.01


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


def _measure(model: str, plan: Plan, cell: Cell, *, smoke: bool) -> Measured:
    """Measure one model, on every rank."""
    if cell.link is not None:
        os.environ["MINIDP_SHARED_MEMORY"] = "0"
    net = make(NETS[model], smoke=smoke)
    plain = functools.partial(Accumulates, count=cell.count)
    logical = functools.partial(HasLogicalRanks, count=cell.count)
    everyone = [
        Implementation(PLAIN, plain, PLAIN),
        Implementation(AGAIN, plain, PLAIN),
        Implementation(LOGICAL, logical, PLAIN, is_exact=False),
    ]
    if cell.ranks > 1 and cell.link is None:
        audited = functools.partial(logical, audit_every=1)
        everyone.append(Implementation(AUDITED, audited, PLAIN, is_exact=False))
    title = f"{net.title}; {cell}"
    return SameData(title, everyone, net, plan, link=cell.link).run()


def main() -> int:
    """Measure and report. Return 1 if a gradient was wrong."""
    args = command_line(__doc__, seconds=25).parse_args()
    report = Report(args, "What logical ranks cost", backend=CPU_BACKEND, timed=TIMED)
    plan = Plan.of(args.seconds, smoke=args.smoke)
    found = []
    cells = CELLS[1:] if args.smoke else CELLS
    if reason := why_not():
        report.show(f"The cells on links are skipped: {reason}.")
    else:
        cells += LINKED
    for cell in cells:
        for model in cell.models[:1] if args.smoke else cell.models:
            task: Callable[..., Measured] = functools.partial(
                _measure, smoke=args.smoke
            )
            measured: Measured = run_ranks(
                task, cell.ranks, model, plan, cell, link=cell.link
            )
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
            verdicts = [Verdict(measured.title, ratio, cell.limit)]
            if AUDITED in measured.times:
                what = f"{measured.title}, with an audit in {AUDIT_STEPS} steps"
                mean = _with_audits(measured.ratio(AUDITED, LOGICAL))
                verdicts.append(Verdict(what, mean, LIMIT_OF_AUDIT))
            report.judge(verdicts)
    content = {"results": [each.as_json() for each in found]}
    return report.finish(f"logical_ranks_cpu_{native_word()}", content)


if __name__ == "__main__":
    sys.exit(main())
