"""Uneven inputs: ranks that ran out keep the others company.

Inside ``join()`` every forward of an active rank begins with a small exchange: each
rank says what it is about to do. A rank that has *joined* (ran out of inputs) says
nothing, hears what the others do, and shadows it::

    active   announce | rebuild | module buffers | forward | backward: buckets, used-map
    joined   listen   | rebuild | module buffers |           zeros:    buckets, used-map

The protocol around it (who still has inputs, when everybody is done, several joinables)
is ``torch.distributed.algorithms.Join``, with which optimizers that communicate join as
well.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn
from torch.distributed.algorithms.join import Join, Joinable, JoinHook

from ._collectives import gather_integers
from ._on_demand import shadow_backward
from ._shared_state import SharedState
from ._waiting import wait_for

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class Heading(NamedTuple):
    """What a rank is about to do, in its next forward."""

    is_active: bool = False  # it has inputs
    rebuilds: bool = False  # buckets
    broadcasts: bool = False  # module buffers
    reduces: bool = False  # gradients, in the backward after it


class Agreement(NamedTuple):
    """What all ranks are about to do."""

    rebuilds: bool
    broadcasts: bool
    active: list[int]  # ranks that have inputs
    reducing: list[int]  # ranks that have a backward to come
    root: int  # whose module buffers count


def agree(mine: Heading, group: ProcessGroup, device: torch.device) -> Agreement:
    """Collective: exchange headings (one small all-gather)."""
    found = [Heading(*map(bool, row)) for row in gather_integers(mine, group, device)]
    active = [rank for rank, heading in enumerate(found) if heading.is_active]
    return Agreement(
        rebuilds=any(heading.rebuilds for heading in found),
        broadcasts=any(heading.broadcasts for heading in found),
        active=active,
        reducing=[rank for rank, heading in enumerate(found) if heading.reduces],
        root=max(active, default=0),
    )


class UnevenInputs(SharedState, Joinable):
    """The part of `DataParallel` that takes part in ``Join``."""

    device: torch.device
    _divide_by_initial_world_size = True
    _authoritative_rank = 0  # whose state counts
    _has_joined = False  # a join was announced, ever

    @contextmanager
    def join(
        self,
        divide_by_initial_world_size: bool = True,  # noqa: FBT001, FBT002 -- torch's
        enable: bool = True,  # noqa: FBT001, FBT002
        throw_on_early_termination: bool = False,  # noqa: FBT001, FBT002
    ) -> Iterator[None]:
        """Train on numbers of inputs that differ between ranks.

        A rank that runs out goes on to take part in the collectives of the others,
        until all have; then every rank gets the state of one that trained longest::

            with model.join():           # on every rank
                for x, y in loader:      # of any length
                    ...

        If a rank raises inside, the others get a `CollectiveError` after the group's
        timeout; then call `reset` on all ranks.

        Args:
            divide_by_initial_world_size: average over all ranks. False: over those that
                still have inputs (``GradBucket.divisor`` for comm hooks).
            enable: False does nothing, for ranks that are known to be even.
            throw_on_early_termination: raise on every rank as soon as one runs out.

        Raises:
            RuntimeError: a rank ran out, and ``throw_on_early_termination`` was asked.
            CollectiveError: another rank does not take part any more.
        """
        watch, ran_out = self._reducer.pipeline.watch, False
        try:
            with Join(
                [self],
                enable,
                throw_on_early_termination,
                divide_by_initial_world_size=divide_by_initial_world_size,
            ):
                yield
                ran_out = True
        except Exception:
            watch.has_failed = True  # others may be inside a collective
            if ran_out and not throw_on_early_termination:
                with watch.over("keeping company to ranks that still have inputs"):
                    raise
            raise
        finally:
            self._stop_joining()

    def join_hook(self, **kwargs: Any) -> JoinHook:
        """What this object does for ``Join`` once this rank has run out of inputs.

        Args:
            kwargs: those of ``Join``; ours is ``divide_by_initial_world_size``.
        """
        self._divide_by_initial_world_size = kwargs.get(
            "divide_by_initial_world_size", True
        )
        self._has_joined = True
        if self._replica_check is not None:
            self._replica_check.postpone()
        return Shadow(self)

    @property
    def join_device(self) -> torch.device:
        """Where the messages of ``Join`` live."""
        return self.device

    @property
    def join_process_group(self) -> ProcessGroup:
        """The ranks that join."""
        return self.process_group

    def _stop_joining(self) -> None:
        """Forwards are no longer announced, and gradients averaged over all ranks."""
        disabled = self._join_config.construct_disabled_join_config()
        self._join_config = disabled
        self._divide_by_initial_world_size = True
        self._reducer.pipeline.averaging.num_contributors = None

    def _announce(self, heading: Heading) -> int:
        """Before a forward, collective inside ``join()``.

        Returns:
            The rank whose module buffers count.

        Raises:
            RuntimeError: another rank ran out of inputs, and that was to be an error.
        """
        if not self._join_config.enable:
            return 0
        work = Join.notify_join_context(self)
        if work is not None:
            with self._reducer.pipeline.watch.whole("announcing a forward in join()"):
                wait_for(work)
        return self._agree(heading).root

    def _agree(self, heading: Heading) -> Agreement:
        """Collective: the next backward averages over the ranks that will reduce."""
        with self._reducer.pipeline.watch.whole("announcing a forward in join()"):
            agreement = agree(heading, self.process_group, self.device)
            if agreement.reducing and agreement.reducing != agreement.active:
                raise RuntimeError(
                    "inside join() all ranks with inputs must agree on no_sync() and "
                    f"no_grad(), but of ranks {agreement.active} only "
                    f"{agreement.reducing} have a synchronised forward"
                )
        if self._divide_by_initial_world_size:
            self._reducer.pipeline.averaging.num_contributors = None
        elif agreement.reducing:  # else the last backward may still come
            num_reducing = len(agreement.reducing)
            self._reducer.pipeline.averaging.num_contributors = num_reducing
        return agreement


class Shadow(JoinHook):
    """Does what the active ranks do, with nothing to contribute.

    Meanwhile ``.grad`` hold the averages of the others, for optimizers that join, too.
    This rank's own gradients come back at the end: they may be waiting for its next
    backward.
    """

    def __init__(self, ddp: UnevenInputs) -> None:
        self._ddp = ddp
        self._own: list[tuple[nn.Parameter, torch.Tensor, torch.Tensor]] | None = None

    def main_hook(self) -> None:
        """Shadow one forward and its backward."""
        ddp = self._ddp
        agreed = ddp._agree(Heading())
        if agreed.rebuilds:
            ddp._reducer.rebuild_if_due()
        if agreed.broadcasts:
            ddp._sync_module_buffers(agreed.root)
        ddp.require_forward_param_sync = bool(agreed.reducing)
        if agreed.reducing:
            if self._own is None:
                self._own = _values_of(ddp._reducer.params)
            for param in ddp._reducer.params:
                param.grad = None  # nobody may apply what an earlier shadow left
            shadow_backward(ddp._reducer)

    def post_hook(self, is_last_joiner: bool) -> None:  # noqa: FBT001 -- torch's
        """Everybody is done: all take the state of a rank that trained longest."""
        ddp = self._ddp
        if self._own is not None:
            _put_back(ddp._reducer.params, self._own)
        mine = ddp.process_group.rank() if is_last_joiner else -1
        rows = gather_integers([mine], ddp.process_group, ddp.device)
        ddp._authoritative_rank = max(rank for (rank,) in rows)
        ddp._take_state_of(ddp._authoritative_rank)
        ddp._stop_joining()


def _values_of(
    params: Sequence[nn.Parameter],
) -> list[tuple[nn.Parameter, torch.Tensor, torch.Tensor]]:
    """Parameters with a gradient, their gradients, and the values of these."""
    return [(p, p.grad, p.grad.clone()) for p in params if p.grad is not None]


def _put_back(
    params: Sequence[nn.Parameter],
    own: Sequence[tuple[nn.Parameter, torch.Tensor, torch.Tensor]],
) -> None:
    for param in params:
        param.grad = None
    for param, grad, values in own:
        if grad.is_sparse:
            param.grad = values
            continue
        with torch.no_grad():
            grad.copy_(values)  # it may be a view of a bucket, which was used meanwhile
        param.grad = grad
