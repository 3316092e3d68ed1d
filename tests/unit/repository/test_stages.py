"""The runner of the tests: which failures run again, and that they still can fail."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest

from tests import stages

TIMED, GRADIENTS = "tests/fault/test_x.py::test_a", "tests/property/test_x.py::test_b"


@pytest.fixture
def repeat(monkeypatch, tmp_path):
    """Return a function: what `stages.repeat` returns, and the tests that it ran."""

    def call(failed, *, passes=True, words=("python", "-m", "pytest"), signal=0):
        cache = tmp_path / ".pytest_cache/v/cache/lastfailed"
        cache.parent.mkdir(parents=True, exist_ok=True)
        cache.write_text(json.dumps(dict.fromkeys(failed, True)))
        ran = []
        monkeypatch.setattr(stages, "ROOT", tmp_path)
        # It would kill the ranks that other tests of this process use.
        monkeypatch.setattr(stages, "end_descendants", lambda: None)
        monkeypatch.setattr(
            stages, "execute", lambda command, _: ran.append(command) or passes
        )
        names = []
        command = stages.Command(words, {"MINIDP_NATIVE": "1"})
        result = stages.repeat(command, SimpleNamespace(number=signal), names)
        assert all(one.env["MINIDP_NATIVE"] == "1" for one in ran)
        assert names == (failed if ran else [])
        return result, [one.words[5:] for one in ran]

    return call


def test_a_timed_test_runs_once_more_alone(repeat):
    assert repeat([TIMED]) == (True, [(TIMED,)])


def test_a_test_that_fails_twice_fails(repeat):
    assert repeat([TIMED], passes=False) == (False, [(TIMED,)])


@pytest.mark.parametrize(
    "failed", [[], [GRADIENTS], [TIMED, GRADIENTS], [TIMED + str(i) for i in range(3)]]
)
def test_no_other_test_runs_again(repeat, failed):
    assert repeat(failed) == (False, [])


def test_nothing_runs_again_after_ctrl_c_or_of_other_programs(repeat):
    assert repeat([TIMED], signal=2) == (False, [])
    assert repeat([TIMED], words=("python", "-m", "mypy")) == (False, [])
