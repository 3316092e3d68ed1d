"""The binary is found, built and loaded, or there is a reason that helps.

Nearly all builds are of a stub without torch's headers, which takes under a second.
"""

from __future__ import annotations

import hashlib
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
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch
from filelock import FileLock

import minidp
from minidp import native
from minidp.__main__ import main
from minidp.errors import NativeError
from minidp.native import binary, state

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
        (found,) = self.cache.glob("*/*.so")
        return found

    def use(self, patch):
        """Let this process and those that inherit its environment use them."""
        patch.setattr(binary, "source_folder", lambda: self.source)
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


def test_key_changes_with_every_input_and_every_source(here):
    wanted = binary.inputs()
    assert binary.inputs() == wanted
    keys = {binary.key(wanted)}
    keys |= {binary.key(wanted | {name: "other"}) for name in wanted}
    assert len(keys) == 1 + len(wanted)
    assert {"csrc/stub.cpp", "flags", "nvcc flags", "torch"} < set(wanted)
    assert {"python", "platform", "CPU features", "GPUs"} < set(wanted)
    for name in ("stub.cpp", "new.cpp", "new.h"):
        (here.source / name).write_text("// changed")
        keys.add(binary.key(binary.inputs()))
    assert len(keys) == 4 + len(wanted)


def test_folder_of_the_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    monkeypatch.delenv("MINIDP_NATIVE_CACHE", raising=False)
    assert binary.cache() == tmp_path / "xdg" / "minidp"
    monkeypatch.setenv("MINIDP_NATIVE_CACHE", str(tmp_path / "mine"))
    assert binary.cache() == tmp_path / "mine"


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
    here, monkeypatch, caplog
):
    monkeypatch.setenv("MINIDP_NATIVE", "build")
    monkeypatch.setenv("CXX", "/missing/c++")
    for _ in range(2):
        assert native.library() is None
    missing = [r for r in caplog.records if "'/missing/c++' is not" in r.message]
    assert [record.levelname for record in missing] == ["WARNING"]


@needs_compiler
def test_without_ninja_it_says_what_to_install(here, monkeypatch, tmp_path):
    for name in ("c++", "as", "ld"):
        (tmp_path / name).symlink_to(shutil.which(name))
    monkeypatch.setitem(sys.modules, "ninja", None)  # an import of it fails
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    for mode in ("build", "1"):
        assert reason_of(mode).endswith("What to do: pip install ninja")
    monkeypatch.setenv("MINIDP_NATIVE", "1")
    with pytest.raises(NativeError, match="requires the native kernels"):
        native.library()


@needs_compiler
def test_ninja_need_not_be_on_the_path(here, monkeypatch, tmp_path):
    """As where `.venv/bin/python` is called without activating the environment."""
    folder = tmp_path / "ninja"
    folder.mkdir()
    (folder / "ninja").symlink_to(shutil.which("ninja", path=binary._path_with_ninja()))
    elsewhere = "/usr/bin:/bin"
    monkeypatch.setitem(sys.modules, "ninja", SimpleNamespace(BIN_DIR=str(folder)))
    monkeypatch.setenv("PATH", elsewhere)
    assert state.attempt("1")[0].answer == 42
    assert os.environ["PATH"] == elsewhere


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
    monkeypatch.setattr(binary, "FLAGS", (*binary.FLAGS, "-g"))
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
    garbage = "not a shared library " * 1000
    built.binary.write_text(garbage)
    path = built.binary.with_name("inputs.json")
    record = json.loads(path.read_text())
    record["digest"] = hashlib.sha256(garbage.encode()).hexdigest()
    path.write_text(json.dumps(record))
    assert "invalid ELF header" in reason_of("1") or sys.platform != "linux"
    assert "build --force" in reason_of("auto")
    assert state.attempt("auto")[1].path == built.binary


@needs_compiler
@pytest.mark.parametrize(
    "text", ["{", "[]", "{}", '{"digest": 1, "inputs": 2, "left_out": 3}']
)
def test_a_broken_record_counts_as_no_binary(built, text):
    built.binary.with_name("inputs.json").write_text(text)
    assert "not built" in reason_of("auto")
    assert state.attempt("1")[0].answer == 42  # what is there does not stop a build


# ------------------------------------------------------------------------- building


@needs_compiler
def test_the_command(here, capfd, monkeypatch):
    def said(*words, status=0):
        assert main(["native", *words]) == status
        return capfd.readouterr().out.splitlines()

    monkeypatch.setenv("MINIDP_NATIVE", "1")
    assert "not built" in said("status", status=1)[1]  # nothing is built by asking
    lines = said("build")
    assert lines[-1] == str(here.binary)
    assert lines[0] == "compiling 1 files"
    assert said("build")[0] == "already built"
    lines = said("build", "--force", "--verbose")
    assert any("-ffp-contract=off" in line for line in lines)
    assert "loaded" in said("status")[0]
    monkeypatch.setenv("MINIDP_NATIVE", "0")
    said("status", status=1)
    monkeypatch.setenv("CXX", "/missing/c++")
    assert main(["native", "build", "--force"]) == 1
    assert "/missing/c++" in capfd.readouterr().err


@needs_compiler
def test_an_optional_build_builds_and_then_says_nothing(here, capsys):
    assert main(["native", "build", "--optional"]) == 0
    assert "compiling" in capsys.readouterr().out
    assert main(["native", "build", "--optional"]) == 0
    assert capsys.readouterr() == ("", "")
    assert main(["native", "build", "--optional", "--force"]) == 0
    assert "compiling" in capsys.readouterr().out


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
@pytest.mark.parametrize(
    ("gpu_source", "reason"),
    [
        ("#include <no_such_header_of_cuda.h>", r".*no_such"),
        ("int gpu_kernels = 1;", "ldflags.*cannot find -lc10_cuda|.*cannot find -l"),
        (
            None,
            "found no CUDA toolkit .* for CUDA 99.9; if there is one, set CUDA_HOME",
        ),
    ],
)
def test_what_only_gpus_need_may_be_missing(
    here, monkeypatch, caplog, gpu_source, reason
):
    """As on a machine whose torch has CUDA, but where no toolkit is installed."""
    (here.source / "cuda").mkdir()
    (here.source / "cuda" / "stub2.cpp").write_text(gpu_source or "")
    if gpu_source:
        monkeypatch.setattr(binary, "cuda_toolkit", lambda: str(here.source))
    monkeypatch.setattr(torch.version, "cuda", "99.9")
    monkeypatch.setenv("MINIDP_NATIVE", "1")
    with caplog.at_level(logging.INFO, logger="minidp"):
        assert native.library().answer == 42
    (left_out,) = native.status().left_out
    assert re.match(f"GPU kernels: {reason}", left_out)
    assert f"left out: {left_out}" in caplog.text
    assert f"left out:       {left_out}" in str(native.status())
    found_later = state.attempt("auto")[1]
    assert found_later.left_out == (left_out,)


def test_a_toolkit_of_another_cuda_is_none(monkeypatch, tmp_path):
    monkeypatch.setattr(torch.version, "cuda", "99.9")
    (tmp_path / "include").mkdir()
    (tmp_path / "bin").mkdir()
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    program(tmp_path / "bin" / "nvcc", "echo release 99.1, V99.1.7")
    with pytest.raises(NativeError, match=r"CUDA 99\.9; .* set CUDA_HOME"):
        binary.cuda_toolkit()
    (tmp_path / "include" / "cuda_runtime.h").touch()
    assert binary.cuda_toolkit() == str(tmp_path)
    program(tmp_path / "bin" / "nvcc", "echo release 98.9, V98.9.7")
    with pytest.raises(NativeError, match=r"CUDA 99\.9; .* set CUDA_HOME"):
        binary.cuda_toolkit()


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
        "from minidp.native import binary\n"
        f"binary.source_folder = lambda: Path({str(here.source)!r})\n"
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
LOGGED = "import logging; logging.basicConfig(level=logging.INFO)\n"
COMMAND = "from minidp.__main__ import main; sys.exit(main())"


@pytest.fixture
def hanging(tmp_path):
    """A compiler that compiles nothing, and the file where it writes its number."""
    pids = tmp_path / "pids"
    cxx = program(
        tmp_path / "hanging-c++",
        'case "$*" in *stub.cpp*) ;; *) exec c++ "$@";; esac\n'
        f"echo $$ >> {pids}; exec sleep 300",
    )
    yield cxx, pids
    started = pids.read_text().split() if pids.exists() else []
    for pid in started:  # of a builder that was killed
        with suppress(ProcessLookupError):
            os.kill(int(pid), signal.SIGKILL)


def wait_for(path: Path) -> None:
    """Wait until a builder has compiled all but the last file: a minute beside load."""
    deadline = time.monotonic() + 200
    while not path.exists() or not path.read_text():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@needs_compiler
def test_a_killed_builder_blocks_nobody(here, hanging):
    """The compiler that it has started lives on, and that does not matter either."""
    cxx, pids = hanging
    builder = process(here, BUILD, CXX=cxx)
    wait_for(pids)
    assert len(list(here.cache.glob("building-*"))) == 1
    builder.kill()
    builder.communicate(timeout=150)
    assert "not built" in reason_of("auto")
    assert native.build() == here.binary
    assert not list(here.cache.glob("building-*"))


@needs_compiler
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_an_interrupted_build_leaves_nothing(here, hanging, number):
    cxx, pids = hanging
    builder = process(here, COMMAND, "native", "build", CXX=cxx)
    try:
        wait_for(pids)
        builder.send_signal(number)
        _, err = builder.communicate(timeout=150)
    finally:
        builder.kill()
    assert builder.returncode == 128 + signal.SIGINT
    assert err == "interrupted: nothing was built\n"
    assert not list(here.cache.glob("building-*"))
    assert "not built" in reason_of("auto")
    assert native.build().exists()  # no lock is left


@needs_compiler
def test_ranks_that_all_start_a_build_build_once(here):
    code = "from minidp import native; print(native.library().answer)"
    words = dict.fromkeys(["MINIDP_NATIVE"], "1")
    ranks = [process(here, LOGGED + code, **words) for _ in range(3)]
    said = [rank.communicate(timeout=120) for rank in ranks]
    assert [out for out, _ in said] == ["42\n"] * 3, said
    errors = "".join(err for _, err in said)
    assert errors.count("compiling 1 files") == 1
    # One that starts late finds the binary, and neither waits nor says anything.
    assert errors.count("waiting for") <= errors.count("already built") <= 2


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
