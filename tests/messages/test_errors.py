"""Errors speak in one order, and have the bases that scripts catch."""

from __future__ import annotations

import sys
import traceback

import pytest
import torch
from torch import nn

import minidp
from minidp import console, errors
from tests.support.both import Two


def test_a_full_text_and_empty_parts():
    names = [f"layer{i}.weight" for i in range(200)]  # all are given
    parts = {"expected": "one gradient", "found": "two", "remedy": "call reset()"}
    assert errors.explain(3, "Something broke.", names=names, **parts) == (
        "[rank 3] Something broke. Expected: one gradient. Found: two. "
        f"Parameters: {', '.join(names)}. What to do: call reset()."
    )
    assert errors.explain(1, "It broke.", found="x") == "[rank 1] It broke. Found: x."


def test_every_run_time_error_is_public_and_a_runtime_error_as_in_torch():
    public = {name for name in minidp.__all__ if name.endswith("Error")}
    kinds = {n: kind for n, kind in vars(errors).items() if isinstance(kind, type)}
    ours = {n for n, kind in kinds.items() if issubclass(kind, errors.MiniDPError)}
    assert ours == public
    assert all(issubclass(kinds[name], RuntimeError) for name in ours)
    assert issubclass(errors.InternalError, AssertionError)  # a mistake of ours
    assert not issubclass(errors.InternalError, RuntimeError)


def test_uncaught_errors_of_ours_show_the_users_frames_only(lone_group, monkeypatch):
    shown = []
    monkeypatch.setattr(console, "_is_trimming", False)
    monkeypatch.setattr(sys, "excepthook", lambda *args: shown.append(args))
    ddp = minidp.DataParallel(Two())
    assert sys.excepthook is not None
    ddp(torch.ones(1), "a").backward()
    with pytest.raises(errors.UnfinishedReductionError) as ours:
        ddp(torch.ones(1))
    with pytest.raises(ValueError, match="must be one of") as other:
        minidp.DataParallel(nn.Linear(2, 2), unsynced="?")
    for caught in (ours, other):
        sys.excepthook(caught.type, caught.value, caught.tb)
    files = [{f.filename for f in traceback.extract_tb(tb)} for _, _, tb in shown]
    assert files[0] == {__file__}
    assert ours.value.__traceback__ is shown[0][2]
    assert len(files[1]) > 1
