"""Measure implementations in turn, step by step, in one run.

In each *round* every implementation takes one step on the same data. Its place in the
round, and its predecessor, change from round to round until all combinations were
equally frequent. With two ranks or more a barrier precedes each step, and a step lasts
as long as on its slowest rank.
"""

from __future__ import annotations

import copy
import gc
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from support.bound import BoundWatcher
from support.estimates import Estimate, Times, ratio, short
from support.links import Link
from support.models import Net
from support.report import progress

MIB = 2**20
STEP_COLUMNS = ("implementation", "step, ms\nmedian", "\np10-p90")
Wrap = Callable[[nn.Module], nn.Module]
Gradients = list[torch.Tensor | None]


@dataclass(frozen=True)
class Implementation:
    """One way to train a module.

    Args:
        name: for tables.
        wrap: puts the wrapper around a replica.
        reference: the name of the implementation whose gradients this one must
            reproduce; None: not compared.
        environment: variables that are set while it is built and warmed up.
        is_exact: it reproduces its reference's gradients bit for bit; else up to the
            rounding of a sum in another order.
        settling: untimed steps that it takes alone, before all others warm up.
        averages: it communicates, so its steps have a bound on a link.
    """

    name: str
    wrap: Wrap
    reference: str | None = None
    environment: Mapping[str, str] = field(default_factory=dict)
    is_exact: bool = True
    settling: int = 0
    averages: bool = True


@dataclass(frozen=True)
class Plan:
    """How long to measure.

    Args:
        seconds: of one measurement, about.
        warm_up: rounds that are not timed; DDP rebuilds its buckets in the second.
        fewest: timed rounds at least, whatever time they take.
        most: timed rounds at most.
        check_every: timed rounds between two comparisons of the gradients.
    """

    seconds: float
    warm_up: int = 5
    fewest: int = 12
    most: int = 1000
    check_every: int = 50

    @classmethod
    def of(cls, seconds: float, *, smoke: bool) -> Plan:
        """Make the plan of a command line."""
        return cls(0, warm_up=3, fewest=1, most=11) if smoke else cls(seconds)


@dataclass(frozen=True)
class Measured:
    """The result of a `Contest`; dictionaries are by the implementations' names.

    Args:
        title: what was measured.
        num_params: parameters of the model.
        num_bytes: their bytes.
        checks: rounds in which gradients were compared.
        times: seconds of each timed round, on its slowest rank.
        cpu: seconds of all threads of a rank, the mean over the ranks, each round.
        wrong: how many parameters ever had a gradient that differed from the
            reference's, on any rank; None: not compared.
        bounds: the least seconds of each round, on a link; not of all.
        buckets: bytes of each bucket, in launch order; only minidp tells.
    """

    title: str
    num_params: int
    num_bytes: int
    checks: int
    times: dict[str, Times]
    cpu: dict[str, Times]
    wrong: dict[str, int | None]
    bounds: dict[str, Times]
    buckets: dict[str, list[int]]

    @property
    def facts(self) -> str:
        """Model and rounds, for the second line of a table's title."""
        rounds = len(next(iter(self.times.values())))
        return (
            f"{self.num_params} parameters, {self.num_bytes / MIB:.3g} MiB; "
            f"{rounds} timed rounds, {self.checks} checks"
        )

    def milliseconds(self, name: str) -> list[float]:
        """Return the 10th percentile, median and 90th percentile of a step."""
        return [1e3 * float(s) for s in np.percentile(self.times[name], [10, 50, 90])]

    def ratio(self, name: str, base: str) -> Estimate:
        """Estimate a step of one implementation over a step of another."""
        return ratio(self.times[name], self.times[base])

    def over_bound(self, name: str) -> Estimate | None:
        """Estimate an implementation's steps over their own bounds."""
        if name not in self.bounds:
            return None
        return ratio(self.times[name], self.bounds[name])

    def step_cells(self, name: str) -> list[str]:
        """Format the cells of `STEP_COLUMNS`."""
        low, middle, high = map(short, self.milliseconds(name))
        return [name, middle, f"{low}-{high}"]

    def wrong_cell(self, name: str) -> str:
        """Format how many gradients were wrong."""
        wrong = self.wrong[name]
        return "-" if wrong is None else str(wrong)

    def as_json(self) -> dict[str, Any]:
        """Return everything for a file, with every single time."""
        rows = []
        for name, times in self.times.items():
            row: dict[str, Any] = {
                "name": name,
                "p10_median_p90_milliseconds": self.milliseconds(name),
                "cpu_milliseconds": 1e3 * float(np.median(self.cpu[name])),
                "wrong": self.wrong[name],
                "bucket_bytes": self.buckets.get(name),
                "microseconds_of_each_round": _micros(times),
            }
            if name in self.bounds:
                bounds = _micros(self.bounds[name])
                row["bound_microseconds_of_each_round"] = bounds
            rows.append(row)
        return {"title": self.title, "facts": self.facts, "rows": rows}


def _micros(times: Times) -> str:
    return " ".join(f"{1e6 * seconds:.0f}" for seconds in times)


@dataclass(frozen=True)
class Where:
    """The ranks that measure: a group, each rank with a device of its own."""

    group: dist.ProcessGroup | None = None  # None: all ranks
    device: str = "cpu"

    @property
    def world_size(self) -> int:
        """The number of ranks in the group."""
        return dist.get_world_size(self.group)

    def barrier(self) -> None:
        """Collective: wait for all ranks and for the device."""
        if self.world_size > 1:
            dist.barrier(self.group)
        self.synchronize()

    def synchronize(self) -> None:
        """Wait for all kernels that were launched on the device."""
        if self.device.startswith("cuda"):
            torch.cuda.synchronize()

    def reduce(self, values: torch.Tensor, how: dist.ReduceOp.RedOpType) -> None:
        """Collective: all-reduce a CPU tensor in place."""
        there = values.to(self.device)
        dist.all_reduce(there, how, self.group)
        values.copy_(there)


class Contestant:
    """One implementation with its replica.

    Replicas share the memory of their weights, which no step changes. So all models
    stay alike, and what lies in caches between two steps does not grow with the number
    of implementations. Gradients are freed after each step, as by
    ``optimizer.zero_grad()``.
    """

    def __init__(
        self,
        implementation: Implementation,
        net: Net,
        where: Where,
        link: Link | None = None,
    ) -> None:
        self.traits = implementation
        self._where = where
        replica = copy.deepcopy(net)
        for mine, shared in zip(replica.parameters(), net.parameters(), strict=True):
            mine.data = shared.data
        self.params = list(replica.parameters())
        with _environment(implementation.environment):
            self._model = implementation.wrap(replica)
        # Only `AfterBackward` has work left when the backward is over.
        self._finish: Callable[[], None] | None = getattr(
            self._model, "finish_step", None
        )
        self.watcher: BoundWatcher | None = None
        if link is not None and implementation.averages:
            self.watcher = BoundWatcher(self._model, link)

    def warm_up(self, data: Sequence[torch.Tensor]) -> None:
        """Take a step that is not timed."""
        with _environment(self.traits.environment):
            self._take(data)
        self.free_gradients()

    def step(
        self, data: Sequence[torch.Tensor], *, is_timed: bool = False
    ) -> tuple[float, float]:
        """Take a step. Return its seconds on this rank, and those of its threads."""
        self._where.barrier()
        cpu, start = time.process_time(), time.perf_counter_ns()
        self._take(data)
        self._where.synchronize()
        seconds = (time.perf_counter_ns() - start) / 1e9, time.process_time() - cpu
        if is_timed and self.watcher is not None:
            self.watcher.end_step(start)
        return seconds

    def _take(self, data: Sequence[torch.Tensor]) -> None:
        self._model(*data).backward()
        if self._finish is not None:
            self._finish()

    def bucket_bytes(self) -> list[int] | None:
        """Return the bytes of each bucket in launch order; None: not minidp."""
        layout: Any = getattr(self._model, "bucket_layout", None)
        if layout is None:
            return None
        params = dict(self._model.module.named_parameters())
        return [sum(params[n].nbytes for n in names) for names in layout["buckets"]]

    def gradients(self) -> Gradients:
        """Return the gradients of the last step."""
        return [param.grad for param in self.params]

    def free_gradients(self) -> None:
        """Set all gradients to None."""
        for param in self.params:
            param.grad = None


class Contest:
    """Measures all implementations on one model.

    Args:
        title: of the measurement, and of its progress bar.
        implementations: what is measured.
        net: the model, on the device.
        plan: how long.
        where: the ranks.
        link: of each rank; given, each step is compared with its bound.
    """

    def __init__(
        self,
        title: str,
        implementations: Sequence[Implementation],
        net: Net,
        plan: Plan,
        *,
        where: Where | None = None,
        link: Link | None = None,
    ) -> None:
        self._title, self._net, self._plan = title, net, plan
        self._where = where or Where()
        self._rank = dist.get_rank(self._where.group)
        self._contestants = {
            each.name: Contestant(each, net, self._where, link)
            for each in implementations
        }
        self._num_params = len(list(net.parameters()))
        self._wrong: dict[str, torch.Tensor] = {
            each.name: torch.zeros(self._num_params, dtype=torch.uint8)
            for each in implementations
            if each.reference is not None
        }
        self._references = {each.reference for each in implementations} - {None}
        self._rounds = self._checks = 0

    def run(self) -> Measured:
        """Collective: warm up, measure, compare gradients."""
        num_rounds = self._affordable(self._warm_up())
        gc.collect()
        everyone = list(self._contestants.values())
        costs = torch.zeros(2, len(everyone), num_rounds, dtype=torch.float64)
        with progress(self._rank, self._title, num_rounds) as advance:
            for number in range(num_rounds):
                if number % self._plan.check_every == 0:
                    self._check()
                data = self._next_data()
                for k in turn(number, len(everyone)):
                    cost = everyone[k].step(data, is_timed=True)
                    costs[:, k, number] = torch.tensor(cost, dtype=torch.float64)
                    everyone[k].free_gradients()
                advance()
        self._check()
        return self._measured(*costs)

    def _measured(self, seconds: torch.Tensor, cpu: torch.Tensor) -> Measured:
        self._where.reduce(seconds, dist.ReduceOp.MAX)
        self._where.reduce(cpu, dist.ReduceOp.SUM)
        cpu /= self._where.world_size
        for differs in self._wrong.values():
            self._where.reduce(differs, dist.ReduceOp.MAX)
        names, everyone = list(self._contestants), self._contestants.items()
        counts = {name: int(differs.sum()) for name, differs in self._wrong.items()}
        buckets = {name: each.bucket_bytes() for name, each in everyone}
        return Measured(
            title=self._title,
            num_params=self._num_params,
            num_bytes=sum(param.nbytes for param in self._net.parameters()),
            checks=self._checks,
            times=dict(zip(names, seconds.numpy(), strict=True)),
            cpu=dict(zip(names, cpu.numpy(), strict=True)),
            wrong={name: counts.get(name) for name in names},
            bounds={n: each.watcher.result() for n, each in everyone if each.watcher},
            buckets={name: sizes for name, sizes in buckets.items() if sizes},
        )

    def _warm_up(self) -> float:
        """Take the steps that are not timed. Return the seconds of one round."""
        durations = []
        everyone = self._contestants.values()
        total = sum(each.traits.settling for each in everyone) + self._plan.warm_up
        with progress(self._rank, f"{self._title}, warming up", total) as advance:
            for each in everyone:
                for _ in range(each.traits.settling):
                    each.warm_up(self._next_data())
                    advance()
            for _ in range(self._plan.warm_up):
                data = self._next_data()
                start = time.perf_counter()
                for each in everyone:
                    each.warm_up(data)
                self._where.synchronize()
                durations.append(time.perf_counter() - start)
                advance()
        return median(durations)

    def _next_data(self) -> tuple[torch.Tensor, ...]:
        """Make other data in each round, and on each rank."""
        self._rounds += 1
        seed = self._rounds * self._where.world_size + self._rank
        data = self._net.data(torch.Generator().manual_seed(seed))
        return tuple(each.to(self._where.device) for each in data)

    def _affordable(self, round_seconds: float) -> int:
        """Collective: decide the number of timed rounds.

        It is a multiple of the number of implementations; see `turn`.
        """
        plan, step = self._plan, len(self._contestants)
        wanted = min(max(plan.seconds / round_seconds, plan.fewest), plan.most)
        agreed = torch.tensor(max(1, round(wanted / step)) * step)
        self._where.reduce(agreed, dist.ReduceOp.MAX)  # ranks measured other seconds
        return int(agreed)

    def _check(self) -> None:
        """Collective: take a round that is not timed, and compare its gradients."""
        data = self._next_data()
        expected: dict[str, Gradients] = {}
        self._checks += 1
        # References first: only their gradients have to be kept.
        names = sorted(self._contestants, key=lambda name: name not in self._references)
        for name in names:
            each = self._contestants[name]
            each.step(data)
            if name in self._references:
                expected[name] = each.gradients()
            else:
                self._compare(each, expected)
                each.free_gradients()
        for name in expected:
            self._compare(self._contestants[name], expected)
        for name in expected:
            self._contestants[name].free_gradients()

    def _compare(self, each: Contestant, expected: dict[str, Gradients]) -> None:
        if each.traits.reference is not None:
            same = same_bits if each.traits.is_exact else same_but_for_rounding
            pairs = zip(each.gradients(), expected[each.traits.reference], strict=True)
            differs = self._wrong[each.traits.name]
            for i, (mine, theirs) in enumerate(pairs):
                differs[i] |= not same(mine, theirs)


def turn(number: int, count: int) -> list[int]:
    """Return the order of ``count`` implementations in round ``number``.

    In ``2 * count`` rounds each takes every place, and follows every other one, equally
    often (a Williams design).
    """
    zigzag = [
        -(place // 2) if place % 2 else place // 2 for place in range(1, count + 1)
    ]
    order = [(number + step) % count for step in zigzag]
    return order[::-1] if number // count % 2 else order


def same_bits(mine: torch.Tensor | None, theirs: torch.Tensor | None) -> bool:
    """Compare two gradients' bit patterns, NaN and the sign of zero included."""
    if mine is None or theirs is None:
        return mine is theirs
    return torch.equal(mine.view(torch.int32), theirs.view(torch.int32))


def same_but_for_rounding(
    mine: torch.Tensor | None, theirs: torch.Tensor | None
) -> bool:
    """Compare two gradients up to the rounding of a sum in another order."""
    if mine is None or theirs is None:
        return mine is theirs
    allowed = 1e-5 * float(theirs.abs().max())
    return bool(((mine - theirs).abs() <= allowed).all())  # NaN is not


@contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
