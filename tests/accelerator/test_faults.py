"""A rank that does not come, on a device where waits do not let the host wait."""

from __future__ import annotations

import logging

import pytest
import torch

from minidp import DataParallel
from tests.accelerator.training import Run, net
from tests.support import sim
from tests.support.pool import Pool

pytestmark = [pytest.mark.fault, pytest.mark.fresh]


@pytest.fixture
def fresh(pool):
    """New ranks on the device, whose groups wait longer than the limit for hangs."""
    ranks = Pool(
        *(2, 60.0),
        backend=f"cpu:gloo,sim:{sim.BACKEND}",
        devices=["sim:0"] * 2,
        subgroups=(),
    )
    yield ranks
    ranks.close()


def rank_1_stops_earlier(ctx, log):
    logging.getLogger("minidp").addHandler(logging.FileHandler(log))
    run = Run(ctx, DataParallel, "sim")
    model = run.wrap(net().to(ctx.device), hang_timeout=2)
    run.train(model, 3 if ctx.rank else 4)
    torch.accelerator.synchronize()


def test_a_missing_rank_is_named_within_the_limit(fresh, tmp_path):
    log = tmp_path / "log"
    first, second = fresh.run(rank_1_stops_earlier, 2, log, errors="return")
    assert second is None
    # A kernel that waits for a rank cannot be given up, so the process ends.
    assert first.exit_code == 1
    said = log.read_text()
    assert "did not finish within its limit" in said
    assert "Missing: rank 1." in said
