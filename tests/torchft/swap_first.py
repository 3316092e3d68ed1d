"""A plugin of pytest that prepares a process for torchft's own tests.

It replaces torch's DDP before torchft is imported. It also mends a race of those tests:
their ranks are threads that share one random generator, and each seeds it and builds
its model under a lock. Batches are drawn without the lock, so a thread that already
trains can draw between another's seed and its model. The two models then start apart,
and a test that skips the first synchronization fails, whatever DDP does. Here batches
are drawn under the same lock.
"""

import functools

import pytest
import torch

import minidp

minidp.swap()


def _under(lock, draw):
    @functools.wraps(draw)
    def locked(*arguments, **options):
        with lock:
            return draw(*arguments, **options)

    return locked


@pytest.fixture(autouse=True)
def batches_are_drawn_under_the_lock(request, monkeypatch):
    lock = getattr(request.module, "INIT_LOCK", None)
    if lock is not None:
        for name in ("rand", "randint"):
            monkeypatch.setattr(torch, name, _under(lock, getattr(torch, name)))
