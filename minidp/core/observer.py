"""What a feature sees of a reduction, and where it may act.

Averages over items, the comparison of replicas, the optimizer guard, steps inside the
backward, the search for a layout and torchft are observers. The core calls them in the
order of `BucketQueue.observers`. It knows one of them by name, `ItemCounts`, because
the divisor depends on it.

::

    begins      the first gradient of a backward is here, and nothing is set up yet
    launching   the first bucket is about to be launched
    finishing   the backward is over: all buckets are launched, none is waited for
    reduced     one bucket's averages are in ``.grad``         (only with `uses_grads`)
    finished    all averages are in ``.grad``; the reducer is still FINALIZING

`sync_gradients()`, and a rank without inputs inside `join()`, reduce without a backward
and begin with `launching`. If a reduction fails, the calls that are left are not made.
A `reset()` calls `abandon`, also if nothing has failed.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn


class Observer:
    """Base of `BucketQueue.observers`; every method does nothing here.

    A method may start collectives in `launching`, which come before those of the
    buckets, and from `finishing` on, which come after them; never in `begins`, which
    not all ranks get. It may remove its observer from the list.
    """

    uses_grads = False  # reads or changes ``.grad`` in `reduced`

    def begins(self) -> None:
        """Note that a synchronised backward begins: its first gradient has come."""

    def launching(self) -> None:
        """Note that this backward's first bucket is about to be launched.

        Called at the same point on all ranks, which is the only one at which a
        collective of its own keeps its place among those of the buckets: Gloo and NCCL
        match collectives by their order. If all buckets are skipped, called as well.
        """

    def finishing(self, *, applies_grads: bool) -> None:
        """Note that all buckets are launched; none is waited for, or copied out.

        ``applies_grads``: some observer applies gradients in `reduced`, so that this is
        the last moment to refuse them.
        """

    def reduced(self, params: Sequence[nn.Parameter]) -> None:
        """Use one bucket's averages, which `finish` has just written to ``.grad``.

        Called only if `uses_grads`, in bucket order, while later buckets may still be
        reduced; also for skipped buckets and unused parameters: ``.grad`` is as before.
        """

    def finished(self) -> None:
        """Note that a reduction's averages are all written; called once for each."""

    def settle(self) -> None:
        """Wait for collectives of this observer that still run."""

    def abandon(self) -> None:
        """Forget collectives that still run, without waiting, as `reset()` has to."""
