"""The norm of the gradients of all shares, and clipping by it.

Each owner knows the norms of its parameters. All ranks exchange these, and calculate
the norm of the norms, in the order of parameters. That is what
``torch.nn.utils.clip_grad_norm_`` calculates on whole gradients, with the same bits.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor

from minidp.core import Exchange, Reducer


class Norms:
    """The norms of all gradients.

    Args:
        reducer: The reducer.
        own: The indices of the parameters that this rank owns.
    """

    def __init__(self, reducer: Reducer, own: Sequence[int]) -> None:
        self._params, self._own = reducer.params, own
        # For each parameter its norm, and whether it has a gradient.
        part = 2 * len(self._params), torch.float64
        cpu = torch.device("cpu")
        what = "the norms of gradients"
        self.exchange = Exchange(what, part, cpu, reducer.communicator)

    @torch.no_grad()
    def total(self, norm_type: float) -> Tensor:
        """Return the norm of all gradients; all ranks must call it together."""
        grads = {i: g for i in self._own if (g := self._params[i].grad) is not None}
        mine = self.exchange.blank()
        rows = mine.view(2, -1)
        if grads:
            norms = [torch.linalg.vector_norm(g, norm_type) for g in grads.values()]
            places = torch.tensor([*grads], device="cpu")
            rows[0, places] = torch.stack(norms).double()
            rows[1, places] = 1.0
        self.exchange.start(mine)
        values, are_there = self.exchange.take().view(2, -1)
        dtypes = [param.dtype.to_real() for param in self._params]
        dtype = functools.reduce(torch.promote_types, dtypes)
        present = values[are_there > 0].to(dtype)
        if not len(present):
            return torch.tensor(0.0, device="cpu")
        total: Tensor = torch.linalg.vector_norm(present, norm_type)
        return total

    @torch.no_grad()
    def clip(self, max_norm: float, norm_type: float, *, raises: bool) -> Tensor:
        """Scale own gradients so that the norm of all is at most ``max_norm``.

        Returns:
            The norm before.

        Raises:
            RuntimeError: The norm is not finite, and ``raises``.
        """
        total = self.total(norm_type)
        if raises and not bool(torch.isfinite(total)):
            raise RuntimeError(
                f"The total norm of order {norm_type} of all gradients is {total}, so "
                "it cannot be clipped. What to do: pass error_if_nonfinite=False to "
                "scale by it anyway."
            )
        factor = torch.clamp(max_norm / (total + 1e-6), max=1.0)
        for i in self._own:
            grad = self._params[i].grad
            if grad is not None:
                grad.mul_(factor)
        return total
