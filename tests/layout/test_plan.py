"""Where parameters live: torch's assignment, offsets, strides, invariants."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from minidp.config import UNLIMITED
from minidp.layout import plan as module
from minidp.layout.plan import ParamSpec


def spec_of(tensor, name="p", sparse=False):
    return ParamSpec(
        name, tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.device, sparse
    )


def flat(numel, dtype=torch.float32, device="cpu", sparse=False):
    return ParamSpec("p", (numel,), (1,), dtype, torch.device(device), sparse)


# ------------------------------------------------------------------ one parameter


@pytest.mark.parametrize(
    ("tensor", "is_dense", "view_stride"),
    [
        (torch.empty(()), True, ()),
        (torch.empty(5), True, (1,)),
        (torch.empty(2, 3), True, (3, 1)),
        (torch.empty(3, 2).t(), True, (1, 2)),
        (torch.empty(2, 6)[:, ::2], False, (3, 1)),
        (torch.empty(1, 3).expand(2, 3), False, (3, 1)),
        (torch.empty(2, 3, 4, 5).permute(0, 3, 1, 2), True, (60, 1, 20, 5)),
        (torch.empty_strided((1, 4), (99, 1)), True, (99, 1)),
        (torch.empty(4, 5)[:, :1], False, (1, 1)),
        (torch.empty(0, 3), True, (3, 1)),
        (torch.empty(3, 0, 2), True, (2, 2, 1)),
    ],
)
def test_strides_of_views(tensor, is_dense, view_stride):
    spec = spec_of(tensor)
    assert spec.is_dense is is_dense
    assert spec.view_stride == view_stride


@given(
    st.lists(st.integers(1, 4), max_size=4).flatmap(
        lambda shape: st.tuples(st.just(shape), st.permutations(range(len(shape))))
    ),
    st.booleans(),
)
def test_is_dense_agrees_with_torch(shape_and_order, with_holes):
    shape, order = shape_and_order
    tensor = torch.empty(shape).permute(order)
    if with_holes and shape:
        tensor = tensor[..., ::2]
    expected = torch.ops.aten.is_non_overlapping_and_dense(tensor)
    assert spec_of(tensor).is_dense == expected


# ------------------------------------------------------------------------ layouts


def test_first_layout_is_reversed_outside_only_and_the_rebuilt_one_follows_the_order():
    layout = module.initial_layout([flat(10)] * 5, (80,))
    assert layout.assignment == ((4,), (2, 3), (0, 1))
    layout = module.rebuilt_layout([flat(10)] * 4, (40, 80), [3, 1, 0, 2])
    assert layout.assignment == ((3,), (1, 0), (2,))
    mixed = [flat(10), flat(10, torch.float64), flat(10)]
    # Buckets below their limit come by their last parameter.
    assert module.assign(mixed, (UNLIMITED,), [0, 1, 2]) == [[1], [0, 2]]


def test_offsets_count_elements_and_zero_sized_slots_fit():
    specs = [spec_of(torch.empty(2, 3)), spec_of(torch.empty(0, 4)), flat(5)]
    (plan,) = module.initial_layout(specs, (UNLIMITED,)).buckets
    assert [(s.offset, s.numel, s.shape) for s in plan.slots] == [
        (0, 6, (2, 3)),
        (6, 0, (0, 4)),
        (6, 5, (5,)),
    ]


# ---------------------------------------------------------------------- assignment


@st.composite
def drawn_models(draw):
    one = st.builds(
        flat,
        st.integers(0, 40),
        st.sampled_from([torch.float32, torch.float64, torch.bfloat16]),
        st.sampled_from(["cpu", "meta"]),
        st.sampled_from([False] * 4 + [True]),
    )
    specs = draw(st.lists(one, min_size=1, max_size=20))
    limit = st.one_of(st.integers(0, 300), st.just(UNLIMITED))
    limits = draw(st.lists(limit, min_size=1, max_size=4))
    return specs, limits, draw(st.permutations(range(len(specs))))


def torch_assignment(specs, limits, order):
    """(buckets, the limit each of them had) according to torch."""
    tensors = [
        torch.empty(specs[i].shape, dtype=specs[i].dtype, device=specs[i].device)
        for i in order or range(len(specs))
    ]
    sparse = [spec.sparse for spec in specs]
    return dist._compute_bucket_assignment_by_size(tensors, limits, sparse, order or [])


@given(drawn_models())
def test_initial_assignment_is_torchs(drawn):
    specs, limits, _ = drawn
    buckets, _ = torch_assignment(specs, limits, None)
    assert module.assign(specs, limits) == buckets


@given(drawn_models())
def test_rebuilt_assignment_is_torchs_up_to_the_order_of_leftovers(drawn):
    specs, limits, order = drawn
    buckets, reached = torch_assignment(specs, limits, order)
    nbytes = [sum(specs[i].nbytes for i in members) for members in buckets]
    is_closed = [n >= limit for n, limit in zip(nbytes, reached, strict=True)]
    num_closed = sum(is_closed)
    assert is_closed == sorted(is_closed, reverse=True), "leftovers come last"
    ours = module.assign(specs, limits, order)
    assert ours[:num_closed] == buckets[:num_closed]
    assert sorted(ours[num_closed:]) == sorted(buckets[num_closed:])


@given(drawn_models())
def test_layouts_tile_their_buffers(drawn):
    specs, limits, order = drawn
    layout = module.rebuilt_layout(specs, limits, order)
    for number, plan in enumerate(layout.buckets):
        members = [specs[i] for i in plan.indices]
        kinds = {(m.dtype, m.device, m.sparse) for m in members}
        assert kinds == {(plan.dtype, plan.device, plan.sparse)}
        assert plan.numel == sum(member.numel for member in members)
        assert all(layout.bucket_of[i] == number for i in plan.indices)


# --------------------------------------------------------------- coalesced messages


@pytest.mark.parametrize(
    ("sizes", "limit", "groups"),
    [
        ([], 10, []),
        ([3, 3, 3], UNLIMITED, [[0, 1, 2]]),
        ([3, 7, 1, 20, 1], 10, [[0, 1], [2, 3], [4]]),
        ([0, 10, 0], 10, [[0, 1], [2]]),
    ],
)
def test_chunks(sizes, limit, groups):
    assert module.chunks_by_bytes(sizes, limit) == groups
