"""The device itself: it computes as the CPU does, and finds each kind of defect."""

from __future__ import annotations

import contextlib

import pytest
import torch
from torch import nn

from tests.accelerator.training import conv_net, no_races
from tests.support import sim
from tests.support.ranks import on_ranks


@contextlib.contextmanager
def late_stream():
    """Give a side stream that stands still in the block, and no races from before."""
    sim.load().drain()
    sim.races()
    side = sim.new_stream()
    with sim.held(side):
        yield side
    sim.load().drain()


def ones_of(side, size=1000):
    """Return a tensor of ones that another stream fills."""
    with side:
        return torch.ones(size, device="sim")


def first_race():
    """Return the first race; later ones may follow from it."""
    return sim.races()[0]


# --------------------------------------------------------------- what a script computes


@on_ranks(1)
@pytest.mark.parametrize("name", ["SGD", "Adam", "AdamW"])
def test_a_training_has_the_bits_of_the_cpu(ctx, name):
    def train(device):
        net = conv_net().to(device)
        step = getattr(torch.optim, name)(net.parameters(), lr=0.01)
        torch.manual_seed(1)
        batches = torch.randn(3, 4, 3, 12, 12).to(device)
        torch.manual_seed(2)  # of both devices: for the dropout
        for batch in batches:
            step.zero_grad()
            net(batch).square().mean().backward()
            step.step()
        return [value.cpu() for value in net.state_dict().values()]

    sim.delay(200, seed=1)
    with no_races():
        assert all(map(torch.equal, train("cpu"), train("sim")))


@on_ranks(1)
def test_views_share_memory(ctx):
    whole = torch.zeros(4, 6, device="sim")
    whole.view(24)[6:12].fill_(1)
    whole[2:, :3].add_(2)
    whole.as_strided((2,), (6,)).mul_(5)
    whole.t()[5].sub_(1)
    expected = torch.zeros(4, 6)
    expected[1] = 1
    expected[2:, :3] += 2
    expected.as_strided((2,), (6,)).mul_(5)
    expected[:, 5] -= 1
    assert torch.equal(whole.cpu(), expected)
    assert whole.view(24).is_set_to(whole) is False
    other = torch.empty(0, device="sim").set_(whole)
    assert other.is_set_to(whole)


@on_ranks(1)
def test_storages_grow_and_shrink(ctx):
    tensor = torch.arange(4.0, device="sim")
    tensor.resize_(6)
    assert tensor[:4].tolist() == [0, 1, 2, 3]
    storage = tensor.untyped_storage()
    storage.resize_(0)
    assert storage.nbytes() == 0
    storage.resize_(24)
    assert tensor.fill_(2).tolist() == [2] * 6


@on_ranks(1)
def test_kernels_for_lists_count_changes(ctx):
    x = torch.ones(3, device="sim")
    torch._foreach_zero_([x])
    torch._foreach_mul_([x], torch.ones((), device="sim"))
    assert x._version == 2


@on_ranks(1)
def test_random_numbers_are_those_of_the_launch(ctx):
    torch.manual_seed(3)
    expected = [torch.randn(5), torch.rand(2, 3), torch.randn(4)]
    torch.manual_seed(3)
    with late_stream() as side:
        with side:  # runs last
            first = torch.randn(5, device="sim")
        second = torch.rand(2, 3, device="sim")
        state = torch.sim.get_rng_state()
        third = torch.randn(4, device="sim")
    found = [first.cpu(), second.cpu(), third.cpu()]
    assert all(map(torch.equal, expected, found))
    torch.sim.set_rng_state(state)
    assert torch.equal(torch.randn(4, device="sim").cpu(), expected[2])


@on_ranks(1)
def test_autocast_and_a_scaled_loss(ctx):
    def train(device):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)).to(device)
        step = torch.optim.SGD(net.parameters(), 0.1)
        scaler = torch.amp.GradScaler(device, init_scale=1024.0)
        for index in range(3):
            batch = torch.randn(5, 8).to(device)
            with torch.autocast(device, torch.bfloat16):
                output = net(batch)
                assert output.dtype == torch.bfloat16
                loss = nn.functional.mse_loss(output, torch.zeros_like(output))
            # The second loss is infinite: its step is left out, and the scale halved.
            scaler.scale(loss * (float("inf") if index == 1 else 1)).backward()
            scaler.step(step)
            scaler.update()
            step.zero_grad()
        assert scaler.get_scale() == 512
        return [value.cpu() for value in net.parameters()]

    with no_races():
        assert all(map(torch.equal, train("cpu"), train("sim")))


@on_ranks(1)
def test_two_devices(ctx):
    assert torch.accelerator.device_count() == 2
    with no_races():
        first = torch.arange(6.0, device="sim:0")
        with torch.sim.device(1):
            second = torch.ones(6, device="sim")
            assert second.device == torch.device("sim:1")
        moved = first.to("sim:1", non_blocking=True)
        first.zero_()  # waits for the copy
        assert (moved + second).tolist() == [1, 2, 3, 4, 5, 6]
        assert torch.accelerator.current_device_index() == 0


@on_ranks(1)
def test_a_failed_kernel_is_raised_by_the_next_wait(ctx):
    table, index = torch.zeros(3, 2, device="sim"), torch.tensor([7], device="sim")
    nn.functional.embedding(index, table)  # as on a GPU: nothing yet
    with pytest.raises(RuntimeError, match=r"kernel failed: aten::.*index"):
        torch.accelerator.synchronize()


# ------------------------------------------------------------------------ what it finds


@on_ranks(1)
def test_a_missing_wait_is_a_race(ctx):
    with late_stream() as side:
        doubled = ones_of(side) * 2
        assert "aten::mul.Tensor reads on stream 0" in first_race()
        torch.accelerator.current_stream().synchronize()
    assert doubled.isnan().any().item()  # it did read too early


@on_ranks(1)
def test_a_wait_makes_it_right(ctx):
    with late_stream() as side:
        tensor = ones_of(side)
        torch.accelerator.current_stream().wait_stream(side)
        doubled = tensor * 2
        assert sim.races() == []
    assert doubled.eq(2).all()


@on_ranks(1)
def test_an_event_orders_what_came_before_it_only(ctx):
    with late_stream() as side:
        event = torch.Event("sim")
        before = torch.ones(10, device="sim")
        event.record()
        after = torch.ones(10, device="sim")
        side.wait_event(event)
        with side:
            before.add(1)
            assert sim.races() == []
            after.add(1)
            assert "aten::add" in first_race()


@on_ranks(1)
def test_luck_hides_no_race(ctx):
    with late_stream() as side:
        pass  # it does not stand still any more
    tensor = ones_of(side)
    while not side.query():
        pass
    assert tensor.mul(2).sum().item() == 2000  # reads what is there by now
    assert "aten::mul" in first_race()


@on_ranks(1)
def test_the_host_orders_streams_by_waiting(ctx):
    with no_races():
        side = sim.new_stream()
        tensor = ones_of(side)
        side.synchronize()
        assert tensor.mul(2).eq(2).all()


@on_ranks(1)
def test_reads_do_not_race(ctx):
    with no_races():
        shared = torch.ones(10, device="sim")
        torch.accelerator.synchronize()
        streams = [sim.new_stream() for _ in range(3)]
        for stream in streams:
            with stream:
                shared.mul(2)
        torch.accelerator.synchronize()


@on_ranks(1)
@pytest.mark.parametrize("records", [False, True])
def test_memory_that_another_stream_reads_must_be_recorded(ctx, records):
    with late_stream() as side:
        tensor = torch.ones(1000, device="sim")
        side.wait_stream(torch.accelerator.current_stream())
        with side:
            doubled = tensor * 2
        if records:
            tensor.record_stream(side)
        del tensor
        torch.full((1000,), 5.0, device="sim")  # would get the memory
    if records:
        assert sim.races() == []
        assert doubled.eq(2).all()
    else:
        race = first_race()
        assert "reuses freed memory, writes" in race
        assert "what aten::mul.Tensor read" in race


@on_ranks(1)
def test_freed_memory_is_used_again_and_holds_no_old_values(ctx):
    torch.accelerator.empty_cache()
    tensor = torch.ones(1000, device="sim")
    address = tensor.data_ptr()
    del tensor
    again = torch.empty(1000, device="sim")
    assert again.data_ptr() == address
    assert again.isnan().all()


@on_ranks(1)
def test_host_waits_are_counted_and_refused(ctx):
    tensor = torch.ones(3, device="sim")
    pinned = torch.ones(3).pin_memory()
    with sim.no_host_waits():  # none of these waits
        tensor.copy_(pinned, non_blocking=True)
        tensor.add_(torch.tensor(2.0))  # a number of the host
        pinned.copy_(tensor, non_blocking=True)
        torch.zeros(3, device="sim").record_stream(sim.new_stream())
        for wait in (
            tensor.sum().item,
            tensor.cpu,
            tensor.nonzero,
            lambda: tensor.equal(tensor),
            lambda: tensor.copy_(torch.ones(3)),
            lambda: torch.tensor(1.0, device="sim"),
            torch.accelerator.synchronize,
            torch.accelerator.current_stream().synchronize,
            torch.accelerator.current_stream().record_event().synchronize,
        ):
            with pytest.raises(RuntimeError, match="the host waits for the device"):
                wait()
    with sim.costs() as costs:
        tensor.sum().item()
    assert costs.host_waits == ("item()",)
    assert costs.kernels == 2  # the sum, and its copy to the host


@on_ranks(1)
def test_pinned_memory_is_nan_until_the_copy_has_run(ctx):
    pinned = torch.zeros(1000).pin_memory()
    with late_stream() as side:
        with side:
            pinned.copy_(torch.ones(1000, device="sim"), non_blocking=True)
        assert pinned.isnan().all()
    assert pinned.eq(1).all()


@on_ranks(1)
def test_two_streams_race_in_pinned_memory(ctx):
    pinned = torch.zeros(1000).pin_memory()
    with late_stream() as side:
        with side:
            pinned.copy_(torch.ones(1000, device="sim"), non_blocking=True)
        torch.zeros(1000, device="sim").copy_(pinned, non_blocking=True)
        assert "copy from pinned memory reads" in first_race()


@on_ranks(1)
def test_a_host_that_writes_pinned_memory_too_early_is_found(ctx):
    pinned, target = torch.zeros(1000).pin_memory(), torch.empty(1000, device="sim")
    with late_stream() as side:
        side.wait_stream(torch.accelerator.current_stream())
        with side:
            target.copy_(pinned, non_blocking=True)
        pinned.fill_(1)
    assert "the host wrote pinned memory" in first_race()


@on_ranks(1)
def test_peaks_of_memory(ctx):
    with sim.costs() as costs:
        first = torch.empty(1024, device="sim")
        second = first + first
        del second
        first.add(1)
    assert costs.peak == 8192
    assert torch.accelerator.memory_allocated() >= 4096


@on_ranks(1)
def test_the_time_between_events(ctx):
    begin, end = (torch.Event("sim", enable_timing=True) for _ in range(2))
    begin.record()
    torch.ones(3, device="sim")
    end.record()
    with late_stream() as side, side:
        end.record()
        with pytest.raises(RuntimeError, match="must be completed"):
            begin.elapsed_time(end)
    assert begin.elapsed_time(end) > 0


@on_ranks(1)
def test_the_host_reads_on_a_stream_that_has_to_be_behind(ctx):
    side = sim.new_stream()
    with side:
        value = torch.full((), 2.0, device="sim")
    value.item()
    assert "_local_scalar_dense reads" in sim.races()[0]
    side.synchronize()
    assert value.item() == 2
    assert not sim.races()
