"""Uneven inputs: ranks without inputs keep joining the collectives of the others.

Inside ``join()`` every forward of an active rank begins with a small all-gather: each
rank announces its next step. A rank that has *joined* (ran out of inputs) announces
nothing, reads what the others do, and takes part in it::

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

from minidp.comm import gather_integers, wait_for

from .recovery import settle_after_join
from .sync_gradients import shadow_backward

if TYPE_CHECKING:
    from .wrapper import DataParallel


class StepAnnouncement(NamedTuple):
    """Hold what one rank's forward will do, as ranks exchange it before each forward.

    All ranks act on each field's maximum. Ranks that ran out of inputs send the
    defaults. Ranks with inputs must agree on ``reduces``, see `_agree`.
    """

    root: int = -1  # a rank with inputs: the highest one broadcasts module buffers
    rebuilds: int = 0  # 1: it rebuilds buckets
    broadcasts: int = 0  # 1: it broadcasts module buffers
    reduces: int = 0  # 1: gradients, in the backward after it


@contextmanager
def joining(ddp: DataParallel, **options: Any) -> Iterator[None]:
    """Run the block in torch's ``Join`` with these ``options``, then `stop_joining`.

    After the block ``Join`` lets this rank shadow the others until all ran out. Any
    exception marks the group as failed (if ``enable``), so that `reset` replaces it.
    One after it becomes a CollectiveError, unless ``throw_on_early_termination``.
    """
    communicator, ran_out = ddp._reducer.communicator, False
    try:
        with Join([ddp], **options):
            yield
            ran_out = True
    except Exception:
        if options["enable"]:  # other ranks may be inside a collective
            communicator.has_failed = True
        if ran_out and not options["throw_on_early_termination"]:
            with communicator.watching("joining ranks that still have inputs"):
                raise
        raise
    finally:
        stop_joining(ddp)


def stop_joining(ddp: DataParallel) -> None:
    """End join mode on this rank: forwards announce nothing; average over all ranks."""
    ddp._join_config = ddp._join_config.construct_disabled_join_config()
    ddp._divide_by_initial_world_size = True
    ddp._reducer.queue.averaging.num_contributors = None
    ddp._guard.comparison.ranks_with_inputs = None


def announce(ddp: DataParallel, **does: bool) -> int:
    """Collective: announce a forward in ``join()`` and what it will do; wait.

    Ranks that ran out of inputs take part by `Shadow.main_hook`. ``does``: values of
    `StepAnnouncement`'s rebuilds, broadcasts, reduces. Return the rank whose module
    buffers are to be broadcast. Sets averages' divisor, and raises, as `_agree`.
    """
    work = Join.notify_join_context(ddp)
    if work is not None:
        with ddp._reducer.communicator.blocking("announcing a forward in join()"):
            wait_for(work)
    return _agree(ddp, StepAnnouncement(root=ddp._reducer.rank, **does)).root


def _agree(ddp: DataParallel, mine: StepAnnouncement) -> StepAnnouncement:
    """Collective: exchange the ranks' announcements; return each field's maximum.

    If some rank reduces, set the number of ranks to average over: all, or with
    divide_by_initial_world_size=False those that reduce. CollectiveError on all ranks
    if only some of those with inputs will reduce. ``mine``: this rank's. The guard
    gets to know which ranks have inputs, since only these make steps.
    """
    with ddp._reducer.communicator.blocking("announcing a forward in join()"):
        rows = gather_integers(mine, ddp.process_group, ddp.device)
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


class Shadow(JoinHook):
    """What ``Join`` calls on a rank that ran out of inputs, so that the others go on.

    `DataParallel.join_hook` makes one on each rank, as join() begins. The constructor
    stores ``divide_by_initial_world_size`` in ``ddp``, and drops a checksum of replicas
    that is under way. RuntimeError with a buffer hook.
    """

    def __init__(
        self,
        ddp: DataParallel,
        *,
        divide_by_initial_world_size: bool = True,
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
        self._ddp = ddp
        # This rank's parameters, their gradients, copies of these; None: not set aside.
        self._own: list[tuple[nn.Parameter, torch.Tensor, torch.Tensor]] | None = None

    def main_hook(self) -> None:
        """Collective: take part in one forward and backward of the ranks with inputs.

        If theirs do: rebuild, receive buffers, reduce zeros; ``.grad`` then gets their
        averages, for optimizers that join, too. The first call that reduces keeps
        copies of this rank's own ``.grad``, for `post_hook`.
        """
        ddp, reducer = self._ddp, self._ddp._reducer
        agreed = _agree(ddp, StepAnnouncement())
        if agreed.rebuilds:
            reducer.rebuild_if_due()
        if agreed.broadcasts:
            ddp._replication.broadcast_buffers(ddp.module, agreed.root)
        ddp.require_forward_param_sync = bool(agreed.reduces)
        if agreed.reduces:
            if self._own is None:
                grads = [(p, p.grad) for p in reducer.params if p.grad is not None]
                self._own = [(param, grad, grad.clone()) for param, grad in grads]
            for param in reducer.params:
                param.grad = None  # an optimizer must not apply the last average again
            shadow_backward(reducer)

    @torch.no_grad()
    def post_hook(self, is_last_joiner: bool) -> None:  # noqa: FBT001 -- torch's
        """Collective: restore own gradients, copy a last joiner's state, end join mode.

        All ranks call it once all have run out. Own gradients: those that `main_hook`
        kept. State: parameters, and module buffers if forwards broadcast them; if ranks
        made unequal numbers of steps, also optimizers. Of several last ranks
        (``is_last_joiner``), the highest one sends it.
        """
        ddp = self._ddp
        if self._own is not None:
            for param in ddp._reducer.params:
                param.grad = None
            for param, grad, values in self._own:
                # A view of a bucket was overwritten meanwhile.
                param.grad = values if grad.is_sparse else grad.copy_(values)
        mine = ddp.process_group.rank() if is_last_joiner else -1
        rows = gather_integers([mine], ddp.process_group, ddp.device)
        ddp._authoritative_rank = max(rank for (rank,) in rows)
        ddp._replication.broadcast_parameters(ddp.module, ddp._authoritative_rank)
        if ddp.forward_sync_buffers:
            ddp._replication.broadcast_buffers(ddp.module, ddp._authoritative_rank)
        settle_after_join(ddp, ddp._authoritative_rank)
        stop_joining(ddp)
