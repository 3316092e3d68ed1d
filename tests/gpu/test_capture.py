"""Whole steps are captured in a CUDA graph, and replayed."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.gpu import scenarios
from tests.gpu.places import NCCL, at
from tests.gpu.test_bits import NO_OPTIONS, STATIC, VIEWS, check

WARM_UP = 11  # steps before a capture, as torch's documentation of graphs asks for
REPLAYS = 4


def replayed(ctx: Any, wrap: Any, options: dict[str, Any]) -> Any:
    """Gradients and parameters of steps that only a graph makes."""
    x = scenarios.inputs(ctx, 0)
    graph, side = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        ddp = wrap(scenarios.net(ctx), **scenarios.SMALL, **options)
        sgd = torch.optim.SGD(ddp.parameters(), lr=0.01, momentum=0.9)

        def step() -> None:
            ddp(x).pow(2).sum().backward()
            sgd.step()

        for _ in range(WARM_UP):
            sgd.zero_grad()
            step()
        sgd.zero_grad()
    torch.cuda.current_stream().wait_stream(side)
    with torch.cuda.graph(graph):
        step()
    history = []
    for number in range(REPLAYS):
        x.copy_(scenarios.inputs(ctx, number))
        graph.replay()
        history.append((scenarios.grads(ddp), scenarios.values(ddp)))
    return history


@at(NCCL)  # Gloo copies to the host, which no graph can hold
@pytest.mark.parametrize(
    "mode", [NO_OPTIONS, VIEWS, STATIC], ids=["default", "views", "static"]
)
def test_replays_have_torchs_bits(ranks: Any, mode: dict[str, Any]) -> None:
    for history in check(ranks, replayed, mode):
        first, *_, last = [values for _, values in history]
        assert not all(map(torch.equal, first, last)), "nothing was replayed"
