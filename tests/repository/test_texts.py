"""Texts that tell what the code does: examples that run, tables of classes."""

import ast
import re
from pathlib import Path

TESTS = Path(__file__).parents[1]
PACKAGE = TESTS.parent / "minidp"


def test_the_example_of_a_simulated_device_is_the_one_that_runs():
    source = (TESTS / "accelerator" / "test_example.py").read_text()
    code = source.split('"""', 2)[2].strip()
    assert f"```python\n{code}\n```" in (TESTS / "README.md").read_text()


def classes():
    """Yield all classes of the package, with the room that each is in."""
    for file in PACKAGE.rglob("*.py"):
        room = file.relative_to(PACKAGE).parts[0]
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ClassDef):
                yield room, node


def methods(node):
    return [each.name for each in node.body if isinstance(each, ast.FunctionDef)]


def test_the_table_of_observers_has_all_of_them_and_what_they_hear():
    text = ast.get_docstring(ast.parse((PACKAGE / "core/observer.py").read_text()))
    _, head, body, *_ = re.split(r"^=[= ]+$\n?", text, flags=re.MULTILINE)
    assert head.split() == ["class", "room", "methods"]
    told = {}
    for row in re.sub(r"\n {8,}", " ", body).splitlines():
        names, rooms, calls = re.split(r" {2,}", row)
        for name, room in zip(names.split(", "), rooms.split(", "), strict=True):
            told[name] = room, calls
    (observer,) = (node for _, node in classes() if node.name == "Observer")
    found = {
        node.name: (room, {*methods(node)} & {*methods(observer)})
        for room, node in classes()
        if "Observer" in map(ast.unparse, node.bases)
    }
    assert told.keys() == found.keys()
    for name, (room, heard) in found.items():
        assert told[name][0] == room, name
        assert {*re.findall(r"\w+", told[name][1])} & {*methods(observer)} == heard
