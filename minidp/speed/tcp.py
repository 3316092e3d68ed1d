"""Read from the system how fast this process's TCP connections send.

Linux computes, from each acknowledgement, how fast its data reached the receiver
(``tcpi_delivery_rate`` in ``linux/tcp.h``). A pause of the sender does not lower that,
nor does a slow way back: late acknowledgements come together. The time in which a
connection was busy would not do: where one direction is slow, that of the other grows,
too, because its acknowledgements wait behind the data.
"""

from __future__ import annotations

import os
import socket
import struct
from contextlib import suppress
from typing import NamedTuple

_FOLDER = "/proc/self/fd"  # of the process's open files and sockets
_ACKED_BYTES, _RATE = 120, 160  # offsets in tcp_info
_BYTES = 168


class Sent(NamedTuple):
    """Hold how much one TCP connection has sent, and how fast lately."""

    nbytes: int  # that the receiver has acknowledged, since the connection exists
    rate: float  # bytes per second, of the last ones


def sent_by_connection() -> dict[str, Sent]:
    """Return bytes so far and rate of each open TCP connection of this process.

    The key is the system's name of the socket: compare two calls by it. {} if the
    system does not count them (not Linux, or an old kernel).
    """
    found = {}
    descriptors = os.listdir(_FOLDER) if os.path.isdir(_FOLDER) else ()
    for descriptor in descriptors:
        with suppress(OSError, ValueError):  # closed meanwhile, or no TCP connection
            name = os.readlink(f"{_FOLDER}/{descriptor}")
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
    (rate,) = struct.unpack_from("Q", info, _RATE)
    return Sent(nbytes, float(rate))
