"""Break the gradients on purpose, one way at a time, and see that the fast tests fail.

    python -m tests.mutants              all mutants: a survivor makes the status 1
    python -m tests.mutants --list       their names
    python -m tests.mutants "sum becomes maximum"   only this one

Each mutant replaces one text in a copy of the checkout and runs the tests of the
fast tier on the copy until one fails. The text is looked for in all files of `minidp/`
and `csrc/`, so that code may move. A mutant whose text is not found exactly once is out
of date, and that is an error, too.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.noxfile import FAST, NATIVE_FAST, ROOT, SOON_OVER, WORKERS, tests

ALONE = ("--numprocesses", "0")
COPIED = ("minidp", "csrc", "tests", "benchmarks", "examples")
COPIED_FILES = ("pyproject.toml", "README.md")


@dataclass(frozen=True)
class Mutant:
    """One way to break gradients."""

    name: str
    old: str
    new: str
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
        "self.scale = self.divisor / sum(",
        "self.scale = 1 / sum(",
    ),
    Mutant(
        "sums that go to the gradients are not divided by items",
        "tiles_.scale = scale;",
        "tiles_.scale = 1;",
        native=True,
    ),
    Mutant(
        "a rank that counts some of its micro-batches is not noticed",
        "flags += FEWER",
        "pass",
    ),
    Mutant(
        "a backward on old averages is not noticed",
        "grad._version, grad.detach().any()",
        "grad._version, torch.tensor(False)",
    ),
    Mutant(
        "a joined rank forgets what it counted",
        "self._step, self.holds_averages = mine",
        "pass",
    ),
    Mutant(
        "C++: gradients are copied out undivided by items",
        "copy_rows(rows, values_.scalar_type(), scale);",
        "copy_rows(rows, values_.scalar_type(), 1.0);",
        native=True,
    ),
    Mutant(
        "batched copies are not divided",
        "            kernels.divide(self.payload, factors.post)\n",
        "",
    ),
    Mutant(
        "average over the initial world size in join()",
        "return self.num_contributors or ",
        "return ",
    ),
    Mutant(
        "division by a product with the reciprocal where torch divides",
        "values.div_(divisor)",
        "values.mul_(1.0 / divisor)",
    ),
    Mutant(
        "gradients in place are not divided",
        "            kernels.divide(values, divisor)",
        "            kernels.divide(values, 1)",
    ),
    Mutant(
        "one slot keeps what was in the buffer",
        "                view.zero_()\n",
        "                pass\n",
    ),
    Mutant(
        "a kept gradient loses its saved bits",
        "self.views[k].copy_(self._saved[k])",
        "pass",
    ),
    Mutant(
        "buckets launch as they fill, in any order",
        "state is not BucketState.FULL:\n                    break\n",
        "state is not BucketState.FULL:\n                    continue\n",
    ),
    Mutant(
        "averages are not copied out",
        "bucket.copy_out(kept)",
        "bucket.copy_out(range(len(bucket.params)))",
    ),
    Mutant(
        "gradients are copied out before the all-reduce is over",
        "            result = self.communicator.wait(self.work)\n",
        "            result = None\n",
    ),
    Mutant(
        "ranks keep their own layout after a rebuild",
        "self.adopt(agreed, in_shared_memory=True)",
        "self.adopt(mine, in_shared_memory=True)",
    ),
    Mutant(
        "a rebuild does not happen",
        "            self._order = order\n",
        "            pass\n",
    ),
    Mutant(
        "no_sync is ignored",
        "        self.require_backward_grad_sync = False\n        try:\n",
        "        try:\n",
    ),
    Mutant(
        "unused parameters: a rank forgets what others used",
        "torch.nonzero(counts == 0)",
        "torch.nonzero(counts <= 1)",
    ),
    Mutant(
        "a gradient that nobody used becomes zeros",
        "kept = [k for i, k in slots if i in untouched]",
        "kept = []",
    ),
    Mutant(
        "the hook takes the last bucket for full one gradient early",
        "if not left:\n            pending.mark_bucket_ready(number)",
        "if left <= 1:\n            pending.mark_bucket_ready(number)",
    ),
    Mutant(
        "a comm hook's result is divided",
        "self.factors_of(self.divisor if hook is None else 1)\n",
        "self.factors_of(self.divisor)\n",
    ),
    Mutant(
        "one rank keeps its own initial parameters",
        "options.rootRank = root",
        "options.rootRank = group.rank()",
    ),
    Mutant(
        "sparse gradients are not divided",
        "            kernels.divide(self.payload, factors.product)\n",
        "",
    ),
    Mutant(
        "complex gradients lose their imaginary part",
        "torch.view_as_real(values).flatten() if values.is_complex()",
        "values.real.clone() if values.is_complex()",
    ),
    Mutant(
        "module buffers are not broadcast",
        "group = group_of_forwards(self._reducer.communicator.group)\n"
        "            broadcast_coalesced(list(self.buffers.values()), group, root)",
        "group = group_of_forwards(self._reducer.communicator.group)\n"
        "            broadcast_coalesced([], group, root)",
    ),
    Mutant(
        "C++: halves are scaled in their own precision",
        "return static_cast<T>(static_cast<Wide<T>>(x) * scale);",
        "return x * static_cast<T>(scale);",
        native=True,
    ),
    Mutant(
        "C++: gradients in place are multiplied by the reciprocal",
        "values_.div_(divisor);",
        "values_.mul_(1.0 / static_cast<double>(divisor));",
        native=True,
    ),
    Mutant(
        "C++: the hook takes a bucket for full one gradient early",
        "  if (left == 0) {\n    call_python(on_full_",
        "  if (left <= 1) {\n    call_python(on_full_",
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
    ),
    Mutant(
        "C++: averages of odd gradients are not copied out",
        "minidp::unflatten(grads, views, scale);",
        "static_cast<void>(grads.size() + views.size() + (scale > 1));",
        native=True,
    ),
    Mutant(
        "C++: a gradient is copied to the wrong place",
        "const auto elements = view.storage_offset() - values_.storage_offset();",
        "const auto elements = view.storage_offset();",
        native=True,
    ),
    Mutant(
        "C++: a rank is left out of the sum in shared memory",
        "for (int64_t k = 1; k <= size; ++k) {",
        "for (int64_t k = 1; k < size; ++k) {",
        native=True,
    ),
    Mutant(
        "C++: the sum in shared memory is not that of Gloo's ring",
        "ranks[(chunk - k + size) % size]",
        "ranks[(chunk + k) % size]",
        native=True,
    ),
    Mutant(
        "C++: a bucket in shared memory is read before its sums are there",
        "if (!all_posted(bucket)) {\n    return false;",
        "if (!all_posted(bucket)) {\n    return true;",
        native=True,
    ),
]


def place_of(mutant: Mutant) -> Path | None:
    """Find the file with the text of a mutant; None if the code has changed."""
    files = [*ROOT.glob("minidp/**/*.py"), *ROOT.glob("csrc/*.cpp")]
    found = [path for path in files for _ in range(path.read_text().count(mutant.old))]
    return found[0] if len(found) == 1 else None


def copy_checkout(folder: Path) -> None:
    """Copy what the tests need."""
    ignored = shutil.ignore_patterns("__pycache__", "results", "build")
    for name in COPIED:
        shutil.copytree(ROOT / name, folder / name, symlinks=True, ignore=ignored)
    for name in COPIED_FILES:
        shutil.copy(ROOT / name, folder)


def first_failure(mutant: Mutant, place: Path, folder: Path) -> str:
    """Run the tests on a copy with the mutant; return a failed test, or nothing."""
    path = folder / place.relative_to(ROOT)
    whole = path.read_text()
    path.write_text(whole.replace(mutant.old, mutant.new))
    chosen = NATIVE_FAST if mutant.native else FAST
    try:
        # Most die early in this file, for which one process is enough.
        failed = run_tests(
            mutant, folder, (*ALONE, *tests("gradients", "pairs_of_features"))
        )
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
            place = place_of(mutant)
            result = "OUT OF DATE: its text is not in the code exactly once"
            if place and options.list:
                result = str(place.relative_to(ROOT))
            elif place:
                result = first_failure(mutant, place, folder) or "SURVIVES"
            bad += result == "SURVIVES" or place is None
            print(f"{number} of {len(chosen)}  {mutant.name}\n    {result}", flush=True)
    print(f"{len(chosen)} mutants, {bad} of them survive or are out of date")
    return 1 if bad or not chosen else 0


if __name__ == "__main__":
    sys.exit(main())
