"""The model and the steps that simulated ranks train, and what must come out."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from .tape import Tape

LEARNING_RATE = 0.125
HANG_SECONDS = 30.0


@dataclass(frozen=True)
class Settings:
    """How to train.

    Attributes:
        mode: "all", "unused" (`find_unused_parameters`), or "static" (`static_graph`).
        steps: How many steps.
        local: How many backwards inside `no_sync` precede each synchronised one.
        hook: A comm hook: None, "torchs", "torchs in 16 bits", or "users".
        items: Whether averages are over items.
        is_attached: Whether the module is attached, and not wrapped.
        options: What else the constructor gets, as pairs.
        learning_rate: That of SGD.
    """

    mode: str = "all"
    steps: int = 3
    local: int = 0
    hook: str | None = None
    items: bool = False
    options: tuple[tuple[str, Any], ...] = ()
    is_attached: bool = False
    learning_rate: float = LEARNING_RATE

    @property
    def constructor(self) -> dict[str, Any]:
        """The arguments of the constructor."""
        given = {"hang_timeout": HANG_SECONDS, **dict(self.options)}
        given |= {"find_unused_parameters": True} if self.mode == "unused" else {}
        given |= {"static_graph": True} if self.mode == "static" else {}
        return given | ({"average_over": "items"} if self.items else {})


_OPTIONS: tuple[tuple[str, Any], ...] = (
    ("bucket_cap_mb", 1e-5),  # a bucket for each parameter
    ("gradient_as_bucket_view", True),
    ("forward_sync_buffers", False),
    ("check_replicas_every", 2),
    ("batched_grad_copy", True),
    ("lazy_bucket_allocation", True),
)


def draw(tape: Tape) -> Settings:
    """Draw how to train; zeros are the defaults."""
    mode = ("all", "unused", "static")[tape.choose(3)]
    local = (0, 0, 1)[tape.choose(3)]
    hook = (None, None, None, "torchs", "torchs in 16 bits", "users")[tape.choose(6)]
    items = hook is None and tape.choose(4) == 3
    options = tuple(pair for pair in _OPTIONS if tape.choose(3) == 2)
    steps, is_attached = 3 + tape.choose(2), tape.choose(4) == 3
    return Settings(mode, steps, local, hook, items, options, is_attached)


class Net(nn.Module):
    """Two layers and two heads, of which a forward may leave one out."""

    seen: torch.Tensor  # a buffer

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(2, 3), nn.Linear(3, 2)
        self.heads = nn.ModuleList([nn.Linear(2, 1, bias=False) for _ in range(2)])
        self.register_buffer("seen", torch.tensor(float(seed)))
        with torch.no_grad():
            for i, param in enumerate(self.parameters()):
                values = torch.arange(param.numel()) + i + seed
                param.copy_((values % 4).view_as(param) / 4)

    def forward(self, x: torch.Tensor, heads: tuple[int, ...]) -> torch.Tensor:
        self.seen += 1.0
        x = self.second(torch.relu(self.first(x)))
        return torch.stack([self.heads[i](x).sum() for i in heads]).sum()


def batch(rank: int, step: int, part: int) -> torch.Tensor:
    """Return one batch: small numbers, so that sums are exact for long."""
    return torch.full((2, 2), float((rank + 2 * step + part) % 3 + 1) / 4)


def heads_of(settings: Settings, rank: int, step: int) -> tuple[int, ...]:
    """Return which heads the forward of a step uses."""
    if settings.mode != "unused":
        return (0, 1)
    return ((0,), (1,), (0, 1))[(rank + step) % 3]


def num_items(rank: int, step: int) -> int:
    """Return how many items a rank counts in a step."""
    return 1 + (rank + step) % 3


@functools.cache
def expected(
    settings: Settings,
    ranks: int,
    inputs: tuple[int, ...] | None = None,
    skipped: int | None = None,
) -> list[dict[str, torch.Tensor]]:
    """Return the averages of each step, computed without minidp.

    Args:
        settings: How to train.
        ranks: How many ranks there are.
        inputs: How many steps each rank has inputs for, in `join`.
        skipped: In which step no optimizer steps.
    """
    net = Net(0)
    optimizer = torch.optim.SGD(net.parameters(), settings.learning_rate)
    steps = []
    for step in range(settings.steps if inputs is None else max(inputs)):
        sums: dict[str, torch.Tensor] = {}
        for rank in range(ranks):
            if inputs is not None and step >= inputs[rank]:
                continue
            net.zero_grad()
            for part in range(settings.local + 1):
                loss = net(batch(rank, step, part), heads_of(settings, rank, step))
                loss.backward()
            for name, param in net.named_parameters():
                if param.grad is not None:
                    sums[name] = sums.get(name, torch.zeros_like(param)) + param.grad
        divisor = ranks
        if settings.items:
            divisor = sum(num_items(rank, step) for rank in range(ranks))
        averages = {name: each / divisor for name, each in sums.items()}
        for name, param in net.named_parameters():
            param.grad = averages[name].clone() if name in averages else None
        steps.append(averages)
        if step != skipped:
            optimizer.step()
    return steps


def differ(
    found: dict[str, torch.Tensor],
    right: dict[str, torch.Tensor],
    *,
    is_exact: bool = False,
    tolerance: float = 1e-5,
) -> str:
    """Return what is wrong with gradients, or ""."""
    if found.keys() != right.keys():
        return f"gradients of {sorted(found)} in the place of {sorted(right)}"
    for name, grad in found.items():
        is_right = torch.equal(grad, right[name])
        if not is_right and not is_exact:
            is_right = torch.allclose(grad, right[name], tolerance, 0.1 * tolerance)
        if not is_right:
            return f"{name}: {grad.tolist()} in the place of {right[name].tolist()}"
    return ""
