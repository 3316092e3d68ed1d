"""A run that goes on from a checkpoint has the bits of one that was never stopped."""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch
from torch import nn

from minidp import DataParallel

STEPS = 6
# Every parameter gets a bucket of its own once the buckets are rebuilt, one bucket
# holds them all before: as different as layouts can be.
CAPS = {"bucket_cap_mb": 0}


class Net(nn.Module):
    """Branches, so that a parameter may stay unused."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(7, 7) for _ in range(4)])
        self.spare = nn.Linear(7, 1)

    def forward(self, x: torch.Tensor, *, with_spare: bool) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.spare(x).sum() if with_spare else x.square().sum()


MODES: dict[str, dict[str, Any]] = {
    "default": {},
    "find_unused": {"find_unused_parameters": True},
    "static_graph": {"static_graph": True},
    "view": {"gradient_as_bucket_view": True},
    "static_view": {"static_graph": True, "gradient_as_bucket_view": True},
    "delayed": {"delay": True},
    "kept_view": {"gradient_as_bucket_view": True},  # zeroed, never None
}


def wrap(ctx: Any, net: nn.Module, mode: str, **options: Any) -> DataParallel:
    options |= CAPS | MODES[mode]
    if options.pop("delay", False):
        late = [(n, p) for n, p in net.named_parameters() if n.startswith("layers.3")]
        options["delay_all_reduce_named_params"] = late
        options["param_to_hook_all_reduce"] = net.layers[0].weight
    return DataParallel(net, process_group=ctx.group, **options)


def train(ctx: Any, ddp: DataParallel, opt: Any, steps: range, mode: str) -> None:
    for step in steps:
        generator = torch.Generator().manual_seed(100 * step + ctx.rank)
        x = torch.randn(5, 7, generator=generator)
        opt.zero_grad(set_to_none=mode != "kept_view")
        with_spare = mode != "find_unused" or step % 3 != 0
        ddp(x, with_spare=with_spare).backward()
        opt.step()


def start(ctx: Any, mode: str, **options: Any) -> tuple[DataParallel, Any]:
    torch.manual_seed(1)
    net = Net()
    if mode == "kept_view" and "bucket_layout" in options:
        # The undisturbed run has gradients by now, which it accumulates in place: those
        # are divided, fresh ones multiplied. They become views when wrapped.
        for param in net.parameters():
            param.grad = torch.zeros_like(param)
    ddp = wrap(ctx, net, mode, **options)
    return ddp, torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)


def weights(ddp: DataParallel) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in ddp.module.parameters()])


def interrupted(ctx: Any, mode: str, stop: int, with_layout: bool) -> Any:
    """(undisturbed weights, resumed weights, layout then, layout after resuming)."""
    ddp, opt = start(ctx, mode)
    train(ctx, ddp, opt, range(stop), mode)
    file = io.BytesIO()
    state = {
        "model": ddp.module.state_dict(),
        "optimizer": opt.state_dict(),
        "bucket_layout": ddp.bucket_layout,
    }
    torch.save(state, file)
    blobs: list[Any] = [None] * ctx.world_size
    torch.distributed.all_gather_object(blobs, file.getvalue(), group=ctx.group)
    train(ctx, ddp, opt, range(stop, STEPS), mode)

    loaded = torch.load(io.BytesIO(blobs[0]), weights_only=True)  # rank 0's counts
    layout = loaded["bucket_layout"] if with_layout else None
    again, opt = start(ctx, mode, bucket_layout=layout)
    again.module.load_state_dict(loaded["model"])
    opt.load_state_dict(loaded["optimizer"])
    resumed_layout = again.bucket_layout
    train(ctx, again, opt, range(stop, STEPS), mode)
    return weights(ddp), weights(again), loaded["bucket_layout"], resumed_layout


# The first backward of a static graph only counts; the layout is saved from the second.
CASES = [(m, stop) for m in MODES for stop in (1, 2, 4) if stop > ("static" in m)]


@pytest.mark.parametrize("world_size", [3, 4])
@pytest.mark.parametrize(("mode", "stop"), CASES)
def test_resumed_bits(pool: Any, mode: str, world_size: int, stop: int) -> None:
    for undisturbed, resumed, then, after in pool.run(
        interrupted, world_size, mode, stop, True
    ):
        assert torch.equal(undisturbed, resumed)
        assert after == then


@pytest.mark.parametrize("world_size", [3, 4])
def test_without_it_the_bits_differ(pool: Any, world_size: int) -> None:
    """Why there is such an option: the sums of the first resumed step differ."""
    for undisturbed, resumed, then, after in pool.run(
        interrupted, world_size, "default", 2, False
    ):
        assert after != then
        assert not torch.equal(undisturbed, resumed)
        assert torch.allclose(undisturbed, resumed, rtol=1e-4, atol=1e-6)


def ready_orders_differ(ctx: Any) -> Any:
    """Rank 1's backward runs another way round; before the rebuild only."""
    torch.manual_seed(0)
    net = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])

    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = net

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            order = self.parts if ctx.rank == 0 else reversed(self.parts)
            for part in order:
                x = part(x)
            return x.sum()

    ddp = DataParallel(Both(), process_group=ctx.group, **CAPS)
    ddp(torch.ones(1, 2)).backward()
    before = ddp.bucket_layout
    ddp(torch.ones(1, 2))
    return before, ddp.bucket_layout


def test_rank_0_foresees_the_rebuild(pool: Any) -> None:
    (before0, after0), (before1, after1) = pool.run(ready_orders_differ, 2)
    assert before0 == after0 == after1
    assert before1 != after1, "so that it matters whose layout is saved"
