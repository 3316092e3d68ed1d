"""Compute a checksum of each of many tensors, by which ranks compare what they have.

The checksums of `minidp.replica` stand for many tensors at once. Here each tensor has
one of its own, so that a message can name it, and a thousand tiny tensors take a few
kernels all the same. Nobody waits for a device before `Digests.read`.

Every change of a single element changes the checksum. Only which NaN a NaN is does not
count: that depends on the order of two summands, which logical ranks leave open.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from minidp.replica import SMALL_BYTES, as_plain

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_BITS = 2**64
_WORD = 8  # bytes
_CHUNK = 2**16  # words that are multiplied at once: so many stay in a cache
_CHUNK_ON_DEVICE = 2**22  # where kernels cost more than memory


class Digests:
    """Checksums by key, made one after the other, and read together.

    None and zeros have the same one, 0: a gradient that is missing contributes zeros.
    """

    def __init__(self) -> None:
        self._found: dict[Any, Tensor] = {}

    @torch.no_grad()
    def add(self, tensors: Mapping[Any, Tensor | None]) -> None:
        """Compute the checksums of some tensors, on the current streams."""
        present = {
            key: _bytes_of_sparse(t) if t.is_sparse else t
            for key, t in tensors.items()
            if t is not None
        }
        small: dict[tuple[torch.device, torch.dtype], list[Any]] = {}
        for key, tensor in present.items():
            if tensor.nbytes >= SMALL_BYTES:
                self._found[key] = _sum_of_large(_with_one_nan(as_plain(tensor)))
            elif tensor.numel():
                small.setdefault((tensor.device, tensor.dtype), []).append(key)
        for keys in small.values():
            sums = _sums_of_small([as_plain(present[key]) for key in keys])
            self._found.update(zip(keys, sums.unbind(), strict=True))

    def read(self) -> dict[Any, int]:
        """Return the checksums that are not 0, by key. The host waits for them."""
        by_device: dict[torch.device, list[Any]] = {}
        for key, found in self._found.items():
            by_device.setdefault(found.device, []).append(key)
        read: dict[Any, int] = {}
        for keys in by_device.values():
            sums = [self._found[key] for key in keys]
            read.update(zip(keys, torch.stack(sums).tolist(), strict=True))
        return {key: value for key, value in read.items() if value}


def digests_of(tensors: Mapping[Any, Tensor | None]) -> dict[Any, int]:
    """Return the checksums of tensors that are not 0, by key."""
    digests = Digests()
    digests.add(tensors)
    return digests.read()


def total(numbers: Iterable[tuple[int, int]]) -> int:
    """Return one checksum (a signed number of 64 bits) of several.

    Args:
        numbers: Pairs of the place of each of them, and the checksum.
    """
    found = sum((2 * place + 1) * number for place, number in numbers) % _BITS
    return found - _BITS if found >= _BITS // 2 else found


def _bytes_of_sparse(tensor: Tensor) -> Tensor:
    """Return the bytes of indices and values, without rows that come twice."""
    merged = tensor.coalesce()
    parts = merged.values().contiguous(), merged.indices().contiguous()
    return torch.cat([part.view(-1).view(torch.uint8) for part in parts])


def _sum_of_large(flat: Tensor) -> Tensor:
    """Return the sum of a flat tensor's words, each times an odd factor of its own.

    A change of one element changes a word, and so the sum, modulo 2**64.
    """
    size = flat.element_size()
    if flat.storage_offset() * size % _WORD:
        flat = flat.clone()
    count = flat.numel() * size // _WORD  # whole words
    rest = flat[count * _WORD // size :].view(_INTEGERS[size]).long()
    words = flat[: count * _WORD // size].view(torch.int64)
    step = _CHUNK if flat.is_cpu else _CHUNK_ON_DEVICE
    odd = 2 * torch.arange(min(step, max(count, _WORD)), device=flat.device) + 1
    found = (rest * odd[: len(rest)]).sum()
    for start in range(0, count, step):
        chunk = words[start : start + step]
        found += (chunk * odd[: len(chunk)]).sum() + 2 * start * chunk.sum()
    return found


def _sums_of_small(flats: Sequence[Tensor]) -> Tensor:
    """Return a checksum of each of several flat tensors of one dtype and device."""
    joined = _with_one_nan(torch.cat(list(flats)))
    device = joined.device
    sizes = torch.tensor([len(flat) for flat in flats], device=device)
    owners = torch.repeat_interleave(torch.arange(len(flats), device=device), sizes)
    starts = sizes.cumsum(0) - sizes
    places = torch.arange(len(joined), device=device) - starts[owners]
    words = joined.view(_INTEGERS[joined.element_size()]).long()
    zeros = torch.zeros(len(flats), dtype=torch.int64, device=device)
    return zeros.index_add_(0, owners, words * (2 * places + 1))


def _with_one_nan(values: Tensor) -> Tensor:
    """Return values in which all NaNs are the same one."""
    if not values.is_floating_point() or values.element_size() == 1:  # no isnan()
        return values
    if values.is_cpu and values.sum().isfinite():  # usually, and a copy takes time
        return values
    return values.masked_fill(values.isnan(), float("nan"))
