"""The tensors of an output, and what a graph does not reach."""

from __future__ import annotations

from collections import OrderedDict, namedtuple
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge
from torch.nn.parallel.distributed import _find_tensors

from minidp.core.autograd import find_tensors, unreachable


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


def test_search_survives_long_chains():
    leaf = nn.Parameter(torch.ones(1))
    value = leaf * 1
    for _ in range(5000):
        value = value + 1
    assert unreachable(value, [get_gradient_edge(leaf).node], [0]) == set()
