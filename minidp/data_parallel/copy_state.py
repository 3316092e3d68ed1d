"""Compare the replicas after ``reset()``, or copy one rank's state to the others.

Before ``reset()`` some ranks may have made a step that others missed, and in ``join()``
ranks with fewer inputs make fewer steps. `compare_or_copy` compares the replicas, or
copies one rank's state; `copy_after_join` copies optimizers, as ``join()`` copies
parameters. A difference is only warned of, because a checkpoint may be loaded next. If
the replicas still differ in the next synchronised step, `ReplicaCheck` raises.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch.optim.optimizer import Optimizer

from minidp.comm import exchange_device, gather_integers, has_store
from minidp.console import warn
from minidp.errors import (
    ReplicaMismatchError,
    explain,
    incomplete_averages,
    shortened,
)
from minidp.replica import (
    Survey,
    find_schedulers,
    optimizers,
    scalers,
    standing,
    sum_of_bits,
)
from minidp.sharded import is_divided

if TYPE_CHECKING:
    from .wrapper import DataParallel

_NOBODY = -1  # whose state is copied


def check_root(copy_from: int | None, size: int) -> None:
    """Check the argument of ``reset()``.

    Raises:
        TypeError: It is neither None nor an int.
        ValueError: It is no rank of a group of this size.
    """
    if copy_from is None:
        return
    if isinstance(copy_from, bool) or not isinstance(copy_from, int):
        raise TypeError(
            "copy_from must be None or a rank of the process group, but got "
            f"{copy_from!r}."
        )
    if not 0 <= copy_from < size:
        raise ValueError(
            f"copy_from must be a rank of the process group (0 to {size - 1}), but got "
            f"{copy_from}."
        )


def compare_or_copy(
    ddp: DataParallel, copy_from: int | None, wrong: Sequence[int] = ()
) -> None:
    """Give all ranks the state of rank ``copy_from``, or with None only compare them.

    All ranks must call it together. A warning says if the replicas differ without a
    known reason, and what cannot be copied. The schedule of comparisons begins anew. If
    the ranks share no store, they do not wait for each other in `reset`. Then this does
    nothing unless there is something to copy.

    Args:
        ddp: The wrapper.
        copy_from: The rank whose state all get, or None.
        wrong: The ranks whose parameters hold an incomplete average. Equal replicas may
            all be wrong, so that a comparison does not find it. A warning names them,
            unless all ranks get the state of another one.

    Raises:
        ReplicaMismatchError: The ranks pass different ``copy_from``. All raise it.
    """
    group, check = ddp.process_group, ddp._replication.check
    survey = _survey(ddp)
    scalers.scale_anew(ddp._guard.optimizers(), survey)
    if group.size() == 1 or (copy_from is None and not has_store(group)):
        return
    with ddp._reducer.communicator.blocking("comparing the replicas in reset()"):
        wanted = _NOBODY if copy_from is None else copy_from
        excuses = 0 if check is None else check.excuses
        # Steps that a reset() without a copy has found missing were only told.
        missed = "" if check is None or copy_from is None else check.missed_steps
        about_check = [check is not None, excuses, bool(missed)]
        head = [wanted, *about_check, _digest(ddp, survey)]
        rows = gather_integers(head, group, exchange_device(group, ddp.device))
        wishes, compares, all_excuses, all_missed, digests = zip(*rows, strict=True)
        _refuse_other_wishes(wishes, group.rank())
        compares_all = all(compares)
        may_differ = len({*digests}) > 1 or any(all_missed)
        asks = compares_all or copy_from is not None
        found = _compare(ddp, survey, missed) if asks and may_differ else None
        if copy_from is not None:
            ddp._replication.broadcast_all(ddp.module, copy_from)
            if found is not None:
                how = f"reset(copy_from={copy_from})"
                _copy_optimizers(ddp, found, copy_from, how, survey)
            found = None
            # Whoever copies a wrong rank, in spite of the warning, wants to go on.
            ddp._reducer.incomplete.forget()
    if wrong and (copy_from is None or copy_from in wrong):
        warn(incomplete_averages(group.rank(), wrong))
    ddp._guard.forget_steps()
    if check is None or not compares_all:
        return
    missed = ""
    if found is not None:
        # A second reset() does not help, either.
        differing = found.differences
        missed = differing.steps or (check.missed_steps if differing.parameters else "")
        is_excused = any(all_excuses) or _is_only_rounding(ddp, differing)
        if differing.texts and (missed or not is_excused):
            warn(_explain_difference(group.rank(), differing))
    check.restart(missed_steps=missed)


def _is_only_rounding(ddp: DataParallel, found: standing.Differences) -> bool:
    """Return whether all that differs is rounding, as an earlier comparison has found.

    All ranks must call it together, because it may communicate.
    """
    check, reducer = ddp._replication.check, ddp._reducer
    if check is None or len(found.texts) != 1 or not found.parameters:
        return False
    params = reducer.named
    return check.knows_rounding([params[name] for name in found.parameters])


def copy_after_join(ddp: DataParallel, root: int) -> None:
    """Copy the optimizers of rank ``root`` if ranks have made unequal numbers of steps.

    All ranks must call it together. With equal numbers all keep their own, bit for bit.
    A warning says what cannot be copied. The ranks agree on how many forwards and
    steps they have made, because later comparisons meet under these numbers.
    """
    group, ledger = ddp.process_group, ddp._reducer.ledger
    device = exchange_device(group, ddp.device)
    steps = sum(ddp._guard.optimizers().values())
    rows = gather_integers([steps, ledger.finalized], group, device)
    all_steps, finalized = zip(*rows, strict=True)
    ledger.agree_on(max(finalized))
    if len(set(all_steps)) > 1:
        survey, how = _survey(ddp), "The end of join()"
        _copy_optimizers(ddp, _compare(ddp, survey), root, how, survey)
        if ddp._replication.check is not None:
            ddp._replication.check.restart()
    ddp._guard.forget_steps()


def _survey(ddp: DataParallel) -> Survey:
    # A scheduler is younger than its optimizer, and that is younger than the module.
    return Survey(ddp._guard.optimizers() or [ddp.module])


class _Comparison(NamedTuple):
    """What `_compare` finds."""

    differences: standing.Differences
    standings: list[standing.Standing]  # of all ranks
    held: dict[str, list[Optimizer]]  # this rank's, see `optimizers.by_key`


def _digest(ddp: DataParallel, survey: Survey) -> int:
    """Return 64 bits that are equal on ranks whose state is equal."""
    held = optimizers.by_key(ddp._guard.optimizers(), ddp._reducer.params)
    text = _stand(ddp, held, survey)
    digest = hashlib.sha256(text.to_bytes()).digest()
    return int.from_bytes(digest[:8], "big", signed=True)


def _stand(
    ddp: DataParallel,
    held: Mapping[str, Sequence[Optimizer]],
    survey: Survey,
    *,
    is_exchanged: bool = False,
) -> standing.Standing:
    """Return where this rank stands, with the state of the ``held`` optimizers.

    If it is exchanged, it also tells what steps these, for which the search takes long,
    and when they last stepped.
    """
    reducer, replication = ddp._reducer, ddp._replication
    params, frozen = reducer.named, replication.others(ddp.module)
    replication.collect(ddp.module)
    # The next forward makes those equal that it broadcasts.
    buffers = {} if ddp.forward_sync_buffers else replication.buffers
    steps = ddp._guard.optimizers()
    every = [optimizer for alike in held.values() for optimizer in alike]
    schedulers = find_schedulers(every, survey)

    def facts_of(optimizer: Optimizer) -> optimizers.OptimizerFacts:
        return optimizers.facts_of(
            optimizer,
            steps.get(optimizer, 0),
            params,
            schedulers.get(optimizer, ()),
            survey.steppers_of(optimizer) if is_exchanged else (),
            ddp._guard.last_step_of(optimizer) if is_exchanged else (),
        )

    facts = {key: [*map(facts_of, alike)] for key, alike in sorted(held.items())}
    hook = reducer.queue.averaging.comm_hook
    return standing.Standing(
        _sums(params),
        _sums(frozen),
        _sums(buffers),
        facts,
        scalers.scales_of(survey, _wrapped(ddp)),
        {} if hook is None else hook.counts,
    )


def _wrapped(ddp: DataParallel) -> list[torch.Tensor]:
    """Return the parameters of all live wrappers of this process."""
    guards = [ddp._guard, *ddp._guard.others()]
    return [param for guard in guards for param in guard.reducer.params]


def _sums(tensors: Mapping[str, torch.Tensor]) -> dict[str, int]:
    return {name: int(sum_of_bits(tensor)) for name, tensor in tensors.items()}


def _compare(ddp: DataParallel, survey: Survey, missed_before: str = "") -> _Comparison:
    """Return how the replicas differ. All ranks must call it together."""
    params = ddp._reducer.params
    every = [*ddp._guard.optimizers(), *optimizers.find_optimizers(params, survey)]
    known = dict.fromkeys(each for each in every if not is_divided(each))
    held = optimizers.by_key(known, params)
    mine = _stand(ddp, held, survey, is_exchanged=True)
    standings = standing.exchange(mine, ddp.process_group, ddp.device)
    differences = standing.find_differences(standings, missed_before)
    return _Comparison(differences, standings, held)


def _copy_optimizers(
    ddp: DataParallel, found: _Comparison, root: int, how: str, survey: Survey
) -> None:
    """Copy what rank ``root`` has beside its module; warn of what stays different.

    These are optimizers, their schedulers, a loss scale, and what the comm hook counts.
    All ranks must call it together.
    """
    reducer, differing = ddp._reducer, found.differences
    params, sender = reducer.named, found.standings[root]
    left, copied = {*differing.left}, {}
    for key, place in differing.shared:
        alike = found.held[key]
        if not all(map(optimizers.can_copy_optimizer, alike)):
            continue
        if place is not None:
            copied[f"{key}/{place}"] = [alike[place]]
        elif (used := standing.in_use(sender.optimizers[key])) is None:
            left.add(type(alike[0]).__name__)
        else:  # which one another rank uses may not be known, so that each gets it
            is_root = reducer.rank == root
            copied[key] = [alike[used]] if is_root else alike
    left |= {
        *optimizers.copy_optimizers(copied, params, ddp.process_group, root, survey)
    }
    scales = [each.scales for each in found.standings]
    if scalers.can_copy_scales(scales) and sender.scales:
        scalers.set_scale(survey, *sender.scales)
    if reducer.queue.averaging.comm_hook is not None:
        reducer.queue.averaging.comm_hook.count_as(sender.hook)
    if left and differing.texts:
        names = " and ".join(f"the state of {name}" for name in sorted(left))
        if reducer.rank:  # short, but with what may be left on this rank alone
            what = f"{how} cannot copy {names}."
            remedy = f"give all ranks rank {root}'s state of these"
            warn(explain(reducer.rank, what, remedy=remedy))
            return
        steps = f" Optimizer steps: {differing.steps}." if differing.steps else ""
        warn(
            explain(
                reducer.rank,
                f"{how} gave all ranks rank {root}'s parameters, but cannot copy "
                f"{names}.{steps}",
                remedy=f"give all ranks rank {root}'s state of these, for example by "
                "broadcast_object_list(...) and load_state_dict(...)",
            )
        )


def _refuse_other_wishes(wishes: Sequence[int], rank: int) -> None:
    """Raise a ReplicaMismatchError if ranks want to copy from different ranks."""
    if len({*wishes}) > 1:
        said = (
            f"{None if root == _NOBODY else root} on rank {rank}"
            for rank, root in enumerate(wishes)
        )
        raise ReplicaMismatchError(
            explain(
                rank,
                "The ranks called reset() with different arguments.",
                expected="the same copy_from on all ranks",
                found=", ".join(said),
                remedy="decide before, alike on all ranks, from whom to copy, and call "
                "reset() once more",
            )
        )


def _explain_difference(rank: int, found: standing.Differences) -> str:
    """Return the text of the warning, in full on rank 0, and one line on the others.

    All ranks have found the same. All of them warn nevertheless, because one that turns
    warnings into errors must not raise alone.
    """
    if rank:
        what = "After reset() the replicas are not the same: see rank 0's warning."
        return explain(rank, what)
    return explain(
        rank,
        "After reset() the replicas are not the same: some ranks have made a step that "
        "others missed, or parameters were changed on some ranks only.",
        names=[shortened(found.names)],
        expected="the same on all ranks",
        found=f"different {'; '.join(found.texts)}",
        remedy="call reset(copy_from=0) instead, which copies rank 0's parameters, "
        "buffers, optimizer state, learning rate schedulers and loss scale to all "
        "ranks; or load the same checkpoint of all these on all ranks now. If "
        "parameters still differ in the next synchronised step, it raises a "
        "ReplicaMismatchError",
    )
