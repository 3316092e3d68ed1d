"""Which gradients a backward must bring, per mode."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch.autograd.graph import get_gradient_edge

from minidp.config import BucketCaps, ReducerConfig
from minidp.core.expected import (
    EveryParameter,
    FindUnused,
    StaticGraph,
    expectation_for,
)
from minidp.core.grad_hooks import GradState
from minidp.errors import GraphChangedError, MarkedTwiceError

UNSET, COUNTED = GradState.UNSET, GradState.COUNTED


@pytest.mark.parametrize(
    ("find_unused", "static_graph", "kind"),
    [
        (False, False, EveryParameter),
        (True, False, FindUnused),
        (False, True, StaticGraph),
        (True, True, StaticGraph),
    ],
)
def test_modes(find_unused, static_graph, kind):
    options = {"find_unused_parameters": find_unused, "static_graph": static_graph}
    mode = expectation_for(3, ReducerConfig(BucketCaps(1, 1), **options))
    assert type(mode) is kind
    assert mode.shares_used_map == mode.fills_in_missing == (find_unused | static_graph)
    mode.ended([], ())
    assert mode.shares_used_map == mode.fills_in_missing == (kind is FindUnused)
    mode = expectation_for(3, ReducerConfig(BucketCaps(1, 1), **options))
    mode.shadowed([], ())  # other ranks have exchanged their maps; this one counts on
    assert mode.shares_used_map == (kind is FindUnused)
    assert mode.fills_in_missing == (find_unused | static_graph)


@pytest.mark.parametrize("usual", [UNSET, GradState.VIA_REDUCER])
def test_usual_entries(usual):
    for mode in (EveryParameter(3), FindUnused(3)):
        assert mode.entries(usual) == [usual] * 3
        assert list(mode.absent) == []


# ---------------------------------------------------------------------- find unused


@pytest.fixture
def params():
    return [torch.nn.Parameter(torch.ones(1)) for _ in range(3)]


@pytest.fixture
def nodes(params):
    return [get_gradient_edge(param).node for param in params]


def test_graph_is_not_walked_while_everything_arrives(params, nodes, monkeypatch):
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


def test_absent_is_missing_last_time_and_out_of_reach_now(params, nodes):
    mode = FindUnused(3)
    mode.saw_outputs(params[0] * 2, nodes)
    assert mode.absent == []  # nothing is known yet
    mode.ended([2, 1], ())
    mode.saw_outputs(params[0] * 2, nodes)
    assert mode.absent == [1, 2]
    mode.saw_outputs(params[0] * params[1], nodes)
    assert mode.absent == [2]
    mode.saw_outputs(params[1] * params[2], nodes)  # 0 is out of reach, but was there
    assert mode.absent == []
    mode.ended([], ())
    mode.saw_outputs(params[0] * 2, nodes)
    assert mode.absent == []


# --------------------------------------------------------------------- static graph


def arrive(mode, arrivals, num_params=4):
    """The entries after hooks of these parameters fired; all were COUNTED."""
    entries = [COUNTED] * num_params
    reducer = SimpleNamespace(
        pending=SimpleNamespace(entries=entries),
        contexts=SimpleNamespace(has_gradient=lambda i: True),
        ledger=SimpleNamespace(used_locally=set()),
    )
    for i in arrivals:
        assert not mode.takes(i, reducer)
    return entries


def first_backward(arrivals, num_params=4):
    mode = StaticGraph(num_params)
    assert mode.entries(UNSET) == [COUNTED] * num_params
    arrive(mode, arrivals)
    return mode


@pytest.mark.parametrize("unused", [{2}, set()])
def test_first_backward_fixes_the_counts(unused):
    """Without ``unused``, another rank used parameter 2: it is absent, but written."""
    mode = first_backward([0, 1, 1, 3, 3, 3])
    assert list(mode.absent) == []
    mode.ended([2], unused)
    for _ in range(2):  # in every later backward
        assert mode.kept == unused
        assert mode.absent == [2]
        assert mode.entries(UNSET) == [UNSET, COUNTED, UNSET, COUNTED]
        assert arrive(mode, [1])[1] is GradState.VIA_REDUCER
        assert arrive(mode, [3])[3] is COUNTED
        assert arrive(mode, [3])[3] is GradState.VIA_REDUCER
        mode.ended([], ())


def test_first_backward_may_start_again():
    mode = first_backward([0, 0, 1])
    assert mode.entries(UNSET) == [COUNTED] * 4  # after reset()
    arrive(mode, range(4))
    mode.ended([], ())
    assert mode.entries(UNSET) == [UNSET] * 4


# --------------------------------------------------------------------------- errors


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
