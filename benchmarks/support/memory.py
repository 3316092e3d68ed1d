"""Peak memory of an implementation: of torch's allocator, to the byte.

Not the memory of the process: that has torch itself, Gloo, holes, and whatever was
there before. Counted is what torch allocates from the construction of the wrapper on,
through some steps: buckets, activations, gradients. The model's weights are there before.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

from support.nets import Net
from support.rounds import Contestant, Implementation, Where

STEPS = 4  # DDP rebuilds its buckets after the first


@dataclass(frozen=True)
class Memory:
    """Bytes beyond the weights, on the rank that needs most.

    Args:
        peak: at the worst moment.
        at_rest: after a step, gradients freed: what the wrapper keeps.
    """

    peak: int
    at_rest: int


def measure_memory(
    implementations: Sequence[Implementation], net: Net, where: Where | None = None
) -> dict[str, Memory]:
    """Collective: the memory of each, one after the other."""
    where = where or Where()
    _history(lambda: net(*net_data(net, where)).backward())  # what torch keeps for good
    net.zero_grad()
    found = {}
    for each in implementations:
        gc.collect()
        peak, at_rest = _history(lambda each=each: _train(each, net, where))
        both = torch.tensor([peak, at_rest])
        where.reduce(both, dist.ReduceOp.MAX)
        found[each.name] = Memory(int(both[0]), int(both[1]))
    return found


def net_data(net: Net, where: Where) -> tuple[torch.Tensor, ...]:
    """The inputs of one step, on the device."""
    data = net.data(torch.Generator().manual_seed(0))
    return tuple(each.to(where.device) for each in data)


def _train(implementation: Implementation, net: Net, where: Where) -> Contestant:
    """Take some steps; what is returned keeps the wrapper alive."""
    contestant = Contestant(implementation, net, where)
    for _ in range(implementation.settling + STEPS):
        contestant.warm_up(net_data(net, where))
    where.barrier()
    return contestant


def _history(action: Callable[[], object]) -> tuple[int, int]:
    """Most bytes allocated during an action, and those at its end."""
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        kept = action()
        after = torch.cuda.memory_allocated() - before
        del kept
        return torch.cuda.max_memory_allocated() - before, after
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        kept = action()
    del kept
    assert profiler.profiler is not None
    results = profiler.profiler.kineto_results
    changes = [event for event in results.events() if event.name() == "[memory]"]
    now = peak = 0
    for event in sorted(changes, key=lambda event: event.start_ns()):
        now += event.nbytes()
        peak = max(peak, now)
    return peak, now
