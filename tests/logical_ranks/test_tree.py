"""The tree of logical ranks: blocks, what they bring, in which order it is added."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from minidp.logical.averaging import order_of_sums
from minidp.logical.tree import Node, Sums, adds_pairs, block, cover, root
from minidp.shared_memory import SumOrder

sizes = st.integers(1, 40).flatmap(
    lambda leaves: st.tuples(st.just(leaves), st.integers(1, leaves))
)


def summed(leaves, values):
    """Add texts in the order of the tree, which the result shows."""
    sums = Sums(leaves, "({}+{})".format)
    for node, value in values:
        sums.add(node, value)
    return sums.open


@given(sizes)
def test_blocks_are_neighbours_of_nearly_equal_size(size):
    leaves, ranks = size
    blocks = [block(leaves, ranks, rank) for rank in range(ranks)]
    assert [leaf for each in blocks for leaf in each] == list(range(leaves))
    lengths = set(map(len, blocks))
    assert max(lengths) - min(lengths) <= 1
    assert min(lengths) > 0


@given(sizes)
def test_ranks_add_as_one_process_does(size):
    leaves, ranks = size
    every_leaf = [(Node(0, leaf), str(leaf)) for leaf in range(leaves)]
    expected = summed(leaves, every_leaf)
    assert [node for node, _ in expected] == [root(leaves)]
    pieces = []
    for rank in range(ranks):
        mine = block(leaves, ranks, rank)
        own = summed(leaves, every_leaf[mine.start : mine.stop])
        assert [node for node, _ in own] == cover(leaves, mine)
        pieces += own
    assert summed(leaves, pieces) == expected


@given(sizes)
def test_the_order_in_shared_memory_is_that_of_the_tree(size):
    leaves, ranks = size
    every_leaf = [(Node(0, leaf), str(leaf)) for leaf in range(leaves)]
    ((_, expected),) = summed(leaves, every_leaf)
    rows, nodes = [], []
    for rank in range(ranks):
        mine = block(leaves, ranks, rank)
        *apart, in_bucket = summed(leaves, every_leaf[mine.start : mine.stop])
        rows += [value for _, value in (in_bucket, *apart)]
        nodes.append(cover(leaves, mine))
    order = order_of_sums(leaves, nodes)
    assert order.counts == tuple(map(len, nodes))
    stack = []
    for word in order.postfix:
        if word == SumOrder.ADD:
            right = stack.pop()
            stack.append(f"({stack.pop()}+{right})")
        else:
            stack.append(rows[word])
    assert stack == [expected]


def test_the_tree_of_seven():
    (found,) = summed(7, [(Node(0, leaf), str(leaf)) for leaf in range(7)])
    assert found == (Node(3, 0), "(((0+1)+(2+3))+((4+5)+6))")


def test_a_block_of_two_to_the_n_is_one_piece():
    assert cover(8, range(4, 8)) == [Node(2, 1)]
    assert cover(8, range(3, 6)) == [Node(0, 3), Node(1, 2)]
    assert cover(7, range(4, 7)) == [Node(2, 1)]  # the right end


def test_two_ranks_with_one_piece_each_need_no_order():
    assert adds_pairs(8, 2)
    assert adds_pairs(3, 2)
    assert adds_pairs(5, 1)
    assert not adds_pairs(5, 2)
    assert not adds_pairs(8, 4)
