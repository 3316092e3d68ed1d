"""Take one call that orders streams or keeps memory out of minidp, while it runs.

Such a call changes no number where nothing overtakes anything, so its loss shows only
as a race. Therefore `test_removal.py` removes each of them in turn, and something has
to notice. The calls are found in the syntax tree, so that one that is added is tried,
too.
"""

from __future__ import annotations

import ast
import contextlib
import gc
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from types import CodeType, FunctionType

import minidp

PACKAGE = Path(minidp.__file__).parent
# The last names of calls that let somebody wait, ...
WAITS = {"wait", "wait_for", "wait_for_message", "wait_stream", "wait_event"}
WAITS |= {"hold_back", "synchronize", "let_finish"}
# ... that keep memory, ...
KEEPS = {"use_here", "use_buffer", "record_stream", "_record"}
# ... that note which stream has done something, and let go of what it is done with, ...
NOTES = {"gather", "made_buffer", "_note_waited", "waited_for"}
# ... and that return a context, in which a stream or a device is selected.
SELECTS = {"launching", "on_stream", "on_side_stream", "selected"}


class NothingRemoved(Exception):
    """No function has the call, for example because its module was not imported."""


@dataclass(frozen=True, order=True)
class Site:
    """A call that can be removed.

    Attributes:
        path: The file, from the package on.
        function: The functions and classes around it, from outside to inside.
        text: The call, without its arguments.
        number: Which one it is, from 1, if the function has several of this text.
    """

    path: str
    function: str
    text: str
    number: int = 1

    def __str__(self) -> str:
        which = "" if self.number == 1 else f" ({self.number})"
        return f"{self.path} {self.function} {self.text}{which}"


def sites() -> list[Site]:
    """Return all calls that can be removed, in the order of the source."""
    paths = sorted(PACKAGE.rglob("*.py"))
    return [site for path in paths for site in _calls_in(path, _tree(path))]


def _tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def _calls_in(path: Path, tree: ast.AST) -> dict[Site, ast.Call]:
    place = str(path.relative_to(PACKAGE))
    found: dict[Site, ast.Call] = {}
    for function, call in _removable(tree, ()):
        site = Site(place, ".".join(function), ast.unparse(call.func))
        while site in found:
            site = replace(site, number=site.number + 1)
        found[site] = call
    return found


def _removable(
    node: ast.AST, around: tuple[str, ...]
) -> Iterator[tuple[tuple[str, ...], ast.Call]]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.ClassDef):
            yield from _removable(child, (*around, child.name))
            continue
        calls: list[ast.expr] = []
        if isinstance(child, ast.Expr | ast.Return | ast.Assign | ast.AnnAssign):
            calls = [child.value] if child.value else []
        elif isinstance(child, ast.AugAssign):  # several events at once
            calls = [child.value]
        elif isinstance(child, ast.With):
            calls = [item.context_expr for item in child.items]
        for call in calls:
            if isinstance(call, ast.Call) and _orders(
                call, isinstance(child, ast.With)
            ):
                yield around, call
        yield from _removable(child, around)


def _orders(call: ast.Call, is_context: bool) -> bool:
    whose, _, name = ast.unparse(call.func).rpartition(".")
    if is_context:
        return name in SELECTS
    if name in ("record", "query", "append", "add", "update", "note"):
        # Of events and of the streams that have written a bucket.
        return whose.endswith(("event", "moments")) or "written_on" in whose
    if name == "gather":
        return whose.endswith("streams")
    if name == "_record":
        return not whose
    if name == "map":
        return ast.unparse(call.args[0]) == "After"
    return name in WAITS | KEEPS | NOTES


@contextlib.contextmanager
def removed(site: Site) -> Iterator[None]:
    """Let minidp's functions run without a call, for the length of the block.

    The arguments of the call are still computed, and its value is a context that does
    nothing, which serves as any other value, too; in the place of events it is empty.

    Raises:
        NothingRemoved: Nothing would be another.
    """
    path = PACKAGE / site.path
    tree = _tree(path)
    call = _calls_in(path, tree)[site]
    value = "()" if site.text == "map" else "__import__('contextlib').nullcontext()"
    nothing = f"lambda *_, **__: {value}"
    call.args = [call.func, *call.args]
    call.func = ast.parse(nothing, mode="eval").body
    code = compile(ast.fix_missing_locations(tree), str(path), "exec")
    without = {_key(each): each for each in _all_code(code)}
    gc.unfreeze()  # ranks freeze what a job leaves behind, and hide it so
    changed: list[tuple[FunctionType, CodeType]] = []
    for function in [each for each in gc.get_objects() if type(each) is FunctionType]:
        if function.__code__.co_filename == str(path):
            new = without[_key(function.__code__)]
            if new != function.__code__:
                changed.append((function, function.__code__))
                function.__code__ = new
    if not changed:
        raise NothingRemoved(str(site))
    try:
        yield
    finally:
        for function, before in changed:
            function.__code__ = before


def _all_code(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _all_code(constant)


def _key(code: CodeType) -> tuple[str, int]:
    return code.co_name, code.co_firstlineno
