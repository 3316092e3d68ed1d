"""A clean build, installed in fresh environments: `bash tests/run.sh packaging`.

It takes minutes and asks package registries (for setuptools, build and pyright), so it
runs only by name. Torch is that of this environment.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

import minidp
from minidp.native import binary

ROOT = Path(minidp.__file__).parent.parent
USER = """\
import minidp
from torch import nn
from typing_extensions import assert_type

class Net(nn.Module):
    own: int = 0

assert_type(minidp.DataParallel(Net()).module, Net)
assert_type(minidp.doctor.check_model(Net()).exit_code, int)
minidp.nonsense
"""

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1200),
    pytest.mark.skipif(
        os.environ.get("MINIDP_TEST_PACKAGING") != "1",
        reason="only by name: bash tests/run.sh packaging",
    ),
]


def run(*words, cwd, status=0, **env):
    """What a command says; it must end as expected."""
    done = subprocess.run(
        [str(word) for word in words],
        cwd=cwd,
        env={**os.environ, "MYPYPATH": "", "PYTHONPATH": "", **env},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == status, done.stdout
    return done.stdout


@pytest.fixture(scope="module")
def checkout(tmp_path_factory):
    """A copy of what git would give to others, with what is not committed yet."""
    folder = tmp_path_factory.mktemp("checkout") / "minidp"
    names = run("git", "ls-files", "-co", "--exclude-standard", cwd=ROOT).splitlines()
    for name in names:
        if (ROOT / name).exists() or (ROOT / name).is_symlink():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / name, follow_symlinks=False)
    return folder


def make_environment(folder):
    """The interpreter of an empty environment, on which pip does not look for torch."""
    venv.create(folder, with_pip=True)
    return folder / "bin" / "python"


def lend_torch(python):
    """Let an environment import what this one has: all but this checkout of minidp.

    A .pth file in a folder that is on the path only by a .pth file is not read.
    """
    where = "import sysconfig; print(sysconfig.get_path('purelib'))"
    site = Path(run(python, "-c", where, cwd="/").strip())
    (site / "torch-of-another.pth").write_text(sysconfig.get_path("purelib"))


@pytest.fixture(scope="module")
def built(checkout, tmp_path_factory):
    """The sdist, and the wheel that is built from it."""
    folder = tmp_path_factory.mktemp("build")
    python = make_environment(folder / "venv")
    run(python, "-m", "pip", "install", "build", cwd=folder)
    said = run(python, "-m", "build", "--outdir", folder, checkout, cwd=folder)
    assert "Deprecat" not in said
    (sdist,), (wheel,) = folder.glob("*.tar.gz"), folder.glob("*.whl")
    return sdist, wheel


def expected_files():
    """Of the package, in sdist and wheel."""
    modules = (ROOT / "minidp").rglob("*.py")
    sources = binary.source_files(ROOT / "minidp" / "csrc")
    page = ("page.html", "page.js", "forecast.js")
    return {
        *(path.relative_to(ROOT).as_posix() for path in modules),
        *(path.relative_to(ROOT).as_posix() for path in sources),
        *(f"minidp/overlap/{name}" for name in page),
        "minidp/csrc/README.md",
        "minidp/py.typed",
        "minidp/LICENSE",
    }


def test_sdist_and_wheel_hold_the_package_and_nothing_else(built):
    sdist, wheel = built
    with tarfile.open(sdist) as archive:
        members = {m.name.partition("/")[2]: m for m in archive if not m.isdir()}
    assert all(member.isfile() for member in members.values())  # a link leads nowhere
    package = {name for name in members if name.startswith("minidp/")}
    assert package == expected_files()
    assert {"pyproject.toml", "README.md", "PKG-INFO"} <= set(members)
    outside = {name.partition("/")[0] for name in set(members) - package}
    assert not outside & {"tests", "benchmarks", "examples", "csrc", "build"}
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        (facts,) = (n for n in names if n.endswith(".dist-info/METADATA"))
        metadata = archive.read(facts).decode()
    assert {n for n in names if ".dist-info/" not in n} == expected_files()
    assert any(n.endswith(".dist-info/licenses/minidp/LICENSE") for n in names)
    head = metadata.partition("\n\n")[0].splitlines()
    assert f"Version: {minidp.__version__}" in head
    assert "License-Expression: BSD-3-Clause" in head
    assert "Author: minidp developers" in head
    assert "Provides-Extra: bench" in head
    assert not [line for line in head if "url" in line.partition(":")[0].lower()]


@pytest.mark.parametrize("which", [0, 1], ids=["sdist", "wheel"])
def test_an_installed_package_works_anywhere(built, which, tmp_path):
    python = make_environment(tmp_path / "venv")
    run(python, "-m", "pip", "install", "--no-deps", built[which], cwd=tmp_path)
    lend_torch(python)
    code = "import minidp; print(minidp.doctor.__file__, minidp.__version__)"
    where, version = run(python, "-c", code, cwd=tmp_path).split()
    assert Path(where).is_relative_to(tmp_path / "venv")
    assert version == minidp.__version__
    command = python.with_name("minidp")
    assert run(command, "--version", cwd=tmp_path) == f"minidp {version}\n"
    cache = {"MINIDP_NATIVE_CACHE": str(tmp_path / "cache"), "MINIDP_NATIVE": "auto"}
    said = run(command, "native", "status", cwd=tmp_path, status=1, **cache)
    assert "The native kernels are not built." in said  # which needs the sources


@pytest.fixture(scope="module")
def editable(checkout, tmp_path_factory):
    """The interpreter of an environment with `pip install -e`, and a project."""
    folder = tmp_path_factory.mktemp("editable")
    python = make_environment(folder / "venv")
    run(python, "-m", "pip", "install", "--no-deps", "-e", checkout, cwd=folder)
    lend_torch(python)
    project = folder / "project"
    project.mkdir()
    (project / "user.py").write_text(USER)
    return python, project


def test_mypy_resolves_an_editable_install(editable):
    python, project = editable
    mypy = (sys.executable, "-m", "mypy", "--python-executable", python, "--strict")
    said = run(*mypy, "user.py", cwd=project, status=1)
    # That nothing else is wrong shows that names and types are known.
    assert "user.py:10: error: Module has no attribute" in said
    assert "Found 1 error in 1 file" in said


def test_pyright_resolves_an_editable_install(editable):
    python, project = editable
    if shutil.which("node") is None:
        pytest.skip("pyright needs node")
    run(python, "-m", "pip", "install", "pyright", cwd=project)
    pyright = (python, "-m", "pyright", "--pythonpath", python)
    said = run(*pyright, "user.py", cwd=project, status=1)
    assert 'user.py:10:8 - error: "nonsense" is not a known attribute' in said
    assert "1 error, " in said
