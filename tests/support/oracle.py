"""What the installed torch's DDP can be compared with.

minidp supports torch from 2.12; some arguments of DDP are younger than that.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

TAKES = frozenset(inspect.signature(DistributedDataParallel).parameters)


def skip_unless_torch_takes(arguments: Iterable[str]) -> None:
    """Skip the running test, with a reason, if the oracle lacks an argument."""
    lacking = sorted(set(arguments) - TAKES)
    if lacking:
        pytest.skip(f"torch {torch.__version__}'s DDP has no {', '.join(lacking)}")
