"""Recorded steps as plain, frozen data; to and from JSON.

One step, in the order in which its times lie on a rank's clock::

    forwards         backward                   finalize_end_ns            end_ns
    |----| |----|    |--------------|-----------------|    |---------|        |
                      ready_ns       '- every gradient      optimizers
                      buckets           is computed

Forwards and backwards that average nothing (``no_sync()``) may lie before, or after it.
All times are nanoseconds on the monotonic clock of the rank's host. Ranks of one host
share it; for others `Timeline.clock` says how far it is from rank 0's.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, TypeVar

KIND = "minidp timeline"
VERSION = 4
AUTO, AUTO_TRIES = "auto", "auto, still trying"  # of `Where.layout_by`
_REMEDY = "Pass a file that Recording.save() of this version of minidp wrote."

Item = TypeVar("Item")


@dataclass(frozen=True)
class Span:
    """From one moment to a later one."""

    begin_ns: int
    end_ns: int

    def __post_init__(self) -> None:
        if self.end_ns < self.begin_ns:
            raise ValueError(
                f"a span must not end before it begins: {self.begin_ns} ns to "
                f"{self.end_ns} ns"
            )

    @property
    def seconds(self) -> float:
        """How long it is."""
        return (self.end_ns - self.begin_ns) / 1e9


@dataclass(frozen=True)
class BucketTimes:
    """One bucket in one step."""

    number: int  # in launch order
    full_ns: int  # its last gradient arrived
    launched_ns: int  # its collective was enqueued
    done_ns: int  # ... and was complete
    copied_out_ns: int  # the averages were in ``.grad``

    def __post_init__(self) -> None:
        times = (self.full_ns, self.launched_ns, self.done_ns, self.copied_out_ns)
        if list(times) != sorted(times):
            raise ValueError(
                f"bucket {self.number} must be full, launched, done and copied out in "
                f"this order, but the times are {', '.join(map(str, times))} ns"
            )


@dataclass(frozen=True)
class Step:
    """One synchronised backward, with the forwards before and the steps after it."""

    number: int  # of the synchronised backward, from 0
    layout: int  # index in `Timeline.layouts`
    forwards: tuple[Span, ...]  # those that announced a synchronised backward
    backward: Span  # ends when every gradient is computed
    finalize_end_ns: int  # everything is reduced and copied out
    end_ns: int  # the next step's first forward; of the last step: its own last event
    buckets: tuple[BucketTimes, ...]  # those that travelled, in launch order
    optimizers: tuple[Span, ...] = ()  # optimizer steps, also those in the backward
    ready_ns: tuple[int | None, ...] = ()  # per parameter index; () if not taken
    local_forwards: tuple[Span, ...] = ()  # under ``no_sync()``
    local_backwards: tuple[Span, ...] = ()  # which averaged nothing; may be nested

    def __post_init__(self) -> None:
        if not self.forwards:
            raise ValueError(f"step {self.number} must have a forward")
        times = (
            self.begin_ns,
            self.backward.begin_ns,
            self.finalize_end_ns,
            self.end_ns,
        )
        if list(times) != sorted(times):
            raise ValueError(
                f"step {self.number} must begin its forward, begin its backward, "
                f"finalize and end in this order, but the times are "
                f"{', '.join(map(str, times))} ns"
            )

    @property
    def begin_ns(self) -> int:
        """When its first forward begins."""
        return min(span.begin_ns for span in (*self.forwards, *self.local_forwards))

    @property
    def seconds(self) -> float:
        """The whole step, until the next one begins."""
        return (self.end_ns - self.begin_ns) / 1e9

    def first_gradient_ns(self, members: Sequence[int]) -> int | None:
        """When the first of these parameters was ready; None if nobody took it."""
        found = [t for i in members if self.ready_ns and (t := self.ready_ns[i])]
        return min(found, default=None)


@dataclass(frozen=True)
class Param:
    """A managed parameter."""

    name: str  # dotted
    nbytes: int  # of its dense gradient
    kind: str  # dtype and device: what a bucket has in common; "sparse ..."


@dataclass(frozen=True)
class Clock:
    """This rank's clock is ahead of rank 0's by ``offset_ns``, plus or minus."""

    offset_ns: int
    error_ns: int  # the offset is at most this far from the truth


@dataclass(frozen=True)
class Where:
    """On what the steps ran."""

    rank: int
    world_size: int
    backend: str
    device: str
    host: str  # equal for ranks that share a clock
    versions: Mapping[str, str] = field(default_factory=dict)
    comm_hook: str = ""  # its name; buckets then need not travel as they are
    layout_by: str = ""  # who chooses buckets where caps do not: `AUTO`, `AUTO_TRIES`

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.world_size:
            raise ValueError(
                f"rank must be at least 0 and less than the world size of "
                f"{self.world_size}, but is {self.rank}"
            )


@dataclass(frozen=True)
class Timeline:
    """What one rank recorded."""

    where: Where
    params: tuple[Param, ...]  # by parameter index
    layouts: tuple[tuple[tuple[int, ...], ...], ...]  # parameter indices per bucket
    steps: tuple[Step, ...]  # oldest first
    num_dropped: int = 0  # steps that failed, were incomplete or too old to be kept
    clock: Clock | None = None  # None: not compared with rank 0's

    def __post_init__(self) -> None:
        for number, layout in enumerate(self.layouts):
            self._check_layout(number, layout)
        numbers = [step.number for step in self.steps]
        if sorted(set(numbers)) != numbers:
            raise ValueError("the numbers of steps must grow, but do not")
        for step in self.steps:
            self._check(step)

    def _check_layout(self, number: int, layout: tuple[tuple[int, ...], ...]) -> None:
        for bucket in layout:
            if not bucket or not all(0 <= i < len(self.params) for i in bucket):
                raise ValueError(
                    f"each bucket of layout {number} must have some of the "
                    f"{len(self.params)} parameters, but one has {list(bucket)}"
                )

    def _check(self, step: Step) -> None:
        if not 0 <= step.layout < len(self.layouts):
            raise ValueError(
                f"step {step.number} has layout {step.layout}, but there are "
                f"{len(self.layouts)} layouts"
            )
        if step.ready_ns and len(step.ready_ns) != len(self.params):
            raise ValueError(
                f"step {step.number} must have one ready time for each of the "
                f"{len(self.params)} parameters, but has {len(step.ready_ns)}"
            )
        num_buckets = len(self.layouts[step.layout])
        numbers = [bucket.number for bucket in step.buckets]
        if sorted(set(numbers)) != numbers or any(
            not 0 <= number < num_buckets for number in numbers
        ):
            raise ValueError(
                f"step {step.number} must have buckets in launch order and out of the "
                f"{num_buckets} of its layout, but has {numbers}"
            )

    def members(self, step: Step, bucket: int) -> tuple[int, ...]:
        """Parameter indices of a bucket."""
        return self.layouts[step.layout][bucket]

    def nbytes(self, step: Step, bucket: int) -> int:
        """Bytes of a bucket."""
        return sum(self.params[i].nbytes for i in self.members(step, bucket))

    def dense_bytes(self, step: Step, bucket: int) -> int:
        """Bytes that travel; 0 if nobody knows, because the gradient is sparse."""
        is_sparse = any(
            self.params[i].kind.startswith("sparse") for i in self.members(step, bucket)
        )
        return 0 if is_sparse else self.nbytes(step, bucket)


# -------------------------------------------------------------------------------- JSON


def to_json(timelines: Sequence[Timeline]) -> str:
    """One file for one or more ranks; `from_json` reads it."""
    ranks = [asdict(timeline) for timeline in timelines]
    return json.dumps({"kind": KIND, "version": VERSION, "ranks": ranks})


def from_json(text: str, source: str = "the file") -> tuple[Timeline, ...]:
    """The timelines in a file.

    Args:
        text: what `to_json` gave.
        source: name of the file, for errors.

    Raises:
        ValueError: it is not such a file; says what is wrong, and where in it.
    """
    try:
        value = json.loads(text)
    except ValueError as error:
        raise ValueError(f"{source} is not JSON: {error}. {_REMEDY}") from None
    if isinstance(value, dict) and "traceEvents" in value:
        raise ValueError(f"{source} is a trace, not a recording. {_REMEDY}")
    if not isinstance(value, dict) or value.get("kind") != KIND:
        raise ValueError(
            f'{source} is not a recording: it must be an object with "kind": "{KIND}". '
            f"{_REMEDY}"
        )
    if value.get("version") != VERSION:
        raise ValueError(
            f"{source} must be of version {VERSION}, but is of version "
            f"{value.get('version')!r}. {_REMEDY}"
        )
    try:
        if value.get("ranks") == []:
            raise ValueError("it is of no rank")
        return _list(value, "ranks", _timeline)
    except ValueError as error:
        raise ValueError(f"{source} is damaged: {error}. {_REMEDY}") from None


def _timeline(value: Any, at: str) -> Timeline:
    clock = _get(value, "clock", at, object)
    return _made(
        at,
        Timeline,
        where=_where(_get(value, "where", at, dict), f"{at}.where"),
        params=_list(value, "params", _param, at),
        layouts=_list(value, "layouts", _layout, at),
        steps=_list(value, "steps", _step, at),
        num_dropped=_get(value, "num_dropped", at, int),
        clock=None if clock is None else _clock(clock, f"{at}.clock"),
    )


def _where(value: Any, at: str) -> Where:
    versions = _get(value, "versions", at, dict)
    if not all(isinstance(version, str) for version in versions.values()):
        raise ValueError(f"{at}.versions must be strings")
    names = ("backend", "device", "host", "comm_hook", "layout_by")
    texts = {name: _get(value, name, at, str) for name in names}
    numbers = {name: _get(value, name, at, int) for name in ("rank", "world_size")}
    return _made(at, Where, versions=versions, **texts, **numbers)


def _clock(value: Any, at: str) -> Clock:
    return Clock(_get(value, "offset_ns", at, int), _get(value, "error_ns", at, int))


def _param(value: Any, at: str) -> Param:
    return Param(
        _get(value, "name", at, str),
        _get(value, "nbytes", at, int),
        _get(value, "kind", at, str),
    )


def _layout(value: Any, at: str) -> tuple[tuple[int, ...], ...]:
    return tuple(
        tuple(
            _of_type(i, int, f"{at}[{k}][{n}]")
            for n, i in enumerate(_of_type(members, list, f"{at}[{k}]"))
        )
        for k, members in enumerate(_of_type(value, list, at))
    )


def _step(value: Any, at: str) -> Step:
    names = ("number", "layout", "finalize_end_ns", "end_ns")
    ready = _get(value, "ready_ns", at, list)
    return _made(
        at,
        Step,
        **{name: _get(value, name, at, int) for name in names},
        forwards=_list(value, "forwards", _span, at),
        backward=_span(_get(value, "backward", at, dict), f"{at}.backward"),
        buckets=_list(value, "buckets", _bucket, at),
        optimizers=_list(value, "optimizers", _span, at),
        local_forwards=_list(value, "local_forwards", _span, at),
        local_backwards=_list(value, "local_backwards", _span, at),
        ready_ns=tuple(
            None if t is None else _of_type(t, int, f"{at}.ready_ns[{i}]")
            for i, t in enumerate(ready)
        ),
    )


def _span(value: Any, at: str) -> Span:
    begin, end = (_get(value, name, at, int) for name in ("begin_ns", "end_ns"))
    return _made(at, Span, begin_ns=begin, end_ns=end)


def _bucket(value: Any, at: str) -> BucketTimes:
    names = ("number", "full_ns", "launched_ns", "done_ns", "copied_out_ns")
    return _made(
        at, BucketTimes, **{name: _get(value, name, at, int) for name in names}
    )


def _made(at: str, make: Callable[..., Item], **values: Any) -> Item:
    """Construct, and say where in the file what was refused stands."""
    try:
        return make(**values)
    except ValueError as error:
        raise ValueError(f"{at}: {error}") from None


def _list(
    value: Any, name: str, read: Callable[[Any, str], Item], at: str = ""
) -> tuple[Item, ...]:
    items = _get(value, name, at, list)
    prefix = f"{at}.{name}" if at else name
    return tuple(read(item, f"{prefix}[{i}]") for i, item in enumerate(items))


def _get(value: Any, name: str, at: str, expected: type) -> Any:
    if not isinstance(value, dict):
        raise ValueError(f"{at} must be an object, but is {_shown(value)}")
    place = f"{at}.{name}" if at else name
    if name not in value:
        raise ValueError(f"{place} is missing")
    return _of_type(value[name], expected, place)


def _of_type(value: Any, expected: type, at: str) -> Any:
    words = {int: "an integer", str: "a string", list: "a list", dict: "an object"}
    is_flag = expected is int and isinstance(value, bool)
    if not isinstance(value, expected) or is_flag:
        raise ValueError(f"{at} must be {words[expected]}, but is {_shown(value)}")
    return value


def _shown(value: object) -> str:
    text = json.dumps(value)
    return text if len(text) <= 40 else f"{text[:40]}..."
