"""The lifecycle of a reducer: every allowed and every forbidden transition."""

from __future__ import annotations

import itertools

import pytest

from minidp._phase import Phase, PhaseBox
from minidp.errors import InternalError

# Written out a second time on purpose: the table in the module must not drift.
ALLOWED = {
    ("IDLE", "ARMED"),
    ("IDLE", "REDUCING"),  # sync_gradients()
    ("IDLE", "FAILED"),
    ("ARMED", "ARMED"),  # another forward
    ("ARMED", "REDUCING"),
    ("ARMED", "FAILED"),
    ("REDUCING", "PENDING"),
    ("REDUCING", "FINALIZING"),
    ("REDUCING", "FAILED"),
    ("PENDING", "REDUCING"),
    ("PENDING", "FAILED"),
    ("FINALIZING", "IDLE"),
    ("FINALIZING", "ARMED"),
    ("FINALIZING", "FAILED"),
    ("FAILED", "FAILED"),
    ("FAILED", "IDLE"),  # reset()
}
WAYS = {  # how to get there
    Phase.IDLE: [],
    Phase.ARMED: [Phase.ARMED],
    Phase.REDUCING: [Phase.ARMED, Phase.REDUCING],
    Phase.PENDING: [Phase.ARMED, Phase.REDUCING, Phase.PENDING],
    Phase.FINALIZING: [Phase.ARMED, Phase.REDUCING, Phase.FINALIZING],
    Phase.FAILED: [Phase.FAILED],
}
PAIRS = list(itertools.product(Phase, Phase))


def box_in(phase):
    box = PhaseBox()
    for step in WAYS[phase]:
        box.enter(step)
    assert box.now is phase
    return box


@pytest.mark.parametrize(
    ("start", "end"), [p for p in PAIRS if (p[0].name, p[1].name) in ALLOWED]
)
def test_allowed_transition(start, end):
    box = box_in(start)
    box.enter(end)
    assert box.now is end


@pytest.mark.parametrize(
    ("start", "end"), [p for p in PAIRS if (p[0].name, p[1].name) not in ALLOWED]
)
def test_forbidden_transition(start, end):
    box = box_in(start)
    with pytest.raises(InternalError) as caught:
        box.enter(end)
    text = f"Phase transition {start.name} -> {end.name} is not allowed."
    assert str(caught.value) == text
    assert box.now is start
