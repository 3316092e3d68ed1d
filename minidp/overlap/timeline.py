"""Recorded steps as frozen data, which is written to JSON and read back.

These are the times of one step, in their order on a rank's clock::

    forwards         backward                   finalize_end_ns            end_ns
    |----| |----|    |--------------|-----------------|    |---------|        |
                      ready_ns       '- every gradient      optimizers
                      buckets           is computed

Local forwards and backwards, which average nothing (``no_sync()``), lie before the
backward or after it. With logical ranks a step is a loop of several turns, and what all
turns but the last one run is local, too::

    loop_begin_ns
    |    turns
    |    |---------------------|    |----------------------------------|
          local forward, backward    forward, backward, finalize_end_ns

If ranks divide the optimizer's step, new values of parameters come back after it. They
may do so in the next step, during its forward; then both steps have them.

Times are nanoseconds on the monotonic clock of the rank's host.
Ranks of one host share a clock. Where hosts differ, `Timeline.clock` holds the offset
to rank 0's clock.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, is_dataclass, replace
from typing import Any, get_args, get_origin, get_type_hints

KIND = "minidp timeline"
VERSION = 6
_READABLE = (4, 5, VERSION)  # 4 knows no logical ranks, and 5 no divided steps
AUTO, AUTO_TRIES = "auto", "auto, still trying"  # values of `Where.layout_by`
_NUMBERS = {"number", "layout"}  # the integers of a step that are no times


@dataclass(frozen=True)
class Span:
    """The begin and the end of an interval, on a rank's clock."""

    begin_ns: int
    end_ns: int

    @property
    def seconds(self) -> float:
        """The length in seconds."""
        return (self.end_ns - self.begin_ns) / 1e9


@dataclass(frozen=True)
class Turn(Span):
    """The turn of one logical rank: what the body of the loop did for it."""

    number: int  # of the logical rank


@dataclass(frozen=True)
class BucketTimes:
    """When one bucket of a step was full, launched, done, and copied out."""

    number: int  # in launch order
    full_ns: int  # when its last gradient arrived
    launched_ns: int  # when its collective was enqueued
    done_ns: int  # when its collective was complete
    copied_out_ns: int  # when the averages were in ``.grad``


@dataclass(frozen=True)
class ValueTimes:
    """When the new values of one bucket's parameters came back from their owners.

    From `started_ns` to `sent_ns`, and from `awaited_ns` to `back_ns`, this rank was
    busy with them. In between it did other things.
    """

    number: int  # of the bucket
    started_ns: int  # when this rank began to send its share of them
    sent_ns: int
    awaited_ns: int  # when this rank began to wait for them
    back_ns: int  # when all of them were in the parameters


@dataclass(frozen=True)
class Step:
    """The times of one synchronised backward, and of what ran around it."""

    number: int  # number of the synchronised backward, from 0
    layout: int  # index in `Timeline.layouts`
    forwards: tuple[Span, ...]  # before a synchronised backward, at least one
    backward: Span  # ends when every gradient is computed
    finalize_end_ns: int  # when every bucket is reduced and copied out
    end_ns: int  # when the next step begins; in the last step, its last event
    buckets: tuple[BucketTimes, ...]  # those that were reduced, in launch order
    optimizers: tuple[Span, ...] = ()  # also optimizer steps inside the backward
    ready_ns: tuple[int | None, ...] = ()  # by parameter index; () if not timed
    local_forwards: tuple[Span, ...] = ()  # under ``no_sync()``
    local_backwards: tuple[Span, ...] = ()  # without averaging; may be nested
    loop_begin_ns: int | None = None  # of the loop over logical ranks, if there is one
    turns: tuple[Turn, ...] = ()  # those of this rank's logical ranks
    # With divided steps: what was sent in this step, and before that what was still on
    # its way when the step began.
    values: tuple[ValueTimes, ...] = ()

    @property
    def first_forward_ns(self) -> int:
        """When the first forward begins, local ones included."""
        return min(span.begin_ns for span in (*self.forwards, *self.local_forwards))

    @property
    def begin_ns(self) -> int:
        """When the step begins: with its first forward, or its loop."""
        begin = self.loop_begin_ns
        return self.first_forward_ns if begin is None else begin

    @property
    def reduced_s(self) -> float:
        """The seconds from the backward's start until all averages are in ``.grad``."""
        return (self.finalize_end_ns - self.backward.begin_ns) / 1e9

    def first_gradient_ns(self, members: Sequence[int]) -> int | None:
        """Return when the first gradient of some parameters came, None if untimed."""
        found = [t for i in members if self.ready_ns and (t := self.ready_ns[i])]
        return min(found, default=None)


@dataclass(frozen=True)
class Param:
    """A parameter whose gradient is averaged."""

    name: str  # as in ``named_parameters()``
    nbytes: int  # the size of its dense gradient
    kind: str  # dtype and device, which a bucket has in common; or "sparse ..."


@dataclass(frozen=True)
class ClockOffset:
    """How far a rank's clock is ahead of another one, and how exactly that is known.

    The other clock is rank 0's in `Timeline.clock`, and that of the first rank in
    `Run.clocks`.
    """

    offset_ns: int  # negative if it is behind
    error_ns: int  # the true offset is at most this far from `offset_ns`


@dataclass(frozen=True)
class Where:
    """Who recorded, on what machine, with what versions and settings."""

    rank: int
    world_size: int
    backend: str
    device: str
    host: str  # equal for ranks that share a clock
    versions: Mapping[str, str] = field(default_factory=dict)
    comm_hook: str = ""  # its name; it may send other bytes than the gradients
    layout_by: str = ""  # `AUTO`, `AUTO_TRIES`, or "" if bucket caps made it
    # Why the buckets were not in shared memory; "" if they were, None with one rank.
    no_shared_memory: str | None = None
    logical_ranks: int | None = None  # how many there are on all ranks; None without


@dataclass(frozen=True)
class Timeline:
    """The finished recording of one rank: steps, parameters, bucket layouts."""

    where: Where
    params: tuple[Param, ...]  # by parameter index
    layouts: tuple[tuple[tuple[int, ...], ...], ...]  # parameter indices of each bucket
    steps: tuple[Step, ...]  # oldest first
    num_dropped: int = 0  # steps that failed, were incomplete, or too old to be kept
    clock: ClockOffset | None = None  # None if not compared with rank 0's clock

    @property
    def is_divided(self) -> bool:
        """Whether the ranks divided the optimizer's step (`sharded_step`)."""
        return any(step.values for step in self.steps)

    def moved(self, ns: int) -> Timeline:
        """Return a copy whose steps are ``ns`` later."""
        return replace(self, steps=_moved(self.steps, ns)) if ns else self


def _moved(value: Any, ns: int) -> Any:
    """Return a copy of a time, or of a tuple or dataclass of times, ``ns`` later."""
    if isinstance(value, tuple):
        return tuple(_moved(each, ns) for each in value)
    if isinstance(value, int):
        return value + ns
    if value is None:
        return None
    times = {name: each for name, each in vars(value).items() if name not in _NUMBERS}
    return replace(value, **{name: _moved(each, ns) for name, each in times.items()})


# -------------------------------------------------------------------------------- JSON


def to_json(timelines: Sequence[Timeline]) -> str:
    """Return recordings of one or more ranks as JSON text, for `from_json`."""
    ranks = [asdict(timeline) for timeline in timelines]
    return json.dumps({"kind": KIND, "version": VERSION, "ranks": ranks})


def from_json(text: str | bytes, source: str = "the file") -> tuple[Timeline, ...]:
    """Return the timelines that `to_json` has written.

    Args:
        text: What `to_json` returned.
        source: Where the text comes from, for errors.

    Raises:
        ValueError: The text is no recording of this version, or is damaged.
    """
    try:
        value = json.loads(text)
        problem = _problem(value)
        if not problem:
            return tuple(_built(Timeline, rank) for rank in value["ranks"])
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        problem = f"is damaged: {type(error).__name__}: {error}"
    raise ValueError(
        f"{source} {problem}. Pass a file that Recording.save() of this version of "
        "minidp wrote."
    )


def _problem(value: Any) -> str:
    """Return why parsed JSON is no recording of this version, or "" if it is one."""
    if not isinstance(value, dict) or value.get("kind") != KIND:
        return f'is not a recording: expected an object with "kind": "{KIND}"'
    if value.get("version") not in _READABLE:
        found = value.get("version")
        return f"must be of version {VERSION}, but is of version {found!r}"
    return "" if value["ranks"] else "is damaged: it holds no rank"


_hints: Any = functools.cache(get_type_hints)


def _built(kind: Any, value: Any) -> Any:
    """Convert parsed JSON to dataclasses and tuples, as the type ``kind`` has them."""
    if isinstance(kind, type) and is_dataclass(kind):
        hints = _hints(kind)
        return kind(**{name: _built(hints[name], each) for name, each in value.items()})
    if get_origin(kind) is tuple:
        return tuple(_built(get_args(kind)[0], each) for each in value)
    if value is not None and ClockOffset in get_args(kind):
        return ClockOffset(**value)
    return value
