"""Judge environment variables of communication, and compare them between ranks."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any

from minidp.config import PREFIX, VARIABLES
from minidp.doctor.findings import Finding, failed, ok, warning
from minidp.doctor.words import differing, join

# Settings of one process or host, which may differ between ranks.
_MAY_DIFFER = ("IFNAME", "_FILE", "_HCA", "CUDA_VISIBLE_DEVICES", "HOSTID")

_NAMES = """
    GLOO_DEVICE_TRANSPORT GLOO_SOCKET_IFNAME TORCH_GLOO_LAZY_INIT TP_SOCKET_IFNAME
    NCCL_ALGO NCCL_DEBUG NCCL_DEBUG_FILE NCCL_DEBUG_SUBSYS NCCL_IB_DISABLE
    NCCL_IB_GID_INDEX NCCL_IB_HCA NCCL_LAUNCH_ORDER_IMPLICIT NCCL_MAX_CTAS
    NCCL_MAX_NCHANNELS NCCL_MIN_CTAS NCCL_MIN_NCHANNELS NCCL_NET NCCL_NET_GDR_LEVEL
    NCCL_NVLS_ENABLE NCCL_P2P_DISABLE NCCL_P2P_LEVEL NCCL_PROTO NCCL_SHM_DISABLE
    NCCL_SOCKET_IFNAME NCCL_TOPO_FILE
    TORCH_NCCL_ASYNC_ERROR_HANDLING TORCH_NCCL_BLOCKING_WAIT TORCH_NCCL_DESYNC_DEBUG
    TORCH_NCCL_DUMP_ON_TIMEOUT TORCH_NCCL_ENABLE_TIMING
    TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC TORCH_NCCL_TRACE_BUFFER_SIZE
    TORCH_CPP_LOG_LEVEL TORCH_DISTRIBUTED_DEBUG DDP_SET_LAST_BUCKET_CAP
    CUDA_LAUNCH_BLOCKING CUDA_VISIBLE_DEVICES OMP_NUM_THREADS
    TORCHFT_CONNECT_TIMEOUT_SEC TORCHFT_LIGHTHOUSE TORCHFT_MANAGER_PORT
    TORCHFT_QUORUM_RETRIES TORCHFT_QUORUM_TIMEOUT_SEC TORCHFT_TIMEOUT_SEC
"""
KNOWN = {*_NAMES.split(), *VARIABLES}
_NUMBERS = ("_SEC", "_RETRIES", "_PORT")
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
    """Return the environment variables that concern communication."""
    return {
        name: env[name]
        for name in sorted(env)
        if name in KNOWN or name.startswith((*_PREFIXES, PREFIX))
    }


def judge_variables(env: Mapping[str, str]) -> list[Finding]:
    """Judge each variable that concerns communication: is it slow, or misspelt?"""
    findings = [_judge(name, value) for name, value in relevant(env).items()]
    return findings or [ok("no NCCL_*, GLOO_* or debugging variable is set")]


def _judge(name: str, value: str) -> Finding:
    said = f"{name}={value}"
    if cost := _COSTS.get((name, value.upper())):
        remedy = f"unset {name}, unless you are looking for a fault with it"
        return warning(f"{said}: {cost}", remedy)
    is_number = name.startswith("TORCHFT_") and name.endswith(_NUMBERS)
    if is_number and not value.strip().isdecimal():
        found = f"{said}: it is no whole number, and torchft ends when it reads that"
        return failed(found, f"write it like {name}=60")
    if name in KNOWN:
        return ok(said)
    # This also finds names that torch has changed since: today NCCL_BLOCKING_WAIT has
    # TORCH_ in front.
    similar = difflib.get_close_matches(name, KNOWN, n=1, cutoff=0.85)
    if similar:
        return warning(f"{said}: an unknown variable", f"did you mean {similar[0]}?")
    return ok(f"{said}: a setting that this doctor does not know")


def judge_equal_variables(of_rank: Mapping[int, Mapping[str, Any]]) -> list[Finding]:
    """Warn of each variable that ranks have set differently.

    Variables that belong to one process or host may differ: interfaces, visible GPUs
    and files.
    """
    variables = {rank: facts.get("variables", {}) for rank, facts in of_rank.items()}
    findings = []
    for name in sorted(differing(variables.values())):
        if not any(part in name for part in _MAY_DIFFER):
            values = {r: each.get(name, "(not set)") for r, each in variables.items()}
            rows = (f"{value} on rank {rank}" for rank, value in values.items())
            remedy = "start all ranks with the same environment"
            findings.append(warning(f"{name} is {join(rows)}", remedy))
    return findings or [ok("equal on all ranks")]
