"""Read from the system how long this process's TCP connections have been sending.

Linux counts per connection the microseconds in which bytes were unsent or not yet
acknowledged, and of these the ones in which the receiver had no room (``tcp_info`` in
``linux/tcp.h``). The rest is the time that the network took.
"""

from __future__ import annotations

import os
import socket
import struct
from contextlib import suppress
from typing import NamedTuple

_ACKED_BYTES, _BUSY_MICROS = 120, 168  # offsets in tcp_info; then: no room, no buffer
_BYTES = 192


class Sent(NamedTuple):
    """Hold what one connection has sent since it exists."""

    nbytes: int  # that the receiver has acknowledged
    seconds: float  # in which the network was busy with them


def sent_by_connection() -> dict[str, Sent]:
    """Return what each TCP connection of this process has sent; {} if not on Linux."""
    found = {}
    for descriptor in (
        os.listdir("/proc/self/fd") if os.path.isdir("/proc/self/fd") else ()
    ):
        with suppress(OSError, ValueError):  # closed meanwhile, or no TCP connection
            name = os.readlink(f"/proc/self/fd/{descriptor}")
            if name.startswith("socket:"):
                found[name] = _sent(int(descriptor))
    return found


def _sent(descriptor: int) -> Sent:
    with socket.socket(fileno=os.dup(descriptor)) as connection:
        connection.getpeername()
        info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _BYTES)
    if len(info) < _BYTES:
        raise ValueError("an older kernel")
    (nbytes,) = struct.unpack_from("Q", info, _ACKED_BYTES)
    busy, no_room = struct.unpack_from("QQ", info, _BUSY_MICROS)
    return Sent(nbytes, (busy - no_room) / 1e6)
