"""Pickle, deepcopy, checkpoints: what a copy of a `DataParallel` is made from."""

from __future__ import annotations

import copy
import warnings
from typing import TYPE_CHECKING, Any

from torch import nn

from . import _arguments
from ._groups import default_group

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class Copies:
    """The part of `DataParallel` that is copied: all but what is wired to a group.

    A copy starts without comm hook, with its buckets in registration order (or as the
    constructor was given them).
    """

    _not_portable: tuple[str, ...] = (
        *("process_group", "device_mesh", "_reducer", "_guard", "_precision"),
        "_replica_check",
    )

    @property
    def bucket_layout(self) -> dict[str, Any]:
        """The buckets of the next backward, as plain data: put it in checkpoints.

        Save rank 0's: until the first forward after the first backward, which rebuilds
        the buckets, it is rank 0's ready order that counts. With ``static_graph`` an
        undisturbed run rebuilds after the second backward; save it from then on. With
        ``gradient_as_bucket_view`` and gradients that are zeroed, but never None, make
        them (zeros) before wrapping again: in-place sums are divided, fresh gradients
        multiplied, which differs in the last bit.
        """
        reducer = self.__dict__["_reducer"]
        pipeline, order = reducer.pipeline, reducer.ready_order
        layout: dict[str, Any] = order.plain_layout(
            pipeline.layout, pipeline.specs, pipeline.config
        )
        return layout

    def __getstate__(self) -> dict[str, Any]:
        """For pickle, which cannot carry a process group: only the default one.

        Raises:
            RuntimeError: the object uses another group.
        """
        if self.__dict__["process_group"] is not default_group():
            raise RuntimeError(
                "DDP Pickling/Unpickling are only supported when using DDP with the "
                "default process group. Save module.state_dict() instead."
            )
        return portable_state(self)

    def __setstate__(self, state: dict[str, Any]) -> None:
        restore(self, state, default_group())

    def __deepcopy__(self, memo: dict[int, Any]) -> Copies:
        """A copy in this process shares the group, whichever it is."""
        twin = type(self).__new__(type(self))
        memo[id(self)] = twin
        group = self.__dict__["process_group"]
        restore(twin, copy.deepcopy(portable_state(self), memo), group)
        return twin


def portable_state(ddp: Any) -> dict[str, Any]:
    """What a copy is made from: all but the group and what is wired to it."""
    state = {k: v for k, v in ddp.__dict__.items() if k not in ddp._not_portable}
    return state | {"sync_enabled": ddp.require_backward_grad_sync}


def restore(ddp: Any, state: dict[str, Any], group: ProcessGroup) -> None:
    """Turn an empty object into a copy, on ``group``, without any collective."""
    state = dict(state)
    sync_enabled = state.pop("sync_enabled")
    nn.Module.__setstate__(ddp, state)
    ddp.process_group = group
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # said when the original was built
        checked = _arguments.check(ddp.module, ddp._given)
    ddp._wire(checked, "copy")
    ddp.require_backward_grad_sync = sync_enabled
