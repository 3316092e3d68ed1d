"""Recordings of random steps, as they might come from any training."""

from __future__ import annotations

from dataclasses import replace
from itertools import chain, pairwise
from random import Random

from minidp.overlap.timeline import Param
from tests.support.timelines import step, timeline


def recordings(seed, *, ranks=None, steps=None, buckets=None):
    """One timeline per rank; what is not given is drawn."""
    random = Random(seed)
    ranks = ranks or random.randint(1, 4)
    steps = steps or random.randint(1, 6)
    buckets = random.randint(0, 6) if buckets is None else buckets
    members = split(random, max(1, buckets) + random.randint(0, 8), max(1, buckets))
    sizes = [random.choice([4, 1000, 2**18, 2**20, 5 * 2**20]) for _ in chain(*members)]
    found = []
    for rank in range(ranks):
        taken = [random_step(random, n, buckets, len(sizes)) for n in range(steps)]
        one = timeline(taken, rank=rank, world_size=max(2, ranks), members=members)
        params = tuple(
            Param(
                f"net.{i // 2}.{'weight' if i % 2 else 'bias'}",
                n,
                f"float{64 if n == 1000 else 32} on cpu",  # kinds share no bucket
            )
            for i, n in enumerate(sizes)
        )
        found.append(replace(one, params=params))
    return found


def split(random, count, parts):
    """Numbers below ``count`` in ``parts`` groups, the last ones first."""
    cuts = sorted(random.sample(range(1, count), parts - 1))
    edges = [0, *cuts, count]
    groups = [list(range(a, b)) for a, b in pairwise(edges)]
    return groups[::-1]


def random_step(random, number, buckets, params):
    """A step of 60 ms; some time gradients, some have no_sync() or two optimizers."""
    end = random.uniform(20, 30)
    full = sorted(random.uniform(11, end) for _ in range(buckets))
    times = []
    for at in full:
        launched = at + random.choice([0, random.uniform(0, 2)])
        done = max(launched, max((t[2] for t in times), default=0)) + random.uniform(
            0, 5
        )
        times.append((at, launched, done, max(done, end) + random.uniform(0, 0.3)))
    more = {}
    if random.random() < 0.3:
        more = {"local_forwards": [(0, 1)], "local_backwards": [(1, 3)]}
        more["forward"] = (4, 8)
    if random.random() < 0.5:
        more["ready"] = [random.uniform(10, 11) for _ in range(params)]
    last = max([end, *(t[3] for t in times)])
    more["optimizers"] = [(last, last + 2)]
    if random.random() < 0.3:
        more["optimizers"] = [(15, 16), (last + 1, last + 1.25)]
    at = 100 * number + random.uniform(0, 3)
    return step(number, times, at=at, backward=(10, end), end=max(60, last + 3), **more)
