"""Build the parts of a `DataParallel`: of a new one, or of a copy.

A copy (deepcopy, pickle) starts without comm hook and ``step_in_backward``. Its buckets
are in registration order, or as ``bucket_layout`` says. Nothing here communicates: some
ranks alone may copy.
"""

from __future__ import annotations

import warnings
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.distributed.algorithms.join import Joinable

from minidp.autotune import AutotunePolicy
from minidp.comm import CommHook, Communicator, ProcessGroup, is_builtin
from minidp.config import AUTO
from minidp.core import Reducer
from minidp.guard import Guard
from minidp.hang import the_watchdog
from minidp.replica import ReplicaCheck, verify

from . import arguments
from .mixed_precision import MixedPrecision, reduce_in_low_precision
from .replication import Replication

if TYPE_CHECKING:
    from .wrapper import DataParallel


def build(
    checked: arguments.Arguments, group: ProcessGroup, ignored: set[str], kind: str
) -> tuple[Reducer, Guard, Replication, MixedPrecision | None]:
    """Create and connect reducer, guard, replication, precision; runs no collective.

    Hooks the parameters and ``Optimizer.step``; starts a heartbeat in the store.
    ``ignored``: names on the module's ignore list. ``kind``: ``verify.WRAPPED``: all
    checks; "unsynced" (``init_sync=False``): no check_replicas_every="auto"; "copy":
    neither that nor a heartbeat, as other ranks may have no such copy.
    """
    config, replica, own = checked.config, checked.replica, checked.own
    key = verify.next_key(group, kind)
    is_patient = own.hang_timeout == AUTO
    communicator = Communicator(group, own.hang_limit, is_patient=is_patient)
    tunes = config.tunes and group.size() > 1
    policy = AutotunePolicy(config.saved_layout) if tunes else None
    reducer = Reducer(replica.params, replica.specs, config, communicator, policy)
    queue = reducer.queue
    queue.checks_finite = own.check_finite_grads
    if policy is not None:
        policy.measure(queue, reducer.hooks)
    if kind != "copy":  # ranks may copy as they like: no key is equal on all
        the_watchdog.start_heartbeat(reducer, key)
    replication = Replication(reducer, replica.module, ignored, key)
    every = own.check_replicas_every
    is_verified = kind == verify.WRAPPED and is_builtin(group)
    if every and (is_verified or every != AUTO):
        replication.check = ReplicaCheck(queue, reducer.ledger, every)
    guard = Guard(reducer, own.unsynced, replica)
    guard.replica_check = replication.check
    precision = None
    if checked.precision is not None:
        precision = MixedPrecision(replica, checked.precision, group.rank())
        hook = CommHook(checked.precision, reduce_in_low_precision)
        queue.averaging.comm_hook = hook
    return reducer, guard, replication, precision


def portable_state(ddp: DataParallel) -> dict[str, Any]:
    """Return a wrapper's attributes for deepcopy or pickle: no parts, no process group.

    "options" holds the constructor's options (`arguments.keep`), "sync_enabled" whether
    the wrapper is outside no_sync(). The module is among the attributes, uncopied.
    """
    state = {k: v for k, v in ddp.__dict__.items() if k not in ddp._not_copied}
    state["options"] = dict(vars(ddp._given))
    state["sync_enabled"] = ddp.require_backward_grad_sync
    state["is_manual"] = ddp._reducer.is_manual  # the user finalizes backwards
    return state


def restore(ddp: DataParallel, state: dict[str, Any], group: ProcessGroup) -> None:
    """Fill the empty ``ddp`` from a `portable_state`, with new parts on ``group``.

    Checks the options again, without warnings; raises as `arguments.check`. Runs no
    collective. ``ddp`` then has no comm hook and no optimizer in its backward.
    """
    state = dict(state)
    options, sync_enabled = state.pop("options"), state.pop("sync_enabled")
    is_manual = state.pop("is_manual")
    nn.Module.__setstate__(ddp, state)
    Joinable.__init__(ddp)
    ddp.process_group = group
    ddp._given = SimpleNamespace(**options)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the original's constructor has warned
        checked = arguments.check(ddp.module, ddp._given)
    ddp._wire(checked, "copy")
    ddp.require_backward_grad_sync = sync_enabled
    ddp._reducer.is_manual = is_manual
