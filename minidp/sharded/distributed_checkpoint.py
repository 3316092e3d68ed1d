"""The share of an optimizer's state as ``torch.distributed.checkpoint`` wants it.

That package (DCP) saves a dictionary of all ranks together: each rank writes what only
it has, and what all ranks have is written once. So a share needs no more than names
that are the same on all ranks, those of the parameters. To load, DCP asks for a
dictionary of what is wanted, and fills the tensors in it. As it looks up names, and
does not mind who has written them, any number of ranks can load a checkpoint.

An optimizer that has just been made has no tensors to be filled. Which ones it will
keep for a parameter, one step of a stand-in tells: an optimizer of the same class and
options, for one parameter that is made up. The real one does not notice.

Of a divided parameter each rank has the state of some rows. For DCP that is a
``DTensor``, whose rows any number of ranks can load, as they need them.
"""

from __future__ import annotations

import copy
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer

from minidp import comm
from minidp.core import Reducer
from minidp.errors import ShardedStepError, explain, shortened

from .checkpoint import check_rows, is_like, rows_like
from .parts import rows_of

State = dict[Any, Any]  # what an optimizer keeps of one parameter, by key


class OptimizerShare:
    """What this rank saves and loads of an optimizer: a ``Stateful`` of DCP.

    Of each parameter that this rank owns, DCP gets the tensors of the state, and one
    more object: whether there is a state at all, the names of these tensors, and what
    else is in the state. From the names a rank that loads sees whether the checkpoint
    has more than its optimizer keeps. The groups are one object, too.

    Args:
        optimizer: The optimizer.
        reducer: The reducer of the wrapper.
        names: Returns the names of the module's parameters, by id.
        foreign: Returns the ids of those whose state other ranks save and load.
        divided: Returns the ids of those of which this rank has some rows, and which.
        make_whole: Gives the optimizer its parameters back, if a step has raised.

    Raises:
        ShardedStepError: The optimizer has a parameter without a name.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        reducer: Reducer,
        names: Callable[[], Mapping[int, str]],
        foreign: Callable[[], Collection[int]],
        divided: Callable[[], Mapping[int, slice]],
        make_whole: Callable[[], None],
    ) -> None:
        self._optimizer, self._reducer = optimizer, reducer
        self._names, self._foreign, self._divided = names, foreign, divided
        self._make_whole = make_whole
        self._names_by_group()

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's share, for ``dcp.save``, or for ``dcp.load`` to fill it.

        Its tensors are those of the optimizer.

        Raises:
            ShardedStepError: A parameter has no state yet, and none can be made up.
        """
        tensors: dict[str, dict[str, Tensor]] = {}
        # DCP takes a tuple for one object, which need not be there before it is loaded.
        others: dict[str, tuple[bool, list[str], State]] = {}
        by_group = [
            *zip(self._optimizer.param_groups, self._names_by_group(), strict=True)
        ]
        foreign, divided = self._foreign(), self._divided()
        for group, names in by_group:
            for param, name in zip(group["params"], names, strict=True):
                if id(param) in foreign:
                    continue
                rows = divided.get(id(param))
                found = self._optimizer.state.get(param)
                state = found
                if state is None:
                    state = self._made_up(group, param, rows, name)
                if rows is not None:
                    state = self._as_rows(state, param, rows)
                tensors[name] = {
                    key: value
                    for key, value in state.items()
                    if isinstance(key, str) and isinstance(value, Tensor)
                }
                rest = {k: v for k, v in state.items() if k not in tensors[name]}
                # A checkpoint may be written while the training goes on.
                keys = sorted(tensors[name])
                others[name] = found is not None, keys, copy.deepcopy(rest)
        groups = tuple(_options(group) | {"params": names} for group, names in by_group)
        return {"state": tensors, "share": others, "param_groups": groups}

    def _names_by_group(self) -> list[list[str]]:
        self._make_whole()
        groups, names = self._optimizer.param_groups, self._names()
        unknown = sum(id(p) not in names for group in groups for p in group["params"])
        if unknown:
            raise self._error(
                "Parameters that are not in the module have no name in a checkpoint.",
                found=f"{unknown} of them in {type(self._optimizer).__name__}",
                remedy="put them into another optimizer",
            )
        return [[names[id(p)] for p in group["params"]] for group in groups]

    def _made_up(
        self,
        group: Mapping[str, Any],
        param: nn.Parameter,
        rows: slice | None,
        name: str,
    ) -> State:
        """Return the state that the optimizer would make for a parameter, or rows."""
        if not param.requires_grad:
            return {}
        like = rows_of(param.detach(), rows)
        twin = nn.Parameter(torch.ones_like(like, requires_grad=False))
        twin.grad = torch.ones_like(twin)
        optimizer = self._optimizer
        stand_in = object.__new__(type(optimizer))
        vars(stand_in).update(vars(optimizer))
        for each in ("step", "grad_scale", "found_inf"):  # of schedulers and scalers
            vars(stand_in).pop(each, None)
        for each, value in vars(optimizer).items():
            if each.startswith("_optimizer_") and isinstance(value, OrderedDict):
                setattr(stand_in, each, OrderedDict())  # hooks
        stand_in.param_groups = [_options(group) | {"params": [twin]}]
        stand_in.state = defaultdict(dict)
        try:
            with torch.random.fork_rng(devices=[]):
                type(optimizer).step(stand_in)
        except Exception as error:
            raise self._error(
                f"What state {type(optimizer).__name__} keeps of a parameter could not "
                "be found out: a step for trial has failed.",
                names=[name],
                found=f"{type(error).__name__}: {error}",
                remedy="save and load whole states (whole_optimizer_state)",
            ) from error
        return dict(stand_in.state.get(twin, {}))

    def _as_rows(self, state: State, param: nn.Parameter, rows: slice) -> State:
        """Return a state in which tensors of the own rows are marked as such."""
        reducer = self._reducer
        i = next(i for i, each in enumerate(reducer.params) if each is param)
        check_rows(state, param.shape, rows, reducer, i)
        shape = rows_like(param.shape, rows)
        group = reducer.communicator.group
        return {
            key: as_rows(value, param, group) if is_like(value, shape) else value
            for key, value in state.items()
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Give the optimizer what ``dcp.load`` has loaded, which calls this.

        All ranks call it together.

        Raises:
            ShardedStepError: The checkpoint is of another optimizer, or another rank
                could not load its share. All ranks raise it.
        """
        error = None
        try:
            self._optimizer.load_state_dict(self._numbered(state_dict))
        except Exception as problem:
            error = problem
        communicator = self._reducer.communicator
        with communicator.blocking("loading the state of an optimizer"):
            way = comm.way_of_hosts(communicator.group, communicator.device)
            everyone = comm.gather_integers([int(error is not None)], *way)
        if error is not None:
            raise error
        failed = [rank for rank, (has_failed,) in enumerate(everyone) if has_failed]
        if failed:
            raise self._error(
                f"Rank {failed[0]} could not load its share of an optimizer's state.",
                remedy=f"look at the error of rank {failed[0]}",
            )

    def _numbered(self, loaded: Mapping[str, Any]) -> dict[str, Any]:
        """Return what was loaded in the form of ``Optimizer.state_dict``."""
        mine = self._names_by_group()
        saved = [group["params"] for group in loaded["param_groups"]]
        if mine != saved:
            raise self._error(
                "The checkpoint is of an optimizer whose groups have other parameters.",
                expected="; ".join(map(shortened, mine)),
                found="; ".join(map(shortened, saved)),
                remedy="make the optimizer as it was made before the checkpoint was "
                "saved: the same groups, in the same order",
            )
        numbers = {
            name: i for i, name in enumerate(each for names in mine for each in names)
        }
        groups = [
            dict(group) | {"params": [numbers[name] for name in group["params"]]}
            for group in loaded["param_groups"]
        ]
        state = {}
        for name, (has_state, keys, rest) in loaded["share"].items():
            found = {
                key: getattr(value, "_local_tensor", value)
                for key, value in loaded["state"].get(name, {}).items()
            }
            if lacking := [key for key in keys if key not in found]:
                raise self._error(
                    "The checkpoint has more state than "
                    f"{type(self._optimizer).__name__} would keep here.",
                    names=[name],
                    expected=f"a state with {', '.join(sorted(found)) or 'nothing'}",
                    found=f"also {', '.join(lacking)}",
                    remedy="make the optimizer with the same class and options",
                )
            if has_state:
                state[numbers[name]] = found | rest
        return {"state": state, "param_groups": groups}

    def _error(self, what: str, **parts: Any) -> ShardedStepError:
        return ShardedStepError(explain(self._reducer.rank, what, **parts))


def as_rows(rows: Tensor, param: Tensor, group: comm.ProcessGroup) -> Tensor:
    """Return own rows as a ``DTensor`` of the shape of a divided parameter."""
    # Few programs need it, and its import takes a while.
    from torch.distributed.device_mesh import DeviceMesh  # noqa: PLC0415
    from torch.distributed.tensor import DTensor, Shard  # noqa: PLC0415

    mesh = DeviceMesh.from_group(group, rows.device.type)
    shape, stride = param.shape, param.stride()
    return DTensor.from_local(
        rows, mesh, [Shard(0)], run_check=False, shape=shape, stride=stride
    )


def _options(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of what a group has besides its parameters."""
    return copy.deepcopy({k: v for k, v in group.items() if k != "params"})
