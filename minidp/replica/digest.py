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
_CHUNKS_ON_DEVICE = 4  # at once there; more would take more memory than they save time
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def digest_of(
    tensors: Sequence[torch.Tensor], *, of_values: bool = False
) -> torch.Tensor:
    """Return one checksum (0-D int64) of the bits of one or more tensors, in order.

    With ``of_values`` equal values count as equal: zeros of both signs, and all NaNs.
    """
    small: dict[torch.device, list[torch.Tensor]] = {}
    sums = []
    for tensor in tensors:
        if tensor.nbytes < SMALL_BYTES:
            flat = as_plain(tensor)
            flat = _normal(flat) if of_values else flat
            small.setdefault(tensor.device, []).append(flat.view(torch.uint8))
        else:
            sums.append(sum_of_bits(tensor, of_values=of_values))
    sums += [sum_of_bits(torch.cat(pieces)) for pieces in small.values()]
    found = torch.stack([each.to(sums[0].device) for each in sums])
    # The factors are odd, so that no change of a single number is lost modulo 2**64,
    # and all different, so that the order of the tensors counts.
    factors = torch.arange(1, 2 * len(sums), 2, device=found.device)
    return (found * factors).sum()


def sum_of_bits(tensor: torch.Tensor, *, of_values: bool = False) -> torch.Tensor:
    """Return a checksum of a tensor's bits, as a 0-D int64 that wraps around.

    It is the sum of the tensor's words of 4 bytes, each times an odd factor of its own.
    A change of one element changes the sum, and so does an exchange of two elements.
    But the changes of the two words of an element of 8 bytes may, rarely, cancel out.

    A large tensor is summed up in parts, so that this takes a few MiB of memory only.

    Args:
        tensor: The tensor.
        of_values: Whether zeros of both signs count as equal, and all NaNs.
    """
    flat = as_plain(tensor)
    size = flat.element_size()
    if flat.storage_offset() * size % _WORD:  # a part of another tensor, on this rank
        flat = flat.clone()
    count = flat.numel() * size // _WORD * _WORD // size
    num_words = count * size // _WORD
    rest = _normal(flat[count:]) if of_values else flat[count:]  # less than a word
    places = num_words + torch.arange(len(rest), device=flat.device)
    total = (rest.view(_INTEGERS[size]).long() * (2 * places + 1)).sum()
    factors = 2 * torch.arange(min(num_words, _CHUNK), device=flat.device) + 1
    step = _CHUNK * (1 if flat.is_cpu else _CHUNKS_ON_DEVICE) * _WORD // size
    for start in range(0, count, step):
        part = flat[start : min(start + step, count)]
        words = (_normal(part) if of_values else part).view(torch.int32)
        total += _sum_of_words(words, factors, start * size // _WORD)
    return total


def _sum_of_words(
    words: torch.Tensor, factors: torch.Tensor, first: int
) -> torch.Tensor:
    """Return what `sum_of_bits` adds for the words from number ``first`` on."""
    done = 0 if words.is_cpu else len(words) // _CHUNK * _CHUNK
    total = torch.zeros((), dtype=torch.int64, device=words.device)
    if done:
        total += _sum_of_table(words[:done].view(-1, _CHUNK), factors, first)
    for start in range(done, len(words), _CHUNK):
        chunk = words[start : start + _CHUNK].long()
        total += (chunk * factors[: len(chunk)]).sum()
        total += 2 * (first + start) * chunk.sum()
    return total


def _sum_of_table(
    table: torch.Tensor, factors: torch.Tensor, first: int
) -> torch.Tensor:
    """Return what `sum_of_bits` adds for the chunks that are rows of a table.

    The table begins with the word number ``first``.

    On a device each chunk would be eight kernels, 27,000 for a GiB. The factor of a
    word is that of its column, plus twice the place at which its row begins. So the
    sums of columns and of rows are enough, and are two kernels for all chunks.
    """
    rows = table.sum(1, dtype=torch.int64)
    columns = table.sum(0, dtype=torch.int64)
    starts = first + table.size(1) * torch.arange(len(rows), device=table.device)
    return (columns * factors[: len(columns)]).sum() + (2 * starts * rows).sum()


def _normal(values: torch.Tensor) -> torch.Tensor:
    """Return a copy in which -0 is 0, and all NaNs are the same one."""
    if not values.is_floating_point():
        return values
    values = values + 0
    return values.masked_fill_(values.isnan(), float("nan"))


def as_plain(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor's values as a 1-D, contiguous tensor, a view where possible.

    The order does not depend on the strides. Complex values become pairs of reals.
    """
    flat = tensor.detach().resolve_conj().resolve_neg().contiguous().view(-1)
    if flat.stride(0) != 1:  # one element with a stride counts as contiguous
        flat = flat.clone(memory_format=torch.contiguous_format)
    return torch.view_as_real(flat).view(-1) if flat.is_complex() else flat
