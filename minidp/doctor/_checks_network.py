"""Whether the store can be reached, and which interfaces Gloo and NCCL take."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import secrets
import socket
import struct
import time
from collections.abc import Mapping
from dataclasses import dataclass

from ._checks_environment import Launch, is_loopback
from ._findings import Finding, failed, join, ok

_RETRY_SECONDS = 0.2
_OWN_SECONDS = 5.0  # for rank 0 to reach itself
_ANOTHER = "another host answers there"


def check_port(launch: Launch, seconds: float) -> Finding:
    """Whether this process can reach the store, or may open it if it is rank 0."""
    check, place = "master port", launch.place
    try:
        resolved = socket.getaddrinfo(launch.address, launch.port)
    except OSError as error:
        found = f"MASTER_ADDR={launch.address} cannot be looked up ({error})"
        return failed(check, found, "set the address as a number, or mend /etc/hosts")
    if launch.rank == 0 and not launch.is_agents:
        return _check_bind(check, launch) or _check_own_address(check, launch, seconds)
    number = resolved[0][4][0]
    try:
        _connect(launch.address, launch.port, seconds)
    except OSError as error:
        why = _in_words(error, seconds)
        remedy = (
            "a firewall, or the wrong network: is the address that of rank 0's host?"
            if isinstance(error, TimeoutError)
            else "is rank 0 running, and are its MASTER_ADDR and MASTER_PORT the same?"
        )
        return failed(check, f"{place} ({number}): {why}", remedy)
    return ok(check, f"{place} ({number}) answers")


def _check_bind(check: str, launch: Launch) -> Finding | None:
    """Rank 0 keeps the store itself: is the port free? None if it is."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", launch.port))
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
            remedy = (
                f"find who holds it (ss -ltnp 'sport = :{launch.port}'), often an "
                "earlier run; or choose another MASTER_PORT"
            )
            return failed(check, f"port {launch.port} is in use", remedy)
    return None


def _check_own_address(check: str, launch: Launch, seconds: float) -> Finding:
    """Whether the address of the store, which rank 0 keeps, leads to this host."""
    found = f"{launch.place}: port {launch.port} is free for rank 0"
    if is_of_this_host(launch.address):
        return ok(check, found)
    why = why_not_reached(launch.address, launch.port, min(seconds, _OWN_SECONDS))
    if not why:  # address translation, as for the public address of a cloud's host
        return ok(check, f"{found}, and the address leads here")
    here = join(address for address in read_network().addresses.values() if address)
    return failed(
        check,
        f"MASTER_ADDR={launch.address} does not lead to this host: {why}",
        "rank 0 keeps the store, so MASTER_ADDR is the address of its host, on all "
        f"ranks; this host has {here or 'no address'}",
    )


def is_of_this_host(address: str) -> bool:
    """Whether one of this host's interfaces has an address, a name or a number."""
    for family, *_, place in socket.getaddrinfo(address, 0, type=socket.SOCK_STREAM):
        with socket.socket(family) as probe, contextlib.suppress(OSError):
            probe.bind(place)
            return True
    return False


def why_not_reached(address: str, port: int, seconds: float) -> str:
    """Why a connection to ``address`` does not arrive here; empty if it does.

    Args:
        address: a name or a number.
        port: nobody listens on it.
        seconds: how long to wait for the connection.
    """
    token = secrets.token_bytes(16)  # else another rank's attempt would do
    family = socket.getaddrinfo(address, port)[0][0]
    with socket.create_server(("", port), family=family) as server:
        try:
            sender = socket.create_connection((address, port), timeout=seconds)
        except OSError as error:
            return _in_words(error, seconds)
        with sender:
            sender.sendall(token)
            return "" if _arrives(token, server, seconds) else _ANOTHER


def _arrives(token: bytes, server: socket.socket, seconds: float) -> bool:
    """Whether a connection brings ``token``; other ranks may be early, with none."""
    server.settimeout(seconds)
    brought = b""
    while brought != token:
        try:
            arrived, _ = server.accept()
        except TimeoutError:
            return False
        with arrived, contextlib.suppress(OSError):
            arrived.settimeout(seconds)
            brought = arrived.recv(len(token))
    return True


def _in_words(error: OSError, seconds: float) -> str:
    if isinstance(error, TimeoutError):
        return f"no answer within {seconds:g} s"
    return os.strerror(error.errno or 0).lower()


def _connect(address: str, port: int, seconds: float) -> None:
    """Connect once; rank 0 may be a little late to listen."""
    deadline = time.monotonic() + seconds
    while True:
        left = max(0.1, deadline - time.monotonic())
        try:
            socket.create_connection((address, port), timeout=left).close()
        except ConnectionRefusedError:
            if time.monotonic() > deadline:
                raise
            time.sleep(_RETRY_SECONDS)
        else:
            return


@dataclass(frozen=True)
class Network:
    """The interfaces of this host.

    Args:
        addresses: interface -> IPv4 address; empty: it has none.
        host_address: what the host's own name resolves to; empty: nothing.
    """

    addresses: Mapping[str, str]
    host_address: str

    @property
    def of_host(self) -> str:
        """The interface that has the host's own address; empty: none."""
        named = (n for n, a in self.addresses.items() if a == self.host_address)
        return next(named, "")


def judge_interfaces(
    env: Mapping[str, str], network: Network, *, several_hosts: bool, has_gpus: bool
) -> list[Finding]:
    """Which interfaces Gloo and NCCL use, and whether they can."""
    findings = [_judge_gloo(env, network, several_hosts=several_hosts)]
    if has_gpus:
        findings.append(_judge_nccl(env, network, several_hosts=several_hosts))
    return findings


def _judge_gloo(
    env: Mapping[str, str], network: Network, *, several_hosts: bool
) -> Finding:
    check, wanted = "interfaces", env.get("GLOO_SOCKET_IFNAME", "")
    here = f"this host has {join(network.addresses)}"
    lacking = [n for n in wanted.split(",") if n and n not in network.addresses]
    if lacking:
        found = f"GLOO_SOCKET_IFNAME={wanted}: no interface {join(lacking)}"
        return failed(check, found, f"{here}; or unset it")
    if wanted:
        name, why = wanted.split(",")[0], "from GLOO_SOCKET_IFNAME"
    elif network.of_host:
        name, why = network.of_host, "that of the host's own name"
    else:
        name, why = "lo", "the host's own name leads to no interface"
    address = network.addresses.get(name, "")
    found = f"Gloo uses {name}{f' ({address})' if address else ''}, {why}"
    if several_hosts and (name == "lo" or is_loopback(address)):
        remedy = f"other hosts cannot reach it: set GLOO_SOCKET_IFNAME; {here}"
        return failed(check, found, remedy)
    return ok(check, found)


def _judge_nccl(
    env: Mapping[str, str], network: Network, *, several_hosts: bool
) -> Finding:
    check, pattern = "interfaces", env.get("NCCL_SOCKET_IFNAME", "")
    chosen = nccl_interfaces(pattern, list(network.addresses))
    why = f"NCCL_SOCKET_IFNAME={pattern}" if pattern else "not set"
    found = f"NCCL may use {join(chosen) if chosen else 'no interface'} ({why})"
    if not chosen or (several_hosts and chosen == ["lo"]):
        remedy = f"this host has {join(network.addresses)}: set NCCL_SOCKET_IFNAME"
        return failed(check, found, remedy)
    return ok(check, found)


def nccl_interfaces(pattern: str, names: list[str]) -> list[str]:
    """Which interfaces NCCL_SOCKET_IFNAME allows.

    Args:
        pattern: prefixes with commas between; ``=`` in front: whole names; ``^``: all
            but these. Empty: all but lo and docker, unless there is nothing else.
        names: of all interfaces.
    """
    if not pattern:
        outside = [n for n in names if not n.startswith(("lo", "docker"))]
        return outside or names
    is_negative = pattern.startswith("^")
    wanted = pattern.removeprefix("^")
    is_exact = wanted.startswith("=")
    parts = [part for part in wanted.removeprefix("=").split(",") if part]

    def is_named(name: str) -> bool:
        return name in parts if is_exact else name.startswith(tuple(parts))

    return [name for name in names if is_named(name) != is_negative]


def read_network() -> Network:
    """Interfaces and addresses; addresses on Linux only."""
    addresses = {name: _address_of(name) for _, name in socket.if_nameindex()}
    host = ""
    with contextlib.suppress(OSError):
        host = socket.gethostbyname(socket.gethostname())
    return Network(addresses, host)


def _address_of(interface: str) -> str:
    get_address = 0x8915  # SIOCGIFADDR
    with contextlib.suppress(OSError), socket.socket(type=socket.SOCK_DGRAM) as probe:
        request = struct.pack("256s", interface.encode()[:15])
        reply = fcntl.ioctl(probe.fileno(), get_address, request)
        return socket.inet_ntoa(reply[20:24])
    return ""
