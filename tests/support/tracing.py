"""The collectives that minidp issues, as seen at its only door to torch.distributed.

Sums of buckets in shared memory are among them: they replace an all-reduce each.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch

from minidp import comm
from minidp.comm import collectives
from minidp.core import exchange
from minidp.shared_memory import SharedBuffer

Trace = list[tuple[str, int, str]]


@contextmanager
def collective_trace() -> Iterator[Trace]:
    """Yield a list of (operation, numel, dtype) that each collective is added to."""
    trace: Trace = []
    # The module under another name, so that only minidp's own calls are recorded.
    real: Any = vars(collectives)["dist"]
    door = mock.Mock(wraps=real)
    door.ProcessGroup = real.ProcessGroup  # for isinstance
    door._DEFAULT_FIRST_BUCKET_BYTES = real._DEFAULT_FIRST_BUCKET_BYTES
    door.all_gather = _recording(trace, "all_gather", real.all_gather, 1)
    reduce = _recording(trace, "all_reduce", collectives.all_reduce, 0)
    broadcast = _recording(trace, "broadcast", collectives.start_broadcast, 0)
    with ExitStack() as stack:
        patch = mock.patch.object(collectives, "start_broadcast", broadcast)
        stack.enter_context(patch)
        stack.enter_context(mock.patch.object(collectives, "dist", door))
        gather = _recording(trace, "all_gather", collectives.start_gathering, 0)
        stack.enter_context(mock.patch.object(exchange, "start_gathering", gather))
        share = SharedBuffer.all_reduce
        shared = _recording(trace, "all_reduce", share, 0, lambda buffer: buffer.values)
        patch = mock.patch.object(SharedBuffer, "all_reduce", shared)
        stack.enter_context(patch)
        for module in (comm, exchange):
            stack.enter_context(mock.patch.object(module, "all_reduce", reduce))
        yield trace


def _recording(
    trace: Trace,
    name: str,
    target: Callable[..., Any],
    position: int,
    tensor_of: Callable[[Any], Any] = lambda found: found,
) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        tensor = tensor_of(args[position])
        assert isinstance(tensor, torch.Tensor)
        trace.append((name, tensor.numel(), str(tensor.dtype)))
        return target(*args, **kwargs)

    return call
