"""Replicas that differ are refused on every rank; equal ones start equal."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from minidp import DataParallel
from minidp._replicas import describe

HEAD = (
    "[rank {}] DataParallel expects the same model and options on all ranks. {} What "
    "to do: build the module identically on every rank, then wrap it."
)


class Module(nn.Module):
    """Tensors by name: parameters, and with a leading ``~`` module buffers."""

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


def transposed(*shape):
    return nn.Parameter(torch.zeros(shape[::-1]).t())


# Name -> what rank r builds: a module, and options.
BUILD = {
    "count": lambda r: (
        Module(a=param(2), b=param(3)) if r == 0 else Module(a=param(2)),
        {},
    ),
    "extra": lambda r: (
        Module(a=param(2)) if r == 0 else Module(a=param(2), b=param(3)),
        {},
    ),
    "renamed": lambda r: (Module(**{"ab"[r]: param(2)}), {}),
    "shape": lambda r: (Module(a=param(1), b=param(2 + r, 3)), {}),
    "stride": lambda r: (Module(a=transposed(2, 3) if r else param(2, 3)), {}),
    "dtype": lambda r: (
        Module(a=param(2, dtype=torch.float64 if r else torch.float32)),
        {},
    ),
    "order": lambda r: (
        Module(a=param(2), b=param(2)) if r == 0 else Module(b=param(2), a=param(2)),
        {},
    ),
    "buffer shape": lambda r: (Module(a=param(2), stat=torch.zeros(1 + r)), {}),
    "buffer dtype": lambda r: (
        Module(a=param(2), stat=torch.zeros(1, dtype=torch.int64 if r else None)),
        {},
    ),
    "no buffer": lambda r: (
        Module(a=param(2)) if r else Module(a=param(2), stat=torch.zeros(1)),
        {},
    ),
    "frozen": lambda r: (Module(a=param(2), b=param(2, frozen=r == 1)), {}),
    "sparse": lambda r: (nn.Embedding(2, 2, sparse=r == 1), {}),
    "ignored": lambda r: (
        Module(a=param(2), b=param(2), ignore=["b"] if r else ()),
        {},
    ),
    "find_unused_parameters": lambda r: (
        Module(a=param(2)),
        {"find_unused_parameters": r == 1},
    ),
    "static_graph": lambda r: (Module(a=param(2)), {"static_graph": r == 1}),
    "caps": lambda r: (Module(a=param(2)), {"bucket_cap_mb": 1 + r}),
    "buffers": lambda r: (Module(a=param(2)), {"forward_sync_buffers": r == 1}),
    "initial buffers": lambda r: (Module(a=param(2)), {"broadcast_buffers": r == 1}),
}

EXPECTED = {
    "count": "Expected rank 0's 2 parameters and module buffers; rank 1 has 1, lacks "
    "[parameter b] and has besides [].",
    "extra": "Expected rank 0's 1 parameters and module buffers; rank 1 has 2, lacks "
    "[] and has besides [parameter b].",
    "renamed": "Expected rank 0's 1 parameters and module buffers; rank 1 has 1, lacks "
    "[parameter a] and has besides [parameter b].",
    "shape": "Expected parameter b: shape (2, 3), stride (3, 1), torch.float32, on "
    "cpu, trainable (rank 0); found on rank 1: shape (3, 3), stride (3, 1), "
    "torch.float32, on cpu, trainable.",
    "stride": "Expected parameter a: shape (2, 3), stride (3, 1), torch.float32, on "
    "cpu, trainable (rank 0); found on rank 1: shape (2, 3), stride (1, 2), "
    "torch.float32, on cpu, trainable.",
    "dtype": "Expected parameter a: shape (2,), stride (1,), torch.float32, on cpu, "
    "trainable (rank 0); found on rank 1: shape (2,), stride (1,), torch.float64, on "
    "cpu, trainable.",
    "order": "Expected parameter a at position 0, as on rank 0; rank 1 has parameter b "
    "there (another registration order).",
    "buffer shape": "Expected module buffer stat: shape (1,), stride (1,), "
    "torch.float32, on cpu (rank 0); found on rank 1: shape (2,), stride (1,), "
    "torch.float32, on cpu.",
    "buffer dtype": "Expected module buffer stat: shape (1,), stride (1,), "
    "torch.float32, on cpu (rank 0); found on rank 1: shape (1,), stride (1,), "
    "torch.int64, on cpu.",
    "no buffer": "Expected rank 0's 2 parameters and module buffers; rank 1 has 1, "
    "lacks [module buffer stat] and has besides [].",
    "frozen": "Expected parameter b: shape (2,), stride (1,), torch.float32, on cpu, "
    "trainable (rank 0); found on rank 1: shape (2,), stride (1,), torch.float32, on "
    "cpu, frozen.",
    "sparse": "Expected parameter weight: shape (2, 2), stride (2, 1), torch.float32, "
    "on cpu, trainable (rank 0); found on rank 1: shape (2, 2), stride (2, 1), "
    "torch.float32, on cpu, trainable, sparse.",
    "ignored": "Expected rank 0's 2 parameters and module buffers; rank 1 has 1, lacks "
    "[parameter b] and has besides [].",
    "find_unused_parameters": "Expected option find_unused_parameters: False (rank 0); "
    "found on rank 1: True.",
    "static_graph": "Expected option static_graph: False (rank 0); found on rank 1: "
    "True.",
    "caps": "Expected option bucket caps (bytes): BucketCaps(first_bytes=1048576, "
    "rest_bytes=1048576, list_bytes=()) (rank 0); found on rank 1: "
    "BucketCaps(first_bytes=2097152, rest_bytes=2097152, list_bytes=()).",
    "buffers": "Expected option module buffers are broadcast before forwards: False "
    "(rank 0); found on rank 1: True.",
    "initial buffers": "Expected option module buffers are broadcast at construction: "
    "False (rank 0); found on rank 1: True.",
}


def wrap(ctx, build):
    """(error class, text, sum over ranks): the group must work afterwards."""
    module, options = build
    try:
        DataParallel(module, process_group=ctx.group, **options)
    except Exception as error:
        kind, text = type(error).__name__, str(error)
    else:
        kind, text = "", ""
    value = torch.tensor([ctx.rank + 1])
    dist.all_reduce(value, group=ctx.group)
    return kind, text, value.item()


def wrap_case(ctx, case):
    return wrap(ctx, BUILD[case](ctx.rank))


def test_every_case_is_expected():
    assert list(BUILD) == list(EXPECTED)


@pytest.mark.parametrize("case", BUILD)
def test_mismatch_is_named_on_every_rank(pool, case):
    results = pool.run(wrap_case, 2, case)
    assert results == [
        ("ReplicaMismatchError", HEAD.format(rank, EXPECTED[case]), 3)
        for rank in range(2)
    ]


def wrap_third(ctx, case):
    return wrap(ctx, BUILD[case](int(ctx.rank == 2)))


def test_the_rank_that_differs_is_named(pool):
    results = pool.run(wrap_third, 3, "frozen")
    for rank, (_, text, total) in enumerate(results):
        assert text == HEAD.format(rank, EXPECTED["frozen"]).replace(
            "rank 1:", "rank 2:"
        )
        assert total == 6


def test_ranks_count_within_their_group(pool):
    results = pool.run(wrap_case, (2, 3), "frozen")
    assert [text for _, text, _ in results] == [
        HEAD.format(rank, EXPECTED["frozen"]) for rank in range(2)
    ]


# ------------------------------------------------------ a rank rejects its arguments


REJECTED = (
    "bucket_cap_mb must be finite and not negative (MiB), but got -1; 0 gives every "
    "parameter its own bucket."
)


def reject_on_one(ctx, who):
    options = {"bucket_cap_mb": -1 if ctx.rank == who else 1}
    return wrap(ctx, (Module(a=param(2)), options))


@pytest.mark.parametrize("who", [0, 1])
def test_a_rank_that_rejects_its_arguments_tells_the_others(pool, who):
    results = pool.run(reject_on_one, 2, who)
    assert results[who] == ("ValueError", REJECTED, 3)
    assert results[1 - who] == (
        "ReplicaMismatchError",
        f"[rank {1 - who}] rank {who} rejected its arguments: ValueError: {REJECTED} "
        f"What to do: look at the traceback of rank {who}.",
        3,
    )


def reject_everywhere(ctx):
    module = Module(a=param(2, frozen=True))
    return wrap(ctx, (module, {}))


def test_all_ranks_reject_alike(pool):
    results = pool.run(reject_everywhere, 2)
    for kind, text, total in results:
        assert kind == "RuntimeError"
        assert text.startswith("DistributedDataParallel is not needed when a module")
        assert total == 3


def reject_without_sync(ctx):
    options = {"bucket_cap_mb": -1 if ctx.rank == 0 else 1, "init_sync": False}
    return wrap(ctx, (Module(a=param(2)), options))


def test_without_init_sync_nobody_is_told(pool):
    first, second = pool.run(reject_without_sync, 2)
    assert first[0] == "ValueError"
    assert second == ("", "", 3)


# ------------------------------------------------------- ranks that are not on minidp


def wrap_in_either(ctx, torchs, options):
    module = Module(a=param(2), stat=torch.zeros(3))
    if ctx.rank not in torchs:
        return wrap(ctx, (module, options))
    with pytest.raises(RuntimeError, match="DDP expects same model across all ranks"):
        DistributedDataParallel(module, process_group=ctx.group)
    dist.all_reduce(torch.zeros(1, dtype=torch.int64), group=ctx.group)
    return None


@pytest.mark.parametrize(
    ("torchs", "words"), [([0], "rank 0"), ([1], "rank 1"), ([0, 2], "ranks 0, 2")]
)
def test_a_rank_on_torch_is_named_and_nobody_is_aborted(pool, torchs, words):
    results = pool.run(wrap_in_either, 3, torchs, {})
    for rank in sorted({0, 1, 2} - set(torchs)):
        kind, text, _ = results[rank]
        assert kind == "ReplicaMismatchError"
        assert text.startswith(
            f"[rank {rank}] The model is wrapped by torch's DistributedDataParallel on "
            f"{words}, but by minidp.DataParallel here. Expected: the same class on "
        )


def test_a_rank_that_rejects_its_arguments_says_that_also_to_torch(pool):
    results = pool.run(wrap_in_either, 2, [1], {"bucket_cap_mb": -1})
    assert results[0][:2] == ("ValueError", REJECTED)


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
        assert torch.equal(
            value.reshape(-1).view(torch.uint8) if value.numel() else value,
            second[name].reshape(-1).view(torch.uint8) if value.numel() else value,
        ), name


# ------------------------------------------------------------------------ descriptions


def test_description():
    module = Module(
        a=param(2, 3),
        b=param(1, frozen=True),
        stat=torch.zeros(2, dtype=torch.int64),
    )
    found = describe(
        dict(module.named_parameters()),
        dict(module.named_buffers()),
        ["a"],
        {"cap": 3},
    )
    assert found.to_json() == {
        "tensors": [
            (
                "parameter a",
                "shape (2, 3), stride (3, 1), torch.float32, on cpu, trainable, sparse",
            ),
            ("parameter b", "shape (1,), stride (1,), torch.float32, on cpu, frozen"),
            ("module buffer stat", "shape (2,), stride (1,), torch.int64, on cpu"),
        ],
        "options": [("cap", "3")],
    }
