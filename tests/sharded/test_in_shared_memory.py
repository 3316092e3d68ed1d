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
    pair[0].given(0, 0)[:4] = 7.0
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


SIZES = [3, 700, 1, 2000, 1025, 17]


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("scale", [1.0, 0.3])
@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16]
)
def test_own_gradients_are_added_up_where_they_lie(dtype, scale, size):
    """The buffer has no values of the own share, and the sums are those of the buffers.

    The slots in the middle are the share of rank 1.
    """
    library = native.library()
    ends = torch.tensor(SIZES).cumsum(0).tolist()
    bounds = (0, ends[1], *([ends[4]] if size == 3 else []), ends[-1])
    last = 5 if size == 3 else 6
    shape = (ends[-1], dtype, None, bounds)
    made = [library.SharedMemory(rank, size, [shape]) for rank in range(size)]
    for rank, memory in enumerate(made):
        for peer, other in enumerate(made):
            if peer != rank:
                path = f"/proc/{os.getpid()}/fd/{other.descriptor}"
                memory.connect(peer, path, other.token)
    values = [torch.randn(ends[-1]).to(dtype) for _ in range(size)]
    for memory, each in zip(made, values, strict=True):
        memory.buffer(0).copy_(each * (1 / size))
    buffer = made[1].buffer(0)
    buffer[bounds[1] : bounds[2]] = torch.nan
    params = [torch.zeros(n, dtype=dtype) for n in SIZES]
    slots = library.Slots(params, [*buffer.split(SIZES)], buffer, as_view=False)
    slots.divide(2, last)
    with torch.no_grad():
        for k, (param, each) in enumerate(
            zip(params, values[1].split(SIZES), strict=True)
        ):
            param.grad = each.clone()
            assert slots.copy_now(k, param.grad, 1 / size) == (not 2 <= k < last)
        own = [param.grad for param in params[2:last]]
        assert [param.grad is None for param in params[:2]] == [True] * 2
        states = [None if 2 <= k < last else ... for k in range(len(SIZES))]
        arrived = [params[k].grad if s is None else s for k, s in enumerate(states)]
        assert slots.flatten(arrived, size)
        assert slots.settle() == -1
        for memory in made:
            memory.post(0)
        assert slots.offer_share(2, last, scale)
        assert made[1].wait(0, 1.0, slots)
        assert slots.has_taken_share()
    expected = values[0] * (1 / size)
    for each in values[1:]:
        expected += each * (1 / size)
    expected = (expected * scale)[bounds[1] : bounds[2]]
    assert torch.equal(torch.cat(own), expected)
    assert all(p.grad is g for p, g in zip(params[2:last], own, strict=True))
    assert buffer[bounds[1] : bounds[2]].isnan().all()


@pytest.mark.parametrize("numel", [1, 15, 16, 17, 5000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_a_scaled_copy_past_the_cache_has_the_same_bits(dtype, numel):
    """Neither end of the target need lie where a cache line begins."""
    library = native.library()
    large = torch.zeros(2**25 // dtype.itemsize, dtype=dtype)  # past the cache, then
    for start in range(4):
        view = large[start : start + numel]
        source = torch.randn(numel).to(dtype)
        library.flatten([view], [source], 0.3)
        assert torch.equal(view, source * 0.3)
        assert not large[start + numel : start + numel + 64].any()
        assert not large[:start].any()
        view.zero_()
