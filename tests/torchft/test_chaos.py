"""Replicas die in every way, and no committed step is wrong: chaos.py in short."""

from __future__ import annotations

import pytest

pytest.importorskip("torchft", reason="bash tests/run.sh torchft")

from .chaos import KINDS, check, play
from .replica import PLACES

pytestmark = [pytest.mark.torchft, pytest.mark.alone, pytest.mark.timeout(240)]


@pytest.mark.parametrize("kinds", [("SIGSTOP", "SIGKILL"), PLACES])
def test_every_committed_step_is_right(kinds):
    assert set(kinds) <= set(KINDS)
    notes, kills, wrong = play(5, "minidp", kinds=kinds)
    assert wrong == []
    assert len(kills) == 5
    went_on_with = {len([w for w in note["who"] if w]) for note in notes}
    assert went_on_with >= {2, 3}


def test_the_check_finds_what_is_wrong():
    notes, _, wrong = play(0, "minidp", until=8)
    assert wrong == check(notes) == []
    a = next(note for note in notes if note["step"] == 5)
    for change in (
        {"params": [value + 1e-6 for value in a["params"]]},
        {"who": [0.5, 0.5, 0.0]},
        {"who": [0.3, 0.3, 0.3]},
        {"before": "another"},
    ):
        others = [note for note in notes if note is not a]
        assert check([*others, a | change]) != [], change
    end = next(note for note in notes if note["step"] == 7)
    (error,) = check([*notes, end | {"after": "another"}])
    assert "ended with different states" in error
