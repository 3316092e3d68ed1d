"""``check_replicas_every``: replicas that drift apart are named, with the last step."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from minidp import DataParallel, ReplicaMismatchError
from minidp._desync import sum_of_bits


def make(ctx, **options):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 2))
    net[2].bias.requires_grad_(False)
    return DataParallel(net, process_group=ctx.group, hang_timeout=20.0, **options)


def step(ddp, optimizer):
    optimizer.zero_grad()
    ddp(torch.randn(3, 4)).sum().backward()
    optimizer.step()


def drift(ctx, every, at, what, on, options=()):
    """Rank ``on`` changes a tensor before step ``at``; the error, and its step."""
    ddp = make(ctx, check_replicas_every=every, **dict(options))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    for k in range(8):
        if k == at and ctx.rank == on:
            tensor = ddp.module.get_parameter(what)
            with torch.no_grad():
                tensor.view(-1)[1] *= 1 + 2**-20
        try:
            step(ddp, optimizer)
        except ReplicaMismatchError as error:
            return k, str(error)
    return None, ""


@pytest.mark.parametrize("options", [{}, {"bucket_cap_mb": 0}], ids=str)
@pytest.mark.parametrize("what", ["0.weight", "2.weight", "2.bias"])
def test_names_parameter_ranks_and_step(pool, what, options):
    for rank, (k, text) in enumerate(
        pool.run(drift, 3, 2, 3, what, 1, tuple(options.items()))
    ):
        assert k == 4  # the first check after step 3
        assert text.startswith(
            f"[rank {rank}] The replicas have drifted apart: at the beginning of step "
            f"4, {what} differs"
        )
        assert "They agreed at the beginning of step 2." in text
        assert "Expected: the bits of rank 0, 2. Found: other ones on rank 1." in text
        assert f"Parameters: {what}" in text


def test_off_by_default(pool):
    assert pool.run(drift, 2, 0, 3, "0.weight", 1) == [(None, "")] * 2


def test_equal_replicas_pass(pool):
    for options in ((), (("find_unused_parameters", True),)):
        assert pool.run(drift, 3, 1, None, "", None, options) == [(None, "")] * 3


def changed_buffer(ctx, forward_sync):
    ddp = make(ctx, check_replicas_every=1, forward_sync_buffers=forward_sync)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    torch.manual_seed(ctx.rank)  # other inputs, other running means
    for _ in range(3):
        step(ddp, optimizer)
    return True


@pytest.mark.parametrize("forward_sync", [True, False])
def test_module_buffers_that_may_differ_are_left_alone(pool, forward_sync):
    assert pool.run(changed_buffer, 2, forward_sync) == [True] * 2


def spoilt_buffer(ctx):
    """The broadcast itself is broken on one rank."""
    ddp = make(ctx, check_replicas_every=1)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    step(ddp, optimizer)
    real = ddp._sync_module_buffers

    def spoil(root=0):
        real(root)
        ddp.module[1].running_mean[0] += ctx.rank

    ddp._sync_module_buffers = spoil
    try:
        step(ddp, optimizer)
    except ReplicaMismatchError as error:
        return str(error)
    return ""


def test_module_buffers_that_are_broadcast_are_compared(pool):
    for text in pool.run(spoilt_buffer, 2):
        assert "Parameters: 1.running_mean." in text


def one_step_apart(ctx):
    ddp = make(ctx, check_replicas_every=2)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    step(ddp, optimizer)
    step(ddp, optimizer)
    ddp._reducer.ledger.finalized += 2 * ctx.rank
    try:
        step(ddp, optimizer)
    except ReplicaMismatchError as error:
        return str(error)
    return ""


def test_ranks_at_different_steps_are_told(pool):
    for text in pool.run(one_step_apart, 2):
        assert "The ranks are at different steps." in text
        assert "Found: 2 on rank 0, 4 on rank 1." in text


def after_reset(ctx):
    first = drift(ctx, 1, 2, "0.weight", 0)
    ddp = make(ctx, check_replicas_every=1)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    step(ddp, optimizer)
    ddp.reset()
    step(ddp, optimizer)
    return first[0], ddp._replica_check._agreed


def test_goes_on_after_reset(pool):
    assert pool.run(after_reset, 2) == [(2, 1)] * 2


@pytest.mark.parametrize(
    "dtype",
    [torch.float64, torch.float32, torch.bfloat16, torch.int8, torch.complex64, bool],
)
def test_any_change_of_one_element_is_seen(dtype):
    dtype = torch.bool if dtype is bool else dtype
    tensor = torch.tensor([[0, 1, 2], [3, 4, 5]]).to(dtype).t()  # not contiguous
    before = sum_of_bits(tensor)
    assert before.dtype is torch.int64
    assert sum_of_bits(tensor.clone()) == before
    tensor[0, 1] = 1 if dtype is torch.bool and not tensor[0, 1] else 0
    assert sum_of_bits(tensor) != before


def test_zeros_of_either_sign_differ():
    assert sum_of_bits(torch.zeros(1)) != sum_of_bits(-torch.zeros(1))


def test_empty_and_scalar_tensors():
    assert sum_of_bits(torch.empty(0, 3)) == 0
    assert sum_of_bits(torch.tensor(3, dtype=torch.int64)) == 3
