"""How fast are the copies between gradients and a bucket's buffer? Kernels alone.

    python benchmarks/flatten.py                 # everything: about 3 minutes
    python benchmarks/flatten.py --seconds 2     # while working
    python benchmarks/flatten.py --smoke         # does it run? no numbers

Flatten is `view = gradient / 3` for all gradients of a bucket, unflatten is
`gradient = view`. All ways of copying take their turn in one run, on the same memory:
  memcpy                      the ceiling: torch's copy_ of one tensor of as many bytes
  torch mul_out of one        the same with the factor
  torch mul_out, copy_ loop   one call per gradient, from Python; DDP's does it in C++
  torch foreach_copy_, mul_   DDP's batched_grad_copy: the buffer is written twice
  torch cat, mul_             twice too, with less bookkeeping
  minidp in Python            as in hooks: on CPU large gradients one by one
  native flatten, unflatten   one call with two lists of tensors
  native slots                what a backward calls: takes the gradients that hooks kept

Columns:
  us, us per tensor     of one call: median; that / number of tensors
  GB/s                  bytes read plus bytes written: twice the bucket, in 1e9 bytes
  speed / memcpy        time of the ceiling over time, paired by round; 95% interval
  #wrong                tensors with a bit that differs from torch's gradient * (1 / 3),
                        before and after; not 0: exit status 1

From 8 MiB on several buckets take turns, 256 MiB in all: no call finds its bucket in a
cache. A smaller bucket is alone and stays in the caches, as gradients do that a
backward has just written. Some ways exceed the ceiling: for pieces of the right size
libc's memcpy is faster than torch's copy of one large tensor.

With a GPU, and an extension that has kernels for it, buckets there are measured too,
with CUDA events: from the call until the stream is done.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import gc
import math
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np
import torch
from support.estimates import Estimate, Times, median, ratio, short
from support.models import resnet50_shapes
from support.report import Report, Verdict, command_line, table
from support.rounds import MIB, Plan, turn

from minidp import native
from minidp.console import say_progress
from minidp.core import kernels
from minidp.core.grad_hooks import is_copied_at_once, native_table

DIVISOR = 3  # no power of two: dividing instead of multiplying gives other bits
SCALE = 1.0 / DIVISOR
CEILING = "memcpy"
ROTATED_BYTES = 256 * MIB  # gradients and buffers together: no cache holds them
# Targets of the native kernels.
SMALL_LIMIT = 0.1  # us per parameter of 64 elements
LARGE_LIMIT = 0.95  # of the ceiling's speed, from LARGE_BYTES on
LARGE_BYTES = 24 * MIB


# -- buckets ---------------------------------------------------------------------------


@dataclass(frozen=True)
class Cell:
    """One kind of bucket."""

    what: str
    shapes: Sequence[tuple[int, ...]]
    dtype: torch.dtype = torch.float32
    device: str = "cpu"

    @property
    def num_bytes(self) -> int:
        """Bytes of the bucket."""
        size = torch.empty((), dtype=self.dtype).element_size()
        return size * sum(map(math.prod, self.shapes))

    @property
    def num_buckets(self) -> int:
        """How many take turns: one that fits into caches stays there, alone."""
        if self.num_bytes < 8 * MIB:
            return 1
        return max(2, -(-ROTATED_BYTES // (2 * self.num_bytes)))

    @property
    def title(self) -> str:
        """Shapes, dtype and device."""
        place = " on the GPU" * (self.device == "cuda")
        return f"{self.what}, {str(self.dtype).removeprefix('torch.')}{place}"


def cells(device: str, *, smoke: bool) -> list[Cell]:
    """List the buckets of a device; the first and the last kind in bfloat16 too."""
    kinds = [
        Cell("1000 x 64", [(64,)] * 1000),
        Cell("1000 x 1024", [(1024,)] * 1000),
        Cell("160 x 160,000", [(400, 400)] * 160),
        Cell("12 x 589,824", [(768, 768)] * 12),
        Cell("first 25 MiB of ResNet-50", _first(resnet50_shapes(), 25 * 2**18)),
    ]
    halves = [kinds[0], Cell(kinds[-1].what, _first(resnet50_shapes(), 25 * 2**19))]
    if smoke:
        kinds = [Cell("9 x 8", [(8,)] * 9), Cell("mixed", [(3, 5), (2, 200, 90), (7,)])]
        halves = kinds
    elif device == "cuda":
        kinds = [kinds[0], kinds[-1]]
    kinds += [dataclasses.replace(each, dtype=torch.bfloat16) for each in halves]
    return [dataclasses.replace(each, device=device) for each in kinds]


def _first(shapes: Sequence[tuple[int, ...]], numel: int) -> list[tuple[int, ...]]:
    """Return shapes from the start, until they have so many elements."""
    before = np.cumsum([0, *map(math.prod, shapes)])
    return [shape for shape, n in zip(shapes, before, strict=False) if n < numel]


class Bucket:
    """Gradients, each in memory of its own, and the buffer that they are copied to."""

    def __init__(self, cell: Cell, library: ModuleType | None) -> None:
        def fresh(shape: tuple[int, ...]) -> torch.Tensor:
            return torch.randn(shape, device=cell.device).to(cell.dtype)

        self.grads = [fresh(shape) for shape in cell.shapes]
        numels = [grad.numel() for grad in self.grads]
        self.values = fresh((sum(numels),))
        self.other = fresh((sum(numels),))  # what the ceiling copies from or to
        self.rows = [grad.view(-1) for grad in self.grads]
        parts = zip(self.values.split(numels), cell.shapes, strict=True)
        self.views = [part.view(shape) for part, shape in parts]
        is_large = [is_copied_at_once(grad, as_view=False) for grad in self.grads]
        self.plan = kernels.CopyPlan(self.values, self.views, is_large)
        pairs = list(zip(self.views, self.grads, is_large, strict=True))
        self.large = [(view, grad) for view, grad, large in pairs if large]
        self.small_views = [view for view, _, large in pairs if not large]
        self.small_grads = [grad for _, grad, large in pairs if not large]
        if library is not None:  # what minidp's buckets have then
            params = [torch.nn.Parameter(torch.empty_like(grad)) for grad in self.grads]
            for param, grad in zip(params, self.grads, strict=True):
                param.grad = grad
            self.slots = library.Slots(params, self.views, self.values, as_view=False)
            self.arrivals = native_table(params, None)  # its reducer is not called
            self.arrivals.adopt([range(len(params))])
            self.arrivals.entries[:] = self.grads


# -- ways to copy ----------------------------------------------------------------------

Ways = dict[str, Callable[[Bucket], Any]]


def flatten_ways(library: ModuleType | None) -> Ways:
    """List all ways to flatten; the first two copy one tensor, and are not checked."""
    ways: Ways = {
        CEILING: lambda b: b.values.copy_(b.other),
        "torch mul_out of one tensor": lambda b: torch.mul(
            b.other, SCALE, out=b.values
        ),
        "torch mul_out loop (DDP)": _mul_loop,
        "torch foreach_copy_, mul_ (batched)": _foreach_and_mul,
        "torch cat, mul_": _cat_and_mul,
        "minidp in Python": _flatten_in_python,
    }
    if library is not None:
        flatten = library.flatten
        ways["native flatten"] = lambda b: flatten(b.views, b.grads, SCALE)
        ways["native slots"] = lambda b: _must(
            b.slots.flatten(b.arrivals.gather(0), DIVISOR)
        )
    return ways


def unflatten_ways(library: ModuleType | None) -> Ways:
    """List all ways to unflatten; the first copies one tensor, and is not checked."""
    ways: Ways = {
        CEILING: lambda b: b.other.copy_(b.values),
        "torch copy_ loop (DDP)": _copy_loop,
        "torch foreach_copy_ (minidp in Python)": lambda b: torch._foreach_copy_(
            b.grads, b.views
        ),
    }
    if library is not None:
        unflatten = library.unflatten
        ways["native unflatten"] = lambda b: unflatten(b.grads, b.views)
        ways["native slots"] = lambda b: _must(b.slots.unflatten(b.arrivals.gather(0)))
    return ways


def _mul_loop(bucket: Bucket) -> None:
    for view, grad in zip(bucket.views, bucket.grads, strict=True):
        torch.mul(grad, SCALE, out=view)


def _copy_loop(bucket: Bucket) -> None:
    for grad, view in zip(bucket.grads, bucket.views, strict=True):
        grad.copy_(view)


def _foreach_and_mul(bucket: Bucket) -> None:
    torch._foreach_copy_(bucket.views, bucket.grads)
    bucket.values.mul_(SCALE)


def _cat_and_mul(bucket: Bucket) -> None:
    torch.cat(bucket.rows, out=bucket.values)
    bucket.values.mul_(SCALE)


def _flatten_in_python(bucket: Bucket) -> None:
    for view, grad in bucket.large:
        kernels.multiply_into(view, grad, DIVISOR)
    bucket.plan.fill(bucket.small_views, bucket.small_grads, DIVISOR)


def _must(did: object) -> None:
    assert did, "the native slots refused an everyday case"


def num_wrong(bucket: Bucket, call: Callable[[Bucket], Any], *, flattens: bool) -> int:
    """Count the tensors that get wrong bits."""
    filled, expected = bucket.grads, bucket.views
    if flattens:
        filled, expected = bucket.views, [grad * SCALE for grad in bucket.grads]
    for tensor in filled:
        tensor.fill_(-7)
    call(bucket)
    return sum(
        not torch.equal(*(t.reshape(-1).view(torch.uint8) for t in pair))
        for pair in zip(filled, expected, strict=True)
    )


# -- what is measured ------------------------------------------------------------------


@dataclass(frozen=True)
class Race:
    """One direction of one cell; times and wrong tensors by the ways' names."""

    cell: Cell
    direction: str
    times: Mapping[str, Times]
    wrong: Mapping[str, int | None]

    @property
    def title(self) -> str:
        """Direction and bucket."""
        return f"{self.direction}, {self.cell.title}"

    def speed(self, name: str) -> Estimate:
        """Estimate the speed of a way, in units of the ceiling's."""
        return ratio(self.times[CEILING], self.times[name])

    def micros_per_tensor(self, name: str) -> Estimate:
        """Estimate the microseconds of a call per tensor."""
        return median(self.times[name]).scaled(1e6 / len(self.cell.shapes))

    def rows(self) -> Iterator[list[str]]:
        """Yield the rows of the table."""
        for name, times in self.times.items():
            low, middle, high = 1e6 * np.percentile(times, [10, 50, 90])
            wrong = self.wrong[name]
            yield [
                name,
                short(middle),
                f"{short(low)}-{short(high)}",
                f"{self.micros_per_tensor(name).value:.3f}",
                f"{2e-3 * self.cell.num_bytes / middle:.2f}",
                str(self.speed(name)),
                "-" if wrong is None else str(wrong),
            ]

    def as_json(self) -> dict[str, Any]:
        """Return the table for a file; of thousands of calls every twentieth part."""
        columns = [
            "way",
            "us",
            "p10_p90",
            "us_per_tensor",
            "gb_per_s",
            "speed",
            "wrong",
        ]
        rows = []
        for row, times in zip(self.rows(), self.times.values(), strict=True):
            parts = np.percentile(1e6 * times, range(0, 101, 5))
            words = " ".join(f"{each:.1f}" for each in parts)
            facts = dict(zip(columns, row, strict=True))
            rows.append({**facts, "us_at_0_5_to_100_percent": words})
        return {"title": self.title, "num_bytes": self.cell.num_bytes, "rows": rows}


def measure(cell: Cell, library: ModuleType | None, plan: Plan) -> Iterator[Race]:
    """Measure both directions of one cell."""
    torch.manual_seed(0)
    buckets = [Bucket(cell, library) for _ in range(cell.num_buckets)]
    for direction, ways, unchecked in (
        ("flatten", flatten_ways(library), 2),
        ("unflatten", unflatten_ways(library), 1),
    ):
        wrong: dict[str, int | None] = dict.fromkeys(ways)
        checked = list(ways)[unchecked:]
        check = functools.partial(num_wrong, flattens=direction == "flatten")
        before = {name: check(buckets[0], ways[name]) for name in checked}
        times = race(ways, buckets, cell, plan)
        for name in checked:
            wrong[name] = before[name] + check(buckets[-1], ways[name])
        yield Race(cell, direction, times, wrong)


def race(
    ways: Ways, buckets: Sequence[Bucket], cell: Cell, plan: Plan
) -> dict[str, Times]:
    """Time all ways in turn; each call gets another bucket than the one before."""
    clock = _cuda_seconds if cell.device == "cuda" else _seconds
    calls, count = list(ways.values()), len(ways)
    trial = [
        sum(clock(c, buckets[(k + n) % len(buckets)]) for k, c in enumerate(calls))
        for n in range(plan.warm_up)
    ]
    wanted = min(max(plan.seconds / min(trial), plan.fewest), plan.most)
    num_rounds = max(1, round(wanted / count)) * count
    gc.collect()
    times = np.empty((count, num_rounds))
    for number in range(num_rounds):
        for place, k in enumerate(turn(number, count)):
            bucket = buckets[(number + place) % len(buckets)]
            times[k, number] = clock(calls[k], bucket)
    return dict(zip(ways, times, strict=True))


def _seconds(call: Callable[[Bucket], object], bucket: Bucket) -> float:
    start = time.perf_counter()
    call(bucket)
    return time.perf_counter() - start


def _cuda_seconds(call: Callable[[Bucket], object], bucket: Bucket) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    call(bucket)
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1e3


def verdicts(found: Race) -> Iterator[Verdict]:
    """Yield the targets of the native kernels."""
    for name in found.times:
        what = f"{name}; {found.title}"
        if not name.startswith("native"):
            continue
        if max(found.cell.shapes) == (64,):
            micros = found.micros_per_tensor(name)
            yield Verdict(f"us per tensor, {what}", micros, SMALL_LIMIT)
        elif found.cell.num_bytes >= LARGE_BYTES:
            speed = found.speed(name)
            yield Verdict(f"of {CEILING}, {what}", speed, LARGE_LIMIT, at_least=True)


# -- the program -----------------------------------------------------------------------


def parse() -> argparse.Namespace:
    """Parse the command line."""
    parser = command_line(__doc__, seconds=8)
    parser.add_argument(
        "--devices",
        nargs="+",
        choices=["cpu", "cuda"],
        metavar="DEVICE",
        help="cpu, cuda (default: cuda too if it can be measured)",
    )
    parser.add_argument(
        "--threads", type=int, default=1, metavar="N", help="of a kernel (default: 1)"
    )
    return parser.parse_args()


def why_no_cuda(library: ModuleType | None) -> str:
    """Say why the GPU is not measured; empty when it can be."""
    if not torch.cuda.is_available():
        return "torch sees no GPU"
    if library is None or library.kernels_for != "cuda":
        return "there is no native extension with CUDA kernels"
    return ""


def main() -> int:
    """Measure and report. Return 1 if a bit was wrong."""
    args = parse()
    torch.set_num_threads(args.threads)
    library = native.library()
    no_cuda = why_no_cuda(library)
    devices = args.devices or (["cpu"] if no_cuda else ["cpu", "cuda"])
    if no_cuda and "cuda" in devices:
        sys.exit(f"The GPU cannot be measured: {no_cuda}.")
    report = Report(
        args,
        "Flatten and unflatten: gradients and a bucket's buffer",
        gpu=torch.cuda.get_device_name() if "cuda" in devices else "not measured",
        threads=str(args.threads),
    )
    plan = Plan.of(args.seconds, smoke=args.smoke)
    columns = ["way", "us\nmedian", "\np10-p90", "us per\ntensor", "GB/s"]
    columns += [f"speed /\n{CEILING} (95%)", "#wrong"]
    content = []
    for device in devices:
        queue = list(cells(device, smoke=args.smoke))
        for number, cell in enumerate(queue, start=1):
            say_progress(f"{device}, cell {number} of {len(queue)}")
            for found in measure(cell, library, plan):
                facts = f"{len(cell.shapes)} tensors, {cell.num_bytes / MIB:.3g} MiB; "
                facts += f"{cell.num_buckets} in turn; "
                facts += f"{len(found.times[CEILING])} rounds"
                report.show(table(found.title, facts, columns, found.rows()))
                report.count_wrong(found.wrong.values())
                report.judge(verdicts(found))
                content.append(found.as_json())
    return report.finish(f"flatten_{'_'.join(devices)}", {"cells": content})


if __name__ == "__main__":
    sys.exit(main())
