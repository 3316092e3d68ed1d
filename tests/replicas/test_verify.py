"""Replicas that differ are refused on every rank; equal ones start equal."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from minidp import DataParallel
from tests.support.both import error_of, wrapped
from tests.support.ranks import on_ranks


class Module(nn.Module):
    """Tensors by name: parameters or module buffers."""

    def __init__(self, ignore=(), **tensors):
        super().__init__()
        for name, value in tensors.items():
            if isinstance(value, nn.Parameter):
                self.register_parameter(name, value)
            else:
                self.register_buffer(name, value)
        if ignore:
            self._ddp_params_and_buffers_to_ignore = list(ignore)


def param(*shape, dtype=torch.float32, frozen=False):
    return nn.Parameter(torch.zeros(shape, dtype=dtype), requires_grad=not frozen)


def one(*shape, dtype=torch.float32, **options):
    return Module(a=param(*shape or [2], dtype=dtype)), options


def two(**more):
    return Module(a=param(2), b=param(2), **more), {}


def with_buffer(size=1, **more):
    return Module(a=param(2), stat=torch.zeros(size, **more)), {}


def having(**tensors):
    return Module(**tensors), {}


def late():
    module, _ = two()
    pairs, until = [("b", module.b)], module.a
    options = {"delay_all_reduce_named_params": pairs}
    return module, {**options, "param_to_hook_all_reduce": until}


# Name -> what ranks 0 and 1 build: a module, and options; what the error says.
LACKS_B = "Rank 1 lacks parameter b of rank 0."
HAS_B = "Rank 1 has parameter b, which rank 0 lacks."
BOTH = "Rank 1 lacks parameter a of rank 0, and has parameter b, which rank 0 lacks."
CASES = {
    "count": (two, one, LACKS_B),
    "extra": (one, two, HAS_B),
    "renamed": (one, lambda: having(b=param(2)), BOTH),
    "ignored": (two, partial(two, ignore=["b"]), LACKS_B),
    "shape": (
        partial(one, 2, 3),
        partial(one, 3, 3),
        "Expected parameter a: shape (2, 3), stride (3, 1), torch.float32, on cpu, "
        "trainable (rank 0); found on rank 1: shape (3, 3), stride (3, 1), ",
    ),
    "stride": (
        partial(one, 2, 3),
        lambda: having(a=nn.Parameter(torch.zeros(3, 2).t())),
        "(rank 0); found on rank 1: shape (2, 3), stride (1, 2), ",
    ),
    "dtype": (one, partial(one, dtype=torch.float64), "e (1,), torch.float64, on cpu,"),
    "order": (
        two,
        lambda: having(b=param(2), a=param(2)),
        "Expected parameter a: shape (2,), ",
        "found on rank 1: parameter b (a different registration order): shape (2,), ",
    ),
    "frozen": (
        two,
        lambda: having(a=param(2), b=param(2, frozen=True)),
        "Expected parameter b: shape (2,), stride (1,), torch.float32, on cpu, "
        "trainable (rank 0); found on rank 1: shape (2,), stride (1,), torch.float32, "
        "on cpu, frozen.",
    ),
    "sparse": (
        lambda: (nn.Embedding(2, 2), {}),
        lambda: (nn.Embedding(2, 2, sparse=True), {}),
        "on cpu, trainable, sparse.",
    ),
    "buffer shape": (
        with_buffer,
        partial(with_buffer, 2),
        "Expected module buffer stat: shape (1,), stride (1,), torch.float32, on cpu "
        "(rank 0); found on rank 1: shape (2,), stride (1,), torch.float32, on cpu.",
    ),
    "buffer dtype": (with_buffer, partial(with_buffer, dtype=torch.int64), "h.int64, "),
    "no buffer": (with_buffer, one, "lacks module buffer stat"),
    "delayed": (two, late, "option delayed: [] (rank 0); found on rank 1: ['b']."),
}
# Name of an option in the error -> options of ranks 0 and 1, and the values told.
OPTIONS = {
    "find_unused_parameters": ({}, {"find_unused_parameters": True}, "False", "True."),
    "static_graph": ({}, {"static_graph": True}, "False", "True."),
    "skip_all_reduce_unused_params": (
        *({}, {"skip_all_reduce_unused_params": True}, "False", "True."),
    ),
    "average_over": ({}, {"average_over": "items"}, "ranks", "items."),
    "check_replicas_every": ({}, {"check_replicas_every": 1}, "auto", "1."),
    "bucket caps (bytes)": (
        *({"bucket_cap_mb": 1}, {"bucket_cap_mb": 2}),
        *("BucketCaps(first_bytes=1048576, ", "BucketCaps("),
    ),
    "module buffers are broadcast before forwards": (
        *({"forward_sync_buffers": False}, {}, "False", "True."),
    ),
    "module buffers are broadcast at construction": (
        *({"broadcast_buffers": False}, {}, "False", "True."),
    ),
}
for option, (*given, here, there) in OPTIONS.items():
    builds = [partial(one, **each) for each in given]
    CASES[option] = (*builds, f"Expected option {option}: {here}", f"rank 1: {there}")


def error_of_wrapping(ctx, build):
    """What the constructor raises; the group must work afterwards."""
    module, options = build
    error = error_of(lambda: wrapped(ctx, module, **options))
    value = torch.tensor([1])
    dist.all_reduce(value, group=ctx.group)
    assert value == ctx.world_size
    return error


@on_ranks()
@pytest.mark.parametrize(
    ("case", "where", "odd"),
    [*((case, 2, 1) for case in CASES), ("frozen", 3, 2), ("frozen", (2, 3), 1)],
)
def test_mismatch_is_named_on_every_rank(ctx, case, odd):
    """Ranks count within their group."""
    error = error_of_wrapping(ctx, CASES[case][ctx.rank == odd]())
    mine = f"ReplicaMismatchError: [rank {ctx.rank}] DataParallel expects the same mod"
    assert error.startswith(mine)
    assert "build the module identically on every rank" in error
    for words in CASES[case][2:]:
        assert words.replace("rank 1", f"rank {odd}") in error


# ------------------------------------------------------ a rank rejects its arguments


REJECTED = (
    "ValueError: bucket_cap_mb must be finite and not negative (MiB), but got -1; 0 "
    "gives every parameter its own bucket."
)


@on_ranks(2)
@pytest.mark.parametrize(("who", "init_sync"), [(0, True), (1, True), (0, False)])
def test_a_rank_that_rejects_its_arguments_tells_the_others(ctx, who, init_sync):
    """Without init_sync nobody is told."""
    cap = -1 if ctx.rank == who else 1
    error = error_of_wrapping(ctx, one(bucket_cap_mb=cap, init_sync=init_sync))
    if ctx.rank == who:
        assert error == REJECTED
        if not init_sync:  # as many wrappers on each rank, by which later ones meet
            wrapped(ctx, Module(a=param(2)), init_sync=False)
    elif init_sync:
        assert error.startswith("ReplicaMismatchError: ")
        assert f"rank {who} rejected its arguments: {REJECTED}" in error
    else:
        assert error == ""


@on_ranks(2)
def test_all_ranks_reject_alike(ctx):
    error = error_of_wrapping(ctx, having(a=param(2, frozen=True)))
    assert error.startswith("RuntimeError: DistributedDataParallel is not needed when")


# ------------------------------------------------------- ranks that are not on minidp


@on_ranks(3)
@pytest.mark.parametrize("options", [{}, {"bucket_cap_mb": -1}], ids=str)
@pytest.mark.parametrize("torchs", [[0], [1], [0, 2]])
def test_a_rank_on_torch_is_named_and_nobody_is_aborted(ctx, torchs, options):
    """A rank that rejects its arguments says that also to torch."""
    module, _ = with_buffer(3)
    if ctx.rank in torchs:
        with pytest.raises(RuntimeError, match="DDP expects same model across all ran"):
            DistributedDataParallel(module, process_group=ctx.group)
        dist.all_reduce(torch.tensor([1]), group=ctx.group)
        return
    error = error_of_wrapping(ctx, (module, options))
    if options:
        assert error == REJECTED
    else:
        mine = f"ReplicaMismatchError: [rank {ctx.rank}] The model is wrapped by torch"
        assert error.startswith(mine)
        assert f"on rank {', '.join(map(str, torchs))}, but by minidp" in error


# --------------------------------------------------------------------- equal replicas


def start(ctx, options):
    torch.manual_seed(ctx.rank)
    module = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    module[0].bias.requires_grad_(False)
    module.register_buffer("steps", torch.tensor(ctx.rank), persistent=False)
    with torch.no_grad():
        module[1].running_mean.fill_(ctx.rank)
        module[1].bias.normal_()
    module._ddp_params_and_buffers_to_ignore = ["1.bias"]
    DataParallel(module, process_group=ctx.group, **options)
    return dict(module.named_parameters()), dict(module.named_buffers())


def test_state_is_rank_0s(pool):
    results = pool.run(start, 3, {})
    for params, buffers in results[1:]:
        for name in ("0.weight", "0.bias", "1.weight"):  # frozen ones too
            assert torch.equal(params[name], results[0][0][name])
        for name in buffers:  # non-persistent ones too
            assert torch.equal(buffers[name], results[0][1][name]), name
        assert not torch.equal(params["1.bias"], results[0][0]["1.bias"])


def test_init_sync_can_be_left_out(pool):
    first, second = pool.run(start, 2, {"init_sync": False})
    assert not torch.equal(first[0]["0.weight"], second[0]["0.weight"])
    assert [r[1]["steps"].item() for r in (first, second)] == [0, 1]


def odd_tensors(ctx):
    """All dtypes, strides and sizes at once, by raw bytes."""
    torch.manual_seed(ctx.rank)
    module = Module(
        a=nn.Parameter(torch.randn(3, 2).t()),
        b=nn.Parameter(torch.randn(2, 6)[:, ::2]),
        c=nn.Parameter(torch.randn(3, dtype=torch.complex64)),
        d=nn.Parameter(torch.randn(0, 2)),
        e=nn.Parameter(torch.randn((), dtype=torch.float64)),
        f=nn.Parameter(torch.randn(3).bfloat16()),
        g=torch.randint(100, (5,), dtype=torch.int8),
        h=torch.rand(3) > 0.5,
        i=nn.Parameter(torch.randn(5, 4)[:, :1]),
        j=torch.tensor([float("nan"), -0.0, float(ctx.rank)]),
    )
    strides = [t.stride() for t in module.state_dict().values()]
    DataParallel(module, process_group=ctx.group)
    after = [t.stride() for t in module.state_dict().values()]
    return dict(module.state_dict()), strides == after


def test_tensors_of_any_kind_are_broadcast(pool):
    (first, first_kept), (second, second_kept) = pool.run(odd_tensors, 2)
    assert first_kept
    assert second_kept
    for name, value in first.items():
        sent = [t.reshape(-1) for t in (value, second[name])]
        sent = [t.view(torch.uint8) if t.numel() else t for t in sent]
        assert torch.equal(*sent), name
