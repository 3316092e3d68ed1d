"""Processes that a script starts by a command are swapped as well, and no others."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from minidp.config import RUN
from minidp.run.children import START, reached_children

pytestmark = pytest.mark.fresh

SAYS = """
from torch.nn.parallel import DistributedDataParallel
print(DistributedDataParallel.__module__)
"""
SWAPPED, TORCHS = "minidp.swapping\n", "torch.nn.parallel.distributed\n"


def python(*words, **changes):
    """What a Python process says that inherits this one's environment."""
    return subprocess.run(
        [sys.executable, *words],
        env={**os.environ, **changes},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )


def child(*words, swaps=True, is_compared=False, **changes):
    """The same of a process that `reached_children` reaches."""
    with reached_children(swaps=swaps, is_compared=is_compared):
        return python(*words, **changes)


@pytest.fixture
def outside(tmp_path, monkeypatch):
    """As seen from elsewhere than this checkout, without anything of minidp's."""
    for name in ("PYTHONPATH", RUN, "RANK", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    "before",
    [
        "",
        pytest.param("import minidp, torch", marks=pytest.mark.nightly),
        "import importlib.util; assert importlib.util.find_spec('torch')",
        "import minidp; minidp.swap()",
    ],
)
def test_whatever_is_imported_first(outside, before):
    done = child("-c", before + SAYS)
    assert done.stdout == SWAPPED, done.stderr
    assert done.stderr == "" or "swapped already" in done.stderr


@pytest.mark.parametrize("option", ["-S", "-I"])
def test_an_interpreter_that_reads_no_environment_is_not_reached(outside, option):
    done = child(option, "-c", f"import sys; sys.path[:] = {sys.path}\n{SAYS}")
    assert done.stdout == TORCHS


def test_a_process_without_torch_has_nothing_of_ours(outside):
    """And the environment is as before afterwards."""
    ours = "sorted({'torch', 'minidp', 'numpy'} & set(sys.modules))"
    code = f"import sys; print({ours}, sys.path)"
    plain, before = python("-c", code).stdout, dict(os.environ)
    assert plain.startswith("[] ")
    with reached_children(swaps=True):
        done = child("-c", code)
    assert (done.stdout, done.stderr) == (plain, "")
    assert dict(os.environ) == before
    names = {path.name for path in START.iterdir()} - {"__pycache__"}
    assert names == {"__init__.py", "sitecustomize.py"}  # others would hide modules


def test_a_sitecustomize_of_the_user_runs_as_well(outside, monkeypatch):
    mine = outside / "sitecustomize.py"
    monkeypatch.setenv("PYTHONPATH", str(outside))
    mine.write_text("print('mine', __name__)\n")
    says = "import sys, sitecustomize; print(sitecustomize.__file__, sys.path)"
    plain, done = python("-c", says), child("-c", says + SAYS)
    assert plain.stdout.startswith(f"mine sitecustomize\n{mine} ")
    assert (done.stdout, done.stderr) == (plain.stdout + SWAPPED, "")
    mine.write_text("import no_such_module\n")  # it fails as ever
    plain, done = python("-c", "pass"), child("-c", SAYS)  # without torch: quick
    assert (plain.stdout, done.stdout) == ("", SWAPPED)
    assert "no_such_module" in plain.stderr
    assert done.stderr.splitlines() == plain.stderr.splitlines()


def test_where_minidp_cannot_be_imported_the_process_says_so(outside, monkeypatch):
    """Another environment, say, with a torch of long ago."""
    (outside / "torch").mkdir()
    (outside / "torch" / "__init__.py").write_text("version = 1\n")
    monkeypatch.setenv("PYTHONPATH", str(outside))
    done = child("-c", "import torch; print(torch.version)", "--lr")
    assert done.stdout == "1\n"
    assert done.stderr.startswith("minidp run: process ")
    assert "(-c --lr) stays on torch's DistributedDataParallel" in done.stderr
    assert done.stderr.count("\n") == 1


def test_runs_of_a_comparison_draw_the_same_numbers(outside):
    code = "import torch; print(torch.initial_seed())\n" + SAYS
    torchs = child("-c", code, swaps=False, is_compared=True, RANK="3")
    swapped = child("-c", code, is_compared=True, LOCAL_RANK="3")
    assert (torchs.stdout, swapped.stdout) == ("3\n" + TORCHS, "3\n" + SWAPPED)


DROPS = """
import gc, weakref, torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
net, wrappers, parts, x = torch.nn.Linear(1, 1), [], [], torch.ones(1, 1)
for _ in range(2):  # the same module: hooks of the first wrapper must be gone
    model = DistributedDataParallel(net, process_group=dist.new_group([0]))
    wrappers.append(weakref.ref(model))
    parts += map(weakref.ref, (model.reducer, model.process_group))
    for _ in range(2):
        model(x).backward()
    dist.destroy_process_group(model.process_group)
    del model
    gc.collect()
net(x).backward()
print(*([one() is not None for one in some] for some in (wrappers, parts)))
"""


@pytest.mark.parametrize(
    "module",
    [
        "torch.distributed.run",
        pytest.param("torch.distributed.launch", marks=pytest.mark.nightly),
    ],
)
def test_a_launcher_that_a_script_starts_is_imported_once(outside, module):
    """Launchers start ``python -m torch.distributed.run``, as ultralytics does."""
    done = child("-W", "error::RuntimeWarning", "-m", module, "--help")
    assert done.returncode == 0, done.stderr
    assert "--nproc" in done.stdout
    assert "RuntimeWarning" not in done.stderr


def test_ranks_on_torch_are_not_taken_down_either(outside):
    """Torch's destructors may hang, and then whoever waits for such a rank does.

    So parts of a dropped wrapper stay, and the wrapper itself goes as ever. There is
    no run without the mend beside it, for one in six or so would hang.
    """
    done = child("-c", DROPS, swaps=False, is_compared=True)
    assert done.stdout == f"{[False] * 2} {[True] * 4}\n", done.stderr
