"""Torch 2.15's manual finalization: the user says when averages are written.

With ``ddp.require_manual_backward_finalization = True`` a backward launches its buckets
and returns. `finalize_backward` waits for them and writes ``.grad``, once for each
synchronised backward, so that other work, such as a sparse exchange of the user's own,
overlaps with the all-reduce. It is there where torch has it. On an older torch the
names do not exist, and to switch it on is an error: the backward would finalize by
itself.
"""

from __future__ import annotations

from typing import Any

from torch.nn.parallel import DistributedDataParallel

from minidp.core import Phase
from minidp.errors import MiniDPError, UnfinishedReductionError, explain

IS_OFFERED = hasattr(DistributedDataParallel, "finalize_backward")


def is_required(ddp: Any) -> bool:
    """Whether `finalize_backward` must end each synchronised backward."""
    if not IS_OFFERED:
        raise AttributeError(
            "require_manual_backward_finalization needs torch 2.15 or newer."
        )
    return bool(ddp._reducer.is_manual)


def require(ddp: Any, required: Any) -> None:
    """Switch manual finalization on or off, between two steps.

    Raises:
        AttributeError: Torch is older than 2.15, and has no manual finalization.
        RuntimeError: A forward's backward is not finalized yet, or all parameters are
            delayed, as torch cannot do both.
        TypeError: The value is no truth value.
    """
    if not isinstance(required, bool | int | None):
        raise TypeError(
            "require_manual_backward_finalization must be True or False, but got "
            f"{required!r} ({type(required).__name__})."
        )
    reducer, required = ddp._reducer, bool(required)
    if required and not IS_OFFERED:
        raise AttributeError(
            "require_manual_backward_finalization needs torch 2.15 or newer: here each "
            "backward finalizes by itself, and there is no finalize_backward()."
        )
    if required:
        _refuse_all_delayed(ddp)
    busy = reducer.phase.now not in (Phase.IDLE, Phase.FAILED)
    if busy and required is not reducer.is_manual:
        raise MiniDPError(
            explain(
                reducer.rank,
                "require_manual_backward_finalization was changed after a forward, "
                "while a backward is expected or in progress.",
                remedy="set it before the forward, or after finalize_backward()",
            )
        )
    reducer.is_manual = required


def should_finalize_after_backward(ddp: Any) -> bool:
    """Whether `finalize_backward` must wait until the coming backward has returned.

    This is to be read after the forward. If it is False, a hook of that backward may
    call `finalize_backward`, too, as soon as all parameters have got their gradients.
    It is True until the buckets are rebuilt, and where unused parameters are known only
    when the backward ends.
    """
    reducer = ddp._reducer
    if not reducer.is_manual:
        return False
    mode, policy = reducer.mode, reducer.rebuild_policy
    rebuilds = mode.orders_buckets and not policy.has_rebuilt
    return bool(rebuilds or policy.is_due or mode.fills_in_missing)


def finalize_backward(ddp: Any) -> None:
    """Wait for the gradients of the last synchronised backward, and write the averages.

    Call this once for each synchronised backward: after it, or in one of its hooks when
    all gradients have come. On a device the current stream waits.

    Raises:
        RuntimeError: Manual finalization is not switched on, or not possible; gradients
            are missing; or there is nothing to finalize, because this is inside
            no_sync(), before a backward, or a second call.
    """
    reducer = ddp._reducer
    _refuse_all_delayed(ddp)
    if not reducer.is_manual:
        raise MiniDPError(
            explain(
                reducer.rank,
                "finalize_backward() was called, but backwards finalize by themselves.",
                remedy="set require_manual_backward_finalization = True before the "
                "forward, or leave out the call",
            )
        )
    if reducer.awaits_user:
        reducer.finalize_now()
    elif reducer.phase.now in (Phase.REDUCING, Phase.PAUSED):
        missing = [reducer.names[i] for i in reducer.pending.missing()]
        raise UnfinishedReductionError(
            explain(
                reducer.rank,
                "finalize_backward() was called before all buckets were ready: "
                "gradients are missing.",
                names=missing,
                remedy="call it after backward() returned, or in a hook that runs when "
                "all parameters have gradients; if some take no part in the loss, pass "
                "find_unused_parameters=True",
            )
        )
    else:
        raise MiniDPError(
            explain(
                reducer.rank,
                "finalize_backward() was called, but no gradients wait to be averaged.",
                remedy="call it once for each synchronised backward: not before that, "
                "not a second time, and not for backwards of forwards that ran inside "
                "no_sync()",
            )
        )


def _refuse_all_delayed(ddp: Any) -> None:
    delayed = ddp._delayed()
    if delayed and delayed.keys() >= set(ddp._reducer.names):
        raise MiniDPError(
            explain(
                ddp._reducer.rank,
                "Manual finalization is not supported when all parameters use "
                "delay_all_reduce_named_params.",
                remedy="delay some of them only, or let the backward finalize",
            )
        )
