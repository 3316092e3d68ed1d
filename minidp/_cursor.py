"""Where a rank is: what it tells the others about itself, as plain data."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType


def _folder(package: str) -> Path:
    return Path(sys.modules[package].__file__ or "").parent


_NOT_THE_USERS = tuple(f"{_folder(name)}/" for name in ("torch", "json", "minidp"))
_WHERE_RANKS_WAIT = tuple(
    map(
        str,
        (
            _folder("minidp") / "_waiting.py",
            _folder("minidp") / "_post.py",  # asks who is missing: it has waited
            _folder("minidp") / "_recovery.py",
            _folder("torch") / "distributed" / "distributed_c10d.py",
            _folder("torch") / "distributed" / "_functional_collectives.py",
        ),
    )
)


@dataclass(frozen=True)
class Progress:
    """How far a replica is; compared to see if anything moves."""

    step: int  # synchronised backwards finished, ever
    phase: str  # of the reducer
    started: int  # collectives, since the last restart
    doing: str  # what it waits for, or did last
    missing: tuple[str, ...] = ()  # parameters without gradient, in a backward
    num_missing: int = 0  # all of them, also those that are not listed
    is_reducing: bool = False  # a synchronised backward has begun, and waits for all
    steps: int = 0  # of optimizers, since the last synchronised backward


@dataclass(frozen=True)
class Cursor:
    """One rank's last word."""

    progress: Progress
    beat: int  # counts messages: a rank whose beat stands still is not running
    seconds: float  # for which nothing has moved
    where: str  # in the user's code
    waits: bool = False  # in a collective for other ranks, this object's or another

    def to_json(self) -> str:
        """For the store."""
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(text: str | bytes) -> Cursor:
        """The inverse of `to_json`."""
        fields = json.loads(text)
        progress = fields.pop("progress")
        progress["missing"] = tuple(progress["missing"])
        return Cursor(Progress(**progress), **fields)


def is_waiting(thread: int) -> bool:
    """Whether a thread waits for other ranks, in a call of ours or of torch's.

    By the frames that it has called out of the user's code. (What waits for a device
    cannot be seen.)
    """
    frame = sys._current_frames().get(thread)
    while frame is not None and _is_library(frame):
        if frame.f_code.co_filename in _WHERE_RANKS_WAIT:
            return True
        frame = frame.f_back
    return False


def place_of(thread: int) -> str:
    """The innermost function of a thread, and who called it outside of libraries."""
    frame = sys._current_frames().get(thread)
    if frame is None:
        return ""
    while frame.f_code.co_filename.startswith("<") and frame.f_back is not None:
        frame = frame.f_back  # the import machinery tells nothing
    users: FrameType | None = frame
    while users is not None and _is_library(users):
        users = users.f_back
    if users is None or users is frame:
        return _name(frame)
    return f"{_name(frame)}, called from {_name(users)}"


def _is_library(frame: FrameType) -> bool:
    file = frame.f_code.co_filename
    is_library = file.startswith((*_NOT_THE_USERS, "<")) or "site-packages" in file
    return is_library or file.startswith(str(Path(json.__file__).parent.parent))


def _name(frame: FrameType) -> str:
    code = frame.f_code
    return f"{code.co_name} ({Path(code.co_filename).name}:{frame.f_lineno})"
