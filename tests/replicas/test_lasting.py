"""Replicas that have drifted apart, and weights that each rank moves for a forward."""

from __future__ import annotations

import warnings
from unittest import mock

import pytest
import torch
from torch import nn

from minidp import ReplicaMismatchError
from minidp.replica.digest import digest_of
from minidp.replica.lasting import Deviation
from tests.support.both import wrapped
from tests.support.ranks import on_ranks


def noise(params, generator):
    for param in params:
        if param.requires_grad:
            param.add_(torch.randn(param.shape, generator=generator), alpha=0.1)


def trained(
    ctx, change, *, steps=13, rate=0.1, moves=False, walks=False, missed="", **options
):
    """Update by hand after a ``change`` of rank 1's weights: error and warnings.

    ``moves`` adds noise of each rank for each forward and backward, and takes it off.
    ``walks`` leaves it there. On ranks that ``missed`` steps of optimizers, `reset` has
    found that before.
    """
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2))
    ddp = wrapped(ctx, net, hang_timeout=20.0, **options)
    if missed:
        ddp._replication.check.restart(missed_steps=missed)
    params, generator = [*net.parameters()], torch.Generator().manual_seed(ctx.rank)
    data = torch.Generator().manual_seed(10 + ctx.rank)
    with warnings.catch_warnings(record=True) as caught, torch.no_grad():
        warnings.simplefilter("always")
        if ctx.rank == 1:
            change(net)
        for k in range(steps):
            net.zero_grad()
            kept = [param.clone() for param in params]
            if moves:
                noise(params, generator)
            try:
                with torch.enable_grad():
                    out = ddp(torch.randn(3, 4, generator=data))
                    out.square().sum().backward()
            except ReplicaMismatchError as error:
                return k, str(error), []
            for param, before in zip(params, kept, strict=True):
                param.copy_(before).sub_(param.grad, alpha=rate)
            if walks:
                noise(params, generator)
    return None, "", [str(warning.message) for warning in caught]


def nothing(net):
    pass


CHANGES = {
    "all": lambda net: [param.add_(1) for param in net.parameters()],
    "one element": lambda net: net[0].weight[1, 2].add_(0.1),
}


@on_ranks(2)
@pytest.mark.parametrize("rate", [0.01, 0], ids=["trained", "never updated"])
@pytest.mark.parametrize("change", CHANGES)
def test_a_drift_without_an_optimizer_is_found_at_the_second_look(ctx, change, rate):
    k, text, _ = trained(ctx, CHANGES[change], rate=rate)
    assert k == 1
    assert "before averaged backward 1" in text
    assert "find what changes parameters on some ranks only" in text


@on_ranks(2)
@mock.patch("minidp.replica.lasting.MOST_ELEMENTS", 3)
def test_a_drift_of_elements_that_are_not_looked_at_is_found(ctx):
    assert trained(ctx, CHANGES["one element"], rate=0.01)[0] == 1


@on_ranks(3)
@pytest.mark.parametrize("change", ["all", "one element"])
def test_a_drift_on_one_of_three_ranks_is_found(ctx, change):
    assert trained(ctx, CHANGES[change], rate=0.01)[0] == 1


@on_ranks(2)
def test_a_drift_that_is_larger_than_the_noise_is_found(ctx):
    assert trained(ctx, CHANGES["all"], rate=0.01, moves=True)[0] == 1


@on_ranks(2)
def test_a_drift_as_small_as_rounding_is_said_once(ctx):
    k, _, (text,) = trained(
        ctx, lambda net: net[0].weight.mul_(1 + 2**-18), rate=0.001, steps=20
    )
    assert k is None
    assert "before averaged backward 1, 0.weight" in text
    assert "The difference is as small as rounding" in text


@on_ranks(2)
def test_replicas_that_are_updated_unequally_are_found(ctx):
    """The difference grows: after some steps, one step changes it by little."""
    k, _, _ = trained(ctx, nothing, rate=0.01 * (1 + ctx.rank))
    assert k is not None
    k, _, _ = trained(ctx, nothing, rate=0.01, walks=True)
    assert k is not None


@on_ranks(2)
def test_noise_that_is_taken_off_is_said_once(ctx):
    """After ten steps, because a step of an optimizer could still have come."""
    _, _, texts = trained(ctx, nothing, moves=True, steps=10)
    assert texts == []
    _, _, (text,) = trained(ctx, nothing, moves=True, steps=125)
    assert text.startswith(
        f"[rank {ctx.rank}] The replicas differ: before averaged backward 10, "
        "0.weight is not the same on all ranks (and 3 more). Each rank moves its "
        "parameters by itself"
    )
    assert "nothing, if weights are moved for a forward and put back" in text


@on_ranks(2)
def test_noise_is_not_compared_in_every_step(ctx):
    """Although a step of the optimizer seems to be left out in each of them."""
    ddp = wrapped(ctx, nn.Linear(4, 3), hang_timeout=20.0)
    params, generator = [*ddp.parameters()], torch.Generator().manual_seed(ctx.rank)
    optimizer = torch.optim.SGD(params, lr=0.1)
    with mock.patch("minidp.replica.drift.digest_of", wraps=digest_of) as compared:
        for k in range(50):
            optimizer.zero_grad()
            kept = [param.detach().clone() for param in params]
            with torch.no_grad():
                if k >= 3:
                    noise(params, generator)
            ddp(torch.ones(3, 4)).sum().backward()
            with torch.no_grad():
                for param, before in zip(params, kept, strict=True):
                    param.copy_(before)
            if k < 3:
                optimizer.step()
    assert 10 < compared.call_count < 20


@on_ranks(2)
def test_what_follows_is_said_although_noise_was_said_before(ctx):
    ddp = wrapped(ctx, nn.Linear(4, 3), hang_timeout=20.0)
    params, data = [*ddp.parameters()], torch.Generator().manual_seed(ctx.rank)

    def backward():
        ddp.zero_grad()
        ddp(torch.randn(3, 4, generator=data)).square().sum().backward()

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(11):
            kept = [param.detach().clone() for param in params]
            with torch.no_grad():
                noise(params, data)
            backward()
            with torch.no_grad():
                for param, before in zip(params, kept, strict=True):
                    param.copy_(before)
        optimizer = torch.optim.SGD(params, lr=0.1)
        for _ in range(3):
            with ddp.no_sync():
                backward()
                optimizer.step()
            backward()
    first, second = [str(warning.message) for warning in caught]
    assert "Each rank moves its parameters by itself" in first
    assert "Parameters were updated inside no_sync()" in second


@on_ranks(2)
def test_noise_is_an_error_if_equal_bits_are_asked_for(ctx):
    assert trained(ctx, nothing, moves=True, check_replicas_every=1)[0] == 1


@on_ranks(2)
def test_noise_is_an_error_if_ranks_have_missed_steps(ctx):
    k, text, _ = trained(ctx, nothing, moves=True, missed="1 on rank 1")
    assert k == 1
    assert "A rank has missed steps that others have made (1 on rank 1)" in text


# -- one comparison --------------------------------------------------------------------


def looks(ctx, *values):
    """Whether the difference of each of the values from those before has lasted."""
    ddp = wrapped(ctx, nn.Linear(2, 2), hang_timeout=20.0)
    deviation = Deviation()
    communicator = ddp._reducer.communicator
    return [deviation.has_lasted(each, communicator) for each in values]


@on_ranks(2)
@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.complex64, torch.int64, torch.uint8]
)
def test_what_lasts_of_all_dtypes(ctx, dtype):
    def of(common, own):
        return {"w": torch.full((3, 2), common + ctx.rank * own, dtype=dtype).t()}

    # The first look, a step of both, a small one of one rank, and another difference.
    values = [of(5, 20), of(7, 20), of(7, 22), of(7, 60), of(7, 5)]
    assert looks(ctx, *values) == [False, True, True, False, False]


@on_ranks(2)
def test_so_many_elements_of_all_tensors_are_looked_at(ctx):
    def of(last):
        ends = [torch.ones(2), torch.tensor([1.0, last])]
        return {str(k): end * ctx.rank for k, end in enumerate(ends)}

    assert looks(ctx, of(1.0), of(50.0)) == [False, False]
    with mock.patch("minidp.replica.lasting.MOST_ELEMENTS", 3):
        assert looks(ctx, of(1.0), of(50.0)) == [False, True]
    with mock.patch("minidp.replica.lasting.MOST_ELEMENTS", 2):
        assert looks(ctx, of(1.0), of(50.0)) == [False, True]


@on_ranks(2)
def test_only_what_differed_before_proves_anything(ctx):
    weight, bias = torch.full((3,), float(ctx.rank)), torch.ones(2) * ctx.rank
    assert looks(ctx, {"w": weight}, {"b": bias}, {"w": weight}) == [False] * 3
    assert looks(ctx, {"w": weight}, {"w": weight[:2]}) == [False] * 2
    assert looks(ctx, {"w": weight}, {"w": weight, "b": bias}) == [False, True]


@on_ranks(2)
def test_tensors_of_unlike_shapes_differ_for_good(ctx):
    assert looks(ctx, {"w": torch.ones(2 + ctx.rank)}) == [True]


@on_ranks(2)
def test_bits_that_differ_in_equal_values_last(ctx):
    zeros = {"w": torch.tensor([-0.0 if ctx.rank else 0.0, torch.nan])}
    assert looks(ctx, zeros, zeros) == [False, True]


@on_ranks(2)
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_what_is_not_finite_lasts_if_it_stays_on_one_rank(ctx, value):
    def of(odd, other):
        return {"w": torch.tensor([odd, other])}

    mine = value if ctx.rank else 1.0
    values = [of(mine, 0.0), of(mine, 3.0), of(1.0, 2.0 + ctx.rank)]
    assert looks(ctx, *values) == [False, True, False]
    drawn = [of(value, other * ctx.rank) for other in (1.0, -1.0)]
    assert looks(ctx, *drawn) == [False, False]
