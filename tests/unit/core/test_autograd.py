"""What autograd says about tasks and graphs."""

from __future__ import annotations

from collections import OrderedDict, namedtuple
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge
from torch.nn.parallel.distributed import _find_tensors

from minidp.core.autograd import (
    NO_TASK,
    current_task,
    find_tensors,
    probe_outputs,
    queue_final_callback,
    reachable_nodes,
    unreachable,
)


def test_current_task_is_known_inside_a_backward_only():
    leaf = torch.ones(1, requires_grad=True)
    seen = []
    leaf.register_hook(lambda _: seen.append(current_task()))
    assert current_task() == NO_TASK
    (leaf * 1).backward()
    (leaf * 1).backward()
    assert current_task() == NO_TASK
    assert NO_TASK not in seen
    assert seen[0] != seen[1]


def test_final_callbacks_run_at_the_end_and_raise_there():
    leaf = torch.ones(1, requires_grad=True)
    seen = []

    def fail():
        seen.append(leaf.grad.item())
        raise KeyError("from the callback")

    out = leaf * 2
    out.register_hook(lambda _: queue_final_callback(fail))
    with pytest.raises(KeyError, match="from the callback"):
        out.backward()
    assert seen == [2.0]


@dataclass
class Output:
    loss: torch.Tensor
    rest: Any = None
    hidden: list[torch.Tensor] = field(default_factory=list)


class Opaque:
    def __init__(self, tensor):
        self.tensor = tensor


Pair = namedtuple("Pair", "first second")
A, B, C, D = (torch.tensor(float(i), requires_grad=True) * 1 for i in range(4))


@pytest.mark.parametrize(
    ("output", "found"),
    [
        (A, [A]),
        ([A, (B, C)], [A, B, C]),
        ({"x": A, "y": {"z": [B]}}, [A, B]),
        (OrderedDict(x=B, y=A), [B, A]),
        (Pair(A, [B]), [A, B]),
        (Output(A, Output(B), [C, D]), [A, B, C, D]),
        ((A, 3, None, "text"), [A]),
        ([A, A], [A, A]),
        (Output, []),  # the class itself
        ({A}, []),  # torch does not look into sets either
        (Opaque(A), []),
        (None, []),
        ([], []),
    ],
    ids=lambda value: type(value).__name__,
)
def test_tensors_of_an_output(output, found):
    expected = [id(tensor) for tensor in found]
    assert [id(tensor) for tensor in find_tensors(output)] == expected
    if output is not Output:  # torch fails
        assert [id(tensor) for tensor in _find_tensors(output)] == expected


def test_probe_runs_when_a_backward_reaches_an_output():
    leaf = torch.ones(1, requires_grad=True)
    calls = []
    first, second = leaf * 2, leaf * 3
    outputs = [first, {"x": second}, leaf, leaf.detach()]
    probe_outputs(outputs, lambda _: calls.append(1))
    second.backward()
    assert calls == [1]
    (first * 5).backward()
    assert calls == [1, 1]
    assert leaf.grad.item() == 13.0  # probes change nothing


def test_reachable_and_unreachable():
    params = [nn.Parameter(torch.ones(1)) for _ in range(4)]
    nodes = [get_gradient_edge(param).node for param in params]
    output = {"a": (params[0] * params[1]).exp(), "b": [params[2].detach() * params[0]]}
    reached = reachable_nodes(output)
    assert [node in reached for node in nodes] == [True, True, False, False]
    assert unreachable(output, nodes, range(4)) == {2, 3}
    assert unreachable(output, nodes, [1, 3]) == {3}
    assert unreachable(None, nodes, [0]) == set()  # nothing seen, nothing known


def test_search_survives_long_chains():
    leaf = nn.Parameter(torch.ones(1))
    value = leaf * 1
    for _ in range(5000):
        value = value + 1
    assert unreachable(value, [get_gradient_edge(leaf).node], [0]) == set()
