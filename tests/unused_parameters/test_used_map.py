"""The used-map: who waits for it, and when. The ranks here are made up."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from minidp.comm.communicator import Communicator
from minidp.core import exchange
from minidp.core.used_map import UsedMap

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

    monkeypatch.setattr(exchange, "all_reduce", all_reduce)
    return started


def new_map():
    return UsedMap("the used-map", 3, torch.device("cpu"), Communicator(GROUP))


def test_who_waits_and_when(exchanges):
    used_map = new_map()
    assert used_map.unused_everywhere() == frozenset()  # nothing was launched
    used_map.launch({1})
    used_map.launch({0, 1, 2})  # no-op in the same backward
    assert used_map.unused_everywhere() == {2}  # waits for what others used
    assert used_map.last_counts.tolist() == [1, 1, 0]
    assert [each.waits for each in exchanges] == [1]
    used_map.launch({0, 1, 2})
    assert used_map.unused_everywhere() == frozenset()  # known without waiting
    used_map.launch({0})  # completes the exchange that was not needed
    assert [each.waits for each in exchanges] == [1, 1, 0]
    used_map.relaunch({1})  # of another forward
    assert [each.waits for each in exchanges] == [1, 1, 1, 0]
    assert used_map.unused_everywhere() == {2}


def test_after_a_drop_nothing_is_known(exchanges):
    used_map = new_map()
    used_map.launch({0})
    used_map.exchange.drop()
    assert used_map.unused_everywhere() == frozenset()
    assert used_map.last_counts.tolist() == [0, 0, 0]
    assert [each.waits for each in exchanges] == [0]
