"""New rank processes for one call, for tests in which ranks die or hang.

Each call has its own processes and its own default process group, with a short
timeout.  A rank that has finished stays alive until all have answered, so a peer still
inside a collective does not lose its connection; a rank that is meant to die does so
itself (``os.kill(os.getpid(), signal.SIGKILL)``, ``os._exit(3)``).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

import pytest

from tests.support.pool import Pool, RankError
from tests.support.worker import Context

__all__ = ["MEMORIES", "Context", "RankError", "run_fresh"]

# Options of `run_fresh` for a test of ranks that share memory if they can, and of ranks
# that send messages. These need new interpreters, and without the extension both are
# the same.
MEMORIES = [
    pytest.param({}, id="shared"),
    pytest.param(
        {"env": {"MINIDP_SHARED_MEMORY": "0"}},
        id="messages",
        marks=pytest.mark.skipif(
            os.environ.get("MINIDP_NATIVE") == "0",
            reason="MINIDP_NATIVE=0: ranks send messages in any case",
        ),
    ),
]


def run_fresh(
    function: Callable[..., Any],
    world_size: int,
    *args: Any,
    timeout: float = 45.0,
    group_timeout: float = 5.0,
    env: Mapping[str, str] | None = None,
    errors: str = "raise",
) -> list[Any]:
    """Call ``function(ctx, *args)`` once on every rank of new processes.

    Args:
        function: See `Pool.run`; ``ctx.group`` is the default group.
        world_size: Number of processes.
        *args: Sent by value.
        timeout: Seconds after which a rank counts as hung and is killed.
        group_timeout: Seconds after which a collective without its peers fails.
        env: Extra environment variables.  They are there before torch is imported,
            which costs new interpreters: seconds instead of a fraction of one.
        errors: See `Pool.run`.
    """
    pool = Pool(world_size, group_timeout, env=env, subgroups=())
    try:
        return pool.run(function, world_size, *args, errors=errors, limit=timeout)
    finally:
        pool.close()
