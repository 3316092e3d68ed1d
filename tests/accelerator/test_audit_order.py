"""Order of streams, life of memory and host waits, one test for each mend.

Each of these scenarios was wrong once, in a way that only a device shows.
"""

from __future__ import annotations

import contextlib
import threading
import time
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import minidp
from minidp import DataParallel, comm_hooks, native
from minidp.comm import Communicator, FutureWork, barrier
from minidp.replica.digest import sum_of_bits
from tests.support.ranks import on_ranks

sim: Any = pytest.importorskip("tests.support.sim")
WARM_UP = 3  # backwards, one of which makes new buckets
MIB = 2**20


@contextlib.contextmanager
def no_races():
    """Fail if the block has a race; each launch is late by a random time."""
    sim.load().drain()
    sim.races()
    sim.delay(300, seed=1)
    yield
    sim.load().drain()
    sim.delay(0, seed=0)
    found = sim.races()
    assert not found, "\n".join(found)


def stream(ctx):
    return sim.new_stream(ctx.device)


def net(*widths, device="cpu"):
    """Return linear layers of these widths, always with the same values."""
    torch.manual_seed(0)
    layers = [nn.Linear(a, b) for a, b in pairwise(widths)]
    return nn.Sequential(*layers).to(device)


def with_nodes_on(module, streams):
    """Make the AccumulateGrad node of each parameter on one of the streams in turn.

    Its grad hook then runs on that stream.
    """
    params = list(module.parameters())
    nodes = []
    for k, param in enumerate(params):
        with streams[k % len(streams)]:
            nodes.append(torch.autograd.graph.get_gradient_edge(param).node)
    return nodes


def inputs(ctx, step, size):
    generator = torch.Generator().manual_seed(10 * step + ctx.rank)
    return torch.randn(4, size, generator=generator)


def train(ctx, module, steps, *, backward=None, keeps_grads=False, **options):
    """Train on this rank's device; return all parameters."""
    ddp = DataParallel(module, process_group=ctx.group, **options)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    size = next(module.parameters()).size(1)
    device = next(module.parameters()).device
    for step in range(steps):
        optimizer.zero_grad(set_to_none=not keeps_grads)
        out = ddp(inputs(ctx, step, size).to(device))
        loss = out.square().mean()
        (backward or (lambda _ddp, loss, _step: loss.backward()))(ddp, loss, step)
        optimizer.step()
    return [param.detach().cpu() for param in ddp.parameters()]


class TwoOutputs(nn.Module):
    """Each output is computed on a stream of its own."""

    def __init__(self, side: torch.Stream) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(20, 20), nn.Linear(20, 20)
        self.side = side

    def forward(self, x):
        here = torch.accelerator.current_stream()
        self.side.wait_stream(here)
        with self.side:
            second = self.second(x)
        x.record_stream(self.side)
        return self.first(x), second


# ----------------------------------------------------------------------- the host waits


@on_ranks(2)
def test_counts_of_items_on_the_device_are_sent_without_a_host_wait(ctx):
    def backward(ddp, loss, step):
        loss = ddp.weigh_loss(loss, count)
        waits = sim.no_host_waits() if step >= WARM_UP else contextlib.nullcontext()
        with waits:
            loss.backward()

    count = torch.tensor(3.0 + ctx.rank).to(ctx.device)
    items = {"average_over": "items"}
    with no_races():
        found = train(
            ctx, net(20, 200, 5, device=ctx.device), 5, backward=backward, **items
        )
    count = torch.tensor(3.0 + ctx.rank)
    expected = train(
        *(ctx, net(20, 200, 5), 5),
        backward=lambda ddp, loss, _: ddp.weigh_loss(loss, count).backward(),
        **items,
    )
    assert all(map(torch.equal, found, expected))


@on_ranks(2)
def test_items_that_are_counted_on_another_stream(ctx):
    """The backward does not depend on that stream, so that only an event orders it."""
    ddp = DataParallel(
        net(20, 5, device=ctx.device), process_group=ctx.group, average_over="items"
    )
    side = stream(ctx)
    with no_races():
        for step in range(3):
            ddp.zero_grad()
            loss = ddp(inputs(ctx, step, 20).to(ctx.device)).sum()
            with side:
                ddp.count_items(torch.full((), 2.0, device=ctx.device))
            loss.backward()


class TwoHeads(nn.Module):
    """Each rank uses one head of its own, and nobody uses the last one."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.heads = nn.ModuleList(nn.Linear(20, 20) for _ in range(4))
        self.rank = rank

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.heads[2](self.heads[self.rank](x))


@on_ranks(2)
@pytest.mark.parametrize("skips", [False, True])
def test_unused_parameters_cost_one_host_wait_for_each_question(ctx, skips):
    options = {"find_unused_parameters": True, "skip_all_reduce_unused_params": skips}
    module = TwoHeads(ctx.rank).to(ctx.device)
    ddp = DataParallel(module, process_group=ctx.group, **options)
    for step in range(WARM_UP + 2):
        x = inputs(ctx, step, 20).to(ctx.device)
        with sim.costs() as costs:
            ddp(x).sum().backward()
        assert len(costs.host_waits) <= (2 if skips else 1)


@on_ranks(2)
def test_the_step_waits_for_the_counts_and_not_for_the_rest_of_the_backward(ctx):
    module = net(50, 50, 50, 50, device=ctx.device)
    options = {"average_over": "items", "bucket_cap_mb": 0.005}
    ddp = DataParallel(module, process_group=ctx.group, **options)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    here = torch.accelerator.current_stream()
    place = here.device_index, here.stream_id
    too_late = threading.Event()

    def stop_the_device(_grad):
        sim.load().drain()
        sim.load().hold(*place)

    def go_on():
        too_late.set()
        sim.load().let_go(*place)

    for step in range(WARM_UP + 1):
        optimizer.zero_grad()
        hidden = ddp(inputs(ctx, step, 50).to(ctx.device))
        if step == WARM_UP:  # the first layer's gradients come last
            module[0].weight.register_hook(stop_the_device)
        ddp.weigh_loss(hidden.mean(), torch.tensor(3.0).to(ctx.device)).backward()
        timer = threading.Timer(20.0, go_on)
        timer.start()
        optimizer.step()
        timer.cancel()
    is_in_time = not too_late.is_set()
    sim.load().let_go(*place)
    assert is_in_time


@on_ranks(2)
def test_a_bad_count_on_the_device_stops_the_step(ctx):
    ddp = DataParallel(
        net(4, 2, device=ctx.device), process_group=ctx.group, average_over="items"
    )
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1, momentum=0.9)
    before = [param.detach().cpu() for param in ddp.parameters()]
    count = torch.tensor(float("nan") if ctx.rank else 2.0).to(ctx.device)
    ddp.weigh_loss(ddp(torch.ones(3, 4, device=ctx.device)).sum(), count).backward()
    with pytest.raises(Exception, match="rank 1") as caught:
        optimizer.step()
    assert type(caught.value).__name__ == "ItemCountError"
    after = [param.detach().cpu() for param in ddp.parameters()]
    assert all(map(torch.equal, before, after))


@on_ranks(2)
def test_a_count_on_the_device_of_a_module_on_the_cpu(ctx):
    group = torch.distributed.new_group(backend="gloo")
    ddp = DataParallel(net(4, 2), process_group=group, average_over="items")
    with no_races():
        loss = ddp(torch.ones(3, 4)).sum()
        with stream(ctx):
            ddp.count_items(torch.full((), 2.0 + ctx.rank, device=ctx.device))
        loss.backward()
    assert ddp.item_totals.count == 5


# ----------------------------------------------------------------- the order of streams


@on_ranks(2)
@pytest.mark.parametrize("views", [False, True])
@pytest.mark.parametrize("keeps_grads", [False, True])
def test_nodes_of_several_streams_write_one_bucket(ctx, views, keeps_grads):
    options = {"gradient_as_bucket_view": views, "keeps_grads": keeps_grads}
    widths = 20, 1000, 20, 5  # hooks copy the large gradients
    module = net(*widths, device=ctx.device)
    nodes = with_nodes_on(module, [stream(ctx), stream(ctx)])
    with no_races():
        found = train(ctx, module, 5, **options)
    expected = train(ctx, net(*widths), 5, **options)
    assert all(map(torch.equal, found, expected))
    del nodes


@on_ranks(2)
def test_the_extensions_hooks_run_on_the_device(ctx):
    module = net(20, 1000, 20, 5, device=ctx.device)
    nodes = with_nodes_on(module, [stream(ctx), stream(ctx)])
    ddp = DataParallel(module, process_group=ctx.group)
    has_hooks = ddp._reducer.hooks.native_table is not None
    assert has_hooks == (native.library() is not None)
    with no_races():
        for step in range(4):
            ddp(inputs(ctx, step, 20).to(ctx.device)).sum().backward()
    del nodes


@on_ranks(2)
def test_a_paused_backward_copies_on_a_stream_that_the_bucket_waits_for(ctx):
    """The rest of the backward runs on another stream, on which it is flattened."""
    side, third = stream(ctx), stream(ctx)
    module = TwoOutputs(side).to(ctx.device)
    nodes = [*with_nodes_on(module.first, [third])]
    nodes += with_nodes_on(module.second, [side])
    ddp = DataParallel(module, process_group=ctx.group)
    with no_races():
        for step in range(4):
            ddp.zero_grad()
            first, second = ddp(inputs(ctx, step, 20).to(ctx.device))
            first.sum().backward()  # paused: the other half is missing
            with side:
                second.sum().backward()
            torch.accelerator.current_stream().wait_stream(side)
    del nodes


# ------------------------------------------------------------------- the life of memory


@on_ranks(2)
@pytest.mark.parametrize("views", [False, True])
def test_wrapped_on_another_stream_than_trained(ctx, views):
    """A rebuild drops buckets of that stream while copies here still read them."""
    module = net(60, 300, 60, device=ctx.device)
    torch.accelerator.synchronize()
    side = stream(ctx)
    with no_races():
        with side:
            ddp = DataParallel(
                module, process_group=ctx.group, gradient_as_bucket_view=views
            )
        side.synchronize()
        for step in range(4):
            ddp.zero_grad(set_to_none=False)
            ddp(inputs(ctx, step, 60).to(ctx.device)).sum().backward()
            with side:  # takes what was freed of this stream's memory
                for size in (300, 18000, 18300, 36360):
                    torch.ones(size, device=ctx.device)


@on_ranks(2)
@pytest.mark.parametrize("views", [False, True])
def test_lazy_buckets_of_other_streams(ctx, views):
    """A hook on one stream makes the buffer, and one on another writes to it."""
    options = {"lazy_bucket_allocation": True, "gradient_as_bucket_view": views}
    module = net(60, 300, 60, device=ctx.device)
    nodes = with_nodes_on(module, [stream(ctx), stream(ctx)])
    ddp = DataParallel(module, process_group=ctx.group, **options)
    with no_races():
        for step in range(6):
            ddp.zero_grad()
            ddp(inputs(ctx, step, 60).to(ctx.device)).sum().backward()
    del nodes


@on_ranks(2)
@pytest.mark.parametrize("keeps_grads", [False, True])
def test_counts_live_until_they_are_sent(ctx, keeps_grads):
    module = net(20, 200, 5, device=ctx.device)
    nodes = with_nodes_on(module, [stream(ctx), stream(ctx)])
    ddp = DataParallel(module, process_group=ctx.group, average_over="items")
    with no_races():
        for step in range(4):
            ddp.zero_grad(set_to_none=not keeps_grads)
            count = torch.full((), 2.0, device=ctx.device)
            loss = ddp(inputs(ctx, step, 20).to(ctx.device)).mean()
            ddp.weigh_loss(loss, count).backward()
            del count, loss
            for _ in range(8):
                torch.zeros((), dtype=torch.float64, device=ctx.device)
    del nodes


@on_ranks(2)
@pytest.mark.parametrize("skips", [False, True])
def test_maps_live_until_they_are_read(ctx, skips):
    module = TwoHeads(ctx.rank).to(ctx.device)
    nodes = with_nodes_on(module, [stream(ctx), stream(ctx)])
    ddp = DataParallel(
        module,
        process_group=ctx.group,
        find_unused_parameters=True,
        skip_all_reduce_unused_params=skips,
    )
    side = stream(ctx)
    with no_races():
        for step in range(4):
            with side if step % 2 else contextlib.nullcontext():
                ddp.zero_grad()
                ddp(inputs(ctx, step, 20).to(ctx.device)).sum().backward()
            torch.accelerator.current_stream().wait_stream(side)
            side.wait_stream(torch.accelerator.current_stream())
    del nodes


HOOKS = [
    *("all_reduce_hook", "fp16_compress_hook", "bf16_compress_hook"),
    *("fp32_accumulate_hook", "int8_error_feedback_hook"),
]


@on_ranks(2)
@pytest.mark.parametrize("name", HOOKS)
def test_a_comm_hook_keeps_what_its_collectives_read(ctx, name):
    module = net(100, 300, 100, 300, device=ctx.device)
    nodes = with_nodes_on(module, [stream(ctx) for _ in range(3)])
    ddp = DataParallel(module, process_group=ctx.group, bucket_cap_mb=0.05)
    states = {"fp32": comm_hooks.Fp32State, "int8": comm_hooks.Int8State}
    state = states.get(name.partition("_")[0], lambda: None)()
    ddp.register_comm_hook(state, getattr(comm_hooks, name))
    with no_races():
        for step in range(4):
            ddp(inputs(ctx, step, 100).to(ctx.device)).sum().backward()
    del nodes


# ------------------------------------------------------------------ memory and launches


@on_ranks(2)
@pytest.mark.parametrize("views", [False, True])
def test_peaks_of_memory_are_torchs(ctx, views):
    """At the construction, in the first steps, and where buckets are made anew."""
    group = torch.distributed.new_group(backend=sim.BACKEND)
    peaks = {}
    for wrap in (DistributedDataParallel, DataParallel):
        module = net(*[512] * 5, device=ctx.device)
        x = torch.ones(4, 512, device=ctx.device)
        found = peaks[wrap] = []
        with sim.costs() as costs:
            ddp = wrap(
                module,
                process_group=group,
                gradient_as_bucket_view=views,
                bucket_cap_mb=1,
            )
        found.append(costs.peak)
        for _ in range(4):
            with sim.costs() as costs:
                ddp.zero_grad()
                ddp(x).sum().backward()
                sim.load().drain()
            found.append(costs.peak)
        del ddp, module
    theirs, ours = peaks.values()
    assert max(ours) <= 1.02 * max(theirs), (theirs, ours)


@on_ranks(1)
def test_a_digest_is_a_few_kernels_with_the_bits_of_the_cpu(ctx):
    for numel in (3, 2**17, 3 * 2**18 + 5):
        values = torch.randn(numel, generator=torch.Generator().manual_seed(1))
        on_device = values.to(ctx.device)
        with sim.costs() as costs:
            found = sum_of_bits(on_device)
        assert torch.equal(found.cpu(), sum_of_bits(values))
        assert costs.kernels < 48


# ---------------------------------------------------------------- groups and hang limit


@on_ranks(2)
def test_a_group_of_the_device_alone(ctx):
    group = torch.distributed.new_group(backend=sim.BACKEND)
    barrier(group, ctx.device)
    ddp = DataParallel(net(20, 20, device=ctx.device), process_group=group)
    for step in range(3):  # a rebuild among them
        ddp(inputs(ctx, step, 20).to(ctx.device)).sum().backward()


@contextlib.contextmanager
def held(ctx):
    """Let the current stream of the device do nothing in the block."""
    here = torch.accelerator.current_stream()
    sim.load().drain()
    sim.load().hold(here.device_index, here.stream_id)
    try:
        yield
    finally:
        sim.load().let_go(here.device_index, here.stream_id)
        sim.load().drain()


@on_ranks(2)
@pytest.mark.parametrize("has_hook", [False, True])
@pytest.mark.parametrize("waits", [False, True])
def test_what_runs_on_the_device_is_known_until_it_ends(ctx, has_hook, waits):
    communicator = Communicator(ctx.group, -1.0, device=ctx.device)  # late at once
    with held(ctx):
        x = torch.ones(100, device=ctx.device)
        work = torch.distributed.all_reduce(x, group=ctx.group, async_op=True)
        if has_hook:  # done as soon as its kernels are queued
            work = FutureWork(work.get_future().then(lambda done: done.value()[0]))
            assert work.is_completed()
        with communicator.watching("launching the all-reduce", 0):
            communicator.note_started(work, ctx.device)
        if waits:
            communicator.wait(work)
        late = communicator.find_late_on_device()
    assert late is not None
    assert communicator.find_late_on_device() is None


@on_ranks(2)
def test_a_recording_has_the_times_of_the_device(ctx):
    module = net(50, 50, device=ctx.device)
    ddp = DataParallel(module, process_group=ctx.group)
    x = torch.ones(4, 50, device=ctx.device)
    sim.delay(2000, seed=1)
    with minidp.record(ddp) as recording:
        for step in range(WARM_UP + 3):
            waits = sim.no_host_waits() if step > WARM_UP else contextlib.nullcontext()
            with waits:
                ddp.zero_grad()
                ddp(x).sum().backward()
    sim.delay(0, seed=0)
    (timeline,) = recording.timelines
    buckets = [bucket for step in timeline.steps for bucket in step.buckets]
    assert len(buckets) >= WARM_UP
    assert all(bucket.done_ns > bucket.launched_ns for bucket in buckets)


@on_ranks(2)
def test_a_recorder_has_the_times_of_the_device(ctx):
    """Also of a backward that the device begins when the host is done with it."""
    ddp = DataParallel(net(50, 50, device=ctx.device), process_group=ctx.group)
    x = torch.ones(4, 50, device=ctx.device)
    for _ in range(WARM_UP):
        ddp(x).sum().backward()
    recorder = minidp.Recorder()
    ddp.set_recorder(recorder)
    with held(ctx), sim.no_host_waits():
        ddp(x).sum().backward()
        is_let_go = time.perf_counter_ns()
    events = recorder.events()
    of_values = {each for each in minidp.Moment if each.name.startswith("VALUES_")}
    assert {event.moment for event in events} == {*minidp.Moment} - of_values
    assert all(event.time_ns > is_let_go for event in events)
    done = next(e for e in events if e.moment is minidp.Moment.DONE)
    launched = next(e for e in events if e.moment is minidp.Moment.LAUNCHED)
    assert done.time_ns > launched.time_ns
