"""Step a large parameter of the CPU tile by tile, so that it stays in the cache.

A step of AdamW goes over a parameter, its gradient and its state nine times, once for
each operation of the formula. If they are larger than the cache of a core, all of them
come from memory each time, and go back. An optimizer that steps each element by itself
may as well step small tiles one after the other, each of which it finds in the cache
from the second operation on::

    whole   mul(w), lerp(m), mul(v), addcmul(v) ... addcdiv(w)        each from memory
    tiles   mul(w0), lerp(m0) ... addcdiv(w0); mul(w1), lerp(m1) ...    only the first

So the optimizer gets the tiles as so many parameters, which are views: of the
parameter, of its gradient, and of what it keeps in that shape. Numbers that it keeps
(``step``) are copied, because it counts them up for each tile. No element is calculated
otherwise than before, and so no bit differs. Optimizers that go over the memory only
once (``fused``), or over many parameters with each operation (``foreach``), gain
nothing, and are left as they are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

TILE = 2**17  # elements for each thread; of AdamW five tensors of 512 KiB
_LARGE = 2  # tiles that a parameter must have, or it is stepped as ever
# Kernels for 16 bits round the last elements of a tensor otherwise (see `owners`).
_DTYPES = (torch.float32, torch.float64)
_OTHER_WAYS = ("foreach", "fused", "capturable", "differentiable")

State = dict[Any, Any]


def tile_numel() -> int:
    """Return how many elements a tile has."""
    return TILE * torch.get_num_threads()


def is_large(tensor: Tensor) -> bool:
    """Return whether a tensor has enough elements for tiles."""
    return tensor.numel() >= _LARGE * tile_numel()


def may_be_tiled(own: Tensor, grad: Tensor | None, group: Mapping[str, Any]) -> bool:
    """Return whether an optimizer would be faster with tiles, and change no bits.

    Args:
        own: The parameter, or the rows of this rank.
        grad: Its gradient.
        group: The parameter's group in an optimizer of torch that steps each element
            by itself.
    """
    return (
        type(own) is Tensor  # subclasses may do anything
        and own.is_cpu
        and own.dtype in _DTYPES
        and is_large(own)
        and own.is_contiguous()
        and type(grad) is Tensor
        and _is_alike(grad, own)
        and not any(group.get(way) for way in _OTHER_WAYS)
    )


def _is_alike(value: Tensor, own: Tensor) -> bool:
    return (
        value.shape == own.shape
        and value.dtype == own.dtype
        and value.is_cpu
        and value.is_contiguous()
        and not value.is_neg()
        and not value.requires_grad
    )


class Tiles:
    """The tiles of a parameter and of its state, for the time of one step.

    Args:
        own: The parameter, or the rows of this rank.
        grad: Its gradient.
        state: What the optimizer keeps of it, which has passed `can_be_cut`.
    """

    def __init__(self, own: Tensor, grad: Tensor, state: State) -> None:
        numel = tile_numel()
        self.own = own.view(-1).split(numel)
        self.params = [nn.Parameter(tile) for tile in self.own]
        for param, tile in zip(self.params, grad.view(-1).split(numel), strict=True):
            param.grad = tile
        self._state, self._shape = state, own.shape
        self._cut: dict[Any, tuple[Tensor, ...]] = {
            key: value.view(-1).split(numel)
            for key, value in state.items()
            if isinstance(value, Tensor) and value.shape == own.shape
        }

    def states(self) -> list[State]:
        """Return what the optimizer finds of each tile; the first has the numbers."""
        found = [dict(self._state) for _ in self.params]
        for key, tiles in self._cut.items():
            for state, tile in zip(found, tiles, strict=True):
                state[key] = tile
        numbers = [k for k, v in self._state.items() if isinstance(v, Tensor)]
        for key in (k for k in numbers if k not in self._cut):
            for state in found[1:]:
                state[key] = self._state[key].clone()
        return found

    def whole(self, states: list[State]) -> State:
        """Return the state of the parameter after the step: the object of before it.

        Args:
            states: Those of the tiles.
        """
        first, state = states[0], self._state
        for key in [key for key in state if key not in first]:
            del state[key]
        for key, value in first.items():
            if key in self._cut:
                self._take_back(self._cut[key], [each.get(key) for each in states])
            elif isinstance(value, Tensor) and value.shape == self.params[0].shape:
                values = [each[key] for each in states]
                state[key] = torch.cat(values).view(self._shape)
            else:
                state[key] = value
        return state

    def _take_back(self, tiles: Sequence[Tensor], values: Sequence[Any]) -> None:
        for tile, value in zip(tiles, values, strict=True):
            if isinstance(value, Tensor) and value is not tile:  # not changed in place
                tile.copy_(value)


def can_be_cut(state: State, own: Tensor) -> bool:
    """Return whether a state has nothing but numbers, and tensors like the parameter.

    A parameter without a state is stepped as a whole. Then a state that it gets is
    whole, too.
    """
    return bool(state) and all(
        not isinstance(value, Tensor) or value.numel() == 1 or _is_alike(value, own)
        for value in state.values()
    )
