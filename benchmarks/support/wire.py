"""A network for one GPU: every bucket occupies a stream for as long as it would travel.

With one rank there is nothing to average, and NCCL takes no time. So a comm hook puts a
kernel that does nothing but wait on a stream of its own, the wire::

    compute  |--- backward ------------------|        copies, when their bucket is done
    wire        [bucket 0   ][bucket 1     ][bucket 2  ]

The streams, events and waits are those of a real training, and both torch's DDP and
minidp get the same hook. What is missing: a real collective also takes memory bandwidth
and multiprocessors from the backward; the waiting kernel is a single thread.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

from minidp._schedule import Network
from support.memory import net_data
from support.nets import Net
from support.rounds import Contestant, Implementation, Where, Wrap

CALIBRATION = 10**8  # cycles


class ModelledWire:
    """Carries one bucket after the other.

    Args:
        network: how long each takes.
    """

    def __init__(self, network: Network) -> None:
        self._network = network
        self._stream = torch.cuda.Stream()
        self._cycles_per_s = _cycles_per_s()

    def carry(self, buffer: torch.Tensor) -> torch.futures.Future[torch.Tensor]:
        """Return the future of a buffer that was written on the current stream."""
        cycles = self._network.seconds(buffer.nbytes) * self._cycles_per_s
        self._stream.wait_stream(torch.cuda.current_stream())
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future(
            devices=[buffer.device]
        )
        with torch.cuda.stream(self._stream):
            torch.cuda._sleep(int(cycles))
            buffer.record_stream(self._stream)
            future.set_result(buffer)  # waiters' streams wait for this one
        return future


def _cycles_per_s() -> float:
    """What a second is to the kernel that waits."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(CALIBRATION // 10)  # wakes the clock
    begin.record()
    torch.cuda._sleep(CALIBRATION)
    end.record()
    end.synchronize()
    return CALIBRATION / (begin.elapsed_time(end) / 1e3)


def over_wire(wire: ModelledWire) -> Callable[[Wrap], Wrap]:
    """What gives a wrapper's model the wire as its comm hook."""

    def with_wire(wrap: Wrap) -> Wrap:
        def wrap_and_hook(module: nn.Module) -> nn.Module:
            model: Any = wrap(module)
            # torch compares annotations with classes, so there must be none.
            model.register_comm_hook(
                wire, lambda state, bucket: state.carry(bucket.buffer())
            )
            return model

        return wrap_and_hook

    return with_wire


def write_trace(
    path: Path, implementation: Implementation, net: Net, where: Where
) -> None:
    """Write a Chrome trace of one step on a GPU."""
    contestant = Contestant(implementation, net, where)
    data = net_data(net, where)
    for _ in range(implementation.settling + 3):  # DDP rebuilds its buckets
        contestant.warm_up(data)
    activities = [ProfilerActivity.CPU, ProfilerActivity.CUDA]
    with profile(activities=activities) as profiler:
        contestant.step(data)
    profiler.export_chrome_trace(str(path))
