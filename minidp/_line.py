"""Is the host of a store still there? Found out before something is sent to it.

A `TCPStore` that cannot send prints 15 lines of C++ frames, in each process that is
left when rank 0 ends first. A connection on which nothing is said tells the same in
silence: the system closes it when the host's process ends.
"""

from __future__ import annotations

import contextlib
import socket
import weakref
from weakref import WeakKeyDictionary

from ._groups import address_of, unprefixed

CONNECT_SECONDS = 2.0


class Line:
    """A silent connection to the host of a store.

    Args:
        address: the host's name and port; None: the store has none.
    """

    def __init__(self, address: tuple[str, int] | None) -> None:
        self._socket: socket.socket | None = None
        if address is not None:
            with contextlib.suppress(OSError):  # then the store itself has to find out
                self._socket = socket.create_connection(address, CONNECT_SECONDS)
                self._socket.settimeout(0)
                weakref.finalize(self, self._socket.close)

    def is_cut(self) -> bool:
        """Whether the host is known to be gone."""
        if self._socket is None:
            return False
        try:
            return not self._socket.recv(1)
        except BlockingIOError:
            return False
        except OSError:
            return True


_lines: WeakKeyDictionary[object, Line] = WeakKeyDictionary()


def line_to(store: object) -> Line:
    """One for all who share a store."""
    store = unprefixed(store)
    if store not in _lines:
        _lines[store] = Line(address_of(store))
    return _lines[store]
