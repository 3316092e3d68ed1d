"""Which gradients a backward must bring, per mode."""

from __future__ import annotations

import pytest
import torch
from torch.autograd.graph import get_gradient_edge

from minidp._arrivals import Mark
from minidp._expectation import (
    EveryParameter,
    FindUnused,
    StaticGraph,
    expectation_for,
)
from minidp.config import BucketCaps, ReducerConfig
from minidp.errors import GraphChangedError, MarkedTwiceError

FLAGS = (
    "completes_at_end",
    "shares_used_map",
    "map_goes_first",
    "keeps_ready_order",
)


def flags(mode):
    return tuple(getattr(mode, name) for name in FLAGS)


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
    mode = expectation_for(
        2,
        ReducerConfig(
            BucketCaps(1, 1),
            find_unused_parameters=find_unused,
            static_graph=static_graph,
        ),
    )
    assert type(mode) is kind


def test_flags_of_each_mode():
    assert flags(EveryParameter(1)) == (False, False, False, True)
    assert flags(FindUnused(1)) == (True, True, False, False)
    static = StaticGraph(1)
    assert flags(static) == (True, True, True, False)  # first backward
    static.ended([], ())
    assert flags(static) == (False, False, False, True)


@pytest.mark.parametrize("everyday", [Mark.UNSET, Mark.TRACED])
def test_everyday_marks(everyday):
    for mode in (EveryParameter(3), FindUnused(3)):
        assert mode.marks(everyday) == [everyday] * 3
        assert list(mode.absent()) == []


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

    monkeypatch.setattr("minidp._expectation.unreachable", walk)
    mode = FindUnused(3)
    for _ in range(3):
        mode.saw_outputs(params[0] * 2, nodes)
        assert mode.absent() == []
        mode.ended([], ())
    mode.ended([1], ())
    with pytest.raises(AssertionError, match="walked the graph"):
        mode.saw_outputs(params[0] * 2, nodes)


def test_absent_is_missing_last_time_and_out_of_reach_now(params, nodes):
    mode = FindUnused(3)
    mode.saw_outputs(params[0] * 2, nodes)
    assert mode.absent() == []  # nothing is known yet
    mode.ended([2, 1], ())
    mode.saw_outputs(params[0] * 2, nodes)
    assert mode.absent() == [1, 2]
    mode.saw_outputs(params[0] * params[1], nodes)
    assert mode.absent() == [2]
    mode.saw_outputs(params[1] * params[2], nodes)  # 0 is out of reach, but was there
    assert mode.absent() == []


def test_prediction_ends_when_everything_arrived(params, nodes):
    mode = FindUnused(3)
    mode.ended([2], ())
    mode.saw_outputs(params[0] * params[1], nodes)
    assert mode.absent() == [2]
    mode.ended([], ())
    mode.saw_outputs(params[0] * params[1], nodes)
    assert mode.absent() == []


# --------------------------------------------------------------------- static graph


def first_backward(arrivals, num_params=4):
    mode = StaticGraph(num_params)
    assert mode.marks(Mark.UNSET) == [Mark.COUNTING] * num_params
    for i in arrivals:
        mode.count(i)
    return mode


def test_first_backward_fixes_the_counts():
    mode = first_backward([0, 1, 1, 3, 3, 3])
    assert list(mode.absent()) == []
    mode.ended([2], {2})
    assert mode.kept == {2}
    assert mode.absent() == [2]
    for _ in range(2):  # in every later backward
        assert mode.marks(Mark.UNSET) == [
            Mark.UNSET,
            Mark.REPEATS,
            Mark.UNSET,
            Mark.REPEATS,
        ]
        assert mode.is_last_but_one(1) is True
        assert [mode.is_last_but_one(3) for _ in range(2)] == [False, True]


def test_a_parameter_used_elsewhere_is_absent_but_written():
    mode = first_backward([0, 1, 3])
    mode.ended([2], ())  # another rank used 2
    assert mode.absent() == [2]
    assert mode.kept == frozenset()


def test_first_backward_may_start_again():
    mode = first_backward([0, 0, 1])
    assert mode.marks(Mark.UNSET) == [Mark.COUNTING] * 4  # after reset()
    for i in range(4):
        mode.count(i)
    mode.ended([], ())
    assert mode.marks(Mark.UNSET) == [Mark.UNSET] * 4


def test_later_backwards_change_nothing():
    mode = first_backward([0, 1, 2])
    mode.ended([3], {3})
    mode.ended([], ())
    assert mode.kept == {3}
    assert mode.absent() == [3]


# --------------------------------------------------------------------------- errors


@pytest.mark.parametrize("mode", [EveryParameter(1), FindUnused(1)])
def test_marked_twice(mode):
    error = mode.twice(2, "net.weight")
    assert type(error) is MarkedTwiceError
    assert str(error) == (
        "[rank 2] Expected to mark a variable ready only once, but a gradient arrived "
        "a second time in one reduction. Parameters: net.weight. What to do: the "
        "parameter takes part in several backward calls of one forward, or in several "
        "reentrant checkpoints: use checkpoint(..., use_reentrant=False) or "
        "static_graph=True, or keep all but the last backward local with no_sync(); "
        "call reset() on all ranks to go on."
    )


def test_graph_changed():
    error = StaticGraph(1).twice(0, "w")
    assert type(error) is GraphChangedError
    assert str(error) == (
        "[rank 0] Your training graph has changed in this iteration: a gradient "
        "arrived more often than in the first backward of static_graph=True, or only "
        "now. Parameters: w. What to do: use static_graph only if every iteration uses "
        "the same parameters equally often; call reset() on all ranks to go on."
    )
