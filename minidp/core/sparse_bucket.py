"""Reduce one sparse COO gradient: an embedding with ``sparse=True``."""

from __future__ import annotations

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

    def write_averages(self, kept: Slots) -> None:
        """Write the average to ``.grad``, unless it is kept; drop the payload."""
        param, reduced = self.params[0], self.payload
        del self.payload
        kernels.rescale(reduced, self.factor)
        if kept:
            return
        if param.grad is None:
            param.grad = reduced
        else:
            with torch.no_grad():
                param.grad.copy_(reduced)
