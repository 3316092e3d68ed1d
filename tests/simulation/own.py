"""Run a training function of your own on simulated ranks, and replay what it does.

    python -m tests.simulation.own my_training:train --ranks 3
    python -m tests.simulation.own my_training:train --ranks 3 --seed 17

The first line looks for a seed with which ranks wait for ever, collectives do not
belong together, a tensor in flight is written to, or the function raises. The second
one plays that seed again, and tells who did what, and when.

The function gets the rank, and does what it does under torchrun after
``init_process_group("gloo")``: it wraps a model, trains it, and calls some functions of
``torch.distributed`` on dense tensors of the CPU (all-reduce, broadcast, all-gather,
all-to-all, barrier). Each rank has random generators of its own. All else that a
process has once, such as the threads of torch, they have in common.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Callable

import torch

from .faults import Kind
from .play import Play, Rank
from .scheduler import Finding
from .tape import Tape

Function = Callable[[int], object]


def play(
    train: Function,
    seed: int,
    *,
    ranks: int = 2,
    kinds: tuple[Kind, ...] = (Kind.NOTHING,),
) -> Play:
    """Run the function on each rank, in the order of events that belongs to a seed.

    Args:
        train: Gets the rank.
        seed: Makes all choices.
        ranks: How many ranks there are.
        kinds: What may go wrong with one of them, the mildest first.

    Returns:
        The run, whose `Play.tell` says who did what.

    Raises:
        Finding: Ranks hang or raise. Its attribute ``play`` is the run.
    """

    def script(ctx: Rank) -> None:
        train(ctx.rank)

    run = Play(script, Tape(seed), ranks, kinds=kinds, has_numbers=True)
    try:
        run.run()
        for rank, error in sorted(run.ends.items()):
            if error is not None:
                raise Finding(f"rank {rank} raised {type(error).__name__}: {error}")
    except Finding as finding:
        finding.play = run  # type: ignore[attr-defined]
        raise
    return run


def find(train: Function, seeds: range, *, ranks: int = 2) -> int | None:
    """Return the first seed with which ranks hang or raise, or None."""
    for seed in seeds:
        try:
            play(train, seed, ranks=ranks)
        except Finding:
            return seed
    return None


def main() -> int:
    """Do what the command line says; return 1 if something was found."""
    parser = argparse.ArgumentParser(prog="python -m tests.simulation.own")
    parser.add_argument("function", metavar="MODULE:FUNCTION")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--runs", type=int, default=1000)
    parser.add_argument("--seed", type=int, help="play this one, and tell all of it")
    given = parser.parse_args()
    torch.set_num_threads(1)
    sys.path.insert(0, "")
    module, _, name = given.function.partition(":")
    train: Function = getattr(importlib.import_module(module), name)
    seed = given.seed
    if seed is None:
        seed = find(train, range(given.runs), ranks=given.ranks)
    if seed is None:
        print(f"nothing was found with {given.runs} seeds")
        return 0
    try:
        told = play(train, seed, ranks=given.ranks)
    except Finding as finding:
        print(finding.play.tell())  # type: ignore[attr-defined]
        print(f"--seed {seed}: {finding}")
        return 1
    print(told.tell())
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
