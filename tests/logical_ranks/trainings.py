"""Trainings by logical ranks: what is trained depends on no rank's number."""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from minidp import DataParallel

STEPS = 4
SMALL: dict[str, Any] = {}  # options of all trainings, which a test may add
Scenario = Callable[[Any, int], list[torch.Tensor]]  # of a context, logical ranks


@dataclass(frozen=True)
class World:
    """What all trainings of this process are made of: `in_world` has another one."""

    seed: int = 0  # of weights and samples
    rows: int = 5  # of a batch
    width: int = 30
    bucket_kib: float = 2  # several buckets
    divides: bool = False  # optimizer steps, among the ranks


world = World()


def in_world(ctx: Any, number: int, scenario: Scenario, made_of: World) -> Any:
    """Run a training with other weights, samples and buckets."""
    global world
    world = made_of
    try:
        return scenario(ctx, number)
    finally:
        world = World()


def batch(step: int, leaf: int, *shape: int) -> torch.Tensor:
    seed = 1000 * (step + 1000 * world.seed) + leaf
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape or (world.rows, 12), generator=generator)


def net() -> nn.Sequential:
    torch.manual_seed(world.seed)
    n = world.width
    return nn.Sequential(
        *(nn.Linear(12, n), nn.BatchNorm1d(n), nn.ReLU(), nn.Dropout(0.3)),
        *(nn.Linear(n, n), nn.Tanh(), nn.LayerNorm(n), nn.Linear(n, 3)),
    )


class Branches(nn.Module):
    """Uses one of two branches, which depends on step and logical rank."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(world.seed)
        self.first, self.last = nn.Linear(12, 12), nn.Linear(12, 2)
        self.sides = nn.ModuleList(nn.Linear(12, 12) for _ in "ab")
        self.never = nn.Linear(2, 2)

    def forward(self, x: torch.Tensor, side: int) -> Any:
        return self.last(self.sides[side](self.first(x)).relu())


class Codes(nn.Module):
    """Depends on buffers that forwards change, replace, and register late."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(12))
        self.register_buffer("changed", torch.zeros(12))
        self.register_buffer("replaced", torch.ones(12))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not hasattr(self, "late"):
            self.register_buffer("late", torch.ones(12))
        mean = x.detach().mean(0)
        self.changed += mean
        self.replaced = self.replaced * 0.9 + mean
        self.late *= 1.1
        factors = self.changed.clone() * self.replaced * self.late.clone()
        return (x * self.weight * factors).sum()


def wrapped(ctx: Any, module: nn.Module, number: Any, **options: Any) -> DataParallel:
    torch.manual_seed(3 if ctx.rank == 0 else 3 + random.randrange(99))
    small = {**SMALL, "bucket_cap_mb": world.bucket_kib / 1024}
    return DataParallel(
        module, process_group=ctx.group, logical_ranks=number, **{**small, **options}
    )


def divide(
    model: DataParallel, optimizer: torch.optim.Optimizer, **options: Any
) -> torch.optim.Optimizer:
    """Return the optimizer, whose steps are divided among the ranks if `world` says."""
    if world.divides:
        model.sharded_step(optimizer, **options)
    return optimizer


def grads(model: DataParallel) -> list[Any]:
    """Return the average of each parameter, whichever rank has it."""
    mine = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
    if not world.divides:
        return mine
    of_ranks: list[Any] = [None] * model.process_group.size()
    dist.all_gather_object(of_ranks, mine, group=model.process_group)
    return [
        next((grad for grad in each if grad is not None), None)
        for each in zip(*of_ranks, strict=True)
    ]


def result(model: DataParallel, optimizer: torch.optim.Optimizer) -> list[Any]:
    """Return parameters and the optimizer's state, which is on rank 0 if divided."""
    found = [param.detach().clone() for param in model.module.parameters()]
    whole: Any = optimizer.state_dict()
    if world.divides:
        whole = model.whole_optimizer_state(optimizer) or {"state": {}}
    for _, state in sorted(whole["state"].items()):
        found += [each.clone() for each in state.values() if torch.is_tensor(each)]
    return found


def buffers(model: DataParallel) -> list[torch.Tensor]:
    return [each.detach().clone() for each in model.module.buffers()]


def plain(ctx: Any, number: Any, **options: Any) -> list[Any]:
    """Train with any options; the module has buffers, and draws random numbers."""
    module = net()
    model = wrapped(ctx, module, number, **options)
    optimizer = divide(model, torch.optim.Adam(module.parameters(), lr=0.01))
    found = []
    for step in range(STEPS):
        for leaf in model.each_logical_rank():
            loss = model(batch(step, leaf)).square().mean()
            noise = random.random() + np.random.random() + float(torch.rand(()))
            (loss * noise).backward()
        found += grads(model)
        optimizer.step()
        optimizer.zero_grad()
    found += result(model, optimizer)
    return found if ctx.rank else found + buffers(model)


def depends_on_buffers(ctx: Any, number: int) -> list[Any]:
    """With an evaluation in each turn, and several forwards for one backward."""
    module = Codes()
    model = wrapped(ctx, module, number)
    optimizer = divide(model, torch.optim.SGD(module.parameters(), lr=0.01))
    for step in range(STEPS):
        for leaf in model.each_logical_rank():
            loss = model(batch(step, leaf)) + model(batch(step, 50 + leaf))
            loss.backward()
            with torch.no_grad():
                model(batch(step, leaf))
        optimizer.step()
        optimizer.zero_grad()
    found = result(model, optimizer)
    return found if ctx.rank else found + buffers(model)


def zeroes_in_the_loop(ctx: Any, number: int, *, set_to_none: bool) -> list[Any]:
    """``zero_grad()`` is called in the first turn."""
    module = net()
    model = wrapped(ctx, module, number)
    optimizer = divide(model, torch.optim.SGD(module.parameters(), lr=0.1))
    for step in range(STEPS):
        for turn, leaf in enumerate(model.each_logical_rank()):
            if turn == 0:
                optimizer.zero_grad(set_to_none=set_to_none)
            model(batch(step, leaf)).square().mean().backward()
        optimizer.step()
    return result(model, optimizer)


def unused(ctx: Any, number: int, **options: Any) -> list[Any]:
    module = Branches()
    model = wrapped(ctx, module, number, find_unused_parameters=True, **options)
    optimizer = divide(
        model, torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    )
    for step in range(STEPS):
        for leaf in model.each_logical_rank():
            side = (leaf + step) % 3 == 0
            model(batch(step, leaf), int(side)).square().mean().backward()
        assert module.never.weight.grad is None
        optimizer.step()
        optimizer.zero_grad()
    return result(model, optimizer)


def accumulates(ctx: Any, number: int, **options: Any) -> list[Any]:
    """Several micro-batches in each logical rank, unequally many."""
    module = net()
    model = wrapped(ctx, module, number, **options)
    optimizer = divide(model, torch.optim.SGD(module.parameters(), lr=0.1))
    for step in range(STEPS):
        for leaf in model.each_logical_rank():
            count = 1 + (leaf + step) % 3
            for micro in range(count):
                is_last = micro == count - 1
                with nullcontext() if is_last else model.no_sync():
                    x = batch(step, 100 * leaf + micro)
                    (model(x).square().mean() / count).backward()
        optimizer.step()
        optimizer.zero_grad()
    return result(model, optimizer)


def keeps(ctx: Any, number: int, **options: Any) -> list[Any]:
    """Gradients stay, as zeros or as averages of an earlier step."""
    module = net()
    model = wrapped(ctx, module, number, **options)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.05)
    for step in range(STEPS):
        for leaf in model.each_logical_rank():
            model(batch(step, leaf)).square().mean().backward()
        if step % 2:
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
    return result(model, optimizer)


def items(ctx: Any, number: int, **options: Any) -> list[Any]:
    module = net()
    model = wrapped(ctx, module, number, average_over="items", **options)
    optimizer = divide(model, torch.optim.SGD(module.parameters(), lr=0.1))
    for step in range(STEPS):
        for leaf in model.each_logical_rank():
            count = 2 + (3 * leaf + step) % 5
            x = batch(step, leaf, count, 12)
            model.weigh_loss(model(x).square().mean(), count).backward()
        optimizer.step()
        optimizer.zero_grad()
    return result(model, optimizer)


def steps_inside(ctx: Any, number: int, **options: Any) -> list[Any]:
    module = net()
    model = wrapped(ctx, module, number)
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.01)
    model.step_in_backward(optimizer, **options)
    for step in range(STEPS):
        for leaf in model.each_logical_rank():
            model(batch(step, leaf)).square().mean().backward()
        optimizer.zero_grad()
    return result(model, optimizer)


def scaled(ctx: Any, number: int) -> list[Any]:
    """A GradScaler, whose third step is skipped."""
    module = net()
    model = wrapped(ctx, module, number)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    divide(model, optimizer, grad_scaler=scaler)
    for step in range(STEPS):
        for leaf in model.each_logical_rank():
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = model(batch(step, leaf)).square().mean()
            if step == 2 and leaf == 1:
                loss = loss * float("inf")
            scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    return [*result(model, optimizer), torch.tensor(scaler.get_scale())]


def of_dtype(ctx: Any, number: int, dtype: torch.dtype) -> list[Any]:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(12, 20), nn.Linear(20, 3)).to(dtype)
    model = wrapped(ctx, module, number)
    optimizer = divide(model, torch.optim.SGD(module.parameters(), lr=0.1))
    for step in range(STEPS):
        for leaf in model.each_logical_rank():
            model(batch(step, leaf).to(dtype)).abs().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return result(model, optimizer)
