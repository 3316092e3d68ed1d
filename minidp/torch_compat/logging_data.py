"""``_get_ddp_logging_data()``: the facts that torch's DDP logs, under its keys.

Torch also samples iterations, and logs how long they took. `minidp.record` does that
here, in more detail; nothing in this file measures a step.
"""

from __future__ import annotations

import logging
import os
import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from minidp.accelerator import to_host
from minidp.comm import backend_name
from minidp.core import Observer, Reducer

logger = logging.getLogger("minidp")
CPP_NAMES = {
    torch.float32: "float",
    torch.float64: "double",
    torch.float16: "c10::Half",
    torch.bfloat16: "c10::BFloat16",
    torch.complex64: "c10::complex<float>",
    torch.complex128: "c10::complex<double>",
}
# Environment variables that are logged, in lower case and without TORCH_, by backend.
VARIABLES = {
    "": ("CUDA_VISIBLE_DEVICES", "MASTER_ADDR", "MASTER_PORT"),
    "gloo": ("GLOO_SOCKET_IFNAME",),
    "nccl": (
        "NCCL_SOCKET_IFNAME",
        "TORCH_NCCL_BLOCKING_WAIT",
        "TORCH_NCCL_ASYNC_ERROR_HANDLING",
        "NCCL_DEBUG",
        "NCCL_NTHREADS",
        "NCCL_IB_TIMEOUT",
    ),
}


class LoggingData:
    """The facts of a `DataParallel` for ``_get_ddp_logging_data()``: its `logger`.

    The constructor collects options and sizes, and `to_dict` adds what is known later.
    """

    def __init__(self, ddp: Any) -> None:
        self._ddp: Any = weakref.proxy(ddp)
        self.error = ""  # the last error of the wrapper
        self.comm_hook = ""  # a name to log instead of the hook's own
        self._facts = _facts_of(ddp)

    def note_error(self, error: Exception) -> None:
        """Store type and text of the wrapper's last error, for `to_dict`."""
        # The error itself has a traceback, which would keep the wrapper alive.
        self.error = f"{type(error)}: {error}"

    def to_dict(self) -> dict[str, Any]:
        """Return all facts, under torch's keys.

        Flags such as ``static_graph`` and ``has_error`` have no key while they are
        unset.
        """
        ddp, reducer = self._ddp, self._ddp._reducer
        has_rebuilt = reducer.rebuild_policy.has_rebuilt
        data = _Facts(self._facts, has_rebuilt_buckets=int(has_rebuilt))
        data["iteration"] = reducer.ledger.armed  # synchronised forwards so far
        queue = reducer.queue
        data["num_buckets_reduced"] = len(queue.buckets) - len(queue.skipped)
        if has_rebuilt:
            plans = queue.layout.buckets
            data["rebuilt_bucket_sizes"] = _listed(plan.nbytes for plan in plans)
            data["rebuilt_per_bucket_param_indices"] = ", ".join(
                " ".join(map(str, plan.indices)) for plan in plans
            )
        hook = queue.averaging.comm_hook
        if queue.config.static_graph:
            data["static_graph"] = 1
        if hook is not None:
            data["comm_hook"] = self.comm_hook or hook.name
        if ddp._has_begun_join:
            data["join_uneven_inputs"] = 1
        if error := self.error or reducer.failure:
            data |= {"has_error": 1, "error": error}
        if ddp.find_unused_parameters and reducer.ledger.armed:
            data["can_set_static_graph"] = int(reducer.mode.is_steady)
        return data


class _Facts(dict[str, Any]):
    """A dict whose error about a missing key says where its value can be had."""

    def __missing__(self, key: str) -> Any:
        raise KeyError(
            f"{key!r} is not in minidp's logging data, which hold nothing that is "
            "measured in single iterations. What to do: read the times of a step from "
            "minidp.record(model) or minidp.watch_speed(model)."
        )


class LogsUnused(Observer):
    """Log unused parameters at the end of each synchronised backward.

    Torch does so with ``find_unused_parameters`` and TORCH_DISTRIBUTED_DEBUG=INFO or
    DETAIL, so this observer is made only then (`logs_unused`).
    """

    def __init__(self, reducer: Reducer) -> None:
        self._queue, self._names = reducer.queue, reducer.names

    def finished(self) -> None:
        """Log the names of parameters that no rank has used, if there are any."""
        counts = to_host(self._queue.used_map.last_counts).tolist()
        unused = [name for name, n in zip(self._names, counts, strict=True) if not n]
        if unused:
            names = ", ".join(unused)
            logger.info(
                "[rank %d] unused parameters: %s", self._queue.communicator.rank, names
            )


def logs_unused(*, find_unused_parameters: bool) -> bool:
    """Return whether torch would log unused parameters in each step."""
    level = os.environ.get("TORCH_DISTRIBUTED_DEBUG", "OFF").upper()
    return find_unused_parameters and level in ("INFO", "DETAIL")


def _facts_of(ddp: Any) -> dict[str, Any]:
    """Return what is known at construction: options, sizes, environment."""
    reducer: Reducer = ddp._reducer
    group = ddp.process_group
    backend = backend_name(group)
    dtypes = sorted({CPP_NAMES.get(p.dtype, str(p.dtype)) for p in reducer.params})
    has_sync_bn = any(isinstance(m, nn.SyncBatchNorm) for m in ddp.module.modules())
    facts: dict[str, Any] = {
        "backend_name": backend,
        "world_size": group.size(),
        "rank": group.rank(),
        "module_name": type(ddp.module).__name__,
        "device_ids": _listed(ddp.device_ids or ()),
        "output_device": -1 if ddp.output_device is None else ddp.output_device,
        "num_parameter_tensors": len(reducer.params),
        "total_parameter_size_bytes": sum(p.nbytes for p in reducer.params),
        "dtypes": _listed(dtypes),
        "bucket_cap_bytes": ddp.bucket_bytes_cap,
        "bucket_sizes": _listed(p.nbytes for p in reducer.queue.layout.buckets),
        "broadcast_buffers": int(ddp.forward_sync_buffers),
        "find_unused_parameters": int(ddp.find_unused_parameters),
        "gradient_as_bucket_view": int(ddp.gradient_as_bucket_view),
        "is_multi_device_module": int(ddp.is_multi_device_module),
        "has_sync_bn": int(has_sync_bn),
        "torch_distributed_debug": os.environ.get("TORCH_DISTRIBUTED_DEBUG", "N/A"),
    }
    for kind, names in VARIABLES.items():
        for name in names if kind in backend else ():
            facts[name.removeprefix("TORCH_").lower()] = os.environ.get(name, "N/A")
    if "gloo" in backend:
        facts |= {"gloo_device_transport": "N/A", "gloo_num_threads": 2}
    return facts


def _listed(values: Iterable[object]) -> str:
    return ", ".join(map(str, values))
