"""``minidp tune``: a script runs once, and leaves a file that the constructor takes."""

from __future__ import annotations

import argparse
import importlib
import json
import os
import shutil
import signal
import subprocess
import tempfile
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

import minidp
from minidp import DataParallel, tune
from minidp.autotune import tuner
from minidp.comm import post_json
from minidp.run import copies
from tests.support.ranks import on_ranks
from tests.support.warm import warm_python

pytestmark = pytest.mark.fresh

SCRIPT = """
import sys, os, pathlib
assert __name__ == "__main__"
print(sys.argv[0], *sys.argv[1:], file=sys.stderr)
"""
WRITES = """
import os, pathlib, sys, beside
folder = pathlib.Path(__file__).resolve().parent
assert folder.name == pathlib.Path(os.environ["PWD"]).name == "project"
assert (folder / "data.txt").read_text() == "data"
for path in (
    "ckpt.pt", "out/ckpt.pt", folder / "ckpt.pt", pathlib.Path.cwd() / "ckpt.pt",
    os.environ["PWD"] + "/ckpt.pt", sys.argv[1], sys.argv[2].partition("=")[2],
    pathlib.Path(beside.__file__).with_name("ckpt.pt"), "new.pt",
):
    pathlib.Path(path).write_text("of the trial")
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


@on_ranks(2)
def test_the_result_is_said_once(ctx, tmp_path):
    out, said, logged = tmp_path / "buckets.json", [], []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tune, "say_on_stderr", said.append)
        patch.setattr(tuner.logger, "warning", lambda *text: logged.append(text))
        tuned(ctx, out, tune.NEEDED + 1, 1)
    assert not logged
    assert len(said) == (ctx.rank == 0)
    for text in said:
        result, where = text.splitlines()
        assert where.startswith(f"minidp tune: wrote {out}. ")
        assert result == f"minidp tune: {json.loads(out.read_text())['tuned']}."
        assert "exposed communication" in result


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
        monkeypatch.delenv("RANK", raising=False)
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
    assert "trains.py --out 7\n" in err
    assert "in a copy of this folder" in err
    assert "wrapped no model" in err
    assert {path.name for path in tmp_path.iterdir()} == {"trains.py"}


@pytest.fixture
def project(tmp_path, monkeypatch):
    """A folder with a checkpoint, and a script that writes in all possible ways."""
    folder = tmp_path / "project"
    (folder / "out").mkdir(parents=True)
    for name in ("ckpt.pt", "out/ckpt.pt"):
        (folder / name).write_text("mine")
    (folder / "data.txt").write_text("data")
    (folder / "beside.py").write_text("")
    (folder / "trains.py").write_text(WRITES)
    monkeypatch.setenv("TMPDIR", str(tmp_path / "temporary"))
    (tmp_path / "temporary").mkdir()
    root = str(Path(minidp.__file__).parents[1])
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([root, str(folder)]))
    return folder


def contents(folder):
    return {
        str(path.relative_to(folder)): path.read_text()
        for path in folder.rglob("*.*")
        if "__pycache__" not in path.parts
    }


@pytest.mark.parametrize("is_linked", [False, True])
@pytest.mark.parametrize("starts", ["", "-n", "torchrun"])
def test_a_trial_writes_nothing_of_the_users(project, tmp_path, starts, is_linked):
    """Whoever starts the ranks, and by whichever name the folder is known."""
    here = project
    if is_linked:
        here = tmp_path / "link"
        here.symlink_to(project)
    before = contents(project)
    words = ["minidp.tune", *(["-n", "2"] if starts == "-n" else [])]
    if starts == "torchrun":
        words = ["torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m"]
        words.append("minidp.tune")
    words += ["trains.py", str(here / "ckpt.pt"), f"--to={here}/out/ckpt.pt"]
    environment = {n: v for n, v in os.environ.items() if n not in ("RANK", "PWD")}
    done = subprocess.run(
        [warm_python(), "-m", *words],
        cwd=here,
        env=environment | {"PWD": str(here)},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    # Rank 0 says it, unless the launcher ends it because rank 1 was first to fail so.
    texts = ("rank 1 failed first, with exit status 1", "(exitcode: 1) local_rank: 1")
    ended_first = any(text in done.stderr for text in texts)
    assert "wrapped no model" in done.stderr or ended_first, done.stderr
    assert "Error" not in done.stderr.replace("ChildFailedError", "")
    assert contents(project) == before
    assert not list((tmp_path / "temporary").glob("minidp-*"))


def test_a_copy_is_deleted_whole_though_the_launcher_ends_the_rank(
    tmp_path, monkeypatch
):
    """Torchrun sends SIGTERM when another rank has failed, perhaps at that moment."""
    store, (project, temporary) = dist.HashStore(), (tmp_path / "a", tmp_path / "b")
    for folder in (project, temporary):
        folder.mkdir()
    (project / "train.py").write_text("")
    apart = importlib.import_module("minidp.run.apart")  # the door has a function
    delete = shutil.rmtree

    def is_ended_meanwhile(*args, **options):
        os.kill(os.getpid(), signal.SIGTERM)
        return delete(*args, **options)

    for name, value in {"RANK": 0, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 2}.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setattr(apart, "launcher_store", lambda _: store)
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    monkeypatch.setattr(shutil, "rmtree", is_ended_meanwhile)
    before = signal.getsignal(signal.SIGTERM)
    try:
        with apart._copy_of_host(project, is_wished=True) as where:
            assert (where / "train.py").exists()
            post_json(store, "0/left", 1, "")
    finally:
        signal.signal(signal.SIGTERM, before)
    assert not list(temporary.iterdir())


def test_a_folder_that_is_too_large_is_not_copied_without_being_asked(
    ran, tmp_path, monkeypatch
):
    monkeypatch.setattr(copies, "MAX_FILES", 2)
    for number in range(3):
        (tmp_path / str(number)).touch()
    status, err = ran("raise AssertionError", "trains.py")
    assert status == 2
    assert "but it holds more than 2 files; --copy copies it. Or start in a" in err
    writes = "import pathlib; pathlib.Path('new.pt').touch()"
    for option, is_there in (("--copy", False), ("--no-copy", True)):
        status, err = ran(writes, option, "trains.py")
        assert status == 1
        assert ("in a copy of this folder" in err) is (option == "--copy")
        assert (tmp_path / "new.pt").exists() is is_there


def test_a_script_on_torchs_ddp_is_tuned(ran, lone_group):
    status, err = ran(TORCHS, "-m", "trains")
    assert status == 1  # one rank: nothing to find
    assert "no layout was found for the model of this script. The search" in err
    assert "2 ranks (here: 1), 50 synchronised steps (here: " in err


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
