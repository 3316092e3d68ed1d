"""Sums in shared memory in an order that the caller gives."""

from __future__ import annotations

import os
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from minidp import native
from minidp.comm.communicator import Communicator
from minidp.shared_memory import BufferShape, SumOrder, share
from tests.shared_memory.test_sums import CPU, MEBI, TYPES, values

pytestmark = [
    pytest.mark.usefixtures("library"),  # skips without a compiler
    pytest.mark.skipif(
        "0" in map(os.environ.get, ("MINIDP_NATIVE", "MINIDP_SHARED_MEMORY")),
        reason="MINIDP_NATIVE=0 or MINIDP_SHARED_MEMORY=0: ranks must not share memory",
    ),
]

ADD = SumOrder.ADD


class Case(NamedTuple):
    """Buffers, and in which order each is added up."""

    counts: tuple[int, ...]
    postfix: tuple[int, ...]
    shapes: list[tuple[int, torch.dtype]]

    @property
    def order(self) -> SumOrder:
        """The order, for all of the buffers."""
        return SumOrder(self.counts, self.postfix)


@st.composite
def cases(draw: st.DrawFn, sizes: st.SearchStrategy[int]) -> Case:
    """Any tree over any number of rows, in any order of the rows."""
    size = draw(sizes)
    counts = tuple(draw(st.integers(1, 6)) for _ in range(size))
    parts = [[row] for row in draw(st.permutations(range(sum(counts))))]
    leans = draw(st.sampled_from(["left", "right", "anywhere"]))
    while len(parts) > 1:
        last = len(parts) - 2
        at = {"left": 0, "right": last}.get(leans)
        if at is None:
            at = draw(st.integers(0, last))
        parts[at : at + 2] = [[*parts[at], *parts[at + 1], ADD]]
    # Pieces are of 128 KiB, and what is summed at once of 1024 elements or less.
    numel = st.one_of(
        st.integers(0, 300),
        st.integers(1, MEBI // 8),
        st.builds(lambda n, d: n * 1024 + d, st.integers(1, 70), st.integers(-3, 3)),
    )
    shapes = draw(
        st.lists(st.tuples(numel, st.sampled_from(TYPES)), min_size=1, max_size=3)
    )
    return Case(counts, tuple(parts[0]), shapes)


def rows_of(case: Case, k: int, turn: int) -> list[torch.Tensor]:
    """Return the rows of all ranks of a buffer, which each rank can make by itself."""
    return [
        values(case.shapes[k], 1000 * turn + 100 * k + row)
        for row in range(sum(case.counts))
    ]


def added_up(rows: list[torch.Tensor], postfix: tuple[int, ...]) -> torch.Tensor:
    stack = []
    for word in postfix:
        if word == ADD:
            right = stack.pop()
            stack[-1] += right
        else:
            stack.append(rows[word].clone())
    (total,) = stack
    return total


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.uint8)


def wrong_buffers(ctx: Any, case: Case) -> list[str]:
    """Sum each buffer twice; return what is wrong on this rank."""
    shapes = [BufferShape(*shape, case.order) for shape in case.shapes]
    # One in Gloo's order between them, as the maps of used parameters are.
    shapes.append(BufferShape(10, torch.int32))
    buffers = share(shapes, Communicator(ctx.group), CPU)
    assert not isinstance(buffers, str), buffers
    first = sum(case.counts[: ctx.rank])
    found = []
    for turn in range(2):
        works = []
        for k in range(len(case.shapes)):
            mine = rows_of(case, k, turn)[first : first + case.counts[ctx.rank]]
            rows = [buffers[k].values, *buffers[k].apart]
            for row, value in zip(rows, mine, strict=True):
                row.copy_(value)
            works.append(buffers[k].all_reduce())
        buffers[-1].values.fill_(ctx.rank)
        works.append(buffers[-1].all_reduce())
        for work in works:
            work.wait()
        for k in range(len(case.shapes)):
            everything = rows_of(case, k, turn)
            expected = added_up(everything, case.postfix)
            if not torch.equal(bits(buffers[k].values), bits(expected)):
                found.append(f"buffer {k}")
            mine = everything[first + 1 : first + case.counts[ctx.rank]]
            for row, value in zip(buffers[k].apart, mine, strict=True):
                if not torch.equal(bits(row), bits(value)):
                    found.append(f"a row of {k}")
        if buffers[-1].values.tolist() != [sum(range(len(case.counts)))] * 10:
            found.append("the one in Gloo's order")
    return found


@given(case=cases(st.integers(2, 4)))
def test_the_bits_of_any_tree(pool, case):
    size = len(case.counts)
    assert pool.run(wrong_buffers, size, case) == [[]] * size


def wrong_shares(ctx: Any, case: Case, cuts: list[list[float]]) -> list[str]:
    """Sum shares of each buffer, and give values meanwhile; return what is wrong."""
    every_bound = [
        (0, *sorted(int(cut * numel) for cut in each), numel)
        for each, (numel, _) in zip(cuts, case.shapes, strict=True)
    ]
    shapes = [
        BufferShape(*shape, case.order, bounds)
        for shape, bounds in zip(case.shapes, every_bound, strict=True)
    ]
    buffers = share(shapes, Communicator(ctx.group), CPU)
    assert not isinstance(buffers, str), buffers
    first = sum(case.counts[: ctx.rank])
    found = []
    for k, (buffer, bounds) in enumerate(zip(buffers, every_bound, strict=True)):
        mine = rows_of(case, k, 0)[first : first + case.counts[ctx.rank]]
        for row, value in zip([buffer.values, *buffer.apart], mine, strict=True):
            row.copy_(value)
        buffer.given(ctx.rank).fill_(ctx.rank + 1)
        sums, values_of_all = buffer.all_reduce(), buffer.give()
        sums.wait()
        values_of_all.wait()
        expected = added_up(rows_of(case, k, 0), case.postfix)
        own = slice(bounds[ctx.rank], bounds[ctx.rank + 1])
        mine[0][own] = expected[own]  # and nothing else has changed
        rows = [buffer.values, *buffer.apart]
        found += [
            f"row {number} of buffer {k}"
            for number, (row, value) in enumerate(zip(rows, mine, strict=True))
            if not torch.equal(bits(row), bits(value))
        ]
        for rank in range(ctx.world_size):
            if not buffer.given(rank).eq(rank + 1).all():
                found.append(f"what rank {rank} gives in buffer {k}")
    return found


@given(case=cases(st.integers(2, 4)), data=st.data())
def test_shares_of_any_tree(pool, case, data):
    """A rank gets the sums of its share, and what others bring stays as it is."""
    size = len(case.counts)
    a_bound = st.floats(0, 1)
    some = st.lists(a_bound, min_size=size - 1, max_size=size - 1)
    cuts = [data.draw(some) for _ in case.shapes]
    assert pool.run(wrong_shares, size, case, cuts) == [[]] * size


@given(case=cases(st.just(1)))
def test_the_bits_of_any_tree_of_one_rank(case):
    library = native.library()
    order = library.SumOrder(case.counts, case.postfix)
    memory = library.SharedMemory(0, 1, [(*shape, order, ()) for shape in case.shapes])
    for k in range(len(case.shapes)):
        rows = rows_of(case, k, 0)
        for number, row in enumerate(rows):
            memory.buffer(k, number).copy_(row)
        memory.post(k)
        assert memory.wait(k, 0.0)
        expected = added_up(rows, case.postfix)
        assert torch.equal(bits(memory.buffer(k)), bits(expected))


def complex_sum(ctx: Any) -> bool:
    order = SumOrder((1, 2, 1), (3, 1, ADD, 0, 2, ADD, ADD))
    shape = BufferShape(1001, torch.complex64, order)
    (buffer,) = share([shape], Communicator(ctx.group), CPU)
    torch.manual_seed(ctx.rank)
    rows = [torch.view_as_real(torch.randn(1001, dtype=shape.dtype)) for _ in range(2)]
    pairs = zip([buffer.values, *buffer.apart], rows, strict=False)
    for row, value in pairs:
        row.copy_(value.view(-1))
    mine = [each.clone() for each in (buffer.values, *buffer.apart)]
    gathered: list[Any] = [None] * 3
    torch.distributed.all_gather_object(gathered, mine, group=ctx.group)
    everything = [row for of_rank in gathered for row in of_rank]
    buffer.all_reduce().wait()
    return torch.equal(buffer.values, added_up(everything, order.postfix))


def test_complex_numbers_are_pairs(pool):
    assert pool.run(complex_sum, 3) == [True] * 3


@pytest.mark.parametrize(
    ("counts", "postfix"),
    [
        ((1, 1), (0, 1)),  # two sums are left
        ((1, 1), (0, 0, ADD)),  # row 1 is missing
        ((1, 1), (0, 2, ADD)),  # there is no row 2
        ((1, 1), (0, ADD, 1)),  # there is nothing to add
        ((1, 0), (0,)),  # a rank without a buffer
        ((1, 1), ()),
        ((65,), (*range(65), *[ADD] * 64)),  # too many at once
    ],
)
def test_what_is_no_order_is_refused(counts, postfix):
    with pytest.raises(ValueError, match="not an order in which all rows are added"):
        native.library().SumOrder(counts, postfix)


def test_an_order_is_for_a_number_of_ranks():
    library = native.library()
    order = library.SumOrder((1, 1), (0, 1, ADD))
    with pytest.raises(ValueError, match="another number of ranks"):
        library.SharedMemory(0, 3, [(10, torch.float32, order, ())])
    memory = library.SharedMemory(0, 2, [(10, torch.float32, order, ())])
    with pytest.raises(ValueError, match="no such row"):
        memory.buffer(0, 1)
