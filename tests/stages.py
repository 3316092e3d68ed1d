"""Run the test suite in stages, one after the other.

    bash tests/run.sh              what every change must pass: 8 minutes at most
    bash tests/run.sh --full       all tests, in both modes: 25 minutes at most
    bash tests/run.sh --nightly    long fuzzing, chaos, sanitizers, trainers, packaging
    bash tests/run.sh unit native  only these stages

Stop at the first stage that fails. Tests that kill or time processes (TIMED) and fail
beside other tests run once more, alone; the summary names those that then pass. Ctrl-C
ends all processes of the stage; the exit status is then 130. Environment variables:
HYPOTHESIS_PROFILE replaces the profile of every stage; MINIDP_TEST_WORKERS is the
number of pytest processes (default: two per core, because many tests wait);
MINIDP_PYTHON: see examples/environment.sh.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[1]
COMPILER = os.environ.get("CXX", "c++")
WORKERS = str(min(2 * len(os.sched_getaffinity(0)), 8))
USES_TORCH = "tests/native/test_build.py::test_an_extension_that_uses_torch"
# Their limits are seconds of a machine that may be busy. Tests of gradients are not
# among them: one that fails once has found a race.
TIMED = tuple(
    f"tests/{name}"
    for name in (
        *("fault/", "page/", "torchft/", "distributed/test_doctor.py"),
        *("distributed/test_launches.py", "distributed/test_run.py"),
        *("distributed/test_speed.py", "unit/doctor/", "unit/top/test_command_line.py"),
    )
)
MOST_REPEATED = 2  # failures in one stage; more of them are no accident
NOT_GPU = ("-m", "not gpu")
NOT_SLOW = ("-m", "not slow and not gpu")


@dataclass(frozen=True)
class Command:
    """A program that a stage runs; another exit status than 0 fails the stage."""

    words: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict)
    needs: str = ""  # skip the command where this program is missing


def python(*words: str, needs: str = "", **env: str) -> Command:
    """Return a command that runs this interpreter."""
    return Command((sys.executable, *words), env, needs)


def pytest(
    *words: str, native: bool = False, profile: str = "ci", **env: str
) -> Command:
    """Return a command of pytest in several processes, with the extension or not."""
    workers = os.environ.get("MINIDP_TEST_WORKERS", WORKERS)
    return python(
        *("-m", "pytest", "--numprocesses", workers, "--dist", "worksteal", *words),
        needs=COMPILER if native else "",
        MINIDP_NATIVE="1" if native else "0",
        HYPOTHESIS_PROFILE=os.environ.get("HYPOTHESIS_PROFILE", profile),
        **env,
    )


def page(*words: str, profile: str = "ci") -> Command:
    """Return a command of pytest in one process: a browser serves all its tests."""
    return python(
        *("-m", "pytest", "-p", "no:xdist", *words),
        HYPOTHESIS_PROFILE=os.environ.get("HYPOTHESIS_PROFILE", profile),
    )


def conformance(native: str, needs: str = "") -> Command:
    """Return a command that runs torch's own DDP tests on minidp."""
    return python("tests/conformance/run.py", needs=needs, MINIDP_NATIVE=native)


def tests(folder: str, *names: str) -> tuple[str, ...]:
    """Return the paths of test files of a folder."""
    return tuple(f"tests/{folder}/test_{name}.py" for name in names)


# Whatever decides the bits of a gradient: `tests/mutants.py` shows that this is enough.
FAST = (
    *("tests/unit/core", "tests/unit/comm", "tests/unit/layout", "tests/unit/replica"),
    *("tests/unit/data_parallel", "tests/unit/guard"),
    *tests("unit/top", "architecture"),
    *tests("property", "matches_torch", "hook_laws", "join", "items"),
    *tests("distributed", "matrix", "special_cases", "delayed", "skip_unused"),
    *tests("distributed", "comm_hooks", "bucket_layout", "join"),
    *tests("distributed", "overlap", "items", "manual_finalization", "lazy_buckets"),
    *("tests/unit/torch_compat",),
    *tests("fault", "faults", "wrong_words"),
)
NATIVE_FAST = (
    *tests("native", "flatten", "hooks", "threads", "shared_memory", "shared_buckets"),
    *tests("distributed", "matrix"),
    *tests("property", "items"),
)
# What touches hooks and copies; other tests do not know whether there is an extension.
NATIVE_UNIT = (
    *("tests/unit/core", "tests/unit/data_parallel", "tests/unit/guard"),
    *tests("unit/overlap", "recording"),
)
NATIVE_DISTRIBUTED = tests(
    *("distributed", "matrix", "delayed", "special_cases", "overlap", "skip_unused"),
    *("comm_hooks", "items"),
)
NATIVE_PROPERTY = tests("property", "matches_torch", "hook_laws", "join", "items")
# Who is missing does not depend on hooks and copies, so there is no test_hangs.
NATIVE_FAULT = tests(
    *("fault", "faults", "comm_hooks", "concurrency", "leaks", "wrong_words"),
)
NATIVE = ("tests/native", "--deselect", USES_TORCH)
DISTRIBUTED = ("tests/distributed", "tests/gpu")
BUILD = python("-m", "minidp.native", "build", needs=COMPILER)
# Says so if there is no compiler: scripts then run in pure Python.
BUILD_IF_POSSIBLE = python("-m", "minidp.native", "build", "--optional")

# One pytest for many folders where that is possible: each start costs ten seconds.
STAGES: dict[str, Sequence[Command]] = {
    "lint": [
        python("-m", "ruff", "format", "--check", "."),
        python("-m", "ruff", "check", "."),
    ],
    "types": [python("-m", "mypy")],
    # ---- fast
    "gradients": [pytest(*FAST, *NOT_SLOW, profile="fast")],
    "native-gradients": [
        *(BUILD, pytest(*NATIVE_FAST, *NOT_SLOW, native=True, profile="fast")),
    ],
    "quickstart": [
        BUILD_IF_POSSIBLE,
        python("-m", "tests.support.smoke", "examples", "train_digits.py"),
    ],
    # ---- full
    "reference": [
        pytest(
            *("tests/unit", "tests/property", *DISTRIBUTED, "tests/conformance"),
            *NOT_GPU,
        ),
    ],
    "fault": [pytest("tests/fault", *NOT_SLOW, profile="brief")],
    "conformance": [conformance("0")],
    "native": [BUILD, pytest(*NATIVE, *NATIVE_UNIT, *NATIVE_DISTRIBUTED, native=True)],
    "native-fault": [
        # The laws are the same as in the other mode, so fewer examples do.
        pytest(*NATIVE_PROPERTY, *NATIVE_FAULT, *NOT_SLOW, native=True, profile="brief")
    ],
    "native-conformance": [conformance("1", needs=COMPILER)],
    "examples": [BUILD_IF_POSSIBLE, python("-m", "tests.support.smoke", "examples")],
    "benchmarks": [
        BUILD_IF_POSSIBLE,
        python("-m", "tests.support.smoke", "benchmarks"),
    ],
    # Skipped where there is no browser.
    "page": [page("tests/page")],
    # One test at a time: each has three replicas, whose deaths are timed.
    "torchft": [python("-m", "pytest", "-p", "no:xdist", "tests/torchft")],
    # ---- parts of the full tier
    "unit": [pytest("tests/unit")],
    "property": [pytest("tests/property")],
    "distributed": [pytest(*DISTRIBUTED, *NOT_GPU)],
    "native-unit": [pytest(*NATIVE_UNIT, native=True)],
    "native-property": [pytest(*NATIVE_PROPERTY, native=True, profile="brief")],
    "native-distributed": [pytest(*NATIVE_DISTRIBUTED, native=True)],
    # ---- nightly
    "fuzz": [
        pytest("tests/property", "tests/fault", "--timeout", "3600", profile="nightly")
    ],
    "page-fuzz": [
        page(*tests("page", "forecast"), "--timeout", "3600", profile="nightly")
    ],
    "chaos": [python("-m", "tests.fault.chaos", "--runs", "200")],
    "torchft-chaos": [python("-m", "tests.torchft.chaos", "--kills", "300")],
    "sanitizers": [
        Command(("bash", f"tests/native/{name}.sh"), {"PYTHON": sys.executable}, "g++")
        for name in ("asan", "tsan")
    ],
    # The extension's hooks and copies with messages, as between hosts.
    "messages": [
        BUILD,
        pytest(
            *(*NATIVE, *NATIVE_UNIT, *NATIVE_PROPERTY, *NATIVE_DISTRIBUTED),
            *(*NATIVE_FAULT, *NOT_SLOW),
            native=True,
            profile="brief",
            MINIDP_SHARED_MEMORY="0",
        ),
    ],
    "mutants": [python("-m", "tests.mutants")],
    "native-torch": [pytest(USES_TORCH, native=True)],
    "trainers": [pytest("tests/trainers")],
    "packaging": [python("-m", "pytest", "tests/packaging", MINIDP_TEST_PACKAGING="1")],
    "versions": [python("-m", "tests.versions")],
    # One at a time: two tests would wait for each other's kernels. Ten minutes at most.
    "gpu": [
        python(
            *("-m", "pytest", "-p", "no:xdist", "-m", "gpu", "--timeout", "170"),
            *("--session-timeout", "420", "--junitxml", "benchmarks/results/gpu.xml"),
            "tests/gpu",
            needs="nvidia-smi",
        )
    ],
}
TIERS = {
    "fast": ["lint", "types", "gradients", "native-gradients", "quickstart"],
    "full": [
        *("lint", "types", "reference", "fault", "conformance"),
        *("native", "native-fault", "native-conformance", "examples", "benchmarks"),
        *("page", "torchft"),
    ],
    "nightly": [
        *("fuzz", "page-fuzz", "chaos", "sanitizers", "messages", "mutants"),
        *("native-torch", "trainers", "packaging", "versions", "torchft-chaos", "gpu"),
    ],
}


# ----------------------------------------------------------------------------- running


class Interruption:
    """Kill the processes of the tests when SIGINT, SIGTERM or SIGHUP comes."""

    def __init__(self) -> None:
        self.number = 0  # of the signal that came
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, self._obey)

    def _obey(self, number: int, _frame: object) -> None:
        self.number = self.number or number
        kill_descendants()


def run(stages: Sequence[str], interruption: Interruption) -> int:
    """Run stages in order, print a summary, and return the exit status."""
    results: dict[str, str] = dict.fromkeys(stages, "not run")
    first, outcome = time.monotonic(), "ok"
    for number, name in enumerate(stages, 1):
        print(f"\n=== stage {number} of {len(stages)}: {name}", flush=True)
        began = time.monotonic()
        repeated: list[str] = []
        is_ok = all(
            execute(command, interruption) or repeat(command, interruption, repeated)
            for command in STAGES[name]
        )
        end_descendants()
        outcome = "ok" if is_ok else "FAILED"
        if interruption.number:
            outcome = "interrupted"
        now = time.monotonic()
        results[name] = f"{outcome:12}{(now - began) / 60:6.1f} min"
        if is_ok and repeated:
            results[name] += f"   passed only alone: {', '.join(repeated)}"
        print(f"=== {name}: {outcome}, {(now - first) / 60:.1f} min in all", flush=True)
        if outcome != "ok":
            break
    print()
    for name, result in results.items():
        print(f"{name:20}{result}")
    if interruption.number:
        print("\nInterrupted. No process of the tests is left.")
        return 128 + interruption.number
    return int(outcome != "ok")


def execute(command: Command, interruption: Interruption) -> bool:
    """Run a command in a session of its own, out of reach of Ctrl-C; True if it passed.

    Killing is left to `Interruption`: pytest and each rank would print a traceback.
    """
    if command.needs and not shutil.which(command.needs):
        print(f"skipped: {command.needs} is not installed", flush=True)
        return True
    # What failed in an earlier stage, or in a run by hand, is not this command's.
    Path(ROOT, ".pytest_cache/v/cache/lastfailed").unlink(missing_ok=True)
    process = subprocess.Popen(
        command.words,
        cwd=ROOT,
        env={**os.environ, **command.env},
        stdin=subprocess.DEVNULL,
        start_new_session=True,
    )
    if interruption.number:  # it came too early to find the process
        process.kill()
    status = process.wait()
    if interruption.number:
        print()  # what was interrupted ends in the middle of a line
    elif status != 0:
        print(f"\nexit status {status}: {' '.join(command.words)}", flush=True)
    return status == 0


def repeat(command: Command, interruption: Interruption, repeated: list[str]) -> bool:
    """Run the tests of TIMED that failed once more, one at a time; True if all pass.

    False at once if any other test failed, or more than MOST_REPEATED. The names of
    what is run again are added to ``repeated``.
    """
    path = Path(ROOT, ".pytest_cache/v/cache/lastfailed")
    if interruption.number or "pytest" not in command.words or not path.exists():
        return False
    failed = list(json.loads(path.read_text()))
    if not 1 <= len(failed) <= MOST_REPEATED:
        return False
    if not all(name.startswith(TIMED) for name in failed):
        return False
    end_descendants()
    repeated += failed
    alone = python("-m", "pytest", "-p", "no:xdist", *failed, **command.env)
    return execute(alone, interruption)


def adopt_orphans() -> None:
    """Become the parent of descendants that lose theirs (Linux: a child subreaper)."""
    pr_set_child_subreaper = 36
    ctypes.CDLL(None).prctl(pr_set_child_subreaper, 1, 0, 0, 0)


def end_descendants() -> None:
    """Kill every process that a stage has left, and wait until none is there."""
    while kill_descendants():
        with contextlib.suppress(ChildProcessError):
            os.waitpid(-1, 0)


def kill_descendants() -> bool:
    """Kill children, their children and so on, in whatever session; True if any."""
    children: dict[int, list[int]] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it ended meanwhile
            parent = path.read_text().rpartition(")")[2].split()[1]
            children.setdefault(int(parent), []).append(int(path.parent.name))
    found = list(children.get(os.getpid(), ()))
    for pid in found:  # grows while it is read
        found.extend(children.get(pid, ()))
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    return bool(found)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a tier or the stages that are named."""
    rows = (f"{tier:8} {' '.join(stages)}" for tier, stages in TIERS.items())
    parser = argparse.ArgumentParser(
        prog="bash tests/run.sh",
        usage="%(prog)s [--full | --nightly | STAGE ...]",
        description=__doc__,
        epilog="\n".join(rows),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("stages", nargs="*", metavar="STAGE", help=argparse.SUPPRESS)
    for name in ("--full", "--nightly", "--extras"):
        parser.add_argument(name, action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    tiers = [tier for tier in TIERS if getattr(options, tier, False)]
    stages = options.stages + [stage for tier in tiers for stage in TIERS[tier]]
    stages = stages or TIERS["fast"]
    for name in stages:
        if name not in STAGES:
            parser.error(f"unknown stage {name!r}; there are: {', '.join(STAGES)}")
    if options.extras:  # for run.sh: what to install
        extras = {"benchmarks": "bench", "trainers": "trainers", "page": "page"}
        extras |= {"torchft": "torchft", "torchft-chaos": "torchft"}
        extras |= {"page-fuzz": "page"}
        chosen = [extra for stage, extra in extras.items() if stage in stages]
        print(",".join(["test", "examples", *chosen]))
        return 0
    adopt_orphans()
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # hundreds of processes import us
    # Killed processes leave nothing behind. Short, because sockets have short names.
    with tempfile.TemporaryDirectory(prefix="mdp-") as folder:
        os.environ["TMPDIR"] = folder
        os.environ["PYTEST_ADDOPTS"] = f"--basetemp={folder}/t"
        return run(stages, Interruption())


if __name__ == "__main__":
    sys.exit(main())
