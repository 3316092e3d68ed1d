"""New rank processes for one call, for tests in which ranks die or hang.

Each call has its own processes and its own default process group, with a short
timeout.  A rank that has finished stays alive until all have answered, so a peer still
inside a collective does not lose its connection; a rank that is meant to die does so
itself (``os.kill(os.getpid(), signal.SIGKILL)``, ``os._exit(3)``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from tests.support.team import RankError, Team, make_job, settle
from tests.support.worker import Context

__all__ = ["Context", "RankError", "run_fresh"]


def run_fresh(
    function: Callable[..., Any],
    world_size: int,
    *args: Any,
    timeout: float = 45.0,
    group_timeout: float = 5.0,
    env: Mapping[str, str] | None = None,
    errors: str = "raise",
) -> list[Any]:
    """Call ``function(ctx, *args)`` once on every rank of a new team.

    Args:
        function: A function at the top level of an importable module.
        world_size: Number of processes; ``ctx.group`` is their default group.
        *args: Sent by value.  Tensors arrive contiguous and detached.
        timeout: Seconds after which a rank counts as hung and is killed.
        group_timeout: Seconds after which a collective without its peers fails.
        env: Extra environment variables.  They are there before torch is imported,
            which costs new interpreters: seconds instead of a fraction of one.
        errors: ``"raise"`` or ``"return"``, as in `tests.support.pool.Pool.run`.  A
            rank that died is a `RankError` of kind ``Exited`` with its ``exit_code``
            (-9 after SIGKILL), one that never answered is of kind ``Hang``.

    Returns:
        One result for each rank, in rank order.
    """
    ranks = tuple(range(world_size))
    job = make_job(function, ranks, args, strict_warnings=False)
    team = Team(world_size, group_timeout=group_timeout, env=env)
    try:
        outcomes = team.run(job, timeout)
    finally:
        team.kill()
    return settle(outcomes, errors)
