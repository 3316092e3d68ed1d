"""One wrong use, played on one rank: what a pattern may do, and what is written down.

Nothing here talks to other ranks: a pattern may have broken every way to do so. Each
rank writes a `Record`; `outcomes.judge` compares them.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from minidp import DataParallel

Loss = Callable[[nn.Module, torch.Tensor, int], torch.Tensor]  # module, x, rank
WRAPPERS = {"torch": DistributedDataParallel, "minidp": DataParallel}


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
    """Two layers, one of which may be left out, and a second method."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x: torch.Tensor, use: str = "ab") -> torch.Tensor:
        for name in use:
            x = torch.tanh(getattr(self, name)(x))
        return x

    def other(self, x: torch.Tensor) -> torch.Tensor:
        return self.forward(x)


def plain(module: nn.Module, x: torch.Tensor, _rank: int) -> torch.Tensor:
    """The loss of everyday."""
    loss: torch.Tensor = module(x).pow(2).sum()
    return loss


class Play:
    """The stage of a pattern on one rank.

    Args:
        ctx: of the rank process.
        wrapper: "torch" or "minidp".
        options: the pattern's, for the constructor.
    """

    def __init__(self, ctx: Any, wrapper: str, options: dict[str, Any]) -> None:
        torch.manual_seed(0)
        self.rank, self.world_size, self.group = ctx.rank, ctx.world_size, ctx.group
        self.is_minidp = wrapper == "minidp"
        self.record = Record()
        self.is_over = False  # the wrong part; what misbehaves asks
        self.undo: list[Callable[[], object]] = []  # before recovery
        self.wraps_again = False  # the remedy is a new wrapper
        self.loss: Loss = plain  # of a step as it should be
        self.model: Any = None
        self.optimizer: Any = None
        self._wrapper = WRAPPERS[wrapper]
        self._options = options
        self._tick = 0

    def wrap(self, module: nn.Module, **options: Any) -> Any:
        """A wrapper on the group."""
        options = {**self._options, **options}
        return self._wrapper(module, process_group=self.group, **options)

    def begin(self, module: nn.Module | None = None, **options: Any) -> Any:
        """Wrap, and make an optimizer."""
        self.model = self.wrap(Net() if module is None else module, **options)
        self.optimizer = self.sgd()
        return self.model

    def sgd(self) -> torch.optim.Optimizer:
        """Of everything trainable that the model has now."""
        return torch.optim.SGD(
            [p for p in self.model.parameters() if p.requires_grad], lr=0.1
        )

    def x(self, rank: int | None = None) -> torch.Tensor:
        """The input of a rank in this step."""
        seed = 1000 * self._tick + (self.rank if rank is None else rank)
        return torch.randn(4, 3, generator=torch.Generator().manual_seed(seed))

    def update(self, loss: Loss | None = plain) -> None:
        """Step the optimizer.

        Args:
            loss: whose mean over ranks the gradients must be of; None: nobody knows.
        """
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
            loss = self.loss(self.model, self.x(), self.rank)
            self.model.zero_grad()
            loss.backward()
            self.update(self.loss)

    def _are_gradients_of(self, loss: Loss) -> bool:
        module = self.model.module
        oracle = copy.deepcopy(module)
        for param in oracle.parameters():
            param.grad = None
        for rank in range(self.world_size):
            (loss(oracle, self.x(rank), rank) / self.world_size).backward()
        return all(
            _is_close(mine.grad, theirs.grad)
            for mine, theirs in zip(
                module.parameters(), oracle.parameters(), strict=True
            )
        )

    def recover(self) -> None:
        """What the README tells people to do after an error, then train."""
        self.is_over = True
        while self.undo:
            self.undo.pop()()
        if self.model is None:  # the constructor raised
            self._options = {}
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


def play(ctx: Any, wrapper: str, module: str, name: str) -> Record:
    """Play one pattern; top-level, for rank processes."""
    import importlib
    import warnings

    pattern = importlib.import_module(module).BY_NAME[name]
    options = dict(pattern.options)
    if wrapper == "minidp":
        options.update(pattern.ours)
    stage = Play(ctx, wrapper, options)
    begin = time.monotonic()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            pattern.run(stage)
        except Exception as error:
            stage.record.error = f"{type(error).__name__}: {error}"
            stage.record.is_named = f"[rank {ctx.rank}]" in str(error)
            is_bad_value = isinstance(error, TypeError | ValueError)
            stage.record.is_argument = stage.model is None and is_bad_value
        stage.record.seconds = time.monotonic() - begin
        texts = [str(warning.message) for warning in caught]
        stage.record.warned = [text for text in texts if "[rank" in text]
        if stage.is_minidp:
            try:
                stage.recover()
            except Exception as error:
                stage.record.recovery = f"{type(error).__name__}: {error}"
    return stage.record
