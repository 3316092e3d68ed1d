"""Where parameters live: torch's assignment, offsets, strides, invariants."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from minidp import _layout
from minidp._layout import BucketPlan, Layout, ParamSpec, Slot
from minidp.config import UNLIMITED
from minidp.errors import InternalError

CPU = torch.device("cpu")


def spec_of(tensor, name="p", sparse=False):
    return ParamSpec(
        name, tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.device, sparse
    )


def flat(numel, dtype=torch.float32, device="cpu", sparse=False):
    return ParamSpec("p", (numel,), (1,), dtype, torch.device(device), sparse)


def slot(param_index, offset, numel):
    return Slot(param_index, offset, numel, (numel,), (1,))


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


def test_bytes():
    spec = spec_of(torch.empty(3, 5, dtype=torch.complex64))
    assert (spec.numel, spec.nbytes) == (15, 120)
    assert spec_of(torch.empty(())).nbytes == 4


# --------------------------------------------------------------------- invariants


def test_slots_must_touch():
    with pytest.raises(InternalError) as caught:
        BucketPlan((slot(4, 0, 3), slot(7, 4, 2)), torch.float32, CPU)
    assert str(caught.value) == (
        "Slot of parameter 7 starts at 4, but the slot before it ends at 3."
    )


def test_first_slot_starts_at_zero():
    with pytest.raises(InternalError, match=r"starts at 1, but .* ends at 0"):
        BucketPlan((slot(0, 1, 3),), torch.float32, CPU)


def test_bucket_without_slots_is_refused():
    with pytest.raises(InternalError, match="at least one slot"):
        BucketPlan((), torch.float32, CPU)


def test_sparse_bucket_holds_one_slot():
    with pytest.raises(
        InternalError, match=r"A sparse bucket holds one slot, .* got 2"
    ):
        BucketPlan((slot(0, 0, 3), slot(1, 3, 2)), torch.float32, CPU, sparse=True)


@pytest.mark.parametrize("members", [[[0], [0, 1]], [[0]], [[0], [2]]])
def test_every_parameter_has_one_slot(members):
    plans = [
        BucketPlan(tuple(slot(i, k, 1) for k, i in enumerate(m)), torch.float32, CPU)
        for m in members
    ]
    with pytest.raises(InternalError) as caught:
        Layout(tuple(plans), 2)
    placed = sorted(i for member in members for i in member)
    assert str(caught.value) == (
        f"2 parameters must each have one slot, but the slots hold parameters {placed}."
    )


# -------------------------------------------------------------------- the drawing


def test_the_drawing_of_the_module():
    numels = {"head.bias": 10, "head.weight": 640, "conv.bias": 16}
    numels |= {"conv.weight": 144, "bn.bias": 16}
    specs = [ParamSpec(n, (k,), (1,), torch.float32, CPU) for n, k in numels.items()]
    layout = _layout.rebuilt_layout(specs, (1024, 2048), range(5))
    first, second = layout.buckets
    assert [slot.offset for slot in first.slots] == [0, 10]
    assert [slot.offset for slot in second.slots] == [0, 16, 160]
    assert (first.numel, first.nbytes) == (650, 2600)
    assert (second.numel, second.nbytes) == (176, 704)
    for plan, line in zip(layout.buckets, drawn_buckets(), strict=True):
        assert line == (
            [(specs[slot.param_index].name, slot.numel) for slot in plan.slots],
            plan.nbytes,
        )
    assert layout.bucket_of == (0, 0, 1, 1, 1)
    assert layout.assignment == ((0, 1), (2, 3, 4))


def drawn_buckets():
    """([(name, numel)], bytes) of each bucket in the module's docstring."""
    drawn = []
    for line in _layout.__doc__.splitlines():
        if line.strip().startswith("bucket "):
            _, *slots, total = line.split("|")
            pairs = [text.split() for text in slots if text.strip()]
            members = [(name, int(numel)) for name, numel in pairs]
            drawn.append((members, int(total.split()[0].replace(",", ""))))
    return drawn


def test_first_layout_is_reversed_outside_only():
    specs = [flat(10), flat(10), flat(10), flat(10), flat(10)]
    layout = _layout.initial_layout(specs, (80,))
    assert layout.assignment == ((4,), (2, 3), (0, 1))


def test_rebuilt_layout_follows_the_ready_order():
    specs = [flat(10), flat(10), flat(10), flat(10)]
    layout = _layout.rebuilt_layout(specs, (40, 80), [3, 1, 0, 2])
    assert layout.assignment == ((3,), (1, 0), (2,))


def test_offsets_count_elements_and_zero_sized_slots_fit():
    specs = [spec_of(torch.empty(2, 3)), spec_of(torch.empty(0, 4)), flat(5)]
    (plan,) = _layout.initial_layout(specs, (UNLIMITED,)).buckets
    assert [(s.offset, s.numel, s.shape) for s in plan.slots] == [
        (0, 6, (2, 3)),
        (6, 0, (0, 4)),
        (6, 5, (5,)),
    ]


# ---------------------------------------------------------------------- assignment


def test_a_bucket_is_closed_by_what_reaches_the_limit():
    specs = [flat(10), flat(9), flat(1), flat(100), flat(1)]
    assert _layout.assign(specs, (40,)) == [[0], [1, 2], [3], [4]]


def test_last_limit_repeats():
    specs = [flat(10)] * 6
    assert _layout.assign(specs, (40, 80)) == [[0], [1, 2], [3, 4], [5]]


def test_limit_zero_gives_every_parameter_its_own_bucket():
    assert _layout.assign([flat(0), flat(3), flat(0)], (0,)) == [[0], [1], [2]]


def test_each_dtype_and_device_walks_alone():
    specs = [flat(10), flat(10, torch.float64), flat(10, device="meta"), flat(10)]
    assert _layout.assign(specs, (UNLIMITED,)) == [[0, 3], [1], [2]]
    assert _layout.assign(specs, (40, UNLIMITED)) == [[0], [1], [2], [3]]


def test_sparse_parameters_stand_alone_and_disturb_nobody():
    specs = [flat(10), flat(10, sparse=True), flat(10)]
    assert _layout.assign(specs, (80,)) == [[0, 2], [1]]
    plans = _layout.initial_layout(specs, (80,)).buckets
    assert [plan.sparse for plan in plans] == [True, False]


@dataclass(frozen=True)
class Drawn:
    specs: list[ParamSpec]
    limits: list[int]
    order: list[int]


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
    limits = draw(
        st.lists(
            st.one_of(st.integers(0, 300), st.just(UNLIMITED)), min_size=1, max_size=4
        )
    )
    return Drawn(specs, limits, draw(st.permutations(range(len(specs)))))


def torch_assignment(drawn, order):
    """(buckets, the limit each of them had) according to torch."""
    tensors = [
        torch.empty(
            drawn.specs[i].shape,
            dtype=drawn.specs[i].dtype,
            device=drawn.specs[i].device,
        )
        for i in order or range(len(drawn.specs))
    ]
    sparse = [spec.sparse for spec in drawn.specs]
    return dist._compute_bucket_assignment_by_size(
        tensors, drawn.limits, sparse, order or []
    )


@given(drawn_models())
def test_initial_assignment_is_torchs(drawn):
    buckets, _ = torch_assignment(drawn, None)
    assert _layout.assign(drawn.specs, drawn.limits) == buckets


@given(drawn_models())
def test_rebuilt_assignment_is_torchs_up_to_the_order_of_leftovers(drawn):
    buckets, limits = torch_assignment(drawn, drawn.order)
    nbytes = [sum(drawn.specs[i].nbytes for i in members) for members in buckets]
    is_closed = [n >= limit for n, limit in zip(nbytes, limits, strict=True)]
    num_closed = sum(is_closed)
    assert is_closed == sorted(is_closed, reverse=True), "leftovers come last"
    ours = _layout.assign(drawn.specs, drawn.limits, drawn.order)
    assert ours[:num_closed] == buckets[:num_closed]
    assert sorted(ours[num_closed:]) == sorted(buckets[num_closed:])


def test_leftovers_come_in_the_order_in_which_their_last_parameter_came():
    specs = [flat(1), flat(1, torch.float64), flat(1, torch.bfloat16), flat(1)]
    ours = _layout.assign(specs, (UNLIMITED,), [0, 1, 2, 3])
    assert ours == [[1], [2], [0, 3]]


@given(drawn_models())
def test_layouts_tile_their_buffers(drawn):
    layout = _layout.rebuilt_layout(drawn.specs, drawn.limits, drawn.order)
    for number, plan in enumerate(layout.buckets):
        members = [drawn.specs[i] for i in plan.indices]
        assert {(m.dtype, m.device) for m in members} == {(plan.dtype, plan.device)}
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
    assert _layout.chunks_by_bytes(sizes, limit) == groups
