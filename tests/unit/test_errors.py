"""Errors speak in one order, and have the bases that scripts catch."""

from __future__ import annotations

import pytest

import minidp
from minidp import errors


def test_a_full_text():
    text = errors.explain(
        3,
        "Something broke.",
        names=["a.weight", "b.bias"],
        expected="one gradient",
        found="two",
        remedy="call reset()",
    )
    assert text == (
        "[rank 3] Something broke. Expected: one gradient. Found: two. "
        "Parameters: a.weight, b.bias. What to do: call reset()."
    )


def test_empty_parts_are_left_out():
    assert errors.explain(0, "It broke.") == "[rank 0] It broke."
    assert errors.explain(1, "It broke.", found="x") == "[rank 1] It broke. Found: x."


def test_all_names_are_given():
    names = [f"layer{i}.weight" for i in range(200)]
    assert errors.explain(0, "Many.", names=names).count("layer") == 200


PUBLIC = [name for name in minidp.__all__ if name.endswith("Error")]


@pytest.mark.parametrize("name", PUBLIC)
def test_run_time_errors_are_runtime_errors_as_in_torch(name):
    error = getattr(minidp, name)
    assert issubclass(error, errors.MiniDPError)
    assert issubclass(error, RuntimeError)


def test_every_run_time_error_is_public():
    defined = {
        name
        for name, value in vars(errors).items()
        if isinstance(value, type) and issubclass(value, errors.MiniDPError)
    }
    assert defined == set(PUBLIC)


def test_a_mistake_of_ours_is_no_run_time_error():
    assert issubclass(errors.InternalError, AssertionError)
    assert not issubclass(errors.InternalError, RuntimeError)
