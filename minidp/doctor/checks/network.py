"""Check the store's address and port, and the interfaces of Gloo and NCCL."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import socket
import struct
import time
from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import urlsplit

from minidp.doctor.findings import Finding, failed, ok, warning
from minidp.doctor.words import join

from .environment import Launch, is_loopback

_RETRY_SECONDS = 0.2


def check_port(launch: Launch, seconds: float) -> Finding:
    """Check that the store's address can be looked up, and that its port can be used.

    A rank 0 that will serve the store itself looks whether the port is free. The other
    ranks connect, for ``seconds`` at most, because rank 0 may not listen yet.
    """
    place, text = (launch.address, launch.port), f"{launch.address}:{launch.port}"
    try:
        resolved = socket.getaddrinfo(*place, type=socket.SOCK_STREAM)
    except OSError as error:
        found = f"MASTER_ADDR={launch.address} cannot be looked up ({error})"
        return failed(found, "set the address as a number, or fix /etc/hosts")
    if launch.rank == 0 and not launch.is_agents:
        return _check_own_port(text, resolved[0][4], resolved[0][0])
    found, deadline = f"{text} ({resolved[0][4][0]})", time.monotonic() + seconds
    while True:
        left = deadline - time.monotonic()
        try:
            socket.create_connection(place, max(0.1, left)).close()
            return ok(f"{found} answers")
        except TimeoutError:
            remedy = (
                "is the address that of rank 0? else a firewall or the wrong network "
                "may be the cause"
            )
            return failed(f"{found}: no answer within {seconds:g} s", remedy)
        except OSError as error:
            if left <= 0 or not isinstance(error, ConnectionRefusedError):
                why = os.strerror(error.errno or 0).lower()
                remedy = "is rank 0 running, with the same MASTER_ADDR and MASTER_PORT?"
                return failed(f"{found}: {why}", remedy)
        time.sleep(_RETRY_SECONDS)


def check_lighthouse(url: str, seconds: float) -> Finding:
    """Check that torchft's lighthouse answers within ``seconds``."""
    place, said = urlsplit(url), f"TORCHFT_LIGHTHOUSE={url}"
    if not place.scheme or not place.hostname:
        return failed(f"{said} is no address", "write it like http://host:29510")
    try:
        address = place.hostname or "", place.port or 0
        socket.create_connection(address, seconds).close()
    except (OSError, ValueError) as error:
        remedy = (
            "start one with torchft_lighthouse, or fix the address, which is written "
            "like http://host:29510"
        )
        return failed(f"{said}: {error}", remedy)
    return ok(f"{said} answers")


def _check_own_port(text: str, address: Any, family: int) -> Finding:
    """Check that this host has the address, and that the port is free."""
    host, port, *scope = address
    try:
        socket.create_server(("", port)).close()
        socket.create_server((host, 0, *scope), family=family).close()
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            remedy = (
                f"end the process that holds it (`ss -ltnp 'sport = :{port}'` names "
                "it), or set another MASTER_PORT"
            )
            return failed(f"port {port} is in use", remedy)
        if error.errno != errno.EADDRNOTAVAIL:
            raise
        here = join(filter(None, read_interfaces()[0].values()))
        return warning(
            f"MASTER_ADDR={text} is no address of this host, which has {here}",
            "rank 0 keeps the store: set its host's address on all ranks, unless the "
            "network translates this one",
        )
    return ok(f"{text}: port {port} is free for rank 0")


def judge_interfaces(
    env: Mapping[str, str],
    addresses: Mapping[str, str],
    host_address: str,
    *,
    several_hosts: bool,
    uses_nccl: bool,
) -> Iterator[Finding]:
    """Judge which interfaces Gloo, and perhaps NCCL, will use.

    An interface must exist, and with several hosts it must not be the loopback.

    Args:
        env: The environment variables of this process.
        addresses: The address of each interface of this host.
        host_address: The address of the host's own name, whose interface Gloo takes
            unless it is told another one.
        several_hosts: Whether the job has ranks on other hosts.
        uses_nccl: Whether NCCL will be used.
    """
    here = f"this host has {join(addresses)}"
    wanted = env.get("GLOO_SOCKET_IFNAME", "")
    of_host = next((n for n, a in addresses.items() if a == host_address), "")
    lacking = [n for n in wanted.split(",") if n and n not in addresses]
    if wanted:
        name, why = wanted.split(",")[0], "from GLOO_SOCKET_IFNAME"
    elif of_host:
        name, why = of_host, "that of the host's own name"
    else:
        name, why = "lo", "the host's own name leads to no interface"
    address = addresses.get(name, "")
    found = f"Gloo uses {name}{f' ({address})' if address else ''}, {why}"
    if lacking:
        found = f"GLOO_SOCKET_IFNAME={wanted}: no interface {join(lacking)}"
        yield failed(found, f"set it to one that exists, or unset it; {here}")
    elif several_hosts and (name == "lo" or is_loopback(address)):
        yield failed(
            found, f"other hosts cannot reach it: set GLOO_SOCKET_IFNAME; {here}"
        )
    else:
        yield ok(found)
    if uses_nccl:
        pattern = env.get("NCCL_SOCKET_IFNAME", "")
        chosen = nccl_interfaces(pattern, list(addresses))
        why = f"NCCL_SOCKET_IFNAME={pattern}" if pattern else "not set"
        found = f"NCCL may use {join(chosen) or 'no interface'} ({why})"
        is_bad = not chosen or (several_hosts and chosen == ["lo"])
        yield failed(found, f"{here}: set NCCL_SOCKET_IFNAME") if is_bad else ok(found)


def nccl_interfaces(pattern: str, names: list[str]) -> list[str]:
    """Return the names of interfaces that a value of NCCL_SOCKET_IFNAME allows.

    The pattern is a list of prefixes with commas between. With ``=`` in front they are
    whole names, and with ``^`` all other interfaces are allowed. An empty pattern
    allows all but lo and docker, unless there is nothing else.
    """
    if not pattern:
        outside = [n for n in names if not n.startswith(("lo", "docker"))]
        return outside or names
    wanted = pattern.removeprefix("^")
    parts = tuple(part for part in wanted.removeprefix("=").split(",") if part)
    is_exact, is_negative = wanted.startswith("="), pattern.startswith("^")
    return [
        name
        for name in names
        if (name in parts if is_exact else name.startswith(parts)) != is_negative
    ]


def read_interfaces() -> tuple[dict[str, str], str]:
    """Return the IPv4 address of each interface, and that of the host's own name.

    An address is "" where there is none.
    """
    addresses = dict.fromkeys((name for _, name in socket.if_nameindex()), "")
    get_address = 0x8915  # SIOCGIFADDR
    for name in addresses:
        with contextlib.suppress(OSError), socket.socket(type=socket.SOCK_DGRAM) as ask:
            request = struct.pack("256s", name.encode()[:15])
            reply = fcntl.ioctl(ask.fileno(), get_address, request)
            addresses[name] = socket.inet_ntoa(reply[20:24])
    with contextlib.suppress(OSError):
        return addresses, socket.gethostbyname(socket.gethostname())
    return addresses, ""
