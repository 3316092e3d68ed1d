"""Whoever waits for other ranks lives in a world that a test can replace."""

from __future__ import annotations

import ast
from contextlib import suppress
from pathlib import Path

import pytest

import minidp
from minidp import world
from minidp.guard import comparison

ROOT = Path(minidp.__file__).parent
WAITING = ("comm", "hang", "guard", "replica", "core", "data_parallel")


class Stopped(world.World):
    """A world whose clock moves only when somebody sleeps."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def now(self) -> float:
        return self.seconds

    def sleep(self, seconds: float) -> None:
        self.seconds += seconds


class Store:
    """A store in which no rank ever posts anything."""

    def check(self, _keys: list[str]) -> bool:
        return False


def test_a_meeting_ends_on_the_clock_of_the_world():
    stopped = Stopped()
    with world.replaced(stopped):
        store: object = Store()
        ranks = frozenset({0, 1})
        meeting = comparison._Meeting(store, "topic", ranks, None, 3600.0)  # type: ignore[arg-type]
        assert meeting.wait() == {}
    assert 3600 < stopped.seconds < 3602
    assert world.now() != stopped.seconds


def test_a_world_is_left_when_the_block_raises():
    with suppress(KeyError), world.replaced(Stopped()):
        assert world.now() == 0.0
        raise KeyError
    assert world.now() > 0.0


@pytest.mark.parametrize(
    "file",
    [file for room in WAITING for file in sorted((ROOT / room).rglob("*.py"))],
    ids=lambda file: str(file.relative_to(ROOT)),
)
def test_nobody_who_waits_asks_another_clock(file):
    """Durations for a log (`perf_counter`) are not waited for."""
    asked = {
        f"{node.value.id}.{node.attr}"
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)
    }
    others = {"time.monotonic", "time.sleep", "time.time", "threading.Event"}
    assert not asked & others
    made = {
        node.func.attr
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and isinstance(node.func.value, ast.Name)
        and node.func.value.id == "threading"
    }
    assert "Thread" not in made
