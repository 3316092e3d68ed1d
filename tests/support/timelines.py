"""Recordings made by hand, in milliseconds, with answers that can be worked out."""

from __future__ import annotations

from collections.abc import Sequence

from minidp.overlap.timeline import (
    BucketTimes,
    Param,
    Span,
    Step,
    Timeline,
    Turn,
    ValueTimes,
    Where,
)

MS = 1_000_000  # ns
Times = tuple[float, float, float, float]  # full, launched, done, copied out


def span(begin: float, end: float, at: float = 0) -> Span:
    """Make a span that begins and ends so many ms after ``at``."""
    return Span(round((at + begin) * MS), round((at + end) * MS))


def step(
    number: int,
    buckets: Sequence[Times],
    *,
    at: float = 0,
    backward: tuple[float, float] = (10, 30),
    end: float = 60,
    ready: Sequence[float | None] = (),
    optimizers: Sequence[tuple[float, float]] = ((50, 55),),
    forward: tuple[float, float] = (0, 8),
    local_forwards: Sequence[tuple[float, float]] = (),
    local_backwards: Sequence[tuple[float, float]] = (),
    turns: Sequence[tuple[int, float, float]] = (),
    values: Sequence[tuple[int, float, float, float, float]] = (),
) -> Step:
    """Make a step that begins at ``at`` ms; all other times count from there.

    ``turns`` has the number, begin and end of the turns of logical ranks, whose loop
    begins with the step. ``values`` has the number of a bucket, and when its new values
    were started, sent, awaited and back.
    """
    done = max([backward[1], *(times[3] for times in buckets)])
    return Step(
        number=number,
        layout=0,
        forwards=(span(*forward, at),),
        backward=span(*backward, at),
        finalize_end_ns=round((at + done) * MS),
        end_ns=round((at + end) * MS),
        buckets=tuple(
            BucketTimes(n, *(round((at + ms) * MS) for ms in times))
            for n, times in enumerate(buckets)
        ),
        optimizers=tuple(span(*times, at) for times in optimizers),
        ready_ns=tuple(None if t is None else round((at + t) * MS) for t in ready),
        local_forwards=tuple(span(*times, at) for times in local_forwards),
        local_backwards=tuple(span(*times, at) for times in local_backwards),
        loop_begin_ns=round(at * MS) if turns else None,
        turns=tuple(
            Turn(round((at + begin) * MS), round((at + end) * MS), number)
            for number, begin, end in turns
        ),
        values=tuple(
            ValueTimes(number, *(round((at + ms) * MS) for ms in times))
            for number, *times in values
        ),
    )


def timeline(
    steps: Sequence[Step],
    *,
    rank: int = 0,
    world_size: int = 2,
    members: Sequence[Sequence[int]] = ((1,), (0,)),
    nbytes: int = 2**20,
    host: str = "here",
    logical_ranks: int | None = None,
) -> Timeline:
    """Make a recording of a model whose parameters are layers.0.weight and so on.

    ``members`` has the parameters of each bucket, by index.
    """
    count = sum(map(len, members))
    return Timeline(
        where=Where(
            *(rank, world_size, "gloo", "cpu", host, {"torch": "2.13"}),
            logical_ranks=logical_ranks,
        ),
        params=tuple(
            Param(f"layers.{i}.weight", nbytes, "float32 on cpu") for i in range(count)
        ),
        layouts=(tuple(tuple(one) for one in members),),
        steps=tuple(steps),
    )
