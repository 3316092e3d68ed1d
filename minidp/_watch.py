"""Around every collective: its failure gets rank, place and remedy.

A failed collective leaves its group unusable, so the watch also remembers it for
`reset`. Without it the user reads only the backend's text, which names no rank.
"""

from __future__ import annotations

from .errors import CollectiveError, MiniDPError, explain


class Watch:
    """Watches the collectives of one object, one at a time (``with watch.over(...)``).

    Args:
        rank: group rank of this process.
        world_size: ranks of the group.
    """

    def __init__(self, rank: int, world_size: int) -> None:
        self.begin_anew(rank, world_size)
        self._doing = ""
        self._bucket: int | None = None

    def begin_anew(self, rank: int, world_size: int) -> None:
        """Nothing has failed, perhaps in another group."""
        self.has_failed = False
        self._rank = rank
        self._world_size = world_size

    def over(self, doing: str, bucket: int | None = None) -> Watch:
        """Say what comes next: a phrase for "failed while ...", and which bucket."""
        # No generator and no new object: this runs several times in every backward.
        self._doing = doing
        self._bucket = bucket
        return self

    def __enter__(self) -> None:
        """Nothing to prepare."""

    def __exit__(self, kind: object, error: object, traceback: object) -> None:
        """Turn any exception into a `CollectiveError`, unless it has a name."""
        if isinstance(error, Exception):
            self.has_failed = True  # at best other ranks wait in vain
        if isinstance(error, Exception) and not isinstance(error, MiniDPError):
            bucket = "" if self._bucket is None else f" of bucket {self._bucket}"
            raise CollectiveError(
                explain(
                    self._rank,
                    f"A collective failed while {self._doing}{bucket}: {error}",
                    expected=f"all {self._world_size} ranks to take part in time",
                    remedy="look for the rank that died, raised, or took another "
                    "branch; then call reset() on all live ranks",
                )
            ) from error
