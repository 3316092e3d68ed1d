"""Compute checksums of tensors, so that ranks can compare replicas by a few numbers.

A checksum is a weighted sum of a tensor's bits, taken as integers. So equal tensors
have equal sums on every device and also where they hold NaN, which equals nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

SMALL_BYTES = 64 * 1024  # tensors of less are joined before they are summed up
_WORD = 4  # bytes
_CHUNK = 2**17  # words to be summed up at once: so many stay in a cache
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def digest_of(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return one checksum (0-D int64) of the bits of one or more tensors, in order."""
    small: dict[torch.device, list[torch.Tensor]] = {}
    sums = []
    for tensor in tensors:
        if tensor.nbytes < SMALL_BYTES:
            small.setdefault(tensor.device, []).append(_plain(tensor).view(torch.uint8))
        else:
            sums.append(sum_of_bits(tensor))
    sums += [sum_of_bits(torch.cat(pieces)) for pieces in small.values()]
    found = torch.stack([each.to(sums[0].device) for each in sums])
    # The factors are odd, so that no change of a single number is lost modulo 2**64,
    # and all different, so that the order of the tensors counts.
    factors = torch.arange(1, 2 * len(sums), 2, device=found.device)
    return (found * factors).sum()


def sum_of_bits(tensor: torch.Tensor) -> torch.Tensor:
    """Return a checksum of a tensor's bits, as a 0-D int64 that wraps around.

    It is the sum of the tensor's words of 4 bytes, each times an odd factor of its own.
    A change of one element changes the sum, and so does an exchange of two elements.
    But the changes of the two words of an element of 8 bytes may, rarely, cancel out.
    """
    flat = _plain(tensor)
    size = flat.element_size()
    if flat.storage_offset() * size % _WORD:  # a part of another tensor, on this rank
        flat = flat.clone()
    count = flat.numel() * size // _WORD * _WORD // size
    words = flat[:count].view(torch.int32)
    rest = flat[count:].view(_INTEGERS[size]).long()  # less than a word
    factors = 2 * torch.arange(min(len(words), _CHUNK), device=flat.device) + 1
    places = len(words) + torch.arange(len(rest), device=flat.device)
    total = (rest * (2 * places + 1)).sum()
    done = 0 if words.is_cpu else len(words) // _CHUNK * _CHUNK
    if done:
        total += _sum_of_table(words[:done].view(-1, _CHUNK), factors)
    for start in range(done, len(words), _CHUNK):
        chunk = words[start : start + _CHUNK].long()
        total += (chunk * factors[: len(chunk)]).sum() + 2 * start * chunk.sum()
    return total


def _sum_of_table(table: torch.Tensor, factors: torch.Tensor) -> torch.Tensor:
    """Return what `sum_of_bits` adds for the chunks that are rows of a table.

    On a device each chunk would be eight kernels, 27,000 for a GiB. The factor of a
    word is that of its column, plus twice the place at which its row begins. So the
    sums of columns and of rows are enough, and are two kernels for all chunks.
    """
    rows = table.sum(1, dtype=torch.int64)
    columns = table.sum(0, dtype=torch.int64)
    starts = table.size(1) * torch.arange(len(rows), device=table.device)
    return (columns * factors[: len(columns)]).sum() + (2 * starts * rows).sum()


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor's values as a 1-D, contiguous tensor, a view where possible.

    The order does not depend on the strides. Complex values become pairs of reals.
    """
    flat = tensor.detach().resolve_conj().resolve_neg().contiguous().view(-1)
    if flat.stride(0) != 1:  # one element with a stride counts as contiguous
        flat = flat.clone(memory_format=torch.contiguous_format)
    return torch.view_as_real(flat).view(-1) if flat.is_complex() else flat
