"""Note which gradients a logical rank has brought, and whether they still are the same.

Between two logical ranks nothing but a backward may change a gradient: what a script
clips there would be clipped in parts, whose number depends on that of ranks. With the
extension, its grad hooks note each gradient, and no Python runs for a single one.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from operator import attrgetter
from typing import NamedTuple, cast

import torch
from torch import Tensor

from minidp import native
from minidp.core import Reducer

# A gradient for each parameter. None stands for zeros: this logical rank has not used
# the parameter.
Grads = list[Tensor | None]

_kind_of = attrgetter("layout", "is_cpu", "requires_grad")
_PLAIN = {(torch.strided, True, False)}


class Taken(NamedTuple):
    """The gradients of a logical rank, which are not in ``.grad`` any more."""

    grads: Grads
    # Whether each is there, dense, on the CPU, and without a graph of its own. False
    # says nothing.
    are_plain: bool


class Arrived:
    """The gradients that have come in a turn, and what they were like.

    The extension has a class with the same methods.

    Args:
        params: The parameters. Everything goes by their index.
    """

    def __init__(self, params: Sequence[Tensor]) -> None:
        self._params = params
        # The tensors, and their versions.
        self._noted: dict[int, tuple[weakref.ref[Tensor], int]] = {}

    def note(self, i: int) -> None:
        """Note the gradient of a parameter, as it is now, if there is one."""
        grad = self._params[i].grad
        if grad is not None:
            self._noted[i] = weakref.ref(grad), grad._version

    def note_all(self) -> None:
        """Note all gradients that are there."""
        for i in range(len(self._params)):
            self.note(i)

    def clear(self) -> None:
        """Forget all gradients."""
        self._noted.clear()

    def __len__(self) -> int:
        """Return how many are noted."""
        return len(self._noted)

    def changed(self) -> list[int]:
        """Return which of those that are noted have been changed or replaced since.

        Of a view only the latter is known: it shares the version of its bucket.
        """
        return [
            i
            for i, (grad, version) in self._noted.items()
            if (now := self._params[i].grad) is None
            or now is not grad()
            or (now._version != version and now._base is None)
        ]

    def is_any_there(self) -> bool:
        """Return whether ``.grad`` of some parameter is not None, noted or not."""
        return any(param.grad is not None for param in self._params)

    def take(self) -> tuple[Grads, bool]:
        """Take all gradients out of ``.grad``, and return them as `Taken` has them."""
        grads: Grads = [param.grad for param in self._params]
        for param in self._params:
            param.grad = None
        are_there = set(map(type, grads)) == {Tensor}
        return grads, are_there and set(map(_kind_of, grads)) == _PLAIN


def arrived_of(reducer: Reducer) -> tuple[Arrived, bool]:
    """Return the gradients that have arrived, and whether the hooks note them."""
    table, library = reducer.pending.native, native.library()
    if table is None or library is None:
        return Arrived(reducer.params), False
    noted = library.Arrived(reducer.params)
    table.tell(noted)
    return cast("Arrived", noted), True
