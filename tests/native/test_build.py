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
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from filelock import FileLock

import minidp
from minidp import native
from minidp.__main__ import main
from minidp.errors import NativeError
from minidp.native import cache, compile, state
from minidp.native import recipe as recipes

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


class Here(NamedTuple):
    """Sources and a cache that stand for csrc/ and the user's."""

    source: Path
    cache: Path

    @property
    def binary(self) -> Path:
        (binary,) = self.cache.glob("*/*.so")
        return binary

    def use(self, patch):
        """Let this process and those that inherit its environment use them."""
        patch.setattr(recipes, "source_folder", lambda: self.source)
        patch.setattr(state, "_decided", None)
        patch.setenv("MINIDP_NATIVE_CACHE", str(self.cache))
        patch.delenv("MINIDP_NATIVE", raising=False)


@pytest.fixture
def here(tmp_path, monkeypatch):
    """Nothing is built."""
    made = Here(tmp_path / "csrc", tmp_path / "cache")
    made.source.mkdir()
    (made.source / "stub.cpp").write_text(STUB)
    made.use(monkeypatch)
    return made


@pytest.fixture(scope="module")
def built_once(tmp_path_factory):
    folder = tmp_path_factory.mktemp("built")
    made = Here(folder / "csrc", folder / "cache")
    made.source.mkdir()
    (made.source / "stub.cpp").write_text(STUB)
    with pytest.MonkeyPatch.context() as patch:
        made.use(patch)
        native.build()
    return made


@pytest.fixture
def built(built_once, here):
    """The stub is built."""
    shutil.copytree(built_once.cache, here.cache)
    return here


def reason_of(mode: str) -> str:
    module, status = state.attempt(mode)
    assert module is None
    assert not status.is_loaded
    return status.reason


def program(path: Path, script: str) -> str:
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return str(path)


# ------------------------------------------------------------------------ the key


def test_key_changes_with_every_part_and_every_source(here):
    recipe = recipes.describe()
    assert recipes.describe().key == recipe.key
    keys = {recipe.key}
    for name in recipe.parts:
        changed = dataclasses.replace(recipe, parts={**recipe.parts, name: "other"})
        keys.add(changed.key)
    assert len(keys) == 1 + len(recipe.parts)
    assert {"csrc/stub.cpp", "flags", "nvcc flags", "torch"} < set(recipe.parts)
    assert {"python", "platform", "CPU features", "GPUs"} < set(recipe.parts)
    for name in ("stub.cpp", "new.cpp", "new.h"):
        (here.source / name).write_text("// changed")
        keys.add(recipes.describe().key)
    assert len(keys) == 4 + len(recipe.parts)


def test_folder_of_the_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    monkeypatch.delenv("MINIDP_NATIVE_CACHE", raising=False)
    assert cache.folder() == tmp_path / "xdg" / "minidp"
    monkeypatch.setenv("MINIDP_NATIVE_CACHE", str(tmp_path / "mine"))
    assert cache.folder() == tmp_path / "mine"


# ------------------------------------------------------------------ without a binary


def test_auto_with_nothing_built(here, caplog):
    with caplog.at_level(logging.INFO, logger="minidp"):
        assert native.library() is None
    assert "kernels are not built. What to do: python -m minidp.native" in caplog.text
    assert not here.cache.exists()  # looking leaves no traces
    (here.source / "new.h").symlink_to(here.cache)
    assert "FileNotFoundError" in reason_of("auto")  # any failure is survived
    shutil.rmtree(here.source)
    assert "no C++ sources" in reason_of("1")


@pytest.mark.parametrize("value", ["yes", "AUTO"])
def test_an_unknown_mode_is_refused(here, monkeypatch, value):
    monkeypatch.setenv("MINIDP_NATIVE", value)
    with pytest.raises(ValueError, match=f"one of auto, build, 0, 1, but is {value!r}"):
        native.library()
    assert main(["native", "status"]) == 1


@pytest.mark.parametrize("cxx", ["/missing/c++", "missing-c++ -m64", ""])
def test_required_without_a_compiler(here, monkeypatch, cxx):
    monkeypatch.setenv("CXX", cxx)
    monkeypatch.setenv("MINIDP_NATIVE", "1")
    if not cxx:
        monkeypatch.setenv("PATH", "")
    for _ in range(2):  # the second answer comes from memory
        with pytest.raises(
            NativeError, match=re.escape(f"{cxx.split(' ')[0]}' is not")
        ):
            native.library()
    assert not native.status().is_loaded


def test_build_mode_goes_on_without_a_compiler_and_says_so_once(
    here, monkeypatch, tmp_path, caplog
):
    monkeypatch.setattr(state, "_MARK", tmp_path / "mark")
    assert state.read_mode() == "auto"
    (tmp_path / "mark").touch()
    assert state.read_mode() == "build"  # the package was installed so
    monkeypatch.setenv("CXX", "/missing/c++")
    for _ in range(2):
        assert native.library() is None
    missing = [r for r in caplog.records if "'/missing/c++' is not" in r.message]
    assert [record.levelname for record in missing] == ["WARNING"]


def test_an_optional_build_without_a_compiler(here, monkeypatch, capsys):
    words = ["native", "build", "--optional"]
    monkeypatch.setenv("CXX", "/missing/c++")
    assert main(words) == 0
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith(
        "minidp runs in pure Python, with the same bits: There is no"
    )
    monkeypatch.setenv("MINIDP_NATIVE", "0")
    assert main(words) == 0
    assert capsys.readouterr() == ("", "")


# --------------------------------------------------------------------- with a binary


@needs_compiler
def test_a_process_decides_once(built, monkeypatch):
    with ThreadPoolExecutor(4) as pool:
        modules = list(pool.map(lambda _: native.library(), range(8)))
    monkeypatch.setenv("MINIDP_NATIVE", "0")
    assert all(module is modules[0] for module in [*modules, native.library()])
    assert modules[0].answer == 42
    assert native.status().path == built.binary
    assert native.status().key in str(native.status())
    assert reason_of("0").startswith("MINIDP_NATIVE=0")


@needs_compiler
def test_stale_is_explained(built, monkeypatch):
    (built.source / "stub.cpp").rename(built.source / "new.cpp")
    monkeypatch.setattr(recipes, "FLAGS", (*recipes.FLAGS, "-g"))
    reason = reason_of("auto")
    assert "built with another csrc/new.cpp, csrc/stub.cpp, flags. What to" in reason


@needs_compiler
@pytest.mark.parametrize("mode", ["auto", "1"])
def test_a_binary_outlives_its_compiler(built, monkeypatch, mode):
    monkeypatch.setenv("CXX", "/missing/c++")
    assert state.attempt(mode)[0].answer == 42


@needs_compiler
def test_a_truncated_binary_is_not_loaded(built):
    # Mapping it would kill the process, so it must not get as far as the loader.
    built.binary.write_bytes(built.binary.read_bytes()[:4096])
    assert "damaged" in reason_of("auto")
    assert state.attempt("1")[0].answer == 42  # built again


@needs_compiler
def test_what_the_loader_says_is_passed_on(built):
    garbage = built.cache / "garbage"
    garbage.write_text("not a shared library " * 1000)
    cache.publish(recipes.describe(), garbage)
    assert "invalid ELF header" in reason_of("1") or sys.platform != "linux"
    assert "build --force" in reason_of("auto")
    assert state.attempt("auto")[1].path == built.binary


@needs_compiler
def test_a_broken_record_counts_as_no_binary(built):
    for text in ("{", "[]", "{}", json.dumps({"binary": "x", "digest": 1, "parts": 2})):
        (built.binary.parent / "recipe.json").write_text(text)
        assert "not built" in reason_of("auto")


# ------------------------------------------------------------------------- building


@needs_compiler
def test_the_command(here, capsys, monkeypatch):
    def said(*words, status=0):
        assert main(["native", *words]) == status
        return capsys.readouterr().out.splitlines()

    monkeypatch.setenv("MINIDP_NATIVE", "1")
    assert "not built" in said("status", status=1)[1]  # nothing is built by asking
    lines = said("build", "--verbose")
    assert lines[-1] == str(here.binary)
    assert "compiling stub.cpp (1 of 1)" in lines
    assert any("-ffp-contract=off" in line for line in lines)
    assert said("build")[0] == "already built"
    assert "linking" in said("build", "--force")
    assert "loaded" in said("status")[0]
    monkeypatch.setenv("MINIDP_NATIVE", "0")
    said("status", status=1)
    monkeypatch.setenv("CXX", "/missing/c++")
    assert main(["native", "build", "--force"]) == 1
    assert "/missing/c++" in capsys.readouterr().err


@needs_compiler
def test_an_optional_build_builds_and_then_says_nothing(here, capsys):
    assert main(["native", "build", "--optional"]) == 0
    assert "linking" in capsys.readouterr().out
    assert main(["native", "build", "--optional"]) == 0
    assert capsys.readouterr() == ("", "")
    assert main(["native", "build", "--optional", "--force"]) == 0
    assert "linking" in capsys.readouterr().out


@needs_compiler
@pytest.mark.parametrize(("local_rank", "level"), [("0", "WARNING"), ("1", "INFO")])
def test_build_mode_builds_and_one_process_per_host_says_so(
    here, monkeypatch, caplog, local_rank, level
):
    monkeypatch.setenv("MINIDP_NATIVE", "build")
    monkeypatch.setenv("LOCAL_RANK", local_rank)
    with caplog.at_level(logging.INFO, logger="minidp"):
        assert native.library().answer == 42
    said = [r for r in caplog.records if r.levelname == "WARNING" or "C++" in r.message]
    assert [record.levelname for record in said] == [level]


@needs_compiler
def test_required_with_a_syntax_error(here, monkeypatch):
    (here.source / "stub.cpp").write_text(STUB.replace("42);", "42"))
    monkeypatch.setenv("MINIDP_NATIVE", "1")
    with pytest.raises(NativeError, match=r"(?s)stub\.cpp.*error:") as caught:
        native.library()
    (log,) = here.cache.glob("*.log")
    assert str(log) in str(caught.value)
    assert "error:" in log.read_text()
    assert not list(here.cache.glob("building-*"))


@needs_compiler
def test_refused_flags_are_left_out(here, monkeypatch):
    wishes = (("-O1", "-mno-such-thing"), ("-g0",))
    monkeypatch.setattr(recipes, "WISHES", wishes)
    said: list[str] = []
    native.build(say=said.append)
    assert said[0].endswith("refuses: -O1 -mno-such-thing")
    (log,) = here.cache.glob("*.log")
    assert "-mno-such-thing" in cache.left_out(here.binary)[0]
    linking = log.read_text().splitlines()[-1]
    assert " -g0 " in linking
    assert " -O1 " not in linking


@needs_compiler
@pytest.mark.parametrize(
    ("gpu_source", "reason"),
    [
        (
            "#include <no_such_header_of_cuda.h>",
            r"compiling stub2.cpp .* failed: .*no_such",
        ),
        ("int gpu_kernels = 1;", "linking failed: .*cannot find -l"),
        (None, "found no nvcc of CUDA 99.9"),
    ],
)
def test_what_only_gpus_need_may_be_missing(
    here, monkeypatch, tmp_path, caplog, gpu_source, reason
):
    """As on a machine whose torch has CUDA, but where no toolkit is installed."""
    (here.source / "cuda").mkdir()
    (here.source / "cuda" / "stub2.cpp").write_text(gpu_source or "")
    libraries = 'echo "#\\$ LIBRARIES= \\"-lno_such_library\\"" >&2'
    nvcc = program(tmp_path / "nvcc", libraries) if gpu_source else ""
    monkeypatch.setattr(compile, "fitting_nvcc", lambda: nvcc)
    monkeypatch.setattr(torch.version, "cuda", "99.9")
    monkeypatch.setenv("MINIDP_NATIVE", "1")
    with caplog.at_level(logging.INFO, logger="minidp"):
        assert native.library().answer == 42
    (left_out,) = native.status().left_out
    assert re.match(f"GPU kernels: {reason}", left_out)
    assert f"left out: {left_out}" in caplog.text
    assert f"left out:       {left_out}" in str(native.status())
    assert state.attempt("auto")[1].left_out == (
        left_out,
    )  # also when it is found later


@needs_compiler
def test_sources_that_change_during_the_build(here):
    def say(text: str) -> None:
        (here.source / "stub.cpp").write_text(STUB + f"// {text}")

    with pytest.raises(NativeError, match="changed during the build"):
        native.build(say=say)


@needs_compiler
@pytest.mark.slow
def test_an_extension_that_uses_torch(here):
    (here.source / "stub.cpp").write_text(TORCH_STUB)
    code = (
        "import torch; from minidp.native import state; "
        "module, status = state.attempt('1'); "
        "assert module, status.reason; "
        "print(module.twice(torch.arange(3)).tolist())"
    )
    # Not in this process: pybind11 gives the module that was loaded first to whoever
    # loads another one of the same name, and tests/native needs the real one.
    out, err = process(here, code).communicate(timeout=280)
    assert out == "[0, 2, 4]\n", err


# ----------------------------------------------------------------- several processes


def process(here: Here, code: str, *words: str, **env: str) -> subprocess.Popen[str]:
    """Run code in another process that uses the same sources and cache."""
    start = (
        "import signal, sys; from pathlib import Path\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # `pytest &`
        "from minidp.native import recipe\n"
        f"recipe.source_folder = lambda: Path({str(here.source)!r})\n"
    )
    return subprocess.Popen(
        [sys.executable, "-c", start + code, *words],
        cwd=ROOT,
        env={**os.environ, **env},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
        text=True,
    )


BUILD = "from minidp import native; print(native.build())"
COMMAND = "from minidp.__main__ import main; sys.exit(main())"


def hanging_compiler(folder: Path) -> tuple[str, Path]:
    """A compiler that compiles nothing, and the file where it writes its number."""
    pids = folder / "pids"
    cxx = program(
        folder / "hanging-c++",
        'case "$*" in */dev/null*) exec c++ "$@";; esac\n'
        f"echo $$ >> {pids}; exec sleep 300",
    )
    return cxx, pids


def wait_for_compilers(pids: Path, count: int) -> None:
    deadline = time.monotonic() + 60
    while not pids.exists() or len(pids.read_text().split()) < count:
        assert time.monotonic() < deadline
        time.sleep(0.02)


def wait_for_end_of(pid: int) -> None:
    deadline = time.monotonic() + 60
    with suppress(ProcessLookupError, FileNotFoundError):
        while (
            Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
        ):
            assert time.monotonic() < deadline
            time.sleep(0.02)


@needs_compiler
def test_a_killed_builder_blocks_nobody(here, tmp_path):
    cxx, pids = hanging_compiler(tmp_path)
    builder = process(here, BUILD, CXX=cxx)
    wait_for_compilers(pids, 1)
    assert len(list(here.cache.glob("building-*"))) == 1
    builder.kill()
    builder.communicate(timeout=150)
    try:
        # The compiler that it has started lives on, and that must not matter either.
        assert native.build() == here.binary
    finally:
        os.kill(int(pids.read_text()), signal.SIGKILL)
    assert not list(here.cache.glob("building-*"))


@needs_compiler
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_an_interrupted_build_leaves_nothing(here, tmp_path, number):
    for name in ("second.cpp", "third.cpp"):
        shutil.copy(here.source / "stub.cpp", here.source / name)
    cxx, pids = hanging_compiler(tmp_path)
    builder = process(here, COMMAND, "native", "build", CXX=cxx, MAX_JOBS="2")
    try:
        wait_for_compilers(pids, 2)
        builder.send_signal(number)
        out, err = builder.communicate(timeout=150)
    finally:
        builder.kill()
    assert builder.returncode == 128 + signal.SIGINT
    assert err == "interrupted: the compilers were ended, and nothing was built\n"
    for pid in pids.read_text().split():
        wait_for_end_of(int(pid))
    assert out.count("compiling ") == 2  # the third file's turn never came
    assert not list(here.cache.glob("building-*"))
    for name in ("second.cpp", "third.cpp"):
        (here.source / name).unlink()
    assert native.build().exists()  # no lock is left


@pytest.mark.parametrize("starts", ["just before", "after"])
def test_the_end_of_a_build_misses_no_compiler(tmp_path, monkeypatch, starts):
    """Ctrl-C may come while a thread is about to start one, or has just done so."""
    monkeypatch.setenv("MINIDP_NATIVE_CACHE", str(tmp_path))
    plain, started = subprocess.Popen, []

    class Slow(plain):
        def __init__(self, *args, **more):
            super().__init__(*args, **more)
            started.append(self)
            time.sleep(0.5)  # the compiler runs, and nobody knows it yet

    monkeypatch.setattr(compile.subprocess, "Popen", Slow)
    build = compile._Build(recipes.describe(), tmp_path, lambda _: None)
    if starts == "after":
        build._end()
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(build._run, "compiling", ["sleep", "60"])
        while not (started or running.done()):
            time.sleep(0.01)
        build._end()
        error = running.exception(timeout=20)
    assert isinstance(error, NativeError)
    assert len(started) == (starts == "just before")


@needs_compiler
def test_who_finds_its_binary_does_not_wait_for_the_lock(built):
    said: list[str] = []
    with FileLock(built.cache / "lock"):
        assert state.attempt("1")[0].answer == 42
        assert native.build(say=said.append) == built.binary
    assert said == ["already built"]


@needs_compiler
def test_who_waits_says_so_and_finds_what_was_built_meanwhile(built_once, here):
    said: list[str] = []
    here.cache.mkdir()
    lock = FileLock(here.cache / "lock")
    lock.acquire()

    def say(text: str) -> None:
        said.append(text)
        shutil.copytree(built_once.cache, here.cache, dirs_exist_ok=True)
        lock.release()

    assert native.build(say=say) == here.binary
    assert said[0].startswith(f"waiting for the lock of {here.cache}: another process")
    assert said[1:] == ["already built"]


@needs_compiler
def test_a_cache_that_cannot_be_written_is_good_enough_to_load_from(built):
    (built.cache / "lock").unlink(missing_ok=True)
    (built.cache / "lock").mkdir()  # also root cannot open this
    assert state.attempt("1")[0].answer == 42
    with pytest.raises(NativeError, match=r"not writable, set MINIDP_NATIVE_CACHE"):
        native.build(force=True)


def test_asking_imports_nothing_heavy(here):
    code = (
        "import minidp.native; print(minidp.native.status());"
        "assert 'torch.utils.cpp_extension' not in sys.modules;"
        "assert minidp.native.library() is None"
    )
    out, err = process(here, code, MINIDP_NATIVE="auto").communicate(timeout=120)
    assert "not loaded" in out, err
    assert err == ""
