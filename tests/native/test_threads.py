"""The native hooks of several objects in several threads; see tsan.sh."""

from __future__ import annotations

from typing import Any

import pytest

from tests.many_objects.test_threads import OPTIONS, hammer, in_threads


@pytest.mark.parametrize("name", OPTIONS)
def test_objects_come_and_go(either_kernels: str, lone_group: Any, name: str) -> None:
    jobs = [
        lambda seed=seed: hammer(lone_group, seed, OPTIONS[name]) for seed in range(4)
    ]
    assert in_threads(*jobs) == [0, 0, 0, 0]
