"""``delay_all_reduce_named_params``: some gradients travel last, in one message."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from minidp import DataParallel
from tests.support.both import grads, on_both, same
from tests.support.tracing import collective_trace


class Mixed(nn.Module):
    """Four layers of several dtypes; the last one is not always used."""

    def __init__(self, dtypes: tuple[torch.dtype, ...] = (torch.float32,) * 4) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(3, 3, dtype=d) for d in dtypes])

    def forward(self, x: torch.Tensor, *, num_layers: int = 4) -> torch.Tensor:
        for layer in list(self.layers)[:num_layers]:
            x = layer(x.to(layer.weight.dtype))
        return x.float().square().sum()


def batch(ctx: Any, step: int = 0) -> torch.Tensor:
    return torch.linspace(-1.0, 1.0, 6).reshape(2, 3) * (ctx.rank + 1) + step


def delaying(module: nn.Module, *prefixes: str, until: int = 0) -> dict[str, Any]:
    named = [(n, p) for n, p in module.named_parameters() if n.startswith(prefixes)]
    hooked = list(module.parameters())[until]
    return {"delay_all_reduce_named_params": named, "param_to_hook_all_reduce": hooked}


def averages(ctx: Any, module: nn.Module, step: int) -> list[torch.Tensor]:
    """The mean of the ranks' gradients, by hand."""
    module.zero_grad()
    module(batch(ctx, step)).backward()
    mine = [p.grad for p in module.parameters()]
    for grad in mine:
        wide = grad.double() / ctx.world_size
        torch.distributed.all_reduce(wide, group=ctx.group)
        grad.copy_(wide)
    found = grads(module)
    module.zero_grad()
    return found  # type: ignore[return-value]


# ----------------------------------------------------------------- where torch is right


def as_in_torch(ctx: Any, wrap: Any, options: dict[str, Any]) -> Any:
    """The first layer is delayed; its bias is the last gradient of all but one."""
    module = Mixed()
    # Torch reduces when the hooked gradient comes: that of the very first parameter.
    first = nn.Parameter(torch.ones(3))
    module.register_parameter("scale", first)
    run = module.forward
    module.forward = lambda x: run(x * first)
    delayed = {**delaying(module, "layers.1", "layers.2"), **options}
    ddp = wrap(module, **{**delayed, "param_to_hook_all_reduce": first})
    history = []
    for step in range(3):
        ddp.zero_grad()
        ddp(batch(ctx, step)).backward()
        torch.distributed.barrier(ctx.group)  # torch never waits for these
        history.append(grads(ddp))
    return history


def run_both(ctx: Any, scenario: Any, *args: Any) -> tuple[Any, Any]:
    return on_both(ctx, lambda c, wrap: scenario(c, wrap, *args))


@pytest.mark.parametrize("options", [{}, {"gradient_as_bucket_view": True}], ids=str)
def test_side_by_side(pool: Any, options: dict[str, Any]) -> None:
    for theirs, ours in pool.run(run_both, 2, as_in_torch, options):
        assert same(theirs, ours)


# ----------------------------------------------------------------------- and elsewhere


DTYPES = [
    (torch.float32,) * 4,
    (torch.bfloat16,) * 4,
    (torch.float32, torch.float64, torch.float32, torch.bfloat16),
]


def in_any_dtype(ctx: Any, dtypes: Any, late: list[str], until: int) -> Any:
    torch.manual_seed(ctx.rank)
    module = Mixed(dtypes)
    ddp = DataParallel(
        module, process_group=ctx.group, **delaying(module, *late, until=until)
    )
    expected = averages(ctx, module, 0)
    with collective_trace() as trace:
        ddp(batch(ctx)).backward()
    found = grads(module)
    ddp.zero_grad()
    ddp(batch(ctx)).backward()  # rebuilt
    return found, grads(module), expected, [t for t in trace if t[0] == "all_reduce"]


@pytest.mark.parametrize("dtypes", DTYPES, ids=str)
@pytest.mark.parametrize("late", [["layers.0"], ["layers.1", "layers.3"], ["layers"]])
@pytest.mark.parametrize("until", [0, -1])
def test_any_dtype_and_any_hooked_parameter(
    pool: Any, dtypes: Any, late: list[str], until: int
) -> None:
    """All delayed, or the hooked gradient first: torch is unusable, or wrong."""
    for found, again, expected, trace in pool.run(in_any_dtype, 2, dtypes, late, until):
        for results in (found, again):
            for a, b in zip(results, expected, strict=True):
                torch.testing.assert_close(a, b, rtol=1e-2, atol=1e-2)
            assert same(results, found)
        delayed = [dtypes[i] for i in range(4) if f"layers.{i}".startswith(tuple(late))]
        last = trace[-len(set(delayed)) :]
        assert sorted(last) == sorted(
            ("all_reduce", 12 * delayed.count(dtype), str(dtype))
            for dtype in set(delayed)
        )


def accumulates(ctx: Any, options: dict[str, Any]) -> Any:
    results = []
    for delayed in (False, True):
        torch.manual_seed(0)
        module = Mixed()
        more = delaying(module, "layers.3", "layers.0") if delayed else {}
        ddp = DataParallel(module, process_group=ctx.group, **options, **more)
        history = []
        for step in range(4):
            ddp.zero_grad(set_to_none=step % 2 == 0)
            with ddp.no_sync():
                ddp(batch(ctx, step)).backward()
            uses = {"num_layers": 3 + step % 2} if options else {}
            ddp(batch(ctx, step + 1), **uses).backward()
            history.append(grads(module))
        results.append(history)
    return results


@pytest.mark.parametrize("options", [{}, {"find_unused_parameters": True}], ids=str)
def test_no_sync_and_unused(pool: Any, options: dict[str, Any]) -> None:
    """Nothing but the buckets is different; two ranks, so the bits are the same."""
    for usual, delayed in pool.run(accumulates, 2, options):
        assert same(usual, delayed)


class Embeds(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(4, 3, sparse=True)
        self.head = nn.Linear(3, 1)

    def forward(self, index: torch.Tensor) -> torch.Tensor:
        return self.head(self.table(index)).sum()


def sparse(ctx: Any) -> Any:
    module = Embeds()
    delayed = delaying(module, "table", "head.bias")
    ddp = DataParallel(module, process_group=ctx.group, **delayed)
    found = []
    for _ in range(3):
        ddp.zero_grad()
        ddp(torch.tensor([ctx.rank, 3])).backward()
        grad = module.table.weight.grad
        found.append((grad.is_sparse, grad.to_dense(), module.head.weight))
    return found


def test_sparse_gradients_may_be_delayed(pool: Any) -> None:
    for found in pool.run(sparse, 2):
        for is_sparse, grad, head in found:
            assert is_sparse
            factors = torch.tensor([[0.5], [0.5], [0.0], [1.0]])
            torch.testing.assert_close(grad, factors * head)


def without_init_sync(ctx: Any) -> Any:
    torch.manual_seed(ctx.rank)
    module = Mixed()
    delayed = delaying(module, "layers.2")
    DataParallel(module, process_group=ctx.group, init_sync=False, **delayed)
    return [p.detach().clone() for p in module.parameters()]


def test_delayed_parameters_start_equal_even_without_init_sync(pool: Any) -> None:
    first, second = pool.run(without_init_sync, 2)
    assert [same(a, b) for a, b in zip(first, second, strict=True)] == [
        *(False,) * 4,
        *(True,) * 2,
        *(False,) * 2,
    ]


def of_another_module(ctx: Any) -> Any:
    """What is not in the module, or is on its ignore list."""
    module, other = Mixed(), nn.Linear(3, 3)
    ignored = ["layers.0.weight"]
    DataParallel._set_params_and_buffers_to_ignore_for_model(module, ignored)
    late = [
        ("other.weight", other.weight),
        ("layers.0.weight", module.layers[0].weight),
    ]
    ddp = DataParallel(
        module,
        process_group=ctx.group,
        find_unused_parameters=True,
        delay_all_reduce_named_params=late,
        param_to_hook_all_reduce=other.weight,
    )
    (ddp(batch(ctx)) + other(batch(ctx)).sum()).backward()
    return [other.weight.grad, module.layers[0].weight.grad]


def test_parameters_of_another_module_may_be_delayed(pool: Any) -> None:
    first, second = pool.run(of_another_module, 2)
    assert same(first, second)


def ranks_differ(ctx: Any, options: list[dict[str, Any]], late: bool) -> None:
    module = Mixed()
    more = delaying(module, f"layers.{ctx.rank}") if late else options[ctx.rank]
    DataParallel(module, process_group=ctx.group, **more)


@pytest.mark.parametrize(
    ("options", "what"),
    [
        ([], "delayed"),
        ([{}, {"skip_all_reduce_unused_params": True}], "skip_all_reduce"),
    ],
    ids=str,
)
def test_what_ranks_send_must_be_the_same(pool: Any, options: Any, what: str) -> None:
    errors = pool.run(ranks_differ, 2, options, not options, errors="return")
    for error in errors:
        assert error.is_a("ReplicaMismatchError")
        assert f"option {what}" in error.message
