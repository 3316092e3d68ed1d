"""How jobs and results travel between the test process and the rank processes.

Ordinary pickle, except for dense CPU tensors: torch's own pickling either moves them
to shared memory (slow to set up, and gone with the process that owns it) or writes a
whole zip archive per storage.  Here a tensor is its dtype, shape and bytes: exact to
the last bit, NaN payloads included.  Strides, ``requires_grad`` and the identity of
shared storages do *not* travel; build those on the rank if a test is about them.
"""

from __future__ import annotations

import io
import pickle
from typing import Any

import torch


def _rebuild_tensor(
    dtype: torch.dtype, shape: tuple[int, ...], raw: bytes
) -> torch.Tensor:
    if not raw:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(bytearray(raw), dtype=dtype).reshape(shape)


class _Pickler(pickle.Pickler):
    def reducer_override(self, obj: Any) -> Any:
        plain = type(obj) in (torch.Tensor, torch.nn.Parameter)
        if not plain or obj.layout != torch.strided or obj.is_quantized:
            return NotImplemented
        dense = obj.detach().cpu().resolve_conj().resolve_neg().contiguous()
        raw = dense.reshape(-1).view(torch.uint8).numpy().tobytes()
        return _rebuild_tensor, (dense.dtype, tuple(dense.shape), raw)


def pack(value: object) -> bytes:
    """Serialise ``value`` by value."""
    stream = io.BytesIO()
    _Pickler(stream, protocol=pickle.HIGHEST_PROTOCOL).dump(value)
    return stream.getvalue()


def unpack(blob: bytes) -> Any:
    """The inverse of `pack`."""
    return pickle.loads(blob)
