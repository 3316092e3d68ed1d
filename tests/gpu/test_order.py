"""Kernels run in the right order, and the host does not wait for them."""

from __future__ import annotations

import gc
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from minidp import DataParallel, comm_hooks
from tests.gpu import measure, scenarios
from tests.gpu.places import NCCL, ON_GPUS, ONE_RANK, at
from tests.gpu.test_bits import MODES, UNUSED, VIEWS, check, modes
from tests.support import oracle

SECONDS = 2.0  # of sleep on the device: more than a host needs for a small backward
WARM_UP = 3  # backwards, one of which makes new buckets


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
        sides = [torch.cuda.Stream() for _ in "ab"]
        self.streams = [*sides, torch.cuda.default_stream()]

    def make_nodes(self) -> list[Any]:
        """Make each AccumulateGrad node on the stream of its parameter, and return all.

        Grad hooks run on the streams on which the nodes were made. Without this that
        would be the one of the constructor, for all of them, and the bucket would have
        one writer only. Torch's reducer does not wait for the others.
        """
        nodes = []
        for weight, stream in zip(self.weights, self.streams, strict=True):
            with torch.cuda.stream(stream):
                nodes.append(torch.autograd.graph.get_gradient_edge(weight).node)
        return nodes

    def forward(self, x: torch.Tensor, cycles: tuple[int, ...]) -> torch.Tensor:
        here, parts = torch.cuda.current_stream(), []
        for k, stream in enumerate(self.streams):
            stream.wait_stream(here)
            with torch.cuda.stream(stream):
                slow = Slowly.apply(self.weights[k], cycles[k])
                parts.append((slow * x * (k + 1)).sum())
        for stream in self.streams:
            here.wait_stream(stream)
        return torch.stack(parts).sum()


def slow_branches(ctx: Any, wrap: Any, options: dict[str, Any]) -> Any:
    """Gradients, and whether the host was ahead of the device in all slow backwards."""
    cycles = measure.cycles_of(SECONDS / 4)
    branches = Branches().to(ctx.device)
    nodes = branches.make_nodes() if wrap is DataParallel else []
    ddp = wrap(branches, **options)
    history, is_ahead = [], []
    for step, slow in enumerate([None] * WARM_UP + [1, 2]):  # a side stream, no side
        ddp.zero_grad()
        x = scenarios.inputs(ctx, step, 5000)
        loss = ddp(x, tuple(cycles * (k == slow) for k in range(3)))
        loss.backward()
        end = torch.cuda.Event()
        end.record()
        is_ahead.append(not end.query())
        history.append(scenarios.grads(ddp))
    del nodes  # they were alive until here
    is_judged = isinstance(ddp, DataParallel) and dist.get_backend(ctx.group) == "nccl"
    return history, not is_judged or all(is_ahead[WARM_UP:])


@at(ON_GPUS)
@modes
def test_a_copy_waits_for_a_slow_kernel_of_another_stream(
    ranks: Any, mode: dict[str, Any]
) -> None:
    """Each step has other inputs: memory that is read too early has other numbers."""
    oracle.skip_unless_torch_takes(mode)
    for _, is_ahead in check(ranks, slow_branches, mode):
        assert is_ahead, "the device was done before the host: nothing was tested"


class HalfUsed(nn.Module):
    """The bucket of its two parameters is not full after a backward."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = (nn.Parameter(torch.ones(1 << 20)) for _ in "ab")

    def forward(self, cycles: int) -> torch.Tensor:
        return Slowly.apply(self.used, cycles).sum()


def freed_while_written(ctx: Any, options: dict[str, Any]) -> tuple[bool, bool]:
    """Whether the memory of a bucket that died is overwritten, and if that was tested.

    The bucket belongs to a side stream, and the default stream writes to it.
    """
    here, side = torch.cuda.default_stream(), torch.cuda.Stream()
    taken: list[torch.Tensor] = []
    for cycles in (1, measure.cycles_of(SECONDS / 4)):  # the first one loads kernels
        taken.clear()
        torch.cuda.synchronize()
        module = HalfUsed().to(ctx.device)
        node = torch.autograd.graph.get_gradient_edge(module.used).node
        side.wait_stream(here)
        with torch.cuda.stream(side):
            ddp = DataParallel(module, process_group=ctx.group, **options)
        here.wait_stream(side)
        ddp(cycles).backward()
        del ddp, node
        module.used.grad = None
        gc.collect()
        is_ahead = not here.query()
        with torch.cuda.stream(side):
            taken += (torch.full((2 << 20,), 7.0, device=ctx.device) for _ in range(8))
        torch.cuda.synchronize()
    return any(bool((each != 7).any()) for each in taken), is_ahead


@at(NCCL)
@pytest.mark.parametrize("options", [{}, VIEWS], ids="-".join)
def test_memory_of_a_bucket_that_dies_before_it_is_full(
    ranks: Any, options: dict[str, Any]
) -> None:
    for is_lost, is_ahead in ranks.run(freed_while_written, options):
        assert is_ahead, "the device was done before the host: nothing was tested"
        assert not is_lost


# ------------------------------------------------------------------------------ waits


def backwards_without_wait(ctx: Any, options: dict[str, Any], hook: str) -> list[bool]:
    """Whether the host waits in a step, by our clock.

    Where torch knows of a wait it raises.
    """
    ddp = DataParallel(
        scenarios.net(ctx), process_group=ctx.group, **scenarios.SMALL, **options
    )
    if hook:
        ddp.register_comm_hook(ctx.group, getattr(comm_hooks, hook))
    sgd = torch.optim.SGD(ddp.parameters(), lr=0.01)
    one = torch.ones((), device=ctx.device)  # of items; the host does not know how many

    def backward(x: torch.Tensor) -> None:
        if "average_over" in options:
            ddp.count_items(one)
        ddp(x).pow(2).sum().backward()

    def apply() -> None:
        if "average_over" not in options:  # the counts are read before a step
            sgd.step()  # without any, the ranks would be compared

    for step in range(WARM_UP):
        ddp.zero_grad()
        backward(scenarios.inputs(ctx, step))
        apply()
    x = scenarios.inputs(ctx, WARM_UP)
    if "static_graph" not in options:
        ddp.zero_grad()
        with ddp.no_sync():  # loads the kernel that accumulates, for which the host
            backward(x)  # waits
        backward(x)
        apply()

    def step_of(num_backwards: int) -> None:
        ddp.zero_grad()
        with measure.waiting_is_an_error():
            for _ in range(num_backwards - 1):
                with ddp.no_sync():
                    backward(x)
            backward(x)
            apply()

    numbers = [1, 1] if "static_graph" in options else [1, 2]
    found = [measure.waits(SECONDS, partial(step_of, n)) for n in numbers]
    torch.cuda.synchronize()
    return found


FP16 = "fp16_compress_hook"
ITEMS = {"average_over": "items", "check_replicas_every": 0}


@at(NCCL)  # Gloo copies to the host, and must wait
@pytest.mark.parametrize(
    ("mode", "hook"),
    [*((mode, "") for mode in [*MODES, VIEWS | UNUSED, ITEMS]), ({}, FP16)],
    ids=str,
)
def test_no_backward_waits(ranks: Any, mode: dict[str, Any], hook: str) -> None:
    for waits in ranks.run(backwards_without_wait, mode, hook):
        assert not any(waits)


def wait_of_item(ctx: Any) -> tuple[bool, str]:
    """What both ways to look say of a wait."""
    x = torch.ones(1, device=ctx.device)
    by_clock = measure.waits(SECONDS / 4, x.item)
    try:
        with measure.waiting_is_an_error():
            x.item()
    except RuntimeError as error:
        return by_clock, str(error)
    return by_clock, ""


@at(ONE_RANK)
def test_a_wait_would_be_seen(ranks: Any) -> None:
    ((by_clock, error),) = ranks.run(wait_of_item)
    assert by_clock
    assert "synchroniz" in error
