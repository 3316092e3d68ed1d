"""``_get_ddp_logging_data()``: the facts that torch's DDP logs, under its keys.

Times and what else changes are taken in the first ten iterations and then in every
``rate``-th one, and told from the start of the next synchronised forward on. For them a
backward ends with its last full bucket.
"""

from __future__ import annotations

import os
import time
import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ._groups import backend_name
from .trace import Moment, Recorder

if TYPE_CHECKING:
    from .data_parallel import DataParallel

ALWAYS = 10  # iterations that are sampled whatever the rate
CPP_NAMES = {
    torch.float32: "float",
    torch.float64: "double",
    torch.float16: "c10::Half",
    torch.bfloat16: "c10::BFloat16",
    torch.complex64: "c10::complex<float>",
    torch.complex128: "c10::complex<double>",
}
TIMES = (
    "forward_compute_time",
    "backward_compute_time",
    "backward_comm_time",
    "backward_compute_comm_overlap_time",
)
UNTOLD = {  # by torch
    "forward_compute_time_end",
    "backward_compute_comm_overlap_time_start",
    "backward_compute_comm_overlap_time_end",
}
ENV = {  # key: environment variable
    "cuda_visible_devices": "CUDA_VISIBLE_DEVICES",
    "master_addr": "MASTER_ADDR",
    "master_port": "MASTER_PORT",
    "torch_distributed_debug": "TORCH_DISTRIBUTED_DEBUG",
}
ENV_OF_BACKEND = {
    "gloo": {"gloo_socket_ifname": "GLOO_SOCKET_IFNAME"},
    "nccl": {
        "nccl_socket_ifname": "NCCL_SOCKET_IFNAME",
        "nccl_blocking_wait": "TORCH_NCCL_BLOCKING_WAIT",
        "nccl_async_error_handling": "TORCH_NCCL_ASYNC_ERROR_HANDLING",
        "nccl_debug": "NCCL_DEBUG",
        "nccl_nthreads": "NCCL_NTHREADS",
        "nccl_ib_timeout": "NCCL_IB_TIMEOUT",
    },
}


class LoggingData:
    """What one `DataParallel` has to tell.

    Args:
        ddp: the object, of which only a weak reference is kept.
    """

    def __init__(self, ddp: DataParallel) -> None:
        self._ddp = weakref.ref(ddp)
        self.error = ""
        self.comm_hook = ""  # a name that is not the hook's own
        self._facts: dict[str, Any] = {}
        self._runtime: dict[str, Any] = {"iteration": 0}
        self._rate = 100
        self._iteration = 0  # synchronised forwards so far
        self._recorder = Recorder(capacity=1 << 16)
        self._forward = (0, 0)  # start and end of the last one, ns
        self._sums = dict.fromkeys(TIMES, 0)
        self._num_samples = 0

    # -- what happens ------------------------------------------------------------------

    def describe(self) -> None:
        """The object is built."""
        ddp = self._ddp()
        if ddp is not None:
            self._facts = facts_of(ddp)

    @contextmanager
    def noting_errors(self) -> Iterator[None]:
        """Errors raised inside are also told."""
        try:
            yield
        except Exception as error:
            self.error = f"{type(error)}: {error}"  # no traceback: it would keep us
            raise

    def set_rate(self, rate: int) -> None:
        """Sample every ``rate``-th iteration.

        Raises:
            ValueError: less than 1.
        """
        if rate < 1:
            raise ValueError(
                "DDP runtime logging sample rate should be equal or greater than 1, "
                f"but got {rate}."
            )
        self._rate = rate

    def forward_begins(self) -> None:
        """A synchronised forward begins: the iteration before it is complete."""
        ddp = self._ddp()
        if ddp is None:
            return
        if self._iteration and self._is_sampled(self._iteration):
            self._runtime = self._observe(ddp)
        self._recorder.clear()
        is_sampled = self._is_sampled(self._iteration + 1)
        tracer = ddp._reducer.pipeline.tracer
        tracer.bucket_recorder = self._recorder if is_sampled else None
        self._forward = (time.perf_counter_ns(), 0)

    def forward_ends(self) -> None:
        """It returned; a backward will follow."""
        self._iteration += 1
        self._forward = (self._forward[0], time.perf_counter_ns())

    def _is_sampled(self, iteration: int) -> bool:
        return iteration <= ALWAYS or iteration % self._rate == 0

    # -- what is told ------------------------------------------------------------------

    def to_dict(self) -> dict[str, Any]:
        """All keys and values."""
        ddp = self._ddp()
        return {**self._facts, **self._runtime, **(self._states(ddp) if ddp else {})}

    def ready_times(self) -> list[int]:
        """Nanoseconds from the end of the last forward to each gradient.

        Zeros unless `DataParallel.set_recorder` was called: to note every gradient
        costs more than to hook it.
        """
        ddp = self._ddp()
        recorder = None if ddp is None else ddp._reducer.pipeline.tracer.recorder
        times = {
            event.index: event.time_ns - self._forward[1]
            for event in recorder or ()
            if event.moment is Moment.PARAM_READY
        }
        return [times.get(i, 0) for i in range(self._facts["num_parameter_tensors"])]

    def _states(self, ddp: DataParallel) -> dict[str, Any]:
        """Keys that are there only if there is something to say."""
        states: dict[str, Any] = {}
        hook = ddp._reducer.pipeline.averaging.comm_hook
        if ddp.static_graph:
            states["static_graph"] = 1
        if hook is not None:
            states["comm_hook"] = self.comm_hook or hook.name
        if ddp._has_joined:
            states["join_uneven_inputs"] = 1
        error = self.error or ddp._reducer.failure
        if error:
            states |= {"has_error": 1, "error": error}
        if ddp.find_unused_parameters and self._iteration:
            states["can_set_static_graph"] = int(ddp._reducer.expected.is_steady)
        return states

    def _observe(self, ddp: DataParallel) -> dict[str, Any]:
        """The iteration that just ended."""
        reducer = ddp._reducer
        pipeline = reducer.pipeline
        rebuilt = pipeline.layout.buckets if reducer.ready_order.has_rebuilt else ()
        counts = pipeline.used_map.last_counts.tolist()
        unused = [i for i, n in enumerate(counts) if not n]
        data = {
            "iteration": self._iteration,
            "num_buckets_reduced": len(pipeline.buckets) - len(pipeline.skipped),
            "unused_parameter_size": sum(
                reducer.params[i].nbytes
                for i in unused
                if reducer.expected.shares_used_map
            ),
            "has_rebuilt_buckets": int(reducer.ready_order.has_rebuilt),
            "prev_iteration_grad_ready_order_indices": _listed(reducer.countdown.ready),
        }
        if rebuilt:
            data["rebuilt_bucket_sizes"] = _listed(plan.nbytes for plan in rebuilt)
            data["rebuilt_per_bucket_param_indices"] = ", ".join(
                " ".join(map(str, plan.indices)) for plan in rebuilt
            )
        return data | self._times()

    def _times(self) -> dict[str, int]:
        """Durations, their averages, and of some where they begin and end."""
        times = {
            moment: [e.time_ns for e in self._recorder if e.moment is moment]
            for moment in (Moment.FULL, Moment.LAUNCHED, Moment.DONE)
        }
        if not all(times.values()):
            return dict.fromkeys(TIMES, 0)
        start, end = self._forward
        last_gradient = max(times[Moment.FULL])
        first_launch, last_done = min(times[Moment.LAUNCHED]), max(times[Moment.DONE])
        spans = [
            (start, end),
            (end, last_gradient),
            (first_launch, last_done),
            (first_launch, max(first_launch, min(last_gradient, last_done))),
        ]
        data: dict[str, int] = {}
        self._num_samples += 1
        for key, (begin, finish) in zip(TIMES, spans, strict=True):
            data[key] = finish - begin
            self._sums[key] += finish - begin
            data[f"avg_{key}"] = self._sums[key] // self._num_samples
            data |= {f"{key}_start": begin, f"{key}_end": finish}
        return {key: value for key, value in data.items() if key not in UNTOLD}


def facts_of(ddp: DataParallel) -> dict[str, Any]:
    """What is known when the object is built."""
    reducer, group = ddp._reducer, ddp.process_group
    backend = backend_name(group)
    variables = dict(ENV)
    for name, more in ENV_OF_BACKEND.items():
        if name in backend:
            variables |= more
    facts: dict[str, Any] = {
        "backend_name": backend,
        "world_size": group.size(),
        "rank": group.rank(),
        "module_name": type(ddp.module).__name__,
        "device_ids": _listed(ddp.device_ids or ()),
        "output_device": -1 if ddp.output_device is None else ddp.output_device,
        "num_parameter_tensors": len(reducer.params),
        "total_parameter_size_bytes": sum(p.nbytes for p in reducer.params),
        "dtypes": _listed(
            sorted({CPP_NAMES.get(p.dtype, str(p.dtype)) for p in reducer.params})
        ),
        "bucket_cap_bytes": ddp.bucket_bytes_cap,
        "bucket_sizes": _listed(p.nbytes for p in reducer.pipeline.layout.buckets),
        "broadcast_buffers": int(ddp.forward_sync_buffers),
        "find_unused_parameters": int(ddp.find_unused_parameters),
        "gradient_as_bucket_view": int(ddp.gradient_as_bucket_view),
        "is_multi_device_module": int(ddp.is_multi_device_module),
        "has_sync_bn": int(
            any(isinstance(m, nn.SyncBatchNorm) for m in ddp.module.modules())
        ),
    }
    facts |= {key: os.environ.get(name, "N/A") for key, name in variables.items()}
    if "gloo" in backend:
        facts |= {"gloo_device_transport": "N/A", "gloo_num_threads": 2}
    return facts


def _listed(values: Iterable[object]) -> str:
    return ", ".join(map(str, values))
