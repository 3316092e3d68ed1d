"""Wrappers that are wrong on purpose: a suite that passes them proves nothing."""

from __future__ import annotations

import os
import signal
import threading
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


class Dies(DataParallel):
    """Takes one rank down with it, as a bug in native code would."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.process_group.rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)


class Hangs(DataParallel):
    """One rank never comes back from its constructor."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.process_group.rank() == 1:
            threading.Event().wait()
