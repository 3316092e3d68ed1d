"""Uneven inputs: torch's DDP and minidp side by side, and what torch gets wrong."""

from __future__ import annotations

import torch
from torch.distributed.algorithms.join import Join
from torch.distributed.optim import ZeroRedundancyOptimizer

from tests.support.both import Scalars, error_of, on_both, values, wrapped, x_of
from tests.support.ranks import as_in_torch, on_ranks

NEW_DIVISOR = {"divide_by_initial_world_size": False}


def steps_of(ctx, ddp, uses, **join):
    """Gradients of a step in a join() for each of ``uses``: which parameters."""
    seen = []
    with ddp.join(**join):
        for use in uses:
            ddp.zero_grad()
            ddp(x_of(ctx), use).backward()
            seen.append(values(ddp))
    return seen


@on_ranks(2)
def test_static_graph_and_a_rank_without_input_in_the_first_iteration(ctx):
    """Rank 0 has no first input, but trains later: torch deadlocks or raises."""
    ddp = wrapped(ctx, Scalars(), static_graph=True)
    joined = steps_of(ctx, ddp, [[0]] * ctx.rank)
    for factor in (1, 2):
        ddp.zero_grad()
        ddp(factor * x_of(ctx)).backward()
        joined.append(values(ddp))
    assert joined == [[1.0]] * ctx.rank + [[1.5], [3.0]]


def error_in_join(ddp, *steps, **options):
    """What a join() raises in which ``steps`` are called."""

    def run():
        with ddp.join(**options):
            for step in steps:
                step()

    error = error_of(run)
    assert error
    return error


def raise_own():
    raise KeyError("the user's own")


@as_in_torch(2)
def test_early_termination_raises_everywhere(ctx, wrap):
    ddp = wrap(Scalars())
    train = [lambda: ddp(x_of(ctx)).backward()] * (ctx.rank + 1)
    error = error_in_join(ddp, *train, throw_on_early_termination=True)
    said = "exhausted inputs" if ctx.rank else "Rank 0 exhausted all inputs"
    assert ("Detected at least one rank that " if ctx.rank else "") + said in error
    return error


def config_after(ctx, wrap):
    ddp = wrap(Scalars())
    with ddp.join(**NEW_DIVISOR):
        for _ in range(ctx.rank + 1):
            ddp(x_of(ctx)).backward()
    after = [ddp._join_config.enable, ddp._divide_by_initial_world_size]
    with Join([ddp], **NEW_DIVISOR):
        ddp(x_of(ctx)).backward()
    return [*after, ddp._join_config.enable, ddp._divide_by_initial_world_size]


@on_ranks(2)
def test_difference_config_is_reset(ctx):
    expected = [True, False, True, False], [False, True, False, True]
    assert on_both(ctx, config_after) == expected


def unused_later(ctx, wrap):
    ddp = wrap(Scalars(2), find_unused_parameters=True)
    return steps_of(ctx, ddp, [(0, 1), (0,), (0,)][: 2 * ctx.rank + 1])


@on_ranks(2)
def test_difference_joined_ranks_report_nothing_used(ctx):
    theirs, ours = on_both(ctx, unused_later)
    if ctx.rank == 1:
        assert theirs[1] == [1.0, 0.0]  # rank 0 sends its last used-map again
        assert ours == [[1.5, 1.5], [1.0, None], [1.0, None]]


def with_zero(ctx, wrap):
    ddp = wrap(Scalars(2))
    optimizer = ZeroRedundancyOptimizer(
        ddp.parameters(), torch.optim.SGD, process_group=ctx.group, lr=0.1
    )
    with Join([ddp, optimizer], **NEW_DIVISOR):
        for _ in range(ctx.rank + 1):
            optimizer.zero_grad()
            ddp(x_of(ctx)).backward()
            optimizer.step()
    return [round(p.item(), 4) for p in ddp.parameters()]


@on_ranks(2)
def test_difference_zero_optimizer_of_a_joined_rank_steps_on_fresh_gradients(ctx):
    """Steps of 1.5 and 2.0; torch's joined rank repeats 1.5 for its shard."""
    theirs, ours = on_both(ctx, with_zero)
    assert ours == [0.65, 0.65]
    assert sorted(theirs) == [0.65, 0.7]


@on_ranks(2)
def test_error_inside_join_ends_it(ctx):
    ddp = wrapped(ctx, Scalars())
    error_in_join(ddp, lambda: ddp(x_of(ctx)).backward(), raise_own, **NEW_DIVISOR)
    assert not ddp._join_config.enable
    ddp.zero_grad()
    ddp(x_of(ctx)).backward()
    assert values(ddp) == [1.5]
    ddp.reset()  # its collectives may be half done: not to be kept
    assert ddp.process_group is not ctx.group


# A wrapper of an earlier test may still live on a group that tests share.
@on_ranks(2, fresh={})
def test_errors_in_a_disabled_join_leave_the_group_as_it_is(ctx):
    ddp = wrapped(ctx, Scalars())
    error_in_join(ddp, raise_own, enable=False)
    ddp.reset()
    assert ddp.process_group is ctx.group


@on_ranks(2)
def test_joined_rank_applies_no_gradient_of_an_earlier_shadow(ctx):
    """Parameter 1 is not used any more once rank 1 has joined."""
    ddp = wrapped(ctx, Scalars(2), find_unused_parameters=True)
    optimizer = ZeroRedundancyOptimizer(
        ddp.parameters(), torch.optim.SGD, process_group=ctx.group, lr=1.0
    )
    with Join([ddp, optimizer]):
        for i in range(4 if ctx.rank == 0 else 2):
            optimizer.zero_grad()
            ddp(torch.ones(1), (0, 1) if i < 3 else (0,)).backward()
            optimizer.step()
    # Steps of 1, 1, then halves of the rank that is left; parameter 1 stops earlier.
    assert [p.item() for p in ddp.parameters()] == [-2.0, -1.5]


@on_ranks(2)
def test_steps_of_a_joined_rank_are_those_of_the_others(ctx):
    """Each one, as it is made: the end of join() copies parameters in any case."""
    ddp = wrapped(ctx, Scalars(2), find_unused_parameters=True)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1, momentum=0.9)
    history = []
    optimizer.register_step_post_hook(
        lambda *_: history.append([p.item() for p in ddp.parameters()])
    )
    ddp.step_in_backward(optimizer)
    with ddp.join():
        for i in range(4 if ctx.rank == 0 else 1):
            ddp.zero_grad()
            ddp(torch.ones(1), (0, 1) if i < 2 else (0,)).backward()
    ddp.zero_grad()
    ddp(torch.ones(1)).backward()
    assert len({tuple(each) for each in history}) == 5
    return history


@on_ranks(2, fresh={"group_timeout": 4.0})
def test_reset_after_one_rank_raised_inside_join(ctx):
    ddp = wrapped(ctx, Scalars())
    train = lambda: ddp(x_of(ctx)).backward()  # noqa: E731
    error = error_in_join(ddp, train, train, raise_own if ctx.rank == 1 else train)
    if ctx.rank:
        assert error.startswith('KeyError: "the user\'s own"')
    else:
        assert error.startswith("CollectiveError: [rank 0] ")
        assert "A collective failed while announcing a forward" in error
    ddp.reset()
    ddp.zero_grad()
    train()
    assert values(ddp) == [1.5]


@on_ranks(3)
def test_ranks_that_disagree_on_no_sync_are_told(ctx):
    ddp = wrapped(ctx, Scalars())
    ddp.require_backward_grad_sync = ctx.rank > 0
    train = [lambda: ddp(x_of(ctx)).backward()] * (ctx.rank < 2)
    problem = error_in_join(ddp, *train)
    assert "must agree on no_sync()" in problem
    assert "of ranks [0, 1] only [1]" in problem


def started_after(ctx, join, others=0):
    """How many collectives this rank has counted after a join() of uneven inputs."""
    ddp = wrapped(ctx, Scalars())
    other = [wrapped(ctx, Scalars()) for _ in range(others)]
    with join([*other, ddp]):
        for _ in range(ctx.rank + 1):
            for each in [*other, ddp]:
                each(x_of(ctx)).backward()
    return [each._reducer.communicator.started for each in [*other, ddp]]


@on_ranks(3)
def test_all_ranks_count_the_same_collectives_in_join(ctx):
    """Else hang reports after it would take ranks that wait for missing ones."""
    alone = started_after(ctx, lambda ddps: ddps[0].join())
    return [*alone, *started_after(ctx, Join), *started_after(ctx, Join, others=1)]


@on_ranks(2, fresh={"group_timeout": 40.0}, limit=30.0)
def test_a_rank_without_inputs_does_not_wait_for_one_that_raised(ctx):
    """It waits in torch's Join: there, too, it hears that the other has given up."""
    ddp = wrapped(ctx, Scalars(), hang_timeout=5)
    train = [lambda: ddp(x_of(ctx)).backward()]
    error = error_in_join(ddp, *[*train, raise_own] * ctx.rank)
    if ctx.rank == 0:
        assert "Rank 1 gave up" in error
        assert "while joining ranks that still have inputs" in error
    ddp.reset(copy_from=0)
    ddp.zero_grad()
    ddp(x_of(ctx)).backward()
    assert values(ddp) == [1.5]
