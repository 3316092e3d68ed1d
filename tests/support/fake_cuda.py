"""A stand-in for one CUDA device: streams and events, without a device.

It knows the order of things and nothing else. Each stream numbers what is done on it;
what a stream or an event *has seen* is, by stream handle, how much of that stream's
work comes before::

    side.work()                     side: {7: 1}
    main.wait_stream(side)          main: {7: 1}
    main.work()                     main: {0: 1, 7: 1}

It stands for ``torch.cuda`` in tests, and for what `minidp.accelerator` calls.
"""

from __future__ import annotations

import contextlib
import itertools
from collections import Counter
from collections.abc import Iterator
from typing import Any

Seen = Counter[int]  # handle -> how much of its work


class FakeEvent:
    """Stands for an event: what the recording stream had seen, and when."""

    def __init__(
        self, cuda: FakeCuda, _device: object = None, *, enable_timing: bool = False
    ) -> None:
        self._cuda = cuda
        self._enable_timing = enable_timing
        self.seen: Seen | None = None
        self.at_ms = 0.0

    def record(self, stream: FakeStream | None = None) -> None:
        stream = stream or self._cuda.current_stream()
        self.seen, self.at_ms = Seen(stream.seen), self._cuda.now_ms

    def synchronize(self) -> None:
        assert self.seen is not None, "never recorded"
        self._cuda.num_waits += 1

    def query(self) -> bool:
        return self.seen is None or self.at_ms <= self._cuda.done_ms

    def elapsed_time(self, other: FakeEvent) -> float:
        """Return the milliseconds between two recorded events.

        Raises:
            ValueError: as torch does without timing, or before they are recorded.
        """
        if not (self._enable_timing and other._enable_timing):
            raise ValueError("Both events must be created with enable_timing=True.")
        if self.seen is None or other.seen is None:
            raise ValueError("Both events must be recorded.")
        return other.at_ms - self.at_ms


class FakeStream:
    """Stands for a stream, and knows what work comes before what it does next."""

    def __init__(self, cuda: FakeCuda, handle: int) -> None:
        self._cuda = cuda
        self.cuda_stream = handle
        self.seen = cuda.seen_by[handle]
        self._outer: list[FakeStream] = []

    def __enter__(self) -> FakeStream:
        self._outer.append(self._cuda.current_stream())
        self._cuda.set_stream(self)
        return self

    def __exit__(self, *error: object) -> None:
        self._cuda.set_stream(self._outer.pop())

    def work(self) -> int:
        """Do a piece of work on the stream; return its number."""
        self.seen[self.cuda_stream] += 1
        return self.seen[self.cuda_stream]

    def has_seen(self, other: FakeStream, number: int) -> bool:
        """Whether that work of another stream comes before what this one does next."""
        return self.seen[other.cuda_stream] >= number

    def record_event(self) -> FakeEvent:
        event = FakeEvent(self._cuda)
        event.record(self)
        return event

    def wait_event(self, event: FakeEvent) -> None:
        if event.seen is not None:
            self.seen |= event.seen

    def wait_stream(self, other: FakeStream) -> None:
        """Let what this stream does next wait for what the other has done up to now."""
        self.wait_event(other.record_event())

    def synchronize(self) -> None:
        self._cuda.num_waits += 1


class FakeCuda:
    """Stands for ``torch.cuda`` with one device; its attributes have the same names."""

    def __init__(self) -> None:
        self.seen_by: dict[int, Seen] = {0: Seen()}
        self.now_ms = 0.0  # set by tests
        self.done_ms = 0.0  # up to here the device has executed
        self.num_waits = 0  # of the host for the device
        self._handles = itertools.count(7)
        self._default = FakeStream(self, 0)
        self._current = self._default
        self._sync_mode = "default"

    def Stream(self, device: object = None) -> FakeStream:
        handle = next(self._handles)
        self.seen_by[handle] = Seen()
        return FakeStream(self, handle)

    def Event(self, device: object = None, *, enable_timing: bool = False) -> FakeEvent:
        return FakeEvent(self, device, enable_timing=enable_timing)

    def new_event(self, device: object, *, is_timed: bool = False) -> FakeEvent:
        return self.Event(device, enable_timing=is_timed)

    def default_stream(self, device: object = None) -> FakeStream:
        return self._default

    def current_stream(self, device: object = None) -> FakeStream:
        return self._current

    def set_stream(self, stream: FakeStream) -> None:
        self._current = stream

    @contextlib.contextmanager
    def stream(self, stream: FakeStream | None) -> Iterator[None]:
        """Make a stream the current one inside the block; None changes nothing."""
        before, self._current = self._current, stream or self._current
        try:
            yield
        finally:
            self._current = before

    def synchronize(self, device: object = None) -> None:
        self.num_waits += 1
        self.done_ms = self.now_ms

    def get_sync_debug_mode(self) -> int:
        return ("default", "warn", "error").index(self._sync_mode)

    def set_sync_debug_mode(self, mode: int | str) -> None:
        """Set "default", "warn" or "error"; the stand-in only remembers it."""
        names = ("default", "warn", "error")
        self._sync_mode = names[mode] if isinstance(mode, int) else mode


def install(monkeypatch: Any, fake: FakeCuda) -> None:
    """Put the stand-in in the place of what minidp and tests call of a device."""
    import torch

    from minidp import accelerator

    for name in (
        *("Stream", "Event", "stream"),
        *("default_stream", "current_stream", "synchronize"),
        *("get_sync_debug_mode", "set_sync_debug_mode"),
    ):
        monkeypatch.setattr(torch.cuda, name, getattr(fake, name))
    monkeypatch.setattr(accelerator, "new_event", fake.new_event)
    monkeypatch.setattr(torch.accelerator, "synchronize", fake.synchronize)
    monkeypatch.setattr(accelerator, "current_stream", fake.current_stream)
    monkeypatch.setattr(accelerator, "_has_record_stream", lambda _: True)
    monkeypatch.setattr(accelerator, "has_streams", lambda device: device.type != "cpu")
