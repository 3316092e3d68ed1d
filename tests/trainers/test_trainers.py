"""The trainers that people use get the same weights from minidp as from torch's DDP.

They are not installed with the test extra: `bash tests/run.sh trainers`.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.trainers import over_items

ROOT = Path(__file__).parents[2]
HERE = Path(__file__).parent
TRAINERS = {
    "accelerate": "accelerate",
    "fabric": "lightning",
    "lightning": "lightning",
    "transformers": "transformers",
}
OURS, TORCHS = "minidp", "torch.nn.parallel.distributed.DistributedDataParallel"
SECONDS = 240

pytestmark = [pytest.mark.trainers, pytest.mark.timeout(3 * SECONDS)]


def needs(package):
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed: bash tests/run.sh trainers")


def torchrun(*arguments, **variables):
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    return python(*launcher, *arguments, **variables)


def python(*arguments, **variables):
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=ROOT,
        env={
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "OMP_NUM_THREADS": "1",
            "PYTHONFAULTHANDLER": "1",  # if a process aborts: where its threads were
            **variables,
        },
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=SECONDS,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


@pytest.mark.parametrize("trainer", TRAINERS)
def test_weights_are_those_of_torchs_ddp(trainer, tmp_path):
    needs(TRAINERS[trainer])
    script = (HERE / "by_trainer.py", trainer)
    ways = {
        "torch": (*script, tmp_path / "torch.pt", "torch"),
        "run": ("-m", "minidp.run", *script, tmp_path / "run.pt", "torch"),
        "own": (*script, tmp_path / "own.pt", "minidp"),
    }
    found = {}
    for way, arguments in ways.items():
        torchrun(*map(str, arguments))
        found[way] = torch.load(tmp_path / f"{way}.pt")
    for way in ("run", "own"):
        assert_same_weights(found[way], found["torch"])


def assert_same_weights(ours, torchs):
    assert ours["wrapper"].startswith(OURS)
    assert torchs["wrapper"] == TORCHS
    assert ours["weights"].keys() == torchs["weights"].keys()
    for name, tensor in torchs["weights"].items():
        assert torch.equal(ours["weights"][name], tensor), name


@pytest.mark.parametrize("trainer", over_items.TRAINERS)
def test_mean_over_all_labels(trainer, tmp_path):
    """Weights and logged losses are those of one process with the whole batch."""
    needs(trainer)
    out = str(tmp_path / "out.pt")
    run = ("-m", "minidp.run", "--average-over", "items")
    torchrun(*run, str(HERE / "over_items.py"), trainer, out)
    found, (weights, losses) = torch.load(out), over_items.alone()
    assert found["losses"] == pytest.approx(losses, rel=1e-9)
    for name, tensor in weights.items():
        assert torch.allclose(found["weights"][name], tensor, rtol=1e-9), name


@pytest.mark.parametrize("is_compared", [False, True])
def test_ranks_that_lightning_starts_itself(tmp_path, is_compared):
    needs("lightning")
    script = (str(HERE / "by_trainer.py"), "lightning")
    torchs, ours = str(tmp_path / "torch.pt"), str(tmp_path / "ours.pt")
    python(*script, torchs, "torch")
    run = ("-m", "minidp.run", *(["--compare", "--no-copy"] if is_compared else []))
    said = python(*run, *script, ours, "torch")
    assert ("weights   identical, bit for bit (models: 1" in said) is is_compared
    assert_same_weights(torch.load(ours), torch.load(torchs))


# Scripts that come with Accelerate, for its users to test an installation with. They
# check their results themselves, and fail with an assertion. (Its other scripts of the
# kind need GPUs, or fail on CPUs with torch's DDP, too.)
OF_ACCELERATE = ["test_script", "test_sync"]


@pytest.mark.parametrize("name", OF_ACCELERATE)
def test_a_script_that_nobody_wrote_for_minidp(name):
    needs("accelerate")
    module = f"accelerate.test_utils.scripts.{name}"
    if importlib.util.find_spec(module) is None:
        pytest.skip(f"this version of accelerate has no {module}")
    # Without this variable accelerate looks for GPUs only, and trains on one rank.
    output = torchrun("-m", "minidp.run", "-m", module, ACCELERATE_USE_CPU="true")
    assert "is minidp.DataParallel" in output
    assert "wrapped no model" not in output
