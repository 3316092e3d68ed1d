"""``delay_all_reduce_named_params``: some gradients travel last, in one message."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from minidp import DataParallel
from tests.support.both import grads, same, wrapped
from tests.support.ranks import as_in_torch, on_ranks
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


@as_in_torch(2)
@pytest.mark.parametrize("options", [{}, {"gradient_as_bucket_view": True}], ids=str)
def test_side_by_side_where_torch_is_right(ctx, wrap, options):
    """Torch reduces when the hooked gradient comes: that of the first parameter."""
    module = Mixed()
    module.register_parameter("scale", nn.Parameter(torch.ones(3)))
    run = module.forward
    module.forward = lambda x: run(x * module.scale)
    # The parameters of a module come before those of its children.
    ddp = wrap(module, **delaying(module, "layers.1", "layers.2"), **options)
    history = []
    for step in range(3):
        ddp.zero_grad()
        ddp(batch(ctx, step)).backward()
        torch.distributed.barrier(ctx.group)  # torch never waits for these
        history.append(grads(ddp))
    return history


def averages(ctx: Any, module: nn.Module) -> list[torch.Tensor]:
    """The mean of the ranks' gradients, by hand."""
    module(batch(ctx)).backward()
    for param in module.parameters():
        wide = param.grad.double() / ctx.world_size
        torch.distributed.all_reduce(wide, group=ctx.group)
        param.grad.copy_(wide)
    found = grads(module)
    module.zero_grad()
    return found  # type: ignore[return-value]


@on_ranks(2)
@pytest.mark.parametrize(
    "dtypes",
    [
        (torch.float32,) * 4,
        (torch.bfloat16,) * 4,
        (torch.float32, torch.float64, torch.float32, torch.bfloat16),
    ],
    ids=str,
)
@pytest.mark.parametrize("late", [["layers.0"], ["layers.1", "layers.3"], ["layers"]])
@pytest.mark.parametrize("until", [0, -1])
def test_any_dtype_and_any_hooked_parameter(ctx, dtypes, late, until):
    """All delayed, or the hooked gradient first: torch is unusable, or wrong."""
    torch.manual_seed(ctx.rank)
    module = Mixed(dtypes)
    options = delaying(module, *late, until=until)
    ddp = DataParallel(module, process_group=ctx.group, **options)
    expected = averages(ctx, module)
    with collective_trace() as trace:
        ddp(batch(ctx)).backward()
    found = grads(module)
    ddp.zero_grad()
    ddp(batch(ctx)).backward()  # rebuilt
    assert same(found, grads(module))
    torch.testing.assert_close(found, expected, rtol=1e-2, atol=1e-2)
    delayed = [dtypes[i] for i in range(4) if f"layers.{i}".startswith(tuple(late))]
    last = [t for t in trace if t[0] == "all_reduce"][-len(set(delayed)) :]
    assert set(last) == {
        ("all_reduce", 12 * delayed.count(dtype), str(dtype)) for dtype in delayed
    }


@on_ranks(2)
def test_sparse_gradients_may_be_delayed(ctx):
    module = nn.Sequential(nn.Embedding(4, 3, sparse=True), nn.Linear(3, 1))
    ddp = wrapped(ctx, module, **delaying(module, "0.weight", "1.bias"))
    factors = torch.tensor([[0.5], [0.5], [0.0], [1.0]])
    for _ in range(3):
        ddp.zero_grad()
        ddp(torch.tensor([ctx.rank, 3])).sum().backward()
        grad = module[0].weight.grad
        assert grad.is_sparse
        expected = factors * module[1].weight.detach()
        torch.testing.assert_close(grad.to_dense(), expected)


def without_init_sync(ctx: Any) -> Any:
    torch.manual_seed(ctx.rank)
    module = Mixed()
    delayed = delaying(module, "layers.2")
    DataParallel(module, process_group=ctx.group, init_sync=False, **delayed)
    return [p.detach().clone() for p in module.parameters()]


def test_delayed_parameters_start_equal_even_without_init_sync(pool: Any) -> None:
    is_same = map(same, *pool.run(without_init_sync, 2))
    assert [*is_same] == [False] * 4 + [True] * 2 + [False] * 2


@on_ranks(2)
def test_parameters_of_another_module_may_be_delayed(ctx):
    """What is not in the module, or is on its ignore list."""
    module, other = Mixed(), nn.Linear(3, 3)
    ignored, inner = "layers.0.weight", module.layers[0].weight
    DataParallel._set_params_and_buffers_to_ignore_for_model(module, [ignored])
    named = [("other.weight", other.weight), (ignored, inner)]
    options = {"find_unused_parameters": True, "delay_all_reduce_named_params": named}
    ddp = wrapped(ctx, module, param_to_hook_all_reduce=other.weight, **options)
    (ddp(batch(ctx)) + other(batch(ctx)).sum()).backward()
    return [other.weight.grad, inner.grad]
