"""Describe where a rank is, in a dataclass that other ranks can read as JSON."""

from __future__ import annotations

import gc
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import NamedTuple

from minidp.core import Phase, Reducer
from minidp.errors import MAX_NAMES

_PHRASES = {
    Phase.IDLE: "between two steps",
    Phase.ARMED: "after a forward, before its backward",
    Phase.REDUCING: "in a backward",
    Phase.PAUSED: "after a backward that left gradients missing",
    Phase.FINALIZING: "at the end of a backward",
    Phase.FAILED: "after a failure",
}


def _folder(package: str) -> Path:
    return Path(sys.modules[package].__file__ or "").parent


_STANDARD_LIBRARY = str(Path(json.__file__).parent.parent)
_LIBRARIES = tuple(f"{_folder(name)}/" for name in ("torch", "json", "minidp"))
_LIBRARIES += ("<", _STANDARD_LIBRARY)
_WHERE_RANKS_WAIT = {
    str(_folder(package) / file)
    for package, file in [
        ("minidp", "comm/work.py"),
        ("minidp", "hang/heartbeat.py"),  # a rank that asks for absent ranks has waited
        ("minidp", "data_parallel/reset.py"),
        ("torch", "distributed/distributed_c10d.py"),
        ("torch", "distributed/_functional_collectives.py"),
    ]
}


class Alarm(NamedTuple):
    """Hold a rank's message that it joins no further collective, and why."""

    rank: int
    started: int  # number of collectives that it had started by then
    why: str


@dataclass(frozen=True)
class RankStatus:
    """What a rank publishes per heartbeat: how far it is, and where its thread is."""

    step: int  # synchronised backwards finished, ever
    phase: str  # of the reducer, with missing gradients
    started: int  # collectives, since the last reset
    wait_description: str = ""  # the collective that is awaited; "": none
    where: str = ""  # innermost function of its thread, and the caller in user code
    waits: bool = False  # its thread is in a collective, of this wrapper or another
    is_reducing: bool = False  # a synchronised backward has begun, and waits for all
    steps: int = 0  # of optimizers, since the last synchronised backward
    beat: int = 0  # counts messages: a rank whose beat stands still is not running
    seconds: float = 0.0  # since anything above changed


def status_of(reducer: Reducer, thread: int) -> RankStatus:
    """Return a rank's status, except beat and seconds; may run in any thread."""
    step, steps = reducer.ledger.finalized, reducer.ledger.steps  # before the phase
    phase, queue, communicator = reducer.phase.now, reducer.queue, reducer.communicator
    text = _PHRASES[phase]
    if phase in (Phase.REDUCING, Phase.PAUSED):
        text += f", bucket {queue.next} of {len(queue.buckets)} next"
        text += _text_of_missing([reducer.names[i] for i in reducer.pending.missing()])
    return RankStatus(
        step,
        text,
        communicator.started,
        communicator.place,
        *place_of(thread),
        is_reducing=phase in (Phase.REDUCING, Phase.FINALIZING),
        steps=steps,
    )


def _text_of_missing(names: list[str]) -> str:
    listed, rest = ", ".join(names[:MAX_NAMES]), len(names[MAX_NAMES:])
    more = f" and {rest} more" if rest else ""
    return f", without gradients of {listed}{more}" if names else ""


def place_of(thread: int) -> tuple[str, bool]:
    """Return where a thread is, as text, and whether inside a wait for other ranks.

    Text: its innermost function, and the caller in user code; "" if the thread ended.
    """
    frame = _frame_of(thread)
    inside: list[FrameType] = []  # of libraries that the user's code called
    while frame is not None and _is_library(frame):
        inside.append(frame)
        frame = frame.f_back
    waits = any(each.f_code.co_filename in _WHERE_RANKS_WAIT for each in inside)
    # The import machinery tells nothing.
    inside = [each for each in inside if not each.f_code.co_filename.startswith("<")]
    if frame is None or not inside:
        innermost = [*inside, frame][0]
        return "" if innermost is None else _name(innermost), waits
    return f"{_name(inside[0])}, called from {_name(frame)}", waits


def _frame_of(thread: int) -> FrameType | None:
    """Return the innermost frame of a thread; None if it ended.

    Without garbage collection, which deadlocks in there up to CPython 3.11.8 (CPython
    issue 106883): a destructor waits for a lock that the call holds.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        return sys._current_frames().get(thread)
    finally:
        if was_enabled:
            gc.enable()


def _is_library(frame: FrameType) -> bool:
    file = frame.f_code.co_filename
    return file.startswith(_LIBRARIES) or "site-packages" in file


def _name(frame: FrameType) -> str:
    code = frame.f_code
    return f"{code.co_name} ({Path(code.co_filename).name}:{frame.f_lineno})"
