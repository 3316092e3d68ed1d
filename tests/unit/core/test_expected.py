"""Which gradients a backward must bring: when the graph is walked, what errors say."""

from __future__ import annotations

import pytest
import torch
from torch.autograd.graph import get_gradient_edge

from minidp.core.expected import EveryParameter, FindUnused, StaticGraph
from minidp.errors import GraphChangedError, MarkedTwiceError


def test_graph_is_not_walked_while_everything_arrives(monkeypatch):
    params = [torch.nn.Parameter(torch.ones(1)) for _ in range(3)]
    nodes = [get_gradient_edge(param).node for param in params]

    def walk(*_):
        raise AssertionError("walked the graph")

    monkeypatch.setattr("minidp.core.expected.unreachable", walk)
    mode = FindUnused(3)
    for _ in range(3):
        mode.saw_outputs(params[0] * 2, nodes)
        assert mode.absent == []
        mode.ended([], ())
    mode.ended([1], ())
    with pytest.raises(AssertionError, match="walked the graph"):
        mode.saw_outputs(params[0] * 2, nodes)


@pytest.mark.parametrize(
    ("mode", "kind", "remedy"),
    [
        (EveryParameter(1), MarkedTwiceError, "checkpoint(..., use_reentrant=False)"),
        (FindUnused(1), MarkedTwiceError, "checkpoint(..., use_reentrant=False)"),
        (StaticGraph(1), GraphChangedError, "use static_graph only if every iteration"),
    ],
)
def test_a_second_arrival_names_rank_parameter_and_remedy(mode, kind, remedy):
    error = mode.twice(2, "net.weight")
    assert type(error) is kind
    assert str(error).startswith("[rank 2] ")
    for part in ("Parameters: net.weight.", remedy, "call reset() on all ranks"):
        assert part in str(error)
