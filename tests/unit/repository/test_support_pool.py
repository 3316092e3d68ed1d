"""Rank processes: what goes wrong on a rank is seen here, and not by the next job."""

from __future__ import annotations

import os
import threading

import pytest
import torch
import torch.distributed as dist

from tests.support.pool import Pool, RankError
from tests.support.worker import pack, unpack


def who(ctx):
    """And a collective, which needs that ranks are in step."""
    total = torch.tensor([ctx.rank + 1])
    dist.all_reduce(total, group=ctx.group)
    return ctx.rank, ctx.world_size, ctx.global_rank, total.item()


def go_wrong(ctx, how):
    if ctx.rank == 0:
        match how:
            case "raise":
                raise KeyError("rank 0 fails")
            case "one collective too many":
                dist.all_reduce(torch.zeros(1), group=ctx.group, async_op=True)
            case "die":
                os._exit(3)
            case "hang":
                threading.Event().wait()
    elif how in ("die", "time out"):
        dist.all_reduce(torch.zeros(1), group=ctx.group)
    return os.getpid()


def test_every_rank_answers_in_order(pool):
    for count in (1, 2, 3, 4):
        total = count * (count + 1) // 2
        assert pool.run(who, count) == [(r, count, r, total) for r in range(count)]
    assert pool.run(who, (1, 2)) == [(0, 2, 1, 3), (1, 2, 2, 3)]


@pytest.mark.parametrize(
    ("how", "kinds", "is_replaced"),
    [
        ("raise", ["KeyError", ""], False),
        ("one collective too many", ["", ""], True),
        ("time out", ["", "RuntimeError"], True),
        ("die", ["Exited", "RuntimeError"], True),
        ("hang", ["Hang", ""], True),
    ],
)
def test_a_pool_recovers_from(how, kinds, is_replaced):
    pool = Pool(world_size=2, group_timeout=2.0)
    try:
        before = set(pool.run(go_wrong, 2, ""))
        outcomes = pool.run(go_wrong, 2, how, errors="return", limit=10.0)
        for rank, (outcome, kind) in enumerate(zip(outcomes, kinds, strict=True)):
            assert isinstance(outcome, RankError) == bool(kind)
            if kind:
                assert (outcome.rank, outcome.is_a(kind)) == (rank, True)
                assert kind == "Exited" or "in go_wrong" in outcome.traceback
        assert (not before & set(pool.run(go_wrong, 2, ""))) == is_replaced
        assert len(pool.run(who, 2)) == 2
    finally:
        pool.close()


def test_nan_payload_travels():
    sent = torch.tensor([0x7FC12345, -1]).to(torch.int32).view(torch.float32)
    got = unpack(pack(sent))
    assert torch.equal(got.view(torch.int32), sent.view(torch.int32))
