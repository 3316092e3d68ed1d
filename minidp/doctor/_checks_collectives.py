"""Whether collectives bring the right numbers, how fast, and the same gradients.

All of it is collective; `doctor` runs each check in a thread with a limit, on a group
with a short timeout.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from minidp._compat import DataParallel
from minidp._desync import sum_of_bits

from ._checks_ranks import judge_clocks
from ._findings import Finding, failed, join, of_ranks, ok, warning

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

SIZES = (4, 64 * 2**10, 2**20, 16 * 2**20)  # bytes
_ROUNDS = 5
_LONG_SECONDS = 0.5  # one round more will do
_SLOW = 12.5e6  # bytes per second: a network of 100 Mbit/s
_MODULUS = 1021  # sums of small whole numbers are exact in float32


def backends_here() -> list[str]:
    """Backends that this torch was built with, by name."""
    candidates = {
        "gloo": dist.is_gloo_available,
        "nccl": dist.is_nccl_available,
        "mpi": dist.is_mpi_available,
        "ucc": dist.is_ucc_available,
        "xccl": dist.is_xccl_available,
    }
    return [name for name, is_there in candidates.items() if is_there()]


def judge_backends(backends: Sequence[str], *, has_gpus: bool) -> Finding:
    """Whether there is a backend for what will be trained on."""
    check = "backends"
    found = f"this torch has {join(backends) if backends else 'none'}"
    needed = "nccl" if has_gpus else "gloo"
    if needed not in backends:
        remedy = f"install a torch that was built with {needed}"
        return failed(check, found, remedy)
    return ok(check, f"{found}; {needed} would be used to train here")


def check_all_reduce(
    group: ProcessGroup, device: torch.device, num_bytes: int, *, check: str
) -> Finding:
    """Collective: are the sums right, and how long does one take?"""
    rank, world_size = group.rank(), group.size()
    numel = num_bytes // 4
    count = torch.arange(numel, device=device, dtype=torch.float32) % _MODULUS
    mine = count * (rank + 1)
    expected = count * (world_size * (world_size + 1) // 2)

    def measure() -> tuple[float, int]:
        value = mine.clone()
        _synchronize(device)
        begin = time.perf_counter()
        dist.all_reduce(value, group=group)
        _synchronize(device)
        return time.perf_counter() - begin, int((value != expected).sum())

    # The slowest rank, so that all say and do the same; the first round connects.
    first, wrong = _worst(*measure(), group=group, device=device)
    rounds = [measure() for _ in range(_ROUNDS if first < _LONG_SECONDS else 1)]
    usual = statistics.median(seconds for seconds, _ in rounds)
    num_wrong = wrong + sum(found for _, found in rounds)
    slowest, most = _worst(usual, num_wrong, group=group, device=device)
    return judge_all_reduce(check, num_bytes, world_size, seconds=slowest, wrong=most)


def _worst(
    seconds: float, wrong: int, *, group: ProcessGroup, device: torch.device
) -> tuple[float, int]:
    worst = torch.tensor([seconds, float(wrong)], dtype=torch.float64).to(device)
    dist.all_reduce(worst, dist.ReduceOp.MAX, group=group)
    slowest, most = worst.tolist()
    return slowest, int(most)


def judge_all_reduce(
    check: str, num_bytes: int, world_size: int, *, seconds: float, wrong: int
) -> Finding:
    """From what the slowest rank measured and the most wrong elements."""
    if wrong:
        return failed(
            check,
            f"{_size(num_bytes)}: {wrong} elements are not the sum of all ranks",
            "broken memory, network or backend: run NCCL with NCCL_P2P_DISABLE=1 or "
            "NCCL_ALGO=Ring to narrow it down, and another host to rule out this one",
        )
    moved = num_bytes * 2 * (world_size - 1) / world_size  # what a ring sends
    speed = moved / max(seconds, 1e-9)
    found = f"{_size(num_bytes)}: right; {_time(seconds)}"
    if num_bytes < 2**16:
        return ok(check, found)
    found += f", {_rate(speed)} bus bandwidth"
    if world_size > 1 and num_bytes >= 2**20 and speed < _SLOW:
        remedy = "is this the fast network? set GLOO_SOCKET_IFNAME, NCCL_SOCKET_IFNAME"
        return warning(check, found, remedy)
    return ok(check, found)


def check_clocks(
    group: ProcessGroup, device: torch.device, clock: Callable[[], float] = time.time
) -> Finding:
    """Collective: how far are the clocks apart?"""
    rounds = []
    for _ in range(_ROUNDS):
        dist.barrier(group=group)
        now = torch.zeros(group.size(), dtype=torch.float64, device=device)
        now[group.rank()] = clock()
        dist.all_reduce(now, group=group)
        rounds.append((now - now[0]).tolist())
    # Ranks leave a barrier at different times: the round with the least of it.
    return judge_clocks(min(rounds, key=lambda offsets: max(offsets) - min(offsets)))


class Probe(nn.Module):
    """A small net with parameters of several sizes; the same on all ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 4))
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for param in self.parameters():
                param.copy_(torch.randn(param.shape, generator=generator) * 0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(n, 16) -> (n, 4)."""
        result: torch.Tensor = self.layers(x)
        return result


Wrap = Callable[[nn.Module], nn.Module]


def check_gradients(
    group: ProcessGroup,
    device: torch.device,
    wrap: Wrap | None = None,
    *,
    check: str,
) -> Finding:
    """Collective: are gradients the mean over ranks, everywhere the same bits?

    Args:
        group: the ranks.
        device: where the probe lives.
        wrap: what synchronises it; minidp by default.
        check: name of the finding.
    """
    wrap = wrap or (lambda module: DataParallel(module, process_group=group))
    ours = _gradients(wrap(Probe().to(device)), _batch(group.rank()).to(device))
    torchs = _gradients(
        DistributedDataParallel(Probe().to(device), process_group=group),
        _batch(group.rank()).to(device),
    )
    batches = [_batch(rank).to(device) for rank in range(group.size())]
    alone = [_gradients(Probe().to(device), batch) for batch in batches]
    mean = [torch.stack(all_ranks).mean(0) for all_ranks in zip(*alone, strict=True)]
    names = [name for name, _ in Probe().named_parameters()]
    is_wrong = [
        not torch.allclose(a, b, rtol=1e-4, atol=1e-6)
        for a, b in zip(ours, mean, strict=True)
    ]
    sums = torch.stack([sum_of_bits(grad) for grad in ours]).to(device)
    rows = [torch.empty_like(sums) for _ in range(group.size())]
    dist.all_gather(rows, sums, group=group)
    # All ranks have to say the same, so they count wrong gradients together.
    counts = torch.tensor([*map(int, is_wrong)], device=device)
    dist.all_reduce(counts, group=group)
    return judge_gradients(
        check,
        wrong=[n for n, count in zip(names, counts.tolist(), strict=True) if count],
        sums=[row.tolist() for row in rows],
        same_as_torch=all(map(torch.equal, ours, torchs)),
    )


def judge_gradients(
    check: str,
    *,
    wrong: Sequence[str],
    sums: Sequence[Sequence[int]],
    same_as_torch: bool,
) -> Finding:
    """From what `check_gradients` measured.

    Args:
        check: name of the finding.
        wrong: parameters whose gradient is not the mean, on any rank.
        sums: by rank, a checksum of each gradient.
        same_as_torch: whether torch's DDP gives the same bits on this rank.
    """
    remedy = (
        "do the all-reduce checks above pass? then please report this, with the "
        "versions above"
    )
    odd = [rank for rank, row in enumerate(sums) if list(row) != list(sums[0])]
    if odd:
        found = f"a probe model has other gradients on {of_ranks(odd)} than on rank 0"
        return failed(check, found, remedy)
    if wrong:
        found = f"of a probe model: {join(wrong)} did not get the mean over the ranks"
        return failed(check, found, remedy)
    found = "a probe model gets the mean of all ranks, bit for bit the same on each"
    if not same_as_torch:
        return warning(check, f"{found}; torch's DDP gives other bits", remedy)
    return ok(check, f"{found} and with torch's DDP")


def _batch(rank: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 + rank)
    return torch.randn(8, 16, generator=generator)


def _gradients(module: nn.Module, batch: torch.Tensor) -> list[torch.Tensor]:
    module(batch).pow(2).mean().backward()
    return [p.grad.clone() for p in module.parameters() if p.grad is not None]


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _size(num_bytes: int) -> str:
    for unit, limit in (("MiB", 2**20), ("KiB", 2**10)):
        if num_bytes >= limit:
            return f"{num_bytes // limit} {unit}"
    return f"{num_bytes} B"


def _time(seconds: float) -> str:
    return f"{1e3 * seconds:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"


def _rate(bytes_per_second: float) -> str:
    gigabytes = bytes_per_second / 1e9
    return (
        f"{gigabytes:.3g} GB/s" if gigabytes >= 0.1 else f"{1e3 * gigabytes:.3g} MB/s"
    )
