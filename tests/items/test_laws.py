"""``average_over="items"``: gradients are those of one process with the whole batch."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from minidp import native
from minidp.config import setting
from tests.support.both import grads, same, wrapped
from tests.support.combined import combined
from tests.support.ranks import on_ranks
from tests.support.tracing import collective_trace

pytestmark = pytest.mark.laws

RELATIVE = {torch.float32: 1e-6, torch.float64: 1e-14}
KINDS = ("int", "float", "tensor")


@dataclass(frozen=True)
class Case:
    """What all ranks do: per step, per rank, the sizes of its micro-batches."""

    dtype: torch.dtype
    options: tuple[tuple[str, Any], ...]
    steps: tuple[tuple[tuple[int, ...], ...], ...]
    weighs: bool  # a mean loss, weighed; else a sum, counted
    counts_first: bool  # before the forward
    kind: str  # of the counts; "float": items have weights
    memory: str  # MINIDP_SHARED_MEMORY
    branches: tuple[bool, ...] = ()  # per rank, whether it uses the second branch


class Net(nn.Module):
    """Two branches; several buckets with small caps."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.first = nn.Sequential(nn.Linear(4, 9), nn.Tanh(), nn.Linear(9, 3))
        self.second = nn.Linear(4, 3)
        self.to(dtype)

    def forward(self, x: torch.Tensor, both: bool = True) -> torch.Tensor:
        out = self.first(x)
        return out + self.second(x) if both else out


def items(case: Case, step: int, rank: int, k: int) -> tuple[torch.Tensor, ...]:
    """Inputs, and the weight of each item."""
    size = case.steps[step][rank][k]
    random = torch.Generator().manual_seed(1000 * step + 100 * rank + k)
    x = torch.rand(size, 4, generator=random, dtype=torch.float64)
    weights = torch.ones(size, dtype=torch.float64)
    if case.kind == "float":
        weights = torch.rand(size, generator=random, dtype=torch.float64) + 0.5
    return x.to(case.dtype), weights.to(case.dtype)


def losses(out: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    return ((out + 2).square().sum(1) * weights).sum()


def count_of(case: Case, weights: torch.Tensor) -> Any:
    if case.kind == "tensor":
        return torch.tensor(len(weights))
    return len(weights) if case.kind == "int" else weights.double().sum().item()


def micro_batch(case: Case, ddp: Any, place: tuple[int, int, int]) -> None:
    x, weights = items(case, *place)
    n = count_of(case, weights)
    both = case.branches[place[1]] if case.branches else True
    if case.weighs:
        loss = losses(ddp(x, both), weights)
        ddp.weigh_loss(loss / n, n).backward()
        return
    if case.counts_first:
        ddp.count_items(n)
    loss = losses(ddp(x, both), weights)
    if not case.counts_first:
        ddp.count_items(n, loss)
    loss.backward()


def whole(case: Case, step: int, net: nn.Module) -> tuple[list[Any], float, float]:
    """Gradients of the whole batch in one backward, its mean loss, its items."""
    net.zero_grad()
    total, count = torch.zeros((), dtype=case.dtype), 0.0
    for rank, sizes in enumerate(case.steps[step]):
        both = case.branches[rank] if case.branches else True
        parts = [items(case, step, rank, k) for k in range(len(sizes))]
        x, weights = (torch.cat(each) for each in zip(*parts, strict=True))
        total = total + losses(net(x, both), weights)
        count += weights.double().sum().item()
    (total / count).backward()
    return [p.grad for p in net.parameters()], total.item() / count, count


def check_on_rank(ctx: Any, case: Case, why_not_shared: str) -> None:
    """Gradients, loss and count are those of the whole batch, in every step."""
    limit, net = RELATIVE[case.dtype], Net(case.dtype)
    alone = copy.deepcopy(net)
    ddp: Any = wrapped(ctx, net, average_over="items", **dict(case.options))
    for step, sizes in enumerate(case.steps):
        ddp.zero_grad()
        *local, last = range(len(sizes[ctx.rank]))
        with ddp.no_sync():
            for k in local:
                micro_batch(case, ddp, (step, ctx.rank, k))
        micro_batch(case, ddp, (step, ctx.rank, last))
        expected, mean, count = whole(case, step, alone)
        totals = ddp.item_totals
        if not case.weighs and case.counts_first:
            assert totals.mean_loss.isnan()
        else:
            assert abs(totals.mean_loss.item() / mean - 1) <= limit
        assert difference([p.grad for p in net.parameters()], expected) <= limit
        assert abs(totals.count.item() / count - 1) <= 1e-14
    why = ddp._reducer.queue.averaging.no_shared_memory
    assert why_not_shared in why if why_not_shared else not why


def difference(mine: list[Any], expected: list[Any]) -> float:
    """The largest difference, relative to each tensor's largest element."""
    largest = 0.0
    for a, b in zip(mine, expected, strict=True):
        if b is None:
            assert a is None or not a.any()
            continue
        off = (a.double() - b.double()).abs().max() / b.double().abs().max()
        largest = max(largest, off.item())
    return largest


FLAGS = ("gradient_as_bucket_view", "batched_grad_copy")
MODES = ("", "find_unused_parameters", "static_graph")


@st.composite
def cases(draw: st.DrawFn) -> Case:
    ranks = draw(st.integers(1, 4))
    sizes = st.lists(st.integers(0, 5), min_size=1, max_size=3).map(tuple)
    step = st.lists(sizes, min_size=ranks, max_size=ranks).map(tuple)
    mode = draw(st.sampled_from(MODES))
    options = {name: True for name in FLAGS if draw(st.booleans())}
    options |= {mode: True} if mode else {}
    options |= draw(st.sampled_from([{}, {"bucket_cap_mb": 64 / 2**20}]))
    branches: tuple[bool, ...] = ()
    if mode == "find_unused_parameters":
        branches = tuple(draw(st.booleans()) for _ in range(ranks))
    return Case(
        draw(st.sampled_from([*RELATIVE])),
        tuple(options.items()),
        tuple(
            each if any(map(sum, each)) else ((1,), *each[1:])
            for each in draw(st.lists(step, min_size=1, max_size=4))
        ),
        draw(st.booleans()),
        draw(st.booleans()),
        draw(st.sampled_from(KINDS)),
        draw(st.sampled_from(["auto", "0"])),
        branches,
    )


@given(cases())
def test_gradients_are_those_of_the_whole_batch(pool, case):
    ranks, words = len(case.steps[0]), "=0" if case.memory == "0" else ""
    if ranks == 1:
        words = "one rank"
    elif native.library() is None and case.memory != "0":
        words = "extension"
    pool.run(check_with_memory, ranks, case, words)


def check_with_memory(ctx: Any, case: Case, why_not_shared: str) -> None:
    with setting({"MINIDP_SHARED_MEMORY": case.memory}):
        check_on_rank(ctx, case, why_not_shared)


@on_ranks(2)
@pytest.mark.parametrize(("n", "memory"), combined([1, 8, 4096], ["auto", "0"]))
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("flag", ["", *FLAGS])
def test_equal_counts_give_the_bits_of_the_plain_path(ctx, flag, mode, n, memory):
    """With one further collective, a few bytes, before the first bucket."""
    options = {name: True for name in (flag, mode) if name}
    with setting({"MINIDP_SHARED_MEMORY": memory}):
        plain, counted = (
            bits_and_collectives(ctx, over, options, n) for over in ("ranks", "items")
        )
    assert same(plain[0], counted[0])
    message = ("all_reduce", "torch.float64")
    assert counted[1].count(message) == 1
    counted[1].remove(message)
    assert plain[1]
    assert counted[1] == plain[1]


def bits_and_collectives(ctx: Any, over: str, options: Any, n: int) -> Any:
    """Gradients of three steps, and the collectives of the last."""
    ddp: Any = wrapped(ctx, Net(torch.float32), average_over=over, **options)
    history = []
    for step in range(3):
        ddp.zero_grad()
        random = torch.Generator().manual_seed(10 * step + ctx.rank)
        x = torch.randn(8, 4, generator=random)
        with collective_trace() as trace:
            loss = ddp(x).square().mean()
            (loss if over == "ranks" else ddp.weigh_loss(loss, n)).backward()
        history.append(grads(ddp))
    return history, [(name, dtype) for name, _, dtype in trace]
