"""Programs that reuse memory as soon as they may, in streams that minidp has used, too.

In a usual training each stream waits for all others once in a step, so that a mark is
missed by nobody. Here a stream of the user takes memory while another one still reads
what lay there before.
"""

from __future__ import annotations

import contextlib
import gc

import pytest
import torch
from torch import nn

from minidp import DataParallel, comm_hooks
from minidp.comm import Communicator
from minidp.core.exchange import Exchange
from tests.accelerator.training import no_races, slots_of_extension
from tests.support import sim
from tests.support.ranks import on_ranks
from tests.support.waiting import until


@contextlib.contextmanager
def all_memory_reused():
    """Fail if the block has a race; `take` gets all memory that is freed in it."""
    gc.collect()
    torch.accelerator.memory.empty_cache()
    with no_races():
        yield


def take(side, *sizes, dtype=torch.float32):
    """Write to all memory of these sizes that a stream has got back."""
    with side:
        for size in sizes:
            keep = [torch.ones(size, dtype=dtype, device="sim") for _ in range(32)]
            del keep


def wait_until_freed(before):
    """Wait until no more memory is allocated than before.

    The engine's thread lets go of a graph a little after the backward.
    """
    until(lambda: gc.collect() >= 0 and sim.allocated() == before)


def nodes_on(side, *params):
    """Make AccumulateGrad nodes, whose hooks run on a stream; keep what is returned."""
    with side:
        return [torch.autograd.graph.get_gradient_edge(p).node for p in params]


class Sums(nn.Module):
    """AccumulateGrad copies its gradients, which are expanded, on its own stream."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.ones(500))
        self.last = nn.Parameter(torch.ones(300))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        last = self.last.sum()  # its gradient comes last
        return (last + self.first.sum()) * x


@on_ranks(2)
def test_gradients_of_another_stream_are_dropped_by_the_user(ctx):
    module, side = Sums().to(ctx.device), sim.new_stream()
    nodes = nodes_on(side, module.first)
    ddp = DataParallel(module, process_group=ctx.group)
    x = torch.ones((), device=ctx.device)
    with all_memory_reused():
        for _ in range(3):
            ddp(x).backward()
            ddp.zero_grad()
            take(side, 500)
    del nodes


@on_ranks(2)
@pytest.mark.parametrize("size", [500, 20_000])
def test_gradients_of_another_stream_become_views(ctx, size):
    """The user has put them there, and has let this stream wait for theirs.

    A hook copies the large one, the end of the backward the small ones.
    """
    replace_by_views(ctx, size)


@pytest.mark.native
@pytest.mark.usefixtures("_extension")
@on_ranks(2)
@pytest.mark.parametrize("size", [500, 20_000])
def test_the_extension_makes_views_of_gradients_of_another_stream(ctx, size):
    with slots_of_extension():
        replace_by_views(ctx, size)


def replace_by_views(ctx, size):
    module, side = Sums(), sim.new_stream()
    module.first = nn.Parameter(torch.ones(size))
    module.to(ctx.device)
    ddp = DataParallel(module, process_group=ctx.group, gradient_as_bucket_view=True)
    x = torch.ones((), device=ctx.device)
    with all_memory_reused():
        for _ in range(3):
            ddp.zero_grad()
            with side:
                for param in module.parameters():
                    param.grad = torch.ones_like(param)
            torch.accelerator.current_stream().wait_stream(side)
            ddp(x).backward()
            take(side, size, 300)


class Fails(torch.autograd.Function):
    """The identity, whose backward raises."""

    @staticmethod
    def forward(_ctx, x):
        return x.clone()

    @staticmethod
    def backward(_ctx, _grad):
        raise ValueError("out of luck")


@on_ranks(2)
@pytest.mark.parametrize("views", [False, True])
@pytest.mark.parametrize(
    "name", ["fp16_compress_hook", "bf16_compress_hook", "int8_error_feedback_hook"]
)
def test_a_wrapper_dies_before_its_hook_has_ended(ctx, name, views):
    """The second backward raises when the bucket of the last layer is launched."""
    first, last = nn.Linear(20, 30).to(ctx.device), nn.Linear(30, 20).to(ctx.device)
    module = nn.Sequential(first, nn.Identity(), last)
    x = torch.ones(6, 20, device=ctx.device)
    state = comm_hooks.Int8State() if name.startswith("int8") else None
    options = {"gradient_as_bucket_view": views, "bucket_cap_mb": 0.002}
    with all_memory_reused():
        ddp = DataParallel(module, process_group=ctx.group, **options)
        ddp.register_comm_hook(state, getattr(comm_hooks, name))
        for _ in range(2):
            ddp(x).sum().backward()
        module[1].forward = Fails.apply
        loss = ddp(x).sum()
        with pytest.raises(ValueError, match="out of luck"):
            loss.backward()
        del ddp, loss
        gc.collect()
        module.zero_grad()
        take(torch.accelerator.current_stream(), *range(50, 1000, 10))


@on_ranks(2)
def test_a_bucket_is_dropped_after_a_backward_that_raised(ctx):
    """Hooks of a third stream have written to it, and nobody waits for them."""
    first, last = nn.Linear(20, 30).to(ctx.device), nn.Linear(30, 20).to(ctx.device)
    module = nn.Sequential(first, nn.Identity(), last)
    module[1].forward = Fails.apply
    here, side = torch.accelerator.current_stream(), sim.new_stream()
    nodes = nodes_on(sim.new_stream(), *module.parameters())
    for param in module.parameters():
        param.grad = torch.zeros_like(param)
    x = torch.ones(6, 20, device=ctx.device)
    options = {"gradient_as_bucket_view": True, "bucket_cap_mb": 0.002}
    side.wait_stream(here)
    with all_memory_reused():
        with side:
            ddp = DataParallel(module, process_group=ctx.group, **options)
        here.wait_stream(side)
        loss = ddp(x).sum()
        with pytest.raises(ValueError, match="out of luck"):
            loss.backward()
        del loss
        ddp.reset()
        take(side, *range(50, 1500, 10))
    del nodes


@on_ranks(2)
def test_totals_of_items_are_read_on_another_stream(ctx):
    module, side = nn.Linear(20, 30).to(ctx.device), sim.new_stream()
    here = torch.accelerator.current_stream()
    ddp = DataParallel(module, process_group=ctx.group, average_over="items")
    x = torch.ones(4, 20, device=ctx.device)
    with all_memory_reused():
        for _ in range(3):
            loss = ddp(x).sum()
            ddp.count_items(4, loss.detach())
            loss.backward()
            side.wait_stream(here)
            with side:
                totals = ddp.item_totals
            del totals, loss
            ddp.zero_grad()


@on_ranks(2)
def test_gradients_of_another_stream_become_views_of_a_new_wrapper(ctx):
    module, side = Sums().to(ctx.device), sim.new_stream()
    with side:
        for param in module.parameters():
            param.grad = torch.ones_like(param)
    torch.accelerator.current_stream().wait_stream(side)
    with all_memory_reused():
        ddp = DataParallel(
            module, process_group=ctx.group, gradient_as_bucket_view=True
        )
        take(side, 500, 300)
    del ddp


@on_ranks(2)
@pytest.mark.parametrize("views", [False, True])
def test_gradients_of_another_stream_are_copied_in_a_pause(ctx, views):
    """And the user drops them before the rest of the backward."""
    module, side = Sums().to(ctx.device), sim.new_stream()
    module.forward = lambda x: (module.first.sum() * x, module.last.sum() * x)  # type: ignore[method-assign]
    nodes = nodes_on(side, module.first)
    options = {"gradient_as_bucket_view": views}
    ddp = DataParallel(module, process_group=ctx.group, **options)
    x = torch.ones((), device=ctx.device)
    with all_memory_reused():
        for _ in range(2):
            first, last = ddp(x)
            first.backward()
            if not views:
                ddp.zero_grad()
            take(side, 500)
            last.backward()
            ddp.zero_grad()
    del nodes


@on_ranks(2)
def test_gradients_of_another_stream_end_the_first_backward_of_a_static_graph(ctx):
    """Large ones become views before their bucket is full."""
    module, side = Sums().to(ctx.device), sim.new_stream()
    module.first = nn.Parameter(torch.ones(20_000, device=ctx.device))
    nodes = nodes_on(side, module.first)
    options = {"gradient_as_bucket_view": True, "static_graph": True}
    ddp = DataParallel(module, process_group=ctx.group, **options)
    x = torch.ones((), device=ctx.device)
    with all_memory_reused():
        ddp(x).backward()
        take(side, 20_000)
    del nodes


@on_ranks(2)
def test_a_sum_that_nobody_reads(ctx):
    """One stream starts it, and another one waits for it and drops it."""
    side = sim.new_stream()
    communicator = Communicator(ctx.group, device=ctx.device)
    exchange = Exchange("a sum", (3, torch.float64), ctx.device, communicator)
    with all_memory_reused():
        with side:
            exchange.start(exchange.blank())
        exchange.settle()
        exchange.drop()
        take(side, 3, dtype=torch.float64)


class Heads(nn.Module):
    """Uses one of its two heads, or both."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(20, 20), nn.Linear(20, 20)

    def forward(self, x: torch.Tensor, *, uses_both: bool) -> torch.Tensor:
        found: torch.Tensor = self.first(x)
        return self.second(found) if uses_both else found


@on_ranks(2)
def test_averages_of_unused_parameters_are_put_back(ctx):
    """A stream of the hooks has saved them, and another one copies them."""
    module, side = Heads().to(ctx.device), sim.new_stream()
    nodes = nodes_on(side, *module.parameters())
    ddp = DataParallel(
        module,
        process_group=ctx.group,
        find_unused_parameters=True,
        gradient_as_bucket_view=True,
    )
    x = torch.ones(4, 20, device=ctx.device)
    with all_memory_reused():
        for step in range(4):
            ddp(x, uses_both=step == 0).sum().backward()
            take(side, 400, 20)
    del nodes


@on_ranks(2)
@pytest.mark.parametrize("views", [False, True])
@pytest.mark.parametrize("items", [False, True])
@pytest.mark.parametrize("unused", [False, True])
def test_a_wrapper_that_dies_after_its_backward(ctx, views, items, unused):
    """It was made on another stream, which takes its memory at once."""
    module, side = nn.Linear(60, 300).to(ctx.device), sim.new_stream()
    options = {"gradient_as_bucket_view": views, "find_unused_parameters": unused}
    if items:
        options["average_over"] = "items"
    x = torch.ones(4, 60, device=ctx.device)
    side.wait_stream(torch.accelerator.current_stream())
    with all_memory_reused():
        before = sim.allocated()
        for _ in range(2):
            with side:
                ddp = DataParallel(module, process_group=ctx.group, **options)
            torch.accelerator.current_stream().wait_stream(side)
            loss = unweighed = ddp(x).sum()
            count = None
            if items:
                side.wait_stream(torch.accelerator.current_stream())
                unweighed.record_stream(side)
                with side:
                    count = torch.full((), 4.0, device=ctx.device)
                    loss = ddp.weigh_loss(loss, count)
                torch.accelerator.current_stream().wait_stream(side)
            loss.backward()
            del ddp, loss, unweighed, count
            module.zero_grad()
            wait_until_freed(before)
            take(side, 18300, 18000, 300, 1)
            take(side, 6, 3, 1, dtype=torch.float64)
            take(side, 1, dtype=torch.bool)


@on_ranks(2)
def test_a_wrapper_that_dies_with_a_bucket_that_was_not_launched(ctx):
    """Nobody waits for the stream that has filled it, because one before it is open."""
    module, side = Heads().to(ctx.device), sim.new_stream()
    here = torch.accelerator.current_stream()
    nodes = nodes_on(here, *module.parameters())
    x = torch.ones(4, 20, device=ctx.device)
    with all_memory_reused():
        before = sim.allocated()
        ddp = DataParallel(module, process_group=ctx.group, bucket_cap_mb=0.001)
        ddp(x, uses_both=True).sum().backward()
        side.wait_stream(here)
        with side:
            loss = ddp(x, uses_both=False).sum()  # it makes new buckets
        here.wait_stream(side)
        loss.record_stream(here)
        loss.backward()
        del ddp, loss
        module.zero_grad()
        wait_until_freed(before)
        take(side, 420)
    del nodes


@on_ranks(2)
@pytest.mark.parametrize("views", [False, True])
def test_a_wrapper_that_dies_with_a_bucket_that_is_not_full(ctx, views):
    """Its large gradients are copied: as views at once, otherwise in the pause."""
    module = Heads().to(ctx.device)
    module.first = nn.Linear(20, 1000).to(ctx.device)
    use_half_of_a_bucket(ctx, module, {"gradient_as_bucket_view": views})


@pytest.mark.native
@pytest.mark.usefixtures("_extension")
@on_ranks(2)
def test_a_bucket_that_the_extension_fills_dies_before_it_is_full(ctx):
    """No gradient is left to Python, which would mark the bucket, too."""
    module = Heads().to(ctx.device)
    module.first = nn.Linear(20, 1000, bias=False).to(ctx.device)
    with slots_of_extension():
        use_half_of_a_bucket(ctx, module, {"gradient_as_bucket_view": True})


def use_half_of_a_bucket(ctx, module, options):
    """Train only the first head, in another stream than the constructor's."""
    side, here = sim.new_stream(), torch.accelerator.current_stream()
    nodes = nodes_on(here, *module.parameters())
    size = sum(param.numel() for param in module.parameters())
    x = torch.ones(4, 20, device=ctx.device)
    side.wait_stream(here)
    with all_memory_reused():
        before = sim.allocated()
        with side:
            ddp = DataParallel(module, process_group=ctx.group, **options)
            loss = ddp(x, uses_both=False).sum()
        here.wait_stream(side)
        loss.record_stream(here)
        loss.backward()
        del ddp, loss
        module.zero_grad()
        wait_until_freed(before)
        take(side, size)
    del nodes


@on_ranks(2)
def test_a_loss_that_is_weighed_on_another_stream(ctx):
    """Whether its count is 0 is known there, and here gradients depend on it."""
    module, side = nn.Linear(60, 300).to(ctx.device), sim.new_stream()
    here = torch.accelerator.current_stream()
    count = torch.full((), 4.0, device=ctx.device)
    with all_memory_reused():
        before = sim.allocated()
        ddp = DataParallel(module, process_group=ctx.group, average_over="items")
        loss = ddp(torch.ones(4, 60, device=ctx.device)).sum()
        side.wait_stream(here)
        loss.record_stream(side)
        with side:
            weighed = ddp.weigh_loss(loss, count)
        here.wait_stream(side)
        with sim.held(here):  # or the host may have seen that it has read all
            weighed.backward()
            del ddp, loss, weighed
            module.zero_grad()
            wait_until_freed(before)
            take(side, 1, dtype=torch.bool)
