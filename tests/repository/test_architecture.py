"""The structure of the package: who imports whom, and how deeply functions nest.

A table that stands in the way is changed here, in the commit of the code that needs the
change, and says why. Nothing here limits how long a file or a class is: size is judged
when the design is. Ruff keeps functions simple (`pyproject.toml`).
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest
from torch.nn.parallel import DistributedDataParallel

import minidp
from minidp import swapping

PACKAGE = Path(minidp.__file__).parent
MODULES = sorted(
    str(path.relative_to(PACKAGE).with_suffix("")) for path in PACKAGE.rglob("*.py")
)

# Rooms and public modules, from the ground up: what each may import from minidp.
# A room is a folder; others import from its door (`__init__.py`), not from its files.
# Everybody may import these.
TOP = {"accelerator", "errors", "config", "console", "trace", "world", "_version"}
ROOMS: dict[str, set[str]] = {
    "errors": set(),
    "console": {"errors"},
    "_version": set(),
    "accelerator": set(),
    "randomness": {"accelerator"},
    "trace": set(),
    "world": set(),
    "config": set(),
    "native": {"errors", "console"},
    "layout": {"config", "errors"},
    "costmodel": {"layout"},
    "comm": {"layout"} | TOP,
    "hooks": {"comm", "layout"} | TOP,
    "shared_memory": {"comm", "native"} | TOP,
    "comm_hooks": {"accelerator", "comm", "hooks"},
    "core": {"comm", "hooks", "shared_memory", "layout", "native"} | TOP,
    "replica": {"core", "hooks", "comm", "layout"} | TOP,
    "sync_batchnorm": {"core", "comm", "errors"},
    "logical": {"replica", "core", "comm", "hooks", "shared_memory", "layout"}
    | {"native", "randomness"}
    | TOP,
    "guard": {"replica", "core", "comm"} | TOP,
    "sharded": {"guard", "logical", "replica", "core", "comm", "hooks"}
    | {"shared_memory", "layout"}
    | TOP,
    "hang": {"core", "comm"} | TOP,
    "overlap": {"core", "costmodel", "layout"} | TOP,
    "autotune": {"overlap", "core", "comm", "costmodel", "layout"} | TOP,
    "torch_compat": {"guard", "replica", "core", "comm", "hooks", "comm_hooks"} | TOP,
    "data_parallel": {"torch_compat", "autotune", "comm", "core", "guard", "hang"}
    | {"hooks", "shared_memory", "layout", "replica", "sync_batchnorm", "logical"}
    | {"sharded"}
    | TOP,
    "torchft": {"data_parallel", "core", "comm", "shared_memory", "layout", "logical"}
    | TOP,
    "attachment": {"data_parallel", "guard", "replica", "core", "hooks", "errors"},
    "swapping": {"data_parallel", "config", "console"},
    "report": {"overlap", "console"},
    "recording": {"attachment", "data_parallel", "overlap", "core", "comm"} | TOP,
    "speed": {"recording", "attachment", "data_parallel", "core", "trace"},
    "run": {"recording", "swapping", "data_parallel", "overlap", "replica", "comm"}
    | TOP,
    "tune": {"run", "swapping", "data_parallel", "autotune"} | TOP,
    "doctor": {"attachment", "data_parallel", "replica", "core", "comm"}
    | {"shared_memory", "randomness"}
    | TOP,
    "__main__": {"doctor", "native", "report", "run", "tune"} | TOP,
    "__init__": {
        "data_parallel",
        "attachment",
        "hooks",
        "comm_hooks",
        "doctor",
        "errors",
    }
    | {
        "randomness",
        "recording",
        "report",
        "speed",
        "swapping",
        "sync_batchnorm",
        "trace",
        "_version",
    },
}
# Modules that call torch.distributed, and those that only know its names.
TALKS_TO_OTHER_RANKS = {"comm/collectives", "comm_hooks"}
KNOWS_TORCH_DISTRIBUTED = {
    "comm/backends",
    "comm/groups",
    "comm/replacements",
    "comm/side_groups",
    "comm/stores",
    "data_parallel/join",
    "data_parallel/parts",
    "data_parallel/wrapper",  # torch's Joinable
    "sharded/distributed_checkpoint",  # DTensor, as a form of rows
    "torch_compat/names",
    "torchft/quorum",  # what to reduce by
    "run/ranks",  # starts processes, as torchrun
    # The doctor's command runs in a process of its own, and tries what torch has there.
    "doctor/checks/collectives",
    "doctor/command",
}

NESTING = 3
Function = ast.FunctionDef | ast.AsyncFunctionDef


# ----------------------------------------------------------------- reading the source


@dataclass(frozen=True)
class Source:
    name: str
    text: str
    tree: ast.Module

    def functions(self) -> Iterator[tuple[str, Function]]:
        yield from _functions(self.tree, self.name)

    def classes(self) -> Iterator[ast.ClassDef]:
        return (node for node in ast.walk(self.tree) if isinstance(node, ast.ClassDef))


@cache
def read(module: str) -> Source:
    text = (PACKAGE / f"{module}.py").read_text()
    return Source(module, text, ast.parse(text))


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


def room_of(module: str) -> str:
    return module.split("/")[0]


def imported_here(nodes: Iterator[ast.AST], module: str = "") -> set[str]:
    """What import statements of ``module`` name: "core", "core/reducer", "errors"."""
    found: set[str] = set()
    for node in nodes:
        if isinstance(node, ast.ImportFrom) and node.level:
            folder = module.split("/")[: -node.level]
        elif isinstance(node, ast.ImportFrom) and node.module.split(".")[0] == "minidp":
            folder = []
        else:
            if isinstance(node, ast.Import):
                found.update(a.name for a in node.names if a.name.startswith("minidp"))
            continue
        path = [*folder, *(node.module or "").split(".")]
        path = [part for part in path if part and part != "minidp"]
        if path == folder or not path:  # from . import kernels
            found.update("/".join([*path, alias.name]) for alias in node.names)
        else:
            found.add("/".join(path))
    return found


def imports_of(module: str) -> set[str]:
    tree = read(module).tree
    found = imported_here(runtime_nodes(tree), module)
    return found | imported_here(type_nodes(tree), module)


# ------------------------------------------------------------------------ the rooms


def test_table_has_a_row_for_every_room():
    assert sorted(ROOMS) == sorted({room_of(module) for module in MODULES})


def test_the_map_in_the_package_lists_all_rooms_from_top_to_bottom():
    lines = minidp.__doc__.partition("These are its parts,")[2].splitlines()
    found = [re.match(r"    (\w+)/?  +\S", line) for line in lines]
    listed = [match[1] for match in found if match]
    assert sorted(listed) == sorted(set(ROOMS) - {"__init__", "__main__", "_version"})
    for number, room in enumerate(listed):
        assert ROOMS[room] - {"_version"} <= set(listed[number + 1 :]), room


def test_no_room_imports_one_above():
    """The table is in order: a row names rows before it."""
    done: set[str] = set()
    for room, below in ROOMS.items():
        assert below <= done, f"{room}: {below - done}"
        done.add(room)


@pytest.mark.parametrize("module", MODULES)
def test_imports_are_those_of_the_table(module):
    room = room_of(module)
    others = {name for name in imports_of(module) if room_of(name) != room}
    if module != room:  # in a room: others are entered by the door
        assert {name for name in others if "/" in name} == set()
    assert {room_of(name) for name in others} <= ROOMS[room]


def test_table_allows_nothing_that_nobody_uses():
    used = {room: set() for room in ROOMS}
    for module in MODULES:
        used[room_of(module)] |= {room_of(name) for name in imports_of(module)}
    unused = {r: allowed - used[r] - TOP for r, allowed in ROOMS.items()}
    assert {room: names for room, names in unused.items() if names} == {}


# Rooms whose door lists the files in the order in which they may know each other.
IN_READING_ORDER = ["comm", "core"]


@pytest.mark.parametrize("room", IN_READING_ORDER)
def test_a_file_imports_only_from_files_above_it_in_the_list_of_the_door(room):
    words = ast.get_docstring(read(f"{room}/__init__").tree)
    order = re.findall(r"^    (\w+)  +\S", words, re.MULTILINE)
    files = {m.split("/")[1] for m in MODULES if room_of(m) == room} - {"__init__"}
    assert sorted(order) == sorted(files)
    for number, name in enumerate(order):  # what is imported for types, too
        inside = {n for n in imports_of(f"{room}/{name}") if room_of(n) == room}
        below = {f"{room}/{later}" for later in order[number:]}
        assert inside & below == set(), name


def test_files_have_no_cycle():
    done: set[str] = set()
    left = {}
    for module in MODULES:
        names = imported_here(runtime_nodes(read(module).tree), module)
        inside = {name for name in names if room_of(name) == room_of(module)}
        left[module] = {n for n in inside if n in MODULES and n != module}
    while left:
        free = {module for module, needs in left.items() if needs <= done}
        assert free, f"a cycle among {sorted(left)}"
        done |= free
        left = {m: needs for m, needs in left.items() if m not in free}


@pytest.mark.parametrize("room", [r for r in ROOMS if (PACKAGE / r).is_dir()])
def test_a_door_says_what_the_room_is_for(room):
    door = read(f"{room}/__init__")
    words = ast.get_docstring(door.tree)
    files = {m.split("/")[1] for m in MODULES if room_of(m) == room} - {"__init__"}
    files -= {"__main__", "at_start"}
    assert {name for name in files if not re.search(rf"\b{name}\b", words)} == set()


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


def test_public_names_exist():
    assert len(set(minidp.__all__)) == len(minidp.__all__)
    assert [name for name in minidp.__all__ if not hasattr(minidp, name)] == []


# ------------------------------------------------------------------------ the devices

DEVICE_TYPES = {"cuda", "xpu", "hpu", "npu", "mps", "mtia", "is_cuda", "is_xpu"}
OF_STREAMS = {
    *("Stream", "ExternalStream", "current_stream", "default_stream", "set_stream"),
    *("wait_stream", "wait_event", "record_event", "record_stream", "elapsed_time"),
    *("get_device_module", "_accelerator_getStream", "synchronize", "is_pinned"),
}
BUILDS_KERNELS = {"native/binary"}  # with nvcc, if torch is for CUDA


def names_of_devices(tree: ast.Module) -> set[str]:
    """What names a type of device, or does something with streams or pinned memory."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            found |= DEVICE_TYPES & {node.value.partition(":")[0]}
        elif isinstance(node, ast.Attribute):
            found |= (DEVICE_TYPES | OF_STREAMS) & {node.attr}
            is_event = node.attr == "Event" and ast.unparse(node) != "threading.Event"
            found |= {"Event"} if is_event else set()
        elif isinstance(node, ast.keyword):
            found |= {"pin_memory"} & {node.arg}
    return found


@pytest.mark.parametrize("module", sorted({*MODULES} - {"accelerator"}))
def test_only_accelerator_knows_devices_other_than_the_cpu(module):
    """So that whatever device torch has is served, and no order of streams is missed.

    Nobody looks for a missing wait in a file that is about something else.
    """
    found = names_of_devices(read(module).tree)
    assert found <= (DEVICE_TYPES if module in BUILDS_KERNELS else set())


def test_names_of_devices_are_seen():
    text = "x.is_cuda; torch.Event(); f(pin_memory=1); d == 'cuda:0'; threading.Event()"
    assert names_of_devices(ast.parse(text)) == {
        *("is_cuda", "Event", "pin_memory", "cuda")
    }


MAKE_TENSORS = {
    *("arange", "as_tensor", "asarray", "empty", "empty_strided", "eye", "full"),
    *("linspace", "logspace", "normal", "ones", "rand", "randint", "randn", "randperm"),
    *("scalar_tensor", "tensor", "zeros"),
}


def tensors_without_a_device(tree: ast.Module) -> list[str]:
    """The calls that make a tensor wherever the user's default device happens to be."""
    return [
        ast.unparse(node)
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and ast.unparse(node.func.value) == "torch"
        and node.func.attr in MAKE_TENSORS
        and not any(each.arg in ("device", None) for each in node.keywords)
    ]


@pytest.mark.parametrize("module", sorted(MODULES))
def test_every_new_tensor_says_on_which_device_it_is(module):
    """A user's ``with torch.device("meta")`` must not decide that."""
    assert tensors_without_a_device(read(module).tree) == []


def test_tensors_without_a_device_are_seen():
    found = ast.parse(
        "torch.zeros(1); torch.ones(2, device=d); torch.sum(x); torch.full(1, **a)"
    )
    assert tensors_without_a_device(found) == ["torch.zeros(1)"]


def test_csrc_asks_for_streams_of_any_device_and_has_kernels_in_one_folder():
    csrc = PACKAGE.parent / "csrc"
    for path in (p for p in csrc.rglob("*") if p.suffix in (".cpp", ".h")):
        text = path.read_text()
        if path.parent.name != "cuda":
            assert "USE_CUDA" not in text
            assert "c10/cuda" not in text, path.name
    assert "VirtualGuardImpl" in (csrc / "slots.cpp").read_text()


# ---------------------------------------------------------------------- the classes


def test_data_parallel_is_one_class():
    """After it comes what comes after torch's: ``super(DDP, self)`` means nn.Module.

    OfModule makes ``DataParallel[Net]`` legal, and has no method. The name that `swap`
    puts in the place of torch's class has the same body, so no method may refer to its
    class, as ``super()`` does.
    """
    for kind in (minidp.DataParallel, swapping.DistributedDataParallel):
        *bases, of_module, last = kind.__mro__[1:]
        assert [*bases, last] == list(DistributedDataParallel.__mro__[1:])
        assert of_module.__name__ == "OfModule"
        assert {name for name in vars(of_module) if name[0] != "_"} == set()
    body = vars(minidp.DataParallel)
    functions = [
        f
        for value in body.values()
        for f in (value, getattr(value, "fget", None), getattr(value, "fset", None))
    ]
    codes = [f.__code__ for f in functions if hasattr(f, "__code__")]
    assert len(codes) > 40
    assert [c.co_name for c in codes if "__class__" in c.co_freevars] == []
    twins = vars(swapping.DistributedDataParallel)
    own = {"__init__", "__module__", "__doc__", "__dict__", "__weakref__", "_abc_impl"}
    own |= {"__abstractmethods__", "__subclasshook__", "__qualname__"}
    assert {
        n for n in body.keys() | twins.keys() if body.get(n) is not twins.get(n)
    } <= own


def test_statements_are_not_nested_deeply():
    functions = (each for m in MODULES for each in read(m).functions())
    depths = {name: _depth(node) for name, node in functions}
    assert {name: depth for name, depth in depths.items() if depth > NESTING} == {}


def _depth(node: ast.AST) -> int:
    """Blocks inside blocks; an ``elif`` stays on the level of its ``if``."""
    deepest = 0
    for child in ast.iter_child_nodes(node):
        if isinstance(child, Function | ast.ClassDef | ast.Lambda):
            continue  # counted by itself
        blocks = ast.If | ast.For | ast.While | ast.With | ast.Try | ast.Match
        is_block = isinstance(child, blocks)
        is_if = isinstance(node, ast.If) and isinstance(child, ast.If)
        is_elif = is_if and node.orelse == [child]
        deepest = max(deepest, _depth(child) + (is_block and not is_elif))
    return deepest


def test_measures_see_what_they_should():
    text = "def f():\n    '''doc'''\n    if a:\n        for b in c:\n            d()\n"
    tree = ast.parse(text + "    elif e:\n        with g:\n            pass\n")
    assert _depth(tree.body[0]) == 2
    assert [name for name, _ in _functions(tree, "m")] == ["m.f"]
    typed = ast.parse("if TYPE_CHECKING:\n    from .x import y\nfrom . import z")
    assert imported_here(runtime_nodes(typed), "core/a") == {"core/z"}
    assert imported_here(type_nodes(typed), "core/a") == {"core/x"}
    others = ast.parse("from minidp.comm import all_reduce\nfrom minidp import report")
    assert imported_here(runtime_nodes(others), "core/a") == {"comm", "report"}
