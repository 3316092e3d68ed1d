"""The used-map: who waits for it, and when. The ranks here are made up."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from minidp.comm import used_map
from minidp.comm.communicator import Communicator
from minidp.comm.used_map import UsedMap

GROUP = SimpleNamespace(rank=lambda: 0, size=lambda: 2)


class Exchange:
    """Another rank's part arrives when somebody waits; then it is written down."""

    def __init__(self, counts, others):
        self.counts, self.others, self.waits = counts, others, 0

    def wait(self):
        self.waits += 1
        self.counts += torch.tensor(self.others, dtype=torch.int32)
        return True


@pytest.fixture
def exchanges(monkeypatch):
    started = []

    def all_reduce(counts, group):
        started.append(Exchange(counts, [1, 0, 0]))
        return started[-1]

    monkeypatch.setattr(used_map, "all_reduce", all_reduce)
    return started


def new_map():
    return UsedMap(3, torch.device("cpu"), Communicator(GROUP))


def test_a_rank_that_left_one_out_waits_for_what_others_used(exchanges):
    used_map = new_map()
    used_map.launch({1})
    assert used_map.unused_everywhere() == {2}
    assert [each.waits for each in exchanges] == [1]
    assert used_map.last_counts.tolist() == [1, 1, 0]
    assert [each.waits for each in exchanges] == [1]


def test_the_next_launch_completes_an_exchange_that_was_not_needed(exchanges):
    used_map = new_map()
    used_map.launch({0, 1, 2})
    assert used_map.unused_everywhere() == frozenset()
    assert [each.waits for each in exchanges] == [0]
    used_map.launch({0})
    assert [each.waits for each in exchanges] == [1, 0]
    assert used_map.unused_everywhere() == {1, 2}
    assert used_map.last_counts.tolist() == [2, 0, 0]
    assert [each.waits for each in exchanges] == [1, 1]


def test_a_backward_launches_once_and_abandoned_forwards_do_not_count(exchanges):
    used_map = new_map()
    used_map.launch({0})
    used_map.launch({0, 1, 2})
    assert len(exchanges) == 1
    used_map.relaunch({1})
    assert [each.waits for each in exchanges] == [1, 0]
    assert used_map.unused_everywhere() == {2}


def test_before_anything_is_launched_and_after_a_drop_nothing_is_known(exchanges):
    used_map = new_map()
    assert used_map.unused_everywhere() == frozenset()
    assert used_map.last_counts.tolist() == [0, 0, 0]
    used_map.launch({0})
    used_map.drop()
    assert used_map.unused_everywhere() == frozenset()
    assert used_map.last_counts.tolist() == [0, 0, 0]
    assert [each.waits for each in exchanges] == [0]
