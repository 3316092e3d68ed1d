"""Training sessions as plain data, compared action by action with torch's DDP."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

from minidp import DataParallel
from minidp.core import Phase
from tests.support.actions import Stage, action
from tests.support.both import grads
from tests.support.models import ModelSpec, Patchwork
from tests.support.training import is_same, short

BACKWARDS = ("backward", "oldest", "retain", "sum")


@dataclass(frozen=True)
class Session:
    """What is run: model, options, actions, and which branches each rank uses."""

    model: ModelSpec
    options: tuple[tuple[str, Any], ...]
    text: str  # of actions, see `tests.support.actions`
    masks: tuple[tuple[tuple[bool, ...], ...], ...]  # [next mask][rank % len][branch]
    has_grads: bool = False  # before wrapping, the same on all ranks
    has_hook: bool = False  # torch's allreduce_hook
    # Parameters that travel last. With minidp only: torch does not wait for them. Up to
    # two ranks the sums are the same wherever a gradient travels.
    delayed: tuple[int, ...] = ()


@dataclass(frozen=True)
class Seen:
    """What one rank saw after one action."""

    action: str
    grads: list[torch.Tensor | None]
    module_buffers: list[torch.Tensor]
    is_unfinished: bool  # known for minidp only: a reduction waits for gradients


@dataclass
class Log:
    """What one rank saw in a session."""

    seen: list[Seen] = field(default_factory=list)
    error: str = ""  # class name
    message: str = ""


class _Stage(Stage):
    """A session on one rank."""

    def __init__(self, ctx: Any, wrapper: str, session: Session) -> None:
        super().__init__(ctx, wrapper, options=session.options, loss=self._losses)
        self.session, self.sums = session, False
        self.mask = 0
        self.is_announced = self.is_polluted = False

    def _losses(self, module: Any, x: torch.Tensor, rank: int) -> list[torch.Tensor]:
        masks = self.session.masks[self.mask]
        losses = module(x, masks[rank % len(masks)])
        return [loss for loss in losses if loss.requires_grad]

    def may(self, word: str) -> bool:
        """Whether torch's DDP neither breaks nor hangs.

        Its search looks at the latest forward only, so that a backward of an earlier
        one with other parameters breaks it. A local backward before other parameters
        are used makes it raise on some ranks only, which hangs the others (README: a
        stray local backward).
        """
        searches = self.options.get("find_unused_parameters", False)
        if word == "next mask":
            return not (self.waiting or self.is_polluted)
        if word.startswith("freeze"):
            return not (self.is_polluted or (self.waiting and searches))
        if word == "forward":
            self.is_announced = True
        elif word in BACKWARDS and self.waiting:
            self.is_polluted = searches and not self.is_announced
            self.is_announced = False
        return True


@action("next mask")
def use_the_next_mask(stage: _Stage) -> None:
    """Use other branches from here on."""
    stage.mask = (stage.mask + 1) % len(stage.session.masks)


def run_session(ctx: Any, session: Session, wrapper: str) -> Log:
    """Run a session until its end, or until any rank raises."""
    log, module = Log(), Patchwork(session.model, seed=ctx.rank)
    if session.has_grads:
        others = Patchwork(session.model, seed=0).parameters()
        for param, same in zip(module.parameters(), others, strict=True):
            param.grad = torch.empty_like(param).copy_(same.detach())
    stage = _Stage(ctx, wrapper, session)
    if session.delayed and wrapper == "minidp":
        named = [(f"params.{i}", module.params[i]) for i in session.delayed]
        stage.options["delay_all_reduce_named_params"] = named
        stage.options["param_to_hook_all_reduce"] = named[0][1]
    try:
        stage.begin(module)
        if session.has_hook:
            stage.model.register_comm_hook(ctx.group, allreduce_hook)
    except RuntimeError as error:  # the same on all ranks: sessions start alike
        log.error, log.message = type(error).__name__, str(error)
        return log
    for word in session.text.split(", "):
        try:
            if stage.may(word):
                stage.play(word)
        except RuntimeError as error:
            log.error, log.message = type(error).__name__, str(error)
        failed = torch.tensor([int(bool(log.error))])
        dist.all_reduce(failed, group=ctx.group)
        if failed.item():
            break
        is_ours = isinstance(stage.model, DataParallel)
        phase = stage.model._reducer.phase.now if is_ours else None
        buffers = [b.clone() for b in stage.model.buffers()]
        seen = Seen(word, grads(stage.model), buffers, phase is Phase.PAUSED)
        log.seen.append(seen)
    return log


def first_difference(session: Session, expected: Log, found: Log) -> str:
    """Return where two logs differ bit for bit, in words; empty if nowhere."""
    on = {name for name, value in session.options if value is True}
    has_unused = not on.isdisjoint(["find_unused_parameters", "static_graph"])
    can_drift = has_unused and "gradient_as_bucket_view" in on
    drifted: set[int] = set()
    before: Seen | None = None
    both = zip(expected.seen, found.seen, strict=False)
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
                where = f"action {number} ({theirs.action})"
                return f"{where}: {what} is {short(b)}, torch has {short(a)}"
    lengths = [len(log.seen) for log in (expected, found)]
    if lengths[0] != lengths[1] or bool(expected.error) != bool(found.error):
        ends = [f"({log.error}: {log.message[:300]})" for log in (expected, found)]
        return (
            f"torch stops after {lengths[0]} actions {ends[0]}, "
            f"minidp after {lengths[1]} {ends[1]}"
        )
    return ""


def _drifts(before: Seen | None, theirs: Seen, ours: Seen) -> set[int]:
    """Return the unused gradients that torch has averaged once more, and minidp not.

    Ours then has the bytes of the step before, and torch's is the same but for the last
    bits (README, differences). Anything else is still a difference.
    """
    if before is None or ours.action not in BACKWARDS:
        return set()
    three = enumerate(zip(before.grads, theirs.grads, ours.grads, strict=True))
    return {
        i
        for i, (old, a, b) in three
        if old is not None and a is not None and b is not None and torch.equal(old, b)
        if not torch.equal(a, b) and _is_within_ulps(a, b, 4)
    }


def _is_within_ulps(a: torch.Tensor, b: torch.Tensor, ulps: int) -> bool:
    """Whether two tensors are within ``ulps`` units in the last place."""
    eps, tiny = torch.finfo(b.dtype).eps, torch.finfo(b.dtype).tiny
    wide = torch.complex128 if b.is_complex() else torch.float64
    a, b = a.to(wide), b.to(wide)  # atol would underflow in the narrow dtypes
    return torch.allclose(a, b, rtol=ulps * eps, atol=ulps * eps * tiny)
