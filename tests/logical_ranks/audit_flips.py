"""Do audits name each flipped bit, and nothing in trainings that are right?

    python -m tests.logical_ranks.audit_flips                  # 100 flips, 1000 steps
    python -m tests.logical_ranks.audit_flips --runs 0 --steps 100000

In each run a bit flips somewhere, on one rank: in a gradient of a logical rank that is
compared (where it belongs, or where it is computed again), in a module buffer, in a
weight, in the sum of a slice, or in what a rank receives of it. Everything is drawn:
where, which bit, how many ranks and logical ranks. The audit must name that rank. With
two ranks weights are left out, because nobody could say which are right.

In the steps nothing is wrong, and each is audited: no rank may say anything.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
import warnings
from contextlib import closing, nullcontext
from functools import partial
from typing import Any

import torch

from minidp import LogicalRankError
from minidp.console import say
from tests.logical_ranks import faults
from tests.logical_ranks.faults import Flip
from tests.logical_ranks.test_audit import names, turns, weight_flips
from tests.logical_ranks.trainings import batch, net, wrapped
from tests.support.pool import Pool

KINDS = ("gradient", "gradient again", "buffer", "weight", "sum", "received")
CHUNK = 50  # runs, or steps, of one job


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


def main() -> int:
    """Return 1 if a flip was not named, or something was said without one."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--runs", type=int, default=100)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--seconds", type=float, default=float("inf"))
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    end = time.monotonic() + given.seconds
    named = done = steps = 0
    with closing(Pool()) as pool:
        for seed in range(given.seed, given.seed + -(-given.runs // CHUNK)):
            runs = min(CHUNK, given.runs - done)
            (first, *others) = pool.run(flipped, 2 + seed % 3, seed, runs, limit=300)
            done += runs
            for k, (what, is_named, said) in enumerate(first):
                everybody = is_named and all(each[k][1] for each in others)
                named += everybody
                if not everybody:
                    say(f"NOT NAMED: {what}: {said or 'nothing was said'}")
        if done:
            say(f"{named} of {done} flips were named, by all ranks.")
        seed = given.seed
        while steps < given.steps and time.monotonic() < end:
            count = min(10 * CHUNK, given.steps - steps)
            steps += pool.run(legal, 2 + seed % 3, seed, count, limit=600)[0]
            seed += 1
        if steps:
            say(f"0 alarms in {steps} steps, each of them audited.")
    return int(named < done)


if __name__ == "__main__":
    sys.exit(main())
