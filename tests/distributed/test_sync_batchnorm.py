"""`SyncBatchNorm` on several ranks against batch norm of the concatenated batches."""

from __future__ import annotations

from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from torch import nn
from torch.utils.checkpoint import checkpoint

from minidp import DataParallel, SyncBatchNorm
from minidp.comm.groups import side_group
from tests.support.both import grads, same
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


def one_pass(layer: Any, x: torch.Tensor, case: Any) -> Any:
    """Output, gradient of the input, and gradients of the parameters."""
    x = x.clone()
    if case.get("channels_last"):
        x = x.to(memory_format=torch.channels_last)
    x.requires_grad_(case.get("input_grad", True))
    layer.zero_grad()
    with torch.set_grad_enabled(case.get("grad", True)):
        y = layer(x)
    if y.requires_grad:
        loss_of(y).backward()
    return (
        y.detach(),
        x.grad,
        grads(layer),
        y.stride() if case.get("channels_last") else (),
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
        results.append(one_pass(layer, x, case))
    return results, {n: b.clone() for n, b in layer.named_buffers()}


def on_rank(ctx: Any, sizes: Any, shape: Any, dtype: Any, case: Any) -> Any:
    layer = plain_layer(shape, dtype, **case.get("options", {}))
    ours = SyncBatchNorm.convert_sync_batchnorm(layer, ctx.group)
    return train(ours, sizes, shape, dtype, case, ctx.rank)


def close(found: Any, expected: Any, dtype: Any, what: str) -> None:
    if expected is None or found is None:
        assert found is expected, what
        return
    assert found.shape == expected.shape, what
    assert found.dtype == expected.dtype, what
    scale = expected.double().abs().max().item() if expected.numel() else 1.0
    distance = (found.double() - expected.double()).abs()
    worst = distance.max().item() if distance.numel() else 0.0
    assert worst <= RELATIVE[dtype] * max(scale, 1e-3), f"{what}: {worst} of {scale}"


def check(pool: Any, sizes: Any, shape: Any, dtype: Any = torch.float64, **case: Any):
    """Every rank's share, and the sums of all ranks, are those of the full batch."""
    layer = plain_layer(shape, dtype, **case.get("options", {}))
    expected, module_buffers = train(layer, sizes, shape, dtype, case, "all")
    ranks = pool.run(on_rank, len(sizes), sizes, shape, dtype, case)
    for step, (y, dx, expected_grads, stride) in enumerate(expected):
        mine = [results[step] for results, _ in ranks]
        close(torch.cat([m[0] for m in mine]), y, dtype, f"outputs {step}")
        if dx is None:
            assert all(m[1] is None for m in mine)
        else:
            close(torch.cat([m[1] for m in mine]), dx, dtype, f"input grads {step}")
        for i, grad in enumerate(expected_grads):
            total = None if grad is None else sum(m[2][i] for m in mine)
            close(total, grad, dtype, f"grads {step} {i}")
        # Strides of a dense tensor in one memory format, less that of the samples.
        assert all(m[3][1:] == stride[1:] for m in mine)
    for _, found in ranks:
        assert same(found, ranks[0][1]), "module buffers differ between ranks"
        assert found.keys() == module_buffers.keys()
        for name, value in module_buffers.items():
            close(found[name], value, dtype, name)


# ----------------------------------------------------------------- equal to full batch

SHAPES = [(0, 3), (0, 3, 4), (0, 3, 2, 3), (0, 2, 2, 3, 2)]


@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: f"{len(s)}-D")
@pytest.mark.parametrize("sizes", [(4, 4), (3, 5, 2), (6, 0), (0, 1, 4)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_equals_full_batch(pool, sizes, shape, dtype):
    check(pool, sizes, shape, dtype)


@pytest.mark.parametrize("sizes", [(4, 4), (5, 0, 2)], ids=str)
@pytest.mark.parametrize(
    "case",
    [
        {"options": {"momentum": None}},
        {"options": {"momentum": 1.0}},
        {"options": {"momentum": 0.0}},
        {"options": {"affine": False}},
        {"options": {"eps": 0.5}},
        # In eval mode such a layer uses the local batch, as torch's does.
        {"options": {"track_running_stats": False}, "steps": 2},
        {"channels_last": True},
        {"input_grad": False},
        {"input_grad": False, "frozen": ["weight"]},
        {"frozen": ["weight"]},
        {"frozen": ["bias"]},
        {"frozen": ["weight", "bias"]},
        {"frozen": ["weight", "bias"], "input_grad": False},
        {"grad": False},
    ],
    ids=str,
)
def test_cases_equal_full_batch(pool, sizes, case):
    check(pool, sizes, (0, 3, 2, 3), **case)


def test_edges_equal_full_batch(pool):
    check(pool, (6, 3), (0, 3, 4, 4), torch.bfloat16)
    check(pool, (1, 1), (0, 3))  # one value on each rank
    check(pool, (0, 0), (0, 3))  # nothing to learn from: running statistics stay


@settings(max_examples=40)
@given(
    sizes=st.lists(st.integers(0, 5), min_size=2, max_size=4).filter(
        lambda sizes: sum(sizes) != 1
    ),
    channels=st.integers(1, 5),
    rest=st.lists(st.integers(1, 4), max_size=3),
    momentum=st.sampled_from([None, 0.1, 0.7]),
    affine=st.booleans(),
)
def test_any_shape(pool, sizes, channels, rest, momentum, affine):
    options = {"momentum": momentum, "affine": affine}
    check(pool, tuple(sizes), (0, channels, *rest), options=options)


def far_from_zero(ctx: Any, x: Any) -> Any:
    ours = SyncBatchNorm(1, affine=False, process_group=ctx.group)
    return ours(x[ctx.rank]), ours.running_var


def test_large_means_do_not_cancel(pool):
    """Means of 4096 and spread of 1: a float32 sum of squares keeps nothing of it."""
    x = torch.randn(2, 512, 1, dtype=torch.float64).mul(64).round().div(64) + 4096
    expected = x.view(-1, 1) - x.mean()
    expected /= (expected.square().mean() + 1e-5).sqrt()
    results = pool.run(far_from_zero, 2, x.float())
    found = torch.cat([y for y, _ in results])
    assert (found - expected).abs().max() < 1e-3
    for _, var in results:
        assert abs(var.item() - (0.9 + 0.1 * x.var().item())) < 1e-5


# -------------------------------------------------------------------------- errors


def forward_of(ctx: Any, shapes: Any, dtype: Any = None) -> Any:
    layer = SyncBatchNorm(3, process_group=ctx.group)
    try:
        layer(torch.ones(shapes[ctx.rank], dtype=dtype))
    except (ValueError, RuntimeError) as error:
        state = layer.state_dict()
        return type(error).__name__, str(error), int(state["num_batches_tracked"])
    return None


def test_one_value_on_all_ranks_together(pool):
    results = pool.run(forward_of, 2, [(0, 3), (1, 3)])
    for rank, (kind, text, num_batches) in enumerate(results):
        assert (kind, num_batches) == ("ValueError", 0)
        assert text.startswith(f"[rank {rank}] Expected more than 1 value per channel")
        assert f"torch.Size([{rank}, 3]) and only one value on all ranks" in text


def test_inputs_are_checked_before_others_wait(pool):
    for kind, text, _ in pool.run(forward_of, 2, [(2, 4), (2, 4)]):
        assert kind == "RuntimeError"
        assert "SyncBatchNorm of 3 channels got an input of shape (2, 4), with" in text
    for kind, text, _ in pool.run(forward_of, 2, [(2, 3), (2, 3)], torch.long):
        assert kind == "NotImplementedError"
        assert text.endswith("needs floating-point inputs, but got torch.int64.")


def graphs_differ(ctx: Any, create_graph: bool) -> str:
    layer = SyncBatchNorm(3, process_group=ctx.group)
    x = torch.randn(4, 3, requires_grad=ctx.rank == 0)
    with torch.set_grad_enabled(create_graph or ctx.rank == 0):
        y = layer(x)
    if not y.requires_grad:
        return ""
    try:
        y.square().sum().backward(create_graph=create_graph)
    except RuntimeError as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def test_a_rank_without_backward_is_named(pool):
    first, second = pool.run(graphs_differ, 2, False)
    assert second == ""
    assert first.startswith("CollectiveError: [rank 0] SyncBatchNorm cannot run its ba")
    assert "every rank's forward to have a backward. Found: otherwise on" in first
    assert "rank(s) 1. What to do: use no_grad() and requires_grad alike" in first


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph")
def test_double_backward_needs_alike_inputs(pool):
    for rank, text in enumerate(pool.run(graphs_differ, 2, True)):
        assert text.startswith(f"CollectiveError: [rank {rank}] SyncBatchNorm cannot")
        assert "Expected: every rank's input to require a gradient." in text
        assert "on rank(s) 1." in text


def some_inputs_need_gradients(ctx: Any, parts: Any) -> Any:
    layer = SyncBatchNorm(3, process_group=ctx.group, dtype=torch.float64)
    x = parts[ctx.rank].requires_grad_(ctx.rank == 0)
    loss_of(layer(x)).backward()
    return x.grad, layer.weight.grad


def test_input_gradients_on_one_rank_only(pool):
    """The other rank has no use for the sums, but its share is needed."""
    parts = batches((4, 3), (0, 3), 0, torch.float64)
    whole = torch.cat(parts).requires_grad_()
    layer = nn.BatchNorm1d(3, dtype=torch.float64)
    loss_of(layer(whole)).backward()
    (dx, grad), (none, other) = pool.run(some_inputs_need_gradients, 2, parts)
    close(dx, whole.grad[:4], torch.float64, "input gradient")
    assert none is None
    close(grad + other, layer.weight.grad, torch.float64, "weight gradient")


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


def penalty_on_rank(ctx: Any, parts: Any, options: Any) -> Any:
    layer = plain_layer(parts[0].shape, torch.float64, **options)
    ours = SyncBatchNorm.convert_sync_batchnorm(layer, ctx.group)
    return list(penalty(ours, parts[ctx.rank]))


@pytest.mark.parametrize("options", [{}, {"affine": False}], ids=str)
@pytest.mark.parametrize("sizes", [(4, 4), (3, 0, 5)], ids=str)
def test_gradient_penalty_equals_full_batch(pool, sizes, options):
    parts = batches(sizes, (0, 3, 2, 2), 0, torch.float64)
    layer = plain_layer((0, 3, 2, 2), torch.float64, **options)
    dx, *others = penalty(layer, torch.cat(parts))
    results = pool.run(penalty_on_rank, len(sizes), parts, options)
    close(torch.cat([r[0] for r in results]), dx, torch.float64, "input")
    for i, grad in enumerate(others, 1):
        close(sum(r[i] for r in results), grad, torch.float64, f"parameter {i}")


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


def conv_net_on_ranks(ctx: Any, options: Any, how: str) -> Any:
    net = SyncBatchNorm.convert_sync_batchnorm(conv_net(), ctx.group)
    ddp = DataParallel(net, process_group=ctx.group, **options)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    found = []
    for step in range(3):
        optimizer.zero_grad()
        head = ctx.rank if how == "own head" else 0
        x = images(ctx.world_size, step)[ctx.rank]
        loss_of(ddp(x, head, how == "checkpoint")).backward()
        found.append(grads(net))
        optimizer.step()
    return found, dict(net.named_buffers())


def conv_net_alone(net: nn.Module, world_size: int, how: str) -> Any:
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    expected = []
    for step in range(3):
        optimizer.zero_grad()
        body = net.body(images(world_size, step).flatten(0, 1)).split(4)
        heads = range(world_size) if how == "own head" else [0] * world_size
        y = torch.cat([net.heads[h](b) for h, b in zip(heads, body, strict=True)])
        (loss_of(y) / world_size).backward()
        expected.append(grads(net))
        optimizer.step()
    return expected, dict(net.named_buffers())


@pytest.mark.parametrize(
    ("how", "world_size", "options"),
    [
        ("plain", 2, {}),
        ("plain", 3, {"gradient_as_bucket_view": True}),
        ("checkpoint", 2, {}),
        ("own head", 2, {}),
    ],
)
@pytest.mark.parametrize("caps", [[25], [0.0001]], ids=["one bucket", "small buckets"])
def test_conv_net_equals_full_batch(pool, how, world_size, options, caps):
    """With small buckets and heads of their own, ranks launch at different points.

    On one group, the layer's sums then met a bucket of the other rank, and gloo ended
    the process.
    """
    # The second head of the others has no gradient on any rank.
    options = {**options, "find_unused_parameters": True, "bucket_cap_mb_list": caps}
    ranks = pool.run(conv_net_on_ranks, world_size, options, how)
    net = conv_net()
    expected, module_buffers = conv_net_alone(net, world_size, how)
    for found, found_buffers in ranks:
        for step, (ours, theirs) in enumerate(zip(found, expected, strict=True)):
            for name, a, b in zip(
                dict(net.named_parameters()), ours, theirs, strict=True
            ):
                close(a, b, torch.float64, f"{name} in step {step}")
        if how != "checkpoint":  # which runs the forward twice, running statistics too
            for name, value in module_buffers.items():
                close(found_buffers[name], value, torch.float64, name)


def torchs_layer_on_one_rank(ctx: Any) -> str:
    norm = nn.SyncBatchNorm if ctx.rank == 1 else SyncBatchNorm
    module = nn.Sequential(nn.Linear(2, 2), norm(2, process_group=ctx.group))
    try:
        DataParallel(module, process_group=ctx.group)
    except (ValueError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def test_other_ranks_hear_of_torchs_layer(pool):
    first, second = pool.run(torchs_layer_on_one_rank, 2)
    assert second.startswith("ValueError: torch's SyncBatchNorm layers only work with")
    assert "on the CPU: 1. Pass minidp.SyncBatchNorm.convert_sync" in second
    assert first.startswith("ReplicaMismatchError: [rank 0] rank 1 rejected its argu")
    assert second in first


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


def halves(ctx: Any) -> Any:
    pair = (0, 1) if ctx.rank < 2 else (2, 3)
    layer = SyncBatchNorm(1, affine=False, process_group=ctx.subgroups[pair])
    default = SyncBatchNorm(1)
    for each in (layer, default):
        each(torch.full((2, 1), float(ctx.rank)))
    return layer.running_mean.item(), default.running_mean.item()


def test_a_layer_synchronises_within_its_group(pool):
    found = pool.run(halves, 4)
    assert found == [pytest.approx((x, 0.15)) for x in (0.05, 0.05, 0.25, 0.25)]
