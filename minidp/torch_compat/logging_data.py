"""``_get_ddp_logging_data()``: the facts that torch's DDP logs, under its keys.

Times are those of the last sampled iteration that another synchronised forward has
followed. A backward counts as ended when its last bucket is full.
"""

from __future__ import annotations

import logging
import os
import time
import weakref
from collections import Counter
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from minidp.comm import backend_name
from minidp.core import Observer, Reducer
from minidp.trace import Moment, StepEvent

logger = logging.getLogger("minidp")
ALWAYS = 10  # first iterations, sampled at any rate
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
    """Collect a `DataParallel`'s data for ``_get_ddp_logging_data()``: its `logger`.

    The constructor collects options and sizes, and starts nothing. During a sampled
    iteration this is a `Listener` of the reducer's tracer. `to_dict` adds the flags.
    """

    def __init__(self, ddp: Any) -> None:
        self._ddp: Any = weakref.proxy(ddp)
        self.error = ""
        self.comm_hook = ""  # a name to log instead of the hook's own
        self._facts = _facts_of(ddp)
        self._runtime: dict[str, Any] = {"iteration": 0}
        self._rate = 100
        self._iteration = 0  # synchronised forwards so far
        self._bucket_times: dict[Moment, list[int]] = {}  # ns, of this iteration
        self._begin = self._end = 0  # of the last forward, ns
        self._sums: Counter[str] = Counter()  # of the times in all samples
        self._num_samples = 0

    def note(self, moment: Moment, bucket: int) -> None:
        """Append the present time to the list of ``moment``, whatever the bucket."""
        self._bucket_times.setdefault(moment, []).append(time.perf_counter_ns())

    def enter(self, phase: StepEvent) -> None:
        """Do nothing: phases are not logged."""

    def note_error(self, error: Exception) -> None:
        """Store type and text of the wrapper's last error, which `to_dict` returns."""
        self.error = f"{type(error)}: {error}"  # no traceback: it would keep us

    def set_rate(self, rate: int) -> None:
        """Sample iterations 1 to 10, and later each ``rate``-th; ValueError if < 1."""
        if rate < 1:
            raise ValueError(
                "DDP runtime logging sample rate should be equal or greater than 1, "
                f"but got {rate}."
            )
        self._rate = rate

    def forward_begins(self) -> None:
        """Begin a synchronised forward: store data of the iteration before, if sampled.

        Not if that forward raised. Listen to the tracer during this iteration only if
        it is sampled. May wait for the used-map's exchange, and for the device.
        """
        # 0: no forward yet, or the last one raised, and its data are stored already.
        if self._end and self._is_sampled(self._iteration):
            self._runtime = {**self._buckets(), **self._times()}
        self._bucket_times.clear()
        tracer = self._ddp._reducer.queue.tracer
        is_sampled = self._is_sampled(self._iteration + 1)
        (tracer.add if is_sampled else tracer.remove)(self)
        self._begin, self._end = time.perf_counter_ns(), 0

    def forward_ends(self) -> None:
        """Count a synchronised forward that returned, and store its end time."""
        self._iteration += 1
        self._end = time.perf_counter_ns()

    def _is_sampled(self, iteration: int) -> bool:
        return iteration <= ALWAYS or iteration % self._rate == 0

    def to_dict(self) -> dict[str, Any]:
        """Return data by torch's keys: facts of construction, last sample, flags now.

        A flag (static graph, hook, join, error) has no key while it is not set.
        """
        ddp, reducer = self._ddp, self._ddp._reducer
        data = {**self._facts, **self._runtime}
        hook = reducer.queue.averaging.comm_hook
        if ddp._reducer.queue.config.static_graph:
            data["static_graph"] = 1
        if hook is not None:
            data["comm_hook"] = self.comm_hook or hook.name
        if ddp._has_begun_join:
            data["join_uneven_inputs"] = 1
        if error := self.error or reducer.failure:
            data |= {"has_error": 1, "error": error}
        if ddp.find_unused_parameters and self._iteration:
            data["can_set_static_graph"] = int(reducer.expected.is_steady)
        return data

    def _buckets(self) -> dict[str, Any]:
        """Return buckets, ready order, unused bytes of the iteration before; may wait.

        Under torch's keys. Unused bytes, of parameters that no rank used, are 0 unless
        ``find_unused_parameters``.
        """
        reducer = self._ddp._reducer
        queue, has_rebuilt = reducer.queue, reducer.rebuild_policy.has_rebuilt
        unused = 0
        if reducer.expected.shares_used_map:  # else not: it may wait for a device
            counts = queue.used_map.last_counts.tolist()
            pairs = zip(reducer.params, counts, strict=True)
            unused = sum(param.nbytes for param, count in pairs if not count)
        data = {
            "iteration": self._iteration,
            "num_buckets_reduced": len(queue.buckets) - len(queue.skipped),
            "unused_parameter_size": unused,
            "has_rebuilt_buckets": int(has_rebuilt),
            "prev_iteration_grad_ready_order_indices": _listed(reducer.pending.ready),
        }
        if has_rebuilt:
            plans = queue.layout.buckets
            data["rebuilt_bucket_sizes"] = _listed(plan.nbytes for plan in plans)
            data["rebuilt_per_bucket_param_indices"] = ", ".join(
                " ".join(map(str, plan.indices)) for plan in plans
            )
        return data

    def _times(self) -> dict[str, int]:
        """Add times of the iteration before to the averages; return ns by torch's keys.

        Durations, their averages, begins and ends. If no bucket's events were received:
        four durations of 0, and nothing is added.
        """
        times = self._bucket_times
        names = (
            "forward_compute_time",
            "backward_compute_time",
            "backward_comm_time",
            "backward_compute_comm_overlap_time",
        )
        if not times.keys() >= {Moment.FULL, Moment.LAUNCHED, Moment.DONE}:
            return dict.fromkeys(names, 0)
        computed, done = max(times[Moment.FULL]), max(times[Moment.DONE])
        launched = min(times[Moment.LAUNCHED])
        begins = self._begin, self._end, launched, launched
        ends = self._end, computed, done, max(launched, min(computed, done))
        self._num_samples += 1
        data: dict[str, int] = {}
        for name, begin, end in zip(names, begins, ends, strict=True):
            self._sums[name] += end - begin
            data[name] = end - begin
            data[f"avg_{name}"] = self._sums[name] // self._num_samples
            data |= {f"{name}_start": begin, f"{name}_end": end}
        not_logged = (f"{names[0]}_end", f"{names[3]}_start", f"{names[3]}_end")
        return {key: data[key] for key in data if key not in not_logged}  # by torch


class LogsUnused(Observer):
    """Log unused parameters at the end of each synchronised backward.

    An observer, made only for ``find_unused_parameters`` together with
    TORCH_DISTRIBUTED_DEBUG=INFO or DETAIL (`logs_unused`).
    """

    def __init__(self, reducer: Reducer) -> None:
        self._queue, self._names = reducer.queue, reducer.names

    def finished(self) -> None:
        """Log names of parameters that no rank used, if any; wait for the used-map."""
        counts = self._queue.used_map.last_counts.tolist()
        unused = [name for name, n in zip(self._names, counts, strict=True) if not n]
        if unused:
            names = ", ".join(unused)
            logger.info(
                "[rank %d] unused parameters: %s", self._queue.communicator.rank, names
            )


def logs_unused(*, find_unused_parameters: bool) -> bool:
    """Return whether unused parameters are to be logged in each step, as by torch."""
    level = os.environ.get("TORCH_DISTRIBUTED_DEBUG", "OFF").upper()
    return find_unused_parameters and level in ("INFO", "DETAIL")


def _facts_of(ddp: Any) -> dict[str, Any]:
    """Return the logging data known at construction: options, sizes, environment."""
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
