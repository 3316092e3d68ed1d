"""Which gradients are local: the rule table of design section 1.

A word is a life: F/N a synchronising/local forward, b0/b1 a local backward onto
parameter 0/1, S a finished synchronised backward, ( and ) enter and leave no_sync.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from minidp import DataParallel
from minidp.core import Ledger
from minidp.guard.local_acts import LocalActs
from minidp.replica import Doubts


class Reducer:
    """What `LocalActs` asks a reducer."""

    def __init__(self) -> None:
        self.params = [torch.zeros(1) for _ in range(6)]
        self.ledger = Ledger()
        self.queue: Any = self
        self.untouched: set[int] = set()


def finish(reducer, acts, untouched=()):
    reducer.untouched = {*untouched}
    acts.finished()
    reducer.ledger.count_backward()


def play(word):
    reducer: Any = Reducer()
    ledger, acts = reducer.ledger, LocalActs(reducer, Doubts())
    for letter in word.split():
        if letter in "FN":
            ledger.note_forward(synchronising=letter == "F")
        elif letter in "()":
            ledger.sync_enabled = letter == ")"
        elif letter == "S":
            finish(reducer, acts)
        else:
            ledger.used_locally.add(int(letter[1]))
            acts.added_locally(int(letter[1]), ())
    return reducer, acts


@pytest.mark.parametrize(
    ("word", "unsynced"),
    [
        ("", set()),
        ("F S", set()),
        ("F S b0", {0}),  # a second backward of the same forward
        ("b0", {0}),  # a backward of .module
        ("( N b0 b1 )", {0, 1}),  # accumulation: the next sync averages it
        ("( N b0 b1 ) F S", set()),
        ("( b0 )", set()),  # a penalty on purpose: no forward waits
        ("F S ( b0 )", set()),  # ... also after the main backward
        ("F S ( b0 ) b1", {1}),
        ("( N b0 ) F S b1 ( N b0 )", {0, 1}),
        ("F ( b0 )", {0}),  # F is not empty: this may be its backward
    ],
)
def test_local_gradients(word, unsynced):
    reducer, acts = play(word)
    assert acts.unsynced == unsynced
    assert reducer.ledger.finalized == word.count("S")


def test_settle_keeps_what_no_rank_touched():
    reducer, acts = play("( b0 ) b1 b2")
    assert reducer.ledger.used_locally == {0, 1, 2}  # also what is local on purpose
    finish(reducer, acts, {1, 5})
    assert acts.unsynced == {1}
    assert reducer.ledger.used_locally == set()


def test_reset_announces_nothing():
    reducer, acts = play("F S F b0 ( N")
    ledger = reducer.ledger
    acts.abandon()
    ledger.reset()
    assert (acts.unsynced, ledger.used_locally, ledger.forwards) == (set(), set(), 0)
    assert ledger.armed == ledger.finalized == 1
    assert ledger.sync_enabled is False  # reset() inside no_sync() stays inside


def test_without_its_guard_a_wrapper_notes_less(lone_group):
    ddp: Any = DataParallel(torch.nn.Linear(1, 1))
    guard, ledger = ddp._guard, ddp._reducer.ledger
    ddp.module(torch.ones(1, 1)).backward()
    assert guard.acts.unsynced == ledger.used_locally == {0, 1}
    ddp(torch.ones(1, 1)).backward()
    assert guard.acts.unsynced == ledger.used_locally == set()
    guard.retire()
    ddp.module(torch.ones(1, 1)).backward()
    assert guard.acts.unsynced == set()
    assert ledger.used_locally == {0, 1}  # they still travel
