"""``ddp.reducer``: the entry points of torch's reducer, on ours (see `_compat`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from ._collectives import all_reduce
from ._grad_bucket import GradBucket, Turn
from ._guard import refuse_forward
from ._waiting import then

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from ._compat import DataParallel


class ReducerNames:
    """``ddp.reducer``: entry points of torch's reducer, on ours.

    Args:
        ddp: whose reducer it stands for.
    """

    def __init__(self, ddp: DataParallel) -> None:
        self._ddp: DataParallel = ddp

    def prepare_for_forward(self) -> None:
        """Nothing to prepare."""

    def prepare_for_backward(self, outputs: Any) -> None:
        """The next backward reduces, as after a forward that returned ``outputs``."""
        reducer = self._ddp._reducer
        refuse_forward(reducer)
        reducer.arm(outputs)
        reducer.ledger.note_forward(synchronising=True)

    def _rebuild_buckets(self) -> bool:
        """Collective if it returns True: rebuild if that is due."""
        reducer = self._ddp._reducer
        refuse_forward(reducer)
        is_due = reducer.ready_order.is_due
        reducer.rebuild_if_due()
        return is_due

    def _push_all_rebuilt_params(self) -> None:
        """The next rebuild follows the parameters' own order."""
        reducer = self._ddp._reducer
        reducer.ready_order.note(list(range(len(reducer.params))))

    def _get_zeros_like_grad_buckets(self) -> list[GradBucket]:
        """Buckets as a rank without inputs contributes them."""
        pipeline = self._ddp._reducer.pipeline
        last = len(pipeline.buckets) - 1
        return [
            GradBucket(
                bucket.plan,
                torch.zeros_like(bucket.payload),
                bucket.params,
                Turn(
                    number, number == last, pipeline.averaging.divisor, pipeline.group
                ),
            )
            for number, bucket in enumerate(pipeline.buckets)
            if not bucket.plan.sparse
        ]

    def _run_allreduce_hook(self, bucket: GradBucket) -> torch.futures.Future[Any]:
        """Sum a bucket over the ranks, undivided."""
        buffer = bucket.buffer()
        future = all_reduce(buffer, self._ddp.process_group).get_future()
        return then(future, lambda: buffer)

    def _run_comm_hook(self, bucket: GradBucket) -> torch.futures.Future[Any]:
        """What a registered comm hook makes of a bucket."""
        hook = self._ddp._reducer.pipeline.averaging.comm_hook
        if hook is None:
            return self._run_allreduce_hook(bucket)
        return hook.hook(hook.state, bucket)

    def _set_forward_pass_work_handle(
        self,
        work: Any,
        use_static_world_size: bool,  # noqa: FBT001 -- torch's
    ) -> None:
        """``work`` sums how many ranks take part in the next backward."""
        (count,) = work.get_future().wait()
        count = None if use_static_world_size else int(count.item())
        self._ddp._reducer.pipeline.averaging.num_contributors = count

    def _install_post_backward_futures(self, futures: Sequence[Any]) -> None:
        """The next synchronised backward waits for these, too."""
        self._ddp._reducer.pipeline.owed.extend(futures)

    def _get_local_used_map(self) -> torch.Tensor:
        """How many ranks used each parameter in the last backward (1-D int32)."""
        return self._ddp._reducer.pipeline.used_map.last_counts

    def _ddp_graph_static(self) -> bool:
        """Whether the same parameters were missing in all backwards so far."""
        return self._ddp._reducer.expected.is_steady

    def _autograd_hook(self, i: int) -> None:
        """The gradient of parameter ``i`` is in ``.grad``."""
        self._ddp._reducer.hooks.python_hook(i)(None, None)

    def _delay_all_reduce(self) -> None:
        """Called in a backward: whatever did not arrive does not come any more."""
        self._ddp._reducer.end_now()

    def _set_static_graph(self) -> None:
        self._ddp._set_static_graph()

    def _check_reducer_finalized(self) -> None:
        refuse_forward(self._ddp._reducer)

    def _reset_state(self) -> None:
        """Forget a failed or unfinished backward, without asking other ranks."""
        self._ddp._reducer.restart(self._ddp.process_group)
        self._ddp._reducer.ready_order.allow_again()

    def _update_process_group(self, group: ProcessGroup) -> None:
        self._ddp._update_process_group(group)

    def _remove_autograd_hooks(self) -> None:
        self._ddp._remove_autograd_hooks()

    def _set_ddp_runtime_logging_sample_rate(self, rate: int) -> None:
        self._ddp._logging.set_rate(rate)

    def get_backward_stats(self) -> list[int]:
        """Nanoseconds from the end of the forward to each gradient, when sampled."""
        return self._ddp._logging.ready_times()
