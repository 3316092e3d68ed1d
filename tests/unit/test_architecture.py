"""The shape of the package: who imports whom, how long things get, the map.

A number or a table that stands in the way is changed here, with the code that needs
it, and says why.
"""

from __future__ import annotations

import ast
import io
import re
import statistics
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

import minidp

PACKAGE = Path(minidp.__file__).parent
MODULES = sorted(
    str(path.relative_to(PACKAGE).with_suffix("")) for path in PACKAGE.rglob("*.py")
)

# What each module imports from minidp at run time: no less, and no more.
IMPORTS: dict[str, set[str]] = {
    "_overrides": {"config"},
    "_at_start/__init__": set(),
    "_at_start/sitecustomize": set(),
    "_children": {
        "_compare",
        "_groups",
        "_overrides",
        "_script",
        "data_parallel",
        "swapping",
    },
    "_folder": set(),
    "_phases": {
        "_children",
        "_compare",
        "_folder",
        "_groups",
        "_script",
        "swapping",
    },
    "_ranks": {"_script"},
    "config": set(),
    "errors": set(),
    "_version": set(),
    "_console": set(),
    "_generic": set(),
    "_inputs": set(),
    "_layout": {"config", "errors"},
    "_ledger": set(),
    "_kinds": {"_network"},
    "_network": set(),
    "_ops": {"native/__init__"},
    "_phase": {"errors"},
    "_saved_layout": {"_layout", "config"},
    "_schedule": {"_kinds", "_network"},
    "_streams": set(),
    "_untraced": set(),
    "_line": {"_groups"},
    "_warn": set(),
    "native/__init__": {"native/_state"},
    "native/__main__": {"_console", "errors", "native/_state"},
    "native/_cache": {"errors", "native/_recipe"},
    "native/_compile": {"errors", "native/_cache", "native/_recipe"},
    "native/_recipe": set(),
    "native/_state": {"errors", "native/_cache", "native/_compile", "native/_recipe"},
    "trace": set(),
    "_clock": set(),
    "_timeline": set(),
    "_timing": {"_untraced"},
    "_arrivals": {"_ops"},
    "_autograd": {
        "_arrivals",
        "_countdown",
        "_dist_autograd",
        "_streams",
        "_timing",
        "_untraced",
    },
    "_averaging": {
        "_bucket",
        "_collectives",
        "_comm_hook",
        "_grad_bucket",
        "_groups",
        "_waiting",
    },
    "_bucket": {"_arrivals", "_layout", "_streams", "_waiting", "errors"},
    "_collectives": {"_groups", "_layout", "_waiting"},
    "_comm_hook": {"_grad_bucket", "_waiting", "errors"},
    "_compiled_backward": {"_warn", "errors"},
    "_countdown": {"_arrivals"},
    "_dense_bucket": {"_arrivals", "_bucket", "_fit", "_layout", "_ops"},
    "_fit": {"_layout"},
    "_grad_bucket": {"_layout"},
    "_rebuild": {"_collectives", "_layout", "_saved_layout", "_watch", "config"},
    "_sparse_bucket": {"_arrivals", "_bucket", "_ops"},
    "_used_map": {"_collectives", "_groups", "_waiting", "_watch"},
    "_watch": {"_groups", "_waiting", "errors"},
    "comm_hooks": {"_comm_hook", "_grad_bucket", "_waiting"},
    "_arguments": {
        "_groups",
        "_managed",
        "_mixed_precision",
        "_overrides",
        "_saved_layout",
        "_warn",
        "config",
        "sync_batchnorm",
    },
    "_copies": {"_arguments", "_groups"},
    "_expectation": {"_arrivals", "_autograd", "_overrides", "config", "errors"},
    "_by_hand": {"_guard_words", "_ledger", "_local_steps", "_reducer", "errors"},
    "_local_steps": {"_overrides", "_reducer", "_warn", "errors"},
    "_guard_words": {"_ledger", "_overrides", "_phase", "_reducer", "errors"},
    "_guard": {
        "_autograd",
        "_by_hand",
        "_desync",
        "_guard_words",
        "_ledger",
        "_local_steps",
        "_managed",
        "_newcomers",
        "_overlap",
        "_phase",
        "_reducer",
        "_registry",
        "_skip",
        "_untraced",
        "_warn",
        "config",
        "errors",
    },
    "_join": {"_collectives", "_on_demand", "_shared_state", "_waiting"},
    "_managed": {"_layout", "_warn"},
    "_mixed_precision": {
        "_autograd",
        "_collectives",
        "_grad_bucket",
        "_inputs",
        "_waiting",
        "errors",
    },
    "_on_demand": {"_phase", "_reducer"},
    "_newcomers": {"_managed"},
    "_overlap": {"errors"},
    "_pipeline": {
        "_arrivals",
        "_averaging",
        "_bucket",
        "_dense_bucket",
        "_dist_autograd",
        "_finite",
        "_groups",
        "_labels",
        "_layout",
        "_overlap",
        "_rebuild",
        "_saved_layout",
        "_sparse_bucket",
        "_used_map",
        "_waiting",
        "_watch",
        "config",
        "trace",
    },
    "_recovery": {"_bucket", "_groups", "_pipeline", "_reducer", "_watch", "errors"},
    "_reducer": {
        "_arrivals",
        "_autograd",
        "_autotune",
        "_compiled_backward",
        "_countdown",
        "_dist_autograd",
        "_expectation",
        "_labels",
        "_layout",
        "_ledger",
        "_local_backwards",
        "_phase",
        "_pipeline",
        "_rebuild",
        "_untraced",
        "_watch",
        "config",
        "errors",
        "trace",
    },
    "_local_backwards": {
        "_autograd",
        "_compiled_backward",
        "_phase",
        "_untraced",
        "trace",
    },
    "_stopwatch": {
        "_clock",
        "_phase",
        "_timeline",
        "_untraced",
        "_version",
        "trace",
    },
    "recording": {
        "_chrome_trace",
        "_collectives",
        "_groups",
        "_picture",
        "_skew",
        "_stopwatch",
        "_terminal",
        "_timeline",
        "_watch",
        "attachment",
        "data_parallel",
        "errors",
    },
    "report": {
        "_advice",
        "_analysis",
        "_forecast",
        "_skew",
        "_timeline",
        "_typical",
    },
    "_advice": {"_analysis", "_forecast", "_overrides", "_skew", "_timeline"},
    "_analysis": {"_network", "_schedule", "_skew", "_timeline", "_typical"},
    "_terminal": set(),
    "_typical": set(),
    "_chrome_trace": {"_analysis", "_skew", "_timeline"},
    "_labels": set(),
    "_picture": {"_analysis", "_skew", "_timeline"},
    "_skew": {"_timeline"},
    "__main__": {
        "_chrome_trace",
        "_console",
        "_picture",
        "_terminal",
        "_timeline",
        "_version",
        "doctor/__init__",
        "native/__init__",
        "report",
        "run",
        "tune",
    },
    "attachment": {"_comm_hook", "_compat", "_guard", "_managed", "_untraced"},
    "_compare": set(),
    "_script": {"_console"},
    "run": {
        "_children",
        "_compare",
        "_console",
        "_groups",
        "_overrides",
        "_phases",
        "_ranks",
        "_script",
        "_terminal",
        "_timeline",
        "data_parallel",
        "recording",
        "report",
        "swapping",
    },
    "swapping": {"_compat", "_overrides", "_warn"},
    "_replicas": {"_collectives", "_groups", "_other_class", "errors"},
    "_other_class": {"_collectives", "errors"},
    "_shared_state": {
        "_desync",
        "_groups",
        "_managed",
        "_reducer",
        "_replicas",
        "config",
    },
    "sync_batchnorm": {
        "_collectives",
        "_groups",
        "_untraced",
        "_waiting",
        "_watch",
        "errors",
    },
    "_compat": {
        "_arguments",
        "_compat_reducer",
        "_compiling",
        "_expectation",
        "_generic",
        "_guard",
        "_inputs",
        "_logging_data",
        "_managed",
        "_replicas",
        "_untraced",
        "_warn",
        "comm_hooks",
        "data_parallel",
    },
    "_compat_reducer": {"_collectives", "_grad_bucket", "_guard", "_waiting"},
    "_compiling": {"_untraced", "_warn"},
    "_logging_data": {"_groups", "trace"},
    "data_parallel": {
        "_arguments",
        "_comm_hook",
        "_copies",
        "_generic",
        "_guard",
        "_inputs",
        "_join",
        "_labels",
        "_mixed_precision",
        "_on_demand",
        "_overlap",
        "_recovery",
        "_reducer",
        "_replicas",
        "_untraced",
        "_watch",
        "_watchdog",
        "config",
        "trace",
    },
    "__init__": {
        "_compat",
        "_grad_bucket",
        "_version",
        "attachment",
        "comm_hooks",
        "errors",
        "recording",
        "swapping",
        "sync_batchnorm",
        "trace",
    },
    "_cursor": set(),
    "_hang_report": {"_cursor"},
    "_post": {
        "_cursor",
        "_groups",
        "_hang_report",
        "_line",
        "_phase",
        "_reducer",
        "_skip",
        "_watch",
        "errors",
    },
    "_skip": {"_cursor", "_guard_words", "_reducer", "_waiting", "errors"},
    "_watchdog": {"_groups", "_post", "_reducer", "_watch"},
    "_groups": {"_waiting"},
    "_waiting": set(),
    "_dist_autograd": {"errors"},
    "_desync": {
        "_collectives",
        "_desync_words",
        "_groups",
        "_pipeline",
        "_waiting",
        "_warn",
        "config",
        "errors",
    },
    "_desync_words": {"errors"},
    "_finite": {"_bucket", "errors"},
    "_autotune": {
        "_clock",
        "_groups",
        "_network",
        "_rebuild",
        "_saved_layout",
        "_timeline",
        "_tuning",
        "trace",
    },
    "_tuning": {"_layout", "_schedule"},
    "tune": {
        "_autotune",
        "_children",
        "_console",
        "_ledger",
        "_overrides",
        "_ranks",
        "_script",
        "_tuning",
        "config",
        "data_parallel",
        "swapping",
    },
    "doctor/__init__": {
        "_console",
        "doctor/_checks_loader",
        "doctor/_checks_model",
        "doctor/_checks_training",
        "doctor/_consultation",
        "doctor/_examination",
        "doctor/_findings",
        "doctor/_timebox",
        "doctor/_training_log",
    },
    "doctor/__main__": {"_console", "doctor/__init__"},
    "doctor/_checks_collectives": {
        "_compat",
        "_desync",
        "doctor/_checks_ranks",
        "doctor/_findings",
    },
    "doctor/_checks_environment": {"doctor/_findings"},
    "doctor/_checks_loader": {
        "doctor/_consultation",
        "doctor/_findings",
        "doctor/_random_streams",
    },
    "doctor/_checks_model": {
        "_autograd",
        "_desync",
        "_overrides",
        "attachment",
        "doctor/_checks_ranks",
        "doctor/_consultation",
        "doctor/_findings",
        "doctor/_random_streams",
    },
    "doctor/_checks_network": {"doctor/_checks_environment", "doctor/_findings"},
    "doctor/_checks_ranks": {"_version", "doctor/_findings", "doctor/_variables"},
    "doctor/_checks_training": {
        "doctor/_checks_loader",
        "doctor/_consultation",
        "doctor/_findings",
        "doctor/_training_log",
    },
    "doctor/_consultation": {
        "_groups",
        "attachment",
        "doctor/_findings",
        "doctor/_meeting",
    },
    "doctor/_examination": {
        "doctor/_checks_collectives",
        "doctor/_checks_environment",
        "doctor/_checks_network",
        "doctor/_checks_ranks",
        "doctor/_findings",
        "doctor/_meeting",
        "doctor/_timebox",
        "doctor/_trials",
        "doctor/_variables",
    },
    "doctor/_findings": set(),
    "doctor/_meeting": {"doctor/_findings"},
    "doctor/_random_streams": {"doctor/_findings"},
    "doctor/_timebox": {"doctor/_findings"},
    "doctor/_training_log": {
        "_autograd",
        "_desync",
        "_untraced",
        "doctor/_checks_loader",
        "doctor/_consultation",
        "doctor/_random_streams",
        "doctor/_timebox",
    },
    "doctor/_trials": {
        "doctor/_checks_collectives",
        "doctor/_checks_environment",
        "doctor/_findings",
        "doctor/_meeting",
        "doctor/_timebox",
    },
    "doctor/_variables": {"_overrides", "doctor/_findings"},
    "_registry": set(),
    "_forecast": {"_analysis", "_schedule", "_timeline"},
}
TALKS_TO_OTHER_RANKS = {"_collectives", "comm_hooks"}
# Names of torch.distributed that are no collectives: a protocol, types, constants.
KNOWS_TORCH_DISTRIBUTED = {"_compat", "_groups", "_join"}
KNOWS_TORCH_DISTRIBUTED |= {"_ranks"}  # starts processes, as torchrun
# The doctor's command runs in a process of its own, and tries out what torch has there.
KNOWS_TORCH_DISTRIBUTED |= {
    "doctor/_checks_collectives",
    "doctor/_examination",
    "doctor/_trials",
}

FILE_LINES = 400
FUNCTION_CODE_LINES_P90 = 30
FUNCTION_CODE_LINES_MAX = 50
# Of the reducer: 220 before distributed autograd, 250 before it told a recording of
# backwards that average nothing.
CLASS_LINES = 252
CLASS_METHODS = 15
ARGUMENTS = 6
NESTING = 3
# What a reader of a backward's life reads; grew by comm hooks, uneven inputs, delayed
# and skipped buckets, then by what is watched across ranks, then by gradients that live
# in contexts of distributed autograd, by groups that are written in Python, and by what
# tells mistakes apart (2400, 2700, 2900 before). Issue House counts anew.
CORE_LINES = 3150
CORE = {
    "errors",
    "config",
    "_layout",
    "_ops",
    "_collectives",
    "_waiting",
    "_bucket",
    "_dense_bucket",
    "_sparse_bucket",
    "_autograd",
    "_reducer",
    "_on_demand",
    "_replicas",
    "data_parallel",
}

# The constructor of 20 arguments, each of which the class's docstring explains.
DICTATED_BY_TORCH = {"data_parallel.DataParallel"}
# Facades of torch's private names are as wide as what they stand for.
FACADES = {"_compat.DataParallel", "_compat_reducer.ReducerNames"}
MANY_ARGUMENTS = {
    "data_parallel.DataParallel.__init__": "a drop-in for torch's, which takes 20",
}
LONG_FUNCTIONS = {
    "data_parallel.DataParallel.__init__": "half of it is torch's signature",
}

Function = ast.FunctionDef | ast.AsyncFunctionDef


# ----------------------------------------------------------------- reading the source


@dataclass(frozen=True)
class Source:
    name: str
    text: str
    tree: ast.Module
    code_lines: frozenset[int]  # lines with a token that is no comment or docstring

    def functions(self) -> Iterator[tuple[str, Function]]:
        yield from _functions(self.tree, self.name)

    def classes(self) -> Iterator[ast.ClassDef]:
        return (node for node in ast.walk(self.tree) if isinstance(node, ast.ClassDef))

    def count_code(self, node: Function) -> int:
        return sum(node.lineno <= n <= node.end_lineno for n in self.code_lines)


@cache
def read(module: str) -> Source:
    text = (PACKAGE / f"{module}.py").read_text()
    tree = ast.parse(text)
    skipped = {
        tokenize.COMMENT,
        tokenize.NL,
        tokenize.NEWLINE,
        tokenize.INDENT,
        tokenize.DEDENT,
        tokenize.ENDMARKER,
    }
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in skipped:
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | Function) and ast.get_docstring(
            node
        ):
            words = node.body[0]
            lines -= set(range(words.lineno, words.end_lineno + 1))
    return Source(module, text, tree, frozenset(lines))


def _functions(node: ast.AST, prefix: str) -> Iterator[tuple[str, Function]]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, Function):
            name = f"{prefix}.{child.name}"
            yield name, child
            yield from _functions(child, name)
        elif isinstance(child, ast.ClassDef):
            yield from _functions(child, f"{prefix}.{child.name}")
        else:
            yield from _functions(child, prefix)


def every_function() -> list[tuple[str, Function, Source]]:
    return [
        (name, node, read(module))
        for module in MODULES
        for name, node in read(module).functions()
    ]


def is_for_types(node: ast.AST) -> bool:
    return (
        isinstance(node, ast.If)
        and isinstance(node.test, ast.Name)
        and node.test.id == "TYPE_CHECKING"
    )


def runtime_nodes(node: ast.AST) -> Iterator[ast.AST]:
    """All nodes, except inside ``if TYPE_CHECKING:``."""
    for child in ast.iter_child_nodes(node):
        if not is_for_types(child):
            yield child
            yield from runtime_nodes(child)


def type_nodes(tree: ast.Module) -> Iterator[ast.AST]:
    for node in ast.walk(tree):
        if is_for_types(node):
            yield from ast.walk(node)


def in_package(name: str) -> str:
    """The module that an import of ``name`` runs."""
    return f"{name}/__init__" if (PACKAGE / name).is_dir() else name


def imported_here(nodes: Iterator[ast.AST], module: str = "") -> set[str]:
    """Modules of minidp that import statements among ``nodes`` of ``module`` name."""
    found = set()
    for node in nodes:
        if isinstance(node, ast.ImportFrom) and node.level:
            folder = "/".join([*module.split("/")[: -node.level], ""]).lstrip("/")
            if node.module:
                found.add(in_package(folder + node.module.split(".")[0]))
            else:  # from . import _ops
                found.update(in_package(folder + alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module.startswith("minidp"):
            # From inside a folder, ruff wants what is above it by its full name.
            prefix = "minidp." if "/" in module else ""
            found.add(in_package(node.module.removeprefix(prefix)))
        elif isinstance(node, ast.Import):
            found.update(a.name for a in node.names if a.name.startswith("minidp"))
    return found


def mapped_layers() -> dict[str, int]:
    """Module -> layer, from the map in the package's docstring."""
    layers: dict[str, int] = {}
    level = -1
    for line in minidp.__doc__.splitlines():
        found = re.match(r"    (?:L(\d)  |    )(\w+/?)  +\S", line)
        if found:
            level = int(found[1]) if found[1] else level
            layers[found[2]] = level
    return layers


def in_map(module: str) -> str:
    """The map's name for a module: a folder is one line."""
    folder, slash, _ = module.partition("/")
    return folder + slash


# ------------------------------------------------------------------------ the map


def test_map_names_exactly_the_files_that_exist():
    names = {in_map(m) for m in MODULES if m != "__init__"}
    assert sorted(mapped_layers()) == sorted(names)


def test_map_lists_layers_from_top_to_bottom():
    levels = list(mapped_layers().values())
    assert levels == sorted(levels, reverse=True)
    assert set(levels) == {0, 1, 2, 3, 4, 5}


# ---------------------------------------------------------------- who imports whom


def test_table_has_a_row_for_every_module():
    assert sorted(IMPORTS) == MODULES


@pytest.mark.parametrize("module", MODULES)
def test_imports_are_those_of_the_table(module):
    assert imported_here(runtime_nodes(read(module).tree), module) == IMPORTS.get(
        module
    )


@pytest.mark.parametrize("module", [m for m in MODULES if m != "__init__"])
def test_imports_point_down_or_aside(module):
    layers = mapped_layers()
    tree = read(module).tree
    imported = imported_here(runtime_nodes(tree), module)
    imported |= imported_here(type_nodes(tree), module)
    layer = layers[in_map(module)]
    assert [name for name in imported if layers[in_map(name)] > layer] == []


def test_imports_have_no_cycle():
    done: set[str] = set()
    left = {m: imported_here(runtime_nodes(read(m).tree), m) for m in MODULES}
    while left:
        free = {module for module, needs in left.items() if needs <= done}
        assert free, f"a cycle among {sorted(left)}"
        done |= free
        left = {m: needs for m, needs in left.items() if m not in free}


@pytest.mark.parametrize("module", MODULES)
def test_only_collectives_touch_torch_distributed(module):
    touched = set()
    for node in runtime_nodes(read(module).tree):
        if isinstance(node, ast.Import):
            touched.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level:
            touched.update(f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Attribute):
            touched.add(ast.unparse(node))
    touched = {name for name in touched if name.startswith("torch.distributed")}
    allowed = TALKS_TO_OTHER_RANKS | KNOWS_TORCH_DISTRIBUTED
    assert bool(touched) == (module in allowed), touched


@pytest.mark.parametrize("module", MODULES)
def test_nothing_is_imported_inside_functions(module):
    late = [
        name
        for name, node in read(module).functions()
        for inner in ast.walk(node)
        if isinstance(inner, ast.Import | ast.ImportFrom)
    ]
    assert late == []


def test_public_names_are_sorted_and_exist():
    assert minidp.__all__ == sorted(minidp.__all__)
    assert [name for name in minidp.__all__ if not hasattr(minidp, name)] == []


# ---------------------------------------------------------------------- budgets


@pytest.mark.parametrize("module", MODULES)
def test_files_are_short(module):
    assert len(read(module).text.splitlines()) <= FILE_LINES


def test_core_is_readable_in_one_sitting():
    lines = {m: len(read(m).text.splitlines()) for m in MODULES if m in CORE}
    assert sum(lines.values()) <= CORE_LINES, lines


def test_functions_are_short():
    counts = {name: src.count_code(node) for name, node, src in every_function()}
    for name in LONG_FUNCTIONS:
        assert counts.pop(name) > FUNCTION_CODE_LINES_MAX, f"{name}: not exempt now"
    too_long = {n: c for n, c in counts.items() if c > FUNCTION_CODE_LINES_MAX}
    assert too_long == {}
    assert statistics.quantiles(counts.values(), n=10)[-1] <= FUNCTION_CODE_LINES_P90


def _lines_of_our_own(module: str, c: ast.ClassDef) -> int:
    """Lines of a class, less the signature and arguments that torch dictates."""
    length = c.end_lineno - c.lineno + 1
    if f"{module}.{c.name}" in DICTATED_BY_TORCH:
        init = next(f for f in c.body if isinstance(f, Function))
        length -= init.end_lineno - init.lineno + 1
        length -= len(ast.get_docstring(c).splitlines())
    return length


@pytest.mark.parametrize("module", MODULES)
def test_classes_are_short(module):
    classes = [c for c in read(module).classes() if f"{module}.{c.name}" not in FACADES]
    lengths = {c.name: _lines_of_our_own(module, c) for c in classes}
    assert {n: length for n, length in lengths.items() if length > CLASS_LINES} == {}


@pytest.mark.parametrize("module", MODULES)
def test_classes_have_few_methods(module):
    counts = {
        c.name: len({f.name for f in c.body if isinstance(f, Function)})
        for c in read(module).classes()
        if f"{module}.{c.name}" not in FACADES
    }
    assert {n: count for n, count in counts.items() if count > CLASS_METHODS} == {}


def test_functions_take_few_arguments():
    counts = {}
    for name, node, _ in every_function():
        names = [a.arg for a in (*node.args.posonlyargs, *node.args.args)]
        names += [a.arg for a in node.args.kwonlyargs]
        counts[name] = len([n for n in names if n not in ("self", "cls")])
    for name in MANY_ARGUMENTS:
        assert counts.pop(name) > ARGUMENTS, f"{name}: not exempt now"
    assert {name: count for name, count in counts.items() if count > ARGUMENTS} == {}


def test_statements_are_not_nested_deeply():
    depths = {name: _depth(node) for name, node, _ in every_function()}
    assert {name: depth for name, depth in depths.items() if depth > NESTING} == {}


def _depth(node: ast.AST) -> int:
    """Blocks inside blocks; an ``elif`` stays on the level of its ``if``."""
    deepest = 0
    for child in ast.iter_child_nodes(node):
        if isinstance(child, Function | ast.ClassDef | ast.Lambda):
            continue  # counted by itself
        is_block = isinstance(
            child, ast.If | ast.For | ast.While | ast.With | ast.Try | ast.Match
        )
        is_elif = (
            isinstance(node, ast.If)
            and isinstance(child, ast.If)
            and child in node.orelse
            and len(node.orelse) == 1
        )
        deepest = max(deepest, _depth(child) + (is_block and not is_elif))
    return deepest


def test_everything_is_annotated():
    bare = []
    for name, node, _ in every_function():
        arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
        arguments += [a for a in (node.args.vararg, node.args.kwarg) if a is not None]
        bare += [
            f"{name}: {a.arg}"
            for a in arguments
            if a.annotation is None and a.arg not in ("self", "cls")
        ]
        if node.returns is None:
            bare.append(f"{name}: return")
    assert bare == []


def test_measures_see_what_they_should():
    text = "def f():\n    '''doc'''\n    if a:\n        for b in c:\n            d()\n"
    tree = ast.parse(text + "    elif e:\n        with g:\n            pass\n")
    assert _depth(tree.body[0]) == 2
    assert [name for name, _ in _functions(tree, "m")] == ["m.f"]
    typed = ast.parse("if TYPE_CHECKING:\n    from ._x import y\nfrom . import _z")
    assert imported_here(runtime_nodes(typed)) == {"_z"}
    assert imported_here(type_nodes(typed)) == {"_x"}
