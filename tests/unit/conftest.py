"""What unit tests share."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest


@pytest.fixture
def no_gc() -> Iterator[None]:
    """Only reference counts free objects, so a reference cycle shows as a leak."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()
