"""Two hosts on one machine, as far as sockets and host names can tell.

    node0, 10.77.0.1  --- cable ---  node1, 10.77.0.2

Each is a set of namespaces: network, host name, mounts (for an ``/etc/hosts`` of its
own) and processes. None has a name outside: all of it is gone when the command that
runs there ends, however it ends. Needs root and iproute2.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

NAMES = ("node0", "node1")
_ADDRESSES = ("10.77.0.1", "10.77.0.2")
# A killed `unshare` takes along the first process of its process namespace, and that
# one all others.
_UNSHARE = (
    *("unshare", "--net", "--uts", "--mount"),
    *("--pid", "--fork", "--kill-child", "--mount-proc"),
)
# Arguments: name, address, hosts file, command.
_MOVE_IN = """
hostname "$1"
mount --bind "$3" /etc/hosts
ip link set lo up
echo ready
read -r plugged_in
ip address add "$2/24" dev cable
ip link set cable up
shift 3
exec "$@"
"""


@dataclass(frozen=True)
class Ended:
    """What became of the command on one node."""

    returncode: int
    output: str  # stdout and stderr


def why_not() -> str:
    """Return why two nodes cannot be made on this machine; empty if they can."""
    if os.geteuid() != 0:
        return "needs root"
    missing = [tool for tool in ("ip", "unshare", "hostname") if not shutil.which(tool)]
    if missing:
        return f"needs {' and '.join(missing)}"
    script = (
        "hostname node0; mount --bind /dev/null /etc/hosts; ip link add cable type veth"
    )
    attempt = subprocess.run(
        [*_UNSHARE, "sh", "-ec", script], capture_output=True, text=True, check=False
    )
    if attempt.returncode != 0:
        return f"this kernel or container refuses: {attempt.stderr.strip()}"
    return ""


def run_on_nodes(
    commands: Sequence[Sequence[str]],
    directory: Path,
    env: Mapping[str, str],
    *,
    cwd: Path,
    timeout: float = 240.0,
) -> list[Ended]:
    """Run one command on each of the two nodes, at the same time.

    ``directory`` is where the hosts file may be written, ``env`` the whole environment
    of the commands. After ``timeout`` seconds both nodes are killed, and a TimeoutError
    holds what they had printed.
    """
    hosts = directory / "hosts"
    lines = zip(("127.0.0.1", *_ADDRESSES), ("localhost", *NAMES), strict=True)
    hosts.write_text("".join(f"{address} {name}\n" for address, name in lines))
    nodes = [
        subprocess.Popen(
            [
                *_UNSHARE,
                "sh",
                "-ec",
                _MOVE_IN,
                "sh",
                name,
                address,
                str(hosts),
                *command,
            ],
            env=dict(env),
            cwd=cwd,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for name, address, command in zip(NAMES, _ADDRESSES, commands, strict=True)
    ]
    networks: list[int] = []
    try:
        for node in nodes:
            assert node.stdout is not None
            said = node.stdout.readline()
            if said != "ready\n":
                raise RuntimeError(f"A node did not start: {said}{node.stdout.read()}")
        # Held until both are done: a cable without one of its ends is no cable at all,
        # and the command on one node may be done before that on the other begins.
        networks += [os.open(f"/proc/{n.pid}/ns/net", os.O_RDONLY) for n in nodes]
        _plug_in(nodes)
        return _wait(nodes, timeout)
    finally:
        for node in nodes:
            node.kill()
            node.wait()
        for network in networks:
            os.close(network)


def _plug_in(nodes: Sequence[subprocess.Popen[str]]) -> None:
    ends = [("cable", "netns", str(node.pid)) for node in nodes]
    cable = ["ip", "link", "add", *ends[0], "type", "veth", "peer", "name", *ends[1]]
    subprocess.run(cable, check=True)
    for node in nodes:
        assert node.stdin is not None
        node.stdin.write("plugged in\n")
        node.stdin.flush()


def _wait(nodes: Sequence[subprocess.Popen[str]], timeout: float) -> list[Ended]:
    outputs = []
    deadline = time.monotonic() + timeout
    late = False
    for node in nodes:
        try:
            outputs.append(node.communicate(timeout=deadline - time.monotonic())[0])
        except subprocess.TimeoutExpired:
            late = True
            node.kill()
            outputs.append(node.communicate()[0])
    if late:
        told = "\n".join(f"{n}:\n{o}" for n, o in zip(NAMES, outputs, strict=True))
        raise TimeoutError(f"The nodes were not done after {timeout:.0f} s.\n{told}")
    return [Ended(n.returncode, o) for n, o in zip(nodes, outputs, strict=True)]
