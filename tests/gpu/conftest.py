"""Ranks on GPUs."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest
import torch

from tests.gpu import places
from tests.gpu.places import Place, Pool, Ranks

why_no_extension = cache(places.why_no_extension)
build_extension = cache(places.build_extension)


@pytest.fixture(scope="session")
def gpu_pool() -> Iterator[Any]:
    """``gpu_pool(place)``: its processes, started when first needed."""
    pools: list[Pool] = []

    @cache
    def at(place: Place) -> Pool:
        pools.append(places.new_pool(place))
        return pools[-1]

    yield at
    for pool in pools:
        pool.close()


@pytest.fixture
def ranks(request: pytest.FixtureRequest) -> Ranks:
    """Ranks at the place that `places.at` names."""
    place: Place = request.param
    if not place.on_gpu:
        return Ranks(place, request.getfixturevalue("pool"))
    # Without a CUDA context: those are for the ranks.
    num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    reason = places.why_not(place, num_gpus, why_no_extension)
    if reason:
        pytest.skip(reason)
    error = build_extension() if place.is_native else ""
    if error:
        pytest.fail(f"the extension cannot be built: {error}", pytrace=False)
    return Ranks(place, request.getfixturevalue("gpu_pool")(place))
