"""What every example promises a reader; that they work is shown by running them."""

from __future__ import annotations

import ast
import os
import re
import subprocess
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
SCRIPTS = sorted(EXAMPLES.glob("*.py"))
README = (EXAMPLES / "README.md").read_text()
MAX_LINES = 120  # less than
# Older than the limit: one compares two implementations, the other survives crashes.
# The others start, kill and watch a job.
OF_TORCHFT = {"fault_tolerant.py", "elastic_bits.py"}
LONGER = {"train_digits.py", "elastic_checkpoint.py"} | OF_TORCHFT
by_name = pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)


def docstring(script: Path) -> str:
    return ast.get_docstring(ast.parse(script.read_text())) or ""


@by_name
def test_its_docstring_begins_with_the_command_that_starts_it(script: Path) -> None:
    summary, command = docstring(script).replace("\\\n", " ").split("\n\n")[:2]
    assert summary.endswith(".")
    assert "\n" not in summary
    words = [line.split() for line in command.splitlines()]
    starts = [line for line in words if f"examples/{script.name}" in line]
    assert starts, command
    assert starts[0][0] == "python"


@by_name
def test_it_stands_alone(script: Path) -> None:
    others = {other.stem for other in SCRIPTS}
    for node in ast.walk(ast.parse(script.read_text())):
        names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0
            names = [node.module or ""]
        assert not {name.split(".")[0] for name in names} & (others | {"tests"})


@by_name
def test_it_is_short_takes_smoke_and_leaves_the_group_at_its_end(script: Path) -> None:
    text = script.read_text()
    assert (text.count("\n") < MAX_LINES) == (script.name not in LONGER)
    assert '"--smoke"' in text
    assert re.search(r"^\s*(from|import) minidp", text, flags=re.MULTILINE)
    ends = "manager.shutdown(" if script.name in OF_TORCHFT else "dist.destroy"
    assert ends in text


def test_the_readme_lists_what_there_is_and_nothing_else() -> None:
    rows = re.findall(r"^\| \[`(\S+)`\]\((\S+)\)", README, flags=re.MULTILINE)
    assert all(name == target for name, target in rows)
    there_are = [*SCRIPTS, *EXAMPLES.glob("*.sbatch")]
    assert sorted(name for name, _ in rows) == sorted(path.name for path in there_are)


def test_the_readme_gives_the_command_of_the_docstring() -> None:
    command = re.compile(r"python \S+ \S+ --nnodes 2[^`]*?torchrun_ddp.py")
    by_docstring = command.search(docstring(EXAMPLES / "torchrun_ddp.py"))
    by_readme = command.search(README)
    assert by_docstring is not None
    assert by_readme is not None
    same = by_docstring[0].replace("node 2", "node 8").split()
    assert by_readme[0].split() == same


def test_the_quickstart_says_what_begins_before_it_begins(tmp_path: Path) -> None:
    """Also where no terminal is: an interpreter under load is silent for a minute."""
    interpreter = tmp_path / "python"
    interpreter.write_text('#!/usr/bin/env bash\necho "python $*" >&2\n')
    interpreter.chmod(0o755)
    done = subprocess.run(
        ["bash", str(EXAMPLES / "quickstart.sh")],
        env={**os.environ, "MINIDP_PYTHON": str(interpreter)},
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        text=True,
        timeout=200,
        check=True,
    )
    said = [re.sub(r"^ *\d+ s  ", "say ", line) for line in done.stderr.splitlines()]
    assert said[0].startswith("say an environment, the extension, then training")
    begun = [n for n, line in enumerate(said) if line.startswith("python -m")]
    assert len(begun) == 2
    assert "say looking for the C++ extension" in said[begun[0] - 1]
    assert any("say starting two processes" in line for line in said[: begun[1]])


@pytest.mark.parametrize(
    "readme",
    [path for path in EXAMPLES.parent.rglob("*.md") if ".venv" not in path.parts],
    ids=lambda path: str(path.relative_to(EXAMPLES.parent)),
)
def test_extras_are_installed_from_the_clone_and_quoted(readme: Path) -> None:
    """minidp is not on PyPI, and some shells expand brackets."""
    for line in readme.read_text().splitlines():
        for _, word in re.findall(r"pip install (-e )?(\S*\[\w+\]'?)", line):
            assert re.fullmatch(r"'\.\[\w+\]'", word), line
