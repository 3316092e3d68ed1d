"""What every example promises a reader; that they work is shown by running them."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[3] / "examples"
SCRIPTS = sorted(EXAMPLES.glob("*.py"))
README = (EXAMPLES / "README.md").read_text()
MAX_LINES = 120  # less than
# Older than the limit: one compares two implementations, the other survives crashes.
# The third starts, kills and watches a job.
LONGER = {"train_digits.py", "elastic_checkpoint.py", "fault_tolerant.py"}
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
    ends = "manager.shutdown(" if script.name == "fault_tolerant.py" else "dist.destroy"
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
