"""Recordings of random steps, as they might come from any training."""

from __future__ import annotations

from dataclasses import replace
from itertools import chain, pairwise, zip_longest
from random import Random

from minidp.overlap.timeline import Param, Span, Turn, ValueTimes
from tests.support.timelines import step, timeline


def recordings(
    seed, *, ranks=None, steps=None, buckets=None, logical=False, divided=False
):
    """One timeline per rank; what is not given is drawn.

    With ``logical`` each rank has some logical ranks, and with ``divided`` values come
    back, some of them in the next step.
    """
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
    if divided:
        return [with_values(random, one) for one in found]
    return by_logical_ranks(random, found) if logical else found


def with_values(random, one):
    """Let values be sent after each backward, and come back then, or in a forward."""
    steps, before = [], ()
    for now, after in zip_longest(one.steps, one.steps[1:]):
        at, sent = now.finalize_end_ns, []
        for bucket in now.buckets:
            sent.append((bucket.number, at, at := at + random.randint(0, 100_000)))
        flights = []
        for number, *times in sent:
            if after is not None and random.random() < 0.5:
                at = max(at, after.begin_ns)
            waits = at, (at := at + random.randint(0, 900_000))
            flights.append(ValueTimes(number, *times, *waits))
        steps.append(replace(now, values=(*before, *flights)))
        end = now.end_ns if after is None else after.begin_ns
        before = tuple(each for each in flights if each.back_ns > end)
    return replace(one, steps=tuple(steps))


def by_logical_ranks(random, timelines):
    """Replace what comes before the backwards by turns of 1 to 3 logical ranks."""
    found, first = [], 0
    counts = [random.randint(1, 3) for _ in timelines]
    for one, count in zip(timelines, counts, strict=True):
        steps = [turning(random, step, first, count) for step in one.steps]
        where = replace(one.where, logical_ranks=sum(counts))
        found.append(replace(one, where=where, steps=tuple(steps)))
        first += count
    return found


def turning(random, step, first, count):
    begin, end = step.begin_ns, step.backward.begin_ns
    cuts = sorted(random.sample(range(begin, end), 4 * count))
    turns = [Turn(*cuts[4 * n : 4 * n + 4 : 3], first + n) for n in range(count)]
    forwards = [Span(*cuts[4 * n + 1 : 4 * n + 3]) for n in range(count)]
    backwards = [
        Span(forward.end_ns, turn.end_ns)
        for forward, turn in zip(forwards, turns, strict=True)
    ]
    turns[-1] = replace(turns[-1], end_ns=step.finalize_end_ns)
    return replace(
        step,
        loop_begin_ns=begin,
        turns=tuple(turns),
        forwards=(forwards[-1],),
        local_forwards=tuple(forwards[:-1]),
        local_backwards=tuple(backwards[:-1]),
    )


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
