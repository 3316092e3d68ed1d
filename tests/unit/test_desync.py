"""``check_replicas_every``: replicas that drift apart are named, with the last step."""

from __future__ import annotations

import copy
import functools
import warnings
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import (
    default_hooks,
    post_localSGD_hook,
)

from minidp import DataParallel, ReplicaMismatchError, comm_hooks
from minidp._comm_hook import CommHook
from minidp._desync import PATIENCE, digest_of, is_foreign, sum_of_bits


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


def test_never(pool):
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


# -- by default ------------------------------------------------------------------------


def changed(ctx, at, change, steps=12, options=()):
    """Rank 1's replica is changed before step ``at``: when, what, and did it step?

    Nothing bounds the loss; with a larger rate the weights are too large after 100
    steps for the change to be more than rounding.
    """
    ddp = make(ctx, **dict(options))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=1e-4)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for k in range(steps):
            if k == at and ctx.rank == 1:
                with torch.no_grad():
                    CHANGES[change](ddp)
            before = ddp.module[0].weight.clone()
            try:
                step(ddp, optimizer)
            except ReplicaMismatchError as error:
                assert ddp.module[0].weight.equal(before)
                return k, str(error), []
    return None, "", [str(warning.message) for warning in caught]


def load(ddp):
    ddp.load_state_dict({k: v + 1 for k, v in ddp.state_dict().items()})


FOUND = [(0, 0), (1, 1), (5, 100)]  # changed before step, found in step
CHANGES = {
    "load": load,
    "one element": lambda ddp: ddp.module[0].weight[1, 2].add_(0.1),
    "frozen": lambda ddp: ddp.module[2].bias.mul_(2),
    "rounding": lambda ddp: ddp.module[0].weight.mul_(1 + 2**-20),
    "nan": lambda ddp: ddp.module[2].weight.fill_(torch.nan),
    "buffer": lambda ddp: ddp.module[1].running_mean.add_(1),
    "nothing": lambda ddp: None,
}


@pytest.mark.parametrize(
    ("change", "at", "found"),
    [
        *[(c, a, f) for c in ("load", "one element") for a, f in FOUND],
        ("frozen", 0, 0),
        ("nan", 1, 1),
    ],
)
def test_a_change_is_found_in_the_first_steps_and_later(pool, change, at, found):
    results = pool.run(changed, 2, at, change, found + 2)
    for rank, (k, text, _) in enumerate(results):
        assert k == found
        since = "The replicas differ: at the beginning of step 0, "
        if at:
            since = "The replicas have drifted apart: at the beginning of step "
        assert text.startswith(f"[rank {rank}] {since}")
        assert ("a checkpoint that was loaded on one rank only" in text) == (not at)


@pytest.mark.parametrize(
    ("change", "at"),
    [
        ("nothing", 0),
        ("buffer", 0),
        ("buffer", 1),
        ("frozen", 1),  # an average of weights, say, that one rank keeps
    ],
)
def test_what_may_differ_by_default(pool, change, at):
    assert pool.run(changed, 2, at, change, 3) == [(None, "", [])] * 2


def test_rounding_is_said_once_by_default(pool):
    """Other hardware, kernels that are not deterministic: legal in torch."""
    for k, _, (text,) in pool.run(changed, 2, 1, "rounding"):
        assert k is None
        assert "The replicas differ a little: after step 0, when they agreed, " in text
        assert "0.weight has other last bits on rank 1 (step 1). " in text


def test_an_optimizer_inside_the_backward_has_stepped_already(pool):
    for k, text in pool.run(in_the_backward, 2):
        assert k == 0
        assert "The replicas differ" in text


def in_the_backward(ctx):
    ddp = make(ctx)
    ddp.step_in_backward(torch.optim.SGD(ddp.parameters(), lr=0.1))
    if ctx.rank == 1:
        load(ddp)
    try:
        ddp(torch.ones(3, 4)).sum().backward()
    except ReplicaMismatchError as error:
        return 0, str(error)
    return None, ""


def by_hand(ctx):
    """No optimizer of torch, whose step could be waited for."""
    ddp = make(ctx)
    if ctx.rank == 1:
        load(ddp)
    for k in range(20):
        ddp.zero_grad()
        try:
            ddp(torch.ones(3, 4)).sum().backward()
        except ReplicaMismatchError:
            return k
        with torch.no_grad():
            for param in ddp.parameters():
                param -= 0 if param.grad is None else 0.1 * param.grad
    return None


def test_updates_by_hand_are_waited_for_in_vain(pool):
    assert pool.run(by_hand, 2) == [PATIENCE] * 2


def own_average(_state, bucket):
    future = torch.futures.Future()
    future.set_result(bucket.buffer())  # of this rank alone
    return future


def hooked(ctx, loads):
    ddp = make(ctx)
    ddp.register_comm_hook(None, own_average)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    if loads and ctx.rank == 1:
        load(ddp)
    torch.manual_seed(ctx.rank)
    for k in range(12):
        try:
            step(ddp, optimizer)
        except ReplicaMismatchError:
            return k
    return None


def test_a_hook_of_somebody_else_may_keep_replicas_apart(pool):
    """But not before its first average was applied."""
    assert pool.run(hooked, 2, False) == [None] * 2
    assert pool.run(hooked, 2, True) == [0] * 2


@pytest.mark.parametrize(
    ("hook", "expected"),
    [
        (comm_hooks.fp16_compress_hook, False),
        (comm_hooks.one_at_a_time(own_average), True),
        (default_hooks.allreduce_hook, False),
        (default_hooks.fp16_compress_wrapper(own_average), True),
        (post_localSGD_hook.post_localSGD_hook, True),
        (own_average, True),
        (functools.partial(own_average), True),
    ],
)
def test_whose_hooks_are_trusted(hook, expected):
    assert is_foreign(CommHook(None, hook)) is expected
    assert not is_foreign(None)


def declared(ctx):
    """What ``unsynced`` was told to let pass is no news afterwards."""
    ddp = make(ctx, unsynced="ignore")
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    for _ in range(12):
        optimizer.zero_grad()
        ddp(torch.randn(3, 4)).sum().backward()
        ddp.module(torch.full((3, 4), float(ctx.rank + 1))).sum().backward()
        optimizer.step()
    return True


def test_declared_differences_are_no_news(pool):
    assert pool.run(declared, 2) == [True] * 2


def indented(ctx, averages):
    """Steps inside no_sync(), then a synchronised one."""
    ddp = make(ctx)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    torch.manual_seed(ctx.rank)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(12):
            with ddp.no_sync():
                step(ddp, optimizer)
            if averages:
                for param in ddp.parameters():
                    dist.all_reduce(param.data, group=ctx.group)
                    param.data.div_(2)
            step(ddp, optimizer)
    return [(str(warning.message), warning.filename) for warning in caught]


def test_a_step_inside_no_sync_is_said_once(pool):
    for rank, ((text, file),) in enumerate(pool.run(indented, 2, False)):
        assert text.startswith(
            f"[rank {rank}] Parameters were updated inside no_sync()"
        )
        assert "at the synchronised backward of step 0 the replicas differ" in text
        assert "an indentation too deep" in text
        assert file == __file__


def test_local_sgd_is_legal(pool):
    assert pool.run(indented, 2, True) == [[], []]


def uneven_forwards(ctx, way):
    """Rank 0 looks at a loss before the others do anything: nobody waits for it."""
    ddp = make(ctx, forward_sync_buffers=False)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    if ctx.rank == 0:
        ddp(torch.ones(3, 4))
    if way == "sync_gradients":
        for param in ddp.parameters():
            param.grad = torch.zeros_like(param)
        ddp.sync_gradients()
    with ddp.join(enable=way == "join"):
        for _ in range(3):
            step(ddp, optimizer)
    return True


@pytest.mark.parametrize("way", ["plain", "sync_gradients", "join"])
def test_a_forward_more_on_one_rank(pool, way):
    assert pool.run(uneven_forwards, 2, way) == [True] * 2


def copied(ctx):
    ddp = make(ctx)
    twins = [copy.deepcopy(ddp)]
    return [twin._replica_check for twin in twins], ddp._replica_check is not None


def test_copies_compare_nothing(pool):
    """Ranks may copy as they like."""
    assert pool.run(copied, 2) == [([None], True)] * 2


def unverified(ctx):
    ddp = make(ctx, init_sync=False)
    return ddp._replica_check


def test_ranks_that_did_not_agree_compare_nothing(pool, lone_group):
    assert pool.run(unverified, 2) == [None] * 2
    assert DataParallel(nn.Linear(1, 1))._replica_check is None  # one rank


def other_options(ctx):
    try:
        make(ctx, check_replicas_every=ctx.rank)
    except ReplicaMismatchError as error:
        return str(error)
    return ""


def test_ranks_compare_at_the_same_steps(pool):
    for text in pool.run(other_options, 2):
        assert "option check_replicas_every: 0 (rank 0); found on rank 1: 1." in text


# -- sums ------------------------------------------------------------------------------


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


@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float32, torch.float16, torch.int8, torch.bool]
)
@pytest.mark.parametrize("size", [7, 2**18 + 3])
def test_any_exchange_of_two_elements_is_seen(dtype, size):
    tensor = torch.zeros(size, dtype=dtype)
    tensor[0] = 1
    found = set()
    for place in (0, 1, 2, 3, size - 3, size - 2, size - 1):
        other = tensor.clone()
        other[0], other[place] = tensor[place], tensor[0]
        found.add(int(sum_of_bits(other)))
    assert len(found) == len({0, 1, 2, 3, size - 3, size - 2, size - 1})


def test_rows_in_another_order_are_another_replica():
    tensors = [torch.randn(6, 4), torch.randn(6)]
    digest = digest_of(tensors)
    assert digest_of([tensors[0].flip(0), tensors[1]]) != digest
    assert digest_of([tensors[0], tensors[1].flip(0)]) != digest


def test_one_element_with_a_stride():
    """``contiguous()`` leaves it as it is, and its bytes cannot be viewed."""
    tensor = torch.arange(4.0)[1::4]
    assert tensor.stride() == (4,)
    assert sum_of_bits(tensor) == sum_of_bits(tensor.clone())
    assert digest_of([tensor]) == digest_of([torch.ones(1)])


def test_zeros_of_either_sign_differ():
    assert sum_of_bits(torch.zeros(1)) != sum_of_bits(-torch.zeros(1))


def test_empty_and_scalar_tensors():
    assert sum_of_bits(torch.empty(0, 3)) == 0
    assert sum_of_bits(torch.tensor(3, dtype=torch.int64)) == 3


def test_a_part_of_another_tensor_has_the_sum_of_its_values():
    whole = torch.arange(11.0)
    for start in range(3):
        part = whole[start : start + 7]
        assert sum_of_bits(part) == sum_of_bits(part.clone())


@pytest.mark.parametrize("size", [3, 2**15])
def test_a_digest_depends_on_every_element_and_on_the_order(size):
    tensors = [torch.randn(size), torch.randn(5), torch.randn(2**15), torch.ones(())]
    digest = digest_of(tensors)
    assert digest_of([t.clone() for t in tensors]) == digest
    for tensor in tensors:
        tensor.view(-1)[-1] += 1
        assert digest_of(tensors) != digest
        tensor.view(-1)[-1] -= 1
    if size > 3:
        assert digest_of([tensors[2], tensors[1], tensors[0], tensors[3]]) != digest


# -- what only some ranks do -----------------------------------------------------------


def probing(ctx, probes):
    """Rank 0 alone runs forwards for its log, between a backward and its step.

    Without buffers: they would be broadcast, and torch hangs there, too.
    """
    ddp = DataParallel(nn.Linear(4, 3), process_group=ctx.group, hang_timeout=20.0)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    for k in range(4):
        optimizer.zero_grad()
        ddp(torch.ones(3, 4) * (ctx.rank + 1)).square().sum().backward()
        if ctx.rank == 0 and k in probes:
            ddp(torch.ones(3, 4))
        optimizer.step()
    return [p.detach().clone() for p in ddp.parameters()]


@pytest.mark.parametrize("probes", [(0,), (0, 1), (0, 1, 2, 3)], ids=str)
def test_a_rank_may_run_more_forwards(pool, probes):
    zero, one = pool.run(probing, 2, probes)
    assert all(a.equal(b) for a, b in zip(zero, one, strict=True))


@mock.patch("minidp._desync.CONFIRM_SECONDS", 0.05)
def only_rank_0_steps(ctx):
    """It has loaded a checkpoint, and sends its parameters after every step."""
    ddp = DataParallel(nn.Linear(4, 3), process_group=ctx.group, hang_timeout=20.0)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    if ctx.rank == 0:
        load(ddp)
    for _ in range(4):
        optimizer.zero_grad()
        ddp(torch.ones(3, 4)).sum().backward()
        if ctx.rank == 0:
            optimizer.step()
        for param in ddp.parameters():
            dist.broadcast(param.detach(), group=ctx.group, group_src=0)
    return [p.detach().clone() for p in ddp.parameters()]


def test_ranks_that_do_not_step_are_not_waited_for(pool):
    zero, one = pool.run(only_rank_0_steps, 2)
    assert all(a.equal(b) for a, b in zip(zero, one, strict=True))
