"""Ranks on the simulated accelerator, in the place of those on the CPU."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from minidp import native
from tests.support import sim
from tests.support.pool import Pool


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    """Two rank processes, each with simulated devices of its own."""
    try:
        sim.build()
    except sim.NotBuilt as error:
        pytest.skip(str(error))
    ranks = Pool(2, backend=f"cpu:gloo,sim:{sim.BACKEND}", devices=["sim:0"] * 2)
    ranks.start()
    yield ranks
    ranks.close()


@pytest.fixture
def _extension() -> None:
    """Skip a test that proves nothing without the extension."""
    if native.library() is None:
        pytest.skip("the extension is not in use")
