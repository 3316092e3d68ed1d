"""Training actions by name, played alike on torch's DDP and on minidp.

A training is a text that all ranks get, its actions separated by commas:

    train               a step as it should be: forward, zero, backward, step
    forward(ab a)       rank 0 uses the layers a and b, rank 1 only a
    backward @1         on rank 1 only
    backward !1         on all ranks but rank 1

`ACTIONS` holds the functions; a test adds its own with `action`.
"""

from __future__ import annotations

import copy
import hashlib
import math
import re
import time
import warnings
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from minidp import DataParallel

# (module, input, rank) -> losses, which are summed.
Loss = Callable[[Any, torch.Tensor, int], list[torch.Tensor]]
WRAPPERS = {"torch": DistributedDataParallel, "minidp": DataParallel}
MEETING_SECONDS = 60  # for ranks that wait in several hangs, one after the other
ACTIONS: dict[str, Callable[..., object]] = {}  # of a Stage, and of what is in brackets
_SYNTAX = re.compile(r"(?P<name>.+?)(\((?P<given>.*)\))?( (?P<how>[@!])(?P<rank>\d))?")


def action(name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorate the function of an action: ``function(stage, *words in brackets)``."""

    def add(run: Callable[..., Any]) -> Callable[..., Any]:
        ACTIONS[name] = run
        return run

    return add


class Net(nn.Module):
    """Linear layers in a row, of which a forward may leave some out.

    Args:
        layers: their names, one letter each.
        has_norm: a batch norm follows the first layer.
        has_parts: return the outputs of the first layer and of the last.
    """

    def __init__(
        self, layers: str = "ab", *, has_norm: bool = False, has_parts: bool = False
    ) -> None:
        super().__init__()
        for name in layers:
            setattr(self, name, nn.Linear(3, 3))
        self.norm = nn.BatchNorm1d(3, affine=False) if has_norm else nn.Identity()
        self.has_parts = has_parts

    def forward(self, x: torch.Tensor, use: str = "") -> Any:
        """Apply the layers in ``use``; by default all that there are by now."""
        every = [n for n, m in self.named_children() if isinstance(m, nn.Linear)]
        outputs: list[torch.Tensor] = []
        for name in use or every:
            layer = getattr(self, name)
            x = torch.tanh(layer(x.to(layer.weight.dtype)))
            x = x if outputs else self.norm(x)
            outputs.append(x)
        if isinstance(scale := getattr(self, "scale", None), torch.Tensor):
            x = x * scale
        return [outputs[0], x] if self.has_parts else x

    def other(self, x: torch.Tensor) -> Any:
        """Call `forward`, past the hooks of a wrapper."""
        return self.forward(x)


def squares(outputs: Any) -> list[torch.Tensor]:
    """Return a loss for each output."""
    several = outputs if isinstance(outputs, list | tuple) else [outputs]
    return [output.pow(2).sum() for output in several]


def plain(module: Any, x: torch.Tensor, _rank: int) -> list[torch.Tensor]:
    """The loss of every day."""
    return squares(module(x))


@dataclass(frozen=True)
class Forward:
    """A forward that waits for its backward."""

    losses: list[torch.Tensor]
    loss: Loss  # that made them
    count: int  # the number of the forward


@dataclass(frozen=True)
class Step:
    """An optimizer's step that was made, or refused."""

    where: tuple[int, int]  # synchronised backwards so far; number of the action
    digest: str  # of the parameters after it; empty: refused
    is_right: bool = True  # the gradients were the mean over ranks


@dataclass
class Record:
    """What happened on one rank; ranks say nothing to each other about it.

    ``steps`` and ``ends`` have an entry for each stretch between recoveries.
    """

    steps: list[list[Step]] = field(default_factory=lambda: [[]])
    ends: list[str] = field(default_factory=list)  # digests; empty: an action raised
    errors: list[tuple[int, str]] = field(default_factory=list)  # (action, text)
    warned: list[str] = field(default_factory=list)  # texts that name a rank
    longest: float = 0.0  # seconds of one action
    is_argument: bool = False  # the constructor refused an argument
    undocumented: str = ""  # an error of another class than the README names
    recovery: str = ""  # why training did not go on after reset(); empty: it did
    leaves_a_group: bool = False  # in which collectives may still wait


class Stage:
    """One rank's model, optimizers and losses, which actions act upon.

    Args:
        ctx: of the rank; ``ctx.group`` is the group to wrap on.
        wrapper: a key of WRAPPERS.
        make: returns the module.
        options: of the wrapper.
        loss: what `forward` calculates by default.
        key: a name of this training alone, under which ranks wait for each other
            before they recover, however long; empty: they do not.
    """

    def __init__(
        self,
        ctx: Any,
        wrapper: str,
        make: Callable[[], nn.Module] = Net,
        *,
        options: Any = (),
        loss: Loss = plain,
        key: str = "",
    ) -> None:
        self.rank, self.world_size, self.group = ctx.rank, ctx.world_size, ctx.group
        self.make, self.options, self._usual = make, dict(options), loss
        self.wrapper: Any = WRAPPERS[wrapper]
        self._key, self._num_meetings, self._num_errors = key, 0, 0
        self.record = Record()
        self.number = 0  # of the action
        self.model: Any = None
        self.count = 0  # forwards
        self.has_hook = False  # the comm hook `Stage.comm_hook`
        self.sums = True  # one backward for all losses of a forward
        self.is_over = False  # the wrong part; what misbehaves asks
        self.undo: list[Callable[[], object]] = []  # before recovery

    def play(self, text: str) -> None:
        """Do the actions of a text that this rank takes part in, up to an error."""
        for word in text.split(", "):
            found = _SYNTAX.fullmatch(word)
            assert found is not None
            is_named = found["how"] and int(found["rank"]) == self.rank
            if not found["how"] or is_named == (found["how"] == "@"):
                ACTIONS[found["name"]](self, *(found["given"] or "").split())

    # -- the wrapper -------------------------------------------------------------------

    def wrap(self, module: nn.Module) -> Any:
        """Return a wrapper on the group; collective."""
        return self.wrapper(module, process_group=self.group, **self.options)

    def begin(self, module: nn.Module) -> None:
        """Wrap a module, which is collective, and make optimizers."""
        parameters = module.named_parameters()
        self.frozen = {name for name, p in parameters if not p.requires_grad}
        self.model = self.wrap(module)
        if self.has_hook:
            self.model.register_comm_hook(None, self.comm_hook)
        self.start()

    def start(self) -> None:
        """Make new optimizers, and forget losses, hooks and what is to go wrong."""
        self.renew_optimizers()
        self.loss = self._usual
        self.waiting: list[Forward] = []  # for their backward
        self.due: list[tuple[Loss, int]] = []  # of which forwards .grad is the sum
        self.handles: list[Any] = []  # of hooks that a backward removes
        self.quiet = ExitStack()
        self.wrong_hook: Callable[[Any], Any] | None = None
        self.has_nan = self.is_changed = False
        self._num_before = self._num_synchronised()

    def renew_optimizers(self, **options: Any) -> None:
        """Make optimizers of all parameters that are trainable now."""
        params = [p for p in self.model.parameters() if p.requires_grad]
        self.optimizers: dict[str, torch.optim.Optimizer] = {
            "step": torch.optim.SGD(params, lr=0.1, **options),
            "step others": torch.optim.AdamW(params, lr=0.01, foreach=True),
            "step half": torch.optim.Adam(params[: len(params) // 2 + 1], lr=0.01),
        }

    def comm_hook(self, _state, bucket):  # type: ignore[no-untyped-def]  # torch reads it
        """Average a bucket; or return ``wrong_hook(average)``, once, if it is set."""
        buffer = bucket.buffer().div_(self.world_size)
        place = {"group": self.model.process_group}

        def average() -> Any:
            dist.all_reduce(buffer, **place)
            return buffer

        wrong, self.wrong_hook = self.wrong_hook, None
        if wrong is not None:
            return wrong(average)
        work: Any = dist.all_reduce(buffer, async_op=True, **place)
        return work.get_future().then(lambda done: done.value()[0])

    def _num_synchronised(self) -> int:
        is_ours = isinstance(self.model, DataParallel)
        return self.model._reducer.ledger.finalized if is_ours else 0

    # -- a step ------------------------------------------------------------------------

    def x(self, rank: int, count: int) -> torch.Tensor:
        """Return the input of a rank in its forward number ``count``."""
        generator = torch.Generator().manual_seed(1000 * rank + count)
        return torch.randn(4, 3, generator=generator)

    def forward(self, loss: Loss | None = None, module: Any = None) -> None:
        """Calculate the loss of the next input, by the wrapper or another module."""
        self.count += 1
        loss, x = loss or self.loss, self.x(self.rank, self.count)
        if self.has_nan:
            x[0, 0], self.has_nan = float("nan"), False
        losses = loss(self.model if module is None else module, x, self.rank)
        if torch.is_grad_enabled():
            self.waiting.append(Forward(losses, loss, self.count))

    def backward(self, which: int = -1, *, keeps: bool = False) -> None:
        """Run the backward of a waiting forward, if any; ``keeps``: it waits on."""
        if not self.waiting:
            return
        made = self.waiting[which] if keeps else self.waiting.pop(which)
        self.due.append((made.loss, made.count))
        for loss in [_sum(made.losses)] if self.sums else made.losses:
            loss.backward(retain_graph=keeps)
        self.unhook()

    def unhook(self) -> None:
        """Remove the hooks that were for one backward."""
        while self.handles:
            self.handles.pop().remove()

    def step(self, name: str = "step", *, is_checked: bool = False) -> None:
        """Step with an optimizer, and note it if there are gradients.

        ``is_checked``: compare them with the mean over ranks before.
        """
        optimizer = self.optimizers[name]
        held = [p for group in optimizer.param_groups for p in group["params"]]
        if all(p.grad is None for p in held):
            optimizer.step()
            return
        is_right = not is_checked or self._has_right_gradients()
        try:
            optimizer.step()
        except Exception:
            self.note(digest="")
            raise
        self.note(is_right=is_right)

    def note(self, *, digest: str | None = None, is_right: bool = True) -> None:
        """Record a step; ``digest`` is that of the present parameters by default."""
        where = self._num_synchronised() - self._num_before, self.number
        digest = self.digest() if digest is None else digest
        self.record.steps[-1].append(Step(where, digest, is_right))

    def digest(self) -> str:
        """Return a digest of all parameters; all NaNs are alike."""
        text = hashlib.sha1(usedforsecurity=False)
        for name, param in self.model.module.named_parameters():
            values = param.detach().double().nan_to_num(nan=1e300, posinf=2e300)
            text.update(name.encode() + values.numpy().tobytes())
        return text.hexdigest()[:12]

    def _has_right_gradients(self) -> bool:
        """Whether .grad is the mean over ranks of all backwards since `zero`."""
        module = self.model.module
        oracle = copy.deepcopy(module)
        oracle.zero_grad()
        for loss, count in self.due:
            for rank in range(self.world_size):
                losses = loss(oracle, self.x(rank, count), rank)
                (_sum(losses) / self.world_size).backward()
        both = zip(module.parameters(), oracle.parameters(), strict=True)
        pairs = [(mine.grad, theirs.grad) for mine, theirs in both]
        # A batch norm makes small gradients out of large ones: rounding is of those.
        present = [theirs for _, theirs in pairs if theirs is not None]
        largest = max((float(grad.abs().max()) for grad in present), default=0.0)
        atol = 1e-5 * largest if math.isfinite(largest) else 0.0
        return all(_is_close(p, q, atol) for p, q in pairs)

    # -- recovery ----------------------------------------------------------------------

    def recover(self, *, has_time: bool = False) -> None:
        """Do what the README asks for after an error: undo its cause, and reset().

        A module that has changed on some rank is wrapped again. Then all parameters get
        new values, the same on all ranks. If nothing wrong follows, waits need not end
        soon, and this rank ``has_time``, even on a busy machine.
        """
        num_errors, self._num_errors = self._num_errors, len(self.record.errors)
        has_raised = num_errors < self._num_errors
        self.record.ends.append("" if has_raised else self.digest())
        self.is_over = True
        while self.undo:
            self.undo.pop()()
        if self.model is None:  # the constructor raised
            self.options = {}
            self.begin(Net())
        self.unhook()
        self.quiet.close()
        news = str(self.is_changed)
        is_changed = "True" in (self._meet(news) if self._key else [news])
        self.model.reset()
        if has_time:
            self.model._reducer.communicator.limit = 30.0
        self.group = self.model.process_group
        module = self.model.module
        if is_changed:
            self.begin(module.float().requires_grad_())
        for name, param in module.named_parameters():
            param.requires_grad_(name not in self.frozen)
        torch.manual_seed(3)
        new = {
            k: torch.rand_like(v) if v.is_floating_point() else torch.zeros_like(v)
            for k, v in module.state_dict().items()
        }
        module.load_state_dict(new)
        self.model.train()
        self.model.zero_grad()
        self.start()
        self.count = 100
        self.record.steps.append([])

    def _meet(self, news: str) -> list[str]:
        """Wait for all ranks in the store; return the news of each."""
        store = dist.distributed_c10d._get_default_store()
        self._num_meetings += 1
        place = f"{self._key}/{self._num_meetings}"
        store.set(f"{place}/{self.rank}", news)
        keys = [f"{place}/{rank}" for rank in range(self.world_size)]
        store.wait(keys, timedelta(seconds=MEETING_SECONDS))
        return [store.get(key).decode() for key in keys]


def _sum(losses: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.stack(list(losses)).sum()


def _is_close(
    mine: torch.Tensor | None, theirs: torch.Tensor | None, atol: float
) -> bool:
    if mine is None or theirs is None:  # the same as zeros
        present = theirs if mine is None else mine
        return present is None or not bool(present.any())
    return torch.allclose(mine.double(), theirs.double(), rtol=1e-5, atol=atol)


def has_drifted(records: Sequence[Record], stretch: int) -> bool:
    """Whether, in one stretch, replicas differed after a step or gradients were wrong.

    Only ranks that reached the stretch are compared, and only steps that all made.
    """
    steps = [step for record in records for step in record.steps[stretch:][:1]]
    if not all(step.is_right for by_rank in steps for step in by_rank):
        return True
    digests = [[step.digest for step in by_rank if step.digest] for by_rank in steps]
    return any(len(set(found)) > 1 for found in zip(*digests, strict=False))


def run(stage: Stage, text: str, *, goes_on: bool = False) -> Record:
    """Wrap and do the actions; on minidp then recover, and train three steps.

    The first error ends the actions, unless ``goes_on``. Errors are recorded, not
    raised.
    """
    record, documented = stage.record, (RuntimeError, ValueError, TypeError)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for stage.number, word in enumerate(["begin", *text.split(", ")]):
            begin = time.monotonic()
            try:
                stage.play(word)
            except Exception as error:
                told = f"{type(error).__name__}: {error}"
                record.errors.append((stage.number, told))
                if not isinstance(error, documented) or "INTERNAL ASSERT" in told:
                    record.undocumented += f"{word}: {told} "
                is_bad_value = isinstance(error, TypeError | ValueError)
                record.is_argument = stage.model is None and is_bad_value
            if word != "reset":  # which begins with a meeting
                record.longest = max(record.longest, time.monotonic() - begin)
            if record.errors and not goes_on:
                break
        told_all = [str(warning.message) for warning in caught]
        record.warned = [told for told in told_all if "[rank" in told]
        if stage.wrapper is DataParallel:
            try:
                stage.recover(has_time=True)
                stage.play("train, train, train")
            except Exception as error:
                record.recovery = f"{type(error).__name__}: {error}"
    return record


# -- the actions -----------------------------------------------------------------------


@action("forward")
def forward(stage: Stage, *use: str) -> None:
    """Run a forward with the layers ``use[rank]``; one entry is for all ranks."""

    def loss(module: Any, x: torch.Tensor, rank: int) -> list[torch.Tensor]:
        return squares(module(x, use[rank % len(use)]))

    stage.forward(loss if use else None)


@action("train")
def train(stage: Stage, *use: str) -> None:
    """Make a step as it should be."""
    forward(stage, *use)
    stage.play("zero, backward, step")


@action("part")
def part(stage: Stage) -> None:
    """Run the backward of only the first loss of a forward; the others wait."""
    if stage.waiting and len(stage.waiting[-1].losses) > 1:
        stage.waiting[-1].losses.pop(0).backward(retain_graph=True)
        stage.unhook()
    else:
        stage.backward()


@action("sum")
def backward_of_all(stage: Stage) -> None:
    """Run one backward for all forwards that wait."""
    losses = [loss for made in stage.waiting for loss in made.losses]
    stage.due += [(made.loss, made.count) for made in stage.waiting]
    stage.waiting = []
    if losses:
        _sum(losses).backward()


@action("no_grad")
@torch.no_grad()
def forward_without_grad(stage: Stage) -> None:
    """Run a forward that no backward follows."""
    stage.forward()


@action("quiet")
def forward_in_no_sync(stage: Stage) -> None:
    """Run a forward inside no_sync()."""
    with stage.model.no_sync():
        stage.forward()


@action("zero")
def zero(stage: Stage, *, to_none: bool = True) -> None:
    """Set all gradients of the model to None, or to zeros."""
    stage.model.zero_grad(set_to_none=to_none)
    stage.due.clear()


@action("freeze")
def freeze(stage: Stage, prefix: str, *, is_trained: bool = False) -> None:
    """Freeze (or not) the parameters whose names begin with ``prefix``."""
    for name, param in stage.model.module.named_parameters():
        if name.startswith(prefix):
            param.requires_grad_(is_trained)
            stage.is_changed |= is_trained and name in stage.frozen


ACTIONS |= {
    "begin": lambda stage: stage.begin(stage.make()),
    "bare": lambda stage: stage.forward(module=stage.model.module),
    "no_sync": lambda stage: stage.quiet.enter_context(stage.model.no_sync()),
    "synced": lambda stage: stage.quiet.close(),
    "drop": lambda stage: stage.waiting.pop(),
    "backward": lambda stage: stage.backward(),
    "oldest": lambda stage: stage.backward(0),
    "retain": lambda stage: stage.backward(keeps=True),
    "zero to 0": lambda stage: zero(stage, to_none=False),
    "eval": lambda stage: stage.model.eval(),
    "train mode": lambda stage: stage.model.train(),
    "unfreeze": lambda stage, prefix: freeze(stage, prefix, is_trained=True),
    "step": lambda stage: stage.step(is_checked=True),
    "blind step": lambda stage: stage.step(),
    "step others": lambda stage: stage.step("step others"),
    "step half": lambda stage: stage.step("step half"),
    "unseen step": lambda stage: stage.optimizers["step"].step(),
    "note": lambda stage: stage.note(),
    "new optimizer": lambda stage: stage.renew_optimizers(),
    "momentum": lambda stage: stage.renew_optimizers(momentum=0.9),
    "reset": lambda stage: stage.recover(),
}
