"""``minidp tune``: a script runs once, and leaves a file that the constructor takes."""

from __future__ import annotations

import argparse
import json

import pytest
import torch
from torch import nn

from minidp import DataParallel, tune
from minidp.autotune import tuner
from tests.support.ranks import on_ranks

SCRIPT = """
import sys, pathlib
assert __name__ == "__main__"
pathlib.Path(sys.argv[0]).with_suffix(".ran").write_text(" ".join(sys.argv[1:]))
"""
TORCHS = """
import torch
from torch.nn.parallel import DistributedDataParallel as DDP
model = DDP(torch.nn.Linear(2, 2), bucket_cap_mb=1)
model(torch.ones(1, 2)).sum().backward()
"""


def train(ctx, steps, wraps):
    for _ in range(wraps):
        net = nn.Sequential(*[nn.Linear(9, 9) for _ in range(4)])
        ddp = DataParallel(net, None, None, 0, None, True, ctx.group, 0.001)
        for _ in range(steps):
            ddp(torch.ones(2, 9)).sum().backward()


def tuned(ctx, out, steps, wraps):
    """The exit status; the constructor is as before."""
    before = DataParallel.__init__
    with tune.tuned(out) as session:
        train(ctx, steps, wraps)
    assert DataParallel.__init__ is before
    return session.finish()


@on_ranks(2)
def test_it_says_how_far_it_is(ctx, tmp_path):
    said = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tuner, "say_progress", said.append)
        tuned(ctx, tmp_path / "buckets.json", tune.NEEDED + 1, 1)
    if ctx.rank == 0:
        assert len(said) == 8
        tries = 'minidp: bucket_cap_mb="auto" tries layout'
        assert said[0].startswith(f"{tries} 1 of 8")
        assert said[-1].startswith(f"{tries} 8 of 8, ")


def test_each_model_gets_a_file(pool, tmp_path):
    out = tmp_path / "buckets.json"
    assert pool.run(tuned, 2, out, tune.NEEDED + 1, 2) == [0, 0]
    for path in (out, tmp_path / "buckets.1.json"):
        plain = json.loads(path.read_text())
        assert plain["rebuilt"]
        assert sum(map(len, plain["buckets"])) == 8
        assert plain["tuned"]
    assert len(list(tmp_path.iterdir())) == 2


@pytest.mark.parametrize(
    ("world_size", "steps", "wraps"), [(2, tune.NEEDED - 1, 1), (1, 50, 1), (2, 50, 0)]
)
def test_nothing_found(pool, tmp_path, world_size, steps, wraps):
    found = pool.run(tuned, world_size, tmp_path / "a.json", steps, wraps)
    assert found == ([1, 0][:world_size] if wraps else [1, 1])
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def ran(tmp_path, monkeypatch, capsys):
    """``ran(text, *words)``: exit status of ``minidp tune WORDS``, and what it says.

    In a folder with a script ``trains.py`` of this text; nothing stays patched.
    """

    def call(text, *words):
        (tmp_path / "trains.py").write_text(text)
        monkeypatch.chdir(tmp_path)
        parser, before = argparse.ArgumentParser(), DataParallel.__init__
        tune.add_arguments(parser)
        try:
            return tune.main(parser.parse_args(words)), capsys.readouterr().err
        finally:
            assert DataParallel.__init__ is before

    return call


def test_a_script_runs_with_its_own_arguments(ran, tmp_path):
    status, err = ran(SCRIPT, "--out", "b.json", "trains.py", "--out", "7")
    assert status == 1
    assert (tmp_path / "trains.ran").read_text() == "--out 7"
    assert "wrapped no model" in err


def test_a_script_on_torchs_ddp_is_tuned(ran, lone_group):
    status, err = ran(TORCHS, "-m", "trains")
    assert status == 1  # one rank: nothing to find
    assert "1 of 1 models found no layout" in err


@pytest.mark.parametrize(
    ("script", "out", "text"),
    [("nope.py", "a.json", "no script"), ("trains.py", "no/a.json", "no folder")],
)
def test_bad_arguments(ran, script, out, text):
    status, err = ran("", "--out", out, script)
    assert status == 2
    assert text in err


def test_a_script_that_raises(ran):
    with pytest.raises(ValueError, match="boo"):
        ran("raise ValueError('boo')", "--out", "b.json", "trains.py")
