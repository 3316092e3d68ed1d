"""``minidp tune``: a script runs once, and leaves a file that the constructor takes."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from minidp import DataParallel, tune
from minidp.autotune import tuner
from tests.support.ranks import on_ranks

SCRIPT = """
import sys
import torch
import torch.distributed as dist
from minidp import DataParallel
from pathlib import Path

assert __name__ == "__main__"
Path(sys.argv[0]).with_suffix(".ran").write_text(" ".join(sys.argv[1:]))
"""


def train(ctx: Any, steps: int, wraps: int) -> None:
    for _ in range(wraps):
        net = nn.Sequential(*[nn.Linear(9, 9) for _ in range(4)])
        ddp = DataParallel(net, None, None, 0, None, True, ctx.group, 0.001)
        for _ in range(steps):
            ddp(torch.ones(2, 9)).sum().backward()


def tuned(ctx: Any, out: Path, steps: int, wraps: int) -> int:
    """The exit status; the constructor is as before."""
    before = DataParallel.__init__
    with tune.tuned(out) as session:
        train(ctx, steps, wraps)
    assert DataParallel.__init__ is before
    return session.finish()


@on_ranks(2)
def test_it_says_how_far_it_is(ctx, tmp_path):
    said: list[str] = []
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


def parsed(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    tune.add_arguments(parser)
    return parser.parse_args(words)


def test_a_script_runs_with_its_own_arguments(tmp_path, capsys):
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    found = tune.main(
        parsed("--out", str(tmp_path / "b.json"), str(script), "--out", "7")
    )
    assert found == 1
    assert script.with_suffix(".ran").read_text() == "--out 7"
    assert "wrapped no model" in capsys.readouterr().err


TORCHS = """
import torch
from torch.nn.parallel import DistributedDataParallel as DDP
model = DDP(torch.nn.Linear(2, 2), bucket_cap_mb=1)
model(torch.ones(1, 2)).sum().backward()
"""


def test_a_script_on_torchs_ddp_is_tuned(tmp_path, capsys, monkeypatch, lone_group):
    (tmp_path / "trains.py").write_text(TORCHS)
    monkeypatch.chdir(tmp_path)
    assert tune.main(parsed("-m", "trains")) == 1  # one rank: nothing to find
    assert "1 of 1 models found no layout" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("script", "out", "text"),
    [("nope.py", "a.json", "no script"), (__file__, "no/a.json", "no folder")],
)
def test_bad_arguments(script, out, text, capsys):
    assert tune.main(parsed("--out", out, script)) == 2
    assert text in capsys.readouterr().err


def test_a_script_that_raises_leaves_nothing_patched(tmp_path):
    script = tmp_path / "train.py"
    script.write_text("raise ValueError('boo')")
    before = DataParallel.__init__
    with pytest.raises(ValueError, match="boo"):
        tune.main(parsed("--out", str(tmp_path / "b.json"), str(script)))
    assert DataParallel.__init__ is before
