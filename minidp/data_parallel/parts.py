"""Build the parts of a `DataParallel`: of a new one, or of a copy.

A copy (by deepcopy or pickle) starts without a comm hook and ``step_in_backward``. Its
buckets are in registration order, or as ``bucket_layout`` says. Nothing here
communicates, because one rank alone may make a copy.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.distributed.algorithms.join import Joinable

from minidp.autotune import AutotunePolicy
from minidp.comm import Communicator, ProcessGroup
from minidp.config import AUTO
from minidp.console import trim_tracebacks
from minidp.core import Reducer
from minidp.errors import MiniDPError
from minidp.guard import Guard
from minidp.hang import the_watchdog
from minidp.replica import verify
from minidp.sync_batchnorm import adopt_layers

from . import arguments
from .dist_autograd import RpcStore
from .replication import Replication

if TYPE_CHECKING:
    from .wrapper import DataParallel


def build(
    checked: arguments.Arguments, group: ProcessGroup, ignored: set[str], kind: str
) -> tuple[Reducer, Guard, Replication]:
    """Create and connect reducer, guard and replication, without communication.

    This hooks the parameters and ``Optimizer.step``, and starts a heartbeat in the
    store.

    Args:
        checked: The arguments of the constructor.
        group: The process group.
        ignored: The names on the module's ignore list.
        kind: ``verify.WRAPPED`` for all checks; "unsynced" (``init_sync=False``) for
            all but those at construction. A "copy" has no
            ``check_replicas_every="auto"`` and no heartbeat, because other ranks may
            have no such copy.
    """
    trim_tracebacks(MiniDPError)
    config, replica, own = checked.config, checked.replica, checked.own
    key = verify.next_key(group, kind)
    is_patient = own.hang_timeout == AUTO
    communicator = Communicator(
        group,
        own.hang_limit,
        is_patient=is_patient,
        device=replica.specs[0].device,
    )
    tunes = config.tunes and group.size() > 1
    policy = AutotunePolicy(config.saved_layout) if tunes else None
    reducer = Reducer(replica.params, replica.specs, config, communicator, policy)
    adopt_layers(replica.module, reducer)
    queue = reducer.queue
    queue.grad_store = RpcStore(reducer)
    queue.checks_finite = own.check_finite_grads
    if policy is not None:
        policy.measure(queue, reducer.hooks)
    if kind != "copy":  # ranks may copy as they like: no key is equal on all
        the_watchdog().start_heartbeat(reducer, key, is_alone=kind != verify.WRAPPED)
    replication = Replication(reducer, replica.module, ignored, key)
    replication.every = own.check_replicas_every
    replication.warns = own.unsynced == "warn"
    is_auto = own.check_replicas_every == AUTO
    if kind != "copy" or not is_auto:  # a copy may be meant for one rank alone
        is_new = kind not in (verify.WRAPPED, "copy")
        replication.compare_on(group, new=is_new, alone=is_new and is_auto)
    guard = Guard(
        reducer, own.unsynced, replica, replication.key_now, replication.doubts
    )
    guard.is_copy = kind == "copy"
    guard.replica_check = replication.check
    return reducer, guard, replication


def explain_other_names(
    module: nn.Module, state_dict: Mapping[str, Any], prefix: str
) -> str:
    """Say why a wrapper finds none of its names in a checkpoint, or "" if unknown.

    The reason is known if the names are those of the module without "module.", or with
    something more in front.

    Args:
        module: The wrapped module.
        state_dict: The checkpoint.
        prefix: The wrapper's own place in it.
    """
    own = f"{prefix}module."
    names = [*dict(module.named_parameters()), *dict(module.named_buffers())]
    if not names or any(f"{own}{name}" in state_dict for name in names):
        return ""
    name = names[0]
    extras = [k.removesuffix(name) for k in state_dict if f".{k}".endswith(f".{name}")]
    known = (e for e in extras if all(f"{e}{each}" in state_dict for each in names))
    if (extra := next(known, None)) is None:
        return ""  # of another model
    what = f"The checkpoint has {extra + name!r} where this wrapper has {own + name!r}."
    if extra == prefix:
        return (
            f"{what} What to do: this is a checkpoint of the module itself, without a "
            "wrapper, so load it before wrapping, or into the wrapper's .module."
        )
    return (
        f"{what} What to do: take what is too much off the names, with torch.nn.modules"
        f".utils.consume_prefix_in_state_dict_if_present(checkpoint, {extra!r}), and "
        "load them into the wrapper's .module."
    )


def portable_state(ddp: DataParallel) -> dict[str, Any]:
    """Return the attributes of a wrapper for deepcopy or pickle.

    They lack its parts and the process group, which a copy makes anew. "options" has
    the options of the constructor (`arguments.keep`), and "sync_enabled" whether the
    wrapper is outside of ``no_sync()``. The module is among them, not copied.
    """
    state = {k: v for k, v in ddp.__dict__.items() if k not in ddp._not_copied}
    state["options"] = dict(vars(ddp._given))
    if ddp._logical is not None:  # the copy goes on with the same step
        state["options"]["logical_ranks"] = ddp.logical_state
    state["sync_enabled"] = ddp.require_backward_grad_sync
    state["is_manual"] = ddp._reducer.is_manual  # the user finalizes backwards
    return state


def restore(ddp: DataParallel, state: dict[str, Any], group: ProcessGroup) -> None:
    """Fill an empty wrapper from a `portable_state`, with new parts on a group.

    The options are checked again, without warnings. The wrapper has no comm hook and no
    optimizer in its backward.
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
