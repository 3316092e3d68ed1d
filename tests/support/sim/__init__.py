"""A simulated accelerator: torch's device ``sim``, which finds what a GPU only may do.

On a GPU a wrong order of streams shows once in a million steps, as a wrong number. Here
it is reported whenever the program permits it: streams are threads with clocks that say
which of their work is certain to be over (``csrc/stream.h``), memory that is freed is
filled with NaN and used again at once (``csrc/memory.h``), and who waits is counted.
Kernels are those of the CPU, so a training has the CPU's bits, or it is wrong::

    sim.load()                                   # once in a process, after any fork
    x = torch.ones(3, device="sim")
    with sim.no_host_waits():
        y = x * 2
    assert sim.races() == []

The group ``simccl`` keeps to the rules of NCCL's (``csrc/group.h``); it is the default
for tensors on the device. Not simulated: sparse tensors, captures of graphs, the speed
of kernels, contexts, and what a host reads in pinned memory, of which only that it is
NaN until a copy has run.
"""

from __future__ import annotations

import atexit
import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch.utils import backend_registration

from minidp import accelerator
from tests.support.sim import batch_norm, torch_module
from tests.support.sim.building import NotBuilt, build, load_binary

__all__ = [
    "Costs",
    "NotBuilt",
    "build",
    "costs",
    "delay",
    "held",
    "load",
    "marks_ignored",
    "new_stream",
    "no_host_waits",
    "races",
]

BACKEND = "simccl"
# What minidp has streams of its own for.
PURPOSES = ("", "sums over logical ranks", "sums of shares 0", "sums of shares 1")
# Gloo waits longer than the group, whose watchdog is the one to act.
_LONGER = timedelta(seconds=60)
_loaded: list[ModuleType] = []


def load() -> ModuleType:
    """Make the device known to torch, and return what controls it.

    A process can do this once, and must not fork afterwards, as with CUDA.

    Raises:
        NotBuilt: See `build`.
    """
    if _loaded:
        return _loaded[0]
    path = build()
    backend_registration.rename_privateuse1_backend("sim")
    library = load_binary(path)
    torch_module.use(library)
    torch._register_device_module("sim", torch_module)
    backend_registration.generate_methods_for_privateuse1_backend()
    batch_norm.register()
    dist.Backend.register_backend(BACKEND, _make_group, devices=["sim"])
    atexit.register(library.drain)
    _loaded.append(library)
    return library


def _make_group(store: Any, rank: int, size: int, timeout: timedelta) -> Any:
    gloos = [
        dist.ProcessGroupGloo(
            dist.PrefixStore(f"{BACKEND}{device}", store),  # type: ignore[attr-defined]
            rank,
            size,
            timeout + _LONGER,
        )
        for device in range(torch_module.device_count())
    ]
    return load().make_group(gloos, timeout.total_seconds())


def races() -> list[str]:
    """Return the races that were found since the last call."""
    return list(load().take_races())


def allocated(device: int = 0) -> int:
    """Return how many bytes of a device's memory are allocated now."""
    in_use, _, _ = load().memory(device)
    return int(in_use)


def delay(microseconds: int, seed: int) -> None:
    """Let each launch wait for a random time up to this one, which ``seed`` decides."""
    load().set_delay(microseconds, seed)


def new_stream(device: str | torch.device = "sim:0") -> torch.Stream:
    """Return a stream of the user.

    Streams come from a pool, in turn. Now and then one of them would be minidp's own,
    whose waits order more than the user has ordered, and hide a race.
    """
    device = torch.device(device)
    ours = [accelerator.own_stream(device, purpose) for purpose in PURPOSES]
    return next(s for s in iter(lambda: torch.Stream(device), None) if s not in ours)


@contextlib.contextmanager
def held(stream: torch.Stream) -> Iterator[None]:
    """Let a stream stand still during the block, so that others certainly overtake it.

    Who waits for the stream in the block waits for ever.
    """
    place = stream.device.index, stream.stream_id
    load().hold(*place)
    try:
        yield
    finally:
        load().let_go(*place)


@contextlib.contextmanager
def no_host_waits() -> Iterator[None]:
    """Let whatever waits for the device in this block raise, with its reason."""
    load().refuse_host_waits(True)
    try:
        yield
    finally:
        load().refuse_host_waits(False)


@contextlib.contextmanager
def marks_ignored(library: str) -> Iterator[None]:
    """Let each `record_stream` that a library's C++ calls in this block do nothing.

    Args:
        library: How the name of the library's file begins.
    """
    load().drain()
    load().ignore_marks_of(library)
    try:
        yield
    finally:
        load().drain()
        load().ignore_marks_of("")


@dataclass
class Costs:
    """What a block has cost.

    Attributes:
        kernels: How many were launched, copies among them.
        collectives: How many were launched.
        host_waits: Why the host waited, in order.
        peak: The most memory of the device that was allocated, in bytes, beyond what
            was allocated when the block began.
    """

    kernels: int = 0
    collectives: int = 0
    host_waits: tuple[str, ...] = ()
    peak: int = 0


@contextlib.contextmanager
def costs(device: int = 0) -> Iterator[Costs]:
    """Count what this block costs on a device; the result is complete at its end."""
    library, found = load(), Costs()
    library.drain()  # collectives keep their tensors until they are over
    library.reset_peak(device)
    before = allocated(device)
    library.take_counters()
    yield found
    counted = library.take_counters()
    found.kernels, found.collectives = counted["kernels"], counted["collectives"]
    found.host_waits = tuple(counted["host_waits"])
    _, peak, _ = library.memory(device)
    found.peak = peak - before
