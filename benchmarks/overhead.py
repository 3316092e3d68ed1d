"""What does data parallelism add to a step? Compare minidp with torch's DDP.

    python benchmarks/overhead.py                       # everything: 12 minutes
    MINIDP_NATIVE=0 python benchmarks/overhead.py       # without the extension
    python benchmarks/overhead.py --cells small,tiny --seconds 10
    python benchmarks/overhead.py --device cuda         # on as many GPUs as ranks
    python benchmarks/overhead.py --smoke               # does it run? no numbers

One step is model(*data).backward(). The bare model, torch's DDP in five modes and
minidp in four take it in turn, in the same processes, on replicas that share their
weights.

Cells, each on one and on two ranks of this machine with one thread each (on GPUs those
without "reduce" and "link", and a step ends when its kernels have):
  small        1000 parameters of 64 elements: bookkeeping per parameter, nothing else
  tiny         MLP, 2 layers of 16 KiB: what each step costs, however small the model
  layers       MLP, 6 layers of 64 KiB
  mlp          MLP, 24 layers of 4 MiB: copies and transfers
  transformer  parameters from 512 B to 256 KiB, as people train them
  resnet50     the parameters of ResNet-50, 98 MiB, and no arithmetic that hides copies
  gpt2         the parameters of GPT-2 small, 475 MiB; default mode and views only
  reduce-SIZE  one gradient of 64 KiB, 1 MiB or 25 MiB on two ranks, without a model:
               flatten, reduce and copy out, with messages and in shared memory
  link         MLP with an unused last layer, two ranks on a slow link (needs root): are
               buckets launched early although one never fills?

Columns:
  step, p10-p90        of forward and backward on the slowest rank
  step / torch         over torch's default in the same round (link: over torch with
                       find_unused_parameters)
  same mode            minidp's step over torch's in the same mode
  extra per parameter  (step - step of the bare model) / number of parameters
  extra / torch        that, over the extra of torch's default
  CPU, ms              of all threads of a rank, the mean over ranks: a rank that waits
                       should sleep
  #wrong               parameters whose gradient ever differed in any bit, on any rank:
                       minidp's from torch's in the same mode, others' from torch's
                       default; not 0: exit status 1

In one round everybody takes one step on the same data. Ratios and differences are
formed within a round. The median over the rounds is reported, in parentheses its 95%
interval. In twice as many rounds as there are implementations, everybody follows
everybody else equally often. So caches are as cold as in a training, where an optimizer
and the next batch come between two steps.

Old and new in turn: run this script on two checkouts, several times each. It measures
the minidp that PYTHONPATH names; the header names its commit. Compare step, step /
torch and their intervals:

    for n in 1 2 3; do for tree in ../old ../new; do
      PYTHONPATH=$tree python benchmarks/overhead.py --cells small,tiny \\
          --seconds 20 --out /tmp/$(basename $tree)-$n
    done; done

Build the extension in both trees first (python -m minidp.native build, in each).
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import inspect
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from support.baselines import (
    BARE,
    LAST_CAP,
    TORCH,
    OverItems,
    bare,
    ours,
    theirs,
)
from support.charts import OURS, THEIRS, Bar, Words, colour_of, draw_bars
from support.estimates import Estimate, median, ratio_of_extras, short
from support.links import Link, measured_rate, why_not
from support.models import NETS, make
from support.ranks import KEEP_MEMORY, run_ranks
from support.report import (
    CPU_BACKEND,
    TIMED,
    Report,
    Verdict,
    command_line,
    native_word,
    table,
)
from support.rounds import (
    STEP_COLUMNS,
    Contest,
    Implementation,
    Measured,
    Plan,
    Where,
)
from torch import nn
from torch.nn.parallel import DistributedDataParallel

UNUSED = "torch find unused"
ITEMS = "items, minidp"
MESSAGES, SHARED = "messages", "shared memory"
LINK = Link(2.0)
SMOKE_CELLS = ["small", "mlp", "link"]
# Targets, by world size. What minidp adds to a step over what torch adds, each in its
# fastest mode; the time of a step; what a reduction adds over one with messages.
NATIVE_EXTRA = {
    "small": {1: 0.15, 2: 0.20},
    **{net: {2: 0.35} for net in ("layers", "mlp", "resnet50", "gpt2")},
}
EXTRA_LIMITS = {"native": NATIVE_EXTRA, "python": {"small": {1: 0.5, 2: 0.9}}}
STEP_LIMIT = 1.0
ITEMS_LIMIT = 1.01  # over the same step without counts
TINY_LIMITS = {"native": {1: 1.0, 2: 0.8}, "python": {}}
REDUCE_LIMITS = {"reduce-64KiB": 0.15, "reduce-1MiB": 0.15, "reduce-25MiB": 0.30}


# -- what is measured ------------------------------------------------------------------


class Reduction(nn.Module):
    """Flatten, reduce and copy out the one bucket of minidp; no model is run."""

    def __init__(self, module: nn.Module, *, reduces: bool = True) -> None:
        super().__init__()
        self._params = list(module.parameters())
        self._queue = None
        if reduces:
            self._model: Any = ours()(module)  # the wrapper owns the buckets
            self._queue = self._model._reducer.queue
        own = torch.Generator().manual_seed(dist.get_rank())
        sizes = [param.shape for param in self._params]
        self._grads = [torch.randn(size, generator=own) for size in sizes]

    def forward(self, *_data: torch.Tensor) -> torch.Tensor:
        """Return a loss whose backward does nothing."""
        return torch.zeros((), requires_grad=True)

    def finish_step(self) -> None:
        """Collective: average the gradients that the constructor made."""
        for param, grad in zip(self._params, self._grads, strict=True):
            param.grad = grad
        if self._queue is not None:
            self._queue.start()
            (bucket,) = self._queue.buckets
            bucket.flatten(self._grads, self._queue.averaging.factors)
            self._queue.launch_due()
            self._queue.finish(())


@dataclass(frozen=True)
class Cell:
    """One model at one world size, on "cpu" or on "cuda"."""

    net: str
    world_size: int
    device: str = "cpu"

    @property
    def link(self) -> Link | None:
        """Between the ranks; None is the loopback device."""
        return LINK if self.net == "link" else None

    @property
    def place(self) -> str:
        """Ranks and link, for titles."""
        what = "rank" if self.device == "cpu" else "GPU"
        ranks = f"{self.world_size} {what}{'s' * (self.world_size > 1)}"
        return ranks + (f" on a {self.link} link" if self.link else "")

    @property
    def base(self) -> str:
        """The implementation that all are compared with."""
        special = {"link": UNUSED, **dict.fromkeys(REDUCE_LIMITS, MESSAGES)}
        return special.get(self.net, TORCH)

    def implementations(self) -> list[Implementation]:
        """List what is measured, each with its reference for gradients.

        Torch's other modes lay out buckets differently, which changes bits from three
        ranks on: only up to two they are compared. Nothing averages the bare model.
        """
        view = {"gradient_as_bucket_view": True}
        unused = {"find_unused_parameters": True}
        same = TORCH if self.world_size <= 2 else None
        everyone = [
            bare(TORCH if self.world_size == 1 else None),
            Implementation(TORCH, theirs(), TORCH),
            Implementation("torch view", theirs(**view), same),
            Implementation(UNUSED, theirs(**unused), same),
            Implementation("torch batched copy", theirs(batched_grad_copy=True), same),
            Implementation("torch last bucket cap", theirs(), same, LAST_CAP),
            Implementation("minidp", ours(), TORCH),
            Implementation("minidp view", ours(**view), "torch view"),
            Implementation("minidp find unused", ours(**unused), UNUSED),
            Implementation(ITEMS, OverItems, same),
        ]
        if self.net in REDUCE_LIMITS:
            off = {"MINIDP_SHARED_MEMORY": "0"}
            return [
                Implementation(BARE, functools.partial(Reduction, reduces=False)),
                Implementation(MESSAGES, Reduction, MESSAGES, off),
                Implementation(SHARED, Reduction, MESSAGES),
            ]
        left_out: set[str] = set()
        if (
            "batched_grad_copy"
            not in inspect.signature(DistributedDataParallel).parameters
        ):
            left_out.add("torch batched copy")
        if self.net == "gpt2":  # each has half a GiB of buckets on each rank
            left_out |= {UNUSED, "minidp find unused", "torch last bucket cap", ITEMS}
            left_out |= {"torch batched copy"} if self.world_size > 1 else set()
        if self.net == "link":  # the others cannot do without a gradient
            left_out = {each.name for each in everyone}
            left_out -= {BARE, UNUSED, "minidp find unused"}
        return [
            dataclasses.replace(each, reference=each.reference and self.base)
            if self.net == "link"
            else each
            for each in everyone
            if each.name not in left_out
        ]


def measure(cells: Sequence[Cell], plan: Plan, *, smoke: bool) -> list[Measured]:
    """Measure cells of one world size and link, on every rank."""
    found = []
    for cell in cells:
        net = make(NETS[cell.net], smoke=smoke).to(cell.device)
        title = f"{net.title}; {cell.place}"
        if cell.link is not None:
            title += f"; measured rate {measured_rate().gbit:.2f} Gbit/s"
        if cell.net == "gpt2":  # a round takes seconds
            plan = dataclasses.replace(plan, warm_up=3, fewest=min(plan.fewest, 10))
        where = Where(device=cell.device)
        contest = Contest(title, cell.implementations(), net, plan, where=where)
        found.append(contest.run())
    return found


# -- what it means ---------------------------------------------------------------------


def extra(measured: Measured, name: str) -> Estimate:
    """Estimate the microseconds per parameter that a wrapper adds to a step."""
    added = median(measured.times[name] - measured.times[BARE])
    return added.scaled(1e6 / measured.num_params)


def extra_ratio(measured: Measured, name: str, base: str) -> Estimate:
    """Estimate what a wrapper adds to a step over what ``base`` adds to it."""
    times = measured.times
    return ratio_of_extras(times[name], times[base], times[BARE])


def twin_of(measured: Measured, name: str) -> str | None:
    """Return torch's implementation in the mode of minidp's."""
    twin = name.replace("minidp", "torch")
    return twin if twin != name and twin in measured.times else None


def rows(cell: Cell, measured: Measured) -> Iterator[list[str]]:
    """Yield the rows of a cell's table."""
    for name in measured.times:
        twin, is_bare = twin_of(measured, name), name == BARE
        added = extra(measured, name)
        ends = f"{short(added.low)}-{short(added.high)}"
        more = f"{extra_ratio(measured, name, cell.base).value:.2f}"
        yield [
            *measured.step_cells(name),
            f"{measured.ratio(name, cell.base).value:.3f}",
            "-" if twin is None else str(measured.ratio(name, twin)),
            "-" if is_bare else f"{short(added.value)} ({ends})",
            "-" if is_bare else more,
            short(1e3 * float(np.median(measured.cpu[name]))),
            measured.wrong_cell(name),
        ]


def verdicts(cell: Cell, measured: Measured) -> Iterator[Verdict]:
    """Yield the targets of a cell."""
    net, title, kind = cell.net, measured.title, native_word()
    if cell.device != "cpu":  # the limits are those of the CPU
        return
    if net in REDUCE_LIMITS:
        if kind == "native":
            found = extra_ratio(measured, SHARED, MESSAGES)
            what = f"reduction in shared memory over one with messages; {title}"
            yield Verdict(what, found, REDUCE_LIMITS[net])
        return
    mine, other = fastest(measured, "minidp"), fastest(measured, "torch")
    limit = EXTRA_LIMITS[kind].get(net, {}).get(cell.world_size)
    if limit is not None:
        found = extra_ratio(measured, mine, other)
        what = f"extra of {mine} over {other}'s, the fastest modes; {title}"
        yield Verdict(what, found, limit)
    if ITEMS in measured.times:
        what = f"step with averages over items over minidp's; {title}"
        yield Verdict(what, measured.ratio(ITEMS, "minidp"), ITEMS_LIMIT)
    limits = TINY_LIMITS[kind] if net == "tiny" else {}
    for name in measured.times:
        twin = twin_of(measured, name)
        if twin is not None:
            what = f"step of {name} over torch's in the same mode; {title}"
            limit = limits.get(cell.world_size, STEP_LIMIT)
            yield Verdict(what, measured.ratio(name, twin), limit)


def fastest(measured: Measured, who: str) -> str:
    """Return the mode with the least median of a step."""
    names = [name for name in measured.times if name.startswith(who)]
    return min(names, key=lambda name: float(np.median(measured.times[name])))


def chart(path: Path, results: Mapping[Cell, Measured], note: str) -> None:
    """Draw what the default modes add to a step, in ms; ``note`` says where."""
    panels: dict[str, dict[str, list[Bar]]] = {}
    for cell, measured in results.items():
        if cell.link is None and cell.base == TORCH:
            ms = measured.num_params / 1e3
            added = {n: extra(measured, n).scaled(ms) for n in (TORCH, "minidp")}
            bars = [
                Bar(name, [(each.value, colour_of(name))], (each.low, each.high))
                for name, each in added.items()
            ]
            panels.setdefault(cell.net, {})[measured.title] = bars
    words = Words(
        "What data parallelism adds to a step (forward and backward)",
        "ms added to each step: median and 95% interval",
        f"Default mode. {note}",
    )
    if panels:
        legend = {"torch": THEIRS, "minidp": OURS}
        draw_bars(path, words, legend, list(panels.values()))


# -- the program -----------------------------------------------------------------------


def parse() -> argparse.Namespace:
    """Parse the command line."""
    parser = command_line(__doc__, seconds=30)
    parser.add_argument(
        "--cells",
        nargs="+",
        metavar="CELL",
        help=f"what to measure (default: all), of: {', '.join(NETS)}",
    )
    parser.add_argument(
        "--world-sizes",
        nargs="+",
        type=int,
        metavar="N",
        help="numbers of ranks (default: 1 2, or as many as there are GPUs); link and "
        "reduce always have 2",
    )
    parser.add_argument(
        "--device", choices=("cpu", "cuda"), default="cpu", help="(default: cpu)"
    )
    args = parser.parse_args()
    cells = [cell for given in args.cells or [] for cell in given.split(",")]
    if unknown := set(cells) - set(NETS):
        parser.error(f"--cells: expected some of {', '.join(NETS)}, but got {unknown}")
    only_cpu = {"link", *REDUCE_LIMITS}
    if args.device != "cpu" and (refused := only_cpu & set(cells)):
        parser.error(f"--cells: {', '.join(sorted(refused))} need --device cpu")
    every = SMOKE_CELLS if args.smoke else list(NETS)
    if args.device != "cpu":
        every = [net for net in every if net not in only_cpu]
    args.cells = cells or every
    sizes = [2] if args.smoke else [1, 2]
    if args.device == "cuda":
        gpus = torch.cuda.device_count()
        if not gpus or max(args.world_sizes or [1]) > gpus:
            parser.error(f"--device cuda: each rank needs a GPU, but there are {gpus}")
        sizes = [size for size in sizes if size <= gpus] or [1]
    args.world_sizes = args.world_sizes or sizes
    return args


def cells_of(args: argparse.Namespace, report: Report) -> Iterator[Cell]:
    """Yield the cells that can be measured here."""
    for net in args.cells:
        if net in REDUCE_LIMITS:
            yield Cell(net, 2)
        elif net != "link":
            yield from (Cell(net, size, args.device) for size in args.world_sizes)
        elif reason := why_not():
            report.show(f"The cell on a slow link is skipped: {reason}.")
        else:
            yield Cell(net, 2)


def main() -> int:
    """Measure and report. Return 1 if a gradient was wrong."""
    args = parse()
    plan = Plan.of(args.seconds, smoke=args.smoke)
    report = Report(
        args,
        "What data parallelism adds to a training step",
        backend=CPU_BACKEND if args.device == "cpu" else "NCCL, float32",
        device="cpu" if args.device == "cpu" else torch.cuda.get_device_name(),
        timed=TIMED,
        memory=" ".join(f"{name}={value}" for name, value in KEEP_MEMORY.items()),
    )
    results: dict[Cell, Measured] = {}
    cells = list(cells_of(args, report))
    # Each cell in new processes, so that none meets a fuller memory than another.
    groups = [[cell] for cell in cells]
    if args.smoke:
        groups = [[cell for cell in cells if not cell.link]]
        groups += [[cell] for cell in cells if cell.link]
    task = functools.partial(measure, smoke=args.smoke)
    for group in filter(None, groups):
        found = run_ranks(
            task,
            group[0].world_size,
            group,
            plan,
            link=group[0].link,
            is_cuda=args.device == "cuda",
        )
        for cell, measured in zip(group, found, strict=True):
            results[cell] = measured
            base = "torch" if cell.base == TORCH else "base"
            columns = [
                *STEP_COLUMNS,
                f"step /\n{base}",
                "step / torch,\nsame mode (95%)",
                "extra per\nparameter, us (95%)",
                f"extra /\n{base}",
                "CPU, ms",
                "#wrong",
            ]
            facts = measured.facts + (f"; base: {cell.base}" * (base == "base"))
            report.show(table(measured.title, facts, columns, rows(cell, measured)))
            report.count_wrong(measured.wrong.values())
            report.judge(verdicts(cell, measured))
    where = "Gloo on loopback, 1 thread per rank"
    if args.device == "cuda":
        where = f"NCCL, {report.header['device']}"
    note = f"{where}. torch {torch.__version__}; minidp {native_word()}; "
    note += report.header["date"]
    content = {"cells": [each.as_json() for each in results.values()]}
    return report.finish(
        f"overhead_{args.device}_{native_word()}",
        content,
        lambda path: chart(path, results, note),
    )


if __name__ == "__main__":
    sys.exit(main())
