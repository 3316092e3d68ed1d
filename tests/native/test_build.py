"""The binary is found, built and loaded, or there is a reason that helps.

Nearly all builds are of a stub without torch's headers, which takes under a second.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from filelock import FileLock

import minidp
from minidp.errors import NativeError
from minidp.native import __main__ as command
from minidp.native import _recipe, _state, build
from minidp.native._cache import Cache, default_folder
from minidp.native._compile import build_into

ROOT = Path(minidp.__file__).parent.parent
STUB = """\
#include <Python.h>

static PyModuleDef definition = {PyModuleDef_HEAD_INIT, "_minidp_native", nullptr, -1};

PyMODINIT_FUNC PyInit__minidp_native() {
  PyObject* module = PyModule_Create(&definition);
  PyModule_AddIntConstant(module, "answer", 42);
  return module;
}
"""
TORCH_STUB = """\
#include <torch/extension.h>

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  m.def("twice", [](const at::Tensor& x) { return x + x; });
}
"""

needs_compiler = pytest.mark.skipif(
    shutil.which(os.environ.get("CXX") or "c++") is None,
    reason="no C++ compiler: neither CXX nor c++",
)


def write(folder: Path, text: str = STUB) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "stub.cpp").write_text(text)
    return folder


def write_program(path: Path, script: str) -> str:
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return str(path)


@pytest.fixture
def source(tmp_path):
    return write(tmp_path / "csrc")


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """Sources and a cache with their binary; copied by tests that change them."""
    folder = tmp_path_factory.mktemp("built")
    source = write(folder / "csrc")
    build(source=source, cache=folder / "cache")
    return source, folder / "cache"


@pytest.fixture
def built_copy(built, tmp_path):
    for folder in built:
        shutil.copytree(folder, tmp_path / folder.name)
    return tmp_path / "csrc", tmp_path / "cache"


def only_binary(cache: Path) -> Path:
    (binary,) = cache.glob("*/*.so")
    return binary


# ------------------------------------------------------------------------ the key


def test_equal_recipes_have_equal_keys(source):
    assert _recipe.describe(source).key == _recipe.describe(source).key


@pytest.mark.parametrize(
    "change",
    [
        {"flags": ("-O0",)},
        {"wishes": ()},
        {"torch": "2.99.0 None 0"},
        {"cxx_version": "another compiler"},
        {"nvcc": "/bin/nvcc", "nvcc_version": "99"},
        {"machine": (("CPU", "another CPU"),)},
    ],
    ids=lambda change: next(iter(change)),
)
def test_key_changes_with(source, change):
    recipe = _recipe.describe(source)
    assert dataclasses.replace(recipe, **change).key != recipe.key


@pytest.mark.parametrize("name", ["stub.cpp", "new.cpp", "new.h"])
def test_key_changes_with_a_source(source, name):
    old = _recipe.describe(source).key
    (source / name).write_text("// changed")
    assert _recipe.describe(source).key != old


def test_cuda_files_are_left_out_without_nvcc(source):
    (source / "cuda").mkdir()
    for name in ("cuda/a.cu", "cuda/b.cpp"):
        (source / name).touch()
    plain = dataclasses.replace(_recipe.describe(source), nvcc="")
    recipe = _recipe.replace_sources(plain)
    assert [path.name for path in recipe.cpp_files] == ["stub.cpp"]
    assert recipe.cuda_files == []
    assert {name for name, _ in recipe.sources} == {"stub.cpp"}  # nor in the key
    recipe = _recipe.replace_sources(dataclasses.replace(plain, nvcc="/bin/nvcc"))
    assert [path.name for path in recipe.cpp_files] == ["b.cpp", "stub.cpp"]
    assert [path.name for path in recipe.cuda_files] == ["a.cu"]


def test_folder_of_the_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    monkeypatch.delenv("MINIDP_NATIVE_CACHE", raising=False)
    assert default_folder() == tmp_path / "xdg" / "minidp"
    monkeypatch.setenv("MINIDP_NATIVE_CACHE", str(tmp_path / "mine"))
    assert default_folder() == tmp_path / "mine"


# ------------------------------------------------------------------ without a binary


def test_auto_with_nothing_built(source, tmp_path):
    outcome = _state.attempt("auto", source, tmp_path / "cache")
    assert outcome.module is None
    assert "not built" in outcome.status.reason
    assert "python -m minidp.native build" in outcome.status.reason
    assert not (tmp_path / "cache").exists()  # looking leaves no traces


def test_auto_without_sources(tmp_path):
    outcome = _state.attempt("auto", tmp_path / "nowhere", tmp_path)
    assert outcome.module is None
    assert "no C++ sources" in outcome.status.reason


def test_auto_survives_any_failure(source, tmp_path):
    (source / "new.h").symlink_to(tmp_path / "gone")
    outcome = _state.attempt("auto", source, tmp_path)
    assert outcome.module is None
    assert "FileNotFoundError" in outcome.status.reason


def test_a_cache_that_is_no_folder(source, tmp_path):
    (tmp_path / "file").touch()
    assert (
        "not built" in _state.attempt("auto", source, tmp_path / "file").status.reason
    )
    with pytest.raises(NativeError, match=r"not writable.*MINIDP_NATIVE_CACHE"):
        build(source=source, cache=tmp_path / "file")


@pytest.mark.parametrize("value", ["yes", "AUTO"])
def test_an_unknown_mode_is_refused(monkeypatch, value):
    monkeypatch.setenv("MINIDP_NATIVE", value)
    with pytest.raises(ValueError, match=f"one of auto, 0, 1, but is {value!r}"):
        _state.Decision().library()
    assert command.main(["status"]) == 1


@pytest.mark.parametrize("cxx", ["/missing/c++", "missing-c++ -m64"])
def test_required_without_a_compiler(monkeypatch, source, tmp_path, cxx):
    monkeypatch.setenv("CXX", cxx)
    monkeypatch.setenv("MINIDP_NATIVE", "1")
    decision = _state.Decision(source, tmp_path / "cache")
    for _ in range(2):  # the second answer comes from memory
        with pytest.raises(NativeError, match=re.escape(f"'{cxx.split()[0]}' is not")):
            decision.library()
    assert not decision.outcome().status.is_loaded


def test_required_with_an_empty_path(monkeypatch, source, tmp_path):
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", "")
    outcome = _state.attempt("1", source, tmp_path / "cache")
    assert "'c++' is not on the PATH" in outcome.error


# --------------------------------------------------------------------- with a binary


@needs_compiler
def test_auto_loads_what_is_built(built):
    source, cache = built
    outcome = _state.attempt("auto", source, cache)
    assert outcome.module.answer == 42
    assert outcome.status.path == only_binary(cache)
    assert outcome.status.is_loaded
    assert outcome.status.key in str(outcome.status)


@needs_compiler
def test_zero_does_not_load(built):
    outcome = _state.attempt("0", *built)
    assert outcome.module is None
    assert outcome.status.reason.startswith("MINIDP_NATIVE=0")
    assert outcome.error == ""


@needs_compiler
def test_a_process_decides_once(built, monkeypatch):
    monkeypatch.setenv("MINIDP_NATIVE", "auto")
    decision = _state.Decision(*built)
    with ThreadPoolExecutor(4) as pool:
        modules = list(pool.map(lambda _: decision.library(), range(8)))
    monkeypatch.setenv("MINIDP_NATIVE", "0")
    assert all(module is modules[0] for module in [*modules, decision.library()])


@needs_compiler
def test_stale_is_explained(built_copy):
    source, cache = built_copy
    (source / "stub.cpp").write_text(STUB + "// edited")
    (source / "new.h").touch()
    reason = _state.attempt("auto", source, cache).status.reason
    assert "stale" in reason
    assert "csrc/stub.cpp was edited" in reason
    assert "csrc/new.h is new" in reason


@needs_compiler
def test_every_change_is_explained(built):
    source, cache = built
    recipe = _recipe.describe(source)
    other = dataclasses.replace(
        recipe,
        sources=(),
        torch=recipe.torch.replace(torch.__version__, "2.99.0"),
        flags=(*recipe.flags, "-g"),
    )
    gone, flags, version = sorted(Cache(cache).nearest_changes(other))
    assert flags == "flags changed (- -> -g)"
    assert gone == "csrc/stub.cpp is gone"
    assert version == f"torch changed ({torch.__version__} -> 2.99.0)"


@needs_compiler
def test_a_binary_outlives_its_compiler(built, monkeypatch):
    monkeypatch.setenv("CXX", "/missing/c++")
    for mode in ("auto", "1"):
        assert _state.attempt(mode, *built).module.answer == 42


@needs_compiler
@pytest.mark.parametrize("mode", ["auto", "1"])
def test_a_truncated_binary_is_not_loaded(built_copy, mode):
    # Mapping it would kill the process, so it must not get as far as the loader.
    source, cache = built_copy
    binary = only_binary(cache)
    binary.write_bytes(binary.read_bytes()[:4096])
    outcome = _state.attempt(mode, source, cache)
    if mode == "auto":
        assert outcome.module is None
        assert "damaged" in outcome.status.reason
    else:
        assert outcome.module.answer == 42  # built again


@needs_compiler
@pytest.mark.parametrize("mode", ["auto", "1"])
def test_what_the_loader_says_is_passed_on(built_copy, mode):
    source, cache = built_copy
    recipe = _recipe.describe(source)
    garbage = cache / "garbage"
    garbage.write_text("not a shared library " * 1000)
    Cache(cache).publish(recipe, garbage)
    outcome = _state.attempt(mode, source, cache)
    assert outcome.module is None
    assert "invalid ELF header" in outcome.status.reason or sys.platform != "linux"
    assert "build --force" in outcome.status.reason
    assert outcome.status.path == only_binary(cache)


@needs_compiler
def test_a_broken_record_counts_as_no_binary(built_copy):
    source, cache = built_copy
    for text in ("{", "[]", "{}", json.dumps({"binary": "x", "digest": 1, "parts": 2})):
        (only_binary(cache).parent / "recipe.json").write_text(text)
        assert "not built" in _state.attempt("auto", source, cache).status.reason


# ------------------------------------------------------------------------- building


@needs_compiler
def test_build_says_what_it_does(source, tmp_path):
    said: list[str] = []
    path = build(source=source, cache=tmp_path / "c", verbose=True, say=said.append)
    assert path == only_binary(tmp_path / "c")
    assert "compiling stub.cpp" in said
    steps = [line for line in said if "(done: " in line]
    assert [line.partition(":")[0] for line in steps] == [
        "compiling stub.cpp",
        "linking",
    ]
    assert [line.partition("(")[2] for line in steps] == [
        "done: 1 of 2)",
        "done: 2 of 2)",
    ]
    assert any("-ffp-contract=off" in line for line in said)
    said.clear()
    assert build(source=source, cache=tmp_path / "c", say=said.append) == path
    assert said == ["already built"]
    build(source=source, cache=tmp_path / "c", say=said.append, force=True)
    assert "linking" in said
    assert only_binary(tmp_path / "c").exists()


@needs_compiler
def test_required_with_a_syntax_error(tmp_path, monkeypatch):
    source = write(tmp_path / "csrc", STUB.replace("42);", "42"))
    monkeypatch.setenv("MINIDP_NATIVE", "1")
    decision = _state.Decision(source, tmp_path / "cache")
    with pytest.raises(NativeError, match=r"(?s)stub\.cpp.*error:") as caught:
        decision.library()
    (log,) = (tmp_path / "cache").glob("*.log")
    assert str(log) in str(caught.value)
    assert "error:" in log.read_text()
    assert not list((tmp_path / "cache").glob("building-*"))


@needs_compiler
def test_refused_flags_are_left_out(source, tmp_path):
    recipe = _recipe.describe(source)
    odd = dataclasses.replace(recipe, wishes=(("-O1", "-mno-such-thing"), ("-g0",)))
    said: list[str] = []
    build_into(Cache(tmp_path), odd, said.append, verbose=True)
    assert said[0].endswith("refuses: -O1 -mno-such-thing")
    linking = next(line for line in said if "-shared" in line)
    assert " -g0 " in linking
    assert " -O1 " not in linking


@needs_compiler
def test_sources_that_change_during_the_build(source, tmp_path):
    def say(text: str) -> None:
        (source / "stub.cpp").write_text(STUB + f"// {text}")

    with pytest.raises(NativeError, match="changed during the build"):
        build(source=source, cache=tmp_path / "cache", say=say)


@needs_compiler
@pytest.mark.slow
def test_an_extension_that_uses_torch(tmp_path):
    source = write(tmp_path / "csrc", TORCH_STUB)
    code = (
        "import sys, torch; from pathlib import Path; "
        "from minidp.native import _state; "
        "outcome = _state.attempt('1', Path(sys.argv[1]), Path(sys.argv[2])); "
        "assert not outcome.error, outcome.error; "
        "print(outcome.module.twice(torch.arange(3)).tolist())"
    )
    # Not in this process: pybind11 gives the module that was loaded first to whoever
    # loads another one of the same name, and tests/native needs the real one.
    done = subprocess.run(
        [sys.executable, "-c", code, str(source), str(tmp_path / "cache")],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout == "[0, 2, 4]\n", done.stderr


# ----------------------------------------------------------------- several processes


def start_build(source: Path, cache: Path, cxx: str) -> subprocess.Popen[str]:
    code = (
        "import sys; from pathlib import Path; from minidp.native import build; "
        "print(build(source=Path(sys.argv[1]), cache=Path(sys.argv[2])))"
    )
    return subprocess.Popen(
        [sys.executable, "-c", code, str(source), str(cache)],
        cwd=ROOT,
        env={**os.environ, "CXX": cxx},
        stdout=subprocess.PIPE,
        text=True,
    )


def wait_for(path: Path) -> None:
    deadline = time.monotonic() + 60
    while not path.exists():
        assert time.monotonic() < deadline, f"{path} did not appear"
        time.sleep(0.02)


@needs_compiler
def test_two_builds_at_once_give_one_binary(source, tmp_path):
    # The second waits for the lock, or finds the binary if it starts very late.
    counted = tmp_path / "compilations"
    cxx = write_program(
        tmp_path / "counting-c++",
        rf'case "$*" in *\ -c\ *stub.cpp*) echo x >> {counted}; sleep 1;; esac'
        '\nexec c++ "$@"',
    )
    cache = tmp_path / "cache"
    builders = [start_build(source, cache, cxx) for _ in range(2)]
    answers = [builder.communicate(timeout=120)[0] for builder in builders]
    assert [builder.returncode for builder in builders] == [0, 0]
    assert [Path(answer.strip()) for answer in answers] == [only_binary(cache)] * 2
    assert counted.read_text() == "x\n"
    assert not list(cache.glob("building-*"))


@needs_compiler
def test_a_killed_builder_blocks_nobody(source, tmp_path, monkeypatch):
    started = tmp_path / "started"
    cxx = write_program(
        tmp_path / "hanging-c++",
        'case "$*" in *--version*|*/dev/null*) exec c++ "$@";; esac\n'
        f"echo $$ > {started}.tmp; mv {started}.tmp {started}; exec sleep 100",
    )
    cache = tmp_path / "cache"
    builder = start_build(source, cache, cxx)
    wait_for(started)
    assert len(list(cache.glob("building-*"))) == 1
    builder.kill()
    builder.communicate(timeout=60)
    try:
        # The compiler it had started lives on, and that must not matter either.
        os.kill(int(started.read_text()), 0)
        assert build(source=source, cache=cache) == only_binary(cache)
    finally:
        os.kill(int(started.read_text()), signal.SIGKILL)
    assert not list(cache.glob("building-*"))


def hanging_compiler(path: Path, pids: Path) -> str:
    """A driver, which has a compiler as its child; both write down who they are."""
    return write_program(
        path,
        'case "$*" in *--version*|*/dev/null*) exec c++ "$@";; esac\n'
        f"sh -c 'echo $$ >> {pids}; exec sleep 300' & echo $$ >> {pids}; wait",
    )


def is_running(pid: int) -> bool:
    """Whether a process has not ended; a zombie has."""
    try:
        return (
            Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
        )
    except FileNotFoundError:
        return False


BUILD = """
import signal, sys
from pathlib import Path
signal.signal(signal.SIGINT, signal.default_int_handler)  # also under `pytest &`
from minidp.native import _recipe, __main__ as command
_recipe.source_folder = lambda: Path(sys.argv[1])
sys.exit(command.main(sys.argv[2:]))
"""


def start_command(source: Path, cache: Path, *words: str, **env: str):
    return subprocess.Popen(
        [sys.executable, "-c", BUILD, str(source), *words],
        cwd=ROOT,
        env={**os.environ, "MINIDP_NATIVE_CACHE": str(cache), **env},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@needs_compiler
@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="reads /proc")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_an_interrupted_build_ends_at_once_and_leaves_nothing(source, tmp_path, number):
    for name in ("second.cpp", "third.cpp"):
        shutil.copy(source / "stub.cpp", source / name)
    pids, cache = tmp_path / "pids", tmp_path / "cache"
    cxx = hanging_compiler(tmp_path / "hanging-c++", pids)
    builder = start_command(source, cache, "build", CXX=cxx, MAX_JOBS="2")
    try:
        wait_until(lambda: pids.exists() and len(pids.read_text().split()) == 4)
        builder.send_signal(number)
        out, err = builder.communicate(timeout=60)
    finally:
        builder.kill()
    assert builder.returncode == 128 + signal.SIGINT
    assert err.startswith("interrupted: ")
    assert "Traceback" not in err
    assert out.count("compiling ") == 2  # the third file's turn never came
    started = pids.read_text().split()
    assert len(started) == 4
    wait_until(lambda: not any(is_running(int(pid)) for pid in started))
    assert not list(cache.glob("building-*"))
    assert build(source=write(tmp_path / "other"), cache=cache).exists()  # no lock left


@needs_compiler
def test_an_error_ends_the_other_compilers(source, tmp_path, monkeypatch):
    (source / "wrong.cpp").write_text("no C++")
    pids = tmp_path / "pids"
    cxx = write_program(
        tmp_path / "slow-c++",
        f'case "$*" in *\\ -c\\ *stub.cpp*) echo $$ > {pids}; exec sleep 300;;'
        f"*wrong.cpp*) while [ ! -s {pids} ]; do sleep 0.05; done;; esac\n"
        'exec c++ "$@"',
    )
    monkeypatch.setenv("CXX", cxx)
    monkeypatch.setenv("MAX_JOBS", "2")
    with pytest.raises(NativeError, match=r"compiling wrong\.cpp"):
        build(source=source, cache=tmp_path / "cache")
    assert not is_running(int(pids.read_text()))


@contextmanager
def held(cache: Path) -> Iterator[None]:
    """Somebody builds something."""
    cache.mkdir(exist_ok=True)
    with FileLock(cache / "lock"):
        yield


@needs_compiler
def test_who_finds_its_binary_does_not_wait_for_the_lock(built_copy):
    source, cache = built_copy
    said: list[str] = []
    with held(cache):
        assert _state.attempt("1", source, cache).module.answer == 42
        assert build(source=source, cache=cache, say=said.append) == only_binary(cache)
    assert said == ["already built"]


@needs_compiler
def test_a_binary_that_comes_ends_the_wait(built, tmp_path):
    source, there = built
    cache = tmp_path / "cache"
    said: list[str] = []

    def say(text: str) -> None:
        said.append(text)
        shutil.copytree(there, cache, dirs_exist_ok=True)

    with held(cache):
        (cache / "building-x").mkdir()
        (cache / "building-x" / "one.cpp.o").touch()
        assert build(source=source, cache=cache, say=say) == only_binary(cache)
    assert said[0].startswith(f"waiting for the lock of {cache}: another process is")
    assert said[0].endswith("(files compiled so far: 1)")
    assert said[1:] == ["already built"]


@needs_compiler
def test_a_cache_that_cannot_be_written_is_good_enough_to_load_from(built_copy):
    source, cache = built_copy
    (cache / "lock").unlink(missing_ok=True)
    (cache / "lock").mkdir()  # also root cannot open this
    assert _state.attempt("1", source, cache).module.answer == 42
    with pytest.raises(NativeError, match="not writable"):
        build(source=source, cache=cache, force=True)


def test_asking_imports_nothing_heavy(tmp_path):
    code = (
        "import sys, minidp.native; print(minidp.native.status());"
        "assert 'torch.utils.cpp_extension' not in sys.modules;"
        "assert minidp.native.library() is None"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env={
            **os.environ,
            "MINIDP_NATIVE_CACHE": str(tmp_path),
            "MINIDP_NATIVE": "auto",
        },
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "not loaded" in done.stdout


# ------------------------------------------------------------------------- command


@pytest.fixture
def at_source(source, tmp_path, monkeypatch):
    """The command, which takes no folders, works on the stub."""
    monkeypatch.setattr(_recipe, "source_folder", lambda: source)
    monkeypatch.setenv("MINIDP_NATIVE_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("MINIDP_NATIVE", raising=False)


@needs_compiler
def test_the_command(at_source, capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("MINIDP_NATIVE", "1")
    assert command.main(["status"]) == 1  # and nothing is built by asking
    assert "not built" in capsys.readouterr().out
    assert command.main(["build", "--verbose"]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert "compiling stub.cpp" in printed
    assert printed[-1] == str(only_binary(tmp_path / "cache"))
    assert command.main(["status"]) == 0
    monkeypatch.setenv("MINIDP_NATIVE", "0")
    assert command.main(["status"]) == 1


def test_the_command_fails_with_the_reason(at_source, capsys, monkeypatch):
    monkeypatch.setenv("CXX", "/missing/c++")
    assert command.main(["build"]) == 1
    assert "/missing/c++" in capsys.readouterr().err


def test_building_for_a_process_is_logged(at_source, caplog, monkeypatch):
    monkeypatch.setenv("MINIDP_NATIVE", "auto")
    with caplog.at_level(logging.INFO, logger="minidp"):
        _state.Decision().outcome()
    assert "not built" in caplog.text
