"""Trainings that move weights to and fro, as users write them: torch's bits, no error.

Short ones are rows of the matrix of uses (`tests/wrong_uses`).
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn

from tests.support.ranks import as_in_torch

MOMENTUM = 0.9


@pytest.fixture(autouse=True)
def other_rank() -> None:
    """The real comparison, instead of the fake one of this folder's other tests."""


def layers() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))


def batches(ctx: Any, number: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(10 + ctx.rank)
    for _ in range(number):
        x = torch.randn(4, 4, generator=generator)
        yield x, torch.randn(4, 1, generator=generator)


def weights_of(module: nn.Module) -> list[torch.Tensor]:
    return [value.detach().clone() for value in module.state_dict().values()]


class ScheduleFree(torch.optim.SGD):
    """Steps at one point, and evaluates at another one, to which `eval` moves."""

    def _move(self, weight: float) -> None:
        with torch.no_grad():
            for param, state in self.state.items():
                param.lerp_(end=state["z"], weight=weight)

    def eval(self) -> None:
        self._move(1 - 1 / MOMENTUM)

    def train(self) -> None:
        self._move(1 - MOMENTUM)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        (group,) = self.param_groups
        group["k"] = group.get("k", 0) + 1
        weight, lr = 1 / group["k"], group["lr"]
        for param in group["params"]:
            z = self.state[param].setdefault("z", param.clone())
            param.lerp_(end=z, weight=weight)
            param.add_(param.grad, alpha=lr * (MOMENTUM * (1 - weight) - 1))
            z.sub_(param.grad, alpha=lr)


@as_in_torch(2)
@pytest.mark.parametrize("how", ["autograd.grad", "backward(inputs)"])
def test_schedule_free_weights_around_gradients_of_inputs(ctx, wrap, how):
    module = layers()
    ddp, optimizer = wrap(module), ScheduleFree(module.parameters(), lr=0.05)
    for x, y in batches(ctx, 8):
        optimizer.zero_grad()
        nn.functional.mse_loss(ddp(x), y).backward()
        optimizer.step()
        optimizer.eval()
        looked_at = x.clone().requires_grad_()
        out = ddp(looked_at).sum()
        if how == "autograd.grad":
            torch.autograd.grad(out, looked_at)
        else:
            out.backward(inputs=[looked_at])
        optimizer.train()
    return weights_of(module)


class Words(nn.Module):
    """A few rows of the embedding have gradients, and the last layer has none."""

    def __init__(self, *, is_frozen: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, 4).requires_grad_(not is_frozen)
        self.first, self.second = nn.Linear(4, 8), nn.Linear(8, 1)
        self.unused = nn.Linear(8, 1)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.second(self.first(self.embedding(words)).tanh())
        return found.mean(1)


@as_in_torch(2)
@pytest.mark.parametrize("is_frozen", [False, True])
def test_averaged_weights_of_an_embedding_between_micro_batches(ctx, wrap, is_frozen):
    module = Words(is_frozen=is_frozen)
    ddp = wrap(module, find_unused_parameters=True)
    trained = [param for param in module.parameters() if param.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=0.1)
    averaged = {n: value * 0.9 for n, value in module.state_dict().items()}
    generator = torch.Generator().manual_seed(ctx.rank)
    for _ in range(8):
        draw = [torch.randint(20, 24, (3, 5), generator=generator) for _ in range(3)]
        optimizer.zero_grad()
        with ddp.no_sync():
            ddp(draw[0]).square().mean().backward()
        own = copy.deepcopy(module.state_dict())
        module.load_state_dict(averaged)
        ddp(draw[1])
        module.load_state_dict(own)
        ddp(draw[2]).square().mean().backward()
        optimizer.step()
        for name, value in module.state_dict().items():
            averaged[name].lerp_(value, 0.1)
    return weights_of(module)


class Noisy(torch.optim.SGD):
    """Moves the weights by noise of this rank, and takes it off before each step."""

    def disturb(self, generator: torch.Generator) -> None:
        (group,) = self.param_groups
        self.kept = [param.detach().clone() for param in group["params"]]
        with torch.no_grad():
            for param in group["params"]:
                param.add_(torch.randn(param.shape, generator=generator), alpha=0.05)

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        with torch.no_grad():
            for param, kept in zip(
                self.param_groups[0]["params"], self.kept, strict=True
            ):
                param.copy_(kept)
        super().step(closure)


@as_in_torch(2)
def test_noise_of_each_rank_also_when_replicas_are_compared_late(ctx, wrap):
    """They are in step 100, too."""
    module, generator = layers(), torch.Generator().manual_seed(ctx.rank)
    ddp, optimizer = wrap(module), Noisy(module.parameters(), lr=0.01)
    for x, y in batches(ctx, 102):
        optimizer.disturb(generator)
        optimizer.zero_grad()
        nn.functional.mse_loss(ddp(x), y).backward()
        optimizer.step()
    return weights_of(module)


def move_uphill(ddp: Any, loss: torch.Tensor) -> list[torch.Tensor]:
    """Move weights by this rank's own gradients, and return them as they were."""
    kept = [param.detach().clone() for param in ddp.parameters()]
    loss.backward()
    with torch.no_grad():
        for param in ddp.parameters():
            param.add_(param.grad, alpha=0.05)
    ddp.zero_grad()
    return kept


@torch.no_grad()
def put_back(ddp: Any, kept: list[torch.Tensor]) -> None:
    for param, value in zip(ddp.parameters(), kept, strict=True):
        param.copy_(value)


@as_in_torch(2)
@pytest.mark.parametrize("who", ["each by chance", "rank 0 once, beside noise"])
def test_some_ranks_look_for_sharpness(ctx, wrap, who):
    """Each rank moves its weights when it likes, and puts them back before the step."""
    module, generator = layers(), torch.Generator().manual_seed(ctx.rank)
    ddp, optimizer = wrap(module), torch.optim.SGD(module.parameters(), lr=0.05)
    for k, (x, y) in enumerate(batches(ctx, 8)):
        optimizer.zero_grad()
        kept = weights_of(module)
        if "once" in who:
            if (ctx.rank, k) == (0, 3):
                put_back(ddp, move_uphill(ddp, ddp.module(x).square().mean()))
            with torch.no_grad():
                for param in module.parameters():
                    param.add_(torch.randn(param.shape, generator=generator), alpha=0.1)
        elif torch.rand((), generator=generator) < 0.5:
            move_uphill(ddp, ddp.module(x).square().mean())
        nn.functional.mse_loss(ddp(x), y).backward()
        put_back(ddp, kept)
        optimizer.step()
    return weights_of(module)


def by_chance(ctx: Any, k: int) -> bool:
    generator = torch.Generator().manual_seed(10 * k + ctx.rank)
    return bool(torch.rand((), generator=generator) < 0.5)


# Who moves its weights uphill for which backward. Three backwards make a step.
MOVERS: dict[str, Any] = {
    "all": lambda ctx, k: True,
    "all, then rank 0 alone": lambda ctx, k: k % 3 == 0 or ctx.rank == 0,
    "each by chance": by_chance,
    "one after the other": lambda ctx, k: k % 2 == ctx.rank,
    "rank 1, in two backwards": lambda ctx, k: ctx.rank == 1 and k in (4, 5),
}


@as_in_torch(2)
@pytest.mark.parametrize("moves", MOVERS)
def test_sharpness_aware_gradients_are_added_up_over_several_backwards(
    ctx, wrap, moves
):
    module = layers()
    ddp, optimizer = wrap(module), torch.optim.SGD(module.parameters(), lr=0.05)
    sums = [torch.zeros_like(param) for param in module.parameters()]
    for k, (x, y) in enumerate(batches(ctx, 15)):
        kept = weights_of(module)
        if MOVERS[moves](ctx, k):
            with ddp.no_sync():
                loss = nn.functional.mse_loss(ddp(x), y)
            move_uphill(ddp, loss)
        nn.functional.mse_loss(ddp(x), y).backward()
        put_back(ddp, kept)
        for param, total in zip(module.parameters(), sums, strict=True):
            total += param.grad
            param.grad = None
        if k % 3 == 2:
            for param, total in zip(module.parameters(), sums, strict=True):
                param.grad = total.clone()
                total.zero_()
            optimizer.step()
            optimizer.zero_grad()
    return weights_of(module)


class Moved:
    """Moves weights by noise of this rank for a forward and backward, and back."""

    def __init__(self, ctx: Any, module: nn.Module) -> None:
        self.params = [*module.parameters()]
        self.generator = torch.Generator().manual_seed(ctx.rank)

    def __enter__(self) -> None:
        self.kept = [param.detach().clone() for param in self.params]
        with torch.no_grad():
            for param in self.params:
                noise = torch.randn(param.shape, generator=self.generator)
                param.add_(noise, alpha=0.05)

    def __exit__(self, *_: object) -> None:
        with torch.no_grad():
            for param, kept in zip(self.params, self.kept, strict=True):
                param.copy_(kept)


def step_by_hand(module: nn.Module) -> None:
    with torch.no_grad():
        for param in module.parameters():
            param -= 0.05 * param.grad


@as_in_torch(2)
def test_noise_of_each_rank_in_micro_batches(ctx, wrap):
    """Weights are moved before no_sync() begins, and again before the last forward."""
    module = layers()
    ddp, moved = wrap(module), Moved(ctx, module)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.05)
    for k, (x, y) in enumerate(batches(ctx, 12)):
        is_last = k % 3 == 2
        with moved, nullcontext() if is_last else ddp.no_sync():
            nn.functional.mse_loss(ddp(x), y).backward()
        if is_last:
            optimizer.step()
            optimizer.zero_grad()
    return weights_of(module)


@as_in_torch(2)
@pytest.mark.parametrize("every", [2, 14])
def test_noise_of_each_rank_while_gradients_are_accumulated(ctx, wrap, every):
    """Without no_sync(), so that several averaged backwards come before a step."""
    module = layers()
    ddp, moved = wrap(module), Moved(ctx, module)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.05)
    for k, (x, y) in enumerate(batches(ctx, 28)):
        with moved:
            nn.functional.mse_loss(ddp(x), y).backward()
        if k % every == every - 1:
            optimizer.step()
            optimizer.zero_grad()
    return weights_of(module)


@as_in_torch(2)
def test_noise_of_each_rank_while_a_scaler_skips_steps(ctx, wrap):
    """It skips the first two on all ranks, because their losses are infinite."""
    module = layers()
    ddp, moved = wrap(module), Moved(ctx, module)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.05)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    for k, (x, y) in enumerate(batches(ctx, 6)):
        optimizer.zero_grad()
        with moved:
            loss = nn.functional.mse_loss(ddp(x), y) * (torch.inf if k < 2 else 1)
            scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    return weights_of(module)


@as_in_torch(2)
@pytest.mark.parametrize("usual", [0, 3])
def test_noise_of_each_rank_and_updates_by_hand(ctx, wrap, usual):
    """After some ``usual`` steps without noise, or from the beginning."""
    module = layers()
    ddp, moved = wrap(module), Moved(ctx, module)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.05)
    for k, (x, y) in enumerate(batches(ctx, 20)):
        module.zero_grad()
        with moved if k >= usual else nullcontext():
            nn.functional.mse_loss(ddp(x), y).backward()
        if k >= usual:
            step_by_hand(module)
        else:
            optimizer.step()
    return weights_of(module)


@as_in_torch(2)
def test_noise_of_each_rank_and_an_optimizer_of_master_weights(ctx, wrap):
    module = layers()
    ddp, moved = wrap(module), Moved(ctx, module)
    masters = [param.detach().clone() for param in module.parameters()]
    optimizer = torch.optim.SGD(masters, lr=0.05)
    for x, y in batches(ctx, 14):
        module.zero_grad()
        with moved:
            nn.functional.mse_loss(ddp(x), y).backward()
        for master, param in zip(masters, module.parameters(), strict=True):
            master.grad = param.grad
        optimizer.step()
        module.load_state_dict(dict(zip(module.state_dict(), masters, strict=True)))
    return weights_of(module)
