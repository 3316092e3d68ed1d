"""Collections of garbage that do not look at torch and thousands of tests."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def few_objects() -> Iterator[None]:
    """Let collections look only at what is made inside, which takes microseconds.

    At the end garbage is freed that was hidden so, and all that is left is frozen, as
    `conftest.py` and the ranks of a pool do it before the first test.
    """
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
        gc.collect()
        gc.freeze()
