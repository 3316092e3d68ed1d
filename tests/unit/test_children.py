"""Processes that a script starts by a command are swapped as well, and no others."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from minidp._children import START, plain_environment, reached_children
from minidp._overrides import RUN

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
        timeout=120,
        check=False,
    )


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
        "import torch",
        "import minidp, torch",
        "import torch.nn.parallel.distributed",
        "import importlib.util; assert importlib.util.find_spec('torch')",
        "import minidp; minidp.swap()",
    ],
)
def test_whatever_is_imported_first(outside, before):
    with reached_children(swaps=True):
        done = python("-c", before + SAYS)
    assert done.stdout == SWAPPED, done.stderr
    assert done.stderr == "" or "swapped already" in done.stderr


def test_they_are_not_swapped_outside(outside):
    before = dict(os.environ)
    with reached_children(swaps=True):
        assert os.environ["PYTHONPATH"] == str(START)
    assert dict(os.environ) == before
    assert python("-c", SAYS).stdout == TORCHS


@pytest.mark.parametrize("option", ["-S", "-I", "-E"])
def test_an_interpreter_that_reads_no_environment_is_not_reached(outside, option):
    with reached_children(swaps=True):
        done = python(option, "-c", f"import sys; sys.path[:] = {sys.path}\n{SAYS}")
    assert done.stdout == TORCHS


def test_a_process_without_torch_has_nothing_of_ours(outside):
    code = """
import sys
print(sorted({"torch", "minidp", "numpy"} & set(sys.modules)), sys.path)
"""
    plain = python("-c", code).stdout
    assert plain.startswith("[] ")
    with reached_children(swaps=True):
        done = python("-c", code)
    assert (done.stdout, done.stderr) == (plain, "")


def test_processes_of_processes(outside):
    code = f"import subprocess, sys\nsubprocess.run([sys.executable, '-c', {SAYS!r}])"
    with reached_children(swaps=True):
        assert python("-c", code).stdout == SWAPPED


# ---------------------------------------------------------- a sitecustomize of the user


@pytest.fixture
def of_the_user(outside, monkeypatch):
    folder = outside / "site"
    folder.mkdir()
    monkeypatch.setenv("PYTHONPATH", str(folder))
    return folder / "sitecustomize.py"


def test_that_of_the_user_runs_as_well(of_the_user):
    of_the_user.write_text("print('mine', __name__)\n")
    says = "import sys, sitecustomize; print(sitecustomize.__file__, sys.path)"
    plain = python("-c", says)
    with reached_children(swaps=True):
        done = python("-c", says)
        swapped = python("-c", SAYS)
    assert plain.stdout.startswith(f"mine sitecustomize\n{of_the_user} ")
    assert (done.stdout, done.stderr) == (plain.stdout, "")
    assert swapped.stdout == "mine sitecustomize\n" + SWAPPED


def test_that_of_the_user_may_import_torch(of_the_user):
    of_the_user.write_text("import torch\n")
    with reached_children(swaps=True):
        assert python("-c", SAYS).stdout == SWAPPED


def test_that_of_the_user_fails_as_ever(of_the_user):
    of_the_user.write_text("raise ValueError('boo')\n")
    plain = python("-c", SAYS)
    with reached_children(swaps=True):
        done = python("-c", SAYS)
    assert plain.stdout == TORCHS
    assert done.stdout == SWAPPED
    assert "ValueError: boo" in plain.stderr
    assert done.stderr.splitlines() == plain.stderr.splitlines()


def test_a_missing_module_of_the_users_is_not_taken_for_a_missing_file(of_the_user):
    of_the_user.write_text("import no_such_module\n")
    with reached_children(swaps=True):
        done = python("-c", "pass")
    assert "no_such_module" in done.stderr


# ------------------------------------------------------------------------- what else


def test_where_minidp_cannot_be_imported_the_process_says_so(outside, monkeypatch):
    """Another environment, say, with a torch of long ago."""
    (outside / "torch").mkdir()
    (outside / "torch" / "__init__.py").write_text("version = 1\n")
    monkeypatch.setenv("PYTHONPATH", str(outside))
    with reached_children(swaps=True):
        done = python("-c", "import torch; print(torch.version)", "--lr")
    assert done.stdout == "1\n"
    assert done.stderr.startswith("minidp run: process ")
    assert "(-c --lr) stays on torch's DistributedDataParallel" in done.stderr
    assert done.stderr.count("\n") == 1


WRAPS = """
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
DistributedDataParallel(torch.nn.Linear(1, 1))
"""


@pytest.mark.parametrize(("code", "have_wrapped"), [(SAYS, False), (WRAPS, True)])
def test_the_process_that_started_them_hears_of_models(outside, code, have_wrapped):
    with reached_children(swaps=True) as children:
        done = python("-c", code)
        assert children.have_wrapped is have_wrapped, done.stderr


@pytest.mark.parametrize("variable", ["RANK", "LOCAL_RANK"])
def test_runs_of_a_comparison_draw_the_same_numbers(outside, variable):
    code = "import torch; print(torch.initial_seed())\n" + SAYS
    found = []
    for swaps in (False, True):
        with reached_children(swaps=swaps, is_compared=True):
            found.append(python("-c", code, **{variable: "3"}).stdout)
    assert found == ["3\n" + TORCHS, "3\n" + SWAPPED]


DROPS = """
import gc, weakref
model = DistributedDataParallel(torch.nn.Linear(1, 1))
reducer = weakref.ref(model.reducer)
dist.destroy_process_group()
del model
gc.collect()
print(reducer() is not None)
"""


def test_ranks_on_torch_are_not_taken_down_either(outside):
    """Torch's destructors may hang, and then whoever waits for such a rank does."""
    plain = python("-c", WRAPS + DROPS)
    with reached_children(swaps=False, is_compared=True):
        done = python("-c", WRAPS + DROPS)
    assert (plain.stdout, done.stdout) == ("False\n", "True\n"), done.stderr


@pytest.mark.parametrize("others", ["", "/a:/b"])
def test_an_environment_without_it(outside, monkeypatch, others):
    if others:
        monkeypatch.setenv("PYTHONPATH", others)
    with reached_children(swaps=True), reached_children(swaps=True):
        plain = plain_environment()
        assert START.parts[-2:] == ("minidp", "_at_start")
        assert os.environ["PYTHONPATH"].startswith(f"{START}{os.pathsep}{START}")
    assert plain.get("PYTHONPATH", "") == others
    assert RUN not in plain
    assert plain["HOME"] == os.environ["HOME"]


def test_nothing_else_lies_in_the_folder_on_the_path():
    """It would hide modules of the user's."""
    names = {path.name for path in Path(START).iterdir()} - {"__pycache__"}
    assert names == {"__init__.py", "sitecustomize.py"}
