"""JSON values of ranks in a store: all, some, none of them in time."""

from __future__ import annotations

import threading
import time

import pytest
import torch.distributed as dist

from minidp.comm.groups import gather_json, post_json, read_json


def test_values_come_back_by_rank():
    store = dist.HashStore()
    post_json(store, "topic", 2, [1, {"a": None}])
    post_json(store, "topic", 0, "x")
    post_json(store, "another", 1, "no")
    assert read_json(store, "topic", range(3)) == {0: "x", 2: [1, {"a": None}]}


@pytest.mark.parametrize("ranks", [range(2), {0, 1}])
def test_waits_for_the_last_rank(ranks):
    store = dist.HashStore()
    post_json(store, "topic", 1, True)
    late = threading.Timer(0.1, post_json, (store, "topic", 0, 3))
    late.start()
    assert gather_json(store, "topic", ranks, 20.0) == {0: 3, 1: True}
    late.join()


def test_a_missing_rank_has_no_value():
    store = dist.HashStore()
    post_json(store, "topic", 1, 5)
    begun = time.monotonic()
    assert gather_json(store, "topic", range(3), 0.1) == {1: 5}
    assert 0.1 < time.monotonic() - begun < 10
