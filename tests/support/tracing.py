"""The collectives that minidp issues, as seen at its only door to torch.distributed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch

from minidp import _averaging, _collectives, _used_map

Trace = list[tuple[str, int, str]]


@contextmanager
def collective_trace() -> Iterator[Trace]:
    """Record (operation, numel, dtype) of every collective of minidp."""
    trace: Trace = []
    # The module under another name, so that only minidp's own calls are recorded.
    real: Any = vars(_collectives)["dist"]
    door = mock.Mock(wraps=real)
    door.ProcessGroup = real.ProcessGroup  # for isinstance
    door._DEFAULT_FIRST_BUCKET_BYTES = real._DEFAULT_FIRST_BUCKET_BYTES
    door.all_gather = _recording(trace, "all_gather", real.all_gather, 1)
    reduce = _recording(trace, "all_reduce", _collectives.all_reduce, 0)
    broadcast = _recording(trace, "broadcast", _collectives.start_broadcast, 0)
    with ExitStack() as stack:
        patch = mock.patch.object(_collectives, "start_broadcast", broadcast)
        stack.enter_context(patch)
        stack.enter_context(mock.patch.object(_collectives, "dist", door))
        gather = _recording(trace, "all_gather", _collectives.start_gathering, 0)
        stack.enter_context(mock.patch.object(_used_map, "start_gathering", gather))
        for module in (_averaging, _used_map):
            stack.enter_context(mock.patch.object(module, "all_reduce", reduce))
        yield trace


def _recording(
    trace: Trace, name: str, target: Callable[..., Any], position: int
) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        tensor = args[position]
        assert isinstance(tensor, torch.Tensor)
        trace.append((name, tensor.numel(), str(tensor.dtype)))
        return target(*args, **kwargs)

    return call
