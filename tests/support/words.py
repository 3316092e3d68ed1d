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
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

from minidp import DataParallel
from minidp.core.reducer import Phase
from tests.support.models import ModelSpec, Patchwork
from tests.support.training import is_same, short


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
    session: Session, wrap: Callable[..., Any], group: dist.ProcessGroup
) -> Log:
    """Run a session until its end, or until any rank raises."""
    rank, log = dist.get_rank(group), Log()
    module = Patchwork(session.model, seed=rank)
    if session.has_grads:
        others = Patchwork(session.model, seed=0).parameters()
        for param, same in zip(module.parameters(), others, strict=True):
            param.grad = torch.empty_like(param).copy_(same.detach())
    options = dict(session.options)
    if session.delayed and wrap is DataParallel:
        named = [(f"params.{i}", module.params[i]) for i in session.delayed]
        options["delay_all_reduce_named_params"] = named
        options["param_to_hook_all_reduce"] = named[0][1]
    try:
        ddp = wrap(module, process_group=group, **options)
        if session.has_hook:
            ddp.register_comm_hook(group, allreduce_hook)
    except RuntimeError as error:  # the same on all ranks: sessions start alike
        log.error, log.message = type(error).__name__, str(error)
        return log
    player = _Player(session, ddp, rank)
    for letter in session.word:
        try:
            player.play(letter)
        except RuntimeError as error:
            log.error, log.message = type(error).__name__, str(error)
        failed = torch.tensor([int(bool(log.error))])
        dist.all_reduce(failed, group=group)
        if failed.item():
            break
        grads = [p.grad if p.grad is None else p.grad.clone() for p in ddp.parameters()]
        phase = ddp._reducer.phase.now if isinstance(ddp, DataParallel) else None
        buffers = [b.clone() for b in ddp.buffers()]
        log.steps.append(Step(letter, grads, buffers, phase is Phase.PAUSED))
    return log


class _Player:
    def __init__(self, session: Session, ddp: Any, rank: int) -> None:
        self._session, self._ddp, self._rank = session, ddp, rank
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
            self._ddp.module.params[self._session.frozen].requires_grad_(False)
        elif letter == "M" and not self._losses:
            self._mask = (self._mask + 1) % len(self._session.masks)

    def _forward(self, letter: str) -> None:
        self._count += 1
        generator = torch.Generator().manual_seed(1000 * self._rank + self._count)
        x = torch.randn(4, 3, generator=generator)
        masks = self._session.masks[self._mask]
        used = masks[self._rank % len(masks)]
        contexts = {"F": nullcontext, "N": self._ddp.no_sync, "G": torch.no_grad}
        with contexts[letter]():
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
            parts = [torch.stack([p for loss in self._losses for p in loss]).sum()]
            self._losses = []
        elif letter == "R":
            parts = self._losses[0]
        else:
            parts = self._losses.pop(0 if letter == "B" else -1)
        for part in parts:
            part.backward(retain_graph=letter == "R")


def first_difference(session: Session, expected: Log, found: Log) -> str:
    """Where two logs differ, in words; empty when they are equal bit for bit."""
    on = {name for name, value in session.options if value is True}
    has_unused = not on.isdisjoint(["find_unused_parameters", "static_graph"])
    can_drift = has_unused and "gradient_as_bucket_view" in on
    drifted: set[int] = set()
    before: Step | None = None
    both = zip(expected.steps, found.steps, strict=False)
    for number, (theirs, ours) in enumerate(both):
        if can_drift:
            drifted |= _drifts(before, theirs, ours)
        before = ours
        pairs = list(zip(theirs.grads, ours.grads, strict=True))
        # Torch leaves some gradients of an unfinished reduction divided, some not.
        named = {
            f"grad {i}": pair
            for i, pair in enumerate(() if ours.is_unfinished else pairs)
            if i not in drifted
        }
        buffers = zip(theirs.module_buffers, ours.module_buffers, strict=True)
        named |= {f"module buffer {i}": pair for i, pair in enumerate(buffers)}
        for what, (a, b) in named.items():
            if not is_same(a, b):
                where = f"step {number} ({theirs.letter})"
                return f"{where}: {what} is {short(b)}, torch has {short(a)}"
    lengths = [len(log.steps) for log in (expected, found)]
    if lengths[0] != lengths[1] or bool(expected.error) != bool(found.error):
        ends = [f"({log.error}: {log.message[:300]})" for log in (expected, found)]
        return (
            f"torch stops after {lengths[0]} steps {ends[0]}, "
            f"minidp after {lengths[1]} {ends[1]}"
        )
    return ""


def _drifts(before: Step | None, theirs: Step, ours: Step) -> set[int]:
    """Unused gradients that torch averages once more in place, and minidp leaves alone.

    Ours then has the bytes of the step before, and torch's is the same but for the last
    bits (README, differences). Anything else is still a difference.
    """
    if before is None or ours.letter not in "BLSR":
        return set()
    three = enumerate(zip(before.grads, theirs.grads, ours.grads, strict=True))
    return {
        i
        for i, (old, a, b) in three
        if old is not None and a is not None and b is not None and torch.equal(old, b)
        if not torch.equal(a, b) and _is_within_ulps(a, b, 4)
    }


def _is_within_ulps(a: torch.Tensor, b: torch.Tensor, ulps: int) -> bool:
    """At most four ulps: one of the division, and one of each addition at 4 ranks."""
    eps, tiny = torch.finfo(b.dtype).eps, torch.finfo(b.dtype).tiny
    wide = torch.complex128 if b.is_complex() else torch.float64
    a, b = a.to(wide), b.to(wide)  # atol would underflow in the narrow dtypes
    return torch.allclose(a, b, rtol=ulps * eps, atol=ulps * eps * tiny)
