"""The compiled sums of logical ranks have torch's bits, and write nothing else."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.native.test_flatten import (
    REALS,
    all_dtypes,
    arena_for,
    assert_same_bits,
    places,
)


@given(data=st.data(), seed=st.integers(0, 2**20), in_place=st.booleans())
@pytest.mark.parametrize("dtype", REALS, ids=lambda d: str(d)[6:])
def test_sums_have_the_bits_of_torch(library, dtype, data, seed, in_place):
    """Also of memory in any order; or nothing is written."""
    shapes = data.draw(st.lists(st.sampled_from([(3,), (40, 9), (2000,), (2, 3, 4)])))
    drawn = [[data.draw(places(shape)) for shape in shapes] for _ in range(3)]
    arenas = [arena_for(each, dtype, seed + k) for k, each in enumerate(drawn)]
    (arena, to, _), (first, left, _), (second, right, _) = arenas
    if in_place:
        arena, to = first, left
    before = arena.clone(), first.clone(), second.clone()
    expected = [torch.add(a, b) for a, b in zip(left, right, strict=True)]
    is_done = library.add(to, left, right)
    for sum_, wanted in zip(to, expected, strict=True):
        if is_done:
            assert_same_bits(sum_, wanted)
            sum_.zero_()
    for tensor, then in zip((arena, first, second), before, strict=True):
        for sum_ in to if is_done and tensor is arena else ():
            offset = sum_.storage_offset()
            then.as_strided(sum_.shape, sum_.stride(), offset).zero_()
        assert_same_bits(tensor, then)
    layouts = [[(p.shape, p.stride) for p in each] for each in drawn]
    if layouts[0] == layouts[1] == layouts[2] and all(
        tensor.is_contiguous() for tensor in to
    ):
        assert is_done


def test_what_it_leaves_to_torch(library):
    """It writes nothing then, not even the pairs before."""
    good = torch.ones(3)
    for bad in (
        None,
        torch.ones(4),
        torch.ones(3, dtype=torch.float64),
        torch.ones(3, dtype=torch.int64),
        torch.ones(3, requires_grad=True),
        torch.ones(3).to_sparse(),
        torch.view_as_complex(torch.ones(3, 2)).imag.conj(),
        torch._neg_view(torch.ones(3)),
    ):
        sums = [good.clone(), torch.ones(3)]
        assert not library.add(sums, sums, [good, bad])
        assert not library.add([good.clone(), bad], sums, [good, good])
        assert sums[0].tolist() == [1, 1, 1]
    with pytest.raises(ValueError, match="two tensors for each sum"):
        library.add([good], [good], [good, good])
    assert library.add([], [], [])


@all_dtypes
def test_who_has_saved_a_sum_for_a_backward_hears_of_it(library, dtype):
    x, more = torch.ones(3, dtype=dtype), torch.ones(3, dtype=dtype)
    w = torch.ones(3, dtype=dtype, requires_grad=True)
    loss = (x * w).abs().sum()
    if not library.add([x], [x], [more]):
        assert dtype.is_complex
        return
    assert x.tolist() == [2, 2, 2]
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
