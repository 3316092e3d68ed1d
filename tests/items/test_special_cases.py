"""``average_over="items"`` where something is unusual; the usual: test_laws."""

from __future__ import annotations

import contextlib
import copy
import math
import pickle
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import minidp
from minidp import ItemCountError, MiniDPError, SyncBatchNorm, comm_hooks
from minidp.config import setting
from minidp.core import item_numbers
from minidp.data_parallel import items
from minidp.errors import UnavailableError
from tests.support.both import error_of, wrapped
from tests.support.ranks import on_ranks
from tests.support.tracing import collective_trace

SIZES = (3, 1, 0, 2)  # items of each rank, in a step
ITEMS = {"average_over": "items"}
VIEWS = {"gradient_as_bucket_view": True}
views = pytest.mark.parametrize("options", [{}, VIEWS], ids=["", "views"])
halves = pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)


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


def everything(ctx: Any, step: int = 0) -> torch.Tensor:
    """The inputs of all ranks."""
    return torch.cat([inputs(rank, step) for rank in range(ctx.world_size)])


def loss_of(net: Any, x: torch.Tensor) -> torch.Tensor:
    return (net(x) - 1).square().sum()


def wrap(ctx: Any, net: nn.Module | None = None, **options: Any) -> Any:
    return wrapped(ctx, Net() if net is None else net, **(ITEMS | options))


def step_on(ddp: Any, x: torch.Tensor, *, zero: bool = True) -> None:
    if zero:
        ddp.zero_grad()
    ddp.count_items(len(x))
    loss_of(ddp, x).backward()


def whole(alone: nn.Module, x: torch.Tensor) -> nn.Module:
    """Give a module the gradients of its mean loss over all of a batch."""
    alone.zero_grad()
    (loss_of(alone, x) / len(x)).backward()
    return alone


def near(net: nn.Module, alone: nn.Module, relative: float = 1e-13) -> bool:
    """Whether the gradients are the same, relative to each one's largest element."""
    return all(
        (a.grad is b.grad is None)
        or (a.grad.double() - b.grad.double()).abs().max()
        <= relative * b.grad.double().abs().max()
        for a, b in zip(net.parameters(), alone.parameters(), strict=True)
    )


# ---------------------------------------------------------- counts that give no mean

BAD = "negative, too large or NaN on rank "


@on_ranks(2)
@pytest.mark.parametrize(
    ("counts", "expected"),
    [
        ([4, None], "Rank 1 gave no number of items in this"),
        ([None, None], "Ranks 0, 1 gave no number of items in this"),
        ([None, 0], "Rank 0 gave no number of items in this"),
        ([0, 0], "All ranks counted 0 items"),
        ([math.nan, 1], BAD + "0"),
        ([torch.tensor(math.nan), 1], BAD + "0"),
        ([1, -1], BAD + "1"),
        ([5, torch.tensor(-2)], BAD + "1"),
        ([10**400, 1], BAD + "0"),
        ([math.inf, math.nan], "NaN on ranks 0, 1"),
        ([1e308, 1], BAD + "0"),
    ],
    ids=str,
)
@pytest.mark.parametrize("options", [{"bucket_cap_mb": 0}, VIEWS], ids=str)
def test_counts_without_a_mean(ctx, counts, expected, options):
    """An error, before a parameter changes; a reset mends it."""
    ddp = wrap(ctx, **options)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    step_on(ddp, inputs(ctx.rank))
    optimizer.step()
    ddp.zero_grad()
    before = [p.detach().clone() for p in ddp.parameters()]
    if (count := counts[ctx.rank]) is not None:
        ddp.count_items(count)
    with pytest.raises(ItemCountError) as caught:
        loss_of(ddp, inputs(ctx.rank)).backward()
    assert expected in str(caught.value)
    with pytest.raises(MiniDPError):
        optimizer.step()
    assert all(map(torch.equal, before, ddp.parameters()))
    ddp.reset()
    optimizer.zero_grad()
    alone = copy.deepcopy(ddp.module)
    step_on(ddp, inputs(ctx.rank))
    assert near(ddp.module, whole(alone, everything(ctx)))


@on_ranks(2)
@pytest.mark.parametrize("local", [False, True])
@views
def test_backward_that_adds_to_averages(ctx, local, options):
    ddp = wrap(ctx, **options)
    step_on(ddp, inputs(ctx.rank))
    for in_place in (True, None):  # None: zero_grad() is left out, on rank 0 only
        if in_place or ctx.rank:
            ddp.zero_grad(set_to_none=not in_place)
        if local:
            with ddp.no_sync():
                step_on(ddp, inputs(ctx.rank), zero=False)
        said = error_of(lambda: step_on(ddp, inputs(ctx.rank), zero=False))
        assert bool(said) is not bool(in_place)
    assert said.startswith("ItemCountError")
    assert "added to averages of an earlier one, on rank 0." in said


class Turns(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.parts = nn.ModuleList([nn.Linear(3, 2).double() for _ in range(2)])

    def forward(self, x: torch.Tensor, k: int) -> torch.Tensor:
        return self.parts[k](x)


@on_ranks(2)
def test_averages_that_nothing_is_added_to_may_stay(ctx):
    """Two parts of one model, each with an optimizer that zeroes its own gradients."""
    ddp = wrap(ctx, Turns(), find_unused_parameters=True)
    parts = ddp.module.parts
    optimizers = [torch.optim.SGD(part.parameters(), lr=0.1) for part in parts]
    for step in range(4):
        k = step % 2
        optimizers[k].zero_grad()
        alone = copy.deepcopy(parts[k])
        ddp.count_items(1 + ctx.rank)
        (ddp(inputs(ctx.rank, step, 1 + ctx.rank), k) - 1).square().sum().backward()
        x = torch.cat([inputs(r, step, 1 + r) for r in range(ctx.world_size)])
        assert near(parts[k], whole(alone, x))
        optimizers[k].step()


@on_ranks(2)
def test_count_after_the_counts_were_sent(ctx):
    """Of two backwards that bring one reduction: between them counts are gone."""
    ddp = wrap(ctx, bucket_cap_mb=0)
    first, second = ddp.module.first, ddp.module.second
    ddp.module.forward = lambda x: (first(x), second(torch.tanh(first(x.detach()))))
    ddp.count_items(3)  # After it every parameter has a bucket of its own.
    sum(out.sum() for out in ddp(inputs(0, size=3))).backward()
    ddp.zero_grad()
    ddp.count_items(3)
    a, b = ddp(inputs(ctx.rank, size=3))
    b.sum().backward(inputs=[*second.parameters()], retain_graph=True)
    with pytest.raises(ItemCountError, match="after this step's counts were sent"):
        ddp.count_items(1)
    a.sum().backward(inputs=[*first.parameters()])
    assert ddp.item_totals.count == 6


@on_ranks(2)
@pytest.mark.parametrize(
    ("calls", "forwards", "who"),
    [
        ((2, 1), 2, "on rank 1, but"),
        ((2, 3), 3, "on rank 0, but"),
        ((1, 1), 3, ""),  # once for all: what the script means
        ((1, 2), 3, ""),  # no rank shows that it should be three
    ],
)
def test_rank_that_counts_some_of_its_micro_batches(ctx, calls, forwards, who):
    ddp = wrap(ctx)

    def step(mine: int) -> None:
        for k in range(forwards):
            with contextlib.nullcontext() if k + 1 == forwards else ddp.no_sync():
                loss = loss_of(ddp, inputs(ctx.rank, size=2))
                if k < mine:
                    ddp.count_items(2)
                loss.backward()

    said = error_of(lambda: step(calls[ctx.rank]))
    assert said.startswith("ItemCountError: " if who else "")
    assert bool(said) == bool(who)
    if who:
        assert f"counted fewer times than the model was called {who}" in said
        ddp.reset()
    ddp.zero_grad()
    step(forwards)
    assert ddp.item_totals.count == 2 * forwards * ctx.world_size


# ------------------------------------------------------------- ranks without items


@on_ranks(3)
@pytest.mark.parametrize("by_initial", [True, False])
@pytest.mark.parametrize("mode", ["", "find_unused_parameters", "static_graph"])
def test_join(ctx, by_initial, mode):
    """Ranks run out of inputs at different times; one keeps local gradients."""
    ddp = wrap(ctx, **({mode: True} if mode else {}))
    alone = copy.deepcopy(ddp.module)
    with ddp.join(divide_by_initial_world_size=by_initial):
        for step in range(1 + ctx.rank):
            step_on(ddp, inputs(ctx.rank, step, 2 + ctx.rank))
            active = range(step, ctx.world_size)
            x = torch.cat([inputs(rank, step, 2 + rank) for rank in active])
            assert near(ddp.module, whole(alone, x))


@on_ranks(3)
def test_another_process_group(ctx):
    """From three ranks to two of them: each has another number there."""
    ddp = wrap(ctx)
    step_on(ddp, inputs(ctx.rank))
    assert ddp.item_totals.of_ranks.tolist() == [*SIZES[:3]]
    if ctx.rank == 0:
        return
    ddp._update_process_group(ctx.subgroups[(1, 2)])
    step_on(ddp, inputs(ctx.rank))
    assert ddp.item_totals.of_ranks.tolist() == [*SIZES[1:3]]
    mine = torch.cat([inputs(rank) for rank in (1, 2)])
    assert near(ddp.module, whole(copy.deepcopy(ddp.module), mine))


@on_ranks(2)
def test_joined_rank_keeps_its_count(ctx):
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
    assert ddp.item_totals.count == 5


@on_ranks(2)
def test_mean_over_nothing_is_weighed_by_zero(ctx):
    """A mean over nothing is NaN; weighed by 0 items it changes nothing."""
    ddp = wrap(ctx)
    x = inputs(0, size=4)
    mask = torch.full((4,), not ctx.rank)  # rank 1: all are padding
    error = (ddp(x) - 1).square().sum(1)
    n = mask.sum()
    ddp.weigh_loss(error[mask].mean(), n if ctx.rank else int(n)).backward()
    assert near(ddp.module, whole(Net(), x))
    totals = ddp.item_totals
    assert abs(totals.mean_loss - error.mean()) < 1e-14
    assert totals.of_ranks.tolist() == [4.0, 0.0]


def masked_mean(ddp: Any, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """The usual one: of an empty mask 0/0, in the value and in every gradient."""
    loss = (ddp(x).float() - 1).square().sum(1)
    return (loss * mask).sum() / mask.sum()


NOTHING = [  # what an empty micro-batch does to gradients, modes of the wrapper
    {},
    VIEWS,
    {"bucket_cap_mb": 0},
    {"find_unused_parameters": True},
    {"find_unused_parameters": True, "skip_all_reduce_unused_params": True},
    {"static_graph": True},
    {"static_graph": True} | VIEWS,
    {"batched_grad_copy": True},
]
MASKS = ((1, 1, 0, 1), (0, 0, 0, 0), (0, 1, 0, 0))  # of micro-batches


def trains_on_masks(ctx: Any, number: Any, **options: Any) -> None:
    """Three micro-batches per step; each rank has an empty one, in another place."""
    ddp = wrap(ctx, Net(torch.float32), **options)
    for step in range(4):
        ddp.zero_grad()
        masks = [
            [torch.tensor(MASKS[(rank + step + k) % 3]) for k in range(3)]
            for rank in range(ctx.world_size)
        ]
        xs = [
            [inputs(rank, 10 * step + k, 4).float() for k in range(3)]
            for rank in range(ctx.world_size)
        ]
        for k, (x, mask) in enumerate(zip(xs[ctx.rank], masks[ctx.rank], strict=True)):
            with ddp.no_sync() if k < 2 else contextlib.nullcontext():
                loss = masked_mean(ddp, x, mask)
                ddp.weigh_loss(loss, number(mask.sum())).backward()
        flat = [
            x[m.bool()]
            for a, b in zip(xs, masks, strict=True)
            for x, m in zip(a, b, strict=True)
        ]
        assert near(ddp.module, whole(copy.deepcopy(ddp.module), torch.cat(flat)), 1e-5)
        assert not ddp.item_totals.mean_loss.isnan()
        assert ddp._reducer.ledger.finalized == step + 1


@on_ranks(1, 2, 3)
@pytest.mark.parametrize("number", [int, torch.clone], ids=["number", "tensor"])
@pytest.mark.parametrize("options", NOTHING, ids=str)
def test_a_gradient_of_nothing_is_zero(ctx, number, options):
    trains_on_masks(ctx, number, **options)


@on_ranks(1, 2)
def test_a_count_that_the_host_does_not_know(ctx):
    """As on an accelerator: gradients of the module's outputs become zeros there."""
    with pytest.MonkeyPatch.context() as patch:
        for room in (item_numbers, items):
            patch.setattr(room, "is_known", lambda _tensor: False)
        trains_on_masks(ctx, torch.clone)


@on_ranks(2)
@pytest.mark.parametrize("scales", [False, True], ids=["", "scaled"])
def test_nothing_under_autocast(ctx, scales):
    ddp = wrap(ctx, Net(torch.float32))
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0, enabled=scales)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    for step in range(3):
        mask = torch.full((4,), (ctx.rank + step) % 2)
        with torch.autocast("cpu", torch.bfloat16):
            loss = masked_mean(ddp, inputs(0, step, 4).float(), mask)
            assert loss.isnan() == (mask.sum() == 0)
            total = ddp.weigh_loss(loss, mask.sum())
        scaler.scale(total).backward()
        found = {name: p.grad.clone() for name, p in ddp.named_parameters()}
        assert all(grad.isfinite().all() for grad in found.values())
        assert any(grad.any() for grad in found.values())
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    assert all(p.isfinite().all() for p in ddp.parameters())


class Reentrant(Net):
    """Both layers in reentrant checkpoints: no graph has their parameters."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x * torch.ones((), requires_grad=True)
        x = checkpoint(self.first, x, use_reentrant=True)
        return checkpoint(self.second, torch.tanh(x), use_reentrant=True)


@on_ranks(2)
@pytest.mark.parametrize("options", [{}, {"static_graph": True}], ids=str)
def test_nothing_through_reentrant_checkpoints(ctx, options):
    ddp = wrap(ctx, Reentrant(torch.float32), **options)
    for step in range(3):
        ddp.zero_grad()
        x, mask = inputs(0, step, 4).float(), torch.full((4,), (ctx.rank + step) % 2)
        total = (ddp(x) - 1).square().sum(1)
        loss = (total * mask).sum() / mask.sum()
        ddp.weigh_loss(loss, mask.sum()).backward()
        alone = Net(torch.float32)
        assert near(ddp.module, whole(alone, x), 1e-5)


class Sparse(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.table = nn.Embedding(5, 3, sparse=True)
        self.last = nn.Linear(3, 1)

    def forward(self, index: torch.Tensor) -> torch.Tensor:
        return self.last(self.table(index)).squeeze(1)


@on_ranks(2)
def test_nothing_for_a_sparse_gradient(ctx):
    ddp = wrap(ctx, Sparse())
    index, mask = torch.tensor([1, 4]), torch.full((2,), int(not ctx.rank))
    out = ddp(index).square()
    ddp.weigh_loss((out * mask).sum() / mask.sum(), mask.sum()).backward()
    alone = Sparse()
    alone(index).square().mean().backward()
    assert ddp.module.table.weight.grad.is_sparse
    for ours, theirs in zip(ddp.module.parameters(), alone.parameters(), strict=True):
        assert torch.allclose(ours.grad.to_dense(), theirs.grad.to_dense())


@on_ranks(2)
def test_a_loss_that_is_nan_over_something_stays_nan(ctx):
    ddp = wrap(ctx)
    x = inputs(0, size=4)
    loss = (ddp(x) - 1).square().mean()
    ddp.weigh_loss(loss * (math.nan if ctx.rank else 1), 1).backward()
    assert all(p.grad.isnan().all() for p in ddp.parameters())
    assert ddp.item_totals.mean_loss.isnan()


@on_ranks(2)
def test_a_part_of_a_loss_that_weighs_nothing(ctx):
    """Two losses of one forward: that of nothing leaves the other one as it is."""
    ddp, alone = wrap(ctx), Net()
    x = inputs(0, size=4)
    out = ddp(x)
    whole_loss = ddp.weigh_loss((out[:, 0] - 1).square().mean(), 4)
    nothing = ddp.weigh_loss((out[:, 1] * 0).sum() / torch.zeros(()), 0)
    (whole_loss + nothing).backward()
    (alone(x)[:, 0] - 1).square().mean().backward()
    assert near(ddp.module, alone)


# ------------------------------------------------------------------ other features


@on_ranks(3)
@pytest.mark.parametrize("clip", [None, 0.01, 100.0])
@pytest.mark.parametrize("options", [{}, {"bucket_cap_mb": 0}, VIEWS], ids=str)
def test_step_in_backward_sees_the_true_average(ctx, clip, options):
    """Parameters after steps inside the backward, and after plain ones, alone."""
    ddp = wrap(ctx, **options)
    alone = copy.deepcopy(ddp.module)
    optimizers = [torch.optim.SGD(n.parameters(), lr=0.5) for n in (ddp, alone)]
    ddp.step_in_backward(optimizers[0], clip_grad_norm=clip)
    for step in range(3):
        step_on(ddp, inputs(ctx.rank, step))
        whole(alone, everything(ctx, step))
        if clip:
            nn.utils.clip_grad_norm_(alone.parameters(), clip)
        optimizers[1].step()
    for a, b in zip(ddp.parameters(), alone.parameters(), strict=True):
        assert torch.allclose(a, b, rtol=1e-12, atol=1e-13)


@on_ranks(3)
def test_sync_batch_norm(ctx):
    """SyncBatchNorm counts samples itself: both together are the whole batch."""
    net = SyncBatchNorm.convert_sync_batchnorm(Net(norm=nn.BatchNorm1d), ctx.group)
    ddp, alone = wrap(ctx, net), Net(norm=nn.BatchNorm1d)
    for step in range(2):
        step_on(ddp, inputs(ctx.rank, step))
        whole(alone, everything(ctx, step))
        for a, b in zip(net.parameters(), alone.parameters(), strict=True):
            assert torch.allclose(a.grad, b.grad, rtol=1e-9, atol=1e-12)


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


@on_ranks(3)
@pytest.mark.parametrize("dense", [True, False])
def test_sparse_gradients(ctx, dense):
    ddp, alone = wrap(ctx, Words(dense)), Words(dense)
    batches = [torch.arange(size) + rank for rank, size in enumerate([4, 1, 0])]
    for _ in range(3):
        with collective_trace() as trace:
            step_on(ddp, batches[ctx.rank])
    whole(alone, torch.cat(batches))
    for pair in zip(ddp.module.parameters(), alone.parameters(), strict=True):
        assert torch.allclose(*(p.grad.to_dense() for p in pair))
    buckets = 3 if dense else 2
    assert [name for name, *_ in trace] == ["all_reduce"] * (1 + buckets)


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.ParameterList([nn.Parameter(torch.ones(2)) for _ in range(3)])

    def forward(self, x: float, use: Any) -> torch.Tensor:
        return sum((self.w[i] * x * (i + 1)).sum() for i in use)


@on_ranks(2)
@views
def test_bucket_with_the_counts_is_skipped(ctx, options):
    """Two ranks, x = 1 and 2, counts 1 and 3: (1 + 2) / 4 per parameter."""
    options = options | {"find_unused_parameters": True, "bucket_cap_mb": 0}
    ddp = wrap(ctx, Branches(), skip_all_reduce_unused_params=True, **options)
    for use in ([0, 1, 2], [0], [0, 1], [2], [1], [0, 1, 2]):
        ddp.zero_grad()
        ddp.count_items(1 + 2 * ctx.rank)
        ddp(1.0 + ctx.rank, use).backward()
        for i, param in enumerate(ddp.parameters()):
            found = None if param.grad is None else param.grad[0].item()
            assert found == (0.75 * (i + 1) if i in use else None)


@on_ranks(4)
@halves
@views
def test_sixteen_bits(ctx, dtype, options):
    """The sum of four gradients of 30000 is no fp16; the count 12345.678 is neither."""
    counts = [12345.678 + rank for rank in range(4)]
    net = nn.Linear(1, 3, bias=False).to(dtype)
    ddp = wrap(ctx, net, **options)
    ddp.count_items(counts[ctx.rank])
    (ddp(torch.ones(1, 1, dtype=dtype)) * 30000).sum().backward()
    assert ddp.item_totals.of_ranks.tolist() == counts
    expected = 4 * 30000 / sum(counts)
    assert net.weight.grad[0].item() == pytest.approx(expected, rel=1e-2)


@on_ranks(2, 3)
def test_sums_that_go_to_the_gradients_are_divided(ctx):
    """Sums of large buckets go straight to ``.grad``, in shared memory."""
    found = []
    for memory in ("auto", "0"):
        torch.manual_seed(0)
        with setting({"MINIDP_SHARED_MEMORY": memory}):
            net = nn.Sequential(*(nn.Linear(300, 300) for _ in range(3)))
            alone = copy.deepcopy(net)
            ddp = wrap(ctx, net, bucket_cap_mb=0.3)
            for step in range(3):
                ddp.zero_grad()
                alone.zero_grad()
                x = torch.randn(6, 300, generator=torch.Generator().manual_seed(step))
                ddp.count_items(1 + ctx.rank)
                (ddp(x) * (x + ctx.rank)).sum().backward()
                outs = [(alone(x) * (x + r)).sum() for r in range(ctx.world_size)]
                (sum(outs) / sum(range(1, ctx.world_size + 1))).backward()
                assert near(net, alone, 1e-6)
        found.append([p.grad for p in net.parameters()])
    assert all(map(torch.equal, *found))
    return found


class Kinds(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        kinds = [torch.complex64, torch.float64, torch.bfloat16, torch.complex128]
        self.w = nn.ParameterList([nn.Parameter(torch.ones(3, dtype=k)) for k in kinds])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return sum(reals(w).sum() for w in self.w) * x


def reals(values: torch.Tensor) -> torch.Tensor:
    """Real and imaginary parts; torch does not add complex numbers of 2 x 16 bits."""
    wide = values if values.is_complex() else values.double() + 0j
    return torch.view_as_real(wide).double()


@on_ranks(2)
@pytest.mark.parametrize("delayed", [False, True])
@views
def test_several_dtypes(ctx, delayed, options):
    """Two ranks, x = 1 and 2, counts 0 and 2."""
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
    found = [reals(p.grad)[0].tolist() for p in net.parameters()]
    assert found == [[1.5, 1.5], [1.5, 0.0], [1.5, 0.0], [1.5, 1.5]]


@on_ranks(2)
@views
def test_history(ctx, options):
    """create_graph=True: the gradient and its gradient are those of the mean."""
    net = nn.Linear(1, 1, bias=False).double()
    nn.init.constant_(net.weight, 2.0)
    ddp = wrap(ctx, net, check_replicas_every=0, **options)
    ddp.count_items(ctx.rank + 1)
    loss = ddp(torch.ones(1, 1).double()).pow(3).sum() * (ctx.rank + 1)
    loss.backward(create_graph=True)
    grad = net.weight.grad
    (second,) = torch.autograd.grad(grad.sum(), net.weight)
    found = [grad.item(), second.item() * 3 / (ctx.rank + 1)]
    assert found == pytest.approx([12.0, 12.0])


@on_ranks(3)
def test_sync_gradients(ctx):
    """sync_gradients() divides local gradients by what was counted for them."""
    ddp = wrap(ctx)
    alone = copy.deepcopy(ddp.module)
    with ddp.no_sync():
        for step in range(2):
            step_on(ddp, inputs(ctx.rank, step), zero=False)
    ddp.sync_gradients()
    x = torch.cat([everything(ctx, step) for step in range(2)])
    assert near(ddp.module, whole(alone, x))


@on_ranks(2)
def test_evaluation_counts_nothing_and_items_can_be_taken_back(ctx):
    """An evaluation's loss stays a mean; a negative number: a dropped micro-batch."""
    ddp = wrap(ctx)
    with torch.no_grad():
        ddp.count_items(100)
        assert ddp.weigh_loss(torch.tensor(0.5), 100) == 0.5
    step_on(ddp, inputs(ctx.rank, size=2))
    assert ddp.item_totals.count == 4
    ddp.count_items(5)
    ddp.count_items(-5)
    step_on(ddp, inputs(ctx.rank, size=2))
    assert ddp.item_totals.count == 4


# ---------------------------------------------------------------- how it is asked for


@on_ranks(2)
def test_comm_hooks_are_refused_by_name(ctx):
    ddp, builtin = wrap(ctx), torch.distributed.BuiltinCommHookType.ALLREDUCE
    with pytest.raises(
        RuntimeError, match="bf16_compress_hook cannot be registered: a"
    ):
        ddp.register_comm_hook(None, comm_hooks.bf16_compress_hook)
    with pytest.raises(
        RuntimeError, match="all_reduce_hook cannot be registered: aver"
    ):
        ddp._register_builtin_comm_hook(builtin)
    step_on(ddp, inputs(ctx.rank, size=2))


@on_ranks(2)
def test_wrong_words(ctx):
    plain, counted = wrap(ctx, average_over="ranks"), wrap(ctx)
    for call, kind in (
        (lambda: plain.count_items(3), ItemCountError),
        (lambda: plain.weigh_loss(torch.ones(()), 3), ItemCountError),
        (lambda: plain.item_totals, UnavailableError),
        (lambda: counted.item_totals, UnavailableError),
        (lambda: counted.count_items("3"), TypeError),
        (lambda: counted.count_items(True), TypeError),
        (lambda: counted.count_items(1j), TypeError),
        (lambda: counted.count_items(None), TypeError),
        (lambda: counted.count_items(torch.ones(2)), TypeError),
        (lambda: counted.count_items(torch.ones((), dtype=torch.cfloat)), TypeError),
        (lambda: counted.count_items(1, "loss"), TypeError),
        (lambda: counted.weigh_loss(3.0, 3), TypeError),
        (lambda: counted.weigh_loss(torch.ones(2), 3), TypeError),
        (lambda: wrap(ctx, average_over="samples"), ValueError),
    ):
        assert error_of(call).startswith(f"{kind.__name__}: "), kind


@on_ranks(2)
def test_all_kinds_of_numbers(ctx):
    ddp, leaf = wrap(ctx), torch.ones(1, 1, requires_grad=True)
    for n, total in (
        *((3, 6), (2.5, 5), (torch.tensor(3), 6), (torch.tensor([4.5]), 9)),
        *((leaf * 2, 4), (torch.tensor(True), 2)),
        (torch.tensor([2.0]).numpy()[0], 4),
        (torch.tensor([7]).numpy()[0], 14),
    ):
        ddp.zero_grad()
        ddp.count_items(n)
        loss_of(ddp, inputs(ctx.rank, size=2)).backward()
        assert ddp.item_totals.count == total


@on_ranks(2)
def test_attach(ctx):
    net = Net()
    alone = copy.deepcopy(net)
    handle = minidp.attach(net, process_group=ctx.group, **ITEMS)
    x = inputs(ctx.rank, size=2 + ctx.rank)
    handle.count_items(1)
    handle.weigh_loss(loss_of(net, x) / (1 + ctx.rank), 1 + ctx.rank).backward()
    x = torch.cat([inputs(rank, size=2 + rank) for rank in range(ctx.world_size)])
    assert near(net, whole(alone, x))
    assert handle.item_totals.count == 5


@on_ranks(4)
def test_copies_average_items_too(ctx):
    ddp = wrap(ctx)
    ddp.count_items(100)
    assert ctx.group is torch.distributed.group.WORLD  # others cannot be pickled
    for twin in (copy.deepcopy(ddp), pickle.loads(pickle.dumps(ddp))):
        alone = copy.deepcopy(twin.module)
        step_on(twin, inputs(ctx.rank))
        assert near(twin.module, whole(alone, everything(ctx)))


@on_ranks(2)
def test_layouts_on_trial(ctx):
    """The counts move with the layout, which changes many times."""
    ddp = wrap(ctx, bucket_cap_mb="auto")
    alone = copy.deepcopy(ddp.module)
    for step in range(60):
        step_on(ddp, inputs(ctx.rank, step))
        assert near(ddp.module, whole(alone, everything(ctx, step)))
