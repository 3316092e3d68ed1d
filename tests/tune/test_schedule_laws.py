"""Laws of schedules: the best layout is what trying all of them finds."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minidp.costmodel import (
    Backward,
    Network,
    best_groups,
    capped_groups,
    lower_bound,
    play,
)

pytestmark = pytest.mark.laws

Groups = list[list[int]]

networks = st.builds(
    Network,
    st.sampled_from([0.0, 0.125, 1.0, 5.0]),
    st.sampled_from([0.5, 2.0, 16.0, 1024.0]),
)
# Binary fractions: sums are exact, so ties are ties.
moments = st.integers(0, 80).map(lambda eighths: eighths / 8)
sizes = st.sampled_from([0, 1, 1, 2, 3, 5, 8, 40])


@st.composite
def backwards(
    draw: st.DrawFn, most: int = 9, kinds: int = 1, least: int = 0
) -> Backward:
    ready = sorted(draw(st.lists(moments, min_size=least, max_size=most)))
    count = len(ready)
    exactly = {"min_size": count, "max_size": count}
    return Backward(
        tuple(ready),
        tuple(draw(st.lists(sizes, **exactly))),
        (ready[-1] if ready else 0.0) + draw(st.sampled_from([0.0, 0.0, 1.5, 9.0])),
        tuple(draw(st.lists(st.integers(0, kinds - 1), **exactly)))
        if kinds > 1
        else (),
    )


def partitions(items: list[int]) -> Iterator[Groups]:
    """All of them, into sets without order."""
    if not items:
        yield []
        return
    for groups in partitions(items[1:]):
        yield [[items[0]], *groups]
        for n, group in enumerate(groups):
            yield [*groups[:n], [items[0], *group], *groups[n + 1 :]]


def runs(count: int) -> Iterator[Groups]:
    """All partitions into neighbours, in order."""
    for mask in range(2 ** max(count - 1, 0)):
        groups: Groups = [[0]] if count else []
        for k in range(1, count):
            if mask >> (k - 1) & 1:
                groups.append([k])
            else:
                groups[-1].append(k)
        yield groups


def runs_of_kinds(backward: Backward) -> Iterator[Groups]:
    """All ways to cut each kind into neighbours, launched when full."""
    count = len(backward.ready_s)
    for mask in range(2**count):
        open_groups: dict[int, list[int]] = {}
        groups: Groups = []
        for k in range(count):
            kind = backward.kind(k)
            open_groups.setdefault(kind, []).append(k)
            if mask >> k & 1:
                groups.append(open_groups.pop(kind))
        if not open_groups:
            yield groups


def judged(backward: Backward, groups: Groups, network: Network) -> tuple[float, int]:
    return play(backward, groups, network).exposed_s, len(groups)


def too_many_s(backward: Backward, network: Network) -> float:
    """A message of each kind; of one kind none."""
    num_kinds = len(set(backward.kinds))
    return 1e-9 + (num_kinds > 1) * num_kinds * network.latency_s


@given(backwards(), networks)
def test_best_of_one_kind_is_the_best_of_all(backward, network):
    every = list(runs(len(backward.ready_s)))
    found = best_groups(backward, network)
    assert found in every
    assert judged(backward, found, network) == min(
        judged(backward, groups, network) for groups in every
    )


@given(backwards(most=8, kinds=3, least=1), networks)
def test_layouts_of_several_kinds_are_near_the_best(backward, network):
    """It is no exact search: a kind may cost one message too many."""
    every = list(runs_of_kinds(backward))
    found = best_groups(backward, network)
    assert found in every
    best_s = min(play(backward, groups, network).done_s for groups in every)
    done_s = play(backward, found, network).done_s
    assert done_s <= best_s + too_many_s(backward, network)


@given(backwards(most=6), networks)
def test_neighbours_in_ready_order_beat_all_other_buckets(backward, network):
    best_s = play(backward, best_groups(backward, network), network).exposed_s
    for groups in partitions(list(range(len(backward.ready_s)))):
        assert play(backward, groups, network).exposed_s >= best_s
        assert play(backward, groups[::-1], network).exposed_s >= best_s


@given(backwards(most=60, kinds=3), networks, st.lists(sizes, min_size=1, max_size=3))
def test_best_is_at_least_as_good_as_any_cap(backward, network, limits):
    best_s = play(backward, best_groups(backward, network), network).exposed_s
    groups = capped_groups(backward, limits)
    groups.sort(key=max)  # a bucket must be free to leave when it is full
    exposed_s = play(backward, groups, network).exposed_s
    assert best_s <= exposed_s + too_many_s(backward, network)


@st.composite
def layouts(draw: st.DrawFn, backward: Backward) -> Groups:
    """Any partition of the kinds, in any launch order."""
    groups: dict[tuple[int, int], list[int]] = {}
    for k in range(len(backward.ready_s)):
        number = draw(st.integers(0, 3))
        groups.setdefault((backward.kind(k), number), []).append(k)
    return draw(st.permutations(list(groups.values())))


@given(backwards(most=30, kinds=2), networks, st.data())
def test_no_layout_beats_the_bound(backward, network, data):
    groups = data.draw(layouts(backward))
    assert lower_bound(backward, network) <= play(backward, groups, network).done_s


@given(backwards(most=30, least=1), networks)
def test_the_bound_is_met_where_latency_is_free(backward, network):
    free = replace(network, latency_s=0.0)
    one_each = [[k] for k in range(len(backward.ready_s))]
    assert lower_bound(backward, free) == play(backward, one_each, free).done_s
