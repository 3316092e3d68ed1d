"""Warnings that point at the user's line, through however many of our own calls.

A fixed ``stacklevel`` is right for one way in only: the constructor is reached by its
name, by torch's (`swapped`), from a class derived from it, by `attach`.
"""

from __future__ import annotations

import contextlib
import os
import sys
import warnings
from types import FrameType

import torch

_OURS = (
    *(os.path.join(os.path.dirname(file), "") for file in (__file__, torch.__file__)),
    contextlib.__file__,  # between a ``with`` and a generator of ours
)


def warn(text: str, category: type[Warning] = UserWarning) -> None:
    """Warn where the nearest code that is neither ours nor torch's called us."""
    frame = user_frame(sys._getframe(1))
    names = frame.f_globals
    warnings.warn_explicit(
        text,
        category,
        frame.f_code.co_filename,
        frame.f_lineno,
        names.get("__name__"),  # of the outermost frame: perhaps none
        names.setdefault("__warningregistry__", {}),
    )


def user_frame(frame: FrameType) -> FrameType:
    """The nearest frame outside of minidp and torch; of a thread of ours, the last."""
    while frame.f_back is not None and (
        frame.f_code.co_filename.startswith(_OURS)
        or "__name__" not in frame.f_globals  # a graph that dynamo has written
    ):
        frame = frame.f_back
    return frame
