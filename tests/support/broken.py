"""Wrappers that are wrong on purpose: a suite that passes them proves nothing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from minidp import DataParallel


class NoReduce(DataParallel):
    """Replicas start equal and then never hear of each other."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        with super().no_sync():
            return super().forward(*args, **kwargs)


class NoSyncIgnored(DataParallel):
    """Averages gradients also where it was told not to."""

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        yield
