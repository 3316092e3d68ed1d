"""Save and load the state of an optimizer of which each rank has a share.

``optimizer.state_dict()`` has the share of its rank. That is right for a checkpoint in
which each rank writes a file of its own, and reads it again. But a script that was
written for DDP saves rank 0's alone, and the rest would be lost without a word. So a
share is marked, in its parameter groups, where the mark survives whatever is done to
it, and only the rank that has saved it can load it. The mark is also the number of one
parameter too many, so that an optimizer whose steps are not divided, and which knows
nothing of marks, refuses the share because of its size.

The whole state has no mark. It can be loaded by any number of ranks, and each keeps
its share of it (`keep_own`).

A copy of the optimizer (`copy.deepcopy`, or by pickle) has a share, too, and nothing
divides its steps: it would go on with half of a state. So it is marked, and its first
step is refused (`refuse_copy`).
"""

from __future__ import annotations

import copy
import hashlib
import io
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, TypeGuard

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer

from minidp import comm
from minidp.accelerator import to_host
from minidp.core import Reducer
from minidp.errors import ShardedStepError, explain

from .owners import Owners

MARK = "minidp_share"


def mark_of(owners: Owners, rank: int) -> str:
    """Return the mark of a rank's share: who has it, among how many, and of what."""
    digest = hashlib.sha256(repr(owners).encode()).hexdigest()[:8]
    return f"rank {rank} of {owners.size}, {digest}"


def check_mark(groups: list[dict[str, Any]], owners: Owners, rank: int) -> None:
    """Check that parameter groups are not of another share, and take off the mark.

    Raises:
        ShardedStepError: They are.
    """
    mine = mark_of(owners, rank)
    for group in groups:
        found = group.pop(MARK, mine)
        if found != mine:
            raise ShardedStepError(
                explain(
                    rank,
                    "A state of an optimizer was loaded that is the share of one rank.",
                    expected=f"the whole state, or the share of {mine}",
                    found=f"the share of {found}",
                    remedy="save model.whole_optimizer_state(optimizer) in place of "
                    "optimizer.state_dict(); all ranks call it, and rank 0 gets it",
                )
            )


class Copied(NamedTuple):
    """What an optimizer is a copy of, as its attribute of the name `MARK`.

    It may also be the divided optimizer itself, whose wrapper is gone (`leave_share`).
    """

    mark: str  # of the share
    rank: int
    state: dict[Any, Any]  # the copy's own, until another one is loaded
    is_part: bool  # whether that was a part of a state, and no empty one
    is_left: bool = False  # the optimizer is no copy, but nobody divides its steps now


def mark_copies(
    optimizer: Optimizer,
    owners: Owners,
    rank: int,
    stepper: int,
    steps: Callable[[], int],
    whole: Callable[[Optimizer], AbstractContextManager[bool]],
) -> None:
    """Let copies of an optimizer know what they are copies of.

    Args:
        optimizer: The optimizer, whose steps are divided.
        owners: Who owns which parameter.
        rank: This rank.
        stepper: The number of the optimizer.
        steps: Returns how many steps were made; -1 if it is divided no more.
        whole: Lets the optimizer have its parameters (`Parts.whole`).
    """
    vars(optimizer).pop(MARK, None)  # if it is a copy
    alone = owners.size == 1
    owns_nothing = not owners.owned_by(rank, stepper)
    reference = weakref.ref(optimizer)

    def state_of_copy() -> dict[str, Any]:
        mine = reference()
        assert mine is not None
        state: dict[str, Any]
        with whole(mine) as is_for_now:
            state = type(mine).__getstate__(mine)
            if is_for_now:  # what is copied is read after this block
                state["state"] = copy.copy(mine.state)
                state["param_groups"] = [dict(group) for group in mine.param_groups]
        if not alone and steps() >= 0:
            mark = mark_of(owners, rank)
            is_lost = owns_nothing and steps() > 0 and not _keeps_nothing(mine)
            is_part = bool(state["state"]) or is_lost
            state[MARK] = Copied(mark, rank, state["state"], is_part)
        return state

    # Python looks for it on the object itself, too, when it copies or pickles it.
    vars(optimizer)["__getstate__"] = state_of_copy


def leave_share(optimizer: Optimizer, owners: Owners, rank: int) -> None:
    """Mark an optimizer whose steps nobody divides any more: it has one share only."""
    if optimizer.state and owners.size > 1:
        mark = mark_of(owners, rank)
        left = Copied(mark, rank, optimizer.state, is_part=True, is_left=True)
        vars(optimizer)[MARK] = left


def _keeps_nothing(optimizer: Optimizer) -> bool:
    is_plain = type(optimizer) is torch.optim.SGD
    return is_plain and not any(group["momentum"] for group in optimizer.param_groups)


def _share_of(optimizer: Optimizer) -> Copied | None:
    """Return of which share an optimizer is a copy, if it still has only its state."""
    copied: Copied | None = vars(optimizer).get(MARK)
    if copied is None or copied.state is not optimizer.state:
        return None
    return copied if copied.is_part else None


def refuse_copy(optimizer: Optimizer) -> None:
    """Refuse the step of an optimizer that has the state of one share only.

    It is a copy, or its wrapper is gone.

    Raises:
        ShardedStepError: It is one. All ranks that have made the copy raise it.
    """
    if (share := _share_of(optimizer)) is not None:
        name = type(optimizer).__name__
        what, remedy = (
            f"A copy of a divided {name} steps",
            "call sharded_step(copied_optimizer) on the copied wrapper, too, before "
            "its first backward; or load the whole state into the copy: "
            "model.whole_optimizer_state(optimizer)",
        )
        if share.is_left:
            what, remedy = (
                f"{name} steps, but the wrapper is gone that has divided it",
                "load the whole state, which model.whole_optimizer_state(optimizer) "
                "collects while the wrapper lives; or make a new optimizer; or divide "
                "it again, by sharded_step of a new wrapper on as many ranks",
            )
        raise ShardedStepError(
            explain(
                share.rank,
                f"{what}: nothing divides its steps, and it has the state of one share "
                "only.",
                found=f"the share of {share.mark}",
                remedy=remedy,
            )
        )


def check_copy(optimizer: Optimizer, owners: Owners, rank: int) -> None:
    """Check that an optimizer that is to be divided is no copy of another share.

    Raises:
        ShardedStepError: It is one.
    """
    share, mine = _share_of(optimizer), mark_of(owners, rank)
    if share is not None and share.mark != mine:
        raise ShardedStepError(
            explain(
                rank,
                "An optimizer is to be divided that is the copy of a share.",
                expected=f"the share of {mine}",
                found=f"the share of {share.mark}",
                remedy="load the whole state into the copy before: "
                "model.whole_optimizer_state(optimizer)",
            )
        )


def _without_mark(numbers: list[Any]) -> list[Any]:
    return [each for each in numbers if each != MARK]


def keep_own(
    optimizer: Optimizer, reducer: Reducer, owners: Owners, stepper: int
) -> None:
    """Drop the state of parameters, and of rows, that other ranks own.

    Raises:
        ShardedStepError: The state of a divided parameter cannot be divided.
    """
    split = owners.split(reducer.rank, stepper)
    for i, param in enumerate(reducer.params):
        if owners.stepper[i] != stepper or param not in optimizer.state:
            continue
        if not owners.has_part(reducer.rank, i):
            del optimizer.state[param]
        elif i in split:
            _keep_rows(optimizer.state[param], param.shape, split[i])
            check_rows(optimizer.state[param], param.shape, split[i], reducer, i)


def _keep_rows(state: dict[Any, Any], shape: Sequence[int], rows: slice) -> None:
    """Drop the rows of other ranks from a state that may be whole."""
    for key, value in state.items():
        if is_like(value, shape):
            state[key] = value[rows].clone()


def is_like(value: object, shape: Sequence[int]) -> TypeGuard[Tensor]:
    """Return whether a value of a state is a tensor of this shape."""
    return isinstance(value, Tensor) and value.shape == torch.Size(shape)


def rows_like(shape: Sequence[int], rows: slice) -> list[int]:
    """Return the shape of some rows of a tensor."""
    return [rows.stop - rows.start, *shape[1:]]


def check_rows(
    state: Mapping[Any, Any],
    shape: Sequence[int],
    rows: slice,
    reducer: Reducer,
    i: int,
) -> None:
    """Check that a state has nothing but rows, and what all ranks have alike.

    Args:
        state: What an optimizer keeps of a divided parameter.
        shape: The shape of that.
        rows: The rows of this rank.
        reducer: The reducer.
        i: The index of the parameter.

    Raises:
        ShardedStepError: There is a tensor of another shape.
    """
    own = rows_like(shape, rows)
    for key, value in state.items():
        is_common = not isinstance(value, Tensor) or value.numel() == 1
        if not is_common and not is_like(value, own):
            raise ShardedStepError(
                explain(
                    reducer.rank,
                    "The state of a parameter whose rows are divided among the ranks "
                    f"has the tensor {key}, of which nobody knows how to divide it.",
                    names=[reducer.names[i]],
                    expected=f"a number, or a tensor of shape {tuple(own)} or "
                    f"{tuple(shape)}",
                    found=f"shape {tuple(value.shape)}",
                    remedy="leave out elementwise=True, which is right for optimizers "
                    "that step each element of a parameter by itself",
                )
            )


def whole_state(
    optimizer: Optimizer, reducer: Reducer, owners: Owners, to: int
) -> dict[str, Any] | None:
    """Return the state of all shares on rank ``to``, and None on the others.

    All ranks must call it together. One share is on its way at a time. If states lie
    on devices, those of the other ranks come to the CPU, and so do those of divided
    parameters.

    Raises:
        ShardedStepError: The state of a divided parameter cannot be put together.
    """
    whole = optimizer.state_dict()
    for each in whole["param_groups"]:
        each.pop(MARK, None)
        each["params"] = _without_mark(each["params"])
    divided = _divided(optimizer, reducer, owners)
    for number, i in divided.items():
        if number in whole["state"]:
            state, rows = whole["state"][number], owners.rows_of(reducer.rank, i)
            check_rows(state, reducer.params[i].shape, rows, reducer, i)
    # Devices have the numbers of the rank that has saved them, and may have no room.
    place = torch.device("cpu")
    of_ranks = _collected(whole["state"], reducer, to, place)
    if reducer.rank != to:
        return None
    states: dict[int, Any] = {}
    for each in of_ranks:
        states |= each
    for number, i in divided.items():
        if number in states:
            parts = [each.get(number, {}) for each in of_ranks]
            states[number] = _joined(parts, reducer.params[i].shape, owners, i, place)
    whole["state"] = dict(sorted(states.items()))
    return whole


def _collected(
    mine: dict[int, Any], reducer: Reducer, to: int, place: torch.device
) -> list[dict[int, Any]]:
    """Return the states of all ranks on rank ``to``, and its own one on the others.

    Tensors of other ranks come to ``place``.
    """
    communicator = reducer.communicator
    group, device = comm.way_of_hosts(communicator.group, communicator.device)
    file = io.BytesIO()
    if communicator.rank != to:
        torch.save(mine, file)
    own, found = file.getbuffer(), []
    with communicator.blocking("collecting the state of an optimizer"):
        sizes = [row[0] for row in comm.gather_integers([len(own)], group, device)]
        for rank, size in enumerate(sizes):
            if not size:
                found.append(mine)
                continue
            data = torch.empty(size, dtype=torch.uint8, device=device)
            if rank == communicator.rank:
                data.copy_(torch.frombuffer(own, dtype=torch.uint8))
            comm.wait_for_message(
                comm.start_broadcast(data, group, rank), device, group
            )
            if communicator.rank == to:
                share = io.BytesIO(bytes(to_host(data).numpy()))
                found.append(torch.load(share, map_location=place, weights_only=False))
    return found


def _divided(optimizer: Optimizer, reducer: Reducer, owners: Owners) -> dict[int, int]:
    """Return the indices of divided parameters, by their numbers in ``state_dict``."""
    indices = {p: i for i, p in enumerate(reducer.params) if owners.is_split(i)}
    params = (p for group in optimizer.param_groups for p in group["params"])
    return {n: indices[p] for n, p in enumerate(params) if p in indices}


def _joined(
    parts: Sequence[Mapping[Any, Any]],
    shape: Sequence[int],
    owners: Owners,
    i: int,
    place: torch.device,
) -> dict[Any, Any]:
    """Return the whole state of a divided parameter.

    Args:
        parts: The state of each rank.
        shape: The shape of the parameter.
        owners: Who owns which rows.
        i: The index of the parameter.
        place: Where tensors are put together.
    """
    joined = dict(parts[0])
    for key, value in parts[0].items():
        if is_like(value, rows_like(shape, owners.rows_of(0, i))):
            joined[key] = torch.cat([part[key].to(place) for part in parts])
    return joined


def hook_state(
    optimizer: Optimizer, reducer: Reducer, owners: Owners, stepper: int
) -> None:
    """Let an optimizer mark what it saves, and keep its share of what it loads.

    That is over when the reducer dies.
    """
    rank, alive = reducer.rank, weakref.ref(reducer)

    def saved(_optimizer: Optimizer, state: dict[str, Any]) -> None:
        if alive() is not None:
            for group in state["param_groups"]:
                group[MARK] = mark_of(owners, rank)
                group["params"] = [*group["params"], MARK]

    def loading(_optimizer: Optimizer, state: Mapping[str, Any]) -> dict[str, Any]:
        groups = [dict(group) for group in state["param_groups"]]
        if alive() is not None:
            check_mark(groups, owners, rank)
            for group in groups:
                group["params"] = _without_mark(group["params"])
        return {**state, "param_groups": groups}

    def loaded(which: Optimizer) -> None:
        if (mine := alive()) is not None:
            keep_own(which, mine, owners, stepper)

    optimizer.register_state_dict_post_hook(saved)
    optimizer.register_load_state_dict_pre_hook(loading)
    optimizer.register_load_state_dict_post_hook(loaded)
