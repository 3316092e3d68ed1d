"""Words of steps: one training session as plain data, run on torch's DDP or on minidp.

A letter is one step::

    F / N / G    forward: synchronising, inside no_sync(), under no_grad()
    B / L / S    backward: of the oldest loss, of the latest, of the sum of all
    R            backward of the oldest loss, which stays for another backward
    Z / z        zero_grad to None, to 0
    E / T        eval(), train()
    K            freeze a parameter (find_unused_parameters: if no loss waits)
    M            from here on use the next mask of branches (if no loss waits)
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

from minidp import DataParallel
from minidp._phase import Phase
from tests.support.models import ModelSpec, Patchwork


@dataclass(frozen=True)
class Session:
    """What is run: model, options, word, and which branches each rank uses."""

    model: ModelSpec
    options: tuple[tuple[str, Any], ...]
    word: str
    masks: tuple[tuple[tuple[bool, ...], ...], ...]  # [step M][rank % len][branch]
    frozen: int = 0  # parameter that K freezes
    has_grads: bool = False  # before wrapping, the same on all ranks
    has_hook: bool = False  # torch's allreduce_hook
    # Parameters that travel last. With minidp only: torch does not wait for them. Up to
    # two ranks the sums are the same wherever a gradient travels.
    delayed: tuple[int, ...] = ()


@dataclass(frozen=True)
class Step:
    """What one rank saw after one letter."""

    letter: str
    grads: list[torch.Tensor | None]
    module_buffers: list[torch.Tensor]
    is_unfinished: bool  # known for minidp only: a reduction waits for gradients


@dataclass
class Log:
    """What one rank saw in a session."""

    steps: list[Step] = field(default_factory=list)
    error: str = ""  # class name
    message: str = ""


def run_session(
    session: Session,
    wrap: Callable[..., nn.Module],
    group: dist.ProcessGroup,
) -> Log:
    """Run a session until its end, or until any rank raises."""
    rank = dist.get_rank(group)
    module = Patchwork(session.model, seed=rank)
    if session.has_grads:
        for param, same in zip(
            module.parameters(),
            Patchwork(session.model, seed=0).parameters(),
            strict=True,
        ):
            param.grad = torch.empty_like(param).copy_(same.detach())
    log = Log()
    try:
        ddp = _wrapped(session, module, wrap, group)
    except RuntimeError as error:  # the same on all ranks: sessions start alike
        log.error, log.message = type(error).__name__, str(error)
        return log
    player = _Player(session, ddp, module, rank)
    for letter in session.word:
        try:
            player.play(letter)
        except RuntimeError as error:
            log.error, log.message = type(error).__name__, str(error)
        failed = torch.tensor([int(bool(log.error))])
        dist.all_reduce(failed, group=group)
        if failed.item():
            break
        log.steps.append(
            Step(
                letter,
                _grads(module),
                [b.clone() for b in ddp.buffers()],
                is_unfinished=_is_unfinished(ddp),
            )
        )
    return log


def _wrapped(
    session: Session,
    module: Patchwork,
    wrap: Callable[..., nn.Module],
    group: dist.ProcessGroup,
) -> nn.Module:
    options = dict(session.options)
    if session.delayed and wrap is DataParallel:
        named = [(f"params.{i}", module.params[i]) for i in session.delayed]
        options["delay_all_reduce_named_params"] = named
        options["param_to_hook_all_reduce"] = named[0][1]
    ddp: Any = wrap(module, process_group=group, **options)
    if session.has_hook:
        ddp.register_comm_hook(group, allreduce_hook)
    result: nn.Module = ddp
    return result


class _Player:
    def __init__(
        self, session: Session, ddp: nn.Module, module: Patchwork, rank: int
    ) -> None:
        self._session = session
        self._ddp = ddp
        self._module = module
        self._rank = rank
        self._losses: list[list[torch.Tensor]] = []  # of each forward, its parts
        # Torch's search looks at the latest forward only, so that a backward of an
        # earlier one with other parameters breaks it.
        self._searches = ("find_unused_parameters", True) in session.options
        # A local backward before other parameters are used makes torch raise on some
        # ranks only, which hangs the others (README: a stray local backward).
        self._is_announced = self._is_polluted = False
        self._mask = 0
        self._count = 0

    def play(self, letter: str) -> None:
        if letter in "FNG":
            self._forward(letter)
        elif letter in "BLSR":
            self._backward(letter)
        elif letter in "Zz":
            self._ddp.zero_grad(set_to_none=letter == "Z")
        elif letter in "ET":
            self._ddp.train(mode=letter == "T")
        elif letter in "KM" and self._is_polluted:
            return
        elif letter == "K" and not (self._losses and self._searches):
            self._module.params[self._session.frozen].requires_grad_(False)
        elif letter == "M" and not self._losses:
            self._mask = (self._mask + 1) % len(self._session.masks)

    def _forward(self, letter: str) -> None:
        self._count += 1
        generator = torch.Generator().manual_seed(1000 * self._rank + self._count)
        x = torch.randn(4, 3, generator=generator)
        masks = self._session.masks[self._mask]
        used = masks[self._rank % len(masks)]
        no_sync: Any = self._ddp.no_sync if letter == "N" else nullcontext
        with no_sync(), torch.no_grad() if letter == "G" else nullcontext():
            losses = self._ddp(x, used)
        self._is_announced |= letter == "F"
        if letter != "G":
            self._losses.append([loss for loss in losses if loss.requires_grad])

    def _backward(self, letter: str) -> None:
        if not self._losses:
            return
        self._is_polluted = self._searches and not self._is_announced
        self._is_announced = False
        if letter == "S":
            parts = [
                torch.stack([part for loss in self._losses for part in loss]).sum()
            ]
            self._losses = []
        elif letter == "R":
            parts = self._losses[0]
        else:
            parts = self._losses.pop(0 if letter == "B" else -1)
        for part in parts:
            part.backward(retain_graph=letter == "R")


def _grads(module: nn.Module) -> list[torch.Tensor | None]:
    return [None if p.grad is None else p.grad.clone() for p in module.parameters()]


def _is_unfinished(ddp: nn.Module) -> bool:
    return isinstance(ddp, DataParallel) and ddp._reducer.phase.now is Phase.PENDING


def first_difference(session: Session, expected: Log, found: Log) -> str:
    """Where two logs differ, in words; empty when they are equal bit for bit."""
    on = {name for name, value in session.options if value is True}
    has_unused = not on.isdisjoint(["find_unused_parameters", "static_graph"])
    can_drift = has_unused and "gradient_as_bucket_view" in on
    drifted: set[int] = set()
    before: Step | None = None
    for number, (theirs, ours) in enumerate(
        zip(expected.steps, found.steps, strict=False)
    ):
        if can_drift:
            drifted |= _drifts(before, theirs, ours)
        before = ours
        where = f"step {number} ({theirs.letter})"
        pairs = zip(theirs.grads, ours.grads, strict=True)
        # Torch leaves some gradients of an unfinished reduction divided, some not.
        for i, (a, b) in enumerate(() if ours.is_unfinished else pairs):
            if i in drifted:
                continue
            if (a is None) != (b is None):
                return f"{where}: grad {i} is {_short(b)}, torch has {_short(a)}"
            if a is not None and b is not None and not torch.equal(a, b):
                return f"{where}: grad {i} is {_short(b)}, torch has {_short(a)}"
        buffers = zip(theirs.module_buffers, ours.module_buffers, strict=True)
        for i, (c, d) in enumerate(buffers):
            if not torch.equal(c, d):
                return f"{where}: module buffer {i} is {_short(d)}, not {_short(c)}"
    if len(expected.steps) != len(found.steps) or bool(expected.error) != bool(
        found.error
    ):
        return (
            f"torch stops after {len(expected.steps)} steps ({expected.error}: "
            f"{expected.message[:200]}), minidp after {len(found.steps)} "
            f"({found.error}: {found.message[:300]})"
        )
    return ""


def _drifts(before: Step | None, theirs: Step, ours: Step) -> set[int]:
    """Unused gradients that torch averages once more in place, and minidp leaves alone.

    Ours then has the bytes of the step before, and torch's is the same but for the last
    bits (README, differences). Anything else is still a difference.
    """
    if before is None or ours.letter not in "BLSR":
        return set()
    kept = set()
    for i, (old, a, b) in enumerate(
        zip(before.grads, theirs.grads, ours.grads, strict=True)
    ):
        if old is None or a is None or b is None or not torch.equal(old, b):
            continue
        if not torch.equal(a, b) and _is_within_ulps(a, b, 4):
            kept.add(i)
    return kept


def _is_within_ulps(a: torch.Tensor, b: torch.Tensor, ulps: int) -> bool:
    """At most four ulps: one of the division, and one of each addition at 4 ranks."""
    eps, tiny = torch.finfo(b.dtype).eps, torch.finfo(b.dtype).tiny
    wide = torch.complex128 if b.is_complex() else torch.float64
    a, b = a.to(wide), b.to(wide)  # atol would underflow in the narrow dtypes
    return torch.allclose(a, b, rtol=ulps * eps, atol=ulps * eps * tiny)


def _short(tensor: torch.Tensor | None) -> str:
    return "None" if tensor is None else str(tensor.flatten()[:3].tolist())
