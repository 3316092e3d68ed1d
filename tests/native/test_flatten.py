"""The compiled copies give torch's bits, and write nothing else."""

from __future__ import annotations

import contextlib
import gc
import math
import sys
import weakref
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from minidp import DataParallel
from minidp.core.grad_hooks import GradState

REALS = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
COMPLEX = [torch.complex64, torch.complex128]
DTYPES = [*REALS, *COMPLEX]
INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}
SCALES = [1.0, 1 / 2, 1 / 3, 1 / 7]
GUARD = 3  # elements that nobody may touch, between two tensors
all_dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d)[6:])

# --------------------------------------------------------------- tensors and oracles


@dataclass(frozen=True)
class Place:
    """Where a tensor lies: ``skip`` elements behind the guard of the one before."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    skip: int = 0

    @property
    def extent(self) -> int:
        if 0 in self.shape:
            return 0
        pairs = zip(self.shape, self.stride, strict=True)
        return 1 + sum((n - 1) * stride for n, stride in pairs)


def dense(shape, order=None, *, step=1, skip=0):
    """A place whose dimensions are stored in an order, the last one innermost."""
    strides = [0] * len(shape)
    for dim in reversed(order if order is not None else range(len(shape))):
        strides[dim] = step
        step *= max(shape[dim], 1)
    return Place(tuple(shape), tuple(strides), skip)


def arena_for(places, dtype, seed):
    """(1-D memory full of values, one tensor per place)."""
    offsets, end = [], GUARD
    for place in places:
        offsets.append(end + place.skip)
        end = offsets[-1] + place.extent + GUARD
    arena = values(end, dtype, seed)
    return arena, windows(arena, places, offsets), offsets


def windows(arena, places, offsets):
    return [
        arena.as_strided(place.shape, place.stride, offset)
        for place, offset in zip(places, offsets, strict=True)
    ]


def values(numel, dtype, seed):
    """Random numbers of all magnitudes, every fourth of them special."""
    if dtype.is_complex:
        real = values(2 * numel, dtype.to_real(), seed)
        return torch.view_as_complex(real.view(numel, 2))
    generator = torch.Generator().manual_seed(seed)
    info = torch.finfo(dtype)
    tiny = info.smallest_normal
    special = [0.0, -0.0, math.inf, -math.inf, math.nan]
    special += [info.max, -info.max, tiny, -tiny, tiny / 2, -tiny / 4]
    table = torch.tensor(special, dtype=torch.float64)
    drawn = torch.randn(numel, generator=generator, dtype=torch.float64)
    drawn *= 2.0 ** torch.randint(-20, 15, (numel,), generator=generator)
    chosen = torch.randint(0, 4 * len(special), (numel,), generator=generator)
    index = chosen.clamp(max=len(special) - 1)
    return torch.where(chosen < len(special), table[index], drawn).to(dtype)


def bits_of(tensor):
    real = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    return real, real.contiguous().view(INTEGERS[real.itemsize])


def assert_same_bits(found, expected):
    """Equal bit patterns; which NaN it is does not matter."""
    assert found.dtype == expected.dtype
    assert found.shape == expected.shape
    (found, found_bits), (expected, bits) = bits_of(found), bits_of(expected)
    both_nan = found.isnan() & expected.isnan()
    wrong = (found_bits != bits) & ~both_nan
    assert not wrong.any(), (found[wrong], expected[wrong], wrong.nonzero())


def reference_flatten(view, grad, scale):
    """The specification."""
    if scale == 1:
        view.copy_(grad)
    else:
        torch.mul(grad, scale, out=view)


# -------------------------------------------------------------------------- examples

SHAPES = st.one_of(
    st.lists(st.integers(0, 4), max_size=5),
    st.lists(st.integers(1, 3), min_size=4, max_size=5),
    st.integers(0, 200).map(lambda n: [n]),  # several SIMD registers and a tail
    st.tuples(st.integers(1, 40), st.integers(1, 40)).map(list),
).map(tuple)
KINDS = ["contiguous", "transposed", "any order", "channels_last", "holes", "odd ones"]


@st.composite
def places(draw, shape, *, kinds=tuple(KINDS)):
    kind = draw(st.sampled_from(kinds))
    dims = list(range(len(shape)))
    if kind == "transposed":
        dims.reverse()
    elif kind == "any order":
        dims = draw(st.permutations(dims))
    elif kind == "channels_last" and len(shape) > 2:
        dims.append(dims.pop(1))
    step = draw(st.integers(2, 3)) if kind == "holes" else 1
    place = dense(shape, dims, step=step, skip=draw(st.integers(0, 3)))
    strides = list(place.stride)
    for dim, numel in enumerate(shape):
        if (kind == "odd ones" and numel == 1) or (
            kind == "expanded" and draw(st.booleans())
        ):
            strides[dim] = draw(st.integers(0, 17)) if numel == 1 else 0
    return Place(place.shape, tuple(strides), place.skip)


@st.composite
def pairs(draw, *, grad_kinds=(*KINDS, "expanded")):
    """Some shapes, and two places for each: of the view, of the gradient."""
    shapes = draw(st.lists(SHAPES, min_size=1, max_size=5))
    made = []
    for shape in shapes:
        view = draw(places(shape))
        is_alike = draw(st.booleans())  # the fast path, else mostly torch's
        grad = draw(places(shape, kinds=grad_kinds))
        made.append((view, view if is_alike else grad))
    return made


def lazy(grad, is_lazy):
    if not is_lazy:
        return grad
    return grad.conj() if grad.is_complex() else torch._neg_view(grad)


seeds = st.integers(0, 2**32)
scales = st.sampled_from(SCALES)
flags = st.lists(st.sampled_from([False, False, False, True]), min_size=5, max_size=5)


# -------------------------------------------------------------------------- the bits


def check_copies(library, pairs, dtype, scale, *, seed=1, is_lazy=(), device="cpu"):
    """Copy gradients to views and back; also between the tensors no bit may differ.

    Args:
        library: the extension.
        pairs: places of views and of gradients.
        dtype: of all of them.
        scale: factor for gradients.
        is_lazy: which gradients are lazily negated or conjugated.
        device: where.
    """
    of_views, of_grads = zip(*pairs, strict=True)
    arena, _, offsets = arena_for(of_views, dtype, seed)
    sources, _, where = arena_for(of_grads, dtype, seed + 1)
    arena, sources = arena.to(device), sources.to(device)
    flags = [*is_lazy, *[False] * len(pairs)]

    def grads_in(memory):
        found = windows(memory, of_grads, where)
        return [lazy(g, flag) for g, flag in zip(found, flags, strict=False)]

    views, grads = windows(arena, of_views, offsets), grads_in(sources)
    expected, before = arena.clone(), sources.clone()
    for view, grad in zip(windows(expected, of_views, offsets), grads, strict=True):
        reference_flatten(view, grad, scale)
    assert library.flatten(views, grads, scale) is None
    assert_same_bits(arena, expected)
    assert_same_bits(sources, before)
    if any(0 in grad.stride() and grad.numel() > 1 for grad in grads):
        return  # expanded: cannot be written to
    for grad, view in zip(grads_in(before), views, strict=True):
        grad.copy_(view)
    versions = [grad._version for grad in grads]
    assert library.unflatten(grads, views) is None
    assert_same_bits(sources, before)
    assert_same_bits(arena, expected)
    assert all(g._version > v for g, v in zip(grads, versions, strict=True))


@given(pairs(), st.sampled_from(DTYPES), scales, flags, seeds)
def test_copies_have_torchs_bits(library, pairs, dtype, scale, is_lazy, seed):
    check_copies(library, pairs, dtype, scale, seed=seed, is_lazy=is_lazy)


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("dtype", REALS, ids=lambda d: str(d)[6:])
def test_every_offset_and_length(library, dtype, scale):
    """Around the width of a register, where a loop has its tail."""
    places = [(dense((n,), skip=n % 4), dense((n,), skip=1)) for n in range(70)]
    check_copies(library, places, dtype, scale)


def check_bits(library, grad):
    for scale in SCALES:
        view, expected = torch.empty_like(grad), torch.empty_like(grad)
        reference_flatten(expected, grad, scale)
        library.flatten([view], [grad], scale)
        assert_same_bits(view, expected)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_all_half_precision_numbers(library, dtype):
    check_bits(library, torch.arange(-(2**15), 2**15, dtype=torch.int16).view(dtype))


@given(seeds, st.sampled_from([torch.float32, torch.float64]))
def test_any_bit_pattern_is_rounded_as_torch_does(library, seed, dtype):
    generator = torch.Generator().manual_seed(seed)
    bits = torch.randint(-(2**63), 2**63 - 1, (500,), generator=generator)
    check_bits(library, bits.view(dtype))


@all_dtypes
def test_as_many_threads_as_you_like(library, dtype):
    """Small tensors, then two that several threads share, then one with odd strides."""
    placed = [dense((n,), skip=1) for n in (5, 700_001, 3, 900_007, 11)]
    placed += [dense((300, 500), (1, 0))]
    _, grads, _ = arena_for([dense(p.shape) for p in placed], dtype, 1)
    before = torch.get_num_threads()
    results = []
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            arena, views, _ = arena_for(placed, dtype, 2)
            library.flatten(views, grads, 1 / 7)
            results.append(arena)
    finally:
        torch.set_num_threads(before)
    assert_same_bits(*results)


# ----------------------------------------------------------------------------- slots


class Wrapped(torch.Tensor):
    """A tensor whose operations are Python's business (as DTensor's are)."""

    @staticmethod
    def __new__(cls, inner):
        made = torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)
        made.inner = inner
        return made

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        args = [a.inner if isinstance(a, Wrapped) else a for a in args]
        found = func(*args, **(kwargs or {}))
        # detach() must give the same type, or it is no Parameter.
        return Wrapped(found) if func is torch.ops.aten.detach.default else found


SHAPES_OF_SLOTS = [(3, 4), (5,), ()]
UNFIT = {
    "dtype": lambda: torch.ones(5, dtype=torch.float64),
    "half": lambda: torch.ones(5, dtype=torch.bfloat16),
    "shape": lambda: torch.ones(4),
    "dimensions": lambda: torch.ones(1, 5),
    "broadcast": lambda: torch.ones(1),
    "sparse": lambda: torch.ones(5).to_sparse(),
    "meta": lambda: torch.ones(5, device="meta"),
    "subclass": lambda: Wrapped(torch.ones(5)),
}
COPIED = GradState.COPIED
unfit = pytest.mark.parametrize("unfit", UNFIT)
as_views = pytest.mark.parametrize("as_view", [False, True])
divisors = pytest.mark.parametrize("divisor", [1, 2, 3, 7])


class Case:
    """A bucket of three slots between guards, filled with 7; gradients are random."""

    def __init__(self, library, *, as_view=False, dtype=torch.float32, params=None):
        sizes = [math.prod(shape) for shape in SHAPES_OF_SLOTS]
        self.arena = torch.full((sum(sizes) + 2 * GUARD,), 7.0, dtype=dtype)
        self.values = self.arena[GUARD:-GUARD]
        parts = zip(self.values.split(sizes), SHAPES_OF_SLOTS, strict=True)
        self.views = [part.view(shape) for part, shape in parts]
        zeros = (torch.zeros(shape, dtype=dtype) for shape in SHAPES_OF_SLOTS)
        self.params = params or [nn.Parameter(zero) for zero in zeros]
        self.grads = [torch.randn(s, dtype=dtype) for s in SHAPES_OF_SLOTS]
        self.slots = library.Slots(
            self.params, self.views, self.values, as_view=as_view
        )
        if params is None:
            self.give(self.grads)

    def give(self, grads):
        for param, grad in zip(self.params, grads, strict=True):
            param.grad = grad

    @contextlib.contextmanager
    def untouched(self):
        """Neither the buffer nor any .grad changes."""
        arena, version = self.arena.clone(), self.arena._version
        grads = [p.grad for p in self.params]
        copies = [None if is_opaque(g) else g.clone() for g in grads]
        yield
        assert torch.equal(self.arena, arena)
        assert self.arena._version == version
        for param, grad, copy in zip(self.params, grads, copies, strict=True):
            assert param.grad is grad
            assert copy is None or torch.equal(grad, copy)

    def assert_guards(self):
        assert self.arena[:GUARD].tolist() == [7] * GUARD
        assert self.arena[-GUARD:].tolist() == [7] * GUARD


def is_opaque(grad):
    if grad is None or grad.is_meta or isinstance(grad, Wrapped):
        return True
    return grad.layout is not torch.strided


@unfit
@as_views
@divisors
def test_slots_refuse_unfit_gradients(library, unfit, as_view, divisor):
    case = Case(library, as_view=as_view)
    entries = [case.grads[0], UNFIT[unfit](), case.grads[2]]
    with case.untouched():
        assert case.slots.flatten(entries, divisor) is False
        with torch.no_grad():
            assert case.slots.copy_now(1, UNFIT[unfit](), 1 / divisor) is False


@unfit
def test_slots_unflatten_refuses(library, unfit):
    """The parameter was changed behind the bucket's back, as was its gradient."""
    params = [nn.Parameter(torch.zeros(s)) for s in SHAPES_OF_SLOTS]
    grad = UNFIT[unfit]()
    params[1] = params[1] if unfit == "sparse" else nn.Parameter(UNFIT[unfit]())
    case = Case(library, params=params)
    case.give([case.grads[0], grad, case.grads[2]])
    with case.untouched():
        assert case.slots.unflatten(case.grads) is False


def test_slots_refuse_gradients_with_a_history(library):
    case = Case(library)
    tracked = torch.ones(5, requires_grad=True) * 2
    entries = [case.grads[0], tracked, case.grads[2]]
    case.give(entries)
    with case.untouched():
        assert case.slots.flatten(entries, 2) is False
        assert case.slots.unflatten(entries) is False
        assert case.slots.copy_now(1, tracked, 0.5) is False
        # Python decides for itself whether grad mode means create_graph here.
        assert case.slots.copy_now(1, case.grads[1], 0.5) is False
    with torch.no_grad():
        assert case.slots.flatten(entries, 2) is True
        assert case.slots.copy_now(1, tracked, 0.25) is True
    assert case.views[1].tolist() == [0.5] * 5


def test_slots_refuse_what_lies_in_the_buffer(library):
    """A view in another tensor object, or a part of another slot."""
    case = Case(library, as_view=True)
    for alias in (case.views[1].view(5), case.values[3:8], case.values[-5:]):
        entries = [case.grads[0], alias, case.grads[2]]
        with case.untouched(), torch.no_grad():
            assert case.slots.flatten(entries, 3) is False
            assert case.slots.copy_now(1, alias, 0.5) is False
            assert case.slots.copy_now(1, case.views[1], 0.5) is False
    # Beside the buffer is not in it.
    beside = torch.cat([case.values, torch.ones(5)])[-5:]
    assert case.slots.flatten([case.grads[0], beside, case.grads[2]], 1) is True
    without = Case(library)
    with without.untouched(), torch.no_grad():
        assert without.slots.flatten(without.views, 3) is False
        assert without.slots.copy_now(0, without.views[0], 0.5) is False


@all_dtypes
@as_views
@divisors
def test_slots_everyday(library, dtype, as_view, divisor):
    case = Case(library, as_view=as_view, dtype=dtype)
    before = case.values._version
    assert case.slots.flatten(case.grads, divisor) is True
    assert case.values._version > before
    for view, grad in zip(case.views, case.grads, strict=True):
        assert_same_bits(view, grad * (1.0 / divisor) if divisor != 1 else grad)
    case.values.mul_(2)
    versions = [grad._version for grad in case.grads]
    assert case.slots.unflatten(case.grads) is True
    for k, (param, view) in enumerate(zip(case.params, case.views, strict=True)):
        assert torch.equal(param.grad, view)
        assert param.grad is (view if as_view else case.grads[k])
        assert as_view or case.grads[k]._version > versions[k]
    case.assert_guards()


@pytest.mark.parametrize("dtype", REALS, ids=lambda d: str(d)[6:])
@divisors
def test_in_place_divides_truly(library, dtype, divisor):
    case = Case(library, as_view=True, dtype=dtype)
    case.values.copy_(torch.arange(1, 19))
    expected, version = case.values / divisor, case.values._version
    reciprocal = case.values * (1.0 / divisor)
    assert case.slots.flatten(case.views, divisor) is True
    assert case.values._version > version or divisor == 1
    assert_same_bits(case.values, expected)
    if divisor == 3 and dtype in (torch.float32, torch.float64):
        assert not torch.equal(expected, reciprocal)
    case.assert_guards()


@pytest.mark.parametrize("k", range(3))
def test_slots_do_not_take_foreign_gradients_away(library, k):
    case = Case(library, as_view=True)
    arrived = [grad.clone() for grad in case.grads]
    arrived[:k] = case.views[:k]
    case.give([*arrived[:k], case.grads[k], *arrived[k + 1 :]])
    with case.untouched():
        assert case.slots.unflatten(arrived) is False


# --------------------------------------------------------------------- through minidp


def test_alone_a_change_while_the_bucket_travels_is_undone(lone_group, library):
    """On one rank, too, what the all-reduce brings replaces what is in .grad."""
    module = nn.Linear(2, 2, bias=False)
    ddp = DataParallel(module, process_group=lone_group)
    bucket = ddp._reducer.queue.buckets[0]
    for edit in (lambda g: g.mul_(7), lambda g: g.data.mul_(7)):
        module.weight.grad = torch.ones(2, 2)
        bucket.flatten([module.weight.grad], ddp._reducer.queue.averaging.factors)
        edit(module.weight.grad)
        bucket.launch(ddp._reducer.queue.averaging, is_last=True)
        bucket.wait("waiting")
        bucket.copy_out()
        assert (module.weight.grad == 1).all()


def test_a_copy_at_once_is_let_go_with_its_backward(lone_group):
    """Also if Python ends the backward, because of a parameter that nobody used."""
    module = nn.ModuleList([nn.Linear(300, 300), nn.Linear(3, 3)])
    ddp = DataParallel(module, process_group=lone_group, find_unused_parameters=True)
    module.forward = module[0].forward
    ddp(torch.ones(1, 300)).sum().backward()
    grad = weakref.ref(module[0].weight.grad)
    module.zero_grad(set_to_none=True)
    gc.collect()
    assert grad() is None


# ------------------------------------------------- sums that go to the gradients

SIZES = [100_000, 1, 17, 65_536, 3, 40_961]  # more than 256 KiB, also of 16 bits
HUGE = [1_500_000, 20 * 2**20]  # no last-level cache holds it; the copies bypass it
on_linux = pytest.mark.skipif(sys.platform != "linux", reason="memfd_create")


@on_linux
@pytest.mark.parametrize("scale", [1.0, 0.3])
@pytest.mark.parametrize("is_replaced", [False, True])
@pytest.mark.parametrize(
    ("sizes", "dtype"), [*((SIZES, dtype) for dtype in REALS), (HUGE, REALS[0])]
)
def test_sums_go_to_the_gradients(library, sizes, dtype, is_replaced, scale):
    """Where a gradient was replaced after the wait, the buffer has the sums."""
    memory = library.SharedMemory(
        0, 1, [(sum(sizes), dtype, None, ())]
    )  # the sum of one rank
    buffer = memory.buffer(0)
    params = [torch.zeros(size, dtype=dtype) for size in sizes]
    for param in params:
        param.grad = torch.zeros_like(param)
    views = list(buffer.split(sizes))
    slots = library.Slots(params, views, buffer, as_view=False)
    expected = torch.randn(sum(sizes)).to(dtype)
    with torch.no_grad():
        assert slots.flatten([each.clone() for each in expected.split(sizes)], 1)
        assert torch.equal(buffer, expected)
        assert slots.offer_tiles(scale)
        memory.post(0)
        assert memory.wait(0, 1.0, slots)
        expected *= scale
        before = [param.grad for param in params]
        assert torch.equal(torch.cat(before), expected)
        buffer.fill_(-1)  # not what `unflatten` copies, unless a gradient was replaced
        if is_replaced:
            params[1].grad = torch.zeros_like(params[1])
        versions = [param.grad._version for param in params]
        assert slots.unflatten([None] * len(sizes), scale=scale)
        assert slots.is_scaled is is_replaced
    found = [param.grad for param in params]
    assert torch.equal(torch.cat(found), expected)
    assert [grad._version for grad in found] == [old + 1 for old in versions]
    assert torch.equal(buffer, expected) == is_replaced
    assert all(a is b for a, b in zip(before, found, strict=True)) != is_replaced


@on_linux
def test_no_sums_go_to_unusual_gradients(library):
    numel = 100_000
    memory = library.SharedMemory(0, 1, [(numel, torch.float32, None, ())])
    buffer, param = memory.buffer(0), torch.zeros(numel)
    slots = library.Slots([param], [buffer.view(-1)], buffer, as_view=False)
    for grad in (None, torch.zeros(2 * numel)[::2], torch.zeros(numel).double()):
        param.grad = None
        with contextlib.suppress(RuntimeError):  # torch refuses another dtype
            param.grad = grad
        with torch.no_grad():
            assert not slots.offer_tiles()
    param.grad = torch.zeros(numel)
    assert not slots.offer_tiles()  # with a history
    as_view = library.Slots([param], [buffer.view(-1)], buffer, as_view=True)
    with torch.no_grad():
        assert not as_view.offer_tiles()
