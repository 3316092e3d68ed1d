"""Counts in one process; what a GPU would do, by hand."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn

from minidp import DataParallel, ItemCountError
from minidp.accelerator import HomeStreams
from minidp.core import item_counts, kernels
from minidp.errors import ReducerFailedError


class Two:
    """What `ItemCounts` asks a communicator: this is one rank of two."""

    size, rank, device = 2, 1, torch.device("cpu")


def row_of(kind: Any, *, is_stale: bool) -> list[float]:
    """Return what a rank says; ``kind`` makes the numbers that it counts."""
    param = nn.Parameter(torch.ones(2))
    param.grad = torch.full((2,), float(is_stale))
    two: Any = Two()
    mine = item_counts.ItemCounts(
        two, torch.device("cpu"), lambda: [param], HomeStreams([])
    )
    mine.holds_averages = True
    mine.look()
    param.grad.add_(1)
    mine._step.said.append((kind(math.e), kind(-7.5)))
    row = torch.full((3,), math.nan, dtype=torch.float64)
    write = mine._write if kind is float else mine._write_on_device
    write(mine._step, row)
    found: list[float] = row.tolist()
    return found


@pytest.mark.parametrize("is_stale", [False, True])
def test_a_gpu_writes_the_same(is_stale):
    """With tensors, whose values the host does not know."""
    expected = [2.0 if is_stale else 0.0, math.e, -7.5]
    assert row_of(float, is_stale=is_stale) == expected
    on_gpu = row_of(lambda n: torch.tensor(n, dtype=torch.float64), is_stale=is_stale)
    assert on_gpu == expected


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_factor_in_a_tensor_is_not_rounded_to_sixteen_bits(dtype):
    values = torch.full((5,), 32768.0, dtype=dtype)
    kernels.rescale(values, torch.tensor(1e-6, dtype=torch.float64))
    assert values.dtype is dtype
    expected = torch.tensor(0.032768, dtype=torch.float64).to(dtype)
    assert torch.equal(values, expected.expand(5))


# Torch 2.12 warns of what its own operators make of a checked tensor.
@pytest.mark.filterwarnings("ignore:Sparse invariant checks:UserWarning")
def test_factor_of_a_sparse_gradient():
    for factor in (0.5, torch.tensor(0.5)):
        grad = torch.sparse_coo_tensor(
            [[1, 3]], [[2.0], [4.0]], (5, 1), check_invariants=True
        ).coalesce()
        kernels.rescale(grad, factor)
        assert grad.to_dense().flatten().tolist() == [0.0, 1.0, 0.0, 2.0, 0.0]


class Arrived:
    """Facts that a device has brought to the host."""

    def __init__(self, facts: torch.Tensor) -> None:
        self._facts = facts

    def wait(self) -> torch.Tensor:
        return self._facts


@pytest.mark.parametrize("by", ["step", "forward"])
def test_counts_that_a_gpu_brings_later_stop_the_step(lone_group, by):
    """On CUDA `read` leaves the check to the guard; here its facts are put there."""
    ddp: Any = DataParallel(nn.Linear(2, 1), average_over="items")
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    ddp.count_items(2)
    ddp(torch.ones(1, 2)).sum().backward()
    items = ddp._reducer.queue.averaging.items
    facts = torch.tensor([[0.0, math.nan, 0.0]], dtype=torch.float64)
    items._late = Arrived(facts)
    before = ddp.module.weight.detach().clone()
    act = optimizer.step if by == "step" else lambda: ddp(torch.ones(1, 2))
    with pytest.raises(ItemCountError, match="negative, too large or NaN on rank 0"):
        act()
    assert torch.equal(ddp.module.weight, before)
    with pytest.raises(ReducerFailedError):
        ddp(torch.ones(1, 2))
    ddp.reset()
    ddp.zero_grad()
    ddp.count_items(2)
    ddp(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    assert not torch.equal(ddp.module.weight, before)
