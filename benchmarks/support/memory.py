"""Peak memory of an implementation: what its steps need beyond the weights.

On a GPU torch's allocator counts. On CPU the kernel does: the peak of the process's
resident memory. That has what Gloo's threads allocate and free as well, which torch's
profiler does not see. The C library is told to give all but small pieces back at once,
so that resident is what is in use.
"""

from __future__ import annotations

import ctypes
import gc
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from support.nets import Net
from support.rounds import Contestant, Implementation, Where

RESET = "/proc/self/clear_refs"
M_MMAP_THRESHOLD, M_MMAP_MAX = -3, -4  # of glibc's mallopt
LARGE = 2**16  # bytes: pieces from here on go back to the system when freed
STEPS = 3  # DDP rebuilds its buckets after the first


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
    """Collective: the memory of each, one after the other.

    The process must not be used to measure time afterwards. An empty result: memory
    cannot be measured here.
    """
    where = where or Where()
    if why_no_memory(where.device):
        return {}
    found: dict[str, Memory] = {}
    # Some take part twice: what torch, DDP and Gloo keep for good is there then.
    quick = [each for each in implementations if not each.settling]
    for each in [*quick[:4], quick[-1], *implementations]:
        gc.collect()
        peak, at_rest = _history(lambda each=each: _train(each, net, where))
        both = torch.tensor([peak, at_rest])
        where.reduce(both, dist.ReduceOp.MAX)
        found[each.name] = Memory(int(both[0]), int(both[1]))
    return {each.name: found[each.name] for each in implementations}


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


def why_no_memory(device: str) -> str:
    """Why memory cannot be measured here; empty when it can."""
    if device == "cpu" and not os.access(RESET, os.W_OK):
        return f"needs {RESET}, which Linux has"
    return ""


def _history(action: Callable[[], object]) -> tuple[int, int]:
    """Most bytes in use during an action, and those at its end, beyond the present."""
    if torch.cuda.is_initialized():
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        kept = action()
        after = torch.cuda.memory_allocated()
        peak = torch.cuda.max_memory_allocated()
    else:
        libc = ctypes.CDLL(None)
        libc.mallopt(M_MMAP_MAX, 2**20)
        libc.mallopt(M_MMAP_THRESHOLD, LARGE)
        libc.malloc_trim(0)
        before = _resident("VmRSS")
        Path(RESET).write_text("5")  # the peak becomes the present
        kept = action()
        peak, after = _resident("VmHWM"), _resident("VmRSS")
    del kept
    return max(0, peak - before), max(0, after - before)


def _resident(name: str) -> int:
    """Bytes, by a line of the kernel's report."""
    report = Path("/proc/self/status").read_text()
    line = next(line for line in report.splitlines() if line.startswith(name + ":"))
    return int(line.split()[1]) * 1024
