"""``ddp.reducer``: the methods of torch's reducer that third parties call.

Methods that only torch's own class calls, inside its forward and ``join()``, are
missing.
"""

from __future__ import annotations

from typing import Any

import torch

from minidp.comm import (
    all_reduce,
    then,
)
from minidp.core import DenseBucket, Reducer
from minidp.guard import refuse_forward
from minidp.hooks import BucketInfo, GradBucket


class ReducerNames:
    """The reducer of ``ddp`` under the method names of torch's.

    Each access of ``ddp.reducer`` makes a new one, which holds nothing but references.
    """

    def __init__(self, ddp: Any) -> None:
        self._ddp = ddp
        self._reducer: Reducer = ddp._reducer
        self._check_reducer_finalized = ddp._check_reducer_finalized
        self._delay_all_reduce = self._reducer.on_backward_end

    def prepare_for_forward(self) -> None:
        """Do nothing, because minidp prepares in the forward itself."""

    def prepare_for_backward(self, outputs: Any) -> None:
        """Arm the reducer as a forward does, so that the next backward averages.

        If ``skip_all_reduce_unused_params`` is set, the ranks start to exchange what
        the outputs reach.

        Args:
            outputs: What the module's forward has returned.
        """
        refuse_forward(self._reducer)
        self._reducer.arm(outputs)
        self._reducer.ledger.note_forward(synchronising=True)

    def _rebuild_buckets(self) -> bool:
        """Rebuild the buckets if that is due, and return whether it was.

        All ranks must call this together, because a rebuild is a collective.
        """
        refuse_forward(self._reducer)
        is_due = self._reducer.rebuild_policy.is_due
        self._reducer.rebuild_if_due()
        return is_due

    def _get_zeros_like_grad_buckets(self) -> list[GradBucket]:
        """Return a `GradBucket` of zeros for each bucket that is not sparse."""
        queue = self._reducer.queue
        last = len(queue.buckets) - 1
        divisor, group = queue.averaging.divisor, queue.communicator.group
        return [
            GradBucket(
                bucket.plan,
                bucket.zeros(),
                bucket.params,
                BucketInfo(number, number == last, divisor, group),
            )
            for number, bucket in enumerate(queue.buckets)
            if isinstance(bucket, DenseBucket)
        ]

    def _run_allreduce_hook(self, bucket: GradBucket) -> torch.futures.Future[Any]:
        """Start to sum a bucket's buffer over the ranks, in place and not divided.

        All ranks must call this together. The value of the future is that buffer.
        """
        buffer = bucket.buffer()
        future = all_reduce(buffer, self._ddp.process_group).get_future()
        return then(future, lambda: buffer)

    def _get_local_used_map(self) -> torch.Tensor | None:
        """Return how many ranks used each parameter, at their last exchange.

        It may wait for that exchange. The ranks exchange this only with
        ``find_unused_parameters``, and in the first backward with ``static_graph``.
        Without these options the result is None.
        """
        queue = self._reducer.queue
        exchanges = queue.config.find_unused_parameters or queue.config.static_graph
        return queue.used_map.last_counts if exchanges else None

    def _ddp_graph_static(self) -> bool:
        """Return whether all backwards of this rank have missed the same parameters."""
        return self._reducer.mode.is_steady
