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
from minidp.comm import stores
from minidp.hooks.comm_hook import CommHook
from minidp.replica.digest import digest_of, sum_of_bits
from minidp.replica.drift import is_foreign
from tests.support.both import done, error_of, wrapped
from tests.support.ranks import on_ranks


def make(ctx, **options):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 2))
    net[2].bias.requires_grad_(False)
    return DataParallel(net, process_group=ctx.group, hang_timeout=20.0, **options)


def sgd(ddp, lr=0.1):
    return torch.optim.SGD(ddp.parameters(), lr=lr)


def step(ddp, optimizer):
    optimizer.zero_grad()
    ddp(torch.randn(3, 4)).sum().backward()
    optimizer.step()


def load(ddp):
    ddp.load_state_dict({k: v + 1 for k, v in ddp.state_dict().items()})


def scale(name):
    """Change one element of a parameter, a little."""
    return lambda ddp: ddp.module.get_parameter(name).view(-1)[1].mul_(1 + 2**-20)


CHANGES = {
    "0.weight": scale("0.weight"),
    "2.weight": scale("2.weight"),
    "2.bias": scale("2.bias"),  # frozen
    "load": load,
    "one element": lambda ddp: ddp.module[0].weight[1, 2].add_(0.1),
    "frozen": lambda ddp: ddp.module[2].bias.mul_(2),
    "rounding": lambda ddp: ddp.module[0].weight.mul_(1 + 2**-20),
    "nan": lambda ddp: ddp.module[2].weight.fill_(torch.nan),
    "buffer": lambda ddp: ddp.module[1].running_mean.add_(1),
    "nothing": lambda ddp: None,
}


def changed(ctx, at, change, steps=8, options=()):
    """Rank 1's replica is changed before step ``at``: when, what, and did it step?

    Nothing bounds the loss; with a larger rate the weights are too large after 100
    steps for the change to be more than rounding.
    """
    ddp = make(ctx, **dict(options))
    optimizer = sgd(ddp, lr=1e-4)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for k in range(steps):
            if k == at and ctx.rank == 1:
                with torch.no_grad():
                    CHANGES[change](ddp)
            try:
                step(ddp, optimizer)
            except ReplicaMismatchError as error:
                return k, str(error), []
    return None, "", [str(warning.message) for warning in caught]


@pytest.mark.parametrize("caps", [(), (("bucket_cap_mb", 0),)], ids=str)
@pytest.mark.parametrize("what", ["0.weight", "2.weight", "2.bias"])
def test_names_parameter_ranks_and_step(pool, what, caps):
    options = (("check_replicas_every", 2), *caps)
    for rank, (k, text, _) in enumerate(pool.run(changed, 3, 3, what, 8, options)):
        assert k == 4  # the first check after step 3
        assert text.startswith(
            f"[rank {rank}] The replicas differ: before averaged backward 4, {what} is "
        )
        assert "They agreed before backward 2." in text
        assert (
            "Expected: the bits of rank 0, 2. Found: different bits on rank 1." in text
        )
        assert f"Parameters: {what}." in text


FOUND = [(0, 0), (1, 1), (5, 100)]  # changed before step, found in step


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
        assert text.startswith(f"[rank {rank}] The replicas differ: before averaged ")
        assert "a checkpoint that was loaded on one rank" in text
        assert ("They agreed before backward" in text) == (at > 0)


@pytest.mark.parametrize(
    ("change", "at", "options"),
    [
        ("0.weight", 3, (("check_replicas_every", 0),)),
        ("nothing", 0, (("check_replicas_every", 1),)),
        (
            "nothing",
            0,
            (("check_replicas_every", 1), ("find_unused_parameters", True)),
        ),
        # By default:
        ("nothing", 0, ()),
        ("buffer", 0, ()),
        ("buffer", 1, ()),
        ("frozen", 1, ()),  # an average of weights, say, that one rank keeps
    ],
)
def test_what_may_differ(pool, change, at, options):
    assert pool.run(changed, 2, at, change, 8, options) == [(None, "", [])] * 2


def test_rounding_is_said_once_by_default(pool):
    """Other hardware, kernels that are not deterministic: legal in torch."""
    for k, _, (text,) in pool.run(changed, 2, 1, "rounding", 12):
        assert k is None
        assert (
            "before averaged backward 1, 0.weight is not the same on all ranks." in text
        )
        assert (
            "They agreed before backward 0. The difference is as small as rounding: "
            in text
        )
        assert "Found: different bits on rank 1." in text


@on_ranks(2)
@pytest.mark.parametrize(
    ("forward_sync", "spoils"), [(True, False), (False, False), (True, True)]
)
def test_module_buffers_are_compared_if_they_are_broadcast(ctx, forward_sync, spoils):
    """Other running means; the broadcast that makes them equal may be broken."""
    ddp = make(ctx, check_replicas_every=1, forward_sync_buffers=forward_sync)
    optimizer = sgd(ddp)
    torch.manual_seed(ctx.rank)
    step(ddp, optimizer)
    real = ddp._replication.broadcast_buffers

    def spoil(module, root=0):
        real(module, root)
        ddp.module[1].running_mean[0] += ctx.rank * spoils

    ddp._replication.broadcast_buffers = spoil
    error = error_of(lambda: [step(ddp, optimizer) for _ in range(2)])
    assert error.startswith("ReplicaMismatchError: " if spoils else "")
    assert ("Parameters: 1.running_mean." in error) == bool(error) == spoils


# -- who updates, and how --------------------------------------------------------------


def trained(ctx, way):
    """Train from different replicas; in which step that is an error."""
    ddp = make(ctx, unsynced="ignore" if way == "declared" else "raise")
    if ctx.rank == 1 and way in ("in the backward", "by hand", "hook, loaded"):
        load(ddp)
    optimizer = sgd(ddp)
    if way == "in the backward":
        ddp.step_in_backward(optimizer)
    if way.startswith("hook"):
        ddp.register_comm_hook(None, own_average)
    torch.manual_seed(ctx.rank)
    for k in range(20):
        optimizer.zero_grad()
        try:
            ddp(torch.randn(3, 4)).sum().backward()
            if way == "declared":  # it was told to let this pass
                ddp.module(torch.full((3, 4), ctx.rank + 1.0)).sum().backward()
            if way not in ("in the backward", "by hand"):
                optimizer.step()
        except ReplicaMismatchError:
            return k
        if way == "by hand":
            with torch.no_grad():
                for param in ddp.parameters():
                    param -= 0 if param.grad is None else 0.1 * param.grad
    return None


def own_average(_state, bucket):
    return done(bucket.buffer())  # of this rank alone


@pytest.mark.parametrize(
    ("way", "found"),
    [
        ("in the backward", 0),  # the optimizer has stepped already
        ("by hand", 1),  # no optimizer of torch, whose step could be waited for
        ("hook", None),  # of somebody else: it may keep replicas apart
        ("hook, loaded", 0),  # but not before its first average was applied
        ("declared", None),
    ],
)
def test_different_replicas_that_train(pool, way, found):
    assert pool.run(trained, 2, way) == [found] * 2


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


def indented(ctx, averages):
    """Steps inside no_sync(), then a synchronised one."""
    ddp = make(ctx)
    optimizer = sgd(ddp)
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
        assert text.startswith(f"[rank {rank}] The replicas differ: before averaged ")
        assert "averaged backward 0, " in text
        assert "Parameters were updated inside no_sync()" in text
        assert "an indentation too deep" in text
        assert file == __file__
    assert pool.run(indented, 2, True) == [[], []]  # local SGD


# -- what only some ranks do -----------------------------------------------------------


often = pytest.mark.parametrize("often", [{}, {"check_replicas_every": 1}], ids=str)


def a_change_is_found(ctx, ddp, train):
    """A change of one rank is found after all that was legal."""
    with torch.no_grad():
        next(ddp.parameters()).mul_(1 + ctx.rank)
    assert "The replicas differ" in error_of(train)


@on_ranks(2)
@often
@pytest.mark.parametrize("way", ["plain", "sync_gradients", "join"])
def test_a_forward_more_on_one_rank(ctx, way, often):
    """Rank 0 looks at a loss before the others do anything: nobody waits for it."""
    ddp = make(ctx, forward_sync_buffers=False, **often)
    optimizer = sgd(ddp)
    if ctx.rank == 0:
        ddp(torch.ones(3, 4))
    if way == "sync_gradients":
        for param in ddp.parameters():
            param.grad = torch.zeros_like(param)
        ddp.sync_gradients()
    with ddp.join(enable=way == "join"):
        for _ in range(3):
            step(ddp, optimizer)
    if often:
        a_change_is_found(ctx, ddp, lambda: step(ddp, optimizer))


@on_ranks(2)
@often
@pytest.mark.parametrize("probes", [(0,), (0, 1, 2, 3)])
def test_a_rank_may_look_at_more(ctx, probes, often):
    """Rank 0 alone runs forwards for its log, between a backward and its step.

    Without buffers: they would be broadcast, and torch hangs there, too.
    """
    net = nn.Linear(4, 3)
    ddp = wrapped(ctx, net, hang_timeout=20.0, **often)
    optimizer = sgd(ddp)

    def train(k=-1):
        optimizer.zero_grad()
        ddp(torch.ones(3, 4) * (ctx.rank + 1)).square().sum().backward()
        if ctx.rank == 0 and k in probes:
            ddp(torch.ones(3, 4))
        optimizer.step()

    for k in range(4):
        train(k)
    equal = [p.detach().clone() for p in ddp.parameters()]
    if often:
        a_change_is_found(ctx, ddp, train)
    return equal


@on_ranks(2)
@mock.patch("minidp.replica.drift.CONFIRM_SECONDS", 0.05)
def test_a_rank_may_step_alone(ctx):
    """It has loaded a checkpoint, and sends its parameters after every step."""
    ddp = wrapped(ctx, nn.Linear(4, 3), hang_timeout=20.0)
    optimizer = sgd(ddp)
    if ctx.rank == 0:
        load(ddp)
    for _ in range(4):
        optimizer.zero_grad()
        ddp(torch.ones(3, 4)).sum().backward()
        if ctx.rank == 0:
            optimizer.step()
        for param in ddp.parameters():
            dist.broadcast(param.detach(), group=ctx.group, group_src=0)
    return [p.detach() for p in ddp.parameters()]


@on_ranks(2)
@mock.patch("minidp.replica.drift.CONFIRM_SECONDS", 0.05)
def test_a_rank_that_steps_alone_and_sends_nothing(ctx):
    """The ranks name the parameters together, though only one has an optimizer.

    The guard, which would ask before, is told to say nothing.
    """
    ddp = wrapped(ctx, nn.Linear(4, 3), hang_timeout=20.0, unsynced="ignore")
    optimizer = sgd(ddp)

    def train():
        for _ in range(4):
            optimizer.zero_grad()
            ddp(torch.ones(3, 4)).sum().backward()
            if ctx.rank == 0:
                optimizer.step()

    with pytest.raises(ReplicaMismatchError, match="before averaged backward 2"):
        train()


def is_compared(ddp):
    return ddp._replication.check is not None


@on_ranks(2)
def test_ranks_that_may_not_agree_compare_nothing(ctx):
    """Ranks may copy as they like."""
    ddp = make(ctx)
    assert is_compared(ddp)
    assert not is_compared(copy.deepcopy(ddp))


def test_one_rank_compares_nothing(lone_group):
    assert not is_compared(DataParallel(nn.Linear(1, 1)))


@on_ranks(2)
def test_ranks_compare_at_the_same_steps(ctx):
    ddp = make(ctx, check_replicas_every=2)
    optimizer = sgd(ddp)
    for _ in range(2):
        step(ddp, optimizer)
    ddp._reducer.ledger.finalized += 2 * ctx.rank
    error = error_of(lambda: step(ddp, optimizer))
    assert "The ranks are at different steps." in error
    assert "Found: 2 on rank 0, 4 on rank 1." in error


@on_ranks(2)
def test_goes_on_after_reset(ctx):
    ddp = make(ctx, check_replicas_every=1)
    optimizer = sgd(ddp)
    step(ddp, optimizer)
    ddp.reset()
    step(ddp, optimizer)
    assert ddp._replication.check._agreed == 1


# -- sums ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "dtype",
    [
        *(torch.float64, torch.float32, torch.bfloat16, torch.int8),
        *(torch.bool, torch.complex64),
    ],
)
@pytest.mark.parametrize("size", [7, 2**18 + 3])
def test_any_change_or_exchange_of_elements_is_seen(dtype, size):
    found = {0}
    for place in (0, 1, 2, 3, size - 3, size - 2, size - 1):
        tensor = torch.zeros(size, 2, dtype=dtype).t()[0]  # not contiguous
        tensor[place] = 1
        assert sum_of_bits(tensor) == sum_of_bits(tensor.clone())
        found.add(int(sum_of_bits(tensor)))
    assert len(found) == 8


def test_views_have_the_sum_of_their_values():
    """`contiguous()` leaves one element with a stride, whose bytes cannot be viewed."""
    strided = torch.arange(4.0)[1::4]
    assert strided.stride() == (4,)
    assert digest_of([strided]) == digest_of([torch.ones(1)])
    for part in (strided, *(torch.arange(11.0)[k : k + 7] for k in range(3))):
        assert sum_of_bits(part) == sum_of_bits(part.clone())
    assert sum_of_bits(torch.zeros(1)) != sum_of_bits(-torch.zeros(1))
    assert sum_of_bits(torch.empty(0, 3)) == 0
    assert sum_of_bits(torch.tensor(3, dtype=torch.int64)) == 3


@pytest.mark.parametrize("size", [3, 2**15])
def test_a_digest_depends_on_every_element_and_on_the_order(size):
    tensors = [torch.randn(size), torch.randn(6, 4), torch.randn(2**15), torch.ones(())]
    digest = digest_of(tensors)
    assert digest_of([t.clone() for t in tensors]) == digest
    for tensor in tensors:
        tensor.view(-1)[-1] += 1
        assert digest_of(tensors) != digest
        tensor.view(-1)[-1] -= 1
    assert digest_of([tensors[0], tensors[1].flip(0), *tensors[2:]]) != digest
    if size > 3:
        assert digest_of([tensors[2], tensors[1], tensors[0], tensors[3]]) != digest


@on_ranks(2, fresh={"group_timeout": 8.0})
def test_without_a_store_a_step_on_one_rank_does_not_wait(ctx):
    """The next backward, which all ranks run, confirms the difference instead."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stores, "own_store", mock.Mock(side_effect=RuntimeError))
        ddp = wrapped(ctx, nn.Sequential(nn.Linear(4, 3)), check_replicas_every=1)
        optimizer = sgd(ddp)
        with torch.no_grad():
            ddp.module[0].weight.add_(float(ctx.rank))
        ddp(torch.randn(3, 4)).sum().backward()
        if ctx.rank == 0:  # rank 1 skips it, as a GradScaler may
            optimizer.step()
        error = error_of(lambda: ddp(torch.randn(3, 4)).sum().backward())
    assert error.startswith(
        f"ReplicaMismatchError: [rank {ctx.rank}] The replicas diff"
    )
    assert "0.weight" in error


@on_ranks(2, fresh={"group_timeout": 20.0})
@pytest.mark.parametrize("options", [{}, {"check_replicas_every": 1}], ids=str)
def test_an_optimizer_that_lacks_parameters_on_one_rank_is_found(ctx, options):
    """The ranks compare after their steps, but not in messages of unequal sizes."""
    ddp = wrapped(ctx, nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2)), **options)
    params = [*ddp.parameters()]
    optimizer = torch.optim.SGD(params[: 2 if ctx.rank else None], lr=0.1)

    def train() -> None:
        for _ in range(4):
            ddp.zero_grad()
            step(ddp, optimizer)

    error = error_of(train)
    assert error.startswith(f"ReplicaMismatchError: [rank {ctx.rank}] The replicas")
    assert "Parameters: 1.weight, 1.bias." in error
