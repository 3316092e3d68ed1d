"""Say which ranks are missing, and where they are, when a rank waits too long.

Read the files in this order. `rank_status` describes where a rank is, and exchanges
that through the store. `report` draws conclusions from it: which rank is missing, or
will not come to a meeting. `heartbeat` publishes and asks for one replica. `watchdog`
is the thread that serves all heartbeats of a process.
"""

from .watchdog import the_watchdog

__all__ = ["the_watchdog"]
