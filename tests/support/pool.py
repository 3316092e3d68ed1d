"""The warm pool: rank processes that live as long as the test session.

    def sum_of_ranks(ctx, offset):             # top level of the test module
        value = torch.tensor([ctx.rank + offset])
        dist.all_reduce(value, group=ctx.group)
        return value

    def test_sum(pool):
        for result in pool.run(sum_of_ranks, 2, 10):   # ranks 0 and 1
            assert result.item() == 21

A job on two ranks costs 0.3 ms, 1.3 ms with an all-reduce in it, 3.5 ms with a torch
DDP built and stepped once in it (medians, on two cores).
Groups prepared on four ranks:

    where    1        2        3        4        (1, 2)     (2, 3)
    ranks    [0]      [0 1]    [0 1 2]  [0 1 2 3]   [1 2]      [2 3]

For two disjoint groups at once run on all four ranks and take
``ctx.subgroups[(0, 1)]`` or ``ctx.subgroups[(2, 3)]``.

A job that leaves the groups unusable (a rank died or hangs, a collective timed out, or
the ranks issued different numbers of collectives) costs the next job a restart, about
a tenth of a second, and no test sees what an earlier one left behind.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tests.support.team import RankError, Team, make_job, settle
from tests.support.worker import Context, Ranks

__all__ = ["Context", "Pool", "PoolStatistics", "RankError"]

_SUBGROUPS: tuple[Ranks, ...] = ((0,), (0, 1), (0, 1, 2), (1, 2), (2, 3))


@dataclass(frozen=True)
class PoolStatistics:
    """What the pool has cost so far."""

    num_jobs: int
    num_starts: int
    start_seconds: float  # median
    job_milliseconds: float  # median, from the call of `run` to its results
    restart_reasons: tuple[str, ...]

    def __str__(self) -> str:
        return (
            f"{self.num_jobs} jobs, median {self.job_milliseconds:.1f} ms; "
            f"{self.num_starts} starts, median {self.start_seconds:.2f} s"
        )


class Pool:
    """Rank processes for many jobs; replaced when a job leaves them unusable.

    Args:
        world_size: How many processes.
        group_timeout: Seconds after which a collective without its peers fails.
        env: Extra environment variables of the processes, see `run_fresh`.
        backend: Of all groups.
        devices: Of each rank; the CPU by default.
    """

    def __init__(
        self,
        world_size: int = 4,
        group_timeout: float = 20.0,
        *,
        env: Mapping[str, str] | None = None,
        backend: str = "gloo",
        devices: Sequence[str] = (),
    ) -> None:
        self._world_size = world_size
        self._group_timeout = group_timeout
        self._env = env
        self._backend = backend
        self._devices = tuple(devices)
        self._subgroups = tuple(
            ranks
            for ranks in _SUBGROUPS
            if max(ranks) < world_size and len(ranks) < world_size
        )
        self._team: Team | None = None
        self._start_seconds: list[float] = []
        self._job_seconds: list[float] = []
        self._restart_reasons: list[str] = []

    def run(
        self,
        function: Callable[..., Any],
        where: int | Sequence[int],
        *args: Any,
        errors: str = "raise",
        limit: float = 45.0,
        strict_warnings: bool = False,
    ) -> list[Any]:
        """Call ``function(ctx, *args)`` on several ranks and collect what it returns.

        Args:
            function: A function at the top level of an importable module.
            where: World size (the first so many ranks), or the ranks of a prepared
                group.
            *args: Sent by value.  Tensors arrive contiguous and detached.
            errors: ``"raise"``: a failed rank raises its `RankError` here.
                ``"return"``: its place in the result holds the `RankError`.
            limit: Seconds after which a rank counts as hung.
            strict_warnings: Whether a warning on a rank is an error there.

        Returns:
            One result for each rank, in rank order.
        """
        ranks = tuple(range(where)) if isinstance(where, int) else tuple(where)
        prepared = (*self._subgroups, tuple(range(self._world_size)))
        if ranks not in prepared:
            raise ValueError(f"no group over ranks {ranks}; prepared: {prepared}")
        job = make_job(function, ranks, args, strict_warnings=strict_warnings)
        team = self.start()
        begin = time.monotonic()
        try:
            outcomes = team.run(job, limit)
        except BaseException:  # interrupted: nobody knows what the ranks are doing
            self._discard("interrupted")
            raise
        seconds = time.monotonic() - begin
        self._job_seconds.append(seconds)
        reason = self._what_is_broken(team, outcomes, seconds)
        if reason:
            self._discard(f"{job.qualname}: {reason}")
        return settle(outcomes, errors)

    def start(self) -> Team:
        """Make sure that the processes run (`run` does this by itself)."""
        if self._team is None:
            begin = time.monotonic()
            self._team = Team(
                self._world_size,
                group_timeout=self._group_timeout,
                subgroups=self._subgroups,
                env=self._env,
                backend=self._backend,
                devices=self._devices,
            )
            self._start_seconds.append(time.monotonic() - begin)
        return self._team

    def close(self) -> None:
        """End the processes."""
        if self._team is not None:
            self._team.kill()
            self._team = None

    def statistics(self) -> PoolStatistics:
        """What the pool has cost so far."""
        return PoolStatistics(
            num_jobs=len(self._job_seconds),
            num_starts=len(self._start_seconds),
            start_seconds=statistics.median(self._start_seconds or [0.0]),
            job_milliseconds=1e3 * statistics.median(self._job_seconds or [0.0]),
            restart_reasons=tuple(self._restart_reasons),
        )

    def _discard(self, reason: str) -> None:
        self._restart_reasons.append(reason)
        self.close()

    def _what_is_broken(
        self, team: Team, outcomes: Sequence[Any], seconds: float
    ) -> str:
        """Why the next job cannot use this team; empty if it can."""
        failed = [outcome for outcome in outcomes if isinstance(outcome, RankError)]
        for error in failed:
            if error.kind in ("Exited", "Hang"):
                return f"rank {error.rank}: {error.kind}"
            # One failed transfer closes a gloo connection for good.  The text of the
            # cause is in the traceback even where the package wrapped the exception.
            if "gloo/" in error.traceback or error.is_a("DistError"):
                return f"rank {error.rank}: a collective failed"
        if failed and seconds >= self._group_timeout:
            return "an error after the group's timeout"
        if len(set(team.groups_made.values())) > 1 and len(team.groups_made) > 1:
            return f"ranks made different numbers of groups: {team.groups_made}"
        return _unbalanced(team)


def _unbalanced(team: Team) -> str:
    """Whether the members of a group disagree about how many collectives it issued."""
    groups = {ranks for issued in team.issued.values() for ranks in issued}
    for ranks in groups:
        counts = {
            rank: team.issued[rank][ranks] for rank in ranks if rank in team.issued
        }
        if len(set(counts.values())) > 1:
            return f"group {ranks} is out of step: {counts} collectives"
    return ""
