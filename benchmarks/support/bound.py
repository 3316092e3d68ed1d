"""The least time of a step: arithmetic as measured, communication at its best.

Recorded are the moments at which gradients became ready *while communicating*, so that
whatever communication takes from the backward is in them. A gradient can travel once
the last rank has it. The bound is what the network then needs if buckets could be cut
arbitrarily fine: `minidp._schedule.lower_bound`, with time zero where the step begins.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

import minidp
from minidp import Moment
from minidp._schedule import Backward, Network, fit_network, lower_bound
from support.estimates import Times

PROBES = (4, 2**14, 2**18, 2**20, 2**22)  # bytes
REPEATS = 7


@dataclass(frozen=True)
class Bound:
    """Of every timed round.

    Args:
        seconds: of a step at least, 1D.
        network: what an all-reduce takes, as fitted.
    """

    seconds: Times
    network: Network

    def __str__(self) -> str:
        mb_per_s, latency = self.network.bytes_per_s / 1e6, self.network.latency_s
        return f"all-reduce: {1e3 * latency:.2f} ms + {mb_per_s:.0f} MB/s"


@dataclass(frozen=True)
class StepRecord:
    """One step on one rank, in seconds since it began.

    Args:
        ready_s: by parameter index.
        launched_s: by bucket.
        done_s: by bucket.
        nbytes: by bucket.
    """

    ready_s: tuple[float, ...]
    launched_s: tuple[float, ...]
    done_s: tuple[float, ...]
    nbytes: tuple[int, ...]


class BoundWatcher:
    """Records every timed step of a `minidp.DataParallel`.

    Args:
        model: whose steps are recorded.
    """

    def __init__(self, model: nn.Module) -> None:
        assert isinstance(model, minidp.DataParallel)
        self._model = model
        self._nbytes = [param.nbytes for param in model.parameters()]
        self._recorder = minidp.Recorder()
        self._steps: list[StepRecord] = []
        model.set_recorder(self._recorder)

    def begin(self) -> None:
        """Forget what was not timed."""
        self._recorder.clear()

    def end(self, start_ns: int) -> None:
        """Keep the step that began at this time."""
        found: dict[Moment, dict[int, float]] = {moment: {} for moment in Moment}
        for event in self._recorder:
            found[event.moment][event.index] = (event.time_ns - start_ns) / 1e9
        ready = found[Moment.PARAM_READY]
        buckets = self._bucket_nbytes()
        self._steps.append(
            StepRecord(
                tuple(ready[i] for i in range(len(self._nbytes))),
                tuple(found[Moment.LAUNCHED][b] for b in range(len(buckets))),
                tuple(found[Moment.DONE][b] for b in range(len(buckets))),
                buckets,
            )
        )

    def _bucket_nbytes(self) -> tuple[int, ...]:
        buckets = self._model.bucket_layout["buckets"]
        names = [name for name, _ in self._model.module.named_parameters()]
        sizes = dict(zip(names, self._nbytes, strict=True))
        return tuple(sum(sizes[name] for name in bucket) for bucket in buckets)

    def result(self) -> Bound:
        """Collective: the bound of every step that was recorded."""
        everybody: list[list[StepRecord]] = [[]] * dist.get_world_size()
        dist.all_gather_object(everybody, self._steps)
        rounds = [_slowest(ranks) for ranks in zip(*everybody, strict=True)]
        samples = [*_probe(), *(sample for each in rounds for sample in _bursts(each))]
        network = fit_network(samples)
        bounds = [lower_bound(self._backward(each), network) for each in rounds]
        return Bound(np.array(bounds), network)

    def _backward(self, step: StepRecord) -> Backward:
        order = sorted(range(len(self._nbytes)), key=lambda i: step.ready_s[i])
        ready_s = tuple(step.ready_s[i] for i in order)
        nbytes = tuple(self._nbytes[i] for i in order)
        return Backward(ready_s, nbytes, end_s=ready_s[-1])


def _slowest(ranks: Sequence[StepRecord]) -> StepRecord:
    """Each moment on the rank on which it was last."""

    def latest(times: list[tuple[float, ...]]) -> tuple[float, ...]:
        return tuple(max(each) for each in zip(*times, strict=True))

    return StepRecord(
        latest([rank.ready_s for rank in ranks]),
        latest([rank.launched_s for rank in ranks]),
        latest([rank.done_s for rank in ranks]),
        ranks[0].nbytes,
    )


def _bursts(step: StepRecord) -> Iterator[tuple[int, float]]:
    """Bytes and seconds of each time during which the network was busy.

    Collectives that are in flight together share it (Gloo runs two at a time), so only
    together do they say how fast it is.
    """
    nbytes, began, until = 0, 0.0, 0.0
    for launched, done, size in zip(
        step.launched_s, step.done_s, step.nbytes, strict=True
    ):
        if nbytes and launched >= until:
            yield nbytes, until - began
            nbytes = 0
        if not nbytes:
            began = launched
        nbytes += size
        until = max(until, done)
    if nbytes:
        yield nbytes, until - began


def _probe() -> Iterator[tuple[int, float]]:
    """Collective: all-reduces of other sizes, timed alone."""
    for nbytes in PROBES:
        message = torch.zeros(nbytes // 4)
        for _ in range(REPEATS):
            dist.barrier()
            start = time.perf_counter()
            dist.all_reduce(message)
            yield nbytes, time.perf_counter() - start
