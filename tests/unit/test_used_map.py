"""The used-map: who waits for it, and when. The ranks here are made up."""

from __future__ import annotations

import pytest
import torch

from minidp import _used_map
from minidp._used_map import UsedMap
from minidp._watch import Watch


class Group:
    """What a watch asks a process group for."""

    def rank(self):
        return 0

    def size(self):
        return 2


class Exchange:
    """Another rank's part arrives when somebody waits; then it is written down."""

    def __init__(self, counts, others):
        self.counts, self.others, self.waits = counts, others, 0

    def wait(self):
        self.waits += 1
        self.counts += torch.tensor(self.others, dtype=torch.int32)
        return True

    def is_completed(self):
        return self.waits > 0

    def get_future(self):
        raise NotImplementedError


@pytest.fixture
def exchanges(monkeypatch):
    started = []

    def all_reduce(counts, group):
        started.append(Exchange(counts, [1, 0, 0]))
        return started[-1]

    monkeypatch.setattr(_used_map, "all_reduce", all_reduce)
    return started


def new_map():
    return UsedMap(3, torch.device("cpu"), Watch(Group()))


def test_a_rank_that_used_everything_does_not_wait(exchanges):
    used_map = new_map()
    used_map.launch({0, 1, 2}, Group())
    assert used_map.unused_everywhere() == frozenset()
    assert [each.waits for each in exchanges] == [0]


def test_a_rank_that_left_one_out_waits_for_what_others_used(exchanges):
    used_map = new_map()
    used_map.launch({1}, Group())
    assert used_map.unused_everywhere() == {2}
    assert [each.waits for each in exchanges] == [1]
    assert used_map.last_counts.tolist() == [1, 1, 0]
    assert [each.waits for each in exchanges] == [1]


def test_what_nobody_waited_for_is_settled_by_the_next_launch(exchanges):
    used_map = new_map()
    used_map.launch({0, 1, 2}, Group())
    used_map.unused_everywhere()
    used_map.launch({0}, Group())
    assert [each.waits for each in exchanges] == [1, 0]
    assert used_map.unused_everywhere() == {1, 2}
    assert [each.waits for each in exchanges] == [1, 1]


def test_what_nobody_waited_for_can_still_be_read(exchanges):
    used_map = new_map()
    used_map.launch({0, 1, 2}, Group())
    used_map.unused_everywhere()
    assert used_map.last_counts.tolist() == [2, 1, 1]
    assert [each.waits for each in exchanges] == [1]


def test_one_backward_launches_it_once_and_an_abandoned_forward_does_not_count(
    exchanges,
):
    used_map = new_map()
    used_map.launch({0}, Group())
    used_map.launch({0, 1, 2}, Group())
    assert len(exchanges) == 1
    used_map.relaunch({1}, Group())
    assert [each.waits for each in exchanges] == [1, 0]
    assert used_map.unused_everywhere() == {2}


def test_before_anything_is_launched_and_after_a_drop_nothing_is_known(exchanges):
    used_map = new_map()
    assert used_map.unused_everywhere() == frozenset()
    assert used_map.last_counts.tolist() == [0, 0, 0]
    used_map.launch({0}, Group())
    used_map.drop()
    assert used_map.unused_everywhere() == frozenset()
    assert used_map.last_counts.tolist() == [0, 0, 0]
    assert [each.waits for each in exchanges] == [0]
