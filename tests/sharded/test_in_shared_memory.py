"""Shares of a buffer that two ranks map, here in one process: who reads what, when."""

from __future__ import annotations

import os

import pytest
import torch

from minidp import native

pytestmark = [
    pytest.mark.usefixtures("library"),  # skips without a compiler
    pytest.mark.skipif(
        "0" in map(os.environ.get, ("MINIDP_NATIVE", "MINIDP_SHARED_MEMORY")),
        reason="MINIDP_NATIVE=0 or MINIDP_SHARED_MEMORY=0: ranks must not share memory",
    ),
]


@pytest.fixture
def pair():
    """The memories of two ranks: 4 elements of rank 0, and 6 of rank 1."""
    library = native.library()
    shape = (10, torch.float32, None, (0, 4, 10))
    made = [library.SharedMemory(rank, 2, [shape]) for rank in range(2)]
    for rank, peer in ((0, 1), (1, 0)):
        other = made[peer]
        path = f"/proc/{os.getpid()}/fd/{other.descriptor}"
        made[rank].connect(peer, path, other.token)
    return made


def test_a_rank_sums_its_share_only(pair):
    for rank, memory in enumerate(pair):
        memory.buffer(0).fill_(1.0 + rank)
        memory.post(0)
    assert pair[0].advance(0)
    assert pair[0].buffer(0).tolist() == [3.0] * 4 + [1.0] * 6
    assert pair[1].buffer(0).tolist() == [2.0] * 10
    assert pair[1].advance(0)
    assert pair[1].buffer(0).tolist() == [2.0] * 4 + [3.0] * 6


def test_nobody_sums_before_all_have_posted(pair):
    pair[0].post(0)
    assert not pair[0].advance(0)
    assert [*pair[0].missing(0)] == [1]


def test_a_rank_knows_who_still_reads_its_values(pair):
    for memory in pair:
        memory.post(0)
    assert pair[0].advance(0)
    assert [*pair[0].not_summed(0)] == [1]
    assert not pair[0].wait_summed(0, 0.0)
    assert pair[1].advance(0)
    assert pair[0].wait_summed(0, 0.0)
    assert [*pair[0].not_summed(0)] == []


def test_new_values_of_a_share_are_read_by_the_others(pair):
    pair[0].buffer(0, 1)[:4] = 7.0
    pair[0].give(0)
    assert [*pair[0].not_given(0)] == [1]
    assert not pair[0].wait_given(0, 0.0)
    pair[1].give(0)
    assert pair[1].wait_given(0, 0.0)
    assert pair[1].given(0, 0)[:4].tolist() == [7.0] * 4


@pytest.mark.parametrize(
    "bounds", [(0, 10), (0, 4, 9), (1, 4, 10), (0, 6, 4, 10), (0, 11, 10)]
)
def test_bounds_that_are_no_shares(bounds):
    library = native.library()
    with pytest.raises(ValueError, match="not a share for each rank"):
        library.SharedMemory(0, 2, [(10, torch.float32, None, bounds)])
