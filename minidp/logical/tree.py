"""The tree in which the gradients of logical ranks are added up, as integers only.

Floating-point sums depend on their order. To have the same bits on any number of
ranks, all of them add in the order of one tree, whose leaves are the logical ranks::

    level 3                  (3, 0)                    the sum of all
    level 2         (2, 0)              (2, 1)
    level 1     (1, 0)  (1, 1)      (1, 2)   :
    level 0     0    1  2    3      4    5   6         seven logical ranks

Node ``(level, place)`` covers the logical ranks from ``place * 2**level`` on, up to
``2**level`` of them. At the right end some do not exist, and a node whose right child
is missing is its left child: here (2, 1) is the sum of (1, 2) and 6.

A rank computes a block of neighbours. It adds up whatever lies below nodes that its
block covers whole, and only those sums travel (`cover`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Generic, NamedTuple, TypeVar

Value = TypeVar("Value")


class Node(NamedTuple):
    """A node of the tree."""

    level: int
    place: int

    @property
    def first(self) -> int:
        """The first logical rank that it covers."""
        return self.place << self.level

    @property
    def parent(self) -> Node:
        """The node above it."""
        return Node(self.level + 1, self.place // 2)

    @property
    def sibling(self) -> Node:
        """The other child of its parent, which may not exist."""
        return Node(self.level, self.place ^ 1)


def root(leaves: int) -> Node:
    """Return the node that covers all of so many logical ranks."""
    return Node((leaves - 1).bit_length(), 0)


def block(leaves: int, ranks: int, rank: int) -> range:
    """Return the logical ranks that a rank computes.

    The blocks of the ranks lie side by side, and their sizes differ by at most one.
    """
    size, more = divmod(leaves, ranks)
    start = rank * size + min(rank, more)
    return range(start, start + size + (rank < more))


def cover(leaves: int, covered: Iterable[int]) -> list[Node]:
    """Return the fewest nodes that cover some logical ranks, from left to right.

    Args:
        leaves: How many logical ranks there are in all.
        covered: These, in ascending order.
    """
    sums = Sums(leaves, int.__add__)
    for leaf in covered:
        sums.add(Node(0, leaf), 1)
    return [node for node, _ in sums.open]


def adds_pairs(leaves: int, ranks: int) -> bool:
    """Return whether each rank has one sum, and there are at most two of them.

    Their sum has the same bits in any order.
    """
    covers = [cover(leaves, block(leaves, ranks, rank)) for rank in range(ranks)]
    return ranks <= 2 and all(len(nodes) == 1 for nodes in covers)


class Sums(Generic[Value]):
    """Add values in the order of the tree, while they come from left to right.

    It is a binary counter: each value is added to its left neighbour as soon as both
    are whole nodes with the same parent.

    Args:
        leaves: How many logical ranks there are in all.
        plus: Returns the sum of the values of two siblings, the left one first. It may
            reuse the memory of both.
    """

    def __init__(self, leaves: int, plus: Callable[[Value, Value], Value]) -> None:
        self._leaves, self._root, self._plus = leaves, root(leaves), plus
        # What waits for a sibling that lies further right, from left to right.
        self.open: list[tuple[Node, Value]] = []

    def add(self, node: Node, value: Value) -> None:
        """Add the value of a node, which lies right of all that came before."""
        while node != self._root:
            if node.sibling.first >= self._leaves:  # there is no right sibling
                node = node.parent
            elif self.open and self.open[-1][0] == node.sibling:
                node, value = node.parent, self._plus(self.open.pop()[1], value)
            else:
                break
        self.open.append((node, value))
