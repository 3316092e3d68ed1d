"""Check the results and the bandwidth of collectives, and gradients of a probe model.

All ranks call each ``check_...`` together. `timebox.Runner` runs it in a thread with a
time limit, on a group with a short timeout.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import ProcessGroup
from torch.nn.parallel import DistributedDataParallel

from minidp.accelerator import default_device, synchronize
from minidp.comm import (
    Communicator,
)
from minidp.data_parallel import DataParallel
from minidp.doctor.findings import Finding, failed, ok, warning
from minidp.doctor.words import join, of_ranks
from minidp.replica import sum_of_bits
from minidp.shared_memory import BufferShape, share

from .ranks import judge_clocks

SIZES = (4, 64 * 2**10, 2**20, 16 * 2**20)  # bytes
_ROUNDS = 5
_LONG_SECONDS = 0.5  # if an all-reduce takes longer, one more round is enough
_SLOW = 12.5e6  # bytes per second: a network of 100 Mbit/s
_MODULUS = 1021  # sums of small whole numbers are exact in float32


def needed_backend() -> str:
    """Return the backend that torch takes for this machine's devices, or for the CPU.

    It is "" if there is none for this type of device.
    """
    try:
        return str(dist.get_default_backend_for_device(default_device()))
    except ValueError:
        return ""


def judge_backends(needed: str) -> Finding:
    """Judge whether this torch has the backend that is needed here."""
    names = dict.fromkeys(["gloo", "nccl", "mpi", "ucc", "xccl", needed])
    backends = [name for name in names if name and dist.is_backend_available(name)]
    found = f"this torch has {join(backends) or 'none'}"
    if not needed:
        remedy = "install the package that brings the backend of this device"
        return failed(f"{found}, and none for {default_device().type}", remedy)
    if needed not in backends:
        return failed(found, f"install a torch that was built with {needed}")
    return ok(f"{found}; {needed} would be used to train here")


def check_all_reduce(
    group: ProcessGroup, device: torch.device, num_bytes: int
) -> Finding:
    """Measure an all-reduce and check its sums, in a few rounds.

    The first round does not count, because it connects the ranks. All ranks judge the
    same numbers, those of the slowest one: the ranks' medians and errors are reduced to
    their maxima.
    """
    world_size = group.size()
    count = torch.arange(num_bytes // 4, device=device, dtype=torch.float32) % _MODULUS
    expected = count * (world_size * (world_size + 1) // 2)

    def measure() -> list[float]:
        value = count * (group.rank() + 1)
        synchronize(device)
        begin = time.perf_counter()
        dist.all_reduce(value, group=group)
        synchronize(device)
        return [time.perf_counter() - begin, float((value != expected).sum())]

    def worst(values: list[float]) -> list[float]:
        worst = torch.tensor(values, dtype=torch.float64, device=device)
        dist.all_reduce(worst, dist.ReduceOp.MAX, group=group)
        return worst.tolist()

    # All ranks must run equally many rounds, so the time of the slowest one decides.
    first, wrong = worst(measure())
    rounds = [measure() for _ in range(_ROUNDS if first < _LONG_SECONDS else 1)]
    times, errors = zip(*rounds, strict=True)
    seconds, wrong = worst([statistics.median(times), wrong + sum(errors)])
    return judge_all_reduce(num_bytes, world_size, seconds, int(wrong))


def judge_all_reduce(
    num_bytes: int, world_size: int, seconds: float, wrong: int
) -> Finding:
    """Judge an all-reduce by its number of wrong elements, and by its bandwidth."""
    size = f"{num_bytes:,} B"
    if wrong:
        return failed(
            f"{size}: {wrong} elements are not the sum of all ranks",
            "broken memory, network or backend: run NCCL with NCCL_P2P_DISABLE=1 or "
            "NCCL_ALGO=Ring to narrow it down, and another host to rule out this one",
        )
    found = f"{size}: right; {1e3 * seconds:.2f} ms"
    if num_bytes < 2**16:
        return ok(found)
    moved = num_bytes * 2 * (world_size - 1) / world_size  # what a ring sends
    speed = moved / max(seconds, 1e-9)
    found += f", {speed / 1e6:.1f} MB/s bus bandwidth"
    if world_size > 1 and num_bytes >= 2**20 and speed < _SLOW:
        remedy = (
            "is this the fast network? GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME "
            "choose another one"
        )
        return warning(found, remedy)
    return ok(found)


def check_clocks(
    group: ProcessGroup, device: torch.device, clock: Callable[[], float] = time.time
) -> Finding:
    """Read the clocks of all ranks after a barrier, and judge how much they differ."""
    rounds = []
    for _ in range(_ROUNDS):
        dist.barrier(group=group)
        now = torch.zeros(group.size(), dtype=torch.float64, device=device)
        now[group.rank()] = clock()
        dist.all_reduce(now, group=group)
        rounds.append((now - now[0]).tolist())
    # Ranks leave a barrier at different times, which looks like a difference of clocks.
    # The round in which they were closest disturbs least.
    return judge_clocks(min(rounds, key=lambda offsets: max(offsets) - min(offsets)))


def check_shared_memory(group: ProcessGroup, device: torch.device) -> Finding:
    """Say whether ranks share the memory of buckets, or why not, and accept both.

    Raises:
        NativeError: They cannot, but MINIDP_SHARED_MEMORY=1 asks for it.
    """
    shapes = [BufferShape(1, torch.float32)]
    found = share(shapes, Communicator(group), device)
    if isinstance(found, str):
        return ok(f"buckets travel through the process group: {found}")
    return ok("the ranks share the memory of buckets, which need no messages")


def check_gradients(
    group: ProcessGroup,
    device: torch.device,
    wrap: Callable[..., nn.Module] = DataParallel,
) -> Finding:
    """Check that a small model in ``wrap`` gets the mean of all ranks' gradients.

    It must get them on each rank. If torch's DDP has different bits, it is a warning.
    """
    classes = (wrap, DistributedDataParallel)
    wrapped = (each(_probe().to(device), process_group=group) for each in classes)
    ours, torchs = (_gradients(each, group.rank(), device) for each in wrapped)
    alone = [_gradients(_probe().to(device), r, device) for r in range(group.size())]
    mean = [torch.stack(all_ranks).mean(0) for all_ranks in zip(*alone, strict=True)]
    pairs = [*zip(ours, mean, strict=True)]
    is_wrong = [not torch.allclose(a, b, rtol=1e-4, atol=1e-6) for a, b in pairs]
    facts = [*map(int, map(sum_of_bits, ours)), *map(int, is_wrong)]
    mine = torch.tensor(facts, device=device)
    rows = [torch.empty_like(mine) for _ in range(group.size())]
    dist.all_gather(rows, mine, group=group)
    sums, wrong = torch.stack(rows).split(len(pairs), dim=1)
    names = [name for name, _ in _probe().named_parameters()]
    odd_ranks = [rank for rank, row in enumerate(sums) if not row.equal(sums[0])]
    odd_names = [n for n, count in zip(names, wrong.sum(0), strict=True) if count]
    remedy = (
        "do the checks above pass? then please report this, with the versions above"
    )
    if odd_ranks:
        odd = of_ranks(odd_ranks)
        found = f"a probe model has different gradients on {odd} than on rank 0"
        return failed(found, remedy)
    if odd_names:
        found = f"of a probe model: {join(odd_names)} did not get the ranks' mean"
        return failed(found, remedy)
    found = "a probe model gets the mean of all ranks, bit for bit the same on each"
    if not all(map(torch.equal, ours, torchs)):
        return warning(f"{found}; torch's DDP gives different bits", remedy)
    return ok(f"{found} and with torch's DDP")


def _probe() -> nn.Module:
    """Return a small model, whose parameters have the same values in each call."""
    probe = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 4))
    generator = torch.Generator().manual_seed(0)
    for param in probe.parameters():
        values = torch.randn(param.shape, generator=generator, device="cpu")
        param.data = values * 0.1
    return probe


def _gradients(
    module: nn.Module, rank: int, device: torch.device
) -> list[torch.Tensor]:
    """Run one backward on a batch that depends on ``rank``, and return gradients."""
    generator = torch.Generator().manual_seed(1000 + rank)
    batch = torch.randn(8, 16, generator=generator, device="cpu").to(device)
    module(batch).pow(2).mean().backward()
    return [p.grad.clone() for p in module.parameters() if p.grad is not None]
