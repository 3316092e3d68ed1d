"""Reduce one sparse COO gradient: an embedding with ``sparse=True``."""

from __future__ import annotations

import torch
from torch import Tensor

from minidp import accelerator
from minidp.errors import misfit

from . import kernels
from .averaging import DivideFactors
from .bucket import Bucket, Entries, Slots


def empty_sparse(param: Tensor) -> Tensor:
    """Return a sparse gradient of zeros for a parameter."""
    return torch.sparse_coo_tensor(
        torch.empty((1, 0), dtype=torch.int64, device=param.device),
        param.new_empty((0, *param.shape[1:])),
        param.shape,
        device=param.device,  # else the user's default device
        is_coalesced=True,
        check_invariants=True,
    )


class SparseBucket(Bucket):
    """A bucket of one parameter, whose sparse gradient travels by itself.

    There is no flat buffer, because the number of its elements differs from backward to
    backward.
    """

    def copy_in(
        self, entries: Entries, factors: DivideFactors, undecided: Slots = ()
    ) -> None:
        """Copy the gradient and divide it; without a gradient take an empty one.

        It is copied because two embeddings whose outputs are added share the memory of
        their values.

        Raises:
            GradientError: The gradient is not sparse in the COO layout.
        """
        grad = entries[0]
        if not isinstance(grad, Tensor):
            grad = empty_sparse(self.params[0].detach())
        elif grad.layout is not torch.sparse_coo:
            expected = "a sparse COO gradient (the embedding has sparse=True)"
            found = f"a gradient of layout {grad.layout}"
            raise misfit(self.communicator.rank, self.names[0], expected, found)
        with torch.no_grad():
            self.payload = grad.detach().clone()
            kernels.divide(self.payload, factors.product)

    def write_averages(self, untouched: Slots) -> None:
        """Write the average to ``.grad`` if that is touched, and free the payload."""
        param, reduced = self.params[0], self.payload
        del self.payload
        if self.streams is not None:
            accelerator.use_here(reduced)  # made by the stream that has flattened it
        kernels.rescale(reduced, self.scale)
        if untouched:
            return
        if param.grad is None:
            param.grad = reduced
        else:
            with torch.no_grad():
                param.grad.copy_(reduced)
