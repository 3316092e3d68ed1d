"""`examples/elastic_checkpoint.py`: whatever happens to a file, a whole one is used."""

from __future__ import annotations

import importlib.util
import os
import pickle
from datetime import timedelta
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from tests.support.fresh import run_fresh

pytestmark = pytest.mark.fault

PATH = Path(__file__).parents[2] / "examples" / "elastic_checkpoint.py"


def load_example() -> ModuleType:
    spec = importlib.util.spec_from_file_location("elastic_checkpoint", PATH)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def example(monkeypatch):
    module = load_example()
    monkeypatch.setattr(module, "say", lambda _: None)  # it asks for the rank
    return module


def state(step: int) -> dict[str, Any]:
    return {"step": step, "net": {"weight": torch.full((3,), float(step))}}


@pytest.fixture
def two(example, tmp_path):
    """A directory with checkpoints after steps 1 and 2."""
    for step in (1, 2):
        example.write(example.path_of(tmp_path, step), state(step))
    return tmp_path


def test_cut_short_at_every_byte_and_each_byte_damaged(example, two):
    assert sorted(path.name for path in two.iterdir()) == [
        *("step-00000001.ckpt", "step-00000002.ckpt")
    ]
    newest = example.path_of(two, 2)
    whole = newest.read_bytes()
    assert len(whole) > 1000
    flipped = (
        whole[:i] + bytes([whole[i] ^ 1 << i % 8]) + whole[i + 1 :]
        for i in range(len(whole))
    )
    cut = (whole[:length] for length in range(len(whole)))
    for damaged in (*cut, *flipped, whole + b"\0", bytes(len(whole)), whole * 2):
        newest.write_bytes(damaged)
        assert list(example.whole_ones(two)) == [1]
    newest.write_bytes(whole)
    assert list(example.whole_ones(two)) == [1, 2]


def test_the_newest_stay(example, tmp_path):
    for step in range(1, 7):
        example.write(example.path_of(tmp_path, step), state(step))
    (tmp_path / "step-00000007.part").write_bytes(b"half")
    example.tidy(tmp_path)
    assert sorted(example.whole_ones(tmp_path)) == [4, 5, 6]
    assert len(list(tmp_path.iterdir())) == 3


# ------------------------------------------------------------------- all ranks the same


def load_on_each(ctx: Any, directories: list[str]) -> Any:
    example = load_example()
    found = example.newest_for_all(Path(directories[ctx.rank]), timedelta(seconds=5))
    return found and found["step"]


def test_the_newest_that_every_rank_finds_whole(example, tmp_path):
    here, there = tmp_path / "here", tmp_path / "there"
    for directory in (here, there):
        directory.mkdir()
        for step in (1, 2, 3):
            example.write(example.path_of(directory, step), state(step))
    both = [str(here), str(there)]
    assert run_fresh(load_on_each, 2, both) == [3, 3]
    os.truncate(example.path_of(there, 3), 100)
    assert run_fresh(load_on_each, 2, both) == [2, 2]
    example.write(example.path_of(here, 2), state(20))  # whole, but not the same
    assert run_fresh(load_on_each, 2, both) == [1, 1]
    example.path_of(here, 1).unlink()
    assert run_fresh(load_on_each, 2, both) == [None, None]


class Evil:
    def __reduce__(self) -> Any:
        return os.system, ("true",)


def load_evil(ctx: Any, directory: str) -> str:
    try:
        load_on_each(ctx, [directory])
    except pickle.UnpicklingError as error:
        return str(error)
    return ""


def test_a_checkpoint_cannot_run_code(example, tmp_path):
    example.write(example.path_of(tmp_path, 1), {"step": Evil()})
    assert list(example.whole_ones(tmp_path)) == [1]
    (text,) = run_fresh(load_evil, 1, str(tmp_path))
    assert "Weights only load failed" in text
