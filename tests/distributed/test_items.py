"""``average_over="items"`` where something is unusual; the usual: tests/property."""

from __future__ import annotations

import contextlib
import copy
import math
import os
import pickle
import signal
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel.distributed import _MixedPrecision

import minidp
from minidp import DataParallel, ItemCountError, SyncBatchNorm, comm_hooks
from minidp.config import setting
from tests.support.fresh import run_fresh
from tests.support.tracing import collective_trace

SIZES = (3, 1, 0, 2)  # items of each rank, in a step
ITEMS = {"average_over": "items"}


class Net(nn.Module):
    def __init__(self, dtype: torch.dtype = torch.float64, norm: Any = None) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first, self.second = nn.Linear(3, 5), nn.Linear(5, 2)
        self.norm = norm(5) if norm else nn.Identity()
        self.to(dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.tanh(self.norm(self.first(x))))


def inputs(rank: int, step: int = 0, size: int | None = None) -> torch.Tensor:
    random = torch.Generator().manual_seed(100 * rank + step)
    size = SIZES[(rank + step) % 4] if size is None else size
    return torch.randn(size, 3, generator=random, dtype=torch.float64)


def loss_of(net: Any, x: torch.Tensor) -> torch.Tensor:
    return (net(x) - 1).square().sum()


def wrap(ctx: Any, net: nn.Module | None = None, **options: Any) -> Any:
    net = Net() if net is None else net
    return DataParallel(net, process_group=ctx.group, **(ITEMS | options))


def step_on(ddp: Any, x: torch.Tensor, *, zero: bool = True) -> None:
    if zero:
        ddp.zero_grad()
    ddp.count_items(len(x))
    loss_of(ddp, x).backward()


def whole(net: nn.Module, ranks: Any, step: int = 0) -> list[torch.Tensor]:
    """Gradients of all ranks' items in one batch."""
    x = torch.cat([inputs(rank, step) for rank in ranks])
    net.zero_grad()
    (loss_of(net, x) / len(x)).backward()
    return [p.grad.clone() for p in net.parameters() if p.grad is not None]


def close(net: nn.Module, expected: Any, relative: float = 1e-13) -> bool:
    mine = [p.grad for p in net.parameters() if p.grad is not None]
    return len(mine) == len(expected) and all(
        (a.double() - b.double()).abs().max() <= relative * b.double().abs().max()
        for a, b in zip(mine, expected, strict=True)
    )


def failure(run: Any) -> str:
    """The text of the ItemCountError that ``run`` raises; "" if none."""
    try:
        run()
    except ItemCountError as error:
        return str(error)
    return ""


# ---------------------------------------------------------- counts that give no mean


def says(ctx: Any, counts: list[Any], options: Any) -> tuple[str, bool, bool, str]:
    """The error, whether parameters and step stay, and whether a reset mends it."""
    ddp = wrap(ctx, **options)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    step_on(ddp, inputs(ctx.rank))
    optimizer.step()
    ddp.zero_grad()
    before = [p.detach().clone() for p in ddp.parameters()]
    if (count := counts[ctx.rank]) is not None:
        ddp.count_items(count)
    text = failure(loss_of(ddp, inputs(ctx.rank)).backward)
    try:
        optimizer.step()
        refused = False
    except minidp.MiniDPError:
        refused = all(p.grad is None for p in ddp.parameters()) or True
    stayed = all(map(torch.equal, before, ddp.parameters()))
    ddp.reset()
    optimizer.zero_grad()
    alone = copy.deepcopy(ddp.module)
    step_on(ddp, inputs(ctx.rank))
    mended = close(ddp.module, whole(alone, range(ctx.world_size)))
    return text, refused, stayed, "mended" * mended


@pytest.mark.parametrize(
    ("counts", "expected"),
    [
        ([4, None], "No number of items was said on rank 1"),
        ([None, None], "No number of items was said on ranks 0, 1"),
        ([None, 0], "No number of items was said on rank 0"),
        ([0, 0], "All ranks counted 0 items"),
        ([math.nan, 1], "negative, too large or NaN on rank 0"),
        ([torch.tensor(math.nan), 1], "negative, too large or NaN on rank 0"),
        ([1, -1], "negative, too large or NaN on rank 1"),
        ([5, torch.tensor(-2)], "negative, too large or NaN on rank 1"),
        ([10**400, 1], "negative, too large or NaN on rank 0"),
        ([math.inf, math.nan], "NaN on ranks 0, 1"),
        ([1e308, 1], "negative, too large or NaN on rank 0"),
    ],
    ids=str,
)
@pytest.mark.parametrize(
    "options", [{"bucket_cap_mb": 0}, {"gradient_as_bucket_view": True}], ids=str
)
def test_counts_without_a_mean(pool, counts, expected, options):
    for text, refused, stayed, mended in pool.run(says, 2, counts, options):
        assert expected in text
        assert refused
        assert stayed
        assert mended


def adds_to_averages(ctx: Any, local: bool, options: Any) -> list[str]:
    ddp = wrap(ctx, **options)
    step_on(ddp, inputs(ctx.rank))
    texts = []
    for in_place in (True, None):  # None: zero_grad() is left out, on rank 0 only
        if in_place or ctx.rank:
            ddp.zero_grad(set_to_none=not in_place)
        if local:
            with ddp.no_sync():
                step_on(ddp, inputs(ctx.rank), zero=False)
        run = lambda: step_on(ddp, inputs(ctx.rank), zero=False)  # noqa: E731
        texts.append(failure(run))
    return texts


@pytest.mark.parametrize("local", [False, True])
@pytest.mark.parametrize("options", [{}, {"gradient_as_bucket_view": True}], ids=str)
def test_backward_that_adds_to_averages(pool, local, options):
    for zeroed, left_out in pool.run(adds_to_averages, 2, local, options):
        assert not zeroed
        assert "added to averages of an earlier one, on rank 0." in left_out


class Turns(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.parts = nn.ModuleList([nn.Linear(3, 2).double() for _ in range(2)])

    def forward(self, x: torch.Tensor, k: int) -> torch.Tensor:
        return self.parts[k](x)


def steps_by_turns(ctx: Any) -> list[Any]:
    """Two parts of one model, each with an optimizer that zeroes its own gradients."""
    ddp = wrap(ctx, Turns(), find_unused_parameters=True)
    parts = ddp.module.parts
    optimizers = [torch.optim.SGD(part.parameters(), lr=0.1) for part in parts]
    found = []
    for step in range(4):
        k = step % 2
        optimizers[k].zero_grad()
        alone = copy.deepcopy(parts[k])
        ddp.count_items(1 + ctx.rank)
        (ddp(inputs(ctx.rank, step, 1 + ctx.rank), k) - 1).square().sum().backward()
        x = torch.cat([inputs(r, step, 1 + r) for r in range(ctx.world_size)])
        (loss_of(alone, x) / len(x)).backward()
        found.append(close(parts[k], [p.grad for p in alone.parameters()]))
        optimizers[k].step()
    return found


def test_averages_that_nothing_is_added_to_may_stay(pool):
    assert pool.run(steps_by_turns, 2) == [[True] * 4] * 2


def counts_too_late(ctx: Any) -> list[str]:
    """Of two backwards that bring one reduction: between them counts are gone."""
    ddp = wrap(ctx, Net(), bucket_cap_mb=0)
    first, second = ddp.module.first, ddp.module.second
    ddp.module.forward = lambda x: (first(x), second(torch.tanh(first(x.detach()))))
    step_on_both(ddp)
    ddp.zero_grad()
    ddp.count_items(3)
    a, b = ddp(inputs(ctx.rank, size=3))
    b.sum().backward(inputs=[*second.parameters()], retain_graph=True)
    try:
        ddp.count_items(1)
        return ["accepted"]
    except RuntimeError as error:
        text = str(error)
    a.sum().backward(inputs=[*first.parameters()])
    return [text, str(ddp.item_totals.count.item())]


def step_on_both(ddp: Any) -> None:
    """After it every parameter has a bucket of its own."""
    ddp.count_items(3)
    sum(out.sum() for out in ddp(inputs(0, size=3))).backward()


def test_count_after_the_counts_were_sent(pool):
    for text, count in pool.run(counts_too_late, 2):
        assert "after this step's counts were sent" in text
        assert count == "6.0"


def counts_some(ctx: Any, calls: tuple[int, ...], forwards: int) -> str:
    """The error of a rank that counts that many of its micro-batches."""
    ddp = wrap(ctx)

    def step(mine: int) -> None:
        for k in range(forwards):
            with contextlib.nullcontext() if k + 1 == forwards else ddp.no_sync():
                loss = loss_of(ddp, inputs(ctx.rank, size=2))
                if k < mine:
                    ddp.count_items(2)
                loss.backward()

    text = failure(lambda: step(calls[ctx.rank]))
    if text:
        ddp.reset()
    ddp.zero_grad()
    step(forwards)
    assert ddp.item_totals.count == 2 * forwards * ctx.world_size
    return text


@pytest.mark.parametrize(
    ("calls", "forwards", "who"),
    [
        ((2, 1), 2, "on rank 1, but"),
        ((2, 3), 3, "on rank 0, but"),
        ((1, 1), 3, ""),  # once for all: what the script means
        ((1, 2), 3, ""),  # no rank shows that it should be three
    ],
)
def test_rank_that_counts_some_of_its_micro_batches(pool, calls, forwards, who):
    for text in pool.run(counts_some, 2, calls, forwards):
        words = "counted fewer times than the model was called "
        assert (words + who if who else "") in text
        assert bool(text) == bool(who)


# ------------------------------------------------------------- ranks without items


def joins(ctx: Any, by_initial: bool, options: Any) -> list[bool]:
    """Ranks run out of inputs at different times; one keeps local gradients."""
    ddp = wrap(ctx, **options)
    alone = copy.deepcopy(ddp.module)
    seen = []
    with ddp.join(divide_by_initial_world_size=by_initial):
        for step in range(1 + ctx.rank):
            step_on(ddp, inputs(ctx.rank, step, 2 + ctx.rank))
            active = range(step, ctx.world_size)
            x = torch.cat([inputs(rank, step, 2 + rank) for rank in active])
            alone.zero_grad()
            (loss_of(alone, x) / len(x)).backward()
            seen.append(close(ddp.module, [p.grad for p in alone.parameters()]))
    return seen


@pytest.mark.parametrize("by_initial", [True, False])
@pytest.mark.parametrize("mode", ["", "find_unused_parameters", "static_graph"])
def test_join(pool, by_initial, mode):
    options = {mode: True} if mode else {}
    for seen in pool.run(joins, 3, by_initial, options):
        assert all(seen)


def keeps_own_count(ctx: Any) -> float:
    """A rank that joined keeps what it counted for gradients that it kept, too."""
    ddp = wrap(ctx)
    with ddp.join():
        with ddp.no_sync():
            step_on(ddp, inputs(ctx.rank, size=3))
        if ctx.rank == 1:
            step_on(ddp, inputs(1, size=2), zero=False)
            assert ddp.item_totals.count == 5
    if ctx.rank == 1:
        ddp.zero_grad()
    step_on(ddp, inputs(ctx.rank, size=1), zero=False)
    return ddp.item_totals.count.item()


def test_joined_rank_keeps_its_count(pool):
    assert pool.run(keeps_own_count, 2) == [5.0, 5.0]


def weighs_nothing(ctx: Any) -> tuple[bool, float, bool]:
    """A mean over nothing is NaN; weighed by 0 items it changes nothing."""
    ddp = wrap(ctx)
    x = inputs(0, size=4)
    mask = torch.full((4,), not ctx.rank)  # rank 1: all are padding
    error = (ddp(x) - 1).square().sum(1)
    loss = error[mask].mean()
    n = mask.sum()
    ddp.weigh_loss(loss, n if ctx.rank else int(n)).backward()
    alone = Net()
    (loss_of(alone, x) / 4).backward()
    right = close(ddp.module, [p.grad for p in alone.parameters()])
    totals = ddp.item_totals
    logged = totals.mean_loss.item() - error.mean().item()
    return right, abs(logged), totals.of_ranks.tolist() == [4.0, 0.0]


def test_mean_over_nothing_is_weighed_by_zero(pool):
    for right, logged, of_ranks in pool.run(weighs_nothing, 2):
        assert right
        assert logged < 1e-14
        assert of_ranks


# ------------------------------------------------------------------ other features


def steps(ctx: Any, clip: float | None, options: Any) -> bool:
    """Parameters after steps inside the backward, and after plain ones, alone."""
    ddp = wrap(ctx, **options)
    alone = copy.deepcopy(ddp.module)
    optimizers = [torch.optim.SGD(n.parameters(), lr=0.5) for n in (ddp, alone)]
    ddp.step_in_backward(optimizers[0], clip_grad_norm=clip)
    for step in range(3):
        step_on(ddp, inputs(ctx.rank, step))
        whole(alone, range(ctx.world_size), step)
        if clip:
            nn.utils.clip_grad_norm_(alone.parameters(), clip)
        optimizers[1].step()
    pairs = zip(ddp.parameters(), alone.parameters(), strict=True)
    return all(torch.allclose(a, b, rtol=1e-12, atol=1e-13) for a, b in pairs)


@pytest.mark.parametrize("clip", [None, 0.01, 100.0])
@pytest.mark.parametrize(
    "options", [{}, {"bucket_cap_mb": 0}, {"gradient_as_bucket_view": True}], ids=str
)
def test_step_in_backward_sees_the_true_average(pool, clip, options):
    assert all(pool.run(steps, 3, clip, options))


def scales(ctx: Any) -> list[bool]:
    ddp = wrap(ctx)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    alone, found = copy.deepcopy(ddp.module), []
    for step in range(2):
        optimizer.zero_grad()
        x = inputs(ctx.rank, step)
        ddp.count_items(len(x))
        scaler.scale(loss_of(ddp, x)).backward()
        scaler.unscale_(optimizer)
        alone.load_state_dict(ddp.module.state_dict())
        found.append(close(ddp.module, whole(alone, range(ctx.world_size), step)))
        scaler.step(optimizer)
        scaler.update()
    return found


def test_grad_scaler(pool):
    assert pool.run(scales, 3) == [[True, True]] * 3


def normalises(ctx: Any) -> list[bool]:
    """SyncBatchNorm counts samples itself: both together are the whole batch."""
    net = Net(norm=nn.BatchNorm1d)
    ddp = wrap(ctx, SyncBatchNorm.convert_sync_batchnorm(net, ctx.group))
    alone, found = Net(norm=nn.BatchNorm1d), []
    for step in range(2):
        step_on(ddp, inputs(ctx.rank, step))
        expected = whole(alone, range(ctx.world_size), step)
        mine = [p.grad for p in ddp.module.parameters()]
        pairs = zip(mine, expected, strict=True)  # a bias before the norm has none
        found.append(all(torch.allclose(a, b, rtol=1e-9, atol=1e-12) for a, b in pairs))
    return found


def test_sync_batch_norm(pool):
    assert pool.run(normalises, 3) == [[True, True]] * 3


class Words(nn.Module):
    def __init__(self, dense: bool) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.table = nn.Embedding(6, 3, sparse=True)
        self.other = nn.Embedding(6, 3, sparse=True)
        self.head = nn.Linear(3, 2) if dense else nn.Identity()
        self.double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.table(x) * self.other(x))


def embeds(ctx: Any, dense: bool) -> tuple[bool, list[str]]:
    ddp, alone = wrap(ctx, Words(dense)), Words(dense)
    sizes = [4, 1, 0]
    batches = [torch.arange(sizes[r]) + r for r in range(ctx.world_size)]
    for _ in range(3):
        ddp.zero_grad()
        ddp.count_items(len(batches[ctx.rank]))
        with collective_trace() as trace:
            loss_of(ddp, batches[ctx.rank]).backward()
    alone.zero_grad()
    everything = torch.cat(batches)
    (loss_of(alone, everything) / len(everything)).backward()
    pairs = zip(ddp.module.parameters(), alone.parameters(), strict=True)
    right = all(torch.allclose(*(p.grad.to_dense() for p in pair)) for pair in pairs)
    return right, [name for name, *_ in trace]


@pytest.mark.parametrize("dense", [True, False])
def test_sparse_gradients(pool, dense):
    """Without any dense bucket the counts need a message of their own."""
    for right, messages in pool.run(embeds, 3, dense):
        assert right
        assert messages == ["all_reduce"] * 3


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.ParameterList([nn.Parameter(torch.ones(2)) for _ in range(3)])

    def forward(self, x: float, use: Any) -> torch.Tensor:
        return sum((self.w[i] * x * (i + 1)).sum() for i in use)


def skips(ctx: Any, view: bool, uses: list[list[int]]) -> list[list[Any]]:
    ddp = wrap(
        ctx,
        Branches(),
        find_unused_parameters=True,
        skip_all_reduce_unused_params=True,
        gradient_as_bucket_view=view,
        bucket_cap_mb=0,
    )
    found = []
    for use in uses:
        ddp.zero_grad()
        ddp.count_items(1 + 2 * ctx.rank)
        ddp(1.0 + ctx.rank, use).backward()
        grads = [p.grad for p in ddp.parameters()]
        found.append([None if g is None else g[0].item() for g in grads])
    return found


@pytest.mark.parametrize("view", [False, True])
def test_bucket_with_the_counts_is_skipped(pool, view):
    """Two ranks, x = 1 and 2, counts 1 and 3: (1 + 2) / 4 per parameter."""
    uses = [[0, 1, 2], [0], [0, 1], [2], [1], [0, 1, 2]]
    expected = [
        [0.75 * (i + 1) if i in use else None for i in range(3)] for use in uses
    ]
    assert pool.run(skips, 2, view, uses) == [expected] * 2


def low(ctx: Any, dtype: torch.dtype, options: Any) -> list[Any]:
    """Large gradients in 16 bits; counts that 16 bits cannot hold."""
    net = nn.Linear(1, 3, bias=False).to(dtype)
    ddp = wrap(ctx, net, **options)
    ddp.count_items(12345.678 + ctx.rank)
    (ddp(torch.ones(1, 1, dtype=dtype)) * 30000).sum().backward()
    return [net.weight.grad[0].item(), ddp.item_totals.of_ranks.tolist()]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("options", [{}, {"gradient_as_bucket_view": True}], ids=str)
def test_sixteen_bits(pool, dtype, options):
    """The sum of four gradients of 30000 is no fp16; the count 12345.678 is neither."""
    counts = [12345.678 + rank for rank in range(4)]
    for grad, of_ranks in pool.run(low, 4, dtype, options):
        assert of_ranks == counts
        assert grad == pytest.approx(4 * 30000 / sum(counts), rel=1e-2)


def casts(ctx: Any, dtype: torch.dtype) -> tuple[bool, list[float]]:
    net = Net(torch.float32)
    alone = copy.deepcopy(net)
    ddp = wrap(ctx, net, mixed_precision=_MixedPrecision(None, dtype, None))
    n = len(inputs(ctx.rank)) + 1000.5
    ddp.count_items(n)
    loss_of(ddp, inputs(ctx.rank).float()).backward()
    x = torch.cat([inputs(r) for r in range(ctx.world_size)]).float()
    total = ddp.item_totals.count.item()
    (loss_of(alone, x) / total).backward()
    right = close(net, [p.grad for p in alone.parameters()], 2e-2)
    return right, ddp.item_totals.of_ranks.tolist()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_mixed_precision(pool, dtype):
    counts = [SIZES[rank] + 1000.5 for rank in range(3)]
    assert pool.run(casts, 3, dtype) == [(True, counts)] * 3


def large(ctx: Any, memory: str) -> tuple[bool, list[torch.Tensor]]:
    """Sums of large buckets go straight to ``.grad``, in shared memory."""
    torch.manual_seed(0)
    with setting({"MINIDP_SHARED_MEMORY": memory}):
        net = nn.Sequential(*(nn.Linear(300, 300) for _ in range(3)))
        alone, found = copy.deepcopy(net), []
        ddp = wrap(ctx, net, bucket_cap_mb=0.3)
        for step in range(3):
            ddp.zero_grad()
            alone.zero_grad()
            x = torch.randn(6, 300, generator=torch.Generator().manual_seed(step))
            ddp.count_items(1 + ctx.rank)
            (ddp(x) * (x + ctx.rank)).sum().backward()
            outs = [(alone(x) * (x + r)).sum() for r in range(ctx.world_size)]
            (sum(outs) / sum(range(1, ctx.world_size + 1))).backward()
            expected = [p.grad for p in alone.parameters()]
            found.append(close(net, expected, 1e-6))
        return all(found), [p.grad for p in net.parameters()]


@pytest.mark.parametrize("world_size", [2, 3])
def test_sums_that_go_to_the_gradients_are_divided(pool, world_size):
    shared = pool.run(large, world_size, "auto")
    plain = pool.run(large, world_size, "0")
    for right, grads in shared + plain:
        assert right
        assert all(map(torch.equal, grads, plain[0][1]))


class Kinds(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        kinds = [torch.complex64, torch.float64, torch.bfloat16, torch.complex128]
        self.w = nn.ParameterList([nn.Parameter(torch.ones(3, dtype=k)) for k in kinds])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return sum(torch.view_as_real(w + 0j).double().sum() for w in self.w) * x


def mixes(ctx: Any, delayed: bool, options: Any) -> list[Any]:
    net = Kinds()
    if delayed:
        pairs = [("w.0", net.w[0])]
        options = options | {"delay_all_reduce_named_params": pairs}
        options["param_to_hook_all_reduce"] = net.w[1]
    ddp = wrap(ctx, net, check_finite_grads=True, **options)
    for _ in range(2):
        ddp.zero_grad()
        ddp.count_items(2 * ctx.rank)
        ddp(torch.tensor(ctx.rank + 1.0)).backward()
    return [torch.view_as_real(p.grad + 0j)[0].tolist() for p in net.parameters()]


@pytest.mark.parametrize("delayed", [False, True])
@pytest.mark.parametrize("options", [{}, {"gradient_as_bucket_view": True}], ids=str)
def test_several_dtypes(pool, delayed, options):
    """Two ranks, x = 1 and 2, counts 0 and 2."""
    expected = [[1.5, 1.5], [1.5, 0.0], [1.5, 0.0], [1.5, 1.5]]
    assert pool.run(mixes, 2, delayed, options) == [expected] * 2


def keeps_history(ctx: Any, view: bool) -> list[float]:
    """create_graph=True: the gradient and its gradient are those of the mean."""
    net = nn.Linear(1, 1, bias=False).double()
    nn.init.constant_(net.weight, 2.0)
    ddp = wrap(ctx, net, gradient_as_bucket_view=view, check_replicas_every=0)
    ddp.count_items(ctx.rank + 1)
    loss = ddp(torch.ones(1, 1).double()).pow(3).sum() * (ctx.rank + 1)
    loss.backward(create_graph=True)
    grad = net.weight.grad
    (second,) = torch.autograd.grad(grad.sum(), net.weight)
    return [grad.item(), second.item() * 3 / (ctx.rank + 1)]


@pytest.mark.filterwarnings("ignore:Using backward:UserWarning")
@pytest.mark.parametrize("view", [False, True])
def test_history(pool, view):
    for found in pool.run(keeps_history, 2, view, strict_warnings=False):
        assert found == pytest.approx([12.0, 12.0])


def by_hand(ctx: Any) -> bool:
    """sync_gradients() divides local gradients by what was counted for them."""
    ddp = wrap(ctx)
    alone = copy.deepcopy(ddp.module)
    with ddp.no_sync():
        for step in range(2):
            step_on(ddp, inputs(ctx.rank, step), zero=False)
    ddp.sync_gradients()
    parts = [inputs(r, s) for r in range(ctx.world_size) for s in range(2)]
    x = torch.cat(parts)
    (loss_of(alone, x) / len(x)).backward()
    return close(ddp.module, [p.grad for p in alone.parameters()])


def test_sync_gradients(pool):
    assert pool.run(by_hand, 3) == [True] * 3


def evaluates(ctx: Any) -> list[float]:
    """An evaluation counts nothing, and its loss stays a mean."""
    ddp = wrap(ctx)
    with torch.no_grad():
        ddp.count_items(100)
        mean = ddp.weigh_loss(torch.tensor(0.5), 100).item()
    step_on(ddp, inputs(ctx.rank, size=2))
    return [mean, ddp.item_totals.count.item()]


def test_evaluation_counts_nothing(pool):
    assert pool.run(evaluates, 2) == [[0.5, 4.0]] * 2


def takes_back(ctx: Any) -> float:
    """A negative number takes back items of a micro-batch that was dropped."""
    ddp = wrap(ctx)
    ddp.count_items(5)
    ddp.count_items(-5)
    step_on(ddp, inputs(ctx.rank, size=2))
    return ddp.item_totals.count.item()


def test_items_can_be_taken_back(pool):
    assert pool.run(takes_back, 2) == [4.0, 4.0]


# ---------------------------------------------------------------- how it is asked for


def refuses_hooks(ctx: Any) -> list[str]:
    ddp, texts = wrap(ctx), []
    for register in (
        lambda: ddp.register_comm_hook(None, comm_hooks.bf16_compress_hook),
        lambda: ddp._register_builtin_comm_hook(
            torch.distributed.BuiltinCommHookType.ALLREDUCE
        ),
    ):
        try:
            register()
        except RuntimeError as error:
            texts.append(str(error))
    step_on(ddp, inputs(ctx.rank, size=2))
    return texts


def test_comm_hooks_are_refused_by_name(pool):
    for first, second in pool.run(refuses_hooks, 2):
        assert "bf16_compress_hook cannot be registered: average_over" in first
        assert "all_reduce_hook cannot be registered: average_over" in second


def differs(ctx: Any) -> None:
    wrap(ctx, average_over="items" if ctx.rank else "ranks")


def test_ranks_must_agree_on_the_option(pool):
    found = pool.run(differs, 2, errors="return")
    assert all(each.is_a("ReplicaMismatchError") for each in found)
    assert all("option average_over" in each.message for each in found)


def asks_wrongly(ctx: Any) -> list[str]:
    plain, counted, texts = wrap(ctx, average_over="ranks"), wrap(ctx), []
    for call in (
        lambda: plain.count_items(3),
        lambda: plain.weigh_loss(torch.ones(()), 3),
        lambda: plain.item_totals,
        lambda: counted.item_totals,
        lambda: counted.count_items("3"),
        lambda: counted.count_items(True),
        lambda: counted.count_items(1j),
        lambda: counted.count_items(None),
        lambda: counted.count_items(torch.ones(2)),
        lambda: counted.count_items(torch.ones((), dtype=torch.complex64)),
        lambda: counted.count_items(1, "loss"),
        lambda: counted.weigh_loss(3.0, 3),
        lambda: counted.weigh_loss(torch.ones(2), 3),
        lambda: wrap(ctx, average_over="samples"),
    ):
        try:
            call()
            texts.append("accepted")
        except Exception as error:
            texts.append(type(error).__name__)
    return texts


def test_wrong_words(pool):
    expected = ["RuntimeError"] * 4 + ["TypeError"] * 9 + ["ValueError"]
    assert pool.run(asks_wrongly, 2) == [expected] * 2


def any_number(ctx: Any) -> list[float]:
    ddp, found = wrap(ctx), []
    leaf = torch.ones(1, 1, requires_grad=True)
    for n in (
        *(3, 2.5, torch.tensor(3), torch.tensor([4.5]), leaf * 2, torch.tensor(True)),
        torch.tensor([2.0]).numpy()[0],
        torch.tensor([7]).numpy()[0],
    ):
        ddp.zero_grad()
        ddp.count_items(n)
        loss_of(ddp, inputs(ctx.rank, size=2)).backward()
        found.append(ddp.item_totals.count.item())
    return found


def test_all_kinds_of_numbers(pool):
    expected = [6.0, 5.0, 6.0, 9.0, 4.0, 2.0, 4.0, 14.0]
    assert pool.run(any_number, 2) == [expected] * 2


def from_outside(ctx: Any) -> float:
    with setting({"MINIDP_AVERAGE_OVER": "items"}):
        ddp = wrap(ctx, average_over="ranks")
    step_on(ddp, inputs(ctx.rank, size=2))
    return ddp.item_totals.count.item()


def test_environment_variable(pool):
    assert pool.run(from_outside, 2) == [4.0, 4.0]


def attaches(ctx: Any) -> tuple[bool, float]:
    net = Net()
    alone = copy.deepcopy(net)
    handle = minidp.attach(net, process_group=ctx.group, **ITEMS)
    x = inputs(ctx.rank, size=2 + ctx.rank)
    handle.count_items(1)
    handle.weigh_loss(loss_of(net, x) / (1 + ctx.rank), 1 + ctx.rank).backward()
    x = torch.cat([inputs(rank, size=2 + rank) for rank in range(ctx.world_size)])
    (loss_of(alone, x) / len(x)).backward()
    right = close(net, [p.grad for p in alone.parameters()])
    return right, handle.item_totals.count.item()


def test_attach(pool):
    assert pool.run(attaches, 2) == [(True, 5.0)] * 2


def copies(ctx: Any) -> list[bool]:
    ddp = wrap(ctx)
    ddp.count_items(100)
    found = []
    twins = [copy.deepcopy(ddp)]
    if ctx.group is torch.distributed.group.WORLD:
        twins.append(pickle.loads(pickle.dumps(ddp)))
    for twin in twins:
        step_on(twin, inputs(ctx.rank))
        expected = whole(copy.deepcopy(twin.module), range(ctx.world_size))
        found.append(close(twin.module, expected))
    return found


def test_copies_average_items_too(pool):
    for found in pool.run(copies, 4):
        assert all(found)


def tunes(ctx: Any) -> list[bool]:
    """The counts move with the layout, which changes many times."""
    ddp = wrap(ctx, bucket_cap_mb="auto")
    alone, found = copy.deepcopy(ddp.module), []
    for step in range(60):
        step_on(ddp, inputs(ctx.rank, step))
        found.append(close(ddp.module, whole(alone, range(ctx.world_size), step)))
    return found


def test_layouts_on_trial(pool):
    for found in pool.run(tunes, 2):
        assert all(found)


def dies(ctx: Any) -> str:
    ddp = wrap(ctx, hang_timeout=5)
    step_on(ddp, inputs(ctx.rank, size=2))
    if ctx.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        step_on(ddp, inputs(ctx.rank, size=2))
    except minidp.CollectiveError as error:
        return str(error)
    return "no error"


def test_killed_rank_is_named():
    found, _ = run_fresh(dies, 2, errors="return")
    assert "ank 1" in found
