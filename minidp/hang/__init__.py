"""Say which ranks are missing, and where they are, when a rank waits too long.

Read `rank_status` (where a rank is; statuses and alarms in the store), `report` (who is
missing? do all ranks skip a backward?), `heartbeat` (one replica's publisher and
reader), `watchdog` (the thread that serves all heartbeats).
"""

from .watchdog import the_watchdog

__all__ = ["the_watchdog"]
