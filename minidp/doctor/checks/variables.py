"""Explain environment variables of communication; compare them between ranks."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any

from minidp.config import OPTIONS, PREFIX
from minidp.doctor.findings import Finding, failed, ok, warning
from minidp.doctor.words import differing, join

# Settings of one process or host, which may differ between ranks.
_MAY_DIFFER = ("IFNAME", "_FILE", "_HCA", "CUDA_VISIBLE_DEVICES", "HOSTID")

MEANINGS: Mapping[str, str] = {
    "GLOO_SOCKET_IFNAME": "the network interface that Gloo uses",
    "GLOO_DEVICE_TRANSPORT": "Gloo's transport: TCP, TCP_TLS, UV or IBVERBS",
    "TORCH_GLOO_LAZY_INIT": "1: Gloo connects two ranks when they first talk",
    "TP_SOCKET_IFNAME": "the network interface of RPC (TensorPipe)",
    "NCCL_ALGO": "the algorithms that NCCL may use; best left to NCCL",
    "NCCL_DEBUG": "what NCCL logs; INFO shows interfaces and rings",
    "NCCL_DEBUG_FILE": "where NCCL logs to",
    "NCCL_DEBUG_SUBSYS": "of which parts NCCL logs",
    "NCCL_IB_DISABLE": "1: TCP instead of InfiniBand or RoCE",
    "NCCL_IB_GID_INDEX": "RoCE's global id index",
    "NCCL_IB_HCA": "the InfiniBand adapters that NCCL may use",
    "NCCL_LAUNCH_ORDER_IMPLICIT": "1: orders kernels of several groups on a GPU",
    "NCCL_MAX_CTAS": "most thread blocks of NCCL on a GPU",
    "NCCL_MAX_NCHANNELS": "most channels (GPU cores) of NCCL",
    "NCCL_MIN_CTAS": "fewest thread blocks of NCCL on a GPU",
    "NCCL_MIN_NCHANNELS": "fewest channels (GPU cores) of NCCL",
    "NCCL_NET": "NCCL's network module: Socket, IB or a plugin",
    "NCCL_NET_GDR_LEVEL": "how near a network adapter must be for GPUDirect RDMA",
    "NCCL_NVLS_ENABLE": "whether NVSwitch reduces",
    "NCCL_P2P_DISABLE": "1: GPUs do not copy directly to each other",
    "NCCL_P2P_LEVEL": "how near two GPUs must be for direct copies",
    "NCCL_PROTO": "NCCL's protocols; best left to NCCL",
    "NCCL_SHM_DISABLE": "1: no shared memory between processes of a host",
    "NCCL_SOCKET_IFNAME": "the network interfaces that NCCL may use",
    "NCCL_TOPO_FILE": "a file that describes the machine to NCCL",
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "what ends when NCCL fails or times out",
    "TORCH_NCCL_BLOCKING_WAIT": "1: waiting for NCCL blocks, and raises when late",
    "TORCH_NCCL_DESYNC_DEBUG": "1: after a timeout, says which rank lags behind",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "1: writes the flight recorder after a timeout",
    "TORCH_NCCL_ENABLE_TIMING": "1: measures each collective",
    "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC": "seconds until a stuck watchdog ends it all",
    "TORCH_NCCL_TRACE_BUFFER_SIZE": "collectives that the flight recorder keeps",
    "TORCH_CPP_LOG_LEVEL": "what torch's C++ code logs",
    "TORCH_DISTRIBUTED_DEBUG": "INFO or DETAIL: torch checks and logs more",
    "CUDA_LAUNCH_BLOCKING": "1: the CPU waits for every kernel",
    "CUDA_VISIBLE_DEVICES": "the GPUs that this process sees",
    "DDP_SET_LAST_BUCKET_CAP": "1: the small bucket is the last one",
    "MINIDP_NATIVE": "minidp's extension: 0 never, 1 insist, build, auto if built",
    "MINIDP_SHARED_MEMORY": "buckets of ranks on one host: 0 messages, 1 insist, auto",
    "OMP_NUM_THREADS": "threads per process",
    "TORCHFT_LIGHTHOUSE": "torchft's lighthouse: it knows which replicas there are",
    "TORCHFT_MANAGER_PORT": "the port of a replica's manager",
    "TORCHFT_QUORUM_RETRIES": "how often a manager asks the lighthouse again",
    "TORCHFT_CONNECT_TIMEOUT_SEC": "seconds to connect to lighthouse and managers",
    "TORCHFT_QUORUM_TIMEOUT_SEC": "seconds that a step waits for enough replicas",
    "TORCHFT_TIMEOUT_SEC": "seconds that a replica waits for one that is silent",
    **{
        each.variable: f"{each.name} of every DataParallel, whatever the script passes"
        for each in OPTIONS.values()
    },
}
_NUMBERS = ("_SEC", "_RETRIES", "_PORT")
_RENAMED = ("ASYNC_ERROR_HANDLING", "BLOCKING_WAIT", "DESYNC_DEBUG", "ENABLE_TIMING")
_PREFIXES = (
    *("NCCL_", "GLOO_", "TORCHFT_", "TORCH_NCCL_", "TORCH_GLOO_"),
    "TORCH_DISTRIBUTED_",
)
# Settings that make training slower on purpose.
_COSTS = {
    ("CUDA_LAUNCH_BLOCKING", "1"): "kernels no longer overlap with anything",
    ("NCCL_P2P_DISABLE", "1"): "GPUs of one host talk through the host's memory",
    ("NCCL_SHM_DISABLE", "1"): "GPUs of one host talk through the network",
    ("NCCL_IB_DISABLE", "1"): "hosts talk over TCP, also where InfiniBand is there",
    ("TORCH_DISTRIBUTED_DEBUG", "DETAIL"): "every collective is checked beforehand",
}


def relevant(env: Mapping[str, str]) -> dict[str, str]:
    """Return the environment variables that concern communication, value by name."""
    return {
        name: env[name]
        for name in sorted(env)
        if name in MEANINGS or name.startswith((*_PREFIXES, PREFIX))
    }


def judge_variables(env: Mapping[str, str]) -> list[Finding]:
    """Return `_judge` of each variable of communication; one ok finding without any."""
    findings = [_judge(name, value) for name, value in relevant(env).items()]
    return findings or [ok("no NCCL_*, GLOO_* or debugging variable is set")]


def _judge(name: str, value: str) -> Finding:
    """Return ok and the meaning; a warning if costly, renamed, misspelt; or failed."""
    said = f"{name}={value}"
    if cost := _COSTS.get((name, value.upper())):
        remedy = f"fine while looking for a fault; else unset {name}"
        return warning(f"{said}: {cost}", remedy)
    is_number = name.startswith("TORCHFT_") and name.endswith(_NUMBERS)
    if is_number and not value.strip().isdecimal():
        found = f"{said}: torchft ends when it reads it, because it is no whole number"
        return failed(found, f"write it like {name}=60")
    if name in MEANINGS:
        return ok(f"{said}: {MEANINGS[name]}")
    if name in [f"NCCL_{bare}" for bare in _RENAMED]:
        new = f"TORCH_{name}"
        return warning(f"{said}: torch renamed it {new}", f"set {new} instead")
    similar = difflib.get_close_matches(name, MEANINGS, n=1, cutoff=0.85)
    if similar:
        found = f"{said}: nobody reads a variable of this name"
        return warning(found, f"did you mean {similar[0]}?")
    return ok(f"{said}: a setting that this doctor does not know")


def judge_equal_variables(of_rank: Mapping[int, Mapping[str, Any]]) -> list[Finding]:
    """Return a warning per variable that differs by rank (interfaces may), or ok."""
    variables = {rank: facts.get("variables", {}) for rank, facts in of_rank.items()}
    findings = []
    for name in sorted(differing(variables.values())):
        if not any(part in name for part in _MAY_DIFFER):
            values = {r: each.get(name, "(not set)") for r, each in variables.items()}
            rows = (f"{value} on rank {rank}" for rank, value in values.items())
            remedy = "start all ranks with the same environment"
            findings.append(warning(f"{name} is {join(rows)}", remedy))
    return findings or [ok("equal on all ranks")]
