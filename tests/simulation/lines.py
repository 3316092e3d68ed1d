"""Find the line of the user's code that something has come from."""

from __future__ import annotations

import os
import sys
import threading
import traceback
from pathlib import Path
from types import FrameType

import torch

import minidp

_MODULES = ("network", "own", "play", "scheduler", "store", "world")
_OTHERS = tuple(
    str(Path(str(each.__file__)).parent) for each in (torch, minidp, threading)
)
_OTHERS += (*(str(Path(__file__).with_name(f"{name}.py")) for name in _MODULES), "<")


def line_here() -> str:
    """Return the innermost line of the user's code that runs now, or ""."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and not _is_users(frame.f_code.co_filename):
        frame = frame.f_back
    if frame is None:
        return ""
    return _text(frame.f_code.co_name, frame.f_code.co_filename, frame.f_lineno)


def line_of(error: BaseException) -> str:
    """Return the innermost line of the user's code that an error has passed, or ""."""
    frames = traceback.extract_tb(error.__traceback__)
    users = [each for each in frames if _is_users(each.filename)]
    return _text(users[-1].name, users[-1].filename, users[-1].lineno) if users else ""


def _is_users(file: str) -> bool:
    return not file.startswith(_OTHERS) and "site-packages" not in file


def _text(function: str, file: str, line: int | None) -> str:
    return f" in {function} ({os.path.basename(file)}:{line})"
