"""A sparse bucket: one COO gradient, which travels as it is."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch

from . import _ops
from ._arrivals import Entry
from ._bucket import Bucket, BucketState, Division


class SparseBucket(Bucket):
    """One sparse gradient: the payload is the user's ``.grad`` itself."""

    def copy_now(self, k: int, grad: torch.Tensor, division: Division) -> Entry:
        """A sparse gradient is never copied."""
        return grad

    def flatten(
        self,
        entries: Sequence[Entry],
        division: Division,
        undecided: Collection[int] = (),
    ) -> None:
        """Copy and divide; a missing gradient contributes an empty one.

        A copy, because two embeddings that are added share the memory of their values.
        """
        self.streams.gather(entries)
        grad = entries[0]
        param = self.params[0]
        if not isinstance(grad, torch.Tensor):
            grad = torch.sparse_coo_tensor(
                torch.empty((1, 0), dtype=torch.int64, device=param.device),
                torch.empty(
                    (0, *param.shape[1:]), dtype=param.dtype, device=param.device
                ),
                param.shape,
                device=param.device,
                is_coalesced=True,
                check_invariants=True,
            )
        elif grad.layout is not torch.sparse_coo:
            raise self._misfit(
                self.names[0],
                "a sparse COO gradient (the embedding has sparse=True)",
                f"a gradient of layout {grad.layout}",
            )
        with torch.no_grad():
            self._grad = grad.detach().clone()
            _ops.divide(self._grad, division.total)
        self.advance(BucketState.FULL)

    @property
    def payload(self) -> torch.Tensor:
        """The gradient itself."""
        return self._grad

    def unflatten(
        self,
        kept: Collection[int] = (),
        into: Sequence[torch.Tensor | None] | None = None,
    ) -> None:
        """Put the reduced gradient into ``.grad``."""
        param, reduced = self.params[0], self._grad
        del self._grad
        if kept:
            return
        grad = param.grad if into is None else into[0]
        if grad is not None:
            with torch.no_grad():
                grad.copy_(reduced)
        elif into is None:
            param.grad = reduced

    def set_apart(self, *, apart: bool) -> None:
        """A sparse gradient is never a view."""

    def tie_grads(self) -> None:
        """A sparse gradient is never a view."""
