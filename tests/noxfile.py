"""The stages of the tests, for nox. ``bash tests/run.sh`` calls it.

A stage is a session; its tags are the tiers (fast, full, nightly) to which it belongs.
nox runs them in the order of this file and stops at the first that fails. The sessions
run in the environment that run.sh has made, not in one of their own.
"""

from __future__ import annotations

import functools
import os
import shlex
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path

import nox
import yaml

ROOT = Path(__file__).parents[1]
nox.needs_version = ">=2024.4"
nox.options.stop_on_first_error = True
nox.options.envdir = str(ROOT / ".nox")

PYTHON = sys.executable
# Programs that pip has installed beside it, although nobody has activated .venv. nox
# looks for programs here, and not in the environment that a session passes to them.
os.environ["PATH"] = os.pathsep.join([str(Path(PYTHON).parent), os.environ["PATH"]])
NOT_SLOW = "not slow and not gpu"
SOON_OVER = f"{NOT_SLOW} and not fresh"
USES_TORCH = "tests/native/test_build.py::test_an_extension_that_uses_torch"
# Two per core, because many tests wait for other processes.
CORES = len(os.sched_getaffinity(0))
WORKERS = os.environ.get("MINIDP_TEST_WORKERS", str(min(2 * CORES, 8)))


def folders(*names: str) -> tuple[str, ...]:
    """Return the paths of folders of tests."""
    return tuple(f"tests/{name}" for name in names)


def tests(folder: str, *names: str) -> tuple[str, ...]:
    """Return the paths of test files of a folder."""
    return tuple(f"tests/{folder}/test_{name}.py" for name in names)


# Whatever decides the bits of a gradient: `tests/mutants.py` shows that this is enough.
FAST = (
    *folders("accumulation", "unused_parameters", "gradients", "views", "buffers"),
    *folders("layout", "comm_hooks", "items", "join", "step_in_backward"),
    *folders("replicas", "guard", "module"),
    *tests("constructor", "arguments"),
    *tests("torch_names", "fixed"),
    *tests("compile", "dynamo_split"),
    *tests("reset", "reset", "failed_ranks"),
    *tests("groups", "subgroups"),
    *tests("hang", "waits"),
    *tests("wrong_uses", "wrong_words"),
    *tests("repository", "architecture"),
)
OWN_OF_NATIVE = folders("native", "shared_memory")
NATIVE_FAST = (
    *tests("native", "flatten", "hooks", "threads"),
    *folders("shared_memory"),
    *tests("gradients", "pairs_of_features"),
    *tests("items", "laws"),
)
# What touches hooks and copies; other tests do not know whether there is an extension.
# Who is missing does not depend on them, so there is no folder "hang".
NATIVE = (
    *folders("accumulation", "unused_parameters", "gradients", "views", "buffers"),
    *folders("comm_hooks", "items", "join", "step_in_backward", "guard", "module"),
    *folders("many_objects", "logical_ranks"),
    *tests("sharded", "in_shared_memory", "bits", "split", "awaited", "deaths"),
    *tests("constructor", "arguments"),
    *tests("reset", "reset", "failed_ranks"),
    *tests("groups", "subgroups"),
    *tests("recording", "recording"),
    *tests("wrong_uses", "wrong_words"),
    # On a device: who writes a bucket on which stream, and what keeps its memory.
    *tests("accelerator", "features", "audit_order", "waits", "lifetimes", "memory"),
)
# Of these, what is about Python above the hooks and copies. The others have the same
# hooks, copies and sums in shared memory: sparse gradients are in the pairs of
# features, what a step that failed leaves behind is in "reset", and an audit of each
# kind of training in the rest of `test_audit`. So these are left to the night.
NATIVE_AT_NIGHT = (
    *tests("comm_hooks", "laws"),
    *tests("guard", "comparison", "legal_trainings"),
    *tests("items", "special_cases"),
    *tests("logical_ranks", "mistakes", "python_groups", "resume", "sparse"),
    *(
        f"tests/logical_ranks/test_audit.py::{name}"
        for name in (
            "test_an_alarm_leaves_no_trace",  # also its variant with options
            "test_any_number_of_logical_ranks",
            "test_options",
        )
    ),
    *tests("wrong_uses", "wrong_words"),
)

# The reference in Python: all tests but those in folders that have stages of their own.
APART = folders("native", "packaging", "page", "torchft", "trainers")
REFERENCE = ("tests/", *(f"--ignore={folder}" for folder in APART))
IS_REFERENCE = "not (fault or native or gpu or mutants or nightly)"
ONE_PROCESS = f"{IS_REFERENCE} and not (ranks or fresh or laws)"
SEVERAL_PROCESSES = f"{IS_REFERENCE} and (ranks or fresh) and not laws"
FAULT = f"fault and {NOT_SLOW} and not nightly"
COVERAGE = ("--cov", "--cov-report", "term")


def pytest(
    session: nox.Session,
    *words: str,
    marked: str = "not gpu",
    profile: str = "brief",
    native: bool = False,
    one_process: bool = False,
    **env: str,
) -> None:
    """Run tests in several processes, then those that are marked `alone` in one.

    ``profile`` is Hypothesis's; words behind ``--`` on the command line go to pytest.
    """
    env = {"MINIDP_NATIVE": "1" if native else "0", "HYPOTHESIS_PROFILE": profile} | env
    if chosen := os.environ.get("HYPOTHESIS_PROFILE"):
        env["HYPOTHESIS_PROFILE"] = chosen
    paths = [word.partition("::")[0] for word in words if word.startswith("tests/")]
    if gone := [path for path in paths if not (ROOT / path).exists()]:
        session.error(f"there is no {', '.join(gone)}: nothing would be tested")
    words = (*words, *session.posargs)
    start = (PYTHON, "-m", "pytest")
    # 5: no test was selected, which words on the command line may do.
    nothing = [0, 5] if session.posargs or has_alone(words) else [0]
    if one_process:
        session.run(*start, "-p", "no:xdist", "-m", marked, *words, env=env)
        return
    many = ("--numprocesses", WORKERS, "--dist", "worksteal")
    beside = ("-m", f"({marked}) and not alone")
    session.run(*start, *many, *beside, *words, env=env, success_codes=nothing)
    if has_alone(words):  # another start of pytest takes ten seconds
        alone = ("-p", "no:xdist", "-m", f"({marked}) and alone")
        session.run(*start, *alone, *words, env=env, success_codes=nothing)


def has_alone(words: tuple[str, ...]) -> bool:
    """Return whether a file or folder among the words has tests that run alone."""
    paths = [ROOT / word for word in words if word.startswith("tests/")]
    option = "--ignore="
    left_out = {
        ROOT / word.removeprefix(option) for word in words if word.startswith(option)
    }
    files = [
        file
        for path in paths
        for file in (path, *path.rglob("test_*.py"))
        if file.is_file() and left_out.isdisjoint(file.parents)
    ]
    return any("mark.alone" in file.read_text() for file in files)


def files_with(*texts: str) -> list[str]:
    """Return the paths of the test files of REFERENCE that have one of these texts."""
    paths = sorted(ROOT.glob("tests/*/test_*.py"))
    found = [path for path in paths if any(map(path.read_text().__contains__, texts))]
    names = [str(path.relative_to(ROOT)) for path in found]
    return [name for name in names if not name.startswith(APART)]


def need(session: nox.Session, program: str) -> None:
    """Skip the stage, and say so, where a program is missing."""
    if not shutil.which(program):
        session.skip(f"{program} is not installed")


def ask(session: nox.Session, expression: str) -> str:
    """Return a value of a new interpreter that has imported torch and minidp."""
    code = f"import torch; from minidp import native; print({expression})"
    return str(session.run(PYTHON, "-c", code, silent=True)).split()[-1]


def build(session: nox.Session) -> None:
    """Build the extension, or skip the stage where there is no compiler."""
    need(session, os.environ.get("CXX", "c++"))
    session.run(PYTHON, "-m", "minidp.native", "build")


def scripts(session: nox.Session, *words: str) -> None:
    """Run a folder's scripts with --smoke, on the extension if there is a compiler."""
    session.run(PYTHON, "-m", "minidp.native", "build", "--optional")
    session.run(PYTHON, "-m", "tests.support.smoke", *words)


def stage(*tiers: str) -> Callable[[Callable[[nox.Session], None]], object]:
    """Make a function a stage of some tiers, which runs at the top of the checkout."""

    def decorate(function: Callable[[nox.Session], None]) -> object:
        @functools.wraps(function)
        def run(session: nox.Session) -> None:
            session.chdir(ROOT)
            function(session)

        name = function.__name__.strip("_").replace("_", "-")
        return nox.session(python=False, name=name, tags=list(tiers))(run)

    return decorate


# ------------------------------------------------------------------------ every change


@stage("fast", "full")
def lint(session: nox.Session) -> None:
    """Formats and linters: the hooks of .pre-commit-config.yaml, on all files."""
    config = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())
    for repository in config["repos"]:
        for hook in repository["hooks"]:
            session.run(*shlex.split(hook["entry"]))


@stage("fast")
def gradients(session: nox.Session) -> None:
    """Whatever decides the bits of a gradient, in Python."""
    pytest(session, *FAST, marked=SOON_OVER, profile="fast")


@stage("fast")
def native_gradients(session: nox.Session) -> None:
    """The same on the extension."""
    build(session)
    pytest(session, *NATIVE_FAST, marked=NOT_SLOW, profile="fast", native=True)


@stage("fast")
def quickstart(session: nox.Session) -> None:
    """The first command of the README."""
    scripts(session, "examples", "train_digits.py")


# -------------------------------------------------------------------------- before main


@stage("full")
def reference(session: nox.Session) -> None:
    """All tests of the reference in Python."""
    # Before the tests, which have a limit of time: it takes a minute, once per machine.
    session.run(PYTHON, "-m", "tests.support.sim")
    # In one run: each process imports all tests first, for ten seconds, and the tests
    # in which ranks wait leave the cores to the others. Coverage is for the night,
    # because before Python 3.12 tests take 1.4 times as long with it.
    pytest(session, *REFERENCE, marked=f"({IS_REFERENCE}) or ({FAULT})")


@stage("full")
def conformance(session: nox.Session) -> None:
    """Torch's own DDP tests on minidp."""
    session.run(PYTHON, "tests/conformance/run.py", env={"MINIDP_NATIVE": "0"})


@stage("full")
def native(session: nox.Session) -> None:
    """The extension: its own tests, and those that hooks and copies can fail."""
    build(session)
    session.run(PYTHON, "-m", "tests.support.sim")  # see `reference`
    later = [f"--deselect={name}" for name in (USES_TORCH, *NATIVE_AT_NIGHT)]
    words = (*OWN_OF_NATIVE, *NATIVE, *later)
    # In one run, as in `reference`, with the laws and the ranks that fail. Of what that
    # stage has, too, half of the cases do: those of one test have the same hooks.
    marked = "not (gpu or nightly or ((fault or laws) and slow))"
    half = ("--one-case-in", "2")
    pytest(session, *words, *half, marked=marked, profile="fast", native=True)


@stage("nightly")
def native_conformance(session: nox.Session) -> None:
    """Torch's own DDP tests on the extension."""
    build(session)
    session.run(PYTHON, "tests/conformance/run.py", env={"MINIDP_NATIVE": "1"})


@stage("full")
def examples(session: nox.Session) -> None:
    """Every example, on two ranks."""
    scripts(session, "examples")


@stage("full")
def benchmarks(session: nox.Session) -> None:
    """Every benchmark, with the smallest sizes."""
    scripts(session, "benchmarks")


@stage("full")
def page(session: nox.Session) -> None:
    """The page in a browser, which serves all tests; skipped where there is none."""
    pytest(session, "tests/page", one_process=True)


@stage("full")
def torchft(session: nox.Session) -> None:
    """Replicas on torchft's manager, which mostly wait. Whole jobs run alone."""
    pytest(session, "tests/torchft")


@stage("full")
def api(session: nox.Session) -> None:
    """Build the API reference into .nox/api, and look for broken links."""
    shutil.rmtree(".nox/api", ignore_errors=True)
    session.run(PYTHON, "-m", "tests.support.reference", ".nox/api")


# ------------------------------------------------------------------- parts, and nightly


@stage()
def unit(session: nox.Session) -> None:
    """Whatever needs one process, and is soon over."""
    pytest(session, *REFERENCE, marked=ONE_PROCESS)


@stage()
def fault(session: nox.Session) -> None:
    """Ranks that raise, differ, die or hang."""
    # Not all of REFERENCE, which each process would import first, for seconds.
    pytest(session, *files_with("mark.fault"), marked=FAULT)


@stage()
def property_(session: nox.Session) -> None:
    """Laws for all inputs."""
    pytest(session, *REFERENCE, marked=f"laws and {IS_REFERENCE}")


@stage()
def distributed(session: nox.Session) -> None:
    """Whole training steps on ranks, and commands."""
    pytest(session, *REFERENCE, marked=SEVERAL_PROCESSES)


@stage("nightly")
def fuzz(session: nox.Session) -> None:
    """Thousands of random programs."""
    words = (*REFERENCE, "--timeout", "3600")
    marked = "(fault or laws) and not (native or gpu)"
    pytest(session, *words, marked=marked, profile="nightly")


@stage("nightly")
def combinations(session: nox.Session) -> None:
    """All combinations of options; and all that is left out with the extension."""
    build(session)
    session.run(PYTHON, "-m", "tests.support.sim")  # see `reference`
    pytest(session, *REFERENCE, marked="nightly and not (gpu or native)")
    pytest(session, *NATIVE, native=True)


@stage("nightly")
def page_fuzz(session: nox.Session) -> None:
    """Random recordings on the page."""
    words = (*tests("page", "forecast"), "--timeout", "3600")
    pytest(session, *words, profile="nightly", one_process=True)


@stage("nightly")
def coverage(session: nox.Session) -> None:
    """How much of minidp all tests of the reference run."""
    words = (*REFERENCE, *COVERAGE)
    # What is fast is in Python from 3.12 on, and in C before.
    core = "sysmon" if sys.version_info >= (3, 12) else "ctrace"
    pytest(session, *words, marked=IS_REFERENCE, COVERAGE_CORE=core)


@stage("nightly")
def chaos(session: nox.Session) -> None:
    """Ranks that die under torchrun, 200 times."""
    session.run(PYTHON, "-m", "tests.chaos.chaos", "--runs", "200")


@stage("nightly")
def simulation(session: nox.Session) -> None:
    """Simulated ranks, by other seeds each night; and old races, put back."""
    first = str(int(time.time()))
    words = ("--first", first, "--runs", "1000000", "--seconds", "360")
    session.run(PYTHON, "-m", "tests.simulation", *words)
    seed = {"MINIDP_SIMULATION_SEED": first}
    files = files_with("on_simulated_ranks", "import simulated")
    pytest(session, *files, marked=FAULT, **seed)
    session.run(PYTHON, "-m", "tests.simulation.mutants")


@stage("nightly")
def audits(session: nox.Session) -> None:
    """Flip bits at random: audits name each rank; and train, where they say nothing."""
    words = ("--runs", "1000", "--steps", "100000")
    session.run(PYTHON, "-m", "tests.logical_ranks.audit_flips", *words)


@stage("nightly")
def sanitizers(session: nox.Session) -> None:
    """The extension under AddressSanitizer and ThreadSanitizer."""
    need(session, "g++")
    for name in ("asan", "tsan"):
        session.run("bash", f"tests/native/{name}.sh", env={"PYTHON": PYTHON})


@stage("nightly")
def messages(session: nox.Session) -> None:
    """The extension's hooks and copies with messages, as between hosts."""
    build(session)
    words = (*OWN_OF_NATIVE, *NATIVE, "--deselect", USES_TORCH)
    pytest(session, *words, marked=NOT_SLOW, native=True, MINIDP_SHARED_MEMORY="0")


@stage("nightly")
def mutants(session: nox.Session) -> None:
    """The fast tests fail for each of many wrong gradients; each wait is needed."""
    session.run(PYTHON, "-m", "tests.mutants")
    build(session)
    words = (*tests("accelerator", "removal"), "--timeout", "600")
    pytest(session, *words, marked="mutants and not native")
    pytest(session, *words, marked="mutants and native", native=True)


@stage("nightly")
def native_torch(session: nox.Session) -> None:
    """An extension that reads torch's headers is built."""
    pytest(session, USES_TORCH, native=True)


@stage("nightly")
def trainers(session: nox.Session) -> None:
    """Accelerate, Lightning and Transformers on minidp."""
    pytest(session, "tests/trainers")


@stage("nightly")
def packaging(session: nox.Session) -> None:
    """Sdist and wheel in fresh environments."""
    pytest(session, "tests/packaging", one_process=True, MINIDP_TEST_PACKAGING="1")


@stage("nightly")
def versions(session: nox.Session) -> None:
    """The fast tests on each torch and Python."""
    session.run(PYTHON, "-m", "tests.versions")


@stage("nightly")
def torchft_chaos(session: nox.Session) -> None:
    """Replicas that die, 300 times."""
    session.run(PYTHON, "-m", "tests.torchft.chaos", "--kills", "300")
    session.run(PYTHON, "-m", "tests.torchft.elastic", "--runs", "50")


@stage("nightly")
def gpu(session: nox.Session) -> None:
    """On a GPU: tests, copies, and what a step costs, in some ten minutes.

    One test at a time, because two would wait for each other's kernels. Speed is
    measured even if a test has failed.
    """
    if ask(session, "torch.cuda.is_available()") != "True":
        session.skip("torch sees no GPU of CUDA or ROCm; for others there are no tests")
    words = ("--timeout", "170", "--session-timeout", "420")
    report = ("--junitxml", "benchmarks/results/gpu.xml")
    folders = ("tests/gpu", "tests/accelerator")
    try:
        pytest(session, *folders, *words, *report, marked="gpu", one_process=True)
    finally:
        session.run(PYTHON, "-m", "minidp.native", "build", "--optional")
        if ask(session, "getattr(native.library(), 'kernels_for', None)") == "cuda":
            copies = ("benchmarks/flatten.py", "--devices", "cuda", "--seconds", "1")
            session.run(PYTHON, *copies)
        else:
            session.log("Copies are not measured: the extension has no CUDA kernels.")
        steps = ("benchmarks/overhead.py", "--device", "cuda", "--seconds", "4")
        session.run(PYTHON, *steps)
