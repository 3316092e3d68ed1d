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
import sys
import time
from contextlib import closing

from minidp.console import say
from tests.logical_ranks.drawn import flipped, legal
from tests.support.pool import Pool

CHUNK = 50  # runs, or steps, of one job


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
