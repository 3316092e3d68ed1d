"""``ddp.reducer``: methods of torch's reducer, done by the reducer of minidp."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from minidp.comm import GradBucket, Turn, all_reduce, then
from minidp.guard import refuse_forward

if TYPE_CHECKING:
    from .names import DataParallel


class ReducerNames:
    """Offer the methods of torch's reducer, done by the reducer of ``ddp``."""

    def __init__(self, ddp: DataParallel) -> None:
        self._ddp: DataParallel = ddp
        self._reducer = ddp._reducer
        self._set_static_graph = ddp._set_static_graph
        self._check_reducer_finalized = ddp._check_reducer_finalized
        self._update_process_group = ddp._update_process_group
        self._remove_autograd_hooks = ddp._remove_autograd_hooks
        self._delay_all_reduce = self._reducer.end_now
        self._set_ddp_runtime_logging_sample_rate = ddp.logger.set_rate
        self.get_backward_stats = ddp.logger.ready_times

    def prepare_for_forward(self) -> None:
        """Do nothing: minidp prepares in the forward itself."""

    def prepare_for_backward(self, outputs: Any) -> None:
        """Let the next backward of ``outputs`` reduce; raise like a forward."""
        refuse_forward(self._reducer)
        self._reducer.arm(outputs)
        self._reducer.ledger.note_forward(synchronising=True)

    def _rebuild_buckets(self) -> bool:
        """Rebuild buckets if due (collective); return if so. Raise like a forward."""
        refuse_forward(self._reducer)
        is_due = self._reducer.rebuild_policy.is_due
        self._reducer.rebuild_if_due()
        return is_due

    def _push_all_rebuilt_params(self) -> None:
        """Let the next forward rebuild in registration order, unless rebuilt."""
        self._reducer.rebuild_policy.note(list(range(len(self._reducer.params))))

    def _get_zeros_like_grad_buckets(self) -> list[GradBucket]:
        """Return a `GradBucket` of zeros for each bucket that is not sparse."""
        queue = self._reducer.queue
        last = len(queue.buckets) - 1
        divisor, group = queue.averaging.divisor, queue.communicator.group
        return [
            GradBucket(
                bucket.plan,
                torch.zeros_like(bucket.payload),
                bucket.params,
                Turn(number, number == last, divisor, group),
            )
            for number, bucket in enumerate(queue.buckets)
            if not bucket.plan.sparse
        ]

    def _run_allreduce_hook(self, bucket: GradBucket) -> torch.futures.Future[Any]:
        """Start to sum ``bucket``'s buffer over ranks; return a future of it."""
        buffer = bucket.buffer()
        future = all_reduce(buffer, self._ddp.process_group).get_future()
        return then(future, lambda: buffer)

    def _run_comm_hook(self, bucket: GradBucket) -> torch.futures.Future[Any]:
        """Run the comm hook on ``bucket``, or sum it over ranks; return the future."""
        hook = self._reducer.queue.averaging.comm_hook
        if hook is None:
            return self._run_allreduce_hook(bucket)
        return hook.hook(hook.state, bucket)

    def _set_forward_pass_work_handle(
        self,
        work: Any,
        use_static_world_size: bool,  # noqa: FBT001 -- torch's
    ) -> None:
        """Wait for ``work``, a count of ranks; divide by it from now on.

        By the world size instead if ``use_static_world_size``.
        """
        (count,) = work.get_future().wait()
        count = None if use_static_world_size else int(count.item())
        self._reducer.queue.averaging.num_contributors = count

    def _install_post_backward_futures(self, futures: Sequence[Any]) -> None:
        """Make the next synchronised backward wait for ``futures`` at its end, too."""
        self._reducer.queue.owed.extend(futures)

    def _get_local_used_map(self) -> torch.Tensor | None:
        """Return how many ranks used each parameter, at their last exchange (int32).

        None without ``find_unused_parameters`` and ``static_graph``: ranks exchange
        nothing then. A static graph's ranks do so in the first backward only.
        """
        queue = self._reducer.queue
        exchanges = queue.config.find_unused_parameters or queue.config.static_graph
        return queue.used_map.last_counts if exchanges else None

    def _ddp_graph_static(self) -> bool:
        """Return whether the same parameters were missing in all backwards so far."""
        return self._reducer.expected.is_steady

    def _autograd_hook(self, i: int) -> None:
        """Call the grad hook of parameter ``i``, whose gradient is in ``.grad``."""
        self._reducer.hooks.python_hook(i)(None, None)

    def _reset_state(self) -> None:
        """Drop the backward under way on this rank; rebuild buckets once more."""
        self._reducer.reset(self._ddp.process_group)
        self._reducer.rebuild_policy.reset(rebuilds_again=True)
