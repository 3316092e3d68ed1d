"""A link with a limited rate between two ranks, in network namespaces of their own.

The namespaces have no name: they belong to the two rank processes and, with the link,
are gone when these end, however they end. Nothing of the host's network is touched.
Needs root, `ip` and `tc` (iproute2).
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.distributed import Store

CLONE_NEWNET = 0x40000000
NAMES = ("minidp0", "minidp1")  # the two ends


@dataclass(frozen=True)
class Link:
    """Two ranks on a cable that carries ``gbit`` Gbit/s in each direction."""

    gbit: float

    @property
    def shape(self) -> list[str]:
        """The rate limit, in the words of ``tc``."""
        kbit = round(self.gbit * 1e6)
        burst = max(32, round(kbit / 8 * 0.001))  # KB: what passes in one millisecond
        return ["tbf", "rate", f"{kbit}kbit", "burst", f"{burst}kb", "latency", "20ms"]

    def join(self, rank: int, store: Store) -> str:
        """Move this process behind its end of the link; return the device's name.

        Args:
            rank: 0 or 1.
            store: where the two meet.
        """
        _leave_network()
        store.set(f"link/process/{rank}", str(os.getpid()))
        mine, other = NAMES[rank], NAMES[1 - rank]
        process = store.get(f"link/process/{1 - rank}").decode()
        if rank == 0:
            _run("ip", "link", "add", mine, "type", "veth", "peer", other)
            _run("ip", "link", "set", other, "netns", process)
            store.set("link/made", "yes")
        store.wait(["link/made"])
        _run("ip", "address", "add", f"10.0.0.{rank + 1}/24", "dev", mine)
        _run("ip", "link", "set", "lo", "up")
        _run("ip", "link", "set", mine, "up")
        _run("tc", "qdisc", "add", "dev", mine, "root", *self.shape)
        store.set(f"link/up/{rank}", "yes")
        store.wait([f"link/up/{other_rank}" for other_rank in (0, 1)])
        return mine


def why_not() -> str:
    """Why such a link cannot be made here; empty when it can."""
    if os.geteuid() != 0:
        return "needs root"
    missing = [tool for tool in ("ip", "tc", "unshare") if not shutil.which(tool)]
    if missing:
        return f"needs {' and '.join(missing)}"
    script = (
        "ip link add minidp0 type veth peer minidp1; "
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


def _leave_network() -> None:
    """Give the calling thread, and threads it starts, an empty network of its own."""
    libc = ctypes.CDLL(None, use_errno=True)  # os.unshare is new in Python 3.12
    if libc.unshare(CLONE_NEWNET) != 0:
        raise OSError(ctypes.get_errno(), "unshare(CLONE_NEWNET) failed")


def _run(*command: str) -> None:
    subprocess.run(command, check=True)
