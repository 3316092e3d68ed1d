"""Uneven inputs: torch's DDP and minidp side by side, and what torch gets wrong."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.algorithms.join import Join
from torch.distributed.optim import ZeroRedundancyOptimizer

from minidp import DataParallel
from tests.support.both import Scalars, both_equal, grads, on_both, x_of
from tests.support.fresh import run_fresh
from tests.support.training import by_divisor


def steps_of(ctx, ddp, uses, join):
    """Gradients of a step in a join() for each of ``uses``: which parameters."""
    seen = []
    with ddp.join(**join):
        for use in uses:
            ddp.zero_grad()
            ddp(x_of(ctx), use).backward()
            seen.append([None if g is None else g.item() for g in grads(ddp)])
    return seen


def test_static_graph_and_a_rank_without_input_in_the_first_iteration(
    pool,
):
    results = pool.run(static_and_late, 2)
    assert results == [[[1.5], [3.0]], [[1.0], [1.5], [3.0]]]


def static_and_late(ctx):
    """Rank 0 has no first input, but trains later: torch deadlocks or raises."""
    ddp = DataParallel(Scalars(), process_group=ctx.group, static_graph=True)
    joined = steps_of(ctx, ddp, [[0]] * ctx.rank, {})
    for factor in (1, 2):
        ddp.zero_grad()
        ddp(factor * x_of(ctx)).backward()
        joined.append([ddp.module.w[0].grad.item()])
    return joined


def hooked(ctx):
    """Rank r has r + 1 inputs; the gradient of each step."""

    def torchs(state, bucket):
        return allreduce_hook(ctx.group, bucket)

    found = []
    for by_initial, hook in ((False, by_divisor), (True, by_divisor), (False, torchs)):
        ddp = DataParallel(Scalars(), process_group=ctx.group)
        ddp.register_comm_hook(None, hook)
        join = {"divide_by_initial_world_size": by_initial}
        found.append(steps_of(ctx, ddp, [[0]] * (ctx.rank + 1), join))
    return found


def test_difference_comm_hooks_learn_how_many_ranks_are_active(pool):
    by_active, by_all, torchs_own = pool.run(hooked, 3)[2]
    assert by_active == [[2.0], [2.5], [3.0]]
    assert by_all == [[2.0], [pytest.approx(5 / 3)], [1.0]]
    assert torchs_own == [[2.0], [pytest.approx(5 / 3)], [1.0]]  # by the world size


def error_in_join(ddp, *steps, **options):
    """What a join() raises in which ``steps`` are called."""
    try:
        with ddp.join(**options):
            for step in steps:
                step()
    except Exception as error:
        return error
    raise AssertionError("nothing was raised")


def raise_own():
    raise KeyError("the user's own")


def thrown(ctx, wrap):
    ddp = wrap(Scalars())
    train = [lambda: ddp(x_of(ctx)).backward()] * (ctx.rank + 1)
    return str(error_in_join(ddp, *train, throw_on_early_termination=True))


def test_early_termination_raises_everywhere(pool):
    results = both_equal(pool, thrown)
    assert "Rank 0 exhausted all inputs" in results[0]
    assert "Detected at least one rank that exhausted inputs" in results[1]


def config_after(ctx, wrap):
    ddp = wrap(Scalars())
    with ddp.join(divide_by_initial_world_size=False):
        for _ in range(ctx.rank + 1):
            ddp(x_of(ctx)).backward()
    after = [ddp._join_config.enable, ddp._divide_by_initial_world_size]
    with Join([ddp], divide_by_initial_world_size=False):
        ddp(x_of(ctx)).backward()
    return [*after, ddp._join_config.enable, ddp._divide_by_initial_world_size]


def test_difference_config_is_reset(pool):
    for theirs, ours in pool.run(on_both, 2, config_after):
        assert theirs == [True, False, True, False]
        assert ours == [False, True, False, True]


def unused_later(ctx, wrap):
    ddp = wrap(Scalars(2), find_unused_parameters=True)
    return steps_of(ctx, ddp, [(0, 1), (0,), (0,)][: 2 * ctx.rank + 1], {})


def test_difference_joined_ranks_report_nothing_used(pool):
    _, (theirs, ours) = pool.run(on_both, 2, unused_later)
    assert theirs[1] == [1.0, 0.0]  # rank 0 sends its last used-map again
    assert ours == [[1.5, 1.5], [1.0, None], [1.0, None]]


def with_zero(ctx, wrap):
    ddp = wrap(Scalars(2))
    optimizer = ZeroRedundancyOptimizer(
        ddp.parameters(), torch.optim.SGD, process_group=ctx.group, lr=0.1
    )
    with Join([ddp, optimizer], divide_by_initial_world_size=False):
        for _ in range(ctx.rank + 1):
            optimizer.zero_grad()
            ddp(x_of(ctx)).backward()
            optimizer.step()
    return [round(p.item(), 4) for p in ddp.parameters()]


def test_difference_zero_optimizer_of_a_joined_rank_steps_on_fresh_gradients(
    pool,
):
    for theirs, ours in pool.run(on_both, 2, with_zero):
        # Steps of 1.5 and 2.0; torch's joined rank repeats 1.5 for its shard.
        assert ours == [0.65, 0.65]
        assert sorted(theirs) == [0.65, 0.7]


def buffers_meanwhile(ctx, wrap):
    ddp = wrap(Scalars())
    ddp.module.register_buffer("b", torch.tensor([100.0 + ctx.rank]))
    ddp = wrap(ddp.module)
    seen = []
    with ddp.join():
        for _ in range(2 * (2 - ctx.rank)):
            ddp(x_of(ctx)).backward()
            seen.append(ddp.module.b.item())
            ddp.module.b.add_(ctx.rank + 1)
    return [*seen, ddp.module.b.item()]


def test_module_buffers_come_from_the_highest_active_rank(pool):
    both_equal(pool, buffers_meanwhile)


def sparse_and_complex(ctx):
    class Mixed(nn.Module):
        def __init__(self):
            super().__init__()
            self.rows = nn.Embedding(5, 2, sparse=True)
            self.z = nn.Parameter(torch.ones(2, dtype=torch.complex64))

        def forward(self, i):
            return (self.rows(i) * self.z.real).sum() + (self.z * 1j).abs().sum()

    ddp = DataParallel(Mixed(), process_group=ctx.group)
    seen = []
    with ddp.join():
        for i in range(2 * ctx.rank + 1):
            ddp.zero_grad()
            ddp(torch.tensor([ctx.rank, i])).backward()
            z, rows = ddp.module.z.grad, ddp.module.rows.weight.grad
            seen.append((rows.to_dense().sum(1).tolist(), bool(z.real.all())))
    return seen


def test_difference_sparse_gradients_join(pool):
    """Torch cannot shadow a sparse bucket; here the joined rank adds nothing."""
    _, rank_1 = pool.run(sparse_and_complex, 2)
    assert rank_1 == [
        ([3.0, 1.0, 0.0, 0.0, 0.0], True),
        ([0.0, 2.0, 0.0, 0.0, 0.0], True),
        ([0.0, 1.0, 1.0, 0.0, 0.0], True),
    ]


def views_keep_unused(ctx):
    """A joined rank's gradients that nobody uses keep their bytes."""
    ddp = DataParallel(
        Scalars(2),
        process_group=ctx.group,
        find_unused_parameters=True,
        gradient_as_bucket_view=True,
    )
    ddp(x_of(ctx)).backward()
    with ddp.join():
        for _ in range(ctx.rank):
            ddp.module.w[0].grad.zero_()
            ddp(x_of(ctx), (0,)).backward()
    return [g.item() for g in grads(ddp)]


def test_shadow_leaves_gradients_alone(pool):
    assert pool.run(views_keep_unused, 2) == [[1.5, 1.5], [1.0, 1.5]]


def after_an_error(ctx):
    ddp = DataParallel(Scalars(), process_group=ctx.group)
    train = lambda: ddp(x_of(ctx)).backward()  # noqa: E731
    error_in_join(ddp, train, raise_own, divide_by_initial_world_size=False)
    assert not ddp._join_config.enable
    ddp.zero_grad()
    ddp(x_of(ctx)).backward()
    return [g.item() for g in grads(ddp)]


def test_error_inside_join_ends_it(pool):
    assert pool.run(after_an_error, 2) == [[1.5], [1.5]]


def zero_with_unused(ctx):
    """Parameter 1 is not used any more once rank 1 has joined."""
    ddp = DataParallel(Scalars(2), process_group=ctx.group, find_unused_parameters=True)
    optimizer = ZeroRedundancyOptimizer(
        ddp.parameters(), torch.optim.SGD, process_group=ctx.group, lr=1.0
    )
    with Join([ddp, optimizer]):
        for i in range(4 if ctx.rank == 0 else 2):
            optimizer.zero_grad()
            ddp(torch.ones(1), (0, 1) if i < 3 else (0,)).backward()
            optimizer.step()
    return [p.item() for p in ddp.parameters()]


def test_joined_rank_applies_no_gradient_of_an_earlier_shadow(pool):
    # Steps of 1, 1, then halves of the rank that is left; parameter 1 stops earlier.
    assert pool.run(zero_with_unused, 2) == [[-2.0, -1.5]] * 2


def momentum_in_shadows(ctx):
    ddp = DataParallel(Scalars(2), process_group=ctx.group, find_unused_parameters=True)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1, momentum=0.9)
    ddp.step_in_backward(optimizer)
    with ddp.join():
        for i in range(4 if ctx.rank == 0 else 1):
            ddp.zero_grad()
            ddp(torch.ones(1), (0, 1) if i < 2 else (0,)).backward()
    ddp.zero_grad()
    ddp(torch.ones(1)).backward()
    return [p.item() for p in ddp.parameters()]


def test_steps_of_a_joined_rank_are_those_of_the_others(pool):
    first, second = pool.run(momentum_in_shadows, 2)
    assert first == second


def one_rank_raises(ctx):
    ddp = DataParallel(Scalars(), process_group=ctx.group)
    train = lambda: ddp(x_of(ctx)).backward()  # noqa: E731
    error = error_in_join(ddp, train, train, raise_own if ctx.rank == 1 else train)
    ddp.reset()
    ddp.zero_grad()
    ddp(x_of(ctx)).backward()
    return f"{type(error).__name__}: {error}", grads(ddp)[0].item()


def test_reset_after_one_rank_raised_inside_join():
    (first, grad_0), (second, grad_1) = run_fresh(one_rank_raises, 2, group_timeout=2.0)
    assert first.startswith(
        "CollectiveError: [rank 0] A collective failed while announcing a forward in "
        "join()"
    )
    assert second == 'KeyError: "the user\'s own"'
    assert (grad_0, grad_1) == (1.5, 1.5)


def of_two_minds(ctx):
    ddp = DataParallel(Scalars(), process_group=ctx.group)
    ddp.require_backward_grad_sync = ctx.rank > 0
    train = [lambda: ddp(x_of(ctx)).backward()] * (ctx.rank < 2)
    return str(error_in_join(ddp, *train))


def test_ranks_that_disagree_on_no_sync_are_told(pool):
    for problem in pool.run(of_two_minds, 3):
        assert "must agree on no_sync()" in problem
        assert "of ranks [0, 1] only [1]" in problem
