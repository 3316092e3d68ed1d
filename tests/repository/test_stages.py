"""The stages of `tests/run.sh`: what one does that can seldom run here."""

from __future__ import annotations

import importlib

import pytest

pytest.importorskip("nox")


class Skipped(Exception):
    """What nox raises to end a stage."""


class Session:
    """Notes what a stage runs, and runs nothing."""

    posargs = ()

    def __init__(self, *, sees_gpu: bool, kernels: str, fails: bool) -> None:
        self.answers = {"is_available": str(sees_gpu), "kernels_for": kernels}
        self.fails, self.ran = fails, []

    def chdir(self, _path):
        """Stay where we are."""

    def log(self, _text):
        """Say nothing."""

    def skip(self, text):
        raise Skipped(text)

    def run(self, *words, **_options):
        for asked, answer in self.answers.items():
            if any(asked in word for word in words):
                return f"a warning\n{answer}\n"
        self.ran.append(next(word for word in words[1:] if not word.startswith("-")))
        if self.fails and "pytest" in words:
            raise RuntimeError("a test has failed")
        return True


@pytest.fixture
def gpu(monkeypatch, tmp_path):
    """Return the stage, with an `nvidia-smi`."""
    program = tmp_path / "nvidia-smi"
    program.touch(0o755)
    monkeypatch.setenv("PATH", "")  # which the first import changes, too
    module = importlib.import_module("tests.noxfile")
    monkeypatch.setenv("PATH", str(tmp_path))
    return module.gpu.func


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("kernels", ["cuda", "None"])
def test_one_command_measures_the_speed_of_a_gpu_too(gpu, kernels, fails):
    """Also if a test fails; of the copies only if the extension has kernels."""
    session = Session(sees_gpu=True, kernels=kernels, fails=fails)
    if fails:
        with pytest.raises(RuntimeError):
            gpu(session)
    else:
        gpu(session)
    copies = ["benchmarks/flatten.py"] * (kernels == "cuda")
    assert session.ran == [
        *("pytest", "minidp.native", *copies, "benchmarks/overhead.py")
    ]


def test_no_gpu_is_no_failure(gpu):
    session = Session(sees_gpu=False, kernels="None", fails=False)
    with pytest.raises(Skipped, match="torch sees no GPU"):
        gpu(session)
    assert not session.ran
