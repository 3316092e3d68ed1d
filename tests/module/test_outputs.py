"""What a forward may return, and what is seen in it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from minidp import DataParallel
from tests.support.both import grads, history_of, on_both, same, wrapped
from tests.support.ranks import as_in_torch, on_ranks


@dataclasses.dataclass
class Output:
    value: torch.Tensor


class Box:
    def __init__(self, value: torch.Tensor) -> None:
        self.value = value


# What a forward returns of its layers a, b, c, and the loss of that.
KINDS: dict[str, tuple[Callable[..., Any], Callable[[Any], torch.Tensor]]] = {
    "tensor": (lambda a, b, c: a, lambda out: out.sum()),
    "tuple": (lambda a, b, c: (a, b), lambda out: out[0].sum()),
    "dict": (
        lambda a, b, c: {"a": a, "nested": [b, 3]},
        lambda out: out["a"].sum() + out["nested"][0].pow(2).sum(),
    ),
    "dataclass": (lambda a, b, c: Output(a + b), lambda out: out.value.pow(2).sum()),
    "leaf": (
        lambda a, b, c: (a + b, c.bias),
        lambda out: out[0].pow(2).sum() + out[1].sum(),
    ),
    "object": (lambda a, b, c: Box(a + b), lambda out: out.value.pow(2).sum()),
}


UNUSED = {"tensor": [2, 3, 4, 5], "tuple": [2, 3, 4, 5], "leaf": [4]}  # else [4, 5]


class Shapes(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(2, 2) for _ in range(3))
        self.made, _ = KINDS[kind]

    def forward(self, x: torch.Tensor) -> Any:
        return self.made(self.a(x), self.b(x), self.c)


def outputs(ctx, wrap, kind, mode):
    ddp, (_, loss) = wrap(Shapes(kind), **{mode: True}), KINDS[kind]
    x = torch.ones(1, 2)
    return history_of(ddp, lambda n: loss(ddp(x * (ctx.rank + 1 + n))), 4)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("mode", "torch_is_wrong"),
    [
        # Torch fails with a leaf parameter or an opaque object among the outputs,
        ("find_unused_parameters", ("leaf", "object")),
        # never synchronises a dataclass or object, and fails with a spare output.
        ("static_graph", ("dataclass", "object", "leaf", "tuple")),
    ],
)
def test_any_output(pool, kind, mode, torch_is_wrong):
    results = pool.run(on_both, 2, outputs, kind, mode)
    for theirs, ours in results:
        assert not isinstance(ours, str), ours
        assert kind in torch_is_wrong or same(theirs, ours), f"{theirs} != {ours}"
    (_, first), (_, second) = results
    assert same(first, second)
    if mode == "find_unused_parameters":
        unused = [i for i, grad in enumerate(first[-1]) if grad is None]
        assert unused == UNUSED.get(kind, [4, 5])


def test_outputs_are_the_very_objects_of_the_module(lone_group):
    ddp = DataParallel(Shapes("tuple"))
    kept: list[Any] = []
    ddp.module.register_forward_hook(lambda _m, _i, out: kept.append(out))
    assert ddp(torch.ones(1, 2)) is kept[0]


class Recurrent(nn.Module):
    """Keeps what it returns, as its next state, and in ``tanh``, for its backward."""

    def __init__(self, pack: Callable[[torch.Tensor], Any]) -> None:
        super().__init__()
        self.layer, self.unused = nn.Linear(2, 2), nn.Linear(2, 2)
        self.state, self.pack = torch.zeros(1, 2), pack

    def forward(self, x: torch.Tensor) -> Any:
        y = self.layer(x + self.state).tanh()
        self.state = y.detach()
        return self.pack(y)


PACKED: dict[str, tuple[Callable[..., Any], Callable[[Any], torch.Tensor]]] = {
    "tensor": (lambda y: y, lambda out: out),
    "nested": (lambda y: {"a": (y.sum(), [y])}, lambda out: out["a"][1][0]),
    "named": (lambda y: torch.max(y, 1), lambda out: out.values),
    "twice": (lambda y: (y, y), lambda out: out[1]),
}


@as_in_torch(2)
@pytest.mark.parametrize("kind", PACKED)
@pytest.mark.parametrize("option", ["find_unused_parameters", "static_graph", "both"])
def test_outputs_that_are_changed_in_place(ctx, wrap, kind, option):
    """Torch copies outputs in these modes, with a static graph in the first step."""
    pack, unpack = PACKED[kind]
    options = ("find_unused_parameters", "static_graph")
    ddp = wrap(Recurrent(pack), **{o: option in (o, "both") for o in options})
    ddp.module.unused.requires_grad_(requires_grad=False)
    seen: list[Any] = []

    def loss(step: int) -> torch.Tensor:
        y = unpack(ddp(torch.ones(1, 2) * (ctx.rank + 1 + step)))
        if step == 0 or option == "find_unused_parameters":
            y.mul_(2)
        seen.append(ddp.module.state.clone())
        return y.sum()

    with torch.no_grad():
        loss(0)
    if option == "find_unused_parameters":
        with ddp.no_sync():
            loss(0).backward()
    return [seen, history_of(ddp, loss, 4)]


@as_in_torch(2)
@pytest.mark.parametrize("option", ["find_unused_parameters", "static_graph"])
def test_an_input_with_a_graph_that_is_returned_without_grad_mode(ctx, wrap, option):
    """The copy has no graph."""
    ddp = wrap(Recurrent(lambda y: y), **{option: True})
    ddp.module.forward = lambda x: x  # type: ignore[method-assign]
    x = torch.ones(1, 2, requires_grad=True) * 2
    with torch.no_grad():
        return [ddp(x).requires_grad]


@as_in_torch(2)
def test_outputs_are_not_copied_if_torch_is_told_so(ctx, wrap):
    ddp = wrap(Recurrent(lambda y: y), find_unused_parameters=True)
    ddp._set_ddp_sink_clone(False)
    y = ddp(torch.ones(1, 2) * (ctx.rank + 1))
    assert y.data_ptr() == ddp.module.state.data_ptr()
    y.sum().backward()
    return grads(ddp)


def test_outputs_of_a_static_graph_are_copied_until_it_is_known(lone_group):
    ddp = DataParallel(Recurrent(lambda y: y), static_graph=True)
    are_copies = []
    for _ in range(3):
        y = ddp(torch.ones(1, 2))
        are_copies.append(y.data_ptr() != ddp.module.state.data_ptr())
        y.sum().backward()
    assert are_copies == [True, False, False]


@on_ranks(2)
def test_nothing_is_predicted_from_an_output_that_cannot_be_seen(ctx):
    options = {"find_unused_parameters": True, "bucket_cap_mb": 0}
    ddp = wrapped(ctx, Shapes("object"), **options)
    for made in (lambda a, b, c: Box(a + b), lambda a, b, c: Box(a)) * 2:
        ddp.zero_grad()
        ddp.module.made = made
        ddp(torch.ones(1, 2) * (ctx.rank + 1)).value.sum().backward()
    missing = [g is None for g in grads(ddp)]
    assert missing == [False, False, True, True, True, True]
    ddp.zero_grad()
    ddp.module.made = lambda a, b, c: Box(a + b)
    ddp(torch.ones(1, 2) * (ctx.rank + 1)).value.sum().backward()
    assert all(g is not None for g in grads(ddp)[:4])
    return grads(ddp)[:4]


@as_in_torch(2)
@pytest.mark.parametrize("view", [False, True])
def test_two_heads_with_zeroing(ctx, wrap, view):
    """Gradients are read before the user may zero them."""
    ddp = wrap(Shapes("tuple"), gradient_as_bucket_view=view)
    ddp.module.made = lambda a, b, c: (a, b + c.bias + c.weight.sum())

    def loss(step: int) -> torch.Tensor:
        first, second = ddp(torch.ones(1, 2) * (ctx.rank + 1 + step))
        first.sum().backward()
        for p in ddp.parameters():
            if p.grad is not None and not view:
                p.grad.zero_()
        return second.sum()

    return history_of(ddp, loss)
