"""Where a backward keeps its gradients, if that is not ``.grad``.

The core reads and writes ``.grad``. A backward of distributed autograd (RPC) keeps its
gradients elsewhere. Whoever knows that place lends them to ``.grad`` for as long as a
bucket reads or writes them, so that the rest of the core knows ``.grad`` only.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager

from torch import Tensor, nn

from minidp.accelerator import NO_CONTEXT


class GradStore:
    """The usual store, which is ``.grad`` itself, so that nothing is to be done.

    `minidp.data_parallel.dist_autograd` has the other one.
    """

    is_external = False  # this reduction's gradients are not in ``.grad``

    def note_forward(self) -> None:
        """Note that a synchronising forward has ended."""

    def has_grad_elsewhere(self, i: int) -> bool:
        """Return whether the gradient of parameter ``i`` is not in ``.grad``.

        This is asked in the hook of that parameter.
        """
        return False

    def open(self, i: int) -> None:
        """Begin a reduction, in the hook of parameter ``i``, and set `is_external`."""

    def resume(self, i: int) -> None:
        """Go on with a paused reduction, in the hook of parameter ``i``.

        Raises:
            GradientError: This backward keeps its gradients in another place than the
                one before.
        """

    def as_grads(self, params: Sequence[nn.Parameter]) -> AbstractContextManager[None]:
        """Return a context in which ``.grad`` has the gradients of this reduction.

        After it the parameters have their former ``.grad``, and the store has what was
        written meanwhile.
        """
        return NO_CONTEXT

    def check_used(self, counts: Tensor) -> None:
        """Raise on all ranks if averages could not be written on some of them.

        Args:
            counts: How many ranks used each parameter, as an int32 tensor of the shape
                (parameters,).

        Raises:
            GradientError: Some ranks, but not all of them, have used a parameter.
        """

    def close(self) -> None:
        """Forget this reduction, and the forwards before it."""
