"""What tests expect of some seeds of a scenario."""

from __future__ import annotations

import threading

import pytest
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from minidp import world

from .faults import Kind
from .scenarios import SCENARIOS
from .scheduler import Finding
from .tape import Tape


def expect_nothing(name: str, runs: int) -> None:
    """Play the first seeds; nothing is found, and faults have struck in some."""
    struck = 0
    for seed in range(runs):
        try:
            play = SCENARIOS[name].play(Tape(seed))
        except Finding as finding:
            told = finding.play.tell(40)  # type: ignore[attr-defined]
            pytest.fail(
                f"python -m tests.simulation {name} --seed {seed}\n{told}\n{finding}"
            )
        struck += play.fault.has_struck
    if Kind.DIES in SCENARIOS[name].kinds:
        assert struck > runs / 4


def expect_the_same(name: str, runs: int) -> None:
    """Play the first seeds twice, and by the tape that was made; all is the same."""
    for seed in range(runs):
        first = SCENARIOS[name].play(Tape(seed))
        again = SCENARIOS[name].play(Tape(seed))
        by_row = SCENARIOS[name].play(Tape(row=first.tape.made))
        assert first.tell() == again.tell()
        assert first.tell() == by_row.tell()


def expect_nothing_left(name: str, runs: int) -> None:
    """Play the first seeds; no thread, store, group or other world is left."""
    threads, torchs, here = threading.active_count(), c10d._world, world._world
    for seed in range(runs):
        SCENARIOS[name].play(Tape(seed))
    assert threading.active_count() == threads
    assert c10d._world is torchs
    assert world._world is here
    assert not dist.is_initialized()
