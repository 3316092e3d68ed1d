"""The collectives that minidp issues, as seen at its only door to torch.distributed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from minidp import _collectives


@contextmanager
def collective_trace() -> Iterator[list[tuple[str, int, str]]]:
    """Record (operation, numel, dtype) of every collective of minidp."""
    trace: list[tuple[str, int, str]] = []
    module: Any = _collectives
    real = module.dist

    class Door:
        def __getattr__(self, name: str) -> Any:
            target = getattr(real, name)
            if name not in ("all_reduce", "broadcast", "all_gather"):
                return target

            def call(*args: Any, **kwargs: Any) -> Any:
                tensor = args[1] if name == "all_gather" else args[0]
                assert isinstance(tensor, torch.Tensor)
                trace.append((name, tensor.numel(), str(tensor.dtype)))
                return target(*args, **kwargs)

            return call

    module.dist = Door()
    try:
        yield trace
    finally:
        module.dist = real
