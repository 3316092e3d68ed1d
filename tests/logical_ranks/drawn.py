"""Trainings for audits in which everything is drawn, with a flipped bit or without."""

from __future__ import annotations

import random
import warnings
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch

from minidp import LogicalRankError
from tests.logical_ranks import faults
from tests.logical_ranks.faults import Flip
from tests.logical_ranks.test_audit import names, turns, weight_flips
from tests.logical_ranks.trainings import batch, net, wrapped

KINDS = ("gradient", "gradient again", "buffer", "weight", "sum", "received")


def flipped(ctx: Any, seed: int, runs: int) -> list[tuple[str, bool, str]]:
    """Let a bit flip in each run; return what kind it was, and what was said."""
    draw = random.Random(seed)  # the same on all ranks
    found = []
    for _ in range(runs):
        kind = draw.choice(KINDS)
        number = draw.randint(ctx.world_size, 3 * ctx.world_size)
        if ctx.world_size == 2:
            number = number if kind != "sum" else 5  # an all-reduce has no slices
            kind = kind if kind != "weight" else "gradient"
        at = draw.randrange(ctx.world_size)
        flip = Flip(*(draw.randrange(10**6) for _ in range(3)))
        said = _said(ctx, kind, number, at, flip, draw.randrange(1000))
        found.append((f"{kind}, {flip}", names(at) in said, said))
    return found


def _said(ctx: Any, kind: str, number: int, at: int, flip: Flip, step: int) -> str:
    module = net()
    model = wrapped(ctx, module, number, audit_every=1, hang_timeout=30)
    model._logical.step = step  # other logical ranks are compared in each
    strikes: Any = nullcontext
    around: Any = nullcontext()
    if ctx.rank == at and kind == "weight":
        weight_flips(module, flip)
    elif ctx.rank == at and kind in ("sum", "received"):
        around = (faults.in_sum if kind == "sum" else faults.on_arrival)(flip)
    elif ctx.rank == at:
        of_buffer = kind == "buffer"
        make = faults.in_buffer if of_buffer else faults.in_gradient
        strikes = partial(make, module, flip)
    where = "other" if kind == "gradient again" else "own"
    try:
        with around:
            turns(ctx, model, step, strikes, where)
    except LogicalRankError as error:
        return str(error)
    return ""


def legal(ctx: Any, seed: int, steps: int) -> int:
    """Train on several numbers of logical ranks; return the number of steps."""
    draw = random.Random(seed)
    module = net()
    number = draw.randint(ctx.world_size, 2 * ctx.world_size)
    views = draw.random() < 0.5
    options = {"audit_every": 1, "gradient_as_bucket_view": views}
    model = wrapped(ctx, module, number, **options)
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.01)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for step in range(steps):
            for leaf in model.each_logical_rank():
                samples = draw_samples(seed, step, leaf)
                model(samples).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    return steps


def draw_samples(seed: int, step: int, leaf: int) -> torch.Tensor:
    """Return a batch whose size depends on the step, too."""
    return batch(1000 * seed + step, leaf, 2 + (step + leaf) % 7, 12)
