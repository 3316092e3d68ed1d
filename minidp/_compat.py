"""What third parties look for in torch's DDP, on top of `data_parallel`."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from . import data_parallel
from ._untraced import untraced_itself


class DataParallel(data_parallel.DataParallel):
    __doc__ = data_parallel.DataParallel.__doc__
    __module__ = "minidp"

    @untraced_itself
    def _run_module(self, inputs: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Graphs that dynamo compiles in here are split where our buckets end.

        It asks torch's class whose forward is running, and reads ``bucket_bytes_cap``
        from the answer.
        """
        before = DistributedDataParallel._active_ddp_module
        DistributedDataParallel._active_ddp_module = self
        try:
            return _call(self.module, inputs, kwargs)
        finally:
            DistributedDataParallel._active_ddp_module = before


def _call(module: nn.Module, inputs: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Where dynamo starts; in a frame of torch.nn itself it would not."""
    return module(*inputs, **kwargs)


DistributedDataParallel.register(DataParallel)
