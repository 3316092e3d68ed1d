"""Counts in one process; what a GPU would do, by hand."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn

from minidp import DataParallel, ItemCountError
from minidp.comm import ItemCounts, item_counts
from minidp.core import kernels
from minidp.errors import ReducerFailedError


class Two:
    """What `ItemCounts` asks a communicator."""

    size, rank = 2, 1


def counts() -> Any:
    return ItemCounts(Two())


@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16], ids=str
)
def test_all_bits_of_a_count_travel_in_any_dtype(dtype):
    mine, tail = counts(), torch.full((40,), math.nan, dtype=dtype)
    mine.add(math.pi, torch.tensor(-1e300))
    mine.write(tail)
    other = torch.zeros(34, dtype=dtype)
    first = counts()
    first._communicator = type("One", (Two,), {"rank": 0})()
    first.add(1e-300, 2.5)
    first.write(other)
    factor = mine.read(tail[:34] + other, divisor=2)
    assert factor == 2 / math.pi
    assert mine.totals.of_ranks.tolist() == [1e-300, math.pi]
    assert mine.totals.mean_loss.item() == -1e300 / math.pi or math.isinf(
        mine.totals.mean_loss.item()
    )


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("is_stale", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_gpu_writes_and_reads_the_same(dtype, is_stale, rank):
    """With tensors, whose values the host does not know."""
    tails = []
    for kind in (float, lambda n: torch.tensor(n, dtype=torch.float64)):
        mine = counts()
        mine._communicator = type("Some", (Two,), {"rank": rank})()
        param = nn.Parameter(torch.ones(2))
        param.grad = torch.full((2,), float(is_stale))
        mine.samples, mine.holds_averages = [param], True
        mine.look()
        param.grad.add_(1)
        mine._step.said.append((kind(math.e), kind(-7.5), None))
        tails.append(torch.full((34,), math.nan, dtype=dtype))
        mine.write(tails[-1])
    assert torch.equal(*tails)
    expected = torch.zeros(2, 3, dtype=torch.float64)
    flags = 2.0 if is_stale else 0.0
    expected[rank] = torch.tensor([flags, math.e, -7.5], dtype=torch.float64)
    assert torch.equal(item_counts._decoded(tails[0]), expected)


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
    """An event of a GPU."""

    def synchronize(self) -> None:
        pass


@pytest.mark.parametrize("by", ["step", "forward"])
def test_counts_that_a_gpu_brings_later_stop_the_step(lone_group, by):
    """On CUDA `read` leaves the check to the guard; here its facts are put there."""
    ddp: Any = DataParallel(nn.Linear(2, 1), average_over="items")
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    ddp.count_items(2)
    ddp(torch.ones(1, 2)).sum().backward()
    items = ddp._reducer.queue.averaging.items
    items._late = torch.tensor([[0.0, math.nan, 0.0]], dtype=torch.float64), Arrived()
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
