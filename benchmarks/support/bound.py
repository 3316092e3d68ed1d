"""The least time of a step whose gradients come when they came, on a link of this rate.

A rank cannot send a gradient before it has it, nor faster than its link carries bytes::

    gradients   a    b       c  d e          ready, on this rank, in this step
    wire             =a======b===========c=====d=====e=====
                                                          ^ not earlier

Bytes that become ready at some moment or later are sent after it, in whatever buckets.
So the step lasts at least until that moment, and then until the link has carried them.
Times and bound are of one and the same step: a rank whose gradients came late is not
held against a step of another implementation, in which they came sooner.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from support.estimates import Times
from support.links import Link


def least_seconds(
    ready_s: Sequence[float], nbytes: Sequence[int], link: Link, world_size: int
) -> float:
    """Seconds, from the start of a step, that no bucket layout can beat.

    Args:
        ready_s: when this rank had each gradient, since the step began.
        nbytes: bytes of each.
        link: of each rank.
        world_size: ranks of a ring.
    """
    times_sent = 2 * (world_size - 1) / world_size  # to be added up, and the sum again
    order = np.argsort(ready_s)
    ready = np.asarray(ready_s)[order]
    sent_after = np.cumsum(np.asarray(nbytes)[order][::-1])[::-1] * times_sent
    done = ready + (sent_after - link.burst_bytes) / link.payload_bytes_per_s
    return float(max(ready[-1], done.max()))


class BoundWatcher:
    """Times the gradients of every timed step of a wrapped model.

    Args:
        model: whose steps; any wrapper around one module.
        link: between the ranks.
    """

    def __init__(self, model: nn.Module, link: Link) -> None:
        params = list(model.parameters())
        self._link = link
        self._nbytes = [param.nbytes for param in params]
        self._ready_ns = [0] * len(params)
        self._bounds: list[float] = []
        for i, param in enumerate(params):
            param.register_post_accumulate_grad_hook(self._hook(i))

    def _hook(self, i: int) -> Callable[[torch.Tensor], None]:
        ready_ns, now = self._ready_ns, time.perf_counter_ns

        def note(_param: torch.Tensor) -> None:
            ready_ns[i] = now()

        return note

    def begin(self) -> None:
        """Nothing to forget: every gradient comes in every step."""

    def end(self, start_ns: int) -> None:
        """Keep the bound of the step that began at this time."""
        ready_s = [(ns - start_ns) / 1e9 for ns in self._ready_ns]
        size = dist.get_world_size()
        self._bounds.append(least_seconds(ready_s, self._nbytes, self._link, size))

    def result(self) -> Times:
        """Collective: of every timed step, the latest bound among the ranks."""
        bounds = torch.tensor(self._bounds, dtype=torch.float64)
        dist.all_reduce(bounds, dist.ReduceOp.MAX)
        return bounds.numpy()
