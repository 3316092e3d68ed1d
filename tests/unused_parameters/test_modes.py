"""Which gradients a backward must bring: when the graph is walked."""

from __future__ import annotations

import torch

from minidp import DataParallel
from minidp.core import modes
from tests.support.both import Scalars


def test_graph_is_not_walked_while_everything_arrives(lone_group, monkeypatch):
    walks, walk = [], modes.unreachable
    monkeypatch.setattr(
        modes, "unreachable", lambda *args: walks.append(args) or walk(*args)
    )
    ddp = DataParallel(
        Scalars(2), process_group=lone_group, find_unused_parameters=True
    )
    for use, num_walks in (([0, 1], 0), ([0, 1], 0), ([0], 0), ([0], 1)):
        ddp.zero_grad()
        ddp(torch.ones(1), use).sum().backward()
        assert [p.grad is not None for p in ddp.parameters()] == [True, 1 in use]
        assert len(walks) == num_walks
