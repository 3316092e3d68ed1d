"""``minidp run``: scripts nobody wrote for minidp, and what can be wrong with them."""

from __future__ import annotations

import argparse
import copy
import faulthandler
import os
import signal
import subprocess
import sys
import warnings
import zipfile
from pathlib import Path

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

import minidp
from minidp import run
from minidp.overlap.timeline import from_json
from minidp.report import report
from minidp.run.compare import Outcome, OutcomeRecorder, compare, compare_ranks
from minidp.run.script import Script, after_wrapping
from tests.support.ports import free_port
from tests.support.warm import warm_python

pytestmark = pytest.mark.fresh

# The first two lines of every script.
HEAD = """import os, sys, torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
"""
README = (Path(minidp.__file__).parents[1] / "README.md").read_text()


def started(
    *words: str, cwd: Path, python: str = ""
) -> subprocess.CompletedProcess[str]:
    """``python -m WORDS``"""
    command = [python or warm_python(), "-m", *words]
    return subprocess.run(
        command, cwd=cwd, capture_output=True, text=True, timeout=240, check=False
    )


def torchrun(*words: str, cwd: Path) -> subprocess.CompletedProcess:
    rendezvous = ("--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0")
    launcher = ("torch.distributed.run", "--nproc-per-node", "2", *rendezvous)
    return started(*launcher, *words, cwd=cwd)


@pytest.fixture
def train(tmp_path):
    """``train(text)`` writes a script, `HEAD` and the text, and returns its path."""

    def write(text):
        path = tmp_path / "train.py"
        path.write_text(HEAD + text)
        return str(path)

    return write


@pytest.fixture
def script(tmp_path):
    """The script of the README, by its own command on torch's DDP again."""
    text = README.partition("save it as `train.py`:\n\n```python\n")[2]
    text = text.partition("```")[0]
    assert "DDP(" in text
    (tmp_path / "train.py").write_text(text)
    (command,) = (line for line in README.splitlines() if line.startswith("sed "))
    subprocess.run(command, shell=True, cwd=tmp_path, check=True)
    path = tmp_path / "torch_train.py"
    assert "minidp" not in path.read_text()
    return path


def test_the_script_of_the_readme(tmp_path, script):
    plain = torchrun("train.py", cwd=tmp_path)
    assert plain.returncode == 0, plain.stderr
    kept = tmp_path / "steps.json"
    words = ("-m", "minidp.run", "--compare", "--save", str(kept), "-m", script.stem)
    ours = torchrun(*words, cwd=tmp_path)
    assert ours.returncode == 0, ours.stderr
    err = ours.stderr
    assert err.count("minidp run: torch_train on 2 ranks here") == 2  # torch, minidp
    assert err.count("is minidp.DataParallel in torch_train.") == 1
    assert err.count("weights   identical, bit for bit (models: 1, tensors: 4") == 1
    assert "ranks 0, 1 of 2; gloo on cpu" in err
    assert "Is communication hidden?" in err
    assert report(from_json(kept.read_text())) in err


# ------------------------------------------------------------------- in this process

# A training that goes on until somebody ends it.
LOOP = """
dist.init_process_group("gloo")
model = DDP(torch.nn.Linear(2, 2))
print("GO", flush=True)
while True:
    model(torch.ones(1, 2)).sum().backward()
"""
INIT = minidp.data_parallel.DataParallel.__init__


@pytest.fixture
def ran(capsys):
    """``ran(*words)``: exit status and standard error of ``minidp run WORDS``."""

    def call(*words):
        parser = argparse.ArgumentParser()
        run.add_arguments(parser)
        try:
            return run.main(parser.parse_args(words)), capsys.readouterr().err
        finally:
            assert torch.nn.parallel.DistributedDataParallel is DistributedDataParallel
            assert minidp.data_parallel.DataParallel.__init__ is INIT

    return call


NEVER = "raise AssertionError"


@pytest.mark.parametrize(
    ("env", "words", "says"),
    [
        ({}, ["nope.py"], "minidp run: there is no script nope.py.\n"),
        ({}, ["-m", "nope"], "minidp run: there is no module nope to run.\n"),
        ({}, ["-m", "nope.inner"], "there is no module nope.inner to run.\n"),
        ({}, ["-m", "email"], "there is no module email to run.\n"),
        ({"RANK": "0"}, ["-n", "2", "train.py"], "this process is one already"),
        ({}, ["--save", "none/steps", "train.py"], "steps: there is no folder"),
        ({}, ["--save", ".", "train.py"], "it is a folder"),
        ({}, ["--html", "none/page.html", "train.py"], "page.html: there is no folder"),
        ({"MINIDP_HANG_TIMEOUT": "soon"}, ["train.py"], "TIMEOUT=soon: expected a"),
        ({"WORLD_SIZE": "2"}, ["--compare", "train.py"], "started by torchrun or -n"),
    ],
)
def test_nothing_runs_that_could_not_end_well(
    ran, train, tmp_path, monkeypatch, env, words, says
):
    train(NEVER)
    monkeypatch.chdir(tmp_path)
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    status, err = ran(*words)
    assert status == 2
    assert says in err
    monkeypatch.setenv("RANK", "1")
    assert ran(*words) == (2, "")  # only rank 0 says so


def test_at_least_one_rank(ran, capsys):
    with pytest.raises(SystemExit):
        ran("-n", "0", "train.py")
    assert "1 or more, but got 0" in capsys.readouterr().err


FORKS = """
import multiprocessing

def main(rank):
    store = dist.FileStore(sys.argv[1], 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    DDP(torch.nn.Linear(2, 2))(torch.ones(1, 2)).sum().backward()

context = multiprocessing.get_context("fork")
ranks = [context.Process(target=main, args=(r,)) for r in range(2)]
for rank in ranks:
    rank.start()
for rank in ranks:
    rank.join()
    assert rank.exitcode == 0
"""


@pytest.mark.parametrize(
    ("options", "body", "arguments", "status", "says"),
    [
        ([], "", [], 0, "wrapped no model in"),
        (["--report"], "", [], 1, "so there is nothing to report or compare."),
        ([], "sys.exit(7)", [], 7, "exit status 7; it wrapped no model"),
        ([], "sys.exit('no data')", [], 1, "no data\n"),
        ([], "sys.exit()", [], 0, "is minidp.DataParallel in"),
        ([], "sys.exit(2)", ["--report"], 2, "stand before "),
        ([], FORKS, ["{folder}/store"], 0, "in those that it starts"),
        (["--report"], FORKS, ["{folder}/store"], 1, "If it starts its ranks"),
    ],
)
def test_exit_statuses(
    tmp_path, train, ran, monkeypatch, options, body, arguments, status, says
):
    monkeypatch.setenv("RANK", "taken away again, and after the test, too")
    monkeypatch.delenv("RANK")
    arguments = [each.format(folder=tmp_path) for each in arguments]
    found, err = ran(*options, train(body), *arguments)
    assert found == status
    assert says in err


def test_ranks_that_were_started_are_not_to_be_started(train, ran, monkeypatch):
    monkeypatch.setenv("RANK", "0")
    status, err = ran("--report", train(""))
    assert status == 1
    assert "nothing to report or compare. This process is a rank that a launcher" in err
    assert "-n start them" not in err


@pytest.mark.parametrize(
    ("body", "kind"),
    [
        ("raise ValueError('boo')", ValueError),
        ("{}['MASTER']", KeyError),
        ("{}['RANK of others']", KeyError),
    ],
)
def test_a_script_that_raises(train, ran, monkeypatch, body, kind):
    monkeypatch.setenv("RANK", "0")
    before = (list(sys.path), sys.argv, sys.modules["__main__"])
    with pytest.raises(kind):
        ran(train(body))
    assert (list(sys.path), sys.argv, sys.modules["__main__"]) == before


@pytest.mark.parametrize("rank", ["0", "1"])
def test_ctrl_c_is_one_line(train, ran, monkeypatch, capsys, rank):
    monkeypatch.setenv("RANK", rank)
    path = train("import torch\nraise KeyboardInterrupt")
    with pytest.raises(SystemExit) as caught:
        ran(path)
    assert caught.value.code == 130
    err = capsys.readouterr().err
    told = f"minidp run: interrupted at {path}:"
    assert err.count(told) == (rank == "0")
    assert "Traceback" not in err


def test_ctrl_c_for_all_ranks_is_a_few_lines(train):
    path = train(LOOP)
    words = [warm_python(), "-m", "minidp", "run", "-n", "2", path]
    pipe = subprocess.PIPE
    with subprocess.Popen(
        words, stdout=pipe, stderr=pipe, text=True, start_new_session=True
    ) as process:
        assert process.stdout is not None
        assert "GO" in process.stdout.readline()
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does
        _, err = process.communicate(timeout=200)
    assert process.returncode == 130
    assert "Traceback" not in err
    assert err.count("interrupted") == 1
    assert len(err.splitlines()) <= 8, err


def test_a_world_of_one(train, ran, lone_group):
    path = train("DDP(torch.nn.Linear(2, 2))(torch.ones(1, 2)).sum().backward()")
    status, err = ran("--report", path, "--lr", "1")
    assert status == 0
    assert "a world of one rank" in err
    assert f"For two on this machine: minidp run -n 2 {path} --lr 1\n" in err
    assert "minidp run: report of Linear\nrank 0 of 1; gloo on cpu" in err


def test_a_package_that_derives_from_the_class(tmp_path, ran, monkeypatch, lone_group):
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
    status, err = ran("-m", "deriving_package.train")
    assert status == 0
    assert "a world of one rank" in err


DROPS = """
import gc, weakref
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


def test_models_that_a_script_drops_are_let_go(tmp_path, train, ran, lone_group):
    names = ("--save", str(tmp_path / "steps"), "--html", str(tmp_path / "page.html"))
    status, err = ran(*names, train(DROPS))
    assert status == 0
    assert "minidp run: report of Linear (model 3 of 3)\n" in err
    for name in ("steps", "steps.1", "steps.2"):
        assert len(from_json((tmp_path / name).read_text())) == 1
    for name in ("page.html", "page.1.html", "page.2.html"):
        assert "1 step" in (tmp_path / name).read_text()


AS_PYTHON = """
import os, sys, pickle
class Here: pass
pickle.loads(pickle.dumps(Here()))
import beside
print([__name__, sys.argv, sys.path[0], __file__, __cached__, __package__, beside.x,
       sys.modules["__main__"] is sys.modules[Here.__module__], type(__loader__)])
"""


@pytest.mark.parametrize(
    "target",
    [
        pytest.param("train.py", marks=pytest.mark.nightly),
        pytest.param("./train.py", marks=pytest.mark.nightly),
        "link.py",
        pytest.param("here/train.py", marks=pytest.mark.nightly),
        pytest.param("here", marks=pytest.mark.nightly),
        pytest.param("code.zip", marks=pytest.mark.nightly),
        "-m train",
    ],
)
def test_a_script_sees_what_python_would_show_it(tmp_path, monkeypatch, target):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(Path(minidp.__file__).parents[1]))
    (tmp_path / "train.py").write_text(AS_PYTHON)
    (tmp_path / "__main__.py").write_text(AS_PYTHON)
    (tmp_path / "beside.py").write_text("x = 5\n")
    (tmp_path / "link.py").symlink_to("train.py")
    (tmp_path / "here").symlink_to(tmp_path)
    with zipfile.ZipFile("code.zip", "w") as file:
        file.write("__main__.py")
        file.write("beside.py")
    is_module = target.startswith("-m ")
    given = (target.removeprefix("-m "), ["--compare", "-m"], is_module)
    code = f"from minidp.run.script import Script; Script(*{given}).run()"
    outputs = [
        subprocess.run([sys.executable, *words], capture_output=True, check=True).stdout
        for words in (Script(*given).words, ["-c", code])
    ]
    assert outputs[0] == outputs[1] != b""


def outcome(*ends: float, num_models: int = 1, **weights) -> Outcome:
    tensors = {name: torch.tensor(values) for name, values in weights.items()}
    return Outcome(tensors, num_models, ends)


@pytest.mark.parametrize(
    ("torchs", "ours", "is_same", "says"),
    [
        (outcome(w=[1.0]), outcome(w=[1.0]), True, "identical, bit for bit (models: 1"),
        (outcome(w=float("nan")), outcome(w=float("nan")), True, "identical"),
        (outcome(w=[0.0]), outcome(w=[-0.0]), False, "differ in 1 tensors"),
        (outcome(w=[0.0, 1.0]), outcome(w=[0.0, 3.5]), False, "by 2.5 at most, in w"),
        (outcome(w=[0.0]), outcome(w=[float("nan")]), False, "by inf at most"),
        (outcome(w=[0.0]), outcome(v=[0.0]), False, "only one of the runs has v, w"),
        (outcome(w=[]), outcome(w=[]), True, "no times: fewer than two"),
        (outcome(1, 2, w=[1.0]), outcome(1, w=[1.0]), False, "2 on torch, 1 on minidp"),
        (
            outcome(0, 9, 18, 27, 36, 45, 45.002, w=[1.0]),
            outcome(0, 9, 18, 27, 36, 45, 45.001, w=[1.0]),
            True,
            "torch 2.00 ms, minidp 1.00 ms, ratio 0.50 (medians",
        ),
        (
            outcome(0, 9, 18, 27, 36, 45, w=[1.0]),
            outcome(0, 9, 18, 27, 36, 45, w=[1.0]),
            True,
            "step      too few steps to compare their times: 6. It takes 7",
        ),
    ],
)
def test_verdicts(torchs, ours, is_same, says):
    found, text = compare(torchs, ours, "")
    assert found is is_same
    assert says in text


def of_group(ranks, *, averaged=3, **weights) -> Outcome:
    """Return an outcome with one model, all of whose parameters are averaged."""
    tensors = {f"0: {name}": torch.tensor(values) for name, values in weights.items()}
    return Outcome(tensors, 1, (), ((ranks, [*tensors][:1]),), averaged)


@pytest.mark.parametrize(
    ("outcomes", "says"),
    [
        ([of_group([0, 1], w=[1.0], v=[r]) for r in (0.0, 1.0)], ""),  # v: not averaged
        ([of_group([0, 1], w=[1.0 + r]) for r in (0, 1)], "rank 1 differs from rank 0"),
        ([of_group([0, 1], w=[1.0 + r]) for r in (0, 1)], "by 1 at most, in 0: w."),
        ([of_group([r], w=[1.0 + r]) for r in (0, 1)], ""),  # other groups
        ([of_group([r % 2, r % 2 + 2], w=[r % 2]) for r in range(4)], ""),
        ([of_group([0, 1], w=[1.0]), of_group([0, 1], u=[2.0])], ""),
    ],
)
def test_ranks_are_compared_with_each_other(outcomes, says):
    text = compare_ranks(outcomes)
    assert says in text
    assert bool(says) == bool(text)


DROPPED = """
dist.init_process_group("gloo")
torch.manual_seed(dist.get_rank())
net = torch.nn.Linear(2, 1)
DDP(net)  # and its result is forgotten
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
for _ in range(3):
    net(torch.randn(4, 2)).square().mean().backward()
    optimizer.step()
dist.destroy_process_group()
"""


@pytest.mark.parametrize(("option", "status"), [("--compare", 1), ("--report", 0)])
def test_a_script_that_averages_nothing(tmp_path, train, option, status):
    train(DROPPED)
    ended = started("minidp.run", "-n", "2", option, "train.py", cwd=tmp_path)
    assert ended.returncode == status, ended.stderr
    assert "minidp run: no synchronised backward ran" in ended.stderr
    assert "final weights differ: rank 1 differs from rank 0 in" in ended.stderr
    assert "the DataParallel object around these parameters is gone" in ended.stderr


# ---------------------------------------------------------------------- who starts


@pytest.mark.parametrize(
    ("body", "name"),
    [
        ("rank = int(os.environ['LOCAL_RANK'])", "LOCAL_RANK"),
        ("dist.init_process_group('gloo')", "RANK"),
    ],
)
def test_a_script_that_nobody_started_as_ranks(
    tmp_path, train, monkeypatch, body, name
):
    """Torch's traceback would say less."""
    for variable in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(variable, raising=False)
    path = train(body)
    done = started("minidp.run", path, "--lr", "1", cwd=tmp_path)
    assert done.returncode == 1
    assert f"{path}, which runs as one process (-n N: as N ranks)" in done.stderr
    assert f"minidp run: {path} needs {name}, which a launcher" in done.stderr
    assert done.stderr.endswith(f"minidp run -n 2 {path} --lr 1\n")


OPTIONS = """
model = DDP(torch.nn.Linear(2, 2), find_unused_parameters=True)
assert (model._guard.policy, model._reducer.communicator.limit) == ("warn", 1800)
assert model.static_graph
"""


def test_options_of_the_constructor(train, ran, lone_group, monkeypatch):
    monkeypatch.setenv("MINIDP_HANG_TIMEOUT", "1800")
    monkeypatch.setenv("MINIDP_UNSYNCED", "ignore")
    monkeypatch.setenv("MINIDP_STATC_GRAPH", "1")
    words = ["--unsynced", "warn", "--static-graph", train(OPTIONS), "--unsynced", "3"]
    status, err = ran(*words)
    assert status == 0
    assert "no variable MINIDP_STATC_GRAPH; did you mean MINIDP_STATIC_GRAPH?" in err
    assert os.environ["MINIDP_UNSYNCED"] == "ignore"


# ----------------------------------------------------- scripts that start their ranks


STARTS = """
import subprocess
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


@pytest.mark.parametrize("option", ["", pytest.param("-I", marks=pytest.mark.nightly)])
def test_ranks_that_a_script_starts_by_a_command(tmp_path, train, option):
    words = (train(STARTS), str(free_port()), *option.split())
    # A new interpreter: in a fork that has torch, nothing sees its import.
    done = started("minidp.run", *words, cwd=tmp_path, python=sys.executable)
    if option:  # by which the other rank is not reached
        assert done.returncode == 1  # gloo would have aborted it
        assert (
            "[rank 0] The model is wrapped by torch's DistributedDataParallel on rank "
            "1, but by minidp.DataParallel here."
        ) in done.stderr
        assert "EnforceNotMet" not in done.stderr
        return
    assert done.returncode == 0, done.stderr
    name = "minidp.swapping DistributedDataParallel"
    assert sorted(done.stdout.splitlines()) == [f"0 {name}", f"1 {name}"]


# --------------------------------------------------------------- what ends in the end


RESUMES = """
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
    (folder / "train.py").write_text(HEAD + RESUMES)
    path = str(tmp_path / "last.pt") if is_elsewhere else "last.pt"
    words = ["minidp.run", "-n", "1", "--compare", "train.py", path]
    done = started(*words, cwd=folder)
    if is_elsewhere:
        assert done.returncode == 1
        assert "steps     differ: 5 on torch, 0 on minidp. If the script" in done.stderr
        assert "--before 'rm -rf CHECKPOINTS'" in done.stderr
        words[4:4] = ["--before", f"rm -rf {path}"]
        done = started(*words, cwd=folder)
    assert done.returncode == 0, done.stderr
    assert "in a copy of this folder.\n" in done.stderr
    assert "identical, bit for bit (models: 1, tensors: 2" in done.stderr
    assert (folder / path).exists()  # of the run on minidp
    assert not list(folder.glob("minidp-*"))


CHANGES = """
dist.init_process_group("gloo")
model = DDP(torch.nn.Linear(2, 2))
if "minidp" in type(model).__module__:
    with torch.no_grad():
        model.module.bias[0] += 1.0
"""
FAILS = "if os.environ['RANK'] == '1': sys.exit(7)"
FAILED = "minidp run: rank 1 failed first, with exit status 7.\n"
ONE, COMPARE = ["-n", "1", "--compare"], ["--compare"]
RESUMED = "a checkpoint (both runs were in this folder: --no-copy), let"
BOO, STUCK = "raise ValueError('boo')", "import time; time.sleep(1000)"
ON_MINIDP = """
if hasattr(model, "step_in_backward"):
    {then}
"""
WRAPS = """
dist.init_process_group("gloo")
model = DDP(torch.nn.Linear(2, 2))
"""
FAILS_ON_MINIDP = WRAPS + ON_MINIDP.format(then="sys.exit(7)")
STUCK_ON_MINIDP = WRAPS + ON_MINIDP.format(then="import time; time.sleep(1000)")
IMPORTS_MINIDP = """
import minidp
dist.init_process_group("gloo")
model = minidp.{maker}(torch.nn.Linear(2, 2))
optimizer = torch.optim.SGD([torch.ones(1, requires_grad=True)], lr=0.1)
for _ in range(9):
    optimizer.step()
"""
OWN_STEPS = """
import time
dist.init_process_group("gloo")
model = DDP(torch.nn.Linear(2, 2))
for _ in range(9):  # longer than --limit; no optimizer is torch's
    model(torch.ones(1, 2)).sum().backward()
    with torch.no_grad():
        for param in model.parameters():
            param -= 0.1 * param.grad
            param.grad = None
    time.sleep(1.5)
"""


@pytest.mark.parametrize(
    ("options", "body", "status", "says"),
    [
        (["-n", "2"], FAILS, 7, [FAILED]),
        (ONE, CHANGES, 1, ["differ in 1 tensors", "by 1 at most, in 0: bias"]),
        ([*ONE, "--no-copy"], RESUMES, 1, ["in this folder (--no-copy).", RESUMED]),
        (["--compare", "--before", "exit 3"], NEVER, 1, ["exit status 3: exit 3\n"]),
        (COMPARE, BOO, 1, ["script failed on torch's DDP, so there is not"]),
        (COMPARE, "os._exit(0)", 1, ["script ended its process itself"]),
        (
            ["--compare", "--limit", "8"],
            STUCK,
            1,
            ["no optimizer step and no forward of a wrapped model on torch for 8 s"],
        ),
        (
            ONE,
            FAILS_ON_MINIDP,
            7,
            ["failed on minidp only, with exit status 7: on torch's DDP it ended well"],
        ),
        (
            [*ONE, "--limit", "15"],
            STUCK_ON_MINIDP,
            1,
            ["on torch's DDP the script ended well, but rank 0 made no optimizer step"],
        ),
        (
            ONE,
            IMPORTS_MINIDP.format(maker="DataParallel"),
            1,
            ["the run on torch was a run on minidp: on rank 0 the script"],
        ),
        pytest.param(
            ONE,
            IMPORTS_MINIDP.format(maker="attach"),
            1,
            ["the run on torch was a run on minidp"],
            marks=pytest.mark.nightly,
        ),
        ([*ONE, "--limit", "12"], OWN_STEPS, 0, ["identical, bit for bit (models: 1"]),
    ],
)
def test_what_fails_or_cannot_be_compared(tmp_path, train, options, body, status, says):
    done = started("minidp.run", *options, train(body), "last.pt", cwd=tmp_path)
    assert done.returncode == status
    assert all(text in done.stderr for text in says), done.stderr
    assert ("line 3 in <module>" in done.stderr) is (body is STUCK)
    assert "ratio" not in done.stderr
    assert ("Traceback" in done.stderr) is (body is BOO)


def test_what_before_deletes_is_not_copied(tmp_path, train):
    """It runs in the folder itself, before each run: what it leaves is copied."""
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "last.pt").write_text("old")
    path = train(
        "assert sorted(os.listdir('out')) == ['fresh'], os.listdir('out')\n"
        "open('out/last.pt', 'w').write('new')\n" + WRAPS
    )
    before = "rm -rf out; mkdir out; touch out/fresh; echo once >> said"
    words = ["minidp.run", "-n", "1", "--compare", "--before", before, path]
    done = started(*words, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "said").read_text() == "once\n" * 2


def test_absolute_paths_into_the_folder_lead_to_the_copy(tmp_path):
    folder = tmp_path / "project"
    folder.mkdir()
    (folder / "train.py").write_text(HEAD + RESUMES)
    path = folder / "last.pt"
    words = ["minidp.run", "-n", "1", "--compare", "train.py", str(path)]
    done = started(*words, cwd=folder)
    assert done.returncode == 0, done.stderr
    assert "identical, bit for bit (models: 1, tensors: 2" in done.stderr


WARNS = """
import warnings
from warnings import warn

def deprecated():
    warn("two above", FutureWarning, stacklevel=3)

warn("here", FutureWarning)
warn("one above", FutureWarning, stacklevel=2)
deprecated()
warn("far above", FutureWarning, stacklevel=30)
os.chdir("/")
"""


@pytest.mark.parametrize("is_module", [False, True])
def test_warnings_point_at_the_script(tmp_path, is_module):
    """Also where Python finds no frame of the script, because its stack ends there."""
    (tmp_path / "warns.py").write_text(HEAD + WARNS)
    target = ["-m", "warns"] if is_module else ["warns.py"]
    # A new interpreter: its stack ends at the script.
    done = started("minidp.run", *target, cwd=tmp_path, python=sys.executable)
    found = [
        line.partition(".py:")[2]
        for line in done.stderr.splitlines()
        if "FutureWarning:" in line
    ]
    says = ("here", "one above", "two above", "far above")
    first = (HEAD + WARNS).split("\n").index('warn("here", FutureWarning)') + 1
    assert found == [f"{first + n}: FutureWarning: {t}" for n, t in enumerate(says)]
    assert done.stderr.count("warns.py:") == 4


def test_a_warning_of_a_constructor_points_at_its_caller(recwarn):
    """`after_wrapping` is between the two, on torch's class as well."""

    class Kind:
        def __init__(self) -> None:
            warnings.warn("old", FutureWarning, stacklevel=2)

    made: list[Kind] = []
    with after_wrapping(Kind, made.append):
        kind = Kind()
    assert made == [kind]
    assert [(w.filename, w.lineno) for w in recwarn] == [
        (__file__, sys._getframe().f_lineno - 3)
    ]


def test_the_hook_of_forwards_is_not_in_copies(tmp_path):
    recorder, net = OutcomeRecorder(tmp_path / "torch", 1000), torch.nn.Linear(2, 2)
    net.module = torch.nn.Identity()
    recorder.wrapped(net)
    moments = [recorder._watched_at]
    recorder._watched_at -= 10.0
    for model in (copy.deepcopy(net), net):
        model(torch.ones(1, 2))
        moments.append(recorder._watched_at)
    assert moments[1] < moments[0] < moments[2]
    recorder.outcome()
    faulthandler.cancel_dump_traceback_later()


def test_a_run_on_torch_that_does_not_exit_has_a_result(tmp_path, train):
    code = (
        "from minidp.run import compare; compare.EXIT_SECONDS = 2; "
        "from minidp.__main__ import main; main()"
    )
    hangs = train("import atexit, time; atexit.register(time.sleep, 1000)")
    words = ("run", "--phase", "torch", "--outcome", str(tmp_path / "torch"), hangs)
    done = subprocess.run([warm_python(), "-c", code, *words], timeout=200)
    assert done.returncode == 1
    assert (tmp_path / "torch-0").exists()


def test_the_first_optimizer_is_timed(tmp_path):
    recorder = OutcomeRecorder(tmp_path / "torch", 1000)
    one = torch.optim.SGD([torch.ones(1, requires_grad=True)], lr=0.1)
    two = torch.optim.SGD([torch.ones(1, requires_grad=True)], lr=0.1)
    for optimizer in (one, two, one, two, one):
        optimizer.step()
    assert len(recorder.outcome().ends) == 3
    one.step()
    assert len(recorder.outcome().ends) == 3
