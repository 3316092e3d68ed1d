"""Checksums by which ranks compare tensors."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from minidp.logical.digests import digests_of, total
from tests.logical_ranks.faults import Flip

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.complex64]
SIZES = [1, 7, 300, 16383, 16384, 32767, 32769, 200_001]


def random_of(size, dtype, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(size, generator=generator).to(dtype)


@given(st.sampled_from(DTYPES), st.sampled_from(SIZES), st.integers(), st.integers())
def test_any_flip_changes_it(dtype, size, element, bit):
    tensor = random_of(size, dtype)
    before = digests_of({"a": tensor, "b": tensor.clone()})
    flipped = torch.view_as_real(tensor).view(-1) if dtype.is_complex else tensor
    Flip(0, element, bit).hit(flipped)
    after = digests_of({"a": tensor, "b": random_of(size, dtype)})
    assert before["a"] == before["b"] == after["b"]
    assert after["a"] != before["a"]
    assert total([(0, before["a"]), (1, 5)]) != total([(0, after["a"]), (1, 5)])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", SIZES)
def test_it_depends_on_values_alone(dtype, size):
    """Not on strides, on the place in memory, or on the tensors beside it."""
    tensor = random_of(size, dtype)
    (expected,) = digests_of({0: tensor}).values()
    apart = torch.stack([tensor, tensor], 1)[:, 0]
    shifted = torch.cat([tensor[:1], tensor])[1:]
    found = digests_of({0: apart, 1: shifted, 2: tensor[:5], 3: None})
    assert found[0] == found[1] == expected


@pytest.mark.parametrize("size", [100, 50_000])
def test_all_nans_are_alike(size):
    tensor = random_of(size, torch.float32)
    tensor[3] = float("nan")
    other = tensor.clone()
    other[3:4].view(torch.int32)[:] = -1  # its sign, and all bits of its payload
    assert other[3].isnan()
    assert digests_of({0: tensor}) == digests_of({0: other})


def test_nothing_counts_as_zeros():
    assert not digests_of({0: None, 1: torch.zeros(5), 2: torch.zeros(70_000)})
    assert digests_of({0: -torch.zeros(5)})
    assert not digests_of({})
