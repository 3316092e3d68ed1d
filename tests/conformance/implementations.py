"""Which class plays the part of torch's DistributedDataParallel."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel

import minidp
from tests.conformance.placement import leave_out_devices
from tests.support import broken

IMPLEMENTATIONS: dict[str, type[nn.Module]] = {
    "minidp": minidp.DataParallel,
    "torch": DistributedDataParallel,
    "broken-no-reduce": broken.NoReduce,
    "broken-no-sync": broken.NoSyncIgnored,
    "broken-dies": broken.Dies,
    "broken-hangs": broken.Hangs,
}


def bind(name: str, at_instance: Callable[[], None]) -> None:
    """Make this process reach the implementation under every name of torch's class."""
    implementation = IMPLEMENTATIONS[name]
    leave_out_devices(implementation)
    _notice_instances(implementation, at_instance)
    if implementation is DistributedDataParallel:
        return
    _lend_class_helpers(implementation)
    for module in list(sys.modules.values()):
        if module.__name__.split(".")[0] not in ("torch", "__main__"):
            continue
        for attribute, value in list(vars(module).items()):
            if value is DistributedDataParallel:
                setattr(module, attribute, implementation)


def _notice_instances(
    implementation: type[nn.Module], call: Callable[[], None]
) -> None:
    construct = implementation.__init__

    @functools.wraps(construct)
    def notice_and_construct(self: nn.Module, *args: Any, **kwargs: Any) -> None:
        call()
        construct(self, *args, **kwargs)

    implementation.__init__ = notice_and_construct


def _lend_class_helpers(implementation: Any) -> None:
    # What tests and the compiler call on the class, without an instance.
    for attribute, value in vars(DistributedDataParallel).items():
        is_helper = isinstance(value, (staticmethod, classmethod))
        if is_helper and not hasattr(implementation, attribute):
            setattr(implementation, attribute, value)
    if not hasattr(implementation, "_active_ddp_module"):
        implementation._active_ddp_module = None
