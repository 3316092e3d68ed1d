"""Port numbers for tests whose ranks listen only seconds after the number is chosen.

A number that the system gives (``bind`` to port 0) may be given again, meanwhile, to
any connection of the tests that run beside. Linux gives numbers from 32768 on unasked;
these are lower, and each pytest process draws from its own part of them.
"""

from __future__ import annotations

import itertools
import os
import socket

FIRST, WORKERS, EACH = 12_000, 16, 1_000  # 12000 to 27999

_worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0")[2:]) % WORKERS
# Another run of pytest on this machine begins at another place.
_offsets = itertools.cycle((os.getpid() + i) % EACH for i in range(EACH))


def free_port() -> int:
    """Return the number of a TCP port on which nobody listens."""
    for offset in _offsets:
        port = FIRST + _worker * EACH + offset
        with socket.socket() as probe:
            try:
                probe.bind(("", port))
            except OSError:
                continue
            return port
    raise AssertionError("unreachable: the offsets never end")
