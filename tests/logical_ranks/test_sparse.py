"""Sparse gradients of logical ranks: embeddings with ``sparse=True``."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchsDDP

from minidp import DataParallel, LogicalRankError, comm
from minidp.comm import collectives
from minidp.logical.sparse_sums import add_sparse
from tests.logical_ranks.trainings import wrapped
from tests.support.both import same
from tests.support.combined import combined
from tests.support.ranks import on_ranks

STEPS = 3


class Words(nn.Module):
    """Two sparse embeddings whose outputs are added, and a dense layer."""

    def __init__(self, size, width=3):
        super().__init__()
        torch.manual_seed(0)
        self.words = nn.Embedding(size, width, sparse=True)
        self.bag = nn.EmbeddingBag(size, width, sparse=True, mode="sum")
        self.last = nn.Linear(width, 2)

    def forward(self, indices, uses=(True, True)):
        found = torch.ones(len(indices), 3, dtype=self.last.weight.dtype)
        if uses[0]:
            found = found + self.words(indices).sum(1)
        if uses[1]:
            found = found + self.bag(indices)
        return self.last(found.tanh())


def drawn(step, leaf, size, count=4):
    """Indices that repeat, of another number of words in each logical rank."""
    generator = torch.Generator().manual_seed(1000 * step + leaf)
    shape = count, 1 + (leaf + step) % 3
    return torch.randint(size, shape, generator=generator)


def parts(grad):
    """All that a sparse gradient is made of, as dense tensors."""
    if grad is None:
        return [torch.zeros(0)]
    if not grad.is_sparse:
        return [grad.clone()]
    assert grad.is_coalesced()
    return [grad.indices().clone(), grad.values().clone()]


def trained(ctx, number, *, size=6, dtype=torch.float32, **options):
    module = Words(size).to(dtype)
    model = wrapped(ctx, module, number, **options)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    found = []
    for step in range(STEPS):
        for leaf in model.each_logical_rank():
            loss = model(drawn(step, leaf, size)).abs().square().mean()
            loss.backward()
        found += [part for param in module.parameters() for part in parts(param.grad)]
        optimizer.step()
        optimizer.zero_grad()
    return [*found, *(param.detach().clone() for param in module.parameters())]


def unused(ctx, number, *, uses, **options):
    """``uses`` says for each logical rank which embeddings it uses, and over again."""
    module = Words(5)
    model = wrapped(ctx, module, number, find_unused_parameters=True, **options)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    found = []
    for step in range(STEPS):
        for leaf in model.each_logical_rank():
            used = uses[(leaf + step) % len(uses)]
            model(drawn(step, leaf, 5), used).square().mean().backward()
        found += [part for param in module.parameters() for part in parts(param.grad)]
        optimizer.step()
        optimizer.zero_grad()
    return [*found, *(param.detach().clone() for param in module.parameters())]


def items(ctx, number):
    module = Words(5)
    model = wrapped(ctx, module, number, average_over="items")
    found = []
    for step in range(STEPS):
        for leaf in model.each_logical_rank():
            count = 1 + (3 * leaf + step) % 4
            loss = model(drawn(step, leaf, 5, count)).square().mean()
            model.weigh_loss(loss, count).backward()
        found += [part for param in module.parameters() for part in parts(param.grad)]
        model.zero_grad()
    return found


def accumulates(ctx, number, *, keeps=False):
    module = Words(5)
    model = wrapped(ctx, module, number)
    for step in range(STEPS):
        for leaf in model.each_logical_rank():
            count = 1 + (leaf + step) % 3
            for micro in range(count):
                with model.no_sync() if micro < count - 1 else nullcontext():
                    x = drawn(step, 50 * leaf + micro, 5)
                    model(x).square().mean().backward()
        if not keeps:
            model.zero_grad()
    return [part for param in module.parameters() for part in parts(param.grad)]


def zeros(ctx, number, *, value, leaves):
    """The gradient of row 1 is ``value`` in some logical ranks; others lack the row."""
    module = nn.Embedding(3, 1, sparse=True)
    model = wrapped(ctx, module, number)
    for leaf in model.each_logical_rank():
        row = 1 if leaf in leaves else 2
        factor = value if leaf in leaves else 1.0
        (model(torch.tensor([row])) * factor).sum().backward()
    return parts(module.weight.grad)


def steps_inside(ctx, number):
    module = Words(5)
    model = wrapped(ctx, module, number)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    model.step_in_backward(optimizer)
    for step in range(STEPS):
        for leaf in model.each_logical_rank():
            model(drawn(step, leaf, 5)).square().mean().backward()
        optimizer.zero_grad()
    return [param.detach().clone() for param in module.parameters()]


def run(ctx, scenario, number):
    return scenario(ctx, number)


def bits(tensor):
    return tensor.contiguous().reshape(-1).view(torch.uint8).tolist()


def check(pool, scenario, number, ranks=(2, 3, 4)):
    (expected,) = pool.run(run, 1, scenario, number)
    for size in ranks:
        if size <= number:
            for found in pool.run(run, size, scenario, number):
                assert [*map(bits, found)] == [*map(bits, expected)], f"{size} ranks"
    return expected


@pytest.mark.parametrize("number", [1, 2, 3, 4, 5, 7, 8, 12])
def test_any_number_of_logical_ranks(pool, number):
    check(pool, trained, number)


SCENARIOS = {
    "float64": partial(trained, dtype=torch.float64),
    "bfloat16": partial(trained, dtype=torch.bfloat16),
    "one row": partial(trained, size=1),
    "many rows": partial(trained, size=1000),
    "views": partial(trained, gradient_as_bucket_view=True),
    "batched": partial(trained, batched_grad_copy=True),
    "finite": partial(trained, check_finite_grads=True),
    "static graph": partial(trained, static_graph=True),
    "auto": partial(trained, bucket_cap_mb="auto"),
    "unused": partial(unused, uses=[(True, False), (False, True), (True, True)]),
    "never used": partial(unused, uses=[(True, False)]),
    "skipped": partial(
        unused, uses=[(True, False)], skip_all_reduce_unused_params=True
    ),
    "items": items,
    "accumulates": accumulates,
    "keeps": partial(accumulates, keeps=True),
    "steps inside": steps_inside,
}


@pytest.mark.parametrize(("name", "number"), combined(SCENARIOS, [3, 4, 6]))
def test_features(pool, name, number):
    check(pool, SCENARIOS[name], number)


@pytest.mark.parametrize("leaves", [(0,), (0, 1), (1, 4), (0, 1, 2, 3, 4)])
@pytest.mark.parametrize("value", [0.0, -0.0])
def test_a_zero_keeps_its_sign_where_others_lack_the_row(pool, value, leaves):
    """What is not there is not added. A dense zero would make 0 of -0."""
    scenario = partial(zeros, value=value, leaves=leaves)
    indices, values = check(pool, scenario, 5)
    row = indices.tolist()[0].index(1)
    assert bits(values[row]) == bits(torch.tensor([value]))


@given(
    number=st.integers(1, 12),
    ranks=st.integers(1, 4),
    size=st.integers(1, 8),
    uses=st.lists(
        st.sampled_from([(True, True), (True, False), (False, True)]), min_size=1
    ),
    skips=st.booleans(),
)
@pytest.mark.laws
def test_random_trainings(pool, number, ranks, size, uses, skips):
    ranks = [min(ranks, number)]
    options = {"skip_all_reduce_unused_params": skips}
    check(pool, partial(unused, uses=uses, **options), number, ranks)
    check(pool, partial(trained, size=size), number, ranks)


# ------------------------------------------------------------------------ the sum


def by_ddp(ctx, wrap, options):
    module = Words(5)
    model = wrap(module, process_group=ctx.group, **options)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    found = []
    for step in range(STEPS):
        leaves = model.each_logical_rank() if options else [ctx.rank]
        for leaf in leaves:
            model(drawn(step, leaf, 5)).square().mean().backward()
        found += [part for param in module.parameters() for part in parts(param.grad)]
        optimizer.step()
        optimizer.zero_grad()
    return [*found, *(param.detach().clone() for param in module.parameters())]


def test_two_on_two_ranks_have_the_bits_of_torchs_ddp(pool):
    """Theirs are coalesced, too, which `parts` asserts."""
    theirs = pool.run(by_ddp, 2, TorchsDDP, {})
    assert same(theirs, pool.run(by_ddp, 2, DataParallel, {"logical_ranks": 2}))
    assert same(theirs[:1], pool.run(by_ddp, 1, DataParallel, {"logical_ranks": 2}))


@st.composite
def gradients(draw):
    """Sparse ones of some logical ranks, in small numbers, whose sums are exact."""
    number, size = draw(st.integers(1, 9)), draw(st.integers(1, 4))
    rows = st.lists(st.tuples(st.integers(0, size - 1), st.integers(-9, 9)))
    return size, [draw(rows) for _ in range(number)]


@given(given=gradients(), ranks=st.integers(1, 3))
def test_the_mean_is_that_of_dense_gradients(pool, given, ranks):
    size, rows = given
    for found in pool.run(of_rows, min(ranks, len(rows)), size, rows):
        expected = torch.zeros(size)
        for leaf in rows:
            for row, value in leaf:
                expected[row] += value
        assert torch.allclose(found, expected / len(rows))


def of_rows(ctx, size, rows):
    module = nn.Embedding(size, 1, sparse=True)
    model = wrapped(ctx, module, len(rows))
    for leaf in model.each_logical_rank():
        indices = torch.tensor([row for row, _ in rows[leaf]], dtype=torch.int64)
        factors = torch.tensor([value for _, value in rows[leaf]], dtype=torch.float32)
        (model(indices).squeeze(1) * factors).sum().backward()
    return module.weight.grad.to_dense().squeeze(1)


def sparse(rows, values):
    made = torch.sparse_coo_tensor(
        [rows], torch.tensor(values), (5,), check_invariants=True
    )
    return made.coalesce()


def test_a_sum_has_the_rows_of_both():
    total = add_sparse(sparse([0, 2], [1.0, -0.0]), sparse([2, 4], [-0.0, 3.0]))
    assert total.indices().tolist() == [[0, 2, 4]]
    assert bits(total.values()) == bits(torch.tensor([1.0, -0.0, 3.0]))


@on_ranks(2)
def test_messages_have_the_rows_that_there_are(ctx):
    """And not the whole table, of 16 MB."""
    module = nn.Embedding(1_000_000, 4, sparse=True)
    model = wrapped(ctx, module, 6)
    plain, sent = collectives.start_gathering, []

    def gathering(row, group, rows=None):
        sent.append(row.nbytes)
        return plain(row, group, rows)

    with mock.patch.object(comm, "start_gathering", gathering):
        for leaf in model.each_logical_rank():
            model(torch.tensor([leaf, 7])).sum().backward()
    assert module.weight.grad._nnz() == 7
    assert len(sent) == 2  # the counts, and the rows
    assert sum(sent) < 1000


# ------------------------------------------------------------------------ mistakes


class Switching(nn.Module):
    """Its gradient is dense, or sparse, as asked for."""

    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(4, 2, sparse=True)

    def forward(self, x, sparse):
        weight = self.words.weight
        return nn.functional.embedding(x, weight, sparse=sparse)


@on_ranks(2)
def test_a_dense_gradient_of_a_sparse_embedding_is_named(ctx):
    module = Switching()
    model = wrapped(ctx, module, 4)
    leaves = model.each_logical_rank()
    leaf = next(leaves)
    model(torch.tensor([leaf]), leaf % 2 == 1).sum().backward()
    with pytest.raises(LogicalRankError) as caught:
        next(leaves)
    assert "have another layout than their buckets" in str(caught.value)
    assert "words.weight (torch.strided)" in str(caught.value)
