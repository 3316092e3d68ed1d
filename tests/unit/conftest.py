"""What unit tests share: a process group of one rank in this process."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from datetime import timedelta

import pytest
import torch.distributed as dist


@pytest.fixture(scope="module")
def lone_group() -> Iterator[dist.ProcessGroup]:
    """A default group of this process alone: real collectives, no other rank."""
    dist.init_process_group(
        "gloo",
        store=dist.HashStore(),
        rank=0,
        world_size=1,
        timeout=timedelta(seconds=20),
    )
    world = dist.group.WORLD
    assert world is not None
    yield world
    dist.destroy_process_group()


@pytest.fixture
def no_gc() -> Iterator[None]:
    """Only reference counts free objects, so a reference cycle shows as a leak."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()
