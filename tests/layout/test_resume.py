"""A run that goes on from a checkpoint has the bits of one that was never stopped."""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch
from torch import nn

from minidp import DataParallel
from tests.support.combined import combined
from tests.support.ranks import on_ranks

STEPS = 6
# Every parameter gets a bucket of its own once the buckets are rebuilt, one bucket
# holds them all before: as different as layouts can be.
CAPS = {"bucket_cap_mb": 0}
MODES: dict[str, dict[str, Any]] = {
    "default": {},
    "find_unused": {"find_unused_parameters": True},
    "static_graph": {"static_graph": True},
    "view": {"gradient_as_bucket_view": True},
    "static_view": {"static_graph": True, "gradient_as_bucket_view": True},
    "delayed": {},
    "kept_view": {"gradient_as_bucket_view": True},  # zeroed, never None
}


class Net(nn.Module):
    """Layers in some order, and one that may stay unused."""

    def __init__(self, order: tuple[int, ...] = (0, 1, 2, 3)) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(7, 7) for _ in order])
        self.spare = nn.Linear(7, 1)
        self.order = order

    def forward(self, x: torch.Tensor, *, with_spare: bool = True) -> torch.Tensor:
        for i in self.order:
            x = torch.tanh(self.layers[i](x))
        return self.spare(x).sum() if with_spare else x.square().sum()


class Run:
    """A training in one mode, from the start or with a saved layout."""

    def __init__(self, ctx: Any, mode: str, layout: Any = None) -> None:
        torch.manual_seed(1)
        self.ctx, self.mode, net = ctx, mode, Net()
        options = {**CAPS, **MODES[mode], "bucket_layout": layout}
        if mode == "delayed":
            late = [(n, p) for n, p in net.named_parameters() if "layers.3" in n]
            options["delay_all_reduce_named_params"] = late
            options["param_to_hook_all_reduce"] = net.layers[0].weight
        if mode == "kept_view" and layout is not None:
            # The undisturbed run accumulates in place by now: those gradients are
            # divided, fresh ones multiplied. Zeros become views when wrapped.
            for param in net.parameters():
                param.grad = torch.zeros_like(param)
        self.ddp = DataParallel(net, process_group=ctx.group, **options)
        self.opt = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)

    def train(self, *steps: int) -> None:
        for step in range(*steps):
            generator = torch.Generator().manual_seed(100 * step + self.ctx.rank)
            self.opt.zero_grad(set_to_none=self.mode != "kept_view")
            with_spare = self.mode != "find_unused" or step % 3 != 0
            x = torch.randn(5, 7, generator=generator)
            self.ddp(x, with_spare=with_spare).backward()
            self.opt.step()

    @property
    def weights(self) -> torch.Tensor:
        return nn.utils.parameters_to_vector(self.ddp.module.parameters()).detach()


def interrupted(ctx: Any, mode: str, stop: int, with_layout: bool) -> Any:
    """(undisturbed weights, resumed weights, whether the layout is the saved one)."""
    whole, file = Run(ctx, mode), io.BytesIO()
    whole.train(stop)
    model, optimizer = whole.ddp.module.state_dict(), whole.opt.state_dict()
    torch.save([model, optimizer, whole.ddp.bucket_layout], file)
    blobs: list[Any] = [None] * ctx.world_size
    torch.distributed.all_gather_object(blobs, file.getvalue(), group=ctx.group)
    whole.train(stop, STEPS)

    # Rank 0's counts.
    model, optimizer, layout = torch.load(io.BytesIO(blobs[0]), weights_only=True)
    again = Run(ctx, mode, layout if with_layout else None)
    again.ddp.module.load_state_dict(model)
    again.opt.load_state_dict(optimizer)
    resumed_layout = again.ddp.bucket_layout
    again.train(stop, STEPS)
    return whole.weights, again.weights, layout == resumed_layout


# The first backward of a static graph only counts; the layout is saved from the second.
CASES = [(m, stop) for m in MODES for stop in (1, 2, 4) if stop > ("static" in m)]


@on_ranks()
@pytest.mark.parametrize(("case", "where"), combined(CASES, [3, 4]))
def test_resumed_bits(ctx, case):
    mode, stop = case
    undisturbed, resumed, is_saved_layout = interrupted(ctx, mode, stop, True)
    assert torch.equal(undisturbed, resumed)
    assert is_saved_layout


@on_ranks(3, 4)
def test_without_it_the_bits_differ(ctx):
    """Why there is such an option: the sums of the first resumed step differ."""
    undisturbed, resumed, is_saved_layout = interrupted(ctx, "default", 2, False)
    assert not is_saved_layout
    assert not torch.equal(undisturbed, resumed)
    assert torch.allclose(undisturbed, resumed, rtol=1e-4, atol=1e-6)


def ready_orders_differ(ctx: Any) -> Any:
    """Rank 1's backward runs another way round; before the rebuild only."""
    net = Net((0, 1, 2, 3) if ctx.rank == 0 else (3, 2, 1, 0))
    ddp = DataParallel(net, process_group=ctx.group, **CAPS)
    ddp(torch.ones(1, 7)).backward()
    before = ddp.bucket_layout
    ddp(torch.ones(1, 7))
    return before, ddp.bucket_layout


def test_rank_0_foresees_the_rebuild(pool: Any) -> None:
    (before0, after0), (before1, after1) = pool.run(ready_orders_differ, 2)
    assert before0 == after0 == after1
    assert before1 != after1, "so that it matters whose layout is saved"
