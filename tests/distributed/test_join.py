"""Uneven inputs: torch's DDP and minidp side by side, and what torch gets wrong."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.algorithms.join import Join
from torch.distributed.optim import ZeroRedundancyOptimizer

from minidp import DataParallel
from tests.distributed.test_special_cases import both_equal, modes
from tests.support.both import Scalars, grads, on_both, x_of
from tests.support.fresh import run_fresh

divisors = pytest.mark.parametrize("by_initial", [True, False])


class Net(nn.Module):
    """Two branches, batch norm, parameters in more than one bucket if asked."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(3)
        self.first = nn.Linear(3, 3)
        self.second = nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.first(self.norm(x)) + self.second(x)


def inputs(rank: int, i: int) -> torch.Tensor:
    return torch.randn(4, 3, generator=torch.Generator().manual_seed(100 * rank + i))


def state_of(ddp: nn.Module) -> list[torch.Tensor]:
    return [t.clone() for t in ddp.state_dict().values()]


def trained(
    ctx: Any,
    wrap: Any,
    counts: list[int],
    mode: dict[str, Any],
    join: dict[str, Any],
    quiet: tuple[int, ...] = (),
) -> Any:
    """Per step the gradients, then the state: with SGD, and forwards in no_sync."""
    ddp = wrap(Net(), **mode)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    seen = []
    with ddp.join(**join):
        for i in range(counts[ctx.rank]):
            if i in quiet:
                with ddp.no_sync():
                    ddp(inputs(ctx.rank, i)).sum().backward()
                continue
            ddp(inputs(ctx.rank, i)).pow(2).sum().backward()
            seen.append(grads(ddp))
            optimizer.step()
            optimizer.zero_grad()
    return seen, state_of(ddp)


@modes
@divisors
@pytest.mark.parametrize("counts", [[1, 3], [4, 2], [3, 3]])
def test_join_as_torch(
    pool: Any, mode: dict[str, Any], by_initial: bool, counts: list[int]
) -> None:
    join = {"divide_by_initial_world_size": by_initial}
    ours = both_equal(pool, trained, 2, counts, mode, join)
    for left, right in zip(ours[0][1], ours[1][1], strict=True):
        assert torch.equal(left, right)


@divisors
def test_join_of_three(pool: Any, by_initial: bool) -> None:
    join = {"divide_by_initial_world_size": by_initial}
    both_equal(pool, trained, 3, [1, 2, 3], {}, join)


@modes
def test_join_with_no_sync(pool: Any, mode: dict[str, Any]) -> None:
    both_equal(pool, trained, 2, [2, 4], mode, {}, (1, 3))


@pytest.mark.parametrize("idle", [0, 1])
def test_rank_without_any_input(pool: Any, idle: int) -> None:
    counts = [3, 3]
    counts[idle] = 0
    both_equal(pool, trained, 2, counts, {"bucket_cap_mb": 0.00001}, {})


def test_static_graph_and_a_rank_without_input_in_the_first_iteration(
    pool: Any,
) -> None:
    results = pool.run(static_and_late, 2)
    assert results == [[None, 1.5, 3.0], [1.0, 1.5, 3.0]]


def static_and_late(ctx: Any) -> Any:
    """Rank 0 has no first input, but trains later: torch deadlocks or raises."""
    ddp = DataParallel(Scalars(), process_group=ctx.group, static_graph=True)
    with ddp.join():
        for _ in range(ctx.rank):
            ddp(x_of(ctx)).backward()
    seen = [None if g is None else g.item() for g in grads(ddp)]
    for factor in (1, 2):
        ddp.zero_grad()
        ddp(factor * x_of(ctx)).backward()
        seen.append(ddp.module.w[0].grad.item())
    return seen


def scalar_grads(
    ctx: Any, wrap: Any, by_initial: bool, hook: Any = None
) -> list[float]:
    """Rank r has r + 1 inputs; the gradient of each step."""
    ddp = wrap(Scalars())
    if hook is not None:
        ddp.register_comm_hook(None, hook)
    seen = []
    with ddp.join(divide_by_initial_world_size=by_initial):
        for _ in range(ctx.rank + 1):
            ddp.zero_grad()
            ddp(x_of(ctx)).backward()
            seen.append(ddp.module.w[0].grad.item())
    return seen


def test_numbers_of_three_ranks(pool: Any) -> None:
    """The table of torch's behaviour: sum over active ranks of rank + 1."""
    by_all = both_equal(pool, scalar_grads, 3, True)
    assert by_all[2] == pytest.approx([2.0, 5 / 3, 1.0])
    by_active = both_equal(pool, scalar_grads, 3, False)
    assert by_active[2] == [2.0, 2.5, 3.0]


def by_divisor(state: Any, bucket: Any) -> Any:
    """A hook that follows the number of active ranks, as ours do."""
    buffer = bucket.buffer().div_(bucket.divisor())
    work = dist.all_reduce(buffer, group=bucket.process_group(), async_op=True)
    return work.get_future().then(lambda _: buffer)


def hooked(ctx: Any) -> Any:
    ours = [
        scalar_grads(ctx, lambda m: DataParallel(m, process_group=ctx.group), *how)
        for how in ((False, by_divisor), (True, by_divisor), (False, torch_hook(ctx)))
    ]
    return ours


def torch_hook(ctx: Any) -> Any:
    return lambda state, bucket: allreduce_hook(ctx.group, bucket)


def test_difference_comm_hooks_learn_how_many_ranks_are_active(pool: Any) -> None:
    by_active, by_all, torchs_own = pool.run(hooked, 3)[2]
    assert by_active == [2.0, 2.5, 3.0]
    assert by_all == pytest.approx([2.0, 5 / 3, 1.0])
    assert torchs_own == pytest.approx([2.0, 5 / 3, 1.0])  # divides by the world size


def thrown(ctx: Any, wrap: Any) -> str:
    ddp = wrap(Scalars())
    try:
        with ddp.join(throw_on_early_termination=True):
            for _ in range(ctx.rank + 1):
                ddp(x_of(ctx)).backward()
    except RuntimeError as error:
        return str(error)
    return "nothing was raised"


def test_early_termination_raises_everywhere(pool: Any) -> None:
    results = both_equal(pool, thrown)
    assert "Rank 0 exhausted all inputs" in results[0]
    assert "Detected at least one rank that exhausted inputs" in results[1]


def config_after(ctx: Any, wrap: Any) -> Any:
    ddp = wrap(Scalars())
    with ddp.join(divide_by_initial_world_size=False):
        for _ in range(ctx.rank + 1):
            ddp(x_of(ctx)).backward()
    after = [ddp._join_config.enable, ddp._divide_by_initial_world_size]
    with Join([ddp], divide_by_initial_world_size=False):
        ddp(x_of(ctx)).backward()
    return [*after, ddp._join_config.enable, ddp._divide_by_initial_world_size]


def test_difference_config_is_reset(pool: Any) -> None:
    for theirs, ours in pool.run(run_both_of, 2):
        assert theirs == [True, False, True, False]
        assert ours == [False, True, False, True]


def run_both_of(ctx: Any) -> Any:
    return on_both(ctx, config_after)


def disabled(ctx: Any, wrap: Any) -> Any:
    ddp = wrap(Scalars())
    with ddp.join(enable=False):
        ddp(x_of(ctx)).backward()
    return grads(ddp)


def test_disabled_join_does_nothing(pool: Any) -> None:
    both_equal(pool, disabled)


def unused_later(ctx: Any, wrap: Any) -> Any:
    ddp = wrap(Scalars(2), find_unused_parameters=True)
    seen = []
    with ddp.join():
        for i in range(2 * ctx.rank + 1):
            ddp.zero_grad()
            ddp(x_of(ctx), (0, 1) if i == 0 else (0,)).backward()
            seen.append([None if g is None else g.item() for g in grads(ddp)])
    return seen


def test_difference_joined_ranks_report_nothing_used(pool: Any) -> None:
    _, (theirs, ours) = pool.run(run_unused_later, 2)
    assert theirs[1] == [1.0, 0.0]  # rank 0 sends its last used-map again
    assert ours == [[1.5, 1.5], [1.0, None], [1.0, None]]


def run_unused_later(ctx: Any) -> Any:
    return on_both(ctx, unused_later)


def with_zero(ctx: Any, wrap: Any) -> Any:
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
    pool: Any,
) -> None:
    for theirs, ours in pool.run(run_with_zero, 2):
        # Steps of 1.5 and 2.0; torch's joined rank repeats 1.5 for its shard.
        assert ours == [0.65, 0.65]
        assert sorted(theirs) == [0.65, 0.7]


def run_with_zero(ctx: Any) -> Any:
    return on_both(ctx, with_zero)


def buffers_meanwhile(ctx: Any, wrap: Any) -> list[float]:
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


def test_module_buffers_come_from_the_highest_active_rank(pool: Any) -> None:
    both_equal(pool, buffers_meanwhile)


def sparse_and_complex(ctx: Any) -> Any:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rows = nn.Embedding(5, 2, sparse=True)
            self.z = nn.Parameter(torch.ones(2, dtype=torch.complex64))

        def forward(self, i: torch.Tensor) -> torch.Tensor:
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


def test_difference_sparse_gradients_join(pool: Any) -> None:
    """Torch cannot shadow a sparse bucket; here the joined rank adds nothing."""
    _, rank_1 = pool.run(sparse_and_complex, 2)
    assert rank_1 == [
        ([3.0, 1.0, 0.0, 0.0, 0.0], True),
        ([0.0, 2.0, 0.0, 0.0, 0.0], True),
        ([0.0, 1.0, 1.0, 0.0, 0.0], True),
    ]


def views_keep_unused(ctx: Any) -> Any:
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


def test_shadow_leaves_gradients_alone(pool: Any) -> None:
    assert pool.run(views_keep_unused, 2) == [[1.5, 1.5], [1.0, 1.5]]


def after_an_error(ctx: Any) -> list[float]:
    ddp = DataParallel(Scalars(), process_group=ctx.group)
    try:
        with ddp.join(divide_by_initial_world_size=False):
            ddp(x_of(ctx)).backward()
            raise KeyError("the user's own")
    except KeyError:
        pass
    assert not ddp._join_config.enable
    ddp.zero_grad()
    ddp(x_of(ctx)).backward()
    return [g.item() for g in grads(ddp)]


def test_error_inside_join_ends_it(pool: Any) -> None:
    assert pool.run(after_an_error, 2) == [[1.5], [1.5]]


def zero_with_unused(ctx: Any) -> list[float]:
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


def test_joined_rank_applies_no_gradient_of_an_earlier_shadow(pool: Any) -> None:
    # Steps of 1, 1, then halves of the rank that is left; parameter 1 stops earlier.
    assert pool.run(zero_with_unused, 2) == [[-2.0, -1.5]] * 2


def momentum_in_shadows(ctx: Any) -> list[float]:
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


def test_steps_of_a_joined_rank_are_those_of_the_others(pool: Any) -> None:
    first, second = pool.run(momentum_in_shadows, 2)
    assert first == second


def one_rank_raises(ctx: Any) -> Any:
    ddp = DataParallel(Scalars(), process_group=ctx.group)
    problem = ""
    try:
        with ddp.join():
            for i in range(3):
                if i == 2 and ctx.rank == 1:
                    raise KeyError("the user's own")
                ddp(x_of(ctx)).backward()
    except (KeyError, RuntimeError) as error:
        problem = f"{type(error).__name__}: {error}"
    ddp.reset()
    ddp.zero_grad()
    ddp(x_of(ctx)).backward()
    return problem, grads(ddp)[0].item()


def test_reset_after_one_rank_raised_inside_join() -> None:
    (first, grad_0), (second, grad_1) = run_fresh(one_rank_raises, 2, group_timeout=2.0)
    assert first.startswith(
        "CollectiveError: [rank 0] A collective failed while announcing a forward in "
        "join()"
    )
    assert second == 'KeyError: "the user\'s own"'
    assert (grad_0, grad_1) == (1.5, 1.5)


def of_two_minds(ctx: Any) -> str:
    ddp = DataParallel(Scalars(), process_group=ctx.group)
    try:
        with ddp.join():
            if ctx.rank == 0:
                with ddp.no_sync():
                    ddp(x_of(ctx)).backward()
            elif ctx.rank == 1:
                ddp(x_of(ctx)).backward()
    except RuntimeError as error:
        return str(error)
    return ""


def test_ranks_that_disagree_on_no_sync_are_told(pool: Any) -> None:
    for problem in pool.run(of_two_minds, 3):
        assert "must agree on no_sync()" in problem
        assert "of ranks [0, 1] only [1]" in problem
