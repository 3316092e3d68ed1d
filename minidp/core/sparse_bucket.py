"""Reduce one sparse COO gradient: an embedding with ``sparse=True``."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from minidp.errors import misfit

from . import kernels
from .averaging import DivideFactors
from .bucket import Bucket, Entries, Slots


class SparseBucket(Bucket):
    """Bucket of one parameter, whose sparse gradient is the payload: no flat buffer."""

    def copy_in(
        self, entries: Entries, factors: DivideFactors, undecided: Slots = ()
    ) -> None:
        """Copy, divide the gradient (None: an empty one). GradientError if not COO.

        A copy, because two embeddings that are added share the memory of their values.
        """
        grad = entries[0]
        if not isinstance(grad, Tensor):
            param = self.params[0].detach()
            grad = torch.sparse_coo_tensor(
                torch.empty((1, 0), dtype=torch.int64, device=param.device),
                param.new_empty((0, *param.shape[1:])),
                param.shape,
                device=param.device,  # else the user's default device
                is_coalesced=True,
                check_invariants=True,
            )
        elif grad.layout is not torch.sparse_coo:
            expected = "a sparse COO gradient (the embedding has sparse=True)"
            found = f"a gradient of layout {grad.layout}"
            raise misfit(self.communicator.rank, self.names[0], expected, found)
        with torch.no_grad():
            self.payload = grad.detach().clone()
            kernels.divide(self.payload, factors.product)

    def write_averages(self, kept: Slots, into: Sequence[Tensor | None] | None) -> None:
        """Write the average to ``into`` or ``.grad``, unless kept; drop the payload."""
        param, reduced = self.params[0], self.payload
        del self.payload
        kernels.rescale(reduced, self.factor)
        grad = param.grad if into is None else into[0]
        if kept:
            return
        if grad is not None:
            with torch.no_grad():
                grad.copy_(reduced)
        elif into is None:
            param.grad = reduced
