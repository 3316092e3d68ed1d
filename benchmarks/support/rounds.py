"""Implementations measured in turn, step by step, in one run.

In each *round* every implementation takes one step on the same data. Where it stands in
the round, and whom it follows, changes from round to round until all combinations were
equally frequent. From two ranks on, a barrier precedes each step, and a step lasts as
long as on its slowest rank.
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
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import nn

from support.estimates import Times
from support.nets import Net
from support.progress import progress

Wrap = Callable[[nn.Module], nn.Module]
Gradients = list[torch.Tensor | None]


class Watcher(Protocol):
    """Looks at one implementation's timed steps."""

    def begin(self) -> None:
        """A step is about to begin."""

    def end(self, start_ns: int) -> None:
        """A step that began at this time (`time.perf_counter_ns`) is over."""

    def result(self) -> Any:
        """Collective: what came out; only rank 0's counts."""


@dataclass(frozen=True)
class Implementation:
    """One way to train a module.

    Args:
        name: for tables.
        wrap: puts the wrapper around a replica.
        reference: name of the one whose gradients it must reproduce bit for bit, which
            then is measured too; None: is not compared.
        environment: variables that are set while it is built and warmed up.
        is_exact: reproduces its reference's gradients bit for bit; else up to the
            rounding of a sum in another order.
        settling: steps that it takes alone, untimed, before all others warm up.
        watcher: makes what looks at its timed steps.
    """

    name: str
    wrap: Wrap
    reference: str | None = None
    environment: Mapping[str, str] = field(default_factory=dict)
    is_exact: bool = True
    settling: int = 0
    watcher: Callable[[nn.Module], Watcher] | None = None


@dataclass(frozen=True)
class Plan:
    """How long to measure.

    Args:
        seconds: of one measurement, about.
        warm_up: rounds that are not timed; DDP rebuilds its buckets in the second.
        fewest: timed rounds at least, whatever the time they take.
        most: timed rounds at most.
        check_every: timed rounds between two checks of the gradients.
    """

    seconds: float
    warm_up: int
    fewest: int
    most: int
    check_every: int


@dataclass(frozen=True)
class Measured:
    """What came out.

    Args:
        num_params: parameters of the model.
        num_bytes: their bytes.
        times: per implementation the seconds of each timed round, on its slowest rank.
        cpu: the same, seconds of all threads of a rank, in the mean over the ranks.
        wrong: per implementation the parameters whose gradient ever differed from the
            reference (in any bit, or by more than rounding), on any rank; None: was
            not compared.
        checks: rounds in which gradients were compared.
        watched: what the watchers saw, by the name of the implementation.
        buckets: of implementations that tell: bytes of each bucket, in launch order.
    """

    num_params: int
    num_bytes: int
    times: dict[str, Times]
    wrong: dict[str, int | None]
    checks: int
    cpu: dict[str, Times] = field(default_factory=dict)
    watched: dict[str, Any] = field(default_factory=dict)
    buckets: dict[str, list[int]] = field(default_factory=dict)

    @property
    def num_rounds(self) -> int:
        """Timed rounds."""
        return len(next(iter(self.times.values())))


@dataclass(frozen=True)
class Where:
    """Who measures: a group of ranks, each with a device of its own."""

    group: dist.ProcessGroup | None = None  # None: everybody
    device: str = "cpu"

    @property
    def world_size(self) -> int:
        """Number of ranks in the group."""
        return dist.get_world_size(self.group)

    def barrier(self) -> None:
        """Collective: wait for all ranks, and for the device."""
        if self.world_size > 1:
            dist.barrier(self.group)
        self.synchronize()

    def synchronize(self) -> None:
        """Wait for everything that was enqueued on the device."""
        if self.device.startswith("cuda"):
            torch.cuda.synchronize()

    def reduce(self, values: torch.Tensor, how: dist.ReduceOp.RedOpType) -> None:
        """Collective: reduce a CPU tensor over the ranks, in place."""
        there = values.to(self.device)
        dist.all_reduce(there, how, self.group)
        values.copy_(there)


class Contestant:
    """One implementation with its replica.

    Replicas share the memory of their weights, which no step changes: that keeps the
    models alike, and what lies in caches between two steps does not grow with the
    number of implementations. Gradients are freed after each step, as
    ``optimizer.zero_grad()`` does.
    """

    def __init__(self, implementation: Implementation, net: Net, where: Where) -> None:
        self.name = implementation.name
        self.reference = implementation.reference
        self.is_exact = implementation.is_exact
        self.settling = implementation.settling
        self._environment = implementation.environment
        self._where = where
        replica = copy.deepcopy(net)
        for mine, shared in zip(replica.parameters(), net.parameters(), strict=True):
            mine.data = shared.data
        self.params = list(replica.parameters())
        with _environment(self._environment):
            self._model = implementation.wrap(replica)
        # Some have something left to do when backward is over.
        self._finish = getattr(self._model, "finish_step", None)
        watch = implementation.watcher
        self.watcher = None if watch is None else watch(self._model)

    def warm_up(self, data: Sequence[torch.Tensor]) -> None:
        """Take a step that is not timed."""
        with _environment(self._environment):
            self._take(data)
        self.forget()

    def step(
        self, data: Sequence[torch.Tensor], *, is_timed: bool = False
    ) -> tuple[float, float]:
        """Take a step; return its seconds on this rank, and those of its threads."""
        watcher = self.watcher if is_timed else None
        if watcher is not None:
            watcher.begin()
        self._where.barrier()
        cpu, start = time.process_time(), time.perf_counter_ns()
        self._take(data)
        self._where.synchronize()
        seconds = (time.perf_counter_ns() - start) / 1e9, time.process_time() - cpu
        if watcher is not None:
            watcher.end(start)
        return seconds

    def _take(self, data: Sequence[torch.Tensor]) -> None:
        self._model(*data).backward()
        if self._finish is not None:
            self._finish()

    @property
    def bucket_layout(self) -> Any:
        """See `minidp.DataParallel`; None: it does not tell."""
        return getattr(self._model, "bucket_layout", None)

    def bucket_bytes(self) -> list[int] | None:
        """Bytes of each bucket, in launch order; None: it does not tell."""
        layout = self.bucket_layout
        if layout is None:
            return None
        params = dict(self._model.module.named_parameters())
        return [sum(params[n].nbytes for n in names) for names in layout["buckets"]]

    def gradients(self) -> Gradients:
        """What the step left behind."""
        return [param.grad for param in self.params]

    def forget(self) -> None:
        """Free the gradients."""
        for param in self.params:
            param.grad = None


class Contest:
    """All implementations on one model; rank 0 brings home the result.

    Args:
        implementations: who takes part.
        net: the model, on the device.
        plan: how long.
        where: on which ranks.
        label: for the progress bar.
    """

    def __init__(
        self,
        implementations: Sequence[Implementation],
        net: Net,
        plan: Plan,
        where: Where | None = None,
        label: str = "",
    ) -> None:
        self._plan = plan
        self._net = net
        self._where = where or Where()
        self._rank = dist.get_rank(self._where.group)
        self._label = label
        self._contestants = [
            Contestant(each, net, self._where) for each in implementations
        ]
        self._rounds = 0
        self._wrong: dict[str, torch.Tensor] = {
            each.name: torch.zeros(len(each.params), dtype=torch.uint8)
            for each in self._contestants
            if each.reference is not None
        }
        self._checks = 0

    def run(self) -> Measured:
        """Collective: warm up, measure, check."""
        num_rounds = self._affordable(self._warm_up())
        gc.collect()
        costs = torch.zeros(2, len(self._contestants), num_rounds, dtype=torch.float64)
        with progress(self._rank, self._label, num_rounds) as advance:
            for number in range(num_rounds):
                if number % self._plan.check_every == 0:
                    self._check()
                data = self._next_data()
                for k in turn(number, len(self._contestants)):
                    cost = self._contestants[k].step(data, is_timed=True)
                    costs[:, k, number] = torch.tensor(cost, dtype=torch.float64)
                    self._contestants[k].forget()
                advance()
        self._check()
        seconds, cpu = costs
        self._where.reduce(seconds, dist.ReduceOp.MAX)
        self._where.reduce(cpu, dist.ReduceOp.SUM)
        cpu /= self._where.world_size
        for differs in self._wrong.values():
            self._where.reduce(differs, dist.ReduceOp.MAX)
        params = self._contestants[0].params
        names = [each.name for each in self._contestants]
        wrong = self._wrong
        return Measured(
            num_params=len(params),
            num_bytes=sum(param.nbytes for param in params),
            times=dict(zip(names, seconds.numpy(), strict=True)),
            wrong={n: int(wrong[n].sum()) if n in wrong else None for n in names},
            checks=self._checks,
            cpu=dict(zip(names, cpu.numpy(), strict=True)),
            watched={
                each.name: each.watcher.result()
                for each in self._contestants
                if each.watcher is not None
            },
            buckets={
                each.name: sizes
                for each in self._contestants
                if (sizes := each.bucket_bytes()) is not None
            },
        )

    def _warm_up(self) -> float:
        """Settle, take the rounds that are not timed; return the seconds of one."""
        durations = []
        settling = sum(each.settling for each in self._contestants)
        total = settling + self._plan.warm_up
        with progress(self._rank, f"{self._label}, warming up", total) as advance:
            for contestant in self._contestants:
                for _ in range(contestant.settling):
                    contestant.warm_up(self._next_data())
                    advance()
            for _ in range(self._plan.warm_up):
                data = self._next_data()
                start = time.perf_counter()
                for contestant in self._contestants:
                    contestant.warm_up(data)
                self._where.synchronize()
                durations.append(time.perf_counter() - start)
                advance()
        return median(durations)

    def _next_data(self) -> tuple[torch.Tensor, ...]:
        """Other data in each round, and on each rank."""
        self._rounds += 1
        seed = self._rounds * self._where.world_size + self._rank
        data = self._net.data(torch.Generator().manual_seed(seed))
        return tuple(each.to(self._where.device) for each in data)

    def _affordable(self, round_seconds: float) -> int:
        """Collective: how many rounds to time; a multiple of the implementations."""
        plan, step = self._plan, len(self._contestants)
        wanted = min(max(plan.seconds / round_seconds, plan.fewest), plan.most)
        # The fastest rank's wish, if they differ.
        agreed = torch.tensor(max(1, round(wanted / step)) * step)
        self._where.reduce(agreed, dist.ReduceOp.MAX)
        return int(agreed)

    def _check(self) -> None:
        """Collective: a round that is not timed, but compared."""
        data = self._next_data()
        references = {each.reference for each in self._contestants} - {None}
        expected: dict[str, Gradients] = {}
        self._checks += 1
        # The references first: then only theirs have to be kept.
        for each in sorted(self._contestants, key=lambda c: c.name not in references):
            each.step(data)
            if each.name in references:
                expected[each.name] = each.gradients()
            else:
                self._compare(each, each.gradients(), expected)
                each.forget()
        for each in self._contestants:
            if each.name in references:
                self._compare(each, expected[each.name], expected)
                each.forget()

    def _compare(
        self, contestant: Contestant, found: Gradients, expected: dict[str, Gradients]
    ) -> None:
        if contestant.reference is not None:
            same = same_bits if contestant.is_exact else same_but_for_rounding
            pairs = zip(found, expected[contestant.reference], strict=True)
            differs = self._wrong[contestant.name]
            for i, (mine, theirs) in enumerate(pairs):
                differs[i] |= not same(mine, theirs)


def turn(number: int, count: int) -> list[int]:
    """Who takes which place in round ``number``.

    In ``2 * count`` rounds everyone takes every place, and follows every other one,
    equally often (a Williams design).
    """
    zigzag = [
        -(place // 2) if place % 2 else place // 2 for place in range(1, count + 1)
    ]
    order = [(number + step) % count for step in zigzag]
    return order[::-1] if number // count % 2 else order


def same_bits(mine: torch.Tensor | None, theirs: torch.Tensor | None) -> bool:
    """Whether two gradients are the same, NaN and the sign of zero included."""
    if mine is None or theirs is None:
        return mine is theirs
    return torch.equal(mine.view(torch.int32), theirs.view(torch.int32))


def same_but_for_rounding(
    mine: torch.Tensor | None, theirs: torch.Tensor | None
) -> bool:
    """Whether two gradients differ by the order of a sum at most."""
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
