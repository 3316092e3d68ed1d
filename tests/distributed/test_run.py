"""``minidp run``: scripts nobody wrote for minidp, and what can be wrong with them.

The script is in the style of torch's tutorials: all that it knows of is torch.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

import minidp
from minidp import _compare, run
from minidp._compare import Outcome, compare
from minidp._script import Script
from minidp._timeline import from_json
from minidp.report import report

TUTORIAL = '''
"""Toy training, as in the tutorial."""
import argparse, os, sys
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.optim as optim
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

class ToyModel(nn.Module):
    def __init__(self):
        super(ToyModel, self).__init__()
        self.net1 = nn.Linear(10, 10)
        self.norm = nn.BatchNorm1d(10)
        self.relu = nn.ReLU()
        self.net2 = nn.Linear(10, 5)

    def forward(self, x):
        return self.net2(self.relu(self.norm(self.net1(x))))

class Wrapper(DDP):
    def __getattr__(self, name):
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.module, name)

def main(args):
    dist.init_process_group("gloo")
    torch.manual_seed(0) if {seeds} else None
    data = TensorDataset(torch.randn(64, 10), torch.randn(64, 5))
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=8, sampler=sampler)
    ddp_model = {wrap}(ToyModel(), bucket_cap_mb=0.0001)
    assert isinstance(ddp_model, torch.nn.parallel.DistributedDataParallel)
    assert isinstance(ddp_model, nn.parallel.distributed.DistributedDataParallel)
    optimizer = optim.SGD(ddp_model.parameters(), lr=0.05, momentum=0.9)
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        for inputs, labels in loader:
            optimizer.zero_grad()
            nn.MSELoss()(ddp_model(inputs), labels).backward()
            optimizer.step()
    if dist.get_rank() == 0:
        torch.save(ddp_model.state_dict(), args.out)
        with open(args.out + ".kind", "w") as file:
            file.write(str(type(ddp_model).__mro__))
    dist.destroy_process_group()

if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--out")
    main(parser.parse_args())
'''
CHANGED = """
if "minidp" in str(type(ddp_model)):
        with torch.no_grad():
            ddp_model.module.net2.bias[0] += 1.0
"""


def torchrun(*words: str, cwd: Path, ranks: int = 2) -> subprocess.CompletedProcess:
    command = [
        *(sys.executable, "-m", "torch.distributed.run"),
        *("--nproc-per-node", str(ranks)),
        *("--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0"),
        *words,
    ]
    return subprocess.run(
        command, cwd=cwd, capture_output=True, text=True, timeout=240, check=False
    )


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "tutorial.py"
    path.write_text(TUTORIAL.replace("{wrap}", "DDP").replace("{seeds}", "False"))
    return path


def test_a_tutorial_has_torchs_weights_and_a_report(tmp_path, script):
    script.write_text(TUTORIAL.replace("{wrap}", "Wrapper").replace("{seeds}", "True"))
    out = str(tmp_path / "w.pt")
    plain = torchrun(str(script), "--out", out, cwd=tmp_path)
    assert plain.returncode == 0, plain.stderr
    torchs = torch.load(out)
    assert "minidp" not in Path(out + ".kind").read_text()
    kept = tmp_path / "steps.json"
    words = ("-m", "minidp.run", "--compare", "--save", str(kept), "-m", "tutorial")
    ours = torchrun(*words, "--out", out, cwd=tmp_path)
    assert ours.returncode == 0, ours.stderr
    assert "'minidp.DataParallel'" in Path(out + ".kind").read_text()
    weights = torch.load(out)
    assert list(weights) == list(torchs)
    assert all(torch.equal(weights[name], torchs[name]) for name in torchs)
    err = ours.stderr
    assert err.count("is minidp.DataParallel in tutorial.") == 1
    assert err.count("weights   identical, bit for bit (1 model, 9 tensors") == 1
    assert "ranks 0, 1 of 2; gloo on cpu" in err
    assert "Is communication hidden?" in err
    assert report(from_json(kept.read_text())) in err


def test_another_result_is_found(tmp_path, script):
    text = script.read_text()
    place = "    if dist.get_rank() == 0:\n"
    script.write_text(text.replace(place, f"    {CHANGED.strip()}\n{place}"))
    out = str(tmp_path / "w.pt")
    words = ("-m", "minidp.run", "--compare", str(script), "--epochs", "1")
    found = torchrun(*words, "--out", out, cwd=tmp_path)
    assert found.returncode == 1
    assert "differ in 1 of 9 tensors" in found.stderr
    assert "by 1 at most, in 0: net2.bias" in found.stderr


# ------------------------------------------------------------------- in this process


def ran(capsys, *words: str) -> tuple[int, str]:
    parser = argparse.ArgumentParser()
    run.add_arguments(parser)
    status = run.main(parser.parse_args(words))
    assert torch.nn.parallel.DistributedDataParallel is DistributedDataParallel
    assert DistributedDataParallel is not minidp.DataParallel
    assert "wraps" not in minidp.data_parallel.DataParallel.__init__.__dict__
    assert not hasattr(minidp.data_parallel.DataParallel.__init__, "__wrapped__")
    return status, capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["nope.py"], "minidp run: there is no script nope.py.\n"),
        (["-m", "nope"], "minidp run: there is no module nope to run.\n"),
        (["-m", "nope.inner"], "there is no module nope.inner to run.\n"),
        (["-m", "email"], "there is no module email to run.\n"),
    ],
)
def test_scripts_that_do_not_exist(words, says, capsys):
    status, err = ran(capsys, *words)
    assert status == 2
    assert err.endswith(says)


def test_only_rank_0_says_so(monkeypatch, capsys):
    monkeypatch.setenv("RANK", "1")
    assert ran(capsys, "nope.py") == (2, "")


@pytest.mark.parametrize(
    ("body", "options", "status", "says"),
    [
        ("pass", [], 0, "ended without wrapping a model"),
        ("pass", ["--report"], 1, "so there is nothing to report or compare."),
        ("import sys; sys.exit(7)", [], 7, "exit status 7, before it wrapped a model"),
        ("import sys; sys.exit('no data')", [], 1, "no data\n"),
        ("import sys; sys.exit()", [], 0, "is minidp.DataParallel in"),
    ],
)
def test_exit_statuses(tmp_path, capsys, body, options, status, says):
    path = tmp_path / "train.py"
    path.write_text(body)
    found, err = ran(capsys, *options, str(path))
    assert found == status
    assert says in err


@pytest.mark.parametrize(
    ("body", "kind", "says"),
    [
        ("raise ValueError('boo')", ValueError, ""),
        ("import os; os.environ['RANK']", KeyError, "not started by torchrun"),
        ("raise RuntimeError('EADDRINUSE: 1')", RuntimeError, "port of the rendezvous"),
    ],
)
def test_a_script_that_raises(tmp_path, capsys, monkeypatch, body, kind, says):
    monkeypatch.delenv("RANK", raising=False)
    path = tmp_path / "train.py"
    path.write_text(body)
    before = (list(sys.path), sys.argv, sys.modules["__main__"])
    with pytest.raises(kind):
        ran(capsys, str(path))
    assert (list(sys.path), sys.argv, sys.modules["__main__"]) == before
    assert says in capsys.readouterr().err
    assert torch.nn.parallel.DistributedDataParallel is DistributedDataParallel
    assert not hasattr(minidp.data_parallel.DataParallel.__init__, "__wrapped__")


FORKS = """
import multiprocessing, torch
from torch.nn.parallel import DistributedDataParallel as DDP

def main(rank, path):
    store = torch.distributed.FileStore(path, 2)
    torch.distributed.init_process_group("gloo", store=store, rank=rank, world_size=2)
    DDP(torch.nn.Linear(2, 2))(torch.ones(1, 2)).sum().backward()

context = multiprocessing.get_context({method!r})
ranks = [context.Process(target=main, args=(r, {path!r})) for r in range(2)]
for rank in ranks if {trains} else []:
    rank.start()
for rank in ranks if {trains} else []:
    rank.join()
    assert rank.exitcode == 0
"""


@pytest.mark.parametrize(
    ("trains", "options", "status", "says"),
    [
        (True, [], 0, ""),
        (True, ["--report"], 1, "error: --report and --compare see the models of"),
        (False, [], 0, "ended without wrapping a model"),
    ],
)
def test_models_in_forks(tmp_path, capsys, trains, options, status, says):
    path = tmp_path / "train.py"
    store = str(tmp_path / "store")
    path.write_text(FORKS.format(method="fork", path=store, trains=trains))
    found, err = ran(capsys, *options, str(path))
    assert found == status
    told = err.partition("\n")[2]  # after "... is minidp.DataParallel in"
    assert says in told if says else not told


PORT = """
import socket, torch.distributed as dist
with socket.socket() as taken:
    taken.bind(("127.0.0.1", 0))
    taken.listen()
    url = f"tcp://127.0.0.1:{taken.getsockname()[1]}"
    dist.init_process_group("gloo", init_method=url, rank=0, world_size=1)
"""


def test_a_port_in_use(tmp_path, capsys):
    path = tmp_path / "train.py"
    path.write_text(PORT)
    with pytest.raises(torch.distributed.DistNetworkError):
        ran(capsys, str(path))
    assert "the port of the rendezvous is in use" in capsys.readouterr().err


def test_a_world_of_one(tmp_path, capsys, lone_group):
    path = tmp_path / "train.py"
    path.write_text(
        "import torch\n"
        "from torch.nn.parallel import DistributedDataParallel as DDP\n"
        "model = DDP(torch.nn.Linear(2, 2))\n"
        "model(torch.ones(1, 2)).sum().backward()\n"
    )
    status, err = ran(capsys, "--report", str(path), "--lr", "1")
    assert status == 0
    assert "a world of one rank" in err
    assert f"-m minidp.run {path} --lr 1\n" in err
    assert "rank 0 of 1; gloo on cpu" in err


def test_a_package_that_derives_from_the_class(
    tmp_path, capsys, monkeypatch, lone_group
):
    """It is imported to find the module in it: swapped already, or it would be late."""
    folder = tmp_path / "deriving_package"
    folder.mkdir()
    (folder / "__init__.py").write_text(
        "from torch.nn.parallel import DistributedDataParallel\n"
        "class Mine(DistributedDataParallel): ...\n"
    )
    (folder / "train.py").write_text(
        "import torch, minidp\n"
        "from . import Mine\n"
        "assert issubclass(Mine, minidp.DataParallel)\n"
        "Mine(torch.nn.Linear(2, 2))(torch.ones(1, 2)).sum().backward()\n"
    )
    monkeypatch.chdir(tmp_path)
    status, err = ran(capsys, "-m", "deriving_package.train")
    assert status == 0
    assert "a world of one rank" in err


DROPS = """
import gc, weakref, torch
from torch.nn.parallel import DistributedDataParallel as DDP
dropped = []
for _ in range(3):
    model = DDP(torch.nn.Linear(2, 2))
    model(torch.ones(1, 2)).sum().backward()
    dropped.append(weakref.ref(model._reducer))
    del model
    gc.collect()
    dropped = [ref for ref in dropped if ref() is not None]
    assert len(dropped) == 1  # the last one is recorded until another one comes
"""


def test_models_that_a_script_drops_are_let_go(tmp_path, capsys, lone_group):
    path = tmp_path / "train.py"
    path.write_text(DROPS)
    status, err = ran(capsys, "--save", str(tmp_path / "steps"), str(path))
    assert status == 0
    assert "model 3 of 3" in err
    for name in ("steps", "steps.2", "steps.3"):
        assert len(from_json((tmp_path / name).read_text())) == 1


def test_a_script_that_fails_first_is_not_blamed_for_anything_else(tmp_path, capsys):
    path = tmp_path / "train.py"
    path.write_text("import sys; sys.exit(2)")
    status, err = ran(capsys, str(path), "--report")
    assert status == 2
    assert f"{path} ended with exit status 2, before it wrapped a model in" in err
    assert f"(Options of minidp run stand before {path}.)" in err
    assert "nothing to do" not in err


def test_nothing_runs_if_it_could_not_be_saved(tmp_path, capsys):
    path = tmp_path / "train.py"
    path.write_text("raise AssertionError")
    status, err = ran(capsys, "--save", str(tmp_path / "none" / "steps"), str(path))
    assert status == 2
    assert f"steps: there is no folder {tmp_path / 'none'}" in err
    status, err = ran(capsys, "--save", str(tmp_path), str(path))
    assert status == 2
    assert "it is a folder" in err


AS_PYTHON = """
import os, sys, pickle
class Here: pass
pickle.loads(pickle.dumps(Here()))
import beside
print([__name__, sys.argv[1:], os.path.basename(sys.argv[0]), sys.modules["__main__"] is
       sys.modules[Here.__module__], os.path.basename(__file__), beside.x])
"""


@pytest.mark.parametrize("is_module", [False, True])
def test_a_script_sees_what_python_would_show_it(tmp_path, monkeypatch, is_module):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(AS_PYTHON)
    (tmp_path / "beside.py").write_text("x = 5\n")
    target = "train" if is_module else "train.py"
    given = Script(target, ["--compare", "-m"], is_module)
    code = f"from minidp._script import Script; Script(*{vars(given).values()!r}).run()"
    code = code.replace("dict_values", "")
    commands = [[*given.words], ["-c", code]]
    outputs = [
        subprocess.run(
            [sys.executable, *command],
            capture_output=True,
            text=True,
            check=True,
            env=os.environ | {"PYTHONPATH": str(Path(minidp.__file__).parents[1])},
        ).stdout
        for command in commands
    ]
    assert outputs[0] == outputs[1] != ""


def outcome(num_models: int = 1, step_s: tuple[float, ...] = (), **weights) -> Outcome:
    return Outcome({k: torch.tensor(v) for k, v in weights.items()}, num_models, step_s)


@pytest.mark.parametrize(
    ("torchs", "ours", "is_same", "says"),
    [
        (outcome(w=[1.0]), outcome(w=[1.0]), True, "identical, bit for bit (1 model"),
        (outcome(w=float("nan")), outcome(w=float("nan")), True, "identical"),
        (outcome(w=[0.0]), outcome(w=[-0.0]), False, "differ in 1 of 1 tensors"),
        (outcome(w=[0.0, 1.0]), outcome(w=[0.0, 3.5]), False, "by 2.5 at most, in w"),
        (outcome(w=[0.0]), outcome(w=[float("nan")]), False, "by inf at most"),
        (outcome(w=[0.0]), outcome(v=[0.0]), False, "only one of the runs has v, w"),
        (outcome(w=[]), outcome(w=[]), True, "no times: fewer than two"),
        (
            replace(outcome(w=[1.0]), num_steps=184),
            outcome(w=[1.0]),
            False,
            "steps     differ: 184 on torch, 0 on minidp.",
        ),
        (
            outcome(w=[1.0], step_s=(9.0,) * 5 + (0.002,)),
            outcome(w=[1.0], step_s=(9.0,) * 5 + (0.001,)),
            True,
            "torch 2.00 ms, minidp 1.00 ms, ratio 0.50 (medians over 1 step",
        ),
    ],
)
def test_verdicts(torchs, ours, is_same, says):
    verdict = compare(torchs, ours)
    assert verdict.is_same is is_same
    assert says in verdict.text


def test_the_first_optimizer_is_timed():
    observer = _compare.Observer()
    one = torch.optim.SGD([torch.ones(1, requires_grad=True)], lr=0.1)
    two = torch.optim.SGD([torch.ones(1, requires_grad=True)], lr=0.1)
    for optimizer in (one, two, one, two, one):
        optimizer.step()
    assert len(observer.outcome().step_s) == 2
    assert observer.outcome().num_steps == 3
    one.step()
    assert len(observer.outcome().step_s) == 2
