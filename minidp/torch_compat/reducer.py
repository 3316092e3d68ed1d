"""``ddp.reducer``: the methods of torch's reducer that third parties call.

Not those that only torch's own class calls, inside its forward and ``join()``.
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
from minidp.hooks import GradBucket, Turn


class ReducerNames:
    """Give the reducer of ``ddp`` the method names of torch's: ``ddp.reducer``.

    Made anew at each access of that property; only keeps references.
    """

    def __init__(self, ddp: Any) -> None:
        self._ddp = ddp
        self._reducer: Reducer = ddp._reducer
        self._check_reducer_finalized = ddp._check_reducer_finalized
        self._delay_all_reduce = self._reducer.end_now

    def prepare_for_forward(self) -> None:
        """Do nothing: minidp prepares in the forward itself."""

    def prepare_for_backward(self, outputs: Any) -> None:
        """Arm the reducer as a forward does: the next backward averages gradients.

        ``outputs``: of the module; with ``skip_all_reduce_unused_params`` ranks start
        to exchange what they reach. Raise if the last backward failed or did not
        finish.
        """
        refuse_forward(self._reducer)
        self._reducer.arm(outputs)
        self._reducer.ledger.note_forward(synchronising=True)

    def _rebuild_buckets(self) -> bool:
        """Rebuild buckets if due (then a collective); return whether it was due.

        Raise, as a forward does, if the last backward failed or did not finish.
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
                Turn(number, number == last, divisor, group),
            )
            for number, bucket in enumerate(queue.buckets)
            if isinstance(bucket, DenseBucket)
        ]

    def _run_allreduce_hook(self, bucket: GradBucket) -> torch.futures.Future[Any]:
        """Collective: start to sum a bucket's buffer over ranks in place, not divided.

        Return a future whose value is that buffer.
        """
        buffer = bucket.buffer()
        future = all_reduce(buffer, self._ddp.process_group).get_future()
        return then(future, lambda: buffer)

    def _get_local_used_map(self) -> torch.Tensor | None:
        """Return how many ranks used each parameter, at their last exchange (int32).

        May wait for that exchange. None with neither ``find_unused_parameters`` nor
        ``static_graph``: ranks exchange nothing then; with the latter only in the first
        backward.
        """
        queue = self._reducer.queue
        exchanges = queue.config.find_unused_parameters or queue.config.static_graph
        return queue.used_map.last_counts if exchanges else None

    def _ddp_graph_static(self) -> bool:
        """Return whether all backwards of this rank missed the same parameters so far.

        Always True without ``find_unused_parameters``.
        """
        return self._reducer.expected.is_steady
