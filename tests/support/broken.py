"""Wrappers that are wrong on purpose: a suite that passes them proves nothing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from minidp import DataParallel


class NoReduce(DataParallel):
    """Never averages gradients."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        with super().no_sync():
            return super().forward(*args, **kwargs)


class NoSyncIgnored(DataParallel):
    """Averages gradients inside no_sync(), too."""

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        yield
