"""Say where a backward keeps its gradients, if that is not ``.grad``.

The core reads and writes ``.grad``. A backward of distributed autograd (RPC) keeps its
gradients elsewhere; whoever knows that place lends them to ``.grad`` for as long as a
bucket reads or writes them. So the rest of the core has no second way.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

from torch import Tensor, nn

_AS_IT_IS: AbstractContextManager[None] = nullcontext()


class GradStore:
    """The usual store, ``.grad``; `data_parallel.dist_autograd` has another one."""

    is_elsewhere = False  # this reduction's gradients are not in ``.grad``

    def note_forward(self) -> None:
        """Note that a synchronising forward has ended."""

    def has_gradient(self, i: int) -> bool:
        """Return whether parameter ``i``, whose hook runs now, has one elsewhere."""
        return False

    def open(self, i: int) -> None:
        """Begin a reduction in the hook of parameter ``i``; set `is_elsewhere`."""

    def resume(self, i: int) -> None:
        """Go on with it in ``i``'s hook; raise if this backward uses another place."""

    def lent(self, params: Sequence[nn.Parameter]) -> AbstractContextManager[None]:
        """Return a block in which ``.grad`` are the gradients of this reduction.

        After it ``.grad`` are as before, and the store has what was written to them.
        """
        return _AS_IT_IS

    def check_used(self, counts: Tensor) -> None:
        """Raise on all ranks if averages could not be written on some of them.

        ``counts``: by parameter index, how many ranks used it.
        """

    def close(self) -> None:
        """Forget this reduction, and the forwards before it."""
