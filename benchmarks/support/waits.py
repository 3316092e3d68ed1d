"""A model that computes nothing: its forward and backward wait on the clock.

So that more ranks than cores can be measured: gradients have real sizes, become ready
at given times, and travel through minidp and a real network; only the arithmetic is
replaced by waiting.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

import minidp
from minidp._schedule import Network, fit_network
from support.simulation import Groups, Pauses, Work

# Bytes. As large as buckets, but for the latency: on a shaped link, what is not much
# larger than its burst passes faster than anything that lasts.
PROBES = (4, 2**21, 2**22, 2**23, 2**24)
IN_FLIGHT = 4  # messages at once: a backward queues its buckets, and does not wait
REPEATS = 9
SETTLE = 3  # steps that are not timed; buckets are rebuilt after the first


class Clock:
    """Where a step began, and what holds this rank up in it."""

    def __init__(self) -> None:
        self.begin(0.0, 0.0)

    def begin(self, moment_s: float, pause_s: float) -> None:
        """A step: ``pause_s`` are lost after ``moment_s`` of computation."""
        self._start = time.perf_counter()
        self._moment_s, self._pause_s = moment_s, pause_s

    def wait_until(self, computed_s: float) -> None:
        """Sleep until that much would have been computed."""
        due = self._start + computed_s
        if computed_s > self._moment_s:
            due += self._pause_s
        left = due - time.perf_counter()
        if left > 0:
            time.sleep(left)


class _Layer(torch.autograd.Function):
    """Passes a value on; its backward waits, then hands out a gradient."""

    @staticmethod
    def forward(
        ctx: Any, value: Tensor, param: Tensor, clock: Clock, ready_s: float
    ) -> Tensor:
        """Return the value."""
        ctx.shape, ctx.clock, ctx.ready_s = param.shape, clock, ready_s
        return value.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None, None]:
        """Return the value's gradient, and the parameter's, when it is time."""
        mine = torch.full(ctx.shape, 1.0 + dist.get_rank())
        ctx.clock.wait_until(ctx.ready_s)
        return grad, mine, None, None


class Waits(nn.Module):
    """Parameters of the sizes of ``work``, in the order of a forward."""

    def __init__(self, work: Work) -> None:
        super().__init__()
        self.clock = Clock()
        self._work = work
        sizes = [nbytes // 4 for nbytes in reversed(work.backward.nbytes)]
        self.pieces = nn.ParameterList(torch.zeros(size) for size in sizes)

    def forward(self, value: Tensor) -> Tensor:
        """Return the value, after the time of the forward."""
        self.clock.wait_until(self._work.forward_s)
        value = _End.apply(value, self.clock, self._work.seconds)
        ready = [self._work.forward_s + s for s in self._work.backward.ready_s]
        for piece, ready_s in zip(self.pieces, reversed(ready), strict=True):
            value = _Layer.apply(value, piece, self.clock, ready_s)
        return value


class _End(torch.autograd.Function):
    """The end of the backward, after the last gradient."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, clock: Clock, end_s: float) -> Tensor:
        """Return the value."""
        ctx.clock, ctx.end_s = clock, end_s
        return value.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        """Return the gradient when it is time."""
        ctx.clock.wait_until(ctx.end_s)
        return grad, None, None


@dataclass(frozen=True)
class Timed:
    """Steps with one bucket cap.

    Args:
        cap_mb: of buckets; None: torch's default.
        groups: the layout, as positions in ready order.
        seconds: of each step, on the slowest rank.
        wrong: gradients that were not the mean over the ranks, on any rank.
    """

    cap_mb: float | None
    groups: Groups
    seconds: list[float]
    wrong: int


def measure_network() -> Network:
    """Collective: what one more all-reduce adds to those before, by its bytes."""
    queues = [[torch.zeros(nbytes // 4) for _ in range(IN_FLIGHT)] for nbytes in PROBES]
    for queue in queues:
        _all_reduce(queue)  # connects, and finds its memory
    samples = []
    for _ in range(REPEATS):
        for queue in queues:  # in turn: a slow moment hits all sizes
            samples.append((queue[0].nbytes, _all_reduce(queue) / IN_FLIGHT))
    return fit_network(samples)


def _all_reduce(queue: Sequence[Tensor]) -> float:
    """Seconds, from when all ranks are here."""
    dist.barrier()
    start = time.perf_counter()
    works = [dist.all_reduce(message, async_op=True) for message in queue]
    for work in works:
        work.wait()
    return time.perf_counter() - start


def measure_copies() -> float:
    """Collective: bytes per second that a rank copies while all others do."""
    pieces = [torch.zeros(2**18) for _ in range(16)]
    flat, half = torch.zeros(16 * 2**18), torch.tensor(0.5)
    seconds = []
    for _ in range(REPEATS):
        dist.barrier()
        start = time.perf_counter()
        for piece, place in zip(pieces, flat.split(2**18), strict=True):
            torch.mul(piece, half, out=place)
        seconds.append(time.perf_counter() - start)
    return flat.nbytes / median(seconds)


def measure_steps(
    work: Work, caps_mb: list[float | None], pauses: Pauses
) -> list[Timed]:
    """Collective: a step for each row of ``pauses``, with each of the caps.

    In turn, so that a slow moment of the machine hits all caps alike.
    """
    models = [_Waiting(work, cap_mb) for cap_mb in caps_mb]
    rank = dist.get_rank()
    settling = np.zeros((SETTLE, dist.get_world_size()))
    moments = np.concatenate([settling, pauses.moments]) * work.seconds
    lengths = np.concatenate([settling, pauses.lengths]) * work.seconds
    for moment, length in zip(moments[:, rank], lengths[:, rank], strict=True):
        for model in models:
            model.step(float(moment), float(length))
    return [model.result() for model in models]


class _Waiting:
    """A model with one bucket cap, and the steps that it took."""

    def __init__(self, work: Work, cap_mb: float | None) -> None:
        self._net = Waits(work)
        self._cap_mb = cap_mb
        self._model = minidp.DataParallel(self._net, bucket_cap_mb=cap_mb)
        self._value = torch.zeros((), requires_grad=True)
        self._seconds: list[float] = []
        self._wrong = torch.zeros(())

    def step(self, moment_s: float, pause_s: float) -> None:
        """Collective; see `Clock.begin`."""
        dist.barrier()
        self._net.clock.begin(moment_s, pause_s)
        start = time.perf_counter()
        self._model(self._value).backward()
        self._seconds.append(time.perf_counter() - start)
        self._wrong += _wrong(self._net)
        self._net.zero_grad()

    def result(self) -> Timed:
        """Collective: the steps but the first ones, on the slowest rank."""
        slowest = torch.tensor(self._seconds[SETTLE:], dtype=torch.float64)
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        dist.all_reduce(self._wrong)
        return Timed(
            self._cap_mb, _groups(self._model), slowest.tolist(), int(self._wrong)
        )


def _wrong(net: Waits) -> int:
    """How many gradients are not the mean of 1, 2, ... world size."""
    mean = (1 + dist.get_world_size()) / 2
    expected = torch.tensor(mean)
    grads = [piece.grad for piece in net.pieces]
    return sum(
        grad is None or not torch.isclose(grad, expected).all() for grad in grads
    )


def _groups(model: minidp.DataParallel) -> Groups:
    """The layout, with positions in ready order: the last parameter is ready first."""
    names = [name for name, _ in model.module.named_parameters()]
    position = {name: len(names) - 1 - n for n, name in enumerate(names)}
    return [
        [position[name] for name in bucket] for bucket in model.bucket_layout["buckets"]
    ]
