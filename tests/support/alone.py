"""A default group of this process alone: real collectives, no other rank."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch.distributed as dist
from torch._C._distributed_c10d import HashStore


@contextmanager
def lone_default_group() -> Iterator[dist.ProcessGroup]:
    """Yield a new default group with this process alone; destroy it afterwards."""
    dist.init_process_group(
        "gloo",
        store=HashStore(),
        rank=0,
        world_size=1,
        timeout=timedelta(seconds=20),
    )
    world = dist.group.WORLD
    assert world is not None
    try:
        yield world
    finally:
        dist.destroy_process_group()
