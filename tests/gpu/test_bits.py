"""Gradients, parameters and module buffers have the bits that torch's DDP gives."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.gpu import scenarios
from tests.gpu.places import EVERYWHERE, NCCL, ON_DEVICES, ON_GPUS, at
from tests.gradients.test_pairs_of_features import (
    FEATURES,
    MORE,
    check_numbers,
    oddities_of,
    training_of,
)
from tests.step_in_backward import test_training as stepping
from tests.support import oracle
from tests.support.both import on_both, same
from tests.support.training import difference, train_both

NO_OPTIONS: dict[str, Any] = {}
VIEWS = {"gradient_as_bucket_view": True}
STATIC = {"static_graph": True}
UNUSED = {"find_unused_parameters": True}
BATCHED = {"batched_grad_copy": True}
MODES = [NO_OPTIONS, VIEWS, STATIC, UNUSED, BATCHED]
NO_SPARSE = "it has no sparse tensors"
everywhere = at(EVERYWHERE)
name = "-".join
modes = pytest.mark.parametrize("mode", MODES, ids=lambda m: name(m) or "default")
both = pytest.mark.parametrize("mode", [NO_OPTIONS, VIEWS], ids=["default", "views"])


def check(ranks: Any, scenario: Any, *args: Any) -> list[Any]:
    """The scenario's results are those of torch's DDP, on every rank."""
    found = ranks.run(scenarios.exactly, on_both, scenario, *args)
    for rank, (theirs, ours) in enumerate(found):
        assert not isinstance(theirs, str), f"torch fails: {theirs}"
        assert not isinstance(ours, str), f"rank {rank}: {ours}"
        assert same(theirs, ours), f"rank {rank}: torch {theirs}, minidp {ours}"
    return [ours for _, ours in found]


# --------------------------------------------------------------- options, no_sync, join

COMBINATIONS = [frozenset[str](), *(frozenset({name}) for name in FEATURES)]
COMBINATIONS += [features for features in MORE if features not in COMBINATIONS]
# What torch's DDP does not do, or only by chance, is judged in tests/gradients.
COMBINATIONS = [features for features in COMBINATIONS if not oddities_of(features)]


@at(ON_DEVICES)  # on the CPU it is tests/gradients/test_pairs_of_features.py
@pytest.mark.parametrize(
    "features", COMBINATIONS, ids=lambda f: "+".join(sorted(f)) or "default"
)
def test_training(ranks: Any, features: frozenset[str]) -> None:
    if "sparse" in features:
        ranks.skip_if_simulated(NO_SPARSE)
        if ranks.place in NCCL:
            pytest.skip("torch's DDP refuses sparse gradients on NCCL")
    training = training_of(features, ranks.place.world_size)
    oracle.skip_unless_torch_takes(name for name, _ in training.options)
    logs = ranks.run(scenarios.exactly, train_both, training)
    for rank, (ours, theirs) in enumerate(logs):
        assert difference(theirs, ours) == "", f"rank {rank}"
    check_numbers(training, [ours for ours, _ in logs])


@everywhere
@modes
def test_every_dtype_and_layout(ranks: Any, mode: dict[str, Any]) -> None:
    ranks.skip_if_simulated(NO_SPARSE)
    oracle.skip_unless_torch_takes(mode)
    check(ranks, scenarios.mixed_dtypes, mode)


@at(NCCL)
@both
def test_sparse_gradients(ranks: Any, mode: dict[str, Any]) -> None:
    """Those of small integers are exactly the dense ones; torch's DDP refuses them."""
    for found in ranks.run(scenarios.sparse_and_dense, mode):
        for sparse, dense in found:
            assert torch.equal(sparse, dense)
            assert dense.any()


# -------------------------------------------------------------------------- around them


@everywhere
@both
@pytest.mark.parametrize("hook", scenarios.HOOKS)
def test_comm_hook(ranks: Any, hook: str, mode: dict[str, Any]) -> None:
    if hook == "power_sgd":
        ranks.skip_if_simulated(
            "torch's PowerSGD drops memory that a stream still reads"
        )
    check(ranks, scenarios.with_hook, hook, mode)


@everywhere
@both
def test_autocast_and_scaler(ranks: Any, mode: dict[str, Any]) -> None:
    for history in check(ranks, scenarios.with_amp, mode):
        scales = [scale for *_, scale in history]
        assert scales[2] < scales[1], "the overflow was not noticed"
        before, after = history[1][1], history[2][1]
        assert same(before, after), "a step was taken in spite of the overflow"


@everywhere
def test_sync_batch_norm_is_that_of_the_full_batch(ranks: Any) -> None:
    ranks.skip_if_simulated("it has no kernels for torch's layer")
    expected, *_ = ranks.run(scenarios.exactly, scenarios.full_batches)
    for found in ranks.run(scenarios.exactly, scenarios.sync_batch_norm):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@at(ON_GPUS)
def test_device_ids_move_inputs(ranks: Any) -> None:
    for _, device, ids, output in check(ranks, scenarios.moved_inputs):
        assert device.startswith("cuda")
        assert ids == [output]


SEVERAL_BUCKETS = {"bucket_cap_mb_list": [0.00005]}


@everywhere
@pytest.mark.parametrize("how", [{}, {"clip": 0.3}], ids=["", "clipped"])
@pytest.mark.parametrize("name", ["sgd", "adamw"])
def test_steps_in_the_backward(ranks: Any, name: str, how: dict[str, Any]) -> None:
    case = name, SEVERAL_BUCKETS, how
    for theirs, ours in ranks.run(scenarios.exactly, stepping.train, *case):
        assert same(theirs, ours)


@everywhere
@both
def test_auto(ranks: Any, mode: dict[str, Any]) -> None:
    """Two numbers have one sum, whatever the buckets are."""
    check(ranks, scenarios.auto_layout, mode)


@everywhere
@modes
def test_recording_changes_nothing(ranks: Any, mode: dict[str, Any]) -> None:
    oracle.skip_unless_torch_takes(mode)
    check(ranks, scenarios.recorded, mode)
