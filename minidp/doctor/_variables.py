"""Environment variables that change how ranks communicate, and what each one does."""

from __future__ import annotations

import difflib
from collections.abc import Mapping

from minidp._overrides import OPTIONS, PREFIX

from ._findings import Finding, ok, warning

CHECK = "variables"
# Private to a process or a host: ranks may differ in these.
MAY_DIFFER = ("IFNAME", "_FILE", "_HCA", "CUDA_VISIBLE_DEVICES", "HOSTID")

MEANINGS: Mapping[str, str] = {
    "GLOO_SOCKET_IFNAME": "the network interface that Gloo uses",
    "GLOO_DEVICE_TRANSPORT": "Gloo's transport: TCP, TCP_TLS, UV or IBVERBS",
    "TORCH_GLOO_LAZY_INIT": "1: Gloo connects two ranks when they first talk",
    "TP_SOCKET_IFNAME": "the network interface of RPC (TensorPipe)",
    "NCCL_ALGO": "the algorithms that NCCL may use; best left to NCCL",
    "NCCL_BUFFSIZE": "bytes of NCCL's buffer per channel",
    "NCCL_COLLNET_ENABLE": "1: reductions inside the network switch",
    "NCCL_COMM_BLOCKING": "whether NCCL's calls block",
    "NCCL_CONF_FILE": "a file with further NCCL settings",
    "NCCL_CROSS_NIC": "whether rings may use different adapters on two hosts",
    "NCCL_CUMEM_ENABLE": "whether NCCL allocates with cuMem",
    "NCCL_DEBUG": "what NCCL logs; INFO shows interfaces and rings",
    "NCCL_DEBUG_FILE": "where NCCL logs to",
    "NCCL_DEBUG_SUBSYS": "of which parts NCCL logs",
    "NCCL_DMABUF_ENABLE": "whether GPUDirect RDMA uses DMA-BUF",
    "NCCL_HOSTID": "what NCCL takes for the host's name",
    "NCCL_IB_DISABLE": "1: TCP instead of InfiniBand or RoCE",
    "NCCL_IB_GID_INDEX": "RoCE's global id index",
    "NCCL_IB_HCA": "the InfiniBand adapters that NCCL may use",
    "NCCL_IB_QPS_PER_CONNECTION": "InfiniBand queue pairs per connection",
    "NCCL_IB_RETRY_CNT": "InfiniBand retries before an error",
    "NCCL_IB_SL": "InfiniBand service level",
    "NCCL_IB_TC": "InfiniBand traffic class",
    "NCCL_IB_TIMEOUT": "InfiniBand time before a retry",
    "NCCL_IGNORE_CPU_AFFINITY": "1: NCCL chooses its cores itself",
    "NCCL_LAUNCH_MODE": "how NCCL launches kernels",
    "NCCL_LAUNCH_ORDER_IMPLICIT": "1: orders kernels of several groups on a GPU",
    "NCCL_MAX_CTAS": "most thread blocks of NCCL on a GPU",
    "NCCL_MAX_NCHANNELS": "most channels (GPU cores) of NCCL",
    "NCCL_MIN_CTAS": "fewest thread blocks of NCCL on a GPU",
    "NCCL_MIN_NCHANNELS": "fewest channels (GPU cores) of NCCL",
    "NCCL_NET": "NCCL's network module: Socket, IB or a plugin",
    "NCCL_NET_GDR_LEVEL": "how near a network adapter must be for GPUDirect RDMA",
    "NCCL_NET_PLUGIN": "NCCL's network plugin",
    "NCCL_NSOCKS_PERTHREAD": "sockets per NCCL network thread",
    "NCCL_NTHREADS": "threads of NCCL's kernels",
    "NCCL_NVLS_ENABLE": "whether NVSwitch reduces",
    "NCCL_OOB_NET_IFNAME": "the interface on which NCCL's ranks find each other",
    "NCCL_P2P_DISABLE": "1: GPUs do not copy directly to each other",
    "NCCL_P2P_LEVEL": "how near two GPUs must be for direct copies",
    "NCCL_PROTO": "NCCL's protocols; best left to NCCL",
    "NCCL_PXN_DISABLE": "1: no sending by way of another GPU of the host",
    "NCCL_SHM_DISABLE": "1: no shared memory between processes of a host",
    "NCCL_SOCKET_FAMILY": "IPv4 or IPv6",
    "NCCL_SOCKET_IFNAME": "the network interfaces that NCCL may use",
    "NCCL_SOCKET_NTHREADS": "NCCL's network threads",
    "NCCL_TOPO_FILE": "a file that describes the machine to NCCL",
    "NCCL_TUNER_PLUGIN": "a plugin that chooses NCCL's algorithms",
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "what ends when NCCL fails or times out",
    "TORCH_NCCL_AVOID_RECORD_STREAMS": "keeps NCCL's tensors alive in another way",
    "TORCH_NCCL_BLOCKING_WAIT": "1: waiting for NCCL blocks, and raises when late",
    "TORCH_NCCL_DESYNC_DEBUG": "1: after a timeout, says which rank lags behind",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "1: writes the flight recorder after a timeout",
    "TORCH_NCCL_ENABLE_MONITORING": "0: no thread that ends a stuck process",
    "TORCH_NCCL_ENABLE_TIMING": "1: measures each collective",
    "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC": "seconds until a stuck watchdog ends it all",
    "TORCH_NCCL_HIGH_PRIORITY": "1: NCCL's streams go first",
    "TORCH_NCCL_TRACE_BUFFER_SIZE": "collectives that the flight recorder keeps",
    "TORCH_NCCL_USE_COMM_NONBLOCKING": "1: NCCL's calls do not block",
    "TORCH_CPP_LOG_LEVEL": "what torch's C++ code logs",
    "TORCH_DISTRIBUTED_DEBUG": "INFO or DETAIL: torch checks and logs more",
    "CUDA_LAUNCH_BLOCKING": "1: the CPU waits for every kernel",
    "CUDA_VISIBLE_DEVICES": "the GPUs that this process sees",
    "DDP_SET_LAST_BUCKET_CAP": "1: the small bucket is the last one",
    "MINIDP_NATIVE": "minidp's extension: 0 never, 1 insist, auto if built",
    "OMP_NUM_THREADS": "threads per process",
    **{
        each.variable: f"{each.name} of every DataParallel, whatever the script passes"
        for each in OPTIONS.values()
    },
}
_RENAMED = ("ASYNC_ERROR_HANDLING", "BLOCKING_WAIT", "DESYNC_DEBUG", "ENABLE_TIMING")
_PREFIXES = (
    *("NCCL_", "GLOO_", "TORCH_NCCL_", "TORCH_GLOO_", "TORCH_DISTRIBUTED_"),
    PREFIX,
)
# Settings that make training slower on purpose: (name, value) -> (cost, remedy).
_COSTS = {
    ("CUDA_LAUNCH_BLOCKING", "1"): "kernels no longer overlap with anything",
    ("NCCL_P2P_DISABLE", "1"): "GPUs of one host talk through the host's memory",
    ("NCCL_SHM_DISABLE", "1"): "GPUs of one host talk through the network",
    ("NCCL_IB_DISABLE", "1"): "hosts talk over TCP, also where InfiniBand is there",
    ("TORCH_DISTRIBUTED_DEBUG", "DETAIL"): "every collective is checked beforehand",
}


def relevant(env: Mapping[str, str]) -> dict[str, str]:
    """The variables that this file knows or that look like them, sorted."""
    return {
        name: env[name]
        for name in sorted(env)
        if name in MEANINGS or name.startswith(_PREFIXES)
    }


def judge_variables(env: Mapping[str, str]) -> list[Finding]:
    """A finding per variable that is set, with what it does."""
    findings = [_judge(name, value) for name, value in relevant(env).items()]
    return findings or [ok(CHECK, "no NCCL_*, GLOO_* or debugging variable is set")]


def _judge(name: str, value: str) -> Finding:
    said = f"{name}={value}"
    cost = _COSTS.get((name, value.upper()))
    if cost is not None:
        remedy = f"fine while looking for a fault; else unset {name}"
        return warning(CHECK, f"{said}: {cost}", remedy)
    if name in MEANINGS:
        return ok(CHECK, f"{said}: {MEANINGS[name]}")
    bare = name.removeprefix("NCCL_")
    if name.startswith("NCCL_") and bare in _RENAMED:
        new = f"TORCH_{name}"
        found = f"{said}: torch renamed it {new}"
        return warning(CHECK, found, f"set {new} instead")
    similar = difflib.get_close_matches(name, MEANINGS, n=1, cutoff=0.85)
    if similar:
        found = f"{said}: nobody reads a variable of this name"
        return warning(CHECK, found, f"did you mean {similar[0]}?")
    return ok(CHECK, f"{said}: not known to this doctor")


def judge_equal_variables(of_rank: Mapping[int, Mapping[str, str]]) -> list[Finding]:
    """Whether all ranks have the same settings, names of interfaces excepted."""
    check = "same variables"
    names = sorted({name for variables in of_rank.values() for name in variables})
    findings = []
    for name in names:
        if any(part in name for part in MAY_DIFFER):
            continue
        values = {rank: variables.get(name) for rank, variables in of_rank.items()}
        if len(set(values.values())) > 1:
            rows = (
                f"{value if value is not None else '(not set)'} on rank {rank}"
                for rank, value in values.items()
            )
            findings.append(
                warning(
                    check,
                    f"{name} is {', '.join(rows)}",
                    "start all ranks with the same environment",
                )
            )
    return findings or [ok(check, "equal on all ranks")]
