"""Faults of hardware, made by hand: a bit flips on one rank."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch import nn

from minidp.logical.averaging import Slices, TreeAveraging
from minidp.logical.verdicts import pairs

_INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class Flip:
    """Where a bit flips. Numbers that are too large count from the beginning again."""

    tensor: int = 0  # which gradient, weight, buffer or bucket
    element: int = 0
    bit: int = 12

    def hit(self, tensor: torch.Tensor) -> None:
        """Flip the bit, so that no version counter changes."""
        flat = tensor.data.view(-1)  # raises unless it is contiguous
        words = flat.view(_INTEGERS[flat.element_size()])
        bits = 8 * flat.element_size()
        bit = self.bit % bits
        mask = -(1 << bit) if bit == bits - 1 else 1 << bit
        words[self.element % len(words)] ^= mask


class Once:
    """Calls a function in one call of many."""

    def __init__(self, call: Callable[[torch.Tensor], None], *, lasts: bool) -> None:
        self._call, self._lasts, self.calls = call, lasts, 0

    def __call__(self, tensor: torch.Tensor) -> None:
        """Call it, unless it was called already, and does not last."""
        if self._lasts or not self.calls:
            self._call(tensor)
        self.calls += 1


@contextmanager
def in_gradient(module: nn.Module, flip: Flip, *, lasts: bool = False) -> Iterator[Any]:
    """Let the backward compute a wrong gradient."""
    params = list(module.parameters())
    once = Once(flip.hit, lasts=lasts)

    def hook(grad: torch.Tensor) -> torch.Tensor:
        found = grad.contiguous().clone()
        once(found)
        return found

    handle = params[flip.tensor % len(params)].register_hook(hook)
    try:
        yield once
    finally:
        handle.remove()


@contextmanager
def in_buffer(module: nn.Module, flip: Flip, *, lasts: bool = False) -> Iterator[Any]:
    """Let the forward leave a wrong module buffer."""
    once = Once(flip.hit, lasts=lasts)

    def hook(*_: object) -> None:
        buffers = [each for each in module.buffers() if each.is_floating_point()]
        once(buffers[flip.tensor % len(buffers)])

    handle = module.register_forward_hook(hook)
    try:
        yield once
    finally:
        handle.remove()


@contextmanager
def in_sum(flip: Flip, *, lasts: bool = False) -> Iterator[Any]:
    """Let this rank add up its slice of a bucket to a wrong sum, for all ranks."""
    add_up, once = Slices.add_up, Once(flip.hit, lasts=lasts)

    def wrong(self: Slices, arrived: torch.Tensor) -> torch.Tensor:
        found = add_up(self, arrived)
        if found.numel():
            once(found)
        return found

    with mock.patch.object(Slices, "add_up", wrong):
        yield once


@contextmanager
def on_arrival(flip: Flip, *, lasts: bool = False) -> Iterator[Any]:
    """Let this rank receive a wrong sum."""
    arrived, once = TreeAveraging.arrived, Once(flip.hit, lasts=lasts)

    def wrong(self: TreeAveraging, plan: Any, payload: torch.Tensor) -> None:
        once(payload)
        arrived(self, plan, payload)

    with mock.patch.object(TreeAveraging, "arrived", wrong):
        yield once


def audited_leaf(model: Any, rank: int, ranks: int, number: int) -> int:
    """Return the logical rank of a rank that an audit compares."""
    return pairs(number, model.logical_state["number"], ranks)[rank].leaf
