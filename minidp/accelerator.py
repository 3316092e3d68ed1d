"""All that minidp knows of devices other than the CPU: streams, events, memory, names.

A device works in the background. What a program calls is put in a *stream*, a queue of
kernels, and the call returns before a kernel has run. Three things can therefore go
wrong on a device and never on the CPU, and each has one answer here:

=========================================  =============================================
what can go wrong                          the answer
=========================================  =============================================
Two streams do not wait for each other.    `BucketStreams`: who flattens a bucket waits
A kernel reads a gradient before another   for all streams that have written to it.
stream has written it.                     `After`: a stream waits for one moment of
                                           another.
Memory is reused too early. The allocator  `use_here`: the stream that is current now
gives freed memory to the next kernel of   uses this memory, too, so that it is reused
the stream that *allocated* it, and does   only behind what is queued on it. Whoever
not know who else still reads it.          drops a tensor of another stream calls it
                                           first.
The host waits for the device, which then  `upload`, `Download` and `to_host` copy
runs dry.                                  through pinned memory; the host waits only
                                           where it reads.
=========================================  =============================================

No other file of the package may use streams, events or the name of a device type
(``tests/repository/test_architecture.py``). Nearly all calls are those of
``torch.accelerator``, ``torch.Stream`` and ``torch.Event``, which are the same for each
type of device; names, versions and random states come from its own module of torch.
``minidp/README.md`` lists what a type must have, and what it may lack.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Any

import torch
from torch import Tensor

NO_CONTEXT: AbstractContextManager[None] = nullcontext()  # made once, for hot code
_CANNOT_TELL: set[str] = set()  # types of devices without an `is_capturing`


# -- which device ----------------------------------------------------------------------


def kind() -> str:
    """Return the type of this machine's accelerator, or "" if torch finds none."""
    if not torch.accelerator.is_available():
        return ""
    found = torch.accelerator.current_accelerator()
    return "" if found is None else found.type


def count() -> int:
    """Return how many devices of the accelerator this process sees."""
    return torch.accelerator.device_count() if kind() else 0


def module(device_type: str) -> Any:
    """Return torch's module of a device type, such as ``torch.cuda``."""
    return torch.get_device_module(device_type)


def name_of(device: torch.device) -> str:
    """Return the name of a device's model, or "" if the device has or tells none."""
    if device.type == "cpu":
        return ""
    with suppress(AttributeError, RuntimeError):
        return str(module(device.type).get_device_name(device))
    return ""


def device(index: int) -> torch.device:
    """Return the device of this machine's accelerator that has this index."""
    return torch.device(kind(), index)


def default_device() -> torch.device:
    """Return the accelerator without an index, or the CPU if there is none."""
    return torch.device(kind() or "cpu")


def has_streams(device: torch.device) -> bool:
    """Return whether work on a device runs behind the host's back, in streams.

    The CPU has none, and neither has the meta device.
    """
    if device.type == "cpu":
        return False
    found = torch.accelerator.current_accelerator()
    return found is not None and found.type == device.type


def versions() -> dict[str, str]:
    """Return the versions of what an accelerator's gradients depend on, by name."""
    if kind() != "cuda":  # no other module tells any
        return {}
    nccl = module("cuda").nccl.version()
    return {"cuda": str(torch.version.cuda), "nccl": ".".join(map(str, nccl))}


def random_states() -> dict[str, list[int]]:
    """Return the state of the accelerator's random generator, if it is in use."""
    found = kind()
    if not found or not _is_initialized(found):
        return {}
    return {f"torch.{found}": module(found).get_rng_state().tolist()}


def generators() -> list[Tensor]:
    """Return the states of the random generators of all devices that are in use."""
    found = kind()
    if not found or not _is_initialized(found):
        return []
    states: list[Tensor] = [module(found).get_rng_state(i) for i in range(count())]
    return states


def restore_generators(states: Sequence[Tensor]) -> None:
    """Let the random generators of the devices go on from what `generators` found."""
    for index, state in enumerate(states):
        module(kind()).set_rng_state(state, index)


def seed(number: int) -> None:
    """Seed the random generators of all devices of the accelerator, if there is one."""
    if found := kind():
        module(found).manual_seed_all(number)


def _is_initialized(device_type: str) -> bool:
    """Return whether this process has used the accelerator; some cannot tell."""
    return bool(getattr(module(device_type), "is_initialized", lambda: True)())


def synchronize(device: torch.device) -> None:
    """Let the host wait for all work of a device; on the CPU there is none."""
    if has_streams(device):
        torch.accelerator.synchronize(device)


# -- streams ---------------------------------------------------------------------------


def current_stream(device: torch.device) -> torch.Stream:
    """Return the stream that is current on this thread, for a device with an index."""
    # Grad hooks call it: torch.accelerator.current_stream takes twice as long.
    return torch._C._accelerator_getStream(device.index)


@functools.cache
def own_stream(device: torch.device, purpose: str = "") -> torch.Stream:  # noqa: ARG001 -- a key
    """Return the stream of a device on which `on_side_stream` works."""
    return torch.Stream(device)


def on_side_stream(
    device: torch.device, purpose: str = ""
) -> AbstractContextManager[object]:
    """Return a context on a stream of our own, which holds up no stream of the user.

    Args:
        device: The device.
        purpose: What the stream is for. Each purpose has one of its own.
    """
    ours = own_stream(device, purpose)
    # A new object for the same stream: a context that two threads enter mixes them up.
    return torch.Stream(
        stream_id=ours.stream_id,
        device_index=ours.device_index,
        device_type=ours.device_type,
    )


def selected(device: torch.device) -> AbstractContextManager[object]:
    """Return a context in which a device is this thread's current one."""
    return torch.accelerator.device_index(device.index)


def is_capturing(device: torch.device) -> bool:
    """Return whether the current stream of a device records a graph, and runs nothing.

    Types of devices that cannot tell are taken not to capture.
    """
    if device.type in _CANNOT_TELL:
        return False
    stream = current_stream(device)
    if not hasattr(stream, "is_capturing"):  # torch 2.11
        of_cuda = getattr(module(device.type), "is_current_stream_capturing", None)
        return bool(of_cuda and of_cuda())
    try:
        return bool(stream.is_capturing())
    except RuntimeError:  # as torch 2.12 answers for all types that do not
        _CANNOT_TELL.add(device.type)
        return False


def use_here(*tensors: object) -> None:
    """Mark memory as used by the current stream of its device, before it is dropped.

    Without this the allocator could reuse memory of another stream while kernels that
    are queued here still read it. Tensors on the CPU, and what is no tensor, are left
    alone.
    """
    for tensor in tensors:
        if isinstance(tensor, Tensor) and has_streams(tensor.device):
            _record(tensor, current_stream(tensor.device))


def _record(tensor: Tensor, stream: torch.Stream) -> None:
    if not _has_record_stream(tensor.device.type):
        return
    # A sparse tensor cannot record a stream itself.
    is_sparse = tensor.layout is torch.sparse_coo
    parts = [tensor._indices(), tensor._values()] if is_sparse else [tensor]
    for memory in parts:
        memory.record_stream(stream)


@functools.cache
def _has_record_stream(device_type: str) -> bool:
    """Return whether the allocator of a type of device knows several streams.

    MPS has one stream only, and no such operator.
    """
    try:
        probe = torch.empty(1, device=device_type)
        probe.record_stream(current_stream(probe.device))
    except (NotImplementedError, RuntimeError):
        return False
    return True


class HomeStreams:
    """The streams on which a script works, for a module on several devices.

    Autograd has a thread for each device, in which the current streams of all other
    devices are the default ones. So what reads a gradient of another device there must
    first wait for the stream of the script, which may have written it. With one device
    there is nothing to do: what autograd runs follows the script's stream.

    Args:
        devices: Those of the module.
    """

    def __init__(self, devices: Iterable[torch.device]) -> None:
        self.devices = [each for each in devices if has_streams(each)]
        self._streams: dict[torch.device, torch.Stream] = {}
        self.are_several = len(self.devices) > 1

    def note(self) -> None:
        """Note the streams that are current now, at the end of a forward."""
        if self.are_several:
            self._streams = {each: current_stream(each) for each in self.devices}

    def add_to(self, buckets: Iterable[BucketStreams | None]) -> None:
        """Let whoever flattens a bucket wait for the script's stream, too."""
        for bucket in buckets if self._streams else ():
            if bucket is not None:
                bucket.written_on.add(self._streams[bucket.device])

    def follow(self, device: torch.device) -> None:
        """Let the current stream of a device wait for the one that was noted."""
        if (home := self._streams.get(device)) is not None:
            current = current_stream(device)
            if current != home:
                current.wait_stream(home)


class BucketStreams:
    """The streams that write one bucket, the one that launches it, and its memory.

    A grad hook runs on the stream that was current when the AccumulateGrad node of its
    parameter was made: that of the constructor, unless a forward made the node earlier.
    So several streams may write one bucket. The stream that flattens the bucket waits
    for all of them, and the collective is launched from it, too, perhaps by the
    autograd thread of another device.

    The buffer belongs to the stream on which it was made, and may die at any time: with
    the wrapper, or in a rebuild. So each other stream that uses it is marked as its
    user, once.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.written_on: set[torch.Stream] = set()  # filled by the grad hooks
        self._flattened_on: torch.Stream | None = None
        self._users: set[torch.Stream] = set()  # of the buffer

    def made_buffer(self) -> None:
        """Note that the current stream has made the buffer."""
        self._users = {current_stream(self.device)}

    def use_buffer(self, buffer: Tensor) -> None:
        """Mark the buffer as used by the current stream, unless that is known."""
        current = current_stream(self.device)
        if current not in self._users:
            self._users.add(current)
            use_here(buffer)

    def gather(self, grads: Iterable[object]) -> None:
        """Let the current stream flatten the bucket, after all that has written to it.

        It waits for the streams in `written_on`, which is empty afterwards. `launching`
        will select it again.

        Args:
            grads: What was recorded for each slot. Gradients of another stream are
                marked as used by this one.
        """
        current = current_stream(self.device)
        others = self.written_on - {current}
        for other in others:
            current.wait_stream(other)
        for grad in grads if others else ():
            if isinstance(grad, Tensor):
                _record(grad, current)
        self.written_on.clear()
        self._flattened_on = current

    def dropping(self) -> None:
        """Let the current stream wait for those that still write to the buffer.

        A backward that raised has not let the caller's stream wait for its hooks.
        """
        current, flattened = current_stream(self.device), self._flattened_on
        users = self.written_on | ({flattened} if flattened is not None else set())
        for other in users - {current}:
            current.wait_stream(other)
        self.written_on.clear()

    def launching(self) -> AbstractContextManager[object]:
        """Return a context on the stream that has flattened the bucket (`gather`)."""
        return NO_CONTEXT if self._flattened_on is None else self._flattened_on


# -- events ----------------------------------------------------------------------------


def new_event(device: torch.device, *, is_timed: bool = False) -> torch.Event:
    """Return an event of a device, which is to be recorded on one of its streams."""
    return torch.Event(device, enable_timing=is_timed)


class After:
    """The moment on the current stream at which this object is made.

    Args:
        device: The device whose stream is meant.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._event = new_event(device)
        self._event.record(current_stream(device))

    def hold_back(self) -> None:
        """Let the stream that is current now wait for that moment."""
        current_stream(self._device).wait_event(self._event)

    def has_come(self) -> bool:
        """Return whether the device has reached that moment. This waits for nothing."""
        return bool(self._event.query())

    def wait(self) -> None:
        """Let the host wait until the device has reached that moment."""
        self._event.synchronize()


class Timer:
    """The times at which a device passes marks on its streams.

    The constructor waits for the current stream.

    Args:
        device: The device.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._origin = self.mark()
        self._origin.synchronize()

    def mark(self) -> torch.Event:
        """Return an event that the device passes after all that is queued now."""
        event = new_event(self._device, is_timed=True)
        event.record(current_stream(self._device))
        return event

    def nanoseconds(self, mark: torch.Event, anchor: torch.Event) -> int:
        """Return how long after the constructor the device has passed a mark.

        The ``anchor`` is a mark near it. It is needed because long intervals between
        events are rounded.
        """
        until_anchor: float = self._origin.elapsed_time(anchor)
        from_anchor: float = anchor.elapsed_time(mark)
        return round(until_anchor * 1e6) + round(from_anchor * 1e6)

    def settle(self) -> None:
        """Wait until the device has passed all marks."""
        synchronize(self._device)


# -- copies between the host and a device ----------------------------------------------


@functools.cache
def _has_pinned_memory() -> bool:
    """Return whether the accelerator has memory from which it copies by itself."""
    try:
        torch.empty(1, device="cpu", pin_memory=True)
    except (RuntimeError, NotImplementedError):
        return False
    return True


def upload(
    values: Sequence[int], dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """Return numbers as a tensor on a device, without waiting for what is queued there.

    From memory that is not pinned the copy would wait for the device's queue.
    """
    if device.type == "cpu":
        return torch.tensor(values, dtype=dtype, device="cpu")
    is_pinned = has_streams(device) and _has_pinned_memory()
    mine = torch.tensor(values, dtype=dtype, device="cpu", pin_memory=is_pinned)
    return mine.to(device, non_blocking=True)


class Download:
    """A copy of a tensor on its way from a device to the host.

    The constructor starts it behind what is queued on the current stream.
    """

    def __init__(self, tensor: Tensor) -> None:
        self._copy = torch.empty_like(
            tensor, device="cpu", pin_memory=_has_pinned_memory()
        )
        self._copy.copy_(tensor, non_blocking=True)
        self._end = After(tensor.device)

    def wait(self) -> Tensor:
        """Let the host wait for the copy, and return it."""
        self._end.wait()
        return self._copy


def to_host(tensor: Tensor) -> Tensor:
    """Return a tensor's values on the host, which waits for the device.

    ``tensor.cpu()`` copies to memory that is not pinned. While such a copy waits for
    its turn, CUDA's driver lets other threads of the process launch nothing, and record
    and free no event: an autograd thread of another device would wait, too.
    """
    return Download(tensor).wait() if has_streams(tensor.device) else tensor.cpu()
