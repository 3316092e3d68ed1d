"""Implementations measured in turn, step by step, in one run.

In each *round* every implementation takes one step on the same data. Where it stands in
the round, and whom it follows, changes from round to round until all combinations were
equally frequent. At world size 2 a barrier precedes each step, and a step lasts as
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

import torch
import torch.distributed as dist
from torch import nn

from support.estimates import Times
from support.nets import Net

Wrap = Callable[[nn.Module], nn.Module]
Gradients = list[torch.Tensor | None]


@dataclass(frozen=True)
class Implementation:
    """One way to train a module.

    Args:
        name: for tables.
        wrap: puts the wrapper around a replica.
        reference: name of the one whose gradients it must reproduce bit for bit, which
            then is measured too; None: is not compared.
        environment: variables that are set while it is built and warmed up.
    """

    name: str
    wrap: Wrap
    reference: str | None = None
    environment: Mapping[str, str] = field(default_factory=dict)


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
        wrong: per implementation the parameters whose gradient ever differed from the
            reference in any bit, on any rank; None: was not compared.
        checks: rounds in which gradients were compared.
    """

    num_params: int
    num_bytes: int
    times: dict[str, Times]
    wrong: dict[str, int | None]
    checks: int

    @property
    def num_rounds(self) -> int:
        """Timed rounds."""
        return len(next(iter(self.times.values())))


class Contestant:
    """One implementation with its replica.

    Replicas share the memory of their weights, which no step changes: that keeps the
    models alike, and what lies in caches between two steps does not grow with the
    number of implementations. Gradients are freed after each step, as
    ``optimizer.zero_grad()`` does.
    """

    def __init__(self, implementation: Implementation, net: Net) -> None:
        self.name = implementation.name
        self.reference = implementation.reference
        self._environment = implementation.environment
        replica = copy.deepcopy(net)
        for mine, shared in zip(replica.parameters(), net.parameters(), strict=True):
            mine.data = shared.data
        self.params = list(replica.parameters())
        with _environment(self._environment):
            self._model = implementation.wrap(replica)

    def warm_up(self, data: Sequence[torch.Tensor]) -> None:
        """Take a step that is not timed."""
        with _environment(self._environment):
            self._model(*data).backward()
        self.forget()

    def step(self, data: Sequence[torch.Tensor]) -> float:
        """Take a step; return its seconds on this rank."""
        if dist.get_world_size() > 1:
            dist.barrier()
        start = time.perf_counter()
        self._model(*data).backward()
        return time.perf_counter() - start

    def gradients(self) -> Gradients:
        """What the step left behind."""
        return [param.grad for param in self.params]

    def forget(self) -> None:
        """Free the gradients."""
        for param in self.params:
            param.grad = None


class Contest:
    """All implementations on one model; rank 0 brings home the result."""

    def __init__(
        self, implementations: Sequence[Implementation], net: Net, plan: Plan
    ) -> None:
        self._plan = plan
        self._net = net
        self._rank = dist.get_rank()
        self._contestants = [Contestant(each, net) for each in implementations]
        self._rounds = 0
        self._wrong: dict[str, torch.Tensor] = {
            each.name: torch.zeros(len(each.params), dtype=torch.uint8)
            for each in self._contestants
            if each.reference is not None
        }
        self._checks = 0

    def run(self) -> Measured:
        """Collective: warm up, measure, check."""
        durations = []
        for _ in range(self._plan.warm_up):
            data = self._next_data()
            start = time.perf_counter()
            for contestant in self._contestants:
                contestant.warm_up(data)
            durations.append(time.perf_counter() - start)
        num_rounds = self._affordable(median(durations))
        gc.collect()
        seconds = torch.zeros(len(self._contestants), num_rounds, dtype=torch.float64)
        for number in range(num_rounds):
            if number % self._plan.check_every == 0:
                self._check()
            data = self._next_data()
            for k in turn(number, len(self._contestants)):
                seconds[k, number] = self._contestants[k].step(data)
                self._contestants[k].forget()
        self._check()
        dist.all_reduce(seconds, dist.ReduceOp.MAX)
        for differs in self._wrong.values():
            dist.all_reduce(differs, dist.ReduceOp.MAX)
        params = self._contestants[0].params
        names = [each.name for each in self._contestants]
        wrong = self._wrong
        return Measured(
            num_params=len(params),
            num_bytes=sum(param.nbytes for param in params),
            times=dict(zip(names, seconds.numpy(), strict=True)),
            wrong={n: int(wrong[n].sum()) if n in wrong else None for n in names},
            checks=self._checks,
        )

    def _next_data(self) -> tuple[torch.Tensor, ...]:
        """Other data in each round, and on each rank."""
        self._rounds += 1
        seed = self._rounds * dist.get_world_size() + self._rank
        return self._net.data(torch.Generator().manual_seed(seed))

    def _affordable(self, round_seconds: float) -> int:
        """Collective: how many rounds to time; a multiple of the implementations."""
        plan, step = self._plan, len(self._contestants)
        wanted = min(max(plan.seconds / round_seconds, plan.fewest), plan.most)
        agreed = torch.tensor(max(1, round(wanted / step)) * step)
        dist.broadcast(agreed, 0)
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
            pairs = zip(found, expected[contestant.reference], strict=True)
            differs = self._wrong[contestant.name]
            for i, (mine, theirs) in enumerate(pairs):
                differs[i] |= not same_bits(mine, theirs)


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
