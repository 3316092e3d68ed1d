"""The phases of a reducer: every allowed and every forbidden transition."""

from __future__ import annotations

import itertools

import pytest

from minidp.core.reducer import Phase, PhaseMachine
from minidp.errors import InternalError

# Written out a second time on purpose: the table in the module must not drift.
ALLOWED = {
    "IDLE": "ARMED REDUCING FAILED",  # REDUCING: sync_gradients()
    "ARMED": "ARMED REDUCING FAILED",  # ARMED: another forward
    "REDUCING": "PAUSED FINALIZING FAILED",
    "PAUSED": "REDUCING FAILED",
    "FINALIZING": "IDLE FAILED",
    "FAILED": "FAILED IDLE",  # IDLE: reset()
}


@pytest.mark.parametrize(("start", "end"), [*itertools.product(Phase, Phase)])
def test_transition(start, end):
    machine = PhaseMachine()
    assert machine.now is Phase.IDLE
    machine.now = start
    if end.name in ALLOWED[start.name].split():
        machine.enter(end)
        assert machine.now is end
        return
    text = f"Phase transition {start.name} -> {end.name} is not allowed."
    with pytest.raises(InternalError, match=text):
        machine.enter(end)
    assert machine.now is start
