"""What simulated ranks do: one function for each scenario.

`scenario` says what a scenario is, and `steps` what a rank does in a step. Then each
file has a subject: `plain` (train, reset, join), `odd` (something unusual in one step),
`hangs` (who is named), `auto` (layouts that are tried), `logical` (logical ranks),
`sharded` (divided steps, also by logical ranks), `torchft` (replicas that come and go,
if the extra of this name is installed) and `torchft_checks`.
"""

from __future__ import annotations

import gc
from dataclasses import replace
from importlib.util import find_spec

import torch

from tests.simulation.faults import Kind
from tests.simulation.tape import Tape
from tests.simulation.training import Settings

from .auto import (
    check_auto,
    check_auto_reset,
    draw_auto,
    draw_raising_auto,
    train_by_auto,
)
from .hangs import check_reports, draw_busy, train_two
from .logical import (
    check_logical,
    check_logical_reset,
    draw_logical,
    draw_raising_logical,
    train_by_logical_ranks,
    train_by_logical_ranks_and_reset,
)
from .odd import check_legal, check_mistake, draw_legal, draw_mistake, train_oddly
from .plain import (
    check_failing_hook,
    check_join,
    check_left_out,
    check_reset,
    draw_uneven,
    leave_out,
    train,
    train_and_reset,
    train_in_join,
)
from .scenario import Scenario
from .sharded import (
    check_sharded,
    check_sharded_reset,
    draw_logical_sharded,
    draw_raising_logical_sharded,
    draw_raising_sharded,
    draw_sharded,
    train_sharded,
    train_sharded_and_reset,
)
from .steps import draw_failing_hook, draw_raising

_SLOW = (Kind.NOTHING, Kind.FREEZES, Kind.HEARS_LATE, Kind.IS_SLOW)
_FAULTS = (
    Kind.NOTHING,
    Kind.FREEZES,
    Kind.HEARS_LATE,
    Kind.IS_SLOW,
    Kind.RAISES,
    Kind.DIES,
    Kind.DIES_SILENTLY,
    Kind.INTERRUPTED,
)

SCENARIOS: dict[str, Scenario] = {
    "train": Scenario(train),
    "faults": Scenario(train, kinds=_FAULTS),
    "reset": Scenario(train_and_reset, draw_raising, check_reset, kinds=_FAULTS),
    "hook": Scenario(
        train_and_reset, draw_failing_hook, check_failing_hook, kinds=_FAULTS
    ),
    "join": Scenario(train_in_join, draw_uneven, check_join, kinds=_FAULTS),
    "auto": Scenario(
        train_by_auto, draw_auto, check_auto, kinds=_FAULTS, seams=900, points=100
    ),
    "auto_reset": Scenario(
        train_by_auto,
        draw_raising_auto,
        check_auto_reset,
        kinds=_FAULTS,
        seams=900,
        points=100,
    ),
    "legal": Scenario(train_oddly, draw_legal, check_legal, kinds=_FAULTS),
    "mistake": Scenario(train_oddly, draw_mistake, check_mistake, kinds=_SLOW),
    "logical": Scenario(
        train_by_logical_ranks,
        draw_logical,
        check_logical,
        kinds=_FAULTS,
        has_numbers=True,
    ),
    "logical_reset": Scenario(
        train_by_logical_ranks_and_reset,
        draw_raising_logical,
        check_logical_reset,
        kinds=_FAULTS,
        has_numbers=True,
    ),
    "sharded": Scenario(train_sharded, draw_sharded, check_sharded, kinds=_FAULTS),
    "sharded_reset": Scenario(
        train_sharded_and_reset,
        draw_raising_sharded,
        check_sharded_reset,
        kinds=_FAULTS,
    ),
    "logical_sharded": Scenario(
        train_sharded,
        draw_logical_sharded,
        check_sharded,
        kinds=_FAULTS,
        has_numbers=True,
    ),
    "logical_sharded_reset": Scenario(
        train_sharded_and_reset,
        draw_raising_logical_sharded,
        check_sharded_reset,
        kinds=_FAULTS,
        has_numbers=True,
    ),
    "hangs": Scenario(train_two, draw_busy, check_reports, kinds=_FAULTS),
    "leave_out": Scenario(leave_out, lambda _: Settings(), check_left_out),
}

OF_TORCHFT = ("torchft", "torchft_logical", "torchft_turns")


def add_torchft() -> bool:
    """Add the scenarios of `OF_TORCHFT`, and return whether their extra is installed.

    They import torchft, which derives a class from torch's DDP. Tests that swap torch's
    DDP would be warned of that class, so nobody imports it before it is asked for.
    """
    if find_spec("torchft") is None:
        return False
    from . import torchft, torchft_checks

    plain = Scenario(
        torchft.train_elastic,
        torchft.draw_elastic,
        torchft_checks.check_elastic,
        kinds=torchft.KINDS,
        ranks=(2, 3, 4),
        seams=torchft.SEAMS,
        points=torchft.POINTS,
    )
    draw = torchft.draw_elastic_logical
    SCENARIOS["torchft"] = plain
    SCENARIOS["torchft_logical"] = replace(plain, draw=draw, has_numbers=True)
    SCENARIOS["torchft_turns"] = replace(
        plain,
        script=torchft.train_in_turns,
        draw=torchft.draw_turns,
        kinds=(Kind.NOTHING, Kind.DIES),
        ranks=(3, 4),
        has_numbers=True,
    )
    return True


def warm_up() -> None:
    """Import what runs import late, and let `reset` find few objects to look at."""
    torch.set_num_threads(1)
    for scenario in SCENARIOS.values():
        scenario.prepare(Tape(row=())).run()
    gc.collect()
    gc.freeze()
