"""The pool of rank processes: no job sees what an earlier one has left behind."""

from __future__ import annotations

from typing import Any

import torch

from minidp import comm


def leaves_a_message(ctx: Any) -> None:
    group = comm.side_group(ctx.group, "a purpose")
    if ctx.rank == 0:
        comm.all_reduce(torch.zeros(1000), group)
    raise ValueError("all ranks raise")


def adds_up(ctx: Any) -> float:
    value = torch.tensor([ctx.rank + 1.0])
    comm.all_reduce(value, comm.side_group(ctx.group, "a purpose")).wait()
    return value.item()


def test_a_job_after_one_that_left_a_message_in_a_side_group(pool: Any) -> None:
    failed = pool.run(leaves_a_message, 2, errors="return")
    assert [error.kind for error in failed] == ["ValueError"] * 2
    assert pool.run(adds_up, 2) == [3.0, 3.0]
