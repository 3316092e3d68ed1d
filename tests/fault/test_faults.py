"""Ranks that fail, die or stay away: a named error in seconds, and recovery."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest
import torch
from torch import nn

from minidp import DataParallel
from tests.support.fresh import run_fresh

SECONDS = 3.0  # timeout of the process group


class TwoLayers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, *, skip: bool = False) -> torch.Tensor:
        return self.a(x) if skip else self.b(self.a(x))


def make(ctx: Any, **options: Any) -> DataParallel:
    torch.manual_seed(0)
    return DataParallel(TwoLayers(), process_group=ctx.group, **options)


def attempt(step: Any) -> str:
    """The error that ``step()`` raises, as 'Class: text'; empty when it does not."""
    try:
        step()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def trains(ctx: Any, ddp: DataParallel) -> bool:
    """Whether the gradients of the next steps are the mean over ranks."""
    right = True
    for step in range(3):
        ddp.zero_grad()
        ddp(torch.ones(1, 4) * (ctx.rank + 1 + step)).sum().backward()
        oracle = TwoLayers()
        oracle.load_state_dict(ddp.module.state_dict())
        for rank in range(ctx.world_size):
            oracle(torch.ones(1, 4) * (rank + 1 + step)).sum().backward()
        for mine, theirs in zip(ddp.parameters(), oracle.parameters(), strict=True):
            right &= torch.allclose(mine.grad, theirs.grad / ctx.world_size)
    return right


def one_rank_skips_a_layer(ctx: Any, options: dict[str, Any]) -> Any:
    ddp = make(ctx, **options)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    x = torch.ones(1, 4)
    errors = [attempt(lambda: ddp(x, skip=ctx.rank == 1).sum().backward())]
    errors.append(attempt(optimizer.step))
    errors.append(attempt(lambda: ddp(x)))
    old = ddp.process_group
    ddp.reset()
    return errors, ddp.process_group is old, trains(ctx, ddp)


@pytest.mark.parametrize(
    "options",
    [{}, {"gradient_as_bucket_view": True}, {"bucket_cap_mb_list": [0]}],
    ids=str,
)
def test_parameter_unused_on_one_rank(options: dict[str, Any]) -> None:
    (waiting, kept, ok0), (skipping, _, ok1) = run_fresh(
        one_rank_skips_a_layer, 2, options, group_timeout=SECONDS
    )
    assert waiting[0].startswith("CollectiveError: [rank 0] ")
    assert "bucket 0" in waiting[0]
    assert waiting[0].endswith("then call reset() on all live ranks.")
    assert waiting[1].startswith("UnsyncedGradientsError: [rank 0] ")
    assert waiting[2].startswith("ReducerFailedError: [rank 0] ")
    assert skipping[0] == ""  # another backward might still bring them
    assert skipping[1].startswith("UnsyncedGradientsError: [rank 1] ")
    assert "rank 1: b.weight, b.bias." in skipping[1]
    assert skipping[2].startswith("UnfinishedReductionError: [rank 1] ")
    assert "rank 1: b.weight, b.bias." in skipping[2]
    assert not kept, "a group with a collective left half done cannot be kept"
    assert (ok0, ok1) == (True, True)


def backward_raises(ctx: Any, ranks: list[int]) -> Any:
    ddp = make(ctx, bucket_cap_mb=0)
    for _ in range(2):  # past the rebuild: several buckets
        ddp(torch.ones(1, 4)).sum().backward()
    ddp.zero_grad()

    def fail(_grad: torch.Tensor) -> None:
        raise ValueError("boo")

    handle = ddp.module.a.weight.register_hook(fail) if ctx.rank in ranks else None
    errors = [attempt(lambda: ddp(torch.ones(1, 4)).sum().backward())]
    if handle is not None:
        handle.remove()
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    errors.append(attempt(optimizer.step))
    errors.append(attempt(lambda: ddp(torch.ones(1, 4))))
    old = ddp.process_group
    ddp.reset()
    kept, right = ddp.process_group is old, trains(ctx, ddp)
    ddp(torch.ones(1, 4), skip=True).sum().backward()
    ddp.reset()  # a second time, perhaps on a fresh group
    return errors, kept, right and trains(ctx, ddp)


@pytest.mark.parametrize("ranks", [[0, 1], [1]])
def test_backward_raises(ranks: list[int]) -> None:
    results = run_fresh(backward_raises, 2, ranks, group_timeout=SECONDS)
    for rank, (errors, kept, ok) in enumerate(results):
        if rank in ranks:
            assert errors[0] == "ValueError: boo"
            assert errors[2].startswith(f"UnfinishedReductionError: [rank {rank}] ")
            assert "a.weight" in errors[2]
        else:
            assert errors[0].startswith(f"CollectiveError: [rank {rank}] ")
            assert errors[2].startswith(f"ReducerFailedError: [rank {rank}] ")
        assert errors[1].startswith(f"UnsyncedGradientsError: [rank {rank}] ")
        assert kept == (len(ranks) == 2), "equal launches complete; unequal do not"
        assert ok


def killed(ctx: Any) -> Any:
    ddp = make(ctx)
    ddp(torch.ones(1, 4)).sum().backward()
    ddp.zero_grad()
    if ctx.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return [
        attempt(lambda: ddp(torch.ones(1, 4)).sum().backward()),
        attempt(ddp.reset),
    ]


def test_a_killed_rank_is_named() -> None:
    survivor, dead = run_fresh(killed, 2, group_timeout=SECONDS, errors="return")
    assert dead.exit_code == -signal.SIGKILL
    assert survivor[0].startswith("CollectiveError: [rank 0] ")
    assert survivor[1].startswith("CollectiveError: [rank 0] reset() waited")
    assert "no call on rank(s) 1" in survivor[1]


def stops_early(ctx: Any) -> Any:
    ddp = make(ctx)
    errors = []
    for _ in range(2 if ctx.rank == 1 else 3):
        ddp.zero_grad()
        errors.append(attempt(lambda: ddp(torch.ones(1, 4)).sum().backward()))
    ddp.reset()
    return errors, trains(ctx, ddp)


def test_ranks_with_different_numbers_of_steps() -> None:
    (waiting, ok0), (done, ok1) = run_fresh(stops_early, 2, group_timeout=SECONDS)
    assert done == ["", ""]
    assert waiting[:2] == ["", ""]
    assert waiting[2].startswith("CollectiveError: [rank 0] ")
    assert (ok0, ok1) == (True, True)


def in_a_subgroup(ctx: Any) -> Any:
    import torch.distributed as dist

    timeout = dist.distributed_c10d.timedelta(seconds=3)
    dist.new_group([0, 1], timeout=timeout)  # rank 1 is in one group more than rank 2
    pair = dist.new_group([1, 2], timeout=timeout)
    if ctx.rank == 0:
        return None
    torch.manual_seed(0)
    ddp = DataParallel(TwoLayers(), process_group=pair)
    error = attempt(lambda: ddp(torch.ones(1, 4), skip=ctx.rank == 2).sum().backward())
    ddp.reset()
    ddp.zero_grad()
    ddp(torch.ones(1, 4) * ctx.rank).sum().backward()
    return error, [p.grad.clone() for p in ddp.parameters()]


def test_reset_in_a_subgroup_needs_only_its_members() -> None:
    outside, first, second = run_fresh(in_a_subgroup, 3, group_timeout=SECONDS)
    assert outside is None
    assert first[0].startswith("CollectiveError: [rank 0] ")
    assert second[0] == ""
    assert all(torch.equal(a, b) for a, b in zip(first[1], second[1], strict=True))
