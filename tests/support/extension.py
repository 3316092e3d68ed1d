"""Fixtures: the compiled kernels, whatever MINIDP_NATIVE says."""

from __future__ import annotations

import os
from pathlib import Path
from types import ModuleType

import pytest

from minidp import native
from minidp.native import state

# A binary built in another way (asan.sh) is tested instead of a build of csrc/.
BINARY = os.environ.get("MINIDP_TEST_BINARY")


@pytest.fixture(scope="session")
def library() -> ModuleType:
    """The extension, built first if there is a compiler; else a skip says why not."""
    if BINARY:
        return state.load(Path(BINARY))
    # A process can load one version only: if csrc/ has changed since, not another one.
    if os.environ.get("MINIDP_NATIVE", "auto") != "0":
        loaded = native.library()
        if loaded is not None:
            return loaded
    module, status = state.attempt("1")
    if module is None:
        pytest.skip(f"no native kernels: {status.reason}")
    return module


@pytest.fixture(params=["native", "python"])
def either_kernels(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> str:
    """A test runs twice: minidp with and without the extension."""
    module = request.getfixturevalue("library") if request.param == "native" else None
    monkeypatch.setattr(native, "library", lambda: module)
    return str(request.param)
