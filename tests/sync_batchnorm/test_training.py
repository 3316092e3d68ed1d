"""`SyncBatchNorm` on several ranks against batch norm of the concatenated batches."""

from __future__ import annotations

import copy
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from torch import nn
from torch.utils.checkpoint import checkpoint

from minidp import DataParallel, SyncBatchNorm
from minidp.comm.side_groups import side_group
from tests.support.both import error_of, grads, same, wrapped
from tests.support.ranks import on_ranks

NORMS = {2: nn.BatchNorm1d, 3: nn.BatchNorm1d, 4: nn.BatchNorm2d, 5: nn.BatchNorm3d}
RELATIVE = {  # to the largest element
    torch.float64: 1e-10,
    torch.float32: 1e-5,
    torch.bfloat16: 2e-2,  # 8 bits of mantissa: two roundings of 2**-7
}


def plain_layer(shape: tuple[int, ...], dtype: Any, **options: Any) -> nn.Module:
    layer = NORMS[len(shape)](shape[1], dtype=dtype, **options)
    generator = torch.Generator().manual_seed(1)
    for p in layer.parameters():
        p.data = torch.randn(p.shape, generator=generator, dtype=torch.float64).to(
            dtype
        )
    return layer


def batches(sizes: Any, shape: Any, step: int, dtype: Any) -> list[torch.Tensor]:
    """One batch for each rank; channels differ in mean and spread."""
    generator = torch.Generator().manual_seed(step)
    x = torch.randn((sum(sizes), *shape[1:]), generator=generator, dtype=torch.float64)
    per_channel = torch.arange(1.0, shape[1] + 1).view(1, -1, *[1] * (len(shape) - 2))
    for rank, part in enumerate(x.split(list(sizes))):
        part.mul_(per_channel).add_(per_channel * (rank - 1))
    return [part.clone() for part in x.to(dtype).split(list(sizes))]


def loss_of(y: torch.Tensor) -> torch.Tensor:
    return (y.double() * (y.double() - 0.3).square()).sum()


def needs_grad(case: Any, which: Any) -> bool:
    """Whether a rank's input requires a gradient; of ``"all"``, if any rank's does."""
    of_ranks = case.get("input_grad", [True])
    return any(of_ranks) if which == "all" else of_ranks[which % len(of_ranks)]


def one_pass(layer: Any, x: torch.Tensor, case: Any, which: Any) -> Any:
    """Output, gradients of input and parameters; is the output channels_last?"""
    x = x.clone()
    if case.get("channels_last"):
        x = x.to(memory_format=torch.channels_last)
    x.requires_grad_(needs_grad(case, which))
    layer.zero_grad()
    with torch.set_grad_enabled(case.get("grad", True)):
        y = layer(x)
    if y.requires_grad:
        loss_of(y).backward()
    return (
        y.detach(),
        x.grad,
        grads(layer),
        y.dim() == 4 and y.is_contiguous(memory_format=torch.channels_last),
    )


def train(layer: Any, sizes: Any, shape: Any, dtype: Any, case: Any, which: Any) -> Any:
    """Some steps and one in eval mode; ``which`` is a rank, or all."""
    for p, name in [(p, n) for n, p in layer.named_parameters()]:
        p.requires_grad_(name not in case.get("frozen", ()))
    results = []
    for step in range(case.get("steps", 3)):
        layer.train(step < 2)
        parts = batches(sizes, shape, step, dtype)
        x = torch.cat(parts) if which == "all" else parts[which]
        results.append(one_pass(layer, x, case, which))
    return results, {n: b.clone() for n, b in layer.named_buffers()}


EVERYTHING = slice(None)


def close(found: Any, expected: Any, dtype: Any, what: str, mine: slice = EVERYTHING):
    """Compare with a rank's part, relative to the largest element of the whole."""
    if expected is None or found is None:
        assert found is expected, what
        return
    scale = expected.double().abs().max().item() if expected.numel() else 1.0
    expected = expected[mine] if expected.dim() else expected
    assert found.shape == expected.shape, what
    assert found.dtype == expected.dtype, what
    distance = (found.double() - expected.double()).abs()
    worst = distance.max().item() if distance.numel() else 0.0
    assert worst <= RELATIVE[dtype] * max(scale, 1e-3), f"{what}: {worst} of {scale}"


def check(ctx: Any, sizes: Any, shape: Any, case: Any, dtype: Any = torch.float64):
    """Every rank's share, and the sums of all ranks, are those of the full batch.

    Returns the module buffers, which must be the same on all ranks.
    """
    given, options = (sizes, shape, dtype, case), case.get("options", {})
    plain = plain_layer(shape, dtype, **options)
    ours = SyncBatchNorm.convert_sync_batchnorm(copy.deepcopy(plain), ctx.group)
    expected, module_buffers = train(plain, *given, "all")
    found, my_buffers = train(ours, *given, ctx.rank)
    mine = slice(sum(sizes[: ctx.rank]), sum(sizes[: ctx.rank + 1]))
    # Before anything is asserted: no rank waits for one that fails.
    totals = [[summed(ctx, grad) for grad in grads] for _, _, grads, _ in found]
    for step, (theirs, my) in enumerate(zip(expected, found, strict=True)):
        close(my[0], theirs[0], dtype, f"outputs {step}", mine)
        of_input = theirs[1] if needs_grad(case, ctx.rank) else None
        close(my[1], of_input, dtype, f"input grads {step}", mine)
        for i, (grad, total) in enumerate(zip(theirs[2], totals[step], strict=True)):
            close(total, grad, dtype, f"grads {step} {i}")
        assert my[3] or not theirs[3], "memory format"
    assert my_buffers.keys() == module_buffers.keys()
    for name, value in module_buffers.items():
        close(my_buffers[name], value, dtype, name)
    return my_buffers


def summed(ctx: Any, mine: torch.Tensor | None) -> torch.Tensor | None:
    """The sum of all ranks' gradients."""
    if mine is None:
        return None
    total = mine.double()
    torch.distributed.all_reduce(total, group=ctx.group)
    return total.to(mine.dtype)


# ----------------------------------------------------------------- equal to full batch


@on_ranks()
@pytest.mark.parametrize(
    ("where", "sizes", "shape", "dtype"),
    [
        (3, (3, 0, 5), (0, 2, 2, 3, 2), torch.float32),
        (2, (6, 3), (0, 3, 4, 4), torch.bfloat16),
        (2, (1, 1), (0, 3), torch.float64),  # one value on each rank
        (2, (0, 0), (0, 3), torch.float64),  # nothing to learn from: statistics stay
    ],
)
def test_edges_equal_full_batch(ctx, sizes, shape, dtype):
    return check(ctx, sizes, shape, {}, dtype)


@settings(max_examples=60)
@given(
    sizes=st.lists(st.integers(0, 5), min_size=1, max_size=4).filter(
        lambda sizes: sum(sizes) != 1
    ),
    channels=st.integers(1, 5),
    rest=st.lists(st.integers(1, 4), max_size=3),
    options=st.fixed_dictionaries(
        {"momentum": st.sampled_from([None, 0.0, 0.1, 0.7, 1.0])},
        optional={
            "affine": st.just(False),
            "eps": st.just(0.5),
            # In eval mode such a layer uses the local batch, as torch's does.
            "track_running_stats": st.just(False),
        },
    ),
    case=st.fixed_dictionaries(
        {"channels_last": st.booleans()},
        optional={
            # A rank without need of the sums still brings its share to the others.
            "input_grad": st.lists(st.booleans(), min_size=2, max_size=4),
            "frozen": st.sets(st.sampled_from(["weight", "bias"]), min_size=1),
            "grad": st.just(False),
        },
    ),
)
def test_any_layer_and_shape(pool, sizes, channels, rest, options, case):
    """In fp64: what is nearly zero there is all rounding in fewer bits."""
    case |= {"options": options, "steps": 2 if "track_running_stats" in options else 3}
    case["channels_last"] &= len(rest) == 2
    if options.get("affine") is False or case.get("frozen") == {"weight", "bias"}:
        case["input_grad"] = [True]  # else a rank has no backward, which is an error
    shape = (0, channels, *rest)
    first, *others = pool.run(check, len(sizes), tuple(sizes), shape, case)
    assert all(same(first, other) for other in others)


@on_ranks(2)
def test_large_means_do_not_cancel(ctx):
    """Means of 4096 and spread of 1: a float32 sum of squares keeps nothing of it."""
    x = torch.randn(2, 512, 1, dtype=torch.float64).mul(64).round().div(64) + 4096
    expected = x - x.mean()
    expected /= (expected.square().mean() + 1e-5).sqrt()
    ours = SyncBatchNorm(1, affine=False, process_group=ctx.group)
    found = ours(x[ctx.rank].float())
    assert (found - expected[ctx.rank]).abs().max() < 1e-3
    assert abs(ours.running_var.item() - (0.9 + 0.1 * x.var().item())) < 1e-5


# -------------------------------------------------------------------------- errors


@on_ranks(2)
@pytest.mark.parametrize(
    ("shapes", "dtype", "kind", "says"),
    [
        (
            *([(0, 3), (1, 3)], torch.float32),
            "ValueError: [rank {rank}] Expected more than 1 value per channel",
            "torch.Size([{rank}, 3]) and only one value on all ranks",
        ),
        (
            *([(2, 4), (2, 4)], torch.float32),
            "RuntimeError: ",
            "SyncBatchNorm of 3 channels got an input of shape (2, 4), with",
        ),
        (
            *([(2, 3), (2, 3)], torch.long),
            "NotImplementedError: ",
            "needs floating-point inputs, but got torch.int64.",
        ),
    ],
)
def test_bad_inputs_are_told_before_others_wait(ctx, shapes, dtype, kind, says):
    """One value on all ranks together; another shape; another dtype."""
    layer = SyncBatchNorm(3, process_group=ctx.group)
    said = error_of(lambda: layer(torch.ones(shapes[ctx.rank], dtype=dtype)))
    assert said.startswith(kind.format(rank=ctx.rank))
    assert says.format(rank=ctx.rank) in said
    assert layer.num_batches_tracked == 0


@on_ranks(2)
@pytest.mark.parametrize("create_graph", [False, True])
def test_a_rank_without_backward_is_named(ctx, create_graph):
    """A double backward needs inputs that require gradients alike."""
    layer = SyncBatchNorm(3, process_group=ctx.group)
    x = torch.randn(4, 3, requires_grad=ctx.rank == 0)
    with torch.set_grad_enabled(create_graph or ctx.rank == 0):
        y = layer(x)
    if ctx.rank == 1 and not create_graph:
        assert not y.requires_grad
        return
    said = error_of(lambda: y.square().sum().backward(create_graph=create_graph))
    start = f"CollectiveError: [rank {ctx.rank}] SyncBatchNorm cannot run its ba"
    assert said.startswith(start)
    assert "rank(s) 1." in said
    if create_graph:
        assert "Expected: every rank's input to require a gradient." in said
    else:
        assert "every rank's forward to have a backward. Found: otherwise on" in said
        assert "What to do: use no_grad() and requires_grad alike" in said


# ------------------------------------------------------------------ double backward


def penalty(layer: Any, x: torch.Tensor) -> Any:
    x = x.clone().requires_grad_()
    y = layer(x)
    loss = loss_of(y)
    params = list(layer.parameters())
    (dx,) = torch.autograd.grad(loss, [x], create_graph=True)
    # A sum over samples, so that the ranks' penalties add up to that of the full batch.
    wanted = dx.square().sum() + y.square().mul(x).sum()
    return torch.autograd.grad(wanted, [x, *params], materialize_grads=True)


@on_ranks()
@pytest.mark.parametrize("options", [{}, {"affine": False}], ids=str)
@pytest.mark.parametrize(("where", "sizes"), [(2, (4, 4)), (3, (3, 0, 5))])
def test_gradient_penalty_equals_full_batch(ctx, sizes, options):
    parts = batches(sizes, (0, 3, 2, 2), 0, torch.float64)
    layer = plain_layer((0, 3, 2, 2), torch.float64, **options)
    ours = SyncBatchNorm.convert_sync_batchnorm(copy.deepcopy(layer), ctx.group)
    dx, *others = penalty(layer, torch.cat(parts))
    my_dx, *mine = penalty(ours, parts[ctx.rank])
    close(my_dx, dx.split(sizes)[ctx.rank], torch.float64, "input")
    for i, (my_grad, grad) in enumerate(zip(mine, others, strict=True), 1):
        close(summed(ctx, my_grad), grad, torch.float64, f"parameter {i}")


# -------------------------------------------------------------- inside DataParallel


class ConvNet(nn.Module):
    """Two norms, the second on what pooling leaves, and two heads.

    No bias before a norm: its gradient would be rounding only.
    """

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(2, 6, 3, bias=False),
            nn.BatchNorm2d(6),
            nn.ReLU(),
            nn.Conv2d(6, 4, 3, bias=False),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.BatchNorm1d(4),
        )
        self.heads = nn.ModuleList([nn.Linear(4, 3), nn.Linear(4, 3)])

    def forward(self, x: torch.Tensor, head: int = 0, again: bool = False) -> Any:
        body = checkpoint(self.body, x, use_reentrant=False) if again else self.body(x)
        return self.heads[head](body)


def conv_net() -> ConvNet:
    torch.manual_seed(7)  # the same on every rank and in the test
    return ConvNet().double()


def images(world_size: int, step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(step)
    shape = (world_size, 4, 2, 7, 7)
    return torch.randn(shape, generator=generator, dtype=torch.float64)


@on_ranks()
@pytest.mark.parametrize(
    ("how", "where", "options"),
    [
        ("plain", 2, {}),
        ("plain", 3, {"gradient_as_bucket_view": True}),
        ("checkpoint", 2, {}),
        ("own head", 2, {}),
    ],
)
@pytest.mark.parametrize("caps", [[25], [0.0001]], ids=["one bucket", "small buckets"])
def test_conv_net_equals_full_batch(ctx, how, options, caps):
    """With small buckets and heads of their own, ranks launch at different points.

    On one group, the layer's sums then met a bucket of the other rank, and gloo ended
    the process.
    """
    alone, size = conv_net(), ctx.world_size
    net = SyncBatchNorm.convert_sync_batchnorm(conv_net(), ctx.group)
    # The second head of the others has no gradient on any rank.
    options = {**options, "find_unused_parameters": True, "bucket_cap_mb_list": caps}
    ddp = wrapped(ctx, net, **options)
    optimizers = [torch.optim.SGD(n.parameters(), lr=0.1) for n in (net, alone)]
    heads = range(size) if how == "own head" else [0] * size
    for step in range(3):
        for optimizer in optimizers:
            optimizer.zero_grad()
        x = images(size, step)
        loss_of(ddp(x[ctx.rank], heads[ctx.rank], how == "checkpoint")).backward()
        body = alone.body(x.flatten(0, 1)).split(4)
        y = torch.cat([alone.heads[h](b) for h, b in zip(heads, body, strict=True)])
        (loss_of(y) / size).backward()
        named = dict(alone.named_parameters())
        for name, mine, theirs in zip(named, grads(net), grads(alone), strict=True):
            close(mine, theirs, torch.float64, f"{name} in step {step}")
        for optimizer in optimizers:
            optimizer.step()
    if how != "checkpoint":  # which runs the forward twice, running statistics too
        for (name, mine), theirs in zip(
            net.named_buffers(), alone.buffers(), strict=True
        ):
            close(mine, theirs, torch.float64, name)


@on_ranks(2)
def test_other_ranks_hear_of_torchs_layer(ctx):
    norm = nn.SyncBatchNorm if ctx.rank == 1 else SyncBatchNorm
    module = nn.Sequential(nn.Linear(2, 2), norm(2, process_group=ctx.group))
    said = error_of(lambda: wrapped(ctx, module))
    assert "ValueError: torch's SyncBatchNorm layers only work with" in said
    assert "on the CPU: 1. Pass minidp.SyncBatchNorm.convert_sync" in said
    other = "ReplicaMismatchError: [rank 0] rank 1 rejected its argu"
    assert said.startswith("ValueError: " if ctx.rank else other)


@on_ranks(2)
def test_layers_share_a_group_that_reset_renews(ctx):
    """Is it a group of its own, kept by a second layer, and renewed by reset()?"""
    layers = [SyncBatchNorm(2, process_group=ctx.group) for _ in range(2)]
    ddp = DataParallel(nn.Sequential(nn.Linear(2, 2), *layers), process_group=ctx.group)
    found = []
    for _ in range(2):
        ddp.zero_grad()
        ddp(torch.randn(4, 2)).square().sum().backward()
        found.append(side_group(ctx.group, "layers"))
        layers[1](torch.randn(4, 2))
        found.append(side_group(ctx.group, "layers"))
        ddp.reset()
    found.append(side_group(ctx.group, "layers"))
    pairs = zip(found, [ctx.group, *found], strict=False)
    assert [a is b for a, b in pairs] == [False, True, False, True, False]


@on_ranks(4)
def test_a_layer_synchronises_within_its_group(ctx):
    pair = (0, 1) if ctx.rank < 2 else (2, 3)
    layer = SyncBatchNorm(1, affine=False, process_group=ctx.subgroups[pair])
    default = SyncBatchNorm(1)
    for each in (layer, default):
        each(torch.full((2, 1), float(ctx.rank)))
    assert layer.running_mean.item() == pytest.approx(0.05 if ctx.rank < 2 else 0.25)
    assert default.running_mean.item() == pytest.approx(0.15)
