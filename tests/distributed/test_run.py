"""``minidp run``: scripts nobody wrote for minidp, and what can be wrong with them.

The script is in the style of torch's tutorials: all that it knows of is torch.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import os
import socket
import subprocess
import sys
import weakref
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

import minidp
from minidp import _compare, _phases, run
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
        ("{}['MASTER']", KeyError, ""),
        ("{}['RANK of others']", KeyError, ""),
        ("raise RuntimeError('EADDRINUSE: 1')", RuntimeError, "port of the rendezvous"),
    ],
)
def test_a_script_that_raises(tmp_path, capsys, monkeypatch, body, kind, says):
    monkeypatch.setenv("RANK", "0")
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
    assert f"For two on this machine: minidp run -n 2 {path} --lr 1\n" in err
    assert "minidp run: report of Linear\nrank 0 of 1; gloo on cpu" in err


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
    assert "minidp run: report of Linear (model 3 of 3)\n" in err
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
            "steps     differ: 184 on torch, 0 on minidp. Do this.",
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
    verdict = compare(torchs, ours, "Do this.")
    assert verdict.is_same is is_same
    assert says in verdict.text


# ---------------------------------------------------------------------- who starts


NEEDS = {
    "environ": ("import os\n\nrank = int(os.environ['LOCAL_RANK'])", "LOCAL_RANK"),
    "torch": ("import torch\n\ntorch.distributed.init_process_group('gloo')", "RANK"),
}


@pytest.mark.parametrize("way", NEEDS)
def test_a_script_that_nobody_started_as_ranks(tmp_path, monkeypatch, way):
    """Torch's traceback would say less."""
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    body, name = NEEDS[way]
    path = tmp_path / "train.py"
    path.write_text(body)
    done = started(str(path), "--lr", "1", cwd=tmp_path)
    assert done.returncode == 1
    assert done.stderr == (
        "minidp run: torch.nn.parallel.DistributedDataParallel is minidp.DataParallel "
        f"in {path}, which runs as one process (-n N: as N ranks).\n"
        f"minidp run: {path}, line 3, needs {name}, which a launcher of ranks sets, "
        "but this is one process without a launcher. For two ranks on this machine: "
        f"minidp run -n 2 {path} --lr 1\n"
    )


def started(*words: str, cwd: Path, **changes: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "minidp.run", *words]
    return subprocess.run(
        command,
        cwd=cwd,
        env={**os.environ, **changes},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


def test_it_starts_the_ranks_itself(tmp_path, script):
    out = str(tmp_path / "w.pt")
    words = ("-n", "2", "--report", "--hang-timeout", "77", str(script))
    done = started(*words, "--epochs", "1", "--out", out, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "'minidp.DataParallel'" in Path(out + ".kind").read_text()
    assert f"minidp run: 2 ranks of {script} on this machine.\n" in done.stderr
    assert "report of ToyModel\nranks 0, 1 of 2; gloo on cpu" in done.stderr


FAILS = """
import os, sys
if os.environ["RANK"] == "1":
    sys.exit(7)
"""


def test_the_status_of_the_rank_that_failed(tmp_path):
    path = tmp_path / "train.py"
    path.write_text(FAILS)
    done = started("-n", "2", str(path), cwd=tmp_path)
    assert done.returncode == 7
    assert "minidp run: rank 1 failed first, with exit status 7.\n" in done.stderr
    assert "Traceback" not in done.stderr


def test_ranks_do_not_start_ranks(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("RANK", "0")
    path = tmp_path / "train.py"
    path.write_text("raise AssertionError")
    status, err = ran(capsys, "-n", "2", str(path))
    assert status == 2
    assert "this process is one already" in err
    with pytest.raises(SystemExit):
        ran(capsys, "-n", "0", str(path))
    assert "at least one rank, but got 0" in capsys.readouterr().err


# ------------------------------------------------------------------------- options


OPTIONS = """
import torch
from torch.nn.parallel import DistributedDataParallel as DDP
model = DDP(torch.nn.Linear(2, 2), find_unused_parameters=True)
print(model._guard.policy, model._reducer.pipeline.watch.limit, model.static_graph)
"""


def test_options_of_the_constructor(tmp_path, capsys, lone_group, monkeypatch):
    path = tmp_path / "train.py"
    path.write_text(OPTIONS)
    monkeypatch.setenv("MINIDP_HANG_TIMEOUT", "1800")
    monkeypatch.setenv("MINIDP_UNSYNCED", "ignore")
    monkeypatch.setenv("MINIDP_STATC_GRAPH", "1")
    parser = argparse.ArgumentParser()
    run.add_arguments(parser)
    words = ["--unsynced", "warn", "--static-graph", str(path), "--unsynced", "3"]
    assert run.main(parser.parse_args(words)) == 0
    said = capsys.readouterr()
    assert said.out == "warn 1800 True\n"
    assert (
        "nobody reads MINIDP_STATC_GRAPH; did you mean MINIDP_STATIC_GRAPH?" in said.err
    )
    assert os.environ["MINIDP_UNSYNCED"] == "ignore"


def test_a_variable_that_makes_no_sense(tmp_path, capsys, monkeypatch):
    path = tmp_path / "train.py"
    path.write_text("raise AssertionError")
    monkeypatch.setenv("MINIDP_HANG_TIMEOUT", "soon")
    status, err = ran(capsys, str(path))
    assert status == 2
    assert "MINIDP_HANG_TIMEOUT=soon: expected a number, but got 'soon'" in err


# ----------------------------------------------------- scripts that start their ranks


STARTS = """
import os, subprocess, sys, torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

rank = int(os.environ.get("LOCAL_RANK", 0))
if rank == 0:  # as Lightning does
    os.environ.update(MASTER_ADDR="localhost", MASTER_PORT=sys.argv[1], WORLD_SIZE="2")
    options = sys.argv[2:]
    other = subprocess.Popen(
        [sys.executable, *options, sys.argv[0], *sys.argv[1:]],
        env={**os.environ, "LOCAL_RANK": "1"},
    )
dist.init_process_group("gloo", rank=rank, world_size=2)
model = DDP(torch.nn.Linear(2, 2))
model(torch.ones(1, 2)).sum().backward()
line = f"{rank} {type(model).__module__} {type(model).__name__}\\n"
sys.stdout.write(line)  # in one piece: the other writes, too
sys.stdout.flush()
if rank == 0:
    sys.exit(other.wait())
"""


def free_port() -> str:
    with socket.socket() as probe:
        probe.bind(("", 0))
        return str(probe.getsockname()[1])


def test_ranks_that_a_script_starts_by_a_command(tmp_path):
    path = tmp_path / "train.py"
    path.write_text(STARTS)
    done = started(str(path), free_port(), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    name = "minidp.swapping DistributedDataParallel"
    assert sorted(done.stdout.splitlines()) == [f"0 {name}", f"1 {name}"]


def test_a_rank_that_is_not_reached_is_named(tmp_path):
    path = tmp_path / "train.py"
    path.write_text(STARTS)
    done = started(str(path), free_port(), "-I", cwd=tmp_path)
    assert done.returncode == 1  # gloo would have aborted it
    assert (
        "[rank 0] The model is wrapped by torch's DistributedDataParallel on rank 1, "
        "but by minidp.DataParallel here."
    ) in done.stderr
    assert "EnforceNotMet" not in done.stderr


LAUNCHES = """
import subprocess, sys
launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
sys.exit(subprocess.run([*launcher, "--nproc-per-node", "2", *sys.argv[1:]]).returncode)
"""


def test_a_launcher_that_is_itself_a_script(tmp_path, script):
    """`minidp run -m accelerate.commands.launch train.py` is one."""
    path = tmp_path / "launch.py"
    path.write_text(LAUNCHES)
    out = str(tmp_path / "w.pt")
    done = started(str(path), str(script), "--epochs", "1", "--out", out, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "'minidp.DataParallel'" in Path(out + ".kind").read_text()
    assert "nothing to do" not in done.stderr
    assert "wrapped no model" not in done.stderr


# --------------------------------------------------------------- what ends in the end


RESUMES = """
import os, sys, torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("gloo")
model = DDP(torch.nn.Linear(4, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
path, step = sys.argv[1], 0
if os.path.exists(path):
    step, weights = torch.load(path)
    model.load_state_dict(weights)
for step in range(step, 5):
    model(torch.randn(3, 4)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
dist.barrier()
if dist.get_rank() == 0:
    torch.save((5, model.state_dict()), path)
dist.barrier()
dist.destroy_process_group()
"""


@pytest.mark.parametrize("is_elsewhere", [False, True])
def test_scripts_that_resume_from_checkpoints(tmp_path, is_elsewhere):
    """In the folder nothing is to be done; elsewhere the advice is to be followed."""
    folder = tmp_path / "project"
    folder.mkdir()
    (folder / "train.py").write_text(RESUMES)
    path = str(tmp_path / "last.pt") if is_elsewhere else "last.pt"
    words = ["-n", "2", "--compare", "train.py", path]
    done = started(*words, cwd=folder)
    if is_elsewhere:
        assert done.returncode == 1
        assert "steps     differ: 5 on torch, 0 on minidp. If the script" in done.stderr
        assert "--before 'rm -rf CHECKPOINTS'" in done.stderr
        words[3:3] = ["--before", f"rm -rf {path}"]
        done = started(*words, cwd=folder)
    assert done.returncode == 0, done.stderr
    assert "in a copy of this folder.\n" in done.stderr
    assert "weights   identical, bit for bit (1 model, 2 tensors" in done.stderr
    assert (folder / path).exists()  # of the run on minidp
    assert not list(folder.glob("minidp-*"))


def test_both_runs_in_the_same_folder(tmp_path):
    (tmp_path / "train.py").write_text(RESUMES)
    words = ("-n", "2", "--compare", "--no-copy")
    done = started(*words, "train.py", "last.pt", cwd=tmp_path)
    assert done.returncode == 1
    assert "in this folder (--no-copy)." in done.stderr
    assert "a checkpoint (both runs were in this folder: --no-copy), let" in done.stderr
    (tmp_path / "last.pt").unlink()
    words += ("--before", "rm last.pt; true")
    done = started(*words, "train.py", "last.pt", cwd=tmp_path)
    assert done.returncode == 0, done.stderr


def test_nothing_is_compared_if_the_command_before_fails(tmp_path):
    (tmp_path / "train.py").write_text("raise AssertionError")
    done = started("--compare", "--before", "exit 3", "train.py", cwd=tmp_path)
    assert done.returncode == 1
    assert "--before ended with exit status 3: exit 3\n" in done.stderr
    assert "AssertionError" not in done.stderr


def test_a_script_that_fails_on_torch(tmp_path):
    (tmp_path / "train.py").write_text("raise ValueError('boo')")
    done = started("--compare", "train.py", cwd=tmp_path)
    assert done.returncode == 1
    assert done.stderr.count("ValueError: boo") == 1
    assert (
        "the script failed on torch's DDP (in the copy; if it needs this folder: "
        "--no-copy): nothing to compare."
    ) in done.stderr


def test_a_script_that_leaves_before_anybody_can_look(tmp_path):
    (tmp_path / "train.py").write_text("import os; os._exit(0)")
    done = started("--compare", "train.py", cwd=tmp_path)
    assert done.returncode == 1
    assert "on torch's DDP, the script ended its process itself" in done.stderr


class Endless:
    """A process that makes steps for a while, and then only waits."""

    def __init__(self, progress: Path, num_steps: int, status: int | None = None):
        self.progress, self.num_steps, self.status = progress, num_steps, status

    def wait(self, seconds):
        with self.progress.open("a") as file:
            file.write("." * (self.num_steps > 0))
        self.num_steps -= 1
        if self.num_steps < 0 and self.status is not None:
            return self.status
        raise subprocess.TimeoutExpired("train.py", seconds)


@pytest.mark.parametrize(
    ("num_steps", "status", "is_written", "found", "seconds"),
    [
        (0, None, False, None, 12),
        (50, None, False, None, 62),  # steps do not count
        (0, None, True, 0, 4),  # it does not end, but the results are there
        (5, 0, False, 0, 5),
        (5, -9, False, 137, 5),
        (500, 7, False, 7, 500),
    ],
)
def test_no_run_may_wait_for_ever(
    tmp_path, monkeypatch, num_steps, status, is_written, found, seconds
):
    outcome, progress = tmp_path / "torch.pt", tmp_path / "progress"
    progress.touch()
    if is_written:
        outcome.touch()
    times = itertools.count()
    monkeypatch.setattr(_phases.time, "monotonic", lambda: next(times) / 2)
    process = Endless(progress, num_steps, status)
    assert _phases._wait(process, progress, outcome, (10.0, 2.0)) == found
    assert next(times) / 2 == pytest.approx(seconds, abs=2)


IGNORES = "import signal, time; signal.signal(15, signal.SIG_IGN); print(1, flush=True)"


@pytest.mark.parametrize("before", ["print(1, flush=True)", IGNORES])
def test_a_run_that_does_not_end_by_itself(before, monkeypatch):
    monkeypatch.setattr(_phases, "GRACE_SECONDS", 0.5)
    words = [sys.executable, "-c", f"{before}; import time; time.sleep(1000)"]
    with subprocess.Popen(words, stdout=subprocess.PIPE) as process:
        process.stdout.readline()
        _phases._end(process)
        assert process.returncode in (-15, -9)


def test_torchs_ddp_is_never_taken_down(lone_group):
    """Nor does it go on to average, where the same module is wrapped once more."""
    net = torch.nn.Linear(2, 2)
    for _ in range(2):
        ddp = DistributedDataParallel(net)
        _compare.never_take_down(ddp)
        parts = [weakref.ref(part) for part in (ddp.reducer, ddp.process_group)]
        for _ in range(2):
            ddp(torch.ones(1, 2)).sum().backward()
        del ddp
        gc.collect()
        assert all(part() is not None for part in parts)
    net(torch.ones(1, 2)).sum().backward()


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
