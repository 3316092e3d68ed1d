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

    def __init__(
        self, call: Callable[[torch.Tensor], None], *, lasts: bool, after: int = 0
    ) -> None:
        self._call, self._lasts, self._after, self.calls = call, lasts, after, 0

    def __call__(self, tensor: torch.Tensor) -> None:
        """Call it after so many calls, and then again only if it lasts."""
        if self.calls == self._after or (self._lasts and self.calls > self._after):
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
def sums_as_messages() -> Iterator[None]:
    """Let new buckets not be in shared memory."""

    def share(self: TreeAveraging, *_: Any, **__: Any) -> list[Any]:
        self.no_shared_memory = "a test wants messages"
        return []

    with mock.patch.object(TreeAveraging, "share", share):
        yield


@contextmanager
def in_sum(flip: Flip, *, lasts: bool = False, after: int = 0) -> Iterator[Any]:
    """Let this rank add up its slice of a bucket to a wrong sum, for all ranks.

    With ``after`` it adds up so many slices rightly before.
    """
    add_up, once = Slices.add_up, Once(flip.hit, lasts=lasts, after=after)

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
