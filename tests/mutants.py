"""Break the gradients on purpose, one way at a time, and see that the fast tests fail.

    python -m tests.mutants              all mutants: a survivor makes the status 1
    python -m tests.mutants --list       their names
    python -m tests.mutants "sum becomes maximum"   only this one

Each mutant replaces one piece of code in a copy of the checkout and runs the tests of
the fast tier on the copy until one fails. In Python the piece is an expression or a
statement, which is looked for in the syntax trees of all files of `minidp/`, so that
code may move and be formatted anew. In C++ it is a text. A mutant whose piece is not
found exactly once is out of date, and that is an error, too, which
`tests/repository/test_mutants.py` finds in each run.
"""

from __future__ import annotations

import argparse
import ast
import functools
import os
import shutil
import subprocess
import sys
import tempfile
import textwrap
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.noxfile import FAST, NATIVE_FAST, ROOT, SOON_OVER, WORKERS

ALONE = ("--numprocesses", "0")
COPIED = ("minidp", "csrc", "tests", "benchmarks", "examples")
COPIED_FILES = ("pyproject.toml", "README.md")


@dataclass(frozen=True)
class Mutant:
    """One way to break gradients."""

    name: str
    old: str  # an expression or a statement of Python, or a text of C++
    new: str  # what stands in its place
    within: str = ""  # the Python function that has it, if others have it, too
    first: str = "gradients/test_pairs_of_features.py"  # the tests that likely fail
    native: bool = False  # in C++


MUTANTS = [
    Mutant(
        "all-reduce does not happen",
        "group.allreduce([tensor], options)",
        "_NothingToDo()",
    ),
    Mutant(
        "sum becomes maximum",
        "dist.ReduceOp(dist.ReduceOp.SUM)",
        "dist.ReduceOp(dist.ReduceOp.MAX)",
    ),
    Mutant(
        "sum instead of average",
        "self.factors_of(self.divisor if hook is None else 1)",
        "self.factors_of(1)",
    ),
    Mutant(
        "averages over items are not multiplied by the ranks",
        "self.divisor / sum([row[_COUNT] for row in rows])",
        "1 / sum([row[_COUNT] for row in rows])",
        first="items/test_special_cases.py",
    ),
    Mutant(
        "sums that go to the gradients are not divided by items",
        "tiles_.scale = scale;",
        "tiles_.scale = 1;",
        native=True,
        first="native/test_flatten.py",
    ),
    Mutant(
        "a rank that counts some of its micro-batches is not noticed",
        "flags += FEWER",
        "pass",
        first="items/test_special_cases.py",
    ),
    Mutant(
        "a backward on old averages is not noticed",
        "grad.detach().any()",
        "torch.tensor(False)",
        first="items",
    ),
    Mutant(
        "a joined rank forgets what it counted",
        "self._step, self.holds_averages = mine",
        "pass",
        first="items",
    ),
    Mutant(
        "C++: gradients are copied out undivided by items",
        "copy_rows(rows, values_.scalar_type(), scale);",
        "copy_rows(rows, values_.scalar_type(), 1.0);",
        native=True,
        first="native/test_flatten.py",
    ),
    Mutant(
        "batched copies are not divided",
        "kernels.divide(self.payload, factors.post)",
        "None",
    ),
    Mutant(
        "average over the initial world size in join()",
        "self.num_contributors or self._communicator.size",
        "self._communicator.size",
        within="divisor",
        first="join",
    ),
    Mutant(
        "division by a product with the reciprocal where torch divides",
        "values.div_(divisor)",
        "values.mul_(1.0 / divisor)",
    ),
    Mutant(
        "gradients in place are not divided",
        "kernels.divide(self._values_of(slots), divisor)",
        "None",
    ),
    Mutant(
        "one slot keeps what was in the buffer",
        "self._values_of(slots).zero_()",
        "None",
        first="unused_parameters",
    ),
    Mutant(
        "an untouched gradient loses its saved bits",
        "part.copy_(values[at : at + part.numel()])",
        "None",
        first="views",
    ),
    Mutant(
        "buckets launch as they fill, in any order",
        "if bucket.state is not BucketState.FULL:\n    break",
        "if bucket.state is not BucketState.FULL:\n    continue",
    ),
    Mutant(
        "averages are not copied out",
        "bucket.copy_out(untouched_slots)",
        "bucket.copy_out(range(len(bucket.params)))",
    ),
    Mutant(
        "gradients are copied out before the all-reduce is over",
        "self.communicator.wait(self.work)",
        "None",
    ),
    Mutant(
        "ranks keep their own layout after a rebuild",
        "self.adopt(agreed, in_shared_memory=True)",
        "self.adopt(mine, in_shared_memory=True)",
        first="layout",
    ),
    Mutant(
        "a rebuild does not happen",
        "self._order = order",
        "pass",
        first="layout",
    ),
    Mutant(
        "no_sync is ignored",
        "self.require_backward_grad_sync = False",
        "pass",
        within="no_sync",
        first="accumulation",
    ),
    Mutant(
        "unused parameters: a rank forgets what others used",
        "torch.nonzero(counts == 0)",
        "torch.nonzero(counts <= 1)",
        first="unused_parameters",
    ),
    Mutant(
        "a gradient that nobody used becomes zeros",
        "[k for i, k in slots if i in untouched]",
        "[]",
        first="unused_parameters",
    ),
    Mutant(
        "the hook takes the last bucket for full one gradient early",
        "if not left:\n    pending.mark_bucket_ready(number)",
        "if left <= 1:\n    pending.mark_bucket_ready(number)",
    ),
    Mutant(
        "a comm hook's result is divided",
        "self.factors_of(self.divisor if hook is None else 1)",
        "self.factors_of(self.divisor)",
        first="comm_hooks",
    ),
    Mutant(
        "one rank keeps its own initial parameters",
        "options.rootRank = root",
        "options.rootRank = group.rank()",
        first="replicas",
    ),
    Mutant(
        "sparse gradients are not divided",
        "kernels.divide(self.payload, factors.product)",
        "None",
    ),
    Mutant(
        "complex gradients lose their imaginary part",
        "torch.view_as_real(values).flatten()",
        "values.real.clone()",
        within="as_real",
    ),
    Mutant(
        "module buffers are not broadcast",
        "broadcast_coalesced(list(self.buffers.values()), group, root)",
        "broadcast_coalesced([], group, root)",
        within="broadcast_buffers",
        first="buffers",
    ),
    Mutant(
        "C++: halves are scaled in their own precision",
        "return static_cast<T>(static_cast<Wide<T>>(x) * scale);",
        "return x * static_cast<T>(scale);",
        native=True,
        first="native/test_flatten.py",
    ),
    Mutant(
        "C++: gradients in place are multiplied by the reciprocal",
        "values_.div_(divisor);",
        "values_.mul_(1.0 / static_cast<double>(divisor));",
        native=True,
        first="native/test_flatten.py",
    ),
    Mutant(
        "C++: the hook takes a bucket for full one gradient early",
        "  if (left == 0) {\n    call_python(on_ready_",
        "  if (left <= 1) {\n    call_python(on_ready_",
        native=True,
    ),
    Mutant(
        "C++: what is copied at once is not divided",
        "target.slots->copy_now(target.k, grad, scale)",
        "target.slots->copy_now(target.k, grad, 1.0)",
        native=True,
    ),
    Mutant(
        "C++: averages are not copied out",
        "copy_rows(rows, values_.scalar_type(), scale);",
        "static_cast<void>(rows.ends.size() + (scale > 1));",
        native=True,
        first="native/test_flatten.py",
    ),
    Mutant(
        "C++: averages of odd gradients are not copied out",
        "minidp::unflatten(grads, views, scale);",
        "static_cast<void>(grads.size() + views.size() + (scale > 1));",
        native=True,
        first="native/test_flatten.py",
    ),
    Mutant(
        "C++: a gradient is copied to the wrong place",
        "const auto elements = view.storage_offset() - values_.storage_offset();",
        "const auto elements = view.storage_offset();",
        native=True,
        first="native/test_flatten.py",
    ),
    Mutant(
        "C++: a rank is left out of the sum in shared memory",
        "for (int64_t k = 1; k <= size; ++k) {",
        "for (int64_t k = 1; k < size; ++k) {",
        native=True,
        first="shared_memory/test_sums.py",
    ),
    Mutant(
        "C++: the sum in shared memory is not that of Gloo's ring",
        "ranks[(chunk - k + size) % size]",
        "ranks[(chunk + k) % size]",
        native=True,
        first="shared_memory/test_sums.py",
    ),
    Mutant(
        "sums over logical ranks are not divided by their number",
        "1.0 / self._leaves if self.items is None else self.items.scale",
        "1.0 if self.items is None else self.items.scale",
        first="logical_ranks",
    ),
    Mutant(
        "a rank forgets all but its last logical rank",
        "self.partial.add_to_bucket(plan, views)",
        "None",
        first="logical_ranks",
    ),
    Mutant(
        "random numbers do not depend on the logical rank",
        "randomness.seed_all(now.seed, now.step, leaf)",
        "randomness.seed_all(now.seed, now.step, now.leaves[0])",
        first="logical_ranks",
    ),
    Mutant(
        "the sums of logical ranks are added from the wrong end",
        "self._plus(self.open.pop()[1], value)",
        "self._plus(value, self.open.pop(0)[1])",
        first="logical_ranks",
    ),
    Mutant(
        "the rows of logical ranks in shared memory are mixed up",
        "first + row % len(mine)",
        "first + row - 1",
        first="logical_ranks/test_tree.py",
    ),
    Mutant(
        "C++: a row in shared memory is added to another sum than the last one",
        "Adder<T>::add(next - block, rows[postfix[k]] + at, n);",
        "Adder<T>::add(stack, rows[postfix[k]] + at, n);",
        native=True,
        first="shared_memory/test_orders.py",
    ),
    Mutant(
        "C++: sums in shared memory lie on each other",
        "next += block;",
        "next += block / 2;",
        native=True,
        first="shared_memory/test_orders.py",
    ),
    Mutant(
        "owners add up logical ranks in the order of ranks",
        "Brought(pieces, self._tree.counts, self._tree.add_up)",
        "Brought(pieces, self._tree.counts, lambda rows: rows.sum(0))",
        first="sharded/test_logical_ranks.py",
    ),
    Mutant(
        "C++: owners add up logical ranks in the order of ranks",
        "shape.order ? sum_in_given_order : sum_share",
        "sum_share",
        native=True,
        first="shared_memory/test_orders.py",
    ),
    Mutant(
        "an audit takes the gradients of the wrong logical rank",
        "self._now is not None and self._now.is_last",
        "self._now is not None",
        first="logical_ranks/test_audit.py",
    ),
    Mutant(
        "what a rank computes for another one is told to the guard",
        "observers.tell_only(witness)",
        "None",
        first="logical_ranks/test_audit.py",
    ),
    Mutant(
        "an audit counts the items of another rank",
        "ends.append(items.set_aside())",
        "items.set_aside()",
        first="logical_ranks/test_audit.py",
    ),
    Mutant(
        "slices are added up again by the rank that has added them up",
        "summed = self._add_up_again(1)",
        "summed = self._add_up_again(0)",
        first="logical_ranks/test_audit.py",
    ),
    Mutant(
        "an audit names the rank that is right",
        "value != thirds[0]",
        "value == thirds[0]",
        first="logical_ranks/test_audit.py",
    ),
    Mutant(
        "C++: a bucket in shared memory is read before its sums are there",
        "if (!all_posted(bucket)) {\n    return false;",
        "if (!all_posted(bucket)) {\n    return true;",
        native=True,
        first="shared_memory",
    ),
]


def place_of(mutant: Mutant) -> tuple[Path, str] | None:
    """Find the file that has a mutant's piece of code, and what becomes of its text.

    None means that the code has changed, so that the mutant is out of date.
    """
    found: list[tuple[Path, str]] = []
    if mutant.native:
        for path in ROOT.glob("csrc/*.cpp"):
            whole = path.read_text()
            changed = whole.replace(mutant.old, mutant.new)
            found += [(path, changed)] * whole.count(mutant.old)
    else:
        found = [
            (path, replaced(whole, node, mutant.new))
            for path, whole, nodes in parsed()
            for node in nodes_of(mutant, nodes)
        ]
    return found[0] if len(found) == 1 else None


@functools.cache
def parsed() -> list[tuple[Path, str, dict[type, list[ast.AST]]]]:
    """Return all files of the package: path, text, and nodes by their type."""
    files = []
    for path in ROOT.glob("minidp/**/*.py"):
        text, nodes = path.read_text(), defaultdict(list)
        for node in ast.walk(ast.parse(text)):
            nodes[type(node)].append(node)
        files.append((path, text, nodes))
    return files


def nodes_of(mutant: Mutant, nodes: dict[type, list[ast.AST]]) -> list[Any]:
    """Return the nodes, of all those of a file, that are a mutant's piece of code."""
    wanted: ast.AST = ast.parse(mutant.old).body[0]
    if isinstance(wanted, ast.Expr):
        wanted = wanted.value
    form = ast.dump(wanted)
    candidates: Iterable[ast.AST] = nodes.get(type(wanted), [])
    if mutant.within:
        functions = nodes.get(ast.FunctionDef, [])
        places = [f for f in functions if getattr(f, "name", "") == mutant.within]
        everything = (node for place in places for node in ast.walk(place))
        candidates = (node for node in everything if type(node) is type(wanted))
    return [node for node in candidates if ast.dump(node) == form]


def replaced(whole: str, node: ast.expr | ast.stmt, new: str) -> str:
    """Return a file's text with other code in the place of a node."""
    lines = whole.splitlines(keepends=True)
    last = lines[(node.end_lineno or 0) - 1].encode()
    before = lines[node.lineno - 1].encode()[: node.col_offset].decode()
    after = last[node.end_col_offset :].decode()
    code = textwrap.indent(new, " " * node.col_offset).lstrip()
    head, tail = lines[: node.lineno - 1], lines[node.end_lineno :]
    return "".join([*head, before, code, after, *tail])


def copy_checkout(folder: Path) -> None:
    """Copy what the tests need."""
    ignored = shutil.ignore_patterns("__pycache__", "results", "build")
    for name in COPIED:
        shutil.copytree(ROOT / name, folder / name, symlinks=True, ignore=ignored)
    for name in COPIED_FILES:
        shutil.copy(ROOT / name, folder)


def first_failure(mutant: Mutant, place: Path, changed: str, folder: Path) -> str:
    """Run the tests on a copy with the mutant; return a failed test, or nothing."""
    path = folder / place.relative_to(ROOT)
    whole = path.read_text()
    path.write_text(changed)
    chosen = NATIVE_FAST if mutant.native else FAST
    try:
        failed = run_tests(mutant, folder, [*ALONE, f"tests/{mutant.first}"])
        if not failed:
            failed = run_tests(mutant, folder, chosen)
            # On a busy machine a test may fail for another reason, but not twice.
            failed = failed and run_tests(mutant, folder, (*ALONE, name_of(failed)))
    finally:
        path.write_text(whole)
    if failed and run_tests(mutant, folder, (*ALONE, name_of(failed))):
        raise RuntimeError(
            f"It fails without the mutant {mutant.name!r}, too: {failed}"
        )
    return failed


def name_of(line: str) -> str:
    """Return the test that pytest's summary names."""
    return line.removeprefix("FAILED ").partition(" - ")[0]


def run_tests(mutant: Mutant, folder: Path, chosen: Sequence[str]) -> str:
    """Run some tests until one fails; return its name, or nothing."""
    words = ("--numprocesses", WORKERS, "--dist", "worksteal", *chosen, "-m", SOON_OVER)
    command = (sys.executable, "-m", "pytest", *words, "-x", "-q")
    env = {**os.environ, "PYTHONPATH": str(folder), "HYPOTHESIS_PROFILE": "fast"}
    env["MINIDP_NATIVE"] = "1" if mutant.native else "0"
    if mutant.native:
        env["MINIDP_NATIVE_CACHE"] = str(folder / "cache")
        # Ranks that had to build first would run out of time.
        build = (sys.executable, "-m", "minidp.native", "build")
        subprocess.run(build, cwd=folder, env=env, check=True, capture_output=True)
    done = subprocess.run(
        [*command, "-p", "no:cacheprovider"],
        cwd=folder,
        env=env,
        capture_output=True,
        text=True,
    )
    if done.returncode == 0:
        return ""
    lines = [line for line in done.stdout.splitlines() if line.startswith("FAILED")]
    if not lines:
        raise RuntimeError(f"{mutant.name}: no test ran\n{done.stdout}\n{done.stderr}")
    return lines[0]


def main(arguments: Sequence[str] | None = None) -> int:
    """Try mutants and print which test kills each."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.mutants", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help="default: all")
    parser.add_argument("--list", action="store_true", help="print the names")
    options = parser.parse_args(arguments)
    chosen = [m for m in MUTANTS if not options.names or m.name in options.names]
    bad = 0
    with tempfile.TemporaryDirectory(prefix="minidp-mutants-") as name:
        folder = Path(name)
        copy_checkout(folder)
        for number, mutant in enumerate(chosen, 1):
            found = place_of(mutant)
            result = "OUT OF DATE: its piece is not in the code exactly once"
            if found and options.list:
                result = str(found[0].relative_to(ROOT))
            elif found:
                result = first_failure(mutant, *found, folder) or "SURVIVES"
            bad += result == "SURVIVES" or found is None
            print(f"{number} of {len(chosen)}  {mutant.name}\n    {result}", flush=True)
    print(f"{len(chosen)} mutants, {bad} of them survive or are out of date")
    return 1 if bad or not chosen else 0


if __name__ == "__main__":
    sys.exit(main())
