"""Any numbers of inputs per rank in ``join()``: plain averages, and torch's bits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support import oracle
from tests.support.training import Plain, Training, difference, train_both

pytestmark = pytest.mark.laws

MODES = ["default", "find_unused_parameters", "static_graph"]
FLAGS = ["gradient_as_bucket_view"] + ["batched_grad_copy"] * (
    "batched_grad_copy" in oracle.TAKES
)
CAPS = [None, 32 / 2**20, 200 / 2**20]


@st.composite
def trainings(draw: st.DrawFn, mode: str, world_size: int) -> Training:
    options = dict.fromkeys(draw(st.sets(st.sampled_from(FLAGS))), True)
    parts = draw(st.sets(st.sampled_from(["batch_norm", "sparse", "complex"])))
    if mode != "default":
        options[mode] = True
        parts |= {"spare", "never"}
    flags = st.tuples(*[st.booleans()] * world_size)
    # A static graph is the same in all forwards, but need not be on all ranks.
    num_masks = 1 if mode == "static_graph" else 3
    return Training(
        parts=frozenset(parts),
        options=(*options.items(), ("bucket_cap_mb", draw(st.sampled_from(CAPS)))),
        hooks=draw(st.sampled_from([(), ("allreduce",), ("by_divisor",)])),
        counts=draw(st.tuples(*[st.integers(0, 3)] * world_size)),
        joins=draw(st.booleans()),
        quiet=draw(st.frozensets(st.integers(0, 2), max_size=2)),
        zeroing=draw(st.sampled_from(["Z", "z", "-", "z-Z"])),
        spare=tuple(draw(st.lists(flags, min_size=1, max_size=num_masks))),
    )


def torch_survives(training: Training) -> bool:
    """Whether torch's DDP neither raises on some ranks only nor waits for ever."""
    if "by_divisor" in training.hooks:  # its buckets have no such method
        return False
    if "sparse" in training.parts:  # it shadows none that had no gradient yet
        return False
    if ("static_graph", True) in training.options:  # the first backward is special
        return min(training.counts) > 0 and 0 not in training.quiet
    return True


def check(pool: Any, training: Training) -> None:
    given = training, torch_survives(training)
    results = pool.run(train_both, len(training.counts), *given)
    expected = Plain(training).run()
    for rank, (ours, _) in enumerate(results):
        found = difference(expected[rank], ours, tolerance=1e-4)
        assert not found, f"rank {rank}: {found}"
        for name, value in ours.state.items():
            assert torch.equal(value, results[0][0].state[name]), f"{name}, rank {rank}"
    # A joined rank of torch sends its last used-map again: parameters that nobody uses
    # any more get zeros, or their old gradients averaged once more.
    may_be_wrong = ("find_unused_parameters", True) in training.options
    if may_be_wrong and any(
        difference(plain, theirs, tolerance=1e-4)
        for plain, (_, theirs) in zip(expected, results, strict=True)
        if theirs is not None
    ):
        return
    for rank, (ours, theirs) in enumerate(results):
        found = "" if theirs is None else difference(theirs, ours)
        assert not found, f"rank {rank}, torch: {found}"


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("mode", MODES)
def test_join(pool: Any, mode: str, world_size: int) -> None:
    @settings(max_examples=max(1, settings.default.max_examples // 4))
    @given(trainings(mode, world_size))
    def run(training: Training) -> None:
        check(pool, training)

    run()
