"""Uneven inputs: ranks without inputs keep joining the collectives of the others.

A collective needs all ranks, so a rank that has run out of inputs cannot simply stop.
Inside ``join()`` every forward of an active rank begins with a small all-gather, in
which each rank announces its next step. A rank that has *joined* (has run out of
inputs) announces nothing, reads what the others do, and takes part in it::

    active   announce | rebuild | module buffers | forward | backward: buckets, used-map
    joined   read     | rebuild | module buffers |           zeros:    buckets, used-map

The protocol around it is ``torch.distributed.algorithms.Join``.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn
from torch.distributed.algorithms.join import Join, JoinHook

from minidp.comm import all_reduce, gather_integers, wait_for_message

from .copy_state import copy_after_join
from .sync_gradients import shadow_backward

if TYPE_CHECKING:
    from .wrapper import DataParallel


_WAITING = "joining ranks that still have inputs"


class StepAnnouncement(NamedTuple):
    """What a rank's next forward will do, as the ranks exchange it before each one.

    All ranks act on the maximum of each field. Ranks that have run out of inputs send
    the defaults. Ranks with inputs must agree on ``reduces`` (`_agree`).
    """

    root: int = -1  # a rank with inputs: the highest one broadcasts module buffers
    rebuilds: int = 0  # 1: it rebuilds buckets
    broadcasts: int = 0  # 1: it broadcasts module buffers
    reduces: int = 0  # 1: the backward after it averages gradients


class _LimitedJoin(Join):
    """torch's ``Join`` of one wrapper, whose time limit holds for its waits, too.

    A rank that ran out of inputs waits here for the next forward of the others. Their
    `announce` counts the same collective, so that a report names nobody who waits.
    """

    def __init__(self, ddp: DataParallel, **options: Any) -> None:
        self._communicator = ddp._reducer.communicator
        super().__init__([ddp], is_counted=True, **options)

    def _get_num_nonjoined_procs(self) -> float:
        number = torch.zeros(1, device=self._device)
        with self._communicator.blocking(_WAITING):
            group = self._communicator.group
            wait_for_message(all_reduce(number, group), number.device, group)
        return number.item()


@contextmanager
def joining(ddp: DataParallel, **options: Any) -> Iterator[None]:
    """Run the block in a `_LimitedJoin` with these options.

    After the block ``Join`` lets this rank shadow the others until all have run out. If
    ``enable`` is true, any exception marks the group as failed, so that `reset`
    replaces it, because other ranks may be inside a collective. What a collective
    raises while this rank shadows the others becomes a CollectiveError, unless
    ``throw_on_early_termination``.
    """
    communicator, ran_out = ddp._reducer.communicator, False
    try:
        with _LimitedJoin(ddp, **options):
            yield
            ran_out = True
    except Exception:
        if options["enable"]:  # other ranks may be inside a collective
            communicator.has_failed = True
        if ran_out and not options["throw_on_early_termination"]:
            with communicator.watching(_WAITING):
                raise
        raise
    finally:
        stop_joining(ddp)


def stop_joining(ddp: DataParallel) -> None:
    """End join mode on this rank, so that forwards announce nothing any more."""
    ddp._join_config = ddp._join_config.construct_disabled_join_config()
    ddp._divide_by_initial_world_size = True
    ddp._reducer.queue.averaging.num_contributors = None
    ddp._guard.comparison.ranks_with_inputs = None


def announce(ddp: DataParallel, **does: bool) -> int:
    """Announce a forward in ``join()``, wait for the other ranks, and agree with them.

    All ranks with inputs must call it together. Those that have run out take part in
    `Shadow.main_hook`.

    Args:
        ddp: The wrapper.
        does: The fields of `StepAnnouncement` but ``root``.

    Returns:
        The rank whose module buffers are to be broadcast.

    Raises:
        CollectiveError: Only some of the ranks with inputs will reduce.
    """
    work = Join.notify_join_context(ddp)
    if work is not None:
        with ddp._reducer.communicator.blocking("announcing a forward in join()"):
            wait_for_message(work, ddp.join_device, ddp.process_group)
    return _agree(ddp, StepAnnouncement(root=ddp._reducer.rank, **does)).root


def _agree(ddp: DataParallel, mine: StepAnnouncement) -> StepAnnouncement:
    """Exchange the ranks' announcements, and return the maximum of each field.

    All ranks must call it together. If some ranks reduce, it also sets over how many
    ranks to average: all, or with ``divide_by_initial_world_size=False`` those that
    reduce. The guard gets to know which ranks have inputs, because only these make
    steps.

    Raises:
        CollectiveError: Only some of the ranks with inputs will reduce. All raise it.
    """
    with ddp._reducer.communicator.blocking("announcing a forward in join()"):
        rows = gather_integers(mine, ddp.process_group, ddp.join_device)
        steps = [StepAnnouncement(*row) for row in rows]
        active = [rank for rank, step in enumerate(steps) if step.root == rank]
        reducing = [rank for rank, step in enumerate(steps) if step.reduces]
        if reducing and reducing != active:
            raise RuntimeError(
                "inside join() all ranks with inputs must agree on no_sync() and "
                f"no_grad(), but of ranks {active} only {reducing} have a synchronised "
                "forward"
            )
    ddp._guard.comparison.ranks_with_inputs = active
    averaging = ddp._reducer.queue.averaging
    if ddp._divide_by_initial_world_size:
        averaging.num_contributors = None
    elif reducing:  # else the backward of an earlier forward may still come
        averaging.num_contributors = len(reducing)
    return StepAnnouncement(*map(max, zip(*steps, strict=True)))


_Own = list[tuple[nn.Parameter, torch.Tensor, torch.Tensor | None]]


class Shadow(JoinHook):
    """What ``Join`` calls on a rank that has run out of inputs, so the others go on.

    `DataParallel.join_hook` makes one on each rank when ``join()`` begins. This drops a
    comparison of replicas that is under way. Unless ``is_counted``, the collectives of
    ``Join`` are counted here, so that all ranks have started equally many.

    Raises:
        RuntimeError: The user has registered a hook for module buffers, in whose
            collectives a rank without inputs could not take part.
    """

    def __init__(
        self,
        ddp: DataParallel,
        *,
        divide_by_initial_world_size: bool = True,
        is_counted: bool = False,
        **_others: object,  # arguments of other joinables
    ) -> None:
        if ddp._replication.buffer_hook is not None:
            raise RuntimeError(
                "join() does not go together with _register_buffer_comm_hook: ranks "
                "that ran out of inputs could not take part in the hook's collectives."
            )
        ddp._divide_by_initial_world_size = divide_by_initial_world_size
        ddp._has_begun_join = True
        ddp._replication.postpone_comparison()
        self._ddp, self._is_counted = ddp, is_counted
        # This rank's parameters, their gradients, and copies of these if they are views
        # of buckets, which the averages of the others will overwrite; once set aside.
        self._own: _Own | None = None

    def main_hook(self) -> None:
        """Take part in one forward and backward of the ranks with inputs.

        It must be called while they run these. As theirs do, it rebuilds buckets,
        receives module buffers, and reduces, but with zeros. ``.grad`` gets their
        averages, for optimizers that join, too. The first call that reduces keeps
        copies of this rank's own ``.grad``, for `post_hook`.
        """
        ddp, reducer = self._ddp, self._ddp._reducer
        self._count_join()
        agreed = _agree(ddp, StepAnnouncement())
        if agreed.rebuilds:
            reducer.rebuild_if_due()
        if agreed.broadcasts:
            ddp._replication.broadcast_buffers(ddp.module, agreed.root)
        ddp.require_forward_param_sync = bool(agreed.reduces)
        if agreed.reduces:
            if self._own is None:
                grads = [(p, p.grad) for p in reducer.params if p.grad is not None]
                are_views = reducer.queue.config.gradient_as_bucket_view
                self._own = [
                    (param, grad, grad.clone() if are_views else None)
                    for param, grad in grads
                ]
            for param in reducer.params:
                param.grad = None  # an optimizer must not apply the last average again
            shadow_backward(reducer)

    @torch.no_grad()
    def post_hook(self, is_last_joiner: bool) -> None:  # noqa: FBT001 -- torch's
        """Make the replicas equal again, and end join mode.

        All ranks must call it together, after all have run out. They get the state of a
        rank that ran out last; if there are several, of the highest. That is its
        parameters, its module buffers if forwards broadcast them, and its optimizers if
        ranks have made unequal numbers of steps. This rank's own gradients, which
        `main_hook` has kept, return to ``.grad``.
        """
        ddp = self._ddp
        self._count_join()
        if self._own is not None:
            for param in ddp._reducer.params:
                param.grad = None
            for param, grad, values in self._own:
                param.grad = grad if values is None else grad.copy_(values)
        mine = ddp.process_group.rank() if is_last_joiner else -1
        with ddp._reducer.communicator.blocking("ending join()"):
            rows = gather_integers([mine], ddp.process_group, ddp.join_device)
            root = ddp._authoritative_rank = max(rank for (rank,) in rows)
            ddp._replication.broadcast_parameters(ddp.module, root)
            if ddp.forward_sync_buffers:
                ddp._replication.broadcast_buffers(ddp.module, root)
            copy_after_join(ddp, root)
        stop_joining(ddp)

    def _count_join(self) -> None:
        """Count the all-reduce by which ``Join`` has just waited for other ranks."""
        if self._ddp._join_config.is_first_joinable and not self._is_counted:
            self._ddp._reducer.communicator.tally.started += 1
