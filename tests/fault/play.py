"""One wrong use: what a pattern may do, what each rank writes down, how it is judged.

A rank writes a `Record` and talks to nobody: a pattern may have broken every way to do
so. `judge` compares the records of all ranks.
"""

from __future__ import annotations

import copy
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from minidp import DataParallel
from tests.support.pool import RankError

Loss = Callable[[nn.Module, torch.Tensor, int], torch.Tensor]  # module, x, rank
WRAPPERS = {"torch": DistributedDataParallel, "minidp": DataParallel}
BOTH = frozenset({0, 1})
REMEDY = "What to do: "


class Outcome(Enum):
    """From best to worst."""

    RIGHT = "right"
    NAMED = "named error"
    WARNED = "named warning"  # where the same may be meant: local SGD, say
    ERROR = "error"  # in time, but without rank, parameters or remedy
    LATE = "late error"  # replicas had drifted, or gradients were wrong, before it
    SILENT = "SILENT"
    HANG = "hang"  # until the group's timeout, which names nobody
    CRASH = "crash"


GOOD = {Outcome.RIGHT, Outcome.NAMED, Outcome.WARNED}


@dataclass(frozen=True)
class Pattern:
    """A row of the matrix: one wrong use in one mode."""

    name: str
    run: Callable[[Play], None]
    torch: Outcome  # how torch's DDP ends
    names: tuple[str, ...] = ()  # one of these parameters is named in the error
    culprits: frozenset[int] = BOTH
    options: Mapping[str, Any] = field(default_factory=dict)
    ours: Mapping[str, Any] = field(default_factory=dict)  # options torch lacks
    is_legal: bool = False  # right, and not a word


@dataclass
class Record:
    """What happened on one rank."""

    steps: list[dict[str, torch.Tensor]] = field(default_factory=list)
    is_right: list[bool] = field(default_factory=list)  # gradients of those steps
    error: str = ""  # of the pattern: "Class: text"
    is_named: bool = False  # the error is one of ours
    is_argument: bool = False  # the constructor refused an argument
    warned: list[str] = field(default_factory=list)  # of what is ours, in the pattern
    seconds: float = 0.0
    recovery: str = ""  # why training did not go on after reset()
    after: Record | None = None  # the steps that it made then


class Net(nn.Module):
    """Two layers, of which some may be left out, and a second method."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x, use=""):
        """``use``: the layers by name; all that there are by default."""
        every = [m for m in self.children() if isinstance(m, nn.Linear)]
        for layer in [getattr(self, name) for name in use] or every:
            x = torch.tanh(layer(x.to(layer.weight.dtype)))
        return x * self.scale if hasattr(self, "scale") else x

    def other(self, x):
        return self.forward(x)


def plain(module, x, _rank):
    """The loss of everyday."""
    return module(x).pow(2).sum()


class Play:
    """The stage of a pattern on one rank."""

    def __init__(self, ctx: Any, wrapper: str, options: dict[str, Any]) -> None:
        torch.manual_seed(0)
        self.rank, self.world_size, self.group = ctx.rank, ctx.world_size, ctx.group
        self.record = Record()
        self.is_over = False  # the wrong part; what misbehaves asks
        self.undo: list[Callable[[], object]] = []  # before recovery
        self.wraps_again = False  # the remedy is a new wrapper
        self.loss: Loss = plain  # of a step as it should be
        self.model: Any = None
        self.optimizer: Any = None
        self.options = options
        self._wrapper = WRAPPERS[wrapper]
        self._tick = 0

    def wrap(self, module: nn.Module, **options: Any) -> Any:
        """A wrapper on the group."""
        options = {**self.options, **options}
        return self._wrapper(module, process_group=self.group, **options)

    def begin(self, module: nn.Module | None = None, **options: Any) -> Any:
        """Wrap, and make an optimizer."""
        self.model = self.wrap(Net() if module is None else module, **options)
        self.optimizer = self.sgd()
        return self.model

    def sgd(self, **options: Any) -> torch.optim.Optimizer:
        """Of everything trainable that the model has now."""
        params = [p for p in self.model.parameters() if p.requires_grad]
        return torch.optim.SGD(params, lr=0.1, **options)

    def x(self, rank: int | None = None) -> torch.Tensor:
        """The input of a rank in this step."""
        seed = 1000 * self._tick + (self.rank if rank is None else rank)
        return torch.randn(4, 3, generator=torch.Generator().manual_seed(seed))

    def forward(self, loss: Loss = plain, module: nn.Module | None = None) -> Any:
        """The loss of this rank in this step, of the wrapper by default."""
        module = self.model if module is None else module
        return loss(module, self.x(), self.rank)

    def backward(self, module: nn.Module | None = None) -> None:
        """Of the everyday loss."""
        self.forward(module=module).backward()

    def update(self, loss: Loss | None = plain) -> None:
        """Step; the gradients must be of the mean of ``loss`` (None: nobody knows)."""
        is_right = loss is None or self._are_gradients_of(loss)
        self.optimizer.step()
        self.stepped(is_right=is_right)

    def stepped(self, *, is_right: bool = True) -> None:
        """Write down the parameters after a step; also of a hand-written one."""
        state = {n: p.detach().clone() for n, p in self.model.module.named_parameters()}
        self.record.steps.append(state)
        self.record.is_right.append(is_right)
        self._tick += 1

    def train(self, count: int = 1) -> None:
        """Steps as they should be."""
        for _ in range(count):
            loss = self.forward(self.loss)
            self.model.zero_grad()
            loss.backward()
            self.update(self.loss)

    def by_hand(self, *, drops_grads: bool = True) -> None:
        """A step without optimizer: its drift is reported one step later."""
        with torch.no_grad():
            for param in self.model.parameters():
                if param.grad is not None:
                    param -= 0.1 * param.grad
                    param.grad = None if drops_grads else param.grad

    def _are_gradients_of(self, loss: Loss) -> bool:
        module = self.model.module
        oracle = copy.deepcopy(module)
        oracle.zero_grad()
        for rank in range(self.world_size):
            (loss(oracle, self.x(rank), rank) / self.world_size).backward()
        pairs = zip(module.parameters(), oracle.parameters(), strict=True)
        return all(_is_close(mine.grad, theirs.grad) for mine, theirs in pairs)

    def recover(self) -> None:
        """What the README tells people to do after an error, then train."""
        self.is_over = True
        while self.undo:
            self.undo.pop()()
        if self.model is None:  # the constructor raised
            self.options = {}
            self.begin()
        elif self.wraps_again:
            self.begin(self.model.module)
        else:
            self.model.reset()
            self.optimizer = self.sgd()
        # Where only some ranks made the last step, they go on from rank 0's.
        for param in self.model.parameters():
            torch.distributed.broadcast(param.data, 0, group=self.model.process_group)
        self._tick = 100
        record, self.record = self.record, Record()
        record.after = self.record
        try:
            self.train(3)
        finally:
            self.record = record


def _is_close(mine: torch.Tensor | None, theirs: torch.Tensor | None) -> bool:
    if mine is None or theirs is None:  # the same as zeros
        present = theirs if mine is None else mine
        return present is None or not bool(present.any())
    return torch.allclose(mine.double(), theirs.double(), rtol=1e-3, atol=1e-6)


def play(ctx: Any, wrapper: str, pattern: Pattern) -> Record:
    """Play one pattern on a rank."""
    ours = pattern.ours if wrapper == "minidp" else {}
    stage = Play(ctx, wrapper, {**pattern.options, **ours})
    record, begin = stage.record, time.monotonic()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            pattern.run(stage)
        except Exception as error:
            record.error = f"{type(error).__name__}: {error}"
            record.is_named = f"[rank {ctx.rank}]" in str(error)
            is_bad_value = isinstance(error, TypeError | ValueError)
            record.is_argument = stage.model is None and is_bad_value
        record.seconds = time.monotonic() - begin
        texts = [str(warning.message) for warning in caught]
        record.warned = [text for text in texts if "[rank" in text]
        if wrapper == "minidp":
            try:
                stage.recover()
            except Exception as error:
                record.recovery = f"{type(error).__name__}: {error}"
    return record


# -- the judge -------------------------------------------------------------------------


@dataclass(frozen=True)
class Verdict:
    """An outcome and what it rests on."""

    outcome: Outcome
    details: str
    recovery: str = ""  # why training did not go on after reset(); minidp only
    warned: tuple[str, ...] = ()


def judge(records, culprits, names, timeout) -> Verdict:
    """How a pattern ended, and what came after it.

    Args:
        records: a `Record` or a `RankError` for each rank.
        culprits: the ranks that did wrong.
        names: at least one of them must be in the culprit's error, if there are any.
        timeout: of the process group; an error that took as long is a hang.
    """
    lost = [record for record in records if isinstance(record, RankError)]
    if lost:
        is_hang = all(error.kind == "Hang" for error in lost)
        outcome = Outcome.HANG if is_hang else Outcome.CRASH
    else:
        outcome = _outcome(records, culprits, names, timeout)
    heard = tuple(text for record in records for text in getattr(record, "warned", ()))
    details = " | ".join(map(_describe, records))
    return Verdict(outcome, details, _recovery(records), heard)


def _recovery(records: Sequence[Any]) -> str:
    for rank, record in enumerate(records):
        if isinstance(record, RankError):
            return "a rank is gone"
        if record.recovery:
            return f"rank {rank}: {record.recovery}"
    after = [record.after for record in records]
    if all(after) and _has_drifted(after):
        return "wrong gradients, or replicas differ"
    return ""


def _outcome(records, culprits, names, timeout) -> Outcome:
    """Of ranks that all lived."""
    has_drifted = _has_drifted(records)
    raised = {rank: record for rank, record in enumerate(records) if record.error}
    if not raised:
        warned = (any(_tells(r, w, names) for w in records[r].warned) for r in culprits)
        drifted = Outcome.WARNED if all(warned) else Outcome.SILENT
        return drifted if has_drifted else Outcome.RIGHT
    if any(r.seconds > 0.8 * timeout and not r.is_named for r in raised.values()):
        return Outcome.HANG
    if has_drifted:
        return Outcome.LATE
    is_named = all(
        record.is_argument  # a plain TypeError or ValueError, as torch raises
        or _tells(rank, record.error, names if rank in culprits else ())
        for rank, record in raised.items()
    )
    return Outcome.NAMED if is_named else Outcome.ERROR


def _tells(rank: int, error: str, names: Sequence[str]) -> bool:
    """Whether an error says who speaks, about which parameters, and what to do."""
    knows_names = not names or any(name in error for name in names)
    return f"[rank {rank}]" in error and REMEDY in error and knows_names


def _has_drifted(records: Sequence[Record]) -> bool:
    """Whether replicas differed after a step, or a step used wrong gradients."""
    if not all(right for record in records for right in record.is_right):
        return True
    return any(
        other.keys() != first.keys()
        or not all(_same_bits(first[n], other[n]) for n in first)
        for first, *others in zip(*(record.steps for record in records), strict=False)
        for other in others
    )


def _same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and torch.equal(
        torch.nan_to_num(a, nan=12345.0), torch.nan_to_num(b, nan=12345.0)
    )


def _describe(record: Any) -> str:
    if isinstance(record, RankError):
        return f"{record.kind} {record.exit_code or ''}"
    text = record.error.replace("\n", " ")[:400] or "no error"
    return f"{len(record.steps)} steps, {record.seconds:.1f} s, {text}"
