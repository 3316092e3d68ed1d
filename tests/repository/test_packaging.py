"""What is installed, what a type checker sees of it, and what it says of itself.

The slow part, with fresh environments: `bash tests/run.sh packaging`.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import minidp
from minidp.native import binary
from minidp.torch_compat.versions import NEWEST, OLDEST
from tests.versions import PAIRS

ROOT = Path(minidp.__file__).parent.parent


@pytest.fixture(scope="module")
def project():
    tomllib = pytest.importorskip("tomllib", reason="Python 3.10 has no tomllib")
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


def python(*words, cwd):
    """Run Python elsewhere, without the paths that pytest adds."""
    return subprocess.run(
        [sys.executable, "-I", *words],
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )


# --------------------------------------------------------------- what is installed


def test_all_sources_of_the_extension_are_shipped(project):
    link = ROOT / "minidp" / "csrc"
    assert link.resolve() == ROOT / "csrc"
    setuptools = project["tool"]["setuptools"]
    assert setuptools["packages"]["find"]["include"] == ["minidp*"]
    shipped = {
        path
        for pattern in setuptools["package-data"]["minidp"]
        for path in (ROOT / "minidp").glob(pattern)
    }
    assert set(binary.source_files(link)) <= shipped
    page = {path.name for path in (ROOT / "minidp" / "overlap").glob("*.[hj]*")}
    assert page == {"page.html", "page.js", "forecast.js"}
    assert page <= {path.name for path in shipped}
    assert all(path.is_file() for path in shipped)


def test_one_range_of_versions_is_claimed_and_tested(project):
    torches = sorted(tuple(map(int, torch.split(".")[:2])) for torch, _ in PAIRS)
    assert (torches[0], torches[-1]) == (OLDEST, NEWEST)
    oldest = ".".join(map(str, OLDEST))
    assert f"torch>={oldest}" in project["project"]["dependencies"]
    pythons = {python for _, python in PAIRS}
    classifiers = project["project"]["classifiers"]
    prefix = "Programming Language :: Python :: 3."
    assert pythons == {c.split(" ")[-1] for c in classifiers if c.startswith(prefix)}
    script = (ROOT / "examples" / "environment.sh").read_text()
    assert f"< ({OLDEST[0]}, {OLDEST[1]})" in script
    assert f"torch>={oldest}" in script
    readme = (ROOT / "README.md").read_text()
    assert f"torch {oldest} or newer" in readme
    rows = [
        line.split("|")[1:3] for line in readme.splitlines() if "| fast tests" in line
    ]
    assert [(t.strip(), p.strip()) for t, p in rows] == [*PAIRS]
    baselines = sorted((ROOT / "tests" / "conformance").glob("baseline_*.txt"))
    assert [path.stem.split("_")[1] for path in baselines] == [
        f"2.{minor}" for minor in range(OLDEST[1], NEWEST[1] + 1)
    ]


def test_packages_that_are_imported_are_dependencies(project):
    named = {
        word.partition(">")[0].replace("-", "_")
        for word in project["project"]["dependencies"]
    }
    imported = set()
    for path in (ROOT / "minidp").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                imported.update(alias.name.partition(".")[0] for alias in node.names)
            elif isinstance(node, ast.ImportFrom) and not node.level:
                imported.add(node.module.partition(".")[0])
    outside = imported - set(sys.stdlib_module_names) - {"minidp"}
    extras = {"torchft"} & set(project["project"]["optional-dependencies"])
    assert outside <= named | extras


# --------------------------------------------------------- what it says of itself


def test_the_version_is_that_of_the_sources(project):
    attribute = project["tool"]["setuptools"]["dynamic"]["version"]["attr"]
    module, _, name = attribute.rpartition(".")
    assert getattr(sys.modules[module], name) == minidp.__version__


def test_a_checkout_on_the_path_has_a_version(tmp_path):
    (tmp_path / "minidp").symlink_to(ROOT / "minidp")
    code = f"""
import sys
sys.path = [{str(tmp_path)!r}, *(p for p in sys.path if p != {str(ROOT)!r})]
from importlib import metadata
def missing(name):
    raise metadata.PackageNotFoundError(name)
metadata.version = metadata.distribution = missing
from minidp import __version__
from minidp import recording
from minidp.doctor.checks.ranks import read_versions
from minidp.__main__ import main
said = recording.__version__, read_versions()["minidp"]
assert said[0] == __version__ == said[1].split()[0], said
main(["--version"])
"""
    done = python("-c", code, cwd=tmp_path)
    assert done.stdout == f"minidp {minidp.__version__}\n", done


@pytest.mark.parametrize("name", ["doctor", "report"])
def test_a_module_is_imported_when_it_is_asked_for(name, tmp_path):
    code = (
        f"import sys, minidp; assert 'minidp.{name}' not in sys.modules; "
        f"assert '{name}' in dir(minidp); print(minidp.{name}.__name__)"
    )
    path = f"import sys; sys.path.insert(0, {str(ROOT)!r})"
    done = python("-c", f"{path}; {code}", cwd=tmp_path)
    assert done.stdout == f"minidp.{name}\n", done


def test_other_names_are_no_attributes():
    with pytest.raises(AttributeError, match="module 'minidp' has no attribute 'nope'"):
        _ = minidp.nope
