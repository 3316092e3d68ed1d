"""Programs in which one wait of minidp alone orders two streams, or the host and one.

In a usual training many of its waits are covered by those of autograd.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn

from minidp import DataParallel, accelerator, comm_hooks
from minidp.comm import Communicator, FutureWork, barrier, collectives
from minidp.core import item_counts
from minidp.data_parallel import agree_on_group
from tests.accelerator.training import SMALL, net, no_races
from tests.support import sim
from tests.support.ranks import on_ranks

SLOW = 20_000  # microseconds, by which a kernel is late at most


def here():
    return torch.accelerator.current_stream()


class Outputs(nn.Module):
    """Its second output, whose gradients come first, is computed on another stream."""

    def __init__(self, side: torch.Stream) -> None:
        super().__init__()
        torch.manual_seed(0)
        layers = [nn.Linear(20, 20, bias=False) for _ in range(3)]
        self.second, self.first = nn.Sequential(*layers), nn.Linear(20, 40, bias=False)
        self.to(side.device)
        self.side = side
        with side:  # so that the hooks run there
            self.nodes = [
                torch.autograd.graph.get_gradient_edge(param).node
                for param in self.second.parameters()
            ]

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        first = self.first(x)
        self.side.wait_stream(here())
        with self.side:
            second = self.second(x)
        x.record_stream(self.side)
        return first, second


# ------------------------------------------------------------------------------ buckets


@on_ranks(2)
@pytest.mark.parametrize("options", [{}, {"check_finite_grads": True}], ids=str)
def test_a_bucket_is_launched_from_the_stream_that_has_filled_it(ctx, options):
    """It waits for the one before it, which another stream fills."""
    module = Outputs(side := sim.new_stream())
    options = {"find_unused_parameters": True, "bucket_cap_mb": 1e-3} | options
    ddp = DataParallel(module, process_group=ctx.group, **options)
    ddp._set_ddp_sink_clone(False)  # it would copy on this stream
    with no_races():
        for step in range(3):
            ddp.zero_grad()
            first, second = ddp(torch.ones(4, 20, device=ctx.device))
            if step == 0:  # so that later steps find finite numbers there, not NaN
                first.register_hook(lambda _: side.synchronize())
            with side:
                second = second.sum()
            here().wait_stream(side)
            (first.sum() + second).backward()
            side.wait_stream(here())


@on_ranks(2)
def test_a_reset_waits_for_what_a_paused_backward_has_launched(ctx):
    """The new buckets take over what is in the old ones, if the device is late, too."""
    module = nn.ModuleList([nn.Linear(20, 20), nn.Linear(20, 20)]).to(ctx.device)
    module.forward = lambda x: (module[0](x), module[1](x))  # type: ignore[method-assign]
    options = {"gradient_as_bucket_view": True, "bucket_cap_mb": 1e-3}
    ddp = DataParallel(module, process_group=ctx.group, **options)
    with no_races():
        first, second = ddp(torch.ones(4, 20, device=ctx.device))
        (first + second).sum().backward()  # from now on .grad is in the buckets
        _, second = ddp(torch.ones(4, 20, device=ctx.device))
        sim.delay(SLOW, seed=1)
        second.sum().backward()
        sim.delay(0, seed=0)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(agree_on_group, "CATCH_UP_SECONDS", 0.0)
            ddp.reset()


# -------------------------------------------------------------------------------- items


@on_ranks(2)
def test_averages_are_looked_at_on_the_stream_of_an_output(ctx):
    """Other streams add to them in the same backward."""
    module = Outputs(side := sim.new_stream())
    options = {"average_over": "items", "find_unused_parameters": True}
    ddp = DataParallel(module, process_group=ctx.group, **options, bucket_cap_mb=1e-3)
    ddp._set_ddp_sink_clone(False)  # it would copy on this stream
    with no_races():
        for _ in range(4):
            ddp.zero_grad(set_to_none=False)
            here().wait_stream(side)
            side.wait_stream(here())
            first, second = ddp(torch.ones(4, 20, device=ctx.device))
            ddp.count_items(4)
            with side:
                second = second.sum()
            here().wait_stream(side)
            (first.sum() + second).backward()


@on_ranks(2)
def test_counts_are_read_when_they_are_here(ctx):
    """And the mean is that over all of them."""
    options = {"average_over": "items"}
    ddp = DataParallel(net().to(ctx.device), process_group=ctx.group, **options)
    sgd = torch.optim.SGD(ddp.parameters(), lr=0.1)
    ddp.count_items(torch.tensor(2.0).to(ctx.device))
    ddp(torch.ones(4, 12, device=ctx.device)).sum().backward()
    torch.accelerator.synchronize()
    ddp.zero_grad()
    ddp.count_items(torch.tensor(2.0).to(ctx.device))
    loss = ddp(torch.ones(4, 12, device=ctx.device)).sum()
    sim.delay(SLOW, seed=1)
    loss.backward()
    sgd.step()  # reads NaN in pinned memory to which nothing has been copied
    sim.delay(0, seed=0)
    assert ddp.item_totals.count == 4


@on_ranks(2)
def test_counts_travel_to_the_host_on_a_stream_of_their_own(ctx):
    """Else whoever reads them would wait for all that is queued behind the backward."""
    used = []

    class Download(accelerator.Download):
        def __init__(self, tensor: torch.Tensor) -> None:
            used.append(here())
            super().__init__(tensor)

    options = {"average_over": "items"}
    ddp = DataParallel(net().to(ctx.device), process_group=ctx.group, **options)
    ddp.count_items(2)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(item_counts, "Download", Download)
        ddp(torch.ones(4, 12, device=ctx.device)).sum().backward()
    (stream,) = used
    assert stream != here()


# -------------------------------------------------------------------------- collectives


@on_ranks(2)
def test_a_barrier_lets_the_host_wait_for_all_ranks(ctx):
    group = dist.new_group(backend=sim.BACKEND)
    with sim.costs() as costs:
        barrier(group, ctx.device)
    assert costs.host_waits == ("barrier",)


@on_ranks(2)
def test_small_messages_are_read_behind_their_collectives(ctx):
    group, device = ctx.group, ctx.device
    mine = [ctx.rank + 1, 5]
    with no_races():
        gathered = collectives.gather_integers(mine, group, device)
        integers = collectives.broadcast_integers(mine, group, device)
        values = torch.tensor(mine).to(device)
        collectives.broadcast_coalesced([values], group)
        found = values.tolist()
    assert gathered == [[1, 5], [2, 5]]
    assert integers == found == [1, 5]


@on_ranks(2)
def test_join_reads_the_device_once_in_a_forward_if_its_group_has_no_other(ctx):
    """Otherwise the ranks tell each other on the CPU (`uneven_inputs`)."""
    group, found = dist.new_group(backend=sim.BACKEND), []
    ddp = DataParallel(net().to(ctx.device), process_group=group)
    with no_races(), ddp.join():
        for _ in range(3):
            with sim.costs() as costs:
                ddp(torch.ones(4, 12, device=ctx.device)).sum().backward()
            found.append(costs.host_waits)
    del found[1]  # which rebuilds the buckets
    assert set(found) == {("Event.synchronize",)}


@on_ranks(2)
def test_no_wait_at_the_end_of_a_join_block(ctx):
    """Also where a rank shadows the others, and gets the state of the last one."""
    layers = nn.Linear(12, 6), nn.BatchNorm1d(6), nn.Linear(6, 1)
    module = nn.Sequential(*layers).to(ctx.device)
    ddp, found = DataParallel(module, process_group=ctx.group), []
    for num_inputs in (3, 2 + ctx.rank, 2):  # the first block rebuilds the buckets
        with no_races(), sim.costs() as costs, ddp.join():
            for _ in range(num_inputs):
                ddp(torch.ones(4, 12, device=ctx.device)).sum().backward()
        found.append(costs.host_waits)
    assert found[1:] == [(), ()]


@on_ranks(2)
def test_who_waits_for_a_collective_is_behind_it(ctx):
    communicator = Communicator(ctx.group, 60.0, device=ctx.device)
    x = torch.ones(100, device=ctx.device)
    with no_races():
        work = dist.all_reduce(x, group=ctx.group, async_op=True)
        communicator.wait(work)
        x.mul(2)


@on_ranks(2)
def test_a_hook_that_runs_one_at_a_time_has_ended_when_it_returns(ctx):
    """On its stream, and in the order of the device."""
    ddp = DataParallel(net().to(ctx.device), process_group=ctx.group, **SMALL)
    inner = comm_hooks.one_at_a_time(comm_hooks.all_reduce_hook)

    def hook(state, bucket):
        future = inner(state, bucket)
        bucket.buffer().mul_(2)
        return future

    ddp.register_comm_hook(None, hook)
    with no_races():
        ddp(torch.ones(4, 12, device=ctx.device)).sum().backward()


@on_ranks(2)
def test_a_backward_ends_after_what_a_buffer_hook_owes(ctx):
    module = nn.Linear(12, 12).to(ctx.device)
    module.register_buffer("seen", torch.ones(12, device=ctx.device))
    ddp = DataParallel(module, process_group=ctx.group)
    group = dist.new_group(backend=sim.BACKEND)  # not behind whose kernels buckets are

    def hook(_state, buffers):
        work = dist.all_reduce(buffers["seen"], group=group, async_op=True)
        return [work.get_future()]

    ddp._register_buffer_comm_hook(None, hook)
    with no_races():
        ddp(torch.ones(4, 12, device=ctx.device)).sum().backward()
        assert module.seen.eq(2).all()


# ---------------------------------------------------------------- who looks at a device


def queued(ctx, x):
    """Return a work as that of a comm hook, which a communicator has noted."""
    communicator = Communicator(ctx.group, -1.0, device=ctx.device)  # late at once
    work = dist.all_reduce(x, group=ctx.group, async_op=True)
    work = FutureWork(work.get_future().then(lambda done: done.value()[0]))
    with communicator.watching("launching the all-reduce", 0):
        communicator.note_started(work, ctx.device)
    return work, communicator


@on_ranks(2)
def test_the_watchdog_holds_up_no_stream_of_the_user(ctx):
    """A stream of its own waits for what a comm hook has queued, and ours does not."""
    x = torch.ones(100, device=ctx.device)
    sim.load().drain()
    with sim.held(here()):  # or the collective might be known to be over
        work, communicator = queued(ctx, x)
        communicator.find_late_on_device()
        sim.races()
        x.mul(2)
        is_free = bool(sim.races())
        with accelerator.on_side_stream(ctx.device):
            x.mul(2)
        assert is_free, "this stream waits for the collective"
        assert not sim.races()
    work.wait()


@on_ranks(2)
def test_what_a_hook_has_queued_is_late_until_it_has_ended(ctx):
    x = torch.ones(100, device=ctx.device)
    sim.load().drain()
    with sim.held(here()):
        work, communicator = queued(ctx, x)
        assert communicator.find_late_on_device() is not None
        assert communicator.find_late_on_device() is not None
    work.wait()
    torch.accelerator.synchronize()
    assert communicator.find_late_on_device() is None


@on_ranks(2)
def test_who_has_waited_lets_go_of_the_tensors(ctx):
    """The list of what runs on the device keeps an event, and no memory."""
    communicator = Communicator(ctx.group, 60.0, device=ctx.device)
    torch.accelerator.synchronize()
    before = torch.accelerator.memory_allocated()
    x = torch.ones(100, device=ctx.device)
    with sim.held(here()):  # or it may be over already, and leave the list at once
        work = dist.all_reduce(x, group=ctx.group, async_op=True)
        with communicator.watching("launching the all-reduce", 0):
            communicator.note_started(work, ctx.device)
            communicator.wait(work)
    del work, x
    sim.load().drain()
    assert torch.accelerator.memory_allocated() == before


@on_ranks(2)
def test_the_watchdog_asks_on_the_device_that_it_means(ctx):
    device = torch.device("sim", 1)
    communicator = Communicator(ctx.group, -1.0, device=device)  # late at once
    asked_on = []

    def is_completed():
        asked_on.append(torch.accelerator.current_device_index())
        return True

    work = SimpleNamespace(is_completed=is_completed)
    with communicator.watching("launching the all-reduce", 0):
        communicator.note_started(work, device)
    communicator.find_late_on_device()
    assert asked_on == [1]


@on_ranks(2)
def test_the_watchdog_asks_only_about_what_would_be_late(ctx):
    """The question may last as long as a copy for which another thread waits."""
    communicator = Communicator(ctx.group, 60.0, device=ctx.device)
    asked = []
    work = SimpleNamespace(is_completed=lambda: asked.append(True))
    with communicator.watching("launching the all-reduce", 0):
        communicator.note_started(work, ctx.device)
    assert communicator.find_late_on_device() is None
    assert not asked


@on_ranks(1)
def test_a_timer_begins_when_the_device_is_there(ctx):
    """Else its zero would be later than the time of the host that it stands for."""
    x = torch.ones(100, device=ctx.device)
    sim.delay(SLOW, seed=1)
    x.mul_(2)
    earlier = accelerator.After(ctx.device)
    accelerator.Timer(ctx.device)
    has_come = earlier.has_come()
    sim.delay(0, seed=0)
    assert has_come
