"""The shortest possible time of a step, from when its gradients were ready.

A rank cannot send a gradient before it exists, nor faster than its link's rate::

    gradients   a    b       c  d e          ready, on this rank, in this step
    wire             =a======b===========c=====d=====e=====
                                                          ^ not earlier

Gradients that become ready at some moment or later are sent after that moment, in any
bucket layout. So the step ends no earlier than that moment plus the time that the link
needs for their bytes. Each step is compared with the bound of the same step: a step
whose gradients came early is not compared with one whose gradients came late.
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
    """Compute the seconds from the start of a step that no bucket layout can beat.

    ``ready_s``: when this rank had each gradient, in seconds since the step began.
    ``nbytes``: of each gradient. ``world_size``: ranks of a ring all-reduce.
    """
    times_sent = 2 * (world_size - 1) / world_size  # reduce-scatter, then all-gather
    order = np.argsort(ready_s)
    ready = np.asarray(ready_s)[order]
    sent_after = np.cumsum(np.asarray(nbytes)[order][::-1])[::-1] * times_sent
    done = ready + (sent_after - link.burst_bytes) / link.payload_bytes_per_s
    return float(max(ready[-1], done.max()))


class BoundWatcher:
    """Computes the bound of each timed step of a wrapped model, on ``link``.

    Adds a hook to each parameter of ``model``, which stays.
    """

    def __init__(self, model: nn.Module, link: Link) -> None:
        params = list(model.parameters())
        self._link = link
        self._nbytes = [param.nbytes for param in params]
        self._ready_ns = [0] * len(params)  # overwritten in every step
        self._bounds: list[float] = []
        for i, param in enumerate(params):
            param.register_post_accumulate_grad_hook(self._hook(i))

    def _hook(self, i: int) -> Callable[[torch.Tensor], None]:
        ready_ns, now = self._ready_ns, time.perf_counter_ns

        def note(_param: torch.Tensor) -> None:
            ready_ns[i] = now()

        return note

    def end_step(self, start_ns: int) -> None:
        """Store the bound of the step that began at ``start_ns``."""
        ready_s = [(ns - start_ns) / 1e9 for ns in self._ready_ns]
        size = dist.get_world_size()
        self._bounds.append(least_seconds(ready_s, self._nbytes, self._link, size))

    def result(self) -> Times:
        """Collective: return each timed step's bound, the latest among the ranks."""
        bounds = torch.tensor(self._bounds, dtype=torch.float64)
        dist.all_reduce(bounds, dist.ReduceOp.MAX)
        return bounds.numpy()
