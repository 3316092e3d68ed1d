"""Kernels run in the right order, and the host does not wait for them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from minidp import DataParallel, comm_hooks
from minidp.core.kernels import BucketStreams
from tests.gpu import measure, scenarios
from tests.gpu.places import ON_GPUS, at, places_on_gpus
from tests.gpu.test_bits import MODES, UNUSED, VIEWS, check, modes

SECONDS = 2.0  # of sleep on the device: more than a host needs for a small backward
WARM_UP = 3  # backwards, one of which makes new buckets

# Gloo copies to the host, and must wait.
ASYNCHRONOUS = places_on_gpus("nccl-1", "nccl-2")


def busy() -> measure.Busy:
    return measure.Busy(torch.cuda, torch.cuda._sleep)


# --------------------------------------------------------------------------- streams


class Slowly(torch.autograd.Function):
    """The identity; its backward sleeps on the device before it writes a gradient."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, cycles: int) -> torch.Tensor:
        ctx.cycles = cycles
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        if ctx.cycles:
            torch.cuda._sleep(ctx.cycles)
        return grad * 1.0, None


class Branches(nn.Module):
    """Each parameter on a stream of its own, all in one bucket."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList(nn.Parameter(torch.ones(5000)) for _ in "abc")
        self.streams = [torch.cuda.Stream() for _ in "abc"]

    def forward(self, x: torch.Tensor, cycles: int) -> torch.Tensor:
        here, parts = torch.cuda.current_stream(), []
        for k, (weight, stream) in enumerate(
            zip(self.weights, self.streams, strict=True)
        ):
            stream.wait_stream(here)
            with torch.cuda.stream(stream):
                slow = Slowly.apply(weight, cycles if k == 1 else 0)
                parts.append((slow * x * (k + 1)).sum())
        for stream in self.streams:
            here.wait_stream(stream)
        return torch.stack(parts).sum()


def slow_branches(ctx: Any, wrap: Any, options: dict[str, Any]) -> Any:
    """Gradients, and in which backwards the host was ahead of the device."""
    cycles = int(SECONDS / 4 * busy().cycles_per_second)
    ddp = wrap(Branches().to(ctx.device), **options)
    history, is_ahead = [], []
    for step in range(WARM_UP + 2):
        ddp.zero_grad()
        x = scenarios.inputs(ctx, step, 5000)
        loss = ddp(x, cycles if step >= WARM_UP else 0)
        loss.backward()
        end = torch.cuda.Event()
        end.record()
        is_ahead.append(not end.query())
        history.append(scenarios.grads(ddp))
    is_judged = isinstance(ddp, DataParallel) and dist.get_backend(ctx.group) == "nccl"
    return history, not is_judged or all(is_ahead[WARM_UP:])


@at(ON_GPUS)
@modes
def test_a_copy_waits_for_a_slow_kernel_of_another_stream(
    ranks: Any, mode: dict[str, Any]
) -> None:
    """Each step has other inputs: memory that is read too early has other numbers."""
    for _, is_ahead in check(ranks, slow_branches, mode):
        assert is_ahead, "the device was done before the host: nothing was tested"


def copied(ctx: Any, writer: str, reader: str, is_ordered: bool) -> bool:
    """Whether a copy on one stream sees what a slow kernel of another one writes."""
    streams = {
        "default": torch.cuda.default_stream(),
        "side": torch.cuda.Stream(),
        "other": torch.cuda.Stream(),
    }
    source = torch.zeros(1000, device=ctx.device)
    keeps_busy = busy()
    torch.cuda.synchronize()
    with torch.cuda.stream(streams[writer]):
        keeps_busy.for_seconds(SECONDS / 4)
        source.fill_(1)
    of_bucket = BucketStreams(ctx.device)
    of_bucket.written_on.add(streams[writer].cuda_stream)
    with torch.cuda.stream(streams[reader]):
        if is_ordered:
            of_bucket.gather([source])
        copy = source.clone()
    torch.cuda.synchronize()
    return bool((copy == 1).all())


@at(places_on_gpus("nccl-1")[:1])
@pytest.mark.parametrize(
    ("writer", "reader"), [("side", "default"), ("default", "side"), ("side", "other")]
)
def test_who_flattens_waits_for_who_wrote(ranks: Any, writer: str, reader: str) -> None:
    assert ranks.run(copied, writer, reader, True) == [True]
    assert ranks.run(copied, writer, reader, False) == [False], "the sleep is too short"


# ------------------------------------------------------------------------------ waits


def backwards_without_wait(ctx: Any, options: dict[str, Any], hook: str) -> list[bool]:
    """Whether the host waits in forward and backward, by our clock.

    Where torch knows of a wait it raises.
    """
    ddp = DataParallel(
        scenarios.net(ctx), process_group=ctx.group, **scenarios.SMALL, **options
    )
    if hook:
        ddp.register_comm_hook(ctx.group, getattr(comm_hooks, hook))
    for step in range(WARM_UP):
        ddp(scenarios.inputs(ctx, step)).pow(2).sum().backward()
    x, keeps_busy = scenarios.inputs(ctx, WARM_UP), busy()

    def step() -> None:
        with measure.waiting_is_an_error(torch.cuda):
            ddp(x).pow(2).sum().backward()

    def step_of_two() -> None:
        with ddp.no_sync():
            step()
        step()

    works = [step, step] if options.get("static_graph") else [step, step_of_two]
    found = [measure.waits(keeps_busy, SECONDS, work) for work in works]
    torch.cuda.synchronize()
    return found


@at(ASYNCHRONOUS)
@pytest.mark.parametrize(
    ("mode", "hook"),
    [*((mode, "") for mode in MODES), ({}, "fp16_compress_hook"), (VIEWS | UNUSED, "")],
    ids=str,
)
def test_no_backward_waits(ranks: Any, mode: dict[str, Any], hook: str) -> None:
    for waits in ranks.run(backwards_without_wait, mode, hook):
        assert not any(waits)


def wait_of_item(ctx: Any) -> tuple[bool, str]:
    """What both ways to look say of a wait."""
    x, keeps_busy = torch.ones(1, device=ctx.device), busy()
    by_clock = measure.waits(keeps_busy, SECONDS / 4, x.item)
    try:
        with measure.waiting_is_an_error(torch.cuda):
            x.item()
    except RuntimeError as error:
        return by_clock, str(error)
    return by_clock, ""


@at(places_on_gpus("nccl-1")[:1])
def test_a_wait_would_be_seen(ranks: Any) -> None:
    ((by_clock, error),) = ranks.run(wait_of_item)
    assert by_clock
    assert "synchroniz" in error
