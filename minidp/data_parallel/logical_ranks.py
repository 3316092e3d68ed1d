"""Train by logical ranks: the methods of `DataParallel` for ``logical_ranks``."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from minidp.console import warn
from minidp.core import without_user_modes
from minidp.errors import LogicalRankError, UnavailableError, explain
from minidp.logical import Audit, AuditOptions, LogicalRanks, conditions

from . import sharded_step
from .sync_gradients import failing

if TYPE_CHECKING:
    from .arguments import Arguments
    from .replication import Replication
    from .wrapper import DataParallel


def each_logical_rank(  # noqa: D417 -- self: a method
    self: DataParallel, step: int | None = None
) -> Iterator[int]:
    """Go through the logical ranks of this rank, one training step at a time.

    The body trains on the samples of one logical rank, and the optimizer steps after
    the loop::

        model = minidp.DataParallel(net, logical_ranks=8)
        for step in range(steps):
            for leaf in model.each_logical_rank():
                x, y = batches_of[leaf][step]
                loss_fn(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()

    After the loop ``.grad`` is the mean over all logical ranks (with
    ``average_over="items"`` over all items), and has the same bits on any number of
    ranks up to that of logical ranks. With `sharded_step` only the rank that owns a
    parameter has its mean, and the new values have the same bits. All ranks run the
    loop together. In the body of each turn module buffers are those of the step's
    beginning, and random numbers depend on seed, step and logical rank alone; after the
    loop generators are as before it. Of several backwards in one turn all but the last
    belong into `no_sync`.

    With ``audit_every`` an audited step first yields a logical rank of another rank
    (one that is not in `logical_block`), and after an alarm some a second time. Their
    gradients are compared and dropped. So samples must be found by step and logical
    rank, and not by what came before.

    Args:
        step: The number of the step, for random numbers. By default loops are counted,
            also those of the run that this one resumes. A script that tries a step
            again after an error passes its own number.

    Returns:
        An iterator over the numbers of this rank's logical ranks, in ascending order.

    Raises:
        LogicalRankError: The model has no logical ranks; the last loop was left early;
            in the loop, a logical rank has not done what is said here; or, at its end,
            an audit has found that ranks have computed different bits.
    """
    return _of(self, "each_logical_rank").each(step)


def logical_block(self: DataParallel) -> Sequence[int]:
    """The numbers of the logical ranks that this rank does, in each step the same.

    With `minidp.torchft`, where others may take them over, those of the last round.

    Raises:
        UnavailableError: The model has no logical ranks. It is an AttributeError, too.
    """
    return _of(self, "logical_block", UnavailableError).block


def logical_state(self: DataParallel) -> dict[str, Any]:
    """What a checkpoint needs to go on with the same bits, as plain data.

    Pass it as ``logical_ranks`` to the wrapper that resumes, on any number of ranks. It
    has the number of logical ranks, the seed of their random numbers, the number of the
    next step, and under "conditions" what else decides about bits; a warning names what
    of this differs at the resume.

    Raises:
        UnavailableError: The model has no logical ranks. It is an AttributeError, too.
    """
    mine = _of(self, "logical_state", UnavailableError)
    options = mine.options
    return {
        "number": options.number,
        "seed": options.seed,
        "first_step": mine.step,
        "conditions": conditions(self.device),
    }


def build(ddp: DataParallel, checked: Arguments) -> LogicalRanks | None:
    """Return the logical ranks of a wrapper, or None if it has none."""
    options, own = checked.logical, checked.own
    if options is None:
        return None
    wrapper: Any = weakref.proxy(ddp)  # which has what is built here

    def switch(*, enabled: bool) -> None:
        wrapper.require_backward_grad_sync = enabled

    def sync_buffers(*, before_loop: bool) -> Mapping[str, Tensor]:
        replication: Replication = wrapper._replication
        if before_loop:
            sharded_step.before_loop(wrapper)
        replication.collect(wrapper.module)
        if wrapper.forward_sync_buffers and replication.buffers:
            with (
                failing(wrapper._reducer, only_with_group=True),
                without_user_modes(keeps_inference=True),
            ):
                replication.broadcast_buffers(wrapper.module)
            wrapper.require_forward_param_sync = not before_loop
        return replication.buffers

    built = LogicalRanks(ddp._reducer, ddp.module, options, switch, sync_buffers)
    ddp._guard.precondition = built.refuse_step
    if own.audit_steps:
        every = AuditOptions(own.audit_steps, own.audit_action)
        common = weakref.proxy(ddp._reducer), options.number, every
        built.audit = Audit(*common, partial(_weights, wrapper), partial(_now, wrapper))
    return built


def _weights(ddp: DataParallel) -> dict[str, Tensor]:
    """Return the parameters, also frozen ones, that are equal on all ranks."""
    return {
        name: param
        for name, param in ddp.module.named_parameters()
        if name not in ddp.parameters_to_ignore
        and param.layout is torch.strided
        and not param.is_meta
    }


def _now(ddp: DataParallel) -> Callable[[], None]:
    """Return a function that lets later forwards broadcast what they would now."""
    is_due = ddp.require_forward_param_sync

    def put_back() -> None:
        ddp.require_forward_param_sync = is_due

    return put_back


def check(ddp: DataParallel, checked: Arguments) -> None:
    """Check that the ranks of the wrapper's group can do the logical ranks.

    Raises:
        ValueError: They cannot.
    """
    options, size = checked.logical, ddp.process_group.size()
    if options is None:
        return
    if not ddp._given.init_sync:
        raise ValueError(
            "logical_ranks does not go with init_sync=False: the ranks agree on a seed "
            "when they wrap the module. What to do: leave one of the two out."
        )
    if size > options.number:
        raise ValueError(
            f"logical_ranks={options.number} leaves nothing to do for some of {size} "
            "ranks. What to do: pass at least as many logical ranks as there will ever "
            "be ranks, or start fewer ranks."
        )
    given = ddp._given.logical_ranks
    then = given.get("conditions", {}) if isinstance(given, Mapping) else {}
    now = conditions(checked.devices.device)
    changed = [
        f"{name} (was {then[name]}, is {now[name]})"
        for name in now
        if then.get(name, now[name]) != now[name]
    ]
    if changed:
        warn(
            "This run will not have the bits of the one that it resumes, because "
            f"something else has changed: {', '.join(changed)}."
        )


def connect(ddp: DataParallel, copy_from: int | None = None) -> None:
    """Agree on seed and step, and connect the ranks; all call it together."""
    mine = ddp._logical
    if mine is not None:
        mine.connect(copy_from)
        ddp._given.logical_ranks = asdict(mine.options)  # for copies


def refuse(ddp: DataParallel, what: str) -> None:
    """Refuse what does not go with logical ranks.

    Raises:
        LogicalRankError: The model has logical ranks.
    """
    if ddp._logical is not None:
        raise LogicalRankError(
            explain(
                ddp._reducer.rank,
                f"{what} does not go with logical ranks: what a rank does by itself "
                "would depend on the number of ranks.",
                remedy="leave it out, or leave out logical_ranks",
            )
        )


def _of(
    ddp: DataParallel, name: str, kind: type[Exception] = LogicalRankError
) -> LogicalRanks:
    if ddp._logical is None:
        raise kind(
            explain(
                ddp._reducer.rank,
                f"{name} is for models with logical ranks, and this one has none.",
                remedy="pass logical_ranks=N to the constructor, on all ranks",
            )
        )
    return ddp._logical
