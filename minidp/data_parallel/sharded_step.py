"""Divide optimizer steps among the ranks: the methods of `DataParallel` for that."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.amp.grad_scaler import GradScaler
from torch.optim.optimizer import Optimizer

from minidp.comm import gather_integers, way_of_hosts
from minidp.console import warn
from minidp.core import Phase, without_user_modes
from minidp.errors import ShardedStepError, explain, shortened
from minidp.guard import check_partial
from minidp.replica import verify
from minidp.sharded import (
    EarlySteps,
    OptimizerShare,
    ShardedStep,
    balanced,
    check_copy,
    check_mark,
    check_optimizers,
    is_divided,
    is_elementwise,
    keep_own,
    rows_to_divide,
    steps_in_backward,
    whole_state,
)

if TYPE_CHECKING:
    from .wrapper import DataParallel

_COMPARING = "comparing what the ranks pass to sharded_step"
_COMPARING_EARLY = "comparing what the ranks pass to step_in_backward"


def sharded_step(  # noqa: D417, PLR0913 -- self: a method; options by name
    self: DataParallel,
    *optimizers: Optimizer,
    per_parameter: bool = False,
    allow_changes: bool = False,
    grad_scaler: GradScaler | None = None,
    overlap_param_gather: bool = False,
    split_from_mb: float | None = None,
    elementwise: bool = False,
) -> None:
    """Let each rank step its share of the parameters, and keep that share of the state.

    All ranks call it together, once, after the optimizers were made::

        model = minidp.DataParallel(net)
        optimizer = torch.optim.AdamW(net.parameters())
        model.sharded_step(optimizer)

    The training loop stays as it is. A backward sends gradients to the rank that owns
    the parameter; on the others its ``.grad`` is None. ``optimizer.step()`` steps the
    share of this rank, and returns when all ranks have the new values of all
    parameters; on an accelerator the stream that is current has them then. The bits are
    those of a plain loop on two ranks. With ``logical_ranks`` they are those of a plain
    loop over logical ranks, on any number of ranks: see `each_logical_rank`. With
    ``model.step_in_backward(optimizer)`` after it each bucket steps as soon as it is
    reduced, and the loop calls no step.

    Args:
        optimizers: Optimizers that together hold all parameters of the module, each of
            them once. Those that look at several parameters at once cannot be divided.
        per_parameter: Say of optimizers that minidp does not know (those that are not
            of ``torch.optim``) that what becomes of a parameter depends on its own
            gradient and state alone.
        allow_changes: Let the script change gradients between backward and step. Each
            rank changes those of its share only. That is right for what treats each
            parameter by itself (``clip_grad_value_``), and wrong for a norm.
        grad_scaler: The ``torch.amp.GradScaler`` of the script, if it has one. All
            ranks then skip a step if one of them has to.
        overlap_param_gather: Let ``optimizer.step()`` return while new values of other
            ranks' shares are still on their way, so that the next forward hides that:
            a parameter waits for its value when torch uses it. What it cannot see are
            reads of which torch does not tell: ``torch.tensor(param)``, a collective
            called on the process group itself, transforms of ``torch.func`` of the
            parameter itself, and C++ code that gets a parameter of another module.
            The step waits, as it does without this option, for parameters whose memory
            another tensor shares, and for all on an accelerator, or if something is
            compiled in this process (``torch.compile``, TorchScript).
        split_from_mb: Divide parameters of at least so many MiB by rows among all
            ranks, so that a large one makes no large share, and messages fill both
            directions of a link. It is done for optimizers of ``torch.optim`` that
            step each element by itself (not Adafactor and Muon), and for parameters
            that are row-major and have as many rows as there are ranks. With 16 bits,
            or fused steps, the rows of a rank must have a multiple of 64 elements. The
            ``.grad`` of a divided parameter has averages in the own rows, and zeros in
            the others. On two ranks the bits stay, but for the last ones after
            `clip_grad_norm_`.
        elementwise: Say of optimizers that minidp does not know that what becomes of an
            element depends on its own gradient and state alone, so that
            ``split_from_mb`` holds for them, too. It implies ``per_parameter``.

    Raises:
        TypeError: An optimizer cannot be divided.
        ValueError: A parameter is in no optimizer, or in two; or an option of the
            wrapper does not go with it, such as ``audit_every``.
        ReplicaMismatchError: The ranks pass different optimizers, or another rank has
            raised one of the errors above.
    """
    group, reducer = self.process_group, self._reducer
    device = reducer.params[0].device
    try:
        if reason := _obstacle(self):
            raise ValueError(f"sharded_step does not go with {reason}.")
        check_optimizers(optimizers, is_per_parameter=per_parameter or elementwise)
        steppers = _steppers(self, optimizers)
        rows = _rows_to_divide(
            self, optimizers, steppers, split_from_mb, elementwise=elementwise
        )
        sizes = [spec.nbytes for spec in reducer.queue.specs]
        owners = balanced(sizes, steppers, group.size(), rows)
        scales = grad_scaler is not None and grad_scaler.is_enabled()
        for optimizer in optimizers:
            check_mark(optimizer.param_groups, owners, reducer.rank)
            check_copy(optimizer, owners, reducer.rank)
    except Exception as error:
        with reducer.communicator.blocking(_COMPARING):
            verify.verify(error, group, device)
        raise
    texts = {
        f"optimizer {number}": type(each).__name__
        for number, each in enumerate(optimizers)
    }
    names = reducer.names
    texts |= {f"optimizer of {n}": str(s) for n, s in zip(names, steppers, strict=True)}
    texts["option allow_changes"] = str(allow_changes)
    texts["option grad_scaler"] = str(grad_scaler is not None)
    texts["option overlap_param_gather"] = str(overlap_param_gather)
    texts["option split_from_mb"] = str(split_from_mb)
    texts["option elementwise"] = str(elementwise)
    with reducer.communicator.blocking(_COMPARING):
        verify.verify(texts, group, device)
    with reducer.communicator.blocking("connecting the hosts for sharded_step"):
        way_of_hosts(group, device)
    self._sharded = ShardedStep(
        reducer,
        optimizers,
        owners,
        allow_changes=allow_changes,
        scales=scales,
        awaits_values=overlap_param_gather and not _has_script(self),
    )
    if self._logical is not None:
        self._sharded.refuse_in_loop = self._logical.refuse_early
    self.register_forward_pre_hook(_before_forward)
    for optimizer in optimizers:
        self._guard.leave_to_others(optimizer)
    self._replication.compares_at_once()
    for number, optimizer in enumerate(optimizers):
        keep_own(optimizer, reducer, owners, number)
    with without_user_modes(keeps_inference=True):
        reducer.adopt(reducer.queue.layout, in_shared_memory=True)
    self._sharded.connect()


def step_in_backward(
    ddp: DataParallel, optimizer: Optimizer, clip_grad_norm: float | None
) -> None:
    """Let a divided optimizer step inside backwards; see `DataParallel`'s method.

    All ranks call it together.

    Raises:
        TypeError: The optimizer cannot step on a part of its parameters.
        ValueError: It is not divided, or steps in the backward already; or something
            does not go with it.
        ReplicaMismatchError: The ranks call it with different arguments, or another
            rank has raised one of the errors above.
    """
    sharded, reducer = ddp._sharded, ddp._reducer
    assert sharded is not None
    early = steps_in_backward(reducer)
    try:
        check_partial(optimizer, clip_grad_norm)
        if reason := _obstacle_in_backward(ddp, sharded):
            raise ValueError(f"step_in_backward after sharded_step: {reason}.")
        numbers = [n for n, o in enumerate(sharded.optimizers) if o is optimizer]
        name = type(optimizer).__name__
        if not numbers:
            raise ValueError(
                f"step_in_backward: this {name} was not passed to sharded_step, so "
                "nothing divides its steps. What to do: pass it to both, to "
                "sharded_step first."
            )
        if early is not None and early.has(numbers[0]):
            raise ValueError(f"This {name} steps in the backward already.")
    except Exception as error:
        with reducer.communicator.blocking(_COMPARING_EARLY):
            verify.verify(error, ddp.process_group, reducer.params[0].device)
        raise
    texts = {
        "optimizer of step_in_backward": str(numbers[0]),
        "option clip_grad_norm": str(clip_grad_norm),
    }
    with reducer.communicator.blocking(_COMPARING_EARLY):
        verify.verify(texts, ddp.process_group, reducer.params[0].device)
    if early is None:
        sharded.bring_rest()
        early = EarlySteps(sharded, reducer, ddp._guard)
        with sharded.moving(), without_user_modes(keeps_inference=True):
            reducer.adopt(reducer.queue.layout, in_shared_memory=True)
    early.add(numbers[0], clip_grad_norm)


def _obstacle_in_backward(ddp: DataParallel, sharded: ShardedStep) -> str:
    """Return why divided optimizers cannot step in backwards, or ""."""
    obstacles = {
        "it does not go with a GradScaler, which decides after the backward whether to "
        "step": sharded.scales,
        "it does not go with logical_ranks": ddp._logical is not None,
        "call it before the first forward of a step, and not while a backward is to "
        "come": ddp._reducer.phase.now is not Phase.IDLE,
    }
    return next((text for text, is_there in obstacles.items() if is_there), "")


def whole_optimizer_state(  # noqa: D417 -- self: a method
    self: DataParallel, optimizer: Optimizer, to: int = 0
) -> dict[str, Any] | None:
    """Collect the state of an optimizer whose steps are divided (`sharded_step`).

    All ranks call it together::

        state = model.whole_optimizer_state(optimizer)
        if rank == 0:
            torch.save({"model": net.state_dict(), "optimizer": state}, path)

    The result is what ``optimizer.state_dict()`` of a plain loop returns. Any number of
    ranks can load it, by ``optimizer.load_state_dict(state)`` on each of them, before
    or after `sharded_step`. ``optimizer.state_dict()`` has the share of this rank, and
    only this rank, among as many, can load it, after `sharded_step`.

    Args:
        optimizer: The optimizer. If its steps are not divided, nothing is collected.
        to: The rank that gets the state.

    Returns:
        The state on the rank that collects it, and None on the other ranks. If states
        lie on an accelerator, there may be no room on that of one rank: tensors of
        other ranks come to the CPU.
    """
    if self._sharded is None or not is_divided(optimizer):
        return optimizer.state_dict() if self._reducer.rank == to else None
    return whole_state(optimizer, self._reducer, self._sharded.owners, to)


def sharded_optimizer_state(  # noqa: D417 -- self: a method
    self: DataParallel, optimizer: Optimizer
) -> OptimizerShare:
    """Return what ``torch.distributed.checkpoint`` saves and loads of an optimizer.

    Each rank writes the share of the state that it keeps (`sharded_step`), and reads
    the one that it will keep, also if the number of ranks is another one. All ranks
    call these together::

        state = {"model": net, "optimizer": model.sharded_optimizer_state(optimizer)}
        dcp.save(state, checkpoint_id=folder)
        dcp.load(state, checkpoint_id=folder)  # perhaps in another job

    Parameters have the names that they have in the module, so ``exp_avg`` of Adam is
    ``optimizer.state.0.weight.exp_avg`` in the checkpoint. An optimizer whose steps are
    not divided can save and load the same checkpoints.

    Args:
        optimizer: The optimizer.

    Returns:
        An object of the protocol ``Stateful`` of ``torch.distributed.checkpoint``.

    Raises:
        ShardedStepError: The optimizer has a parameter that is not in the module.
    """
    reducer = self._reducer

    def names() -> dict[int, str]:
        found = {id(p): name for name, p in self.module.named_parameters()}
        return found | {id(p): name for name, p in reducer.named.items()}

    def foreign() -> set[int]:
        if self._sharded is None or not is_divided(optimizer):
            return set()
        owns = self._sharded.owners.has_part
        pairs = enumerate(reducer.params)
        return {id(param) for i, param in pairs if not owns(reducer.rank, i)}

    def divided() -> dict[int, slice]:
        if self._sharded is None or not is_divided(optimizer):
            return {}
        split = self._sharded.owners.split(reducer.rank)
        return {id(reducer.params[i]): rows for i, rows in split.items()}

    def make_whole() -> None:
        if self._sharded is not None and is_divided(optimizer):
            self._sharded.parts_of(optimizer).leave(optimizer)

    return OptimizerShare(optimizer, reducer, names, foreign, divided, make_whole)


def _before_forward(ddp: DataParallel, _inputs: object) -> None:
    """Tell other ranks that no step has come, before a forward that waits for them."""
    sharded = ddp._sharded  # a copy of the wrapper has none
    if sharded is not None and torch.is_grad_enabled():
        rebuilds = ddp._reducer.rebuild_policy.is_due
        if rebuilds:  # it gives up the memory through which values come
            sharded.bring_rest()
        sharded.before_forward(waits=rebuilds or ddp.will_sync_module_buffers())
        if rebuilds and ddp.gradient_as_bucket_view:
            _let_gradients_move(ddp, sharded)


def before_loop(ddp: DataParallel) -> None:
    """Tell other ranks that no step has come, before a loop over logical ranks.

    The loop may broadcast module buffers, for which it would wait in vain. And what it
    writes to shared memory nobody may still read from the last backward.
    """
    if ddp._sharded is not None:
        ddp._sharded.before_forward(waits=True)


def _has_script(ddp: DataParallel) -> bool:
    # TorchScript reads parameters without calling anything of Python.
    is_script = [isinstance(m, torch.jit.ScriptModule) for m in ddp.module.modules()]
    return any(is_script)


def _let_gradients_move(ddp: DataParallel, sharded: ShardedStep) -> None:
    """Let this forward move averages to new buckets, which is no change of theirs."""
    until_then = ExitStack()
    until_then.enter_context(sharded.moving())

    def moved(*_: object) -> None:
        until_then.close()
        handle.remove()

    handle = ddp.register_forward_hook(moved)


def clip_grad_norm_(  # noqa: D417, FBT -- a method, with the signature of torch's
    self: DataParallel,
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,  # noqa: FBT001, FBT002 -- as torch's
    foreach: bool | None = None,  # noqa: FBT001
) -> Tensor:
    """Clip the gradients so that their norm is at most ``max_norm``; return the norm.

    It stands for ``torch.nn.utils.clip_grad_norm_(model.parameters(), ...)``, has its
    bits, and is right with `sharded_step`, too, where each rank has a share of the
    gradients. Then all ranks must call it together.

    Args:
        max_norm: The greatest norm that is allowed.
        norm_type: The order of the norm; may be infinity.
        error_if_nonfinite: Whether to raise an error if the norm is NaN or infinite.
        foreach: As in torch's function. With `sharded_step` it makes no difference:
            norms are those of its default.

    Returns:
        The total norm before, as a tensor without dimensions.

    Raises:
        RuntimeError: The norm is not finite, and ``error_if_nonfinite``; or torch
            cannot calculate it, as that of order infinity of an empty gradient.
        ShardedStepError: With `sharded_step` some rank does not call it, or with other
            arguments, or has gradients that were not averaged. All ranks raise it.
        LogicalRankError: With `sharded_step` it is called in the loop over logical
            ranks.
    """
    if self._sharded is None:
        return torch.nn.utils.clip_grad_norm_(
            self.parameters(), max_norm, norm_type, error_if_nonfinite, foreach
        )
    if steps_in_backward(self._reducer) is not None:
        raise ShardedStepError(
            explain(
                self._reducer.rank,
                "clip_grad_norm_ was called, but an optimizer has applied gradients "
                "already, inside the backward.",
                remedy="pass the norm there: step_in_backward(optimizer, "
                "clip_grad_norm=...)",
            )
        )
    return self._sharded.clip_grad_norm_(
        float(max_norm), float(norm_type), error_if_nonfinite=error_if_nonfinite
    )


def _obstacle(ddp: DataParallel) -> str:
    """Return what the wrapper has that makes a divided step impossible, or ""."""
    reducer, given, logical = ddp._reducer, ddp._given, ddp._logical
    queue = reducer.queue
    obstacles = {
        "a second call of sharded_step": ddp._sharded is not None,
        "audit_every": logical is not None and logical.audit is not None,
        "a loop over logical ranks that has begun": logical is not None
        and logical.is_in_loop,
        "minidp.torchft": type(ddp).__module__.startswith("minidp.torchft"),
        "a comm hook": queue.averaging.comm_hook is not None,
        'bucket_cap_mb="auto"': given.bucket_cap_mb == "auto",
        "sparse gradients": any(spec.sparse for spec in queue.specs),
        "step_in_backward before it (call it after it)": any(
            each.uses_grads for each in queue.observers.everybody
        ),
        "another wrapper of the same parameters": ddp._guard.shares_parameters,
        "join()": ddp._join_config.enable,
        "a backward that has begun, or is to come": reducer.phase.now is not Phase.IDLE,
    }
    return next((name for name, is_there in obstacles.items() if is_there), "")


def _rows_to_divide(
    ddp: DataParallel,
    optimizers: Sequence[Optimizer],
    steppers: Sequence[int],
    split_from_mb: float | None,
    *,
    elementwise: bool,
) -> list[int]:
    """Return for each parameter how many rows are divided among the ranks, or 0.

    Raises:
        ValueError: There are logical ranks.
    """
    specs, ranks = ddp._reducer.queue.specs, ddp.process_group.size()
    if split_from_mb is None:
        return [0] * len(specs)
    if ddp._logical is not None:
        raise ValueError(
            "sharded_step(split_from_mb=...) does not go with logical_ranks: the "
            "number of ranks would change the last bits of a clipped norm. What to do: "
            "leave out split_from_mb, so that each parameter has one owner."
        )
    may = [is_elementwise(each, is_told=elementwise) for each in optimizers]
    are_fused = [any(g.get("fused") for g in each.param_groups) for each in optimizers]
    return [
        rows_to_divide(spec, ranks, is_fused=are_fused[stepper])
        if may[stepper] and spec.nbytes >= split_from_mb * 2**20
        else 0
        for spec, stepper in zip(specs, steppers, strict=True)
    ]


def _steppers(ddp: DataParallel, optimizers: Sequence[Optimizer]) -> list[int]:
    """Return the number of the optimizer of each parameter.

    Raises:
        ValueError: A parameter has none, or several.
    """
    found: dict[int, int] = {}
    names = {id(p): name for name, p in ddp._reducer.named.items()}
    for number, optimizer in enumerate(optimizers):
        if is_divided(optimizer):
            raise ValueError("This optimizer is divided among ranks already.")
        for param in (p for group in optimizer.param_groups for p in group["params"]):
            if id(param) in found:
                name = names.get(id(param), "a parameter")
                raise ValueError(f"sharded_step: {name} is in two optimizers.")
            found[id(param)] = number
    lacking = [n for n, p in ddp._reducer.named.items() if id(p) not in found]
    if lacking:
        raise ValueError(
            f"sharded_step: no optimizer has {shortened(lacking)}. What to do: pass all"
            " optimizers of the module in one call; parameters that are not trained "
            "need requires_grad=False before the module is wrapped."
        )
    return [found[id(param)] for param in ddp._reducer.params]


def repair(ddp: DataParallel, wrong: list[int]) -> list[int]:
    """Give all ranks the values of each parameter that its owner has, after an error.

    All ranks call it together in ``reset()``. A step may have been made on some ranks
    before another one failed. A warning says so if the shares have made unequal numbers
    of steps, because no rank can put that right.

    Args:
        ddp: The wrapper.
        wrong: The ranks whose parameters hold an incomplete average.

    Returns:
        The same ranks; or all of them if steps are divided and any was wrong, because
        each rank has its share now.
    """
    if (sharded := ddp._sharded) is not None:
        group, rank = ddp.process_group, ddp._reducer.rank
        with ddp._reducer.communicator.blocking("comparing the shares in reset()"):
            way, place = way_of_hosts(group, ddp._reducer.params[0].device)
            early = steps_in_backward(ddp._reducer)
            mine = [sharded.steps, int(early is not None and early.is_half)]
            rows = gather_integers(mine, way, place)
        sharded.connect()  # perhaps in another group
        sharded.bring_all()
        sharded.steps = max(steps for steps, _ in rows)
        if early is not None:
            early.is_half = False
            early.agreement.connect()
        if len({steps for steps, _ in rows}) > 1 or any(half for _, half in rows):
            parts = "", " and a part of the next one"
            found = ", ".join(
                f"{steps}{parts[half]} on rank {r}"
                for r, (steps, half) in enumerate(rows)
            )
            warn(
                explain(
                    rank,
                    "After reset() the shares of the ranks are not of the same step: "
                    "some ranks have made one that others missed.",
                    expected="equally many steps of all shares",
                    found=found,
                    remedy="load a checkpoint of model and optimizers on all ranks",
                )
            )
        if wrong:
            ddp._reducer.incomplete.forget()  # parameters have other versions now
            ddp._reducer.incomplete.note()
            return [*range(group.size())]
    return wrong


def refuse(ddp: DataParallel, what: str) -> None:
    """Refuse what does not go with divided steps.

    Raises:
        ShardedStepError: The wrapper's steps are divided.
    """
    if ddp._sharded is not None:
        raise ShardedStepError(
            explain(
                ddp._reducer.rank,
                f"{what} does not go with sharded_step: each rank has the averages of "
                "its own share only.",
                remedy="leave it out, or leave out sharded_step",
            )
        )
