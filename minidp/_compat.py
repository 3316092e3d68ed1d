"""What third parties look for in torch's DDP, on top of `data_parallel`."""

from __future__ import annotations

from torch.nn.parallel import DistributedDataParallel

from . import data_parallel
from ._compiling import run_splitting


class DataParallel(data_parallel.DataParallel):
    __doc__ = data_parallel.DataParallel.__doc__
    __module__ = "minidp"

    _run_module = run_splitting


DistributedDataParallel.register(DataParallel)
