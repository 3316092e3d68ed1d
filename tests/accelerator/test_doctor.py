"""``minidp doctor`` on a device whose backend is not NCCL."""

from __future__ import annotations

import pytest

from tests.doctor.test_processes import failures, found, play
from tests.support import sim

pytestmark = [pytest.mark.fault, pytest.mark.fresh]

HAS_DEVICE = "from tests.support import sim; sim.load()"


def test_it_measures_the_backend_of_the_device():
    try:
        sim.build()
    except sim.NotBuilt as error:
        pytest.skip(str(error))
    codes, (report, _) = play(HAS_DEVICE, HAS_DEVICE)
    assert failures(report) == []
    assert codes == [0, 0]
    assert found(report, "backends")[0].endswith("simccl would be used to train here")
    assert len(found(report, "all-reduce, SIMCCL")) == 4
    assert found(report, "gradients, SIMCCL")
    assert found(report, "one GPU each") == ["every process has its own"]
    assert not any("NCCL may use" in each for each in found(report, "interfaces"))
