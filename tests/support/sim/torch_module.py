"""The module ``torch.sim``: what ``torch.cuda`` is for CUDA, as far as torch asks.

Most of what a script needs is in ``torch.accelerator``, which finds the device by
itself.
"""

from __future__ import annotations

from types import ModuleType, TracebackType
from typing import Any

import torch

__all__ = ["Event", "Stream", "current_stream", "device", "synchronize"]

Stream, Event = torch.Stream, torch.Event
_library: Any = None  # the binary


def use(library: ModuleType) -> None:
    """Take a loaded binary."""
    global _library
    _library = library


def is_available() -> bool:
    """Return true: to load the binary is to have the device."""
    return True


def is_initialized() -> bool:
    """Return true, because there is nothing to initialise."""
    return True


def _is_in_bad_fork() -> bool:
    return False


def device_count() -> int:
    """Return the number of devices, which each process has for itself."""
    return int(_library.num_devices)


def current_device() -> int:
    """Return the index of the current device."""
    return int(_library.current_device())


def set_device(device: Any) -> None:
    """Make a device current."""
    _library.exchange_device(_index(device))


def _index(device: Any) -> int:
    if isinstance(device, int):
        return device
    index = torch.device(device).index
    return current_device() if index is None else int(index)


class device:
    """A context in which a device is current."""

    def __init__(self, device: Any) -> None:
        self._index, self._old = _index(device), -1

    def __enter__(self) -> None:
        self._old = _library.exchange_device(self._index)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        _library.exchange_device(self._old)


def current_stream(device: Any = None) -> torch.Stream:
    """Return the current stream of a device."""
    return torch.accelerator.current_stream(device)


def stream(stream: torch.Stream) -> torch.Stream:
    """Return the stream itself, which is a context."""
    return stream


def synchronize(device: Any = None) -> None:
    """Let the host wait for all streams of a device."""
    torch.accelerator.synchronize(device)


def manual_seed(seed: int) -> None:
    """Seed the generator of the current device."""
    _library.default_generator(current_device()).manual_seed(seed)


def manual_seed_all(seed: int) -> None:
    """Seed the generators of all devices."""
    for index in range(device_count()):
        _library.default_generator(index).manual_seed(seed)


def get_rng_state(device: Any = "sim") -> torch.Tensor:
    """Return the state of a device's generator."""
    state = _library.default_generator(_index(device)).get_state()
    assert isinstance(state, torch.Tensor)
    return state


def set_rng_state(state: torch.Tensor, device: Any = "sim") -> None:
    """Set the state of a device's generator."""
    _library.default_generator(_index(device)).set_state(state)


def get_amp_supported_dtype() -> list[torch.dtype]:
    """Return the types to which autocast may cast."""
    return [torch.float16, torch.bfloat16]
