"""Connect the ranks of this machine by links with a limited rate.

Two ranks share a cable. Three or more are plugged into a switch (a bridge in the
namespace of rank 0), each by a cable of its own::

    rank 0 === rank 1            rank 0 ===.
                                 rank 1 ===[switch]
                                 rank 2 ===.

`tc tbf` limits both ends of every cable, so each rank sends and receives at the rate,
at the same time. Latency is that of the loopback device.

Each rank is in a network namespace without a name. Namespaces and devices vanish with
the rank processes, also after `kill -9`. The host's network is not touched. Needs root,
`ip` and `tc` (iproute2).
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from torch.distributed import Store

LOOPBACK = "loopback"
CLONE_NEWNET = 0x40000000
SWITCH = "switch"
PAYLOAD = 1460 / 1514  # the share of a full Ethernet frame that is no header


@dataclass(frozen=True)
class Link:
    """A cable for every rank that carries ``gbit`` Gbit/s in each direction."""

    gbit: float

    def __str__(self) -> str:
        return f"{self.gbit:g} Gbit/s"

    @classmethod
    def of(cls, name: str) -> Link | None:
        """Parse ``name``: Gbit/s, or ``loopback``, which gives None."""
        return None if name == LOOPBACK else cls(float(name))

    @property
    def shape(self) -> list[str]:
        """The rate limit, as arguments of ``tc``."""
        kbit, burst = round(self.gbit * 1e6), self.burst_bytes // 1024
        return ["tbf", "rate", f"{kbit}kbit", "burst", f"{burst}kb", "latency", "20ms"]

    @property
    def burst_bytes(self) -> int:
        """Bytes that pass at once after a pause: those of one millisecond."""
        return 1024 * max(32, round(self.gbit * 1e6 / 8 * 0.001))

    @property
    def payload_bytes_per_s(self) -> float:
        """Bytes of messages per second at most, headers taken off."""
        return self.gbit * 1e9 / 8 * PAYLOAD

    def join(self, rank: int, world_size: int, store: Store) -> str:
        """Move this process behind its end of the link; return the device's name.

        All ranks 0 .. ``world_size`` - 1 (at least 2) call this with a common store,
        and wait for each other. Raises ValueError for one rank.
        """
        if world_size < 2:
            raise ValueError(f"a link has 2 ranks or more, but got {world_size}")
        _leave_network()
        store.set(f"link/process/{rank}", str(os.getpid()))
        device = _device(rank)
        if rank == 0:
            keys = [f"link/process/{other}" for other in range(world_size)]
            self._plug([store.get(key).decode() for key in keys])
            store.set("link/made", "yes")
        store.wait(["link/made"])
        _run("ip", "address", "add", f"{address(rank)}/24", "dev", device)
        _run("ip", "link", "set", "lo", "up")
        self._start(device)
        store.set(f"link/up/{rank}", "yes")
        store.wait([f"link/up/{other}" for other in range(world_size)])
        return device

    def _plug(self, processes: list[str]) -> None:
        """On rank 0: make all cables, and give each rank its end."""
        if len(processes) == 2:
            _make_cable(_device(0), _device(1))
        else:
            _run("ip", "link", "add", SWITCH, "type", "bridge")
            _run("ip", "link", "set", SWITCH, "up")
            for rank in range(len(processes)):
                port = f"port{rank}"
                _make_cable(_device(rank), port)
                _run("ip", "link", "set", "dev", port, "master", SWITCH)
                self._start(port)
        for rank, process in enumerate(processes[1:], start=1):
            _run("ip", "link", "set", "dev", _device(rank), "netns", process)

    def _start(self, device: str) -> None:
        _run("ip", "link", "set", "dev", device, "up")
        _run("tc", "qdisc", "add", "dev", device, "root", *self.shape)


def address(rank: int) -> str:
    """Return the IP address of a rank on its link."""
    return f"10.0.0.{rank + 1}"


def why_not() -> str:
    """Say why no such link can be made here; empty when it can."""
    if os.geteuid() != 0:
        return "needs root"
    missing = [tool for tool in ("ip", "tc", "unshare") if not shutil.which(tool)]
    if missing:
        return f"needs {' and '.join(missing)}"
    script = (
        "ip link add minidp0 type veth peer minidp1; "
        f"ip link add {SWITCH} type bridge; ip link set dev minidp1 master {SWITCH}; "
        f"tc qdisc add dev minidp0 root {' '.join(Link(1).shape)}"
    )
    attempt = subprocess.run(
        ["unshare", "--net", "sh", "-ec", script],
        capture_output=True,
        text=True,
        check=False,
    )
    if attempt.returncode != 0:
        return f"this kernel or container refuses: {attempt.stderr.strip()}"
    return ""


@dataclass(frozen=True)
class Rate:
    """What an all-reduce achieves: Gbit/s that each rank sends, and receives.

    ``latency_s``: seconds of an all-reduce of 4 bytes.
    """

    gbit: float
    latency_s: float

    def __str__(self) -> str:
        return f"{self.gbit:.2f} Gbit/s, {1e3 * self.latency_s:.2f} ms"


def measured_rate(nbytes: int = 16 * 2**20, repeats: int = 1) -> Rate:
    """Collective: measure an all-reduce of ``nbytes``; medians of ``repeats``."""
    world_size = dist.get_world_size()
    times_sent = 2 * (world_size - 1) / world_size  # reduce-scatter, then all-gather
    message = torch.zeros(nbytes // 4)
    seconds = _all_reduce_seconds(message, repeats)
    latency = _all_reduce_seconds(message[:1], 10 * repeats)
    return Rate(message.nbytes * times_sent * 8 / seconds / 1e9, latency)


def _all_reduce_seconds(message: torch.Tensor, repeats: int) -> float:
    dist.all_reduce(message[:1024])  # connects
    seconds = []
    for _ in range(repeats):
        dist.barrier()
        start = time.perf_counter()
        dist.all_reduce(message)
        seconds.append(time.perf_counter() - start)
    return sorted(seconds)[repeats // 2]


def _device(rank: int) -> str:
    return f"minidp{rank}"


def _make_cable(one: str, other: str) -> None:
    _run("ip", "link", "add", one, "type", "veth", "peer", "name", other)


def _leave_network() -> None:
    """Give the calling thread, and threads it starts, an empty network of its own."""
    libc = ctypes.CDLL(None, use_errno=True)  # os.unshare is new in Python 3.12
    if libc.unshare(CLONE_NEWNET) != 0:
        raise OSError(ctypes.get_errno(), "unshare(CLONE_NEWNET) failed")


def _run(*command: str) -> None:
    subprocess.run(command, check=True)
