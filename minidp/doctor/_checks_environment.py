"""What `doctor` sees without other ranks: how it was started, and the machine.

A ``judge_*`` function is pure: facts in, findings out; ``read_*`` brings the facts.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from ._findings import Finding, failed, join, ok, skipped, warning

LAUNCH = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
TORCHRUN = "torchrun --nproc-per-node 2 -m minidp.doctor"
_SMALL_SHARED_MEMORY = 512 * 2**20  # bytes; Docker's default is 64 MiB
_TINY_SHARED_MEMORY = 16 * 2**20


@dataclass(frozen=True)
class Launch:
    """Who this process is, as its environment says.

    Args:
        rank: in the world.
        world_size: number of processes.
        local_rank: on this host; None: not said.
        local_world_size: processes of this host; None: not said.
        address: of the store, a host name or a number.
        port: of the store.
        is_agents: torchrun keeps the store, and it is there already.
    """

    rank: int
    world_size: int
    local_rank: int | None
    local_world_size: int | None
    address: str
    port: int
    is_agents: bool

    @property
    def place(self) -> str:
        """Of the store, for a person."""
        return f"{self.address}:{self.port}"

    @property
    def has_several_hosts(self) -> bool:
        """Whether it is known that there are other hosts."""
        count = self.local_world_size
        return count is not None and count < self.world_size


def read_launch(env: Mapping[str, str]) -> Launch:
    """The launch that `judge_launch` found to be sound.

    Raises:
        KeyError, ValueError: it is not.
    """
    local = {key: env.get(key) for key in ("LOCAL_RANK", "LOCAL_WORLD_SIZE")}
    rank, count = (None if text is None else int(text) for text in local.values())
    return Launch(
        rank=int(env["RANK"]),
        world_size=int(env["WORLD_SIZE"]),
        local_rank=rank,
        local_world_size=count,
        address=env["MASTER_ADDR"],
        port=int(env["MASTER_PORT"]),
        is_agents=env.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
    )


def judge_launch(env: Mapping[str, str]) -> list[Finding]:
    """Whether RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT fit."""
    check = "environment"
    missing = [name for name in LAUNCH if not env.get(name)]
    if len(missing) == len(LAUNCH):
        found = f"this process is alone: none of {join(LAUNCH)} is set"
        return [skipped(check, found, f"to check a whole job: {TORCHRUN}")]
    required = [name for name in missing if name != "LOCAL_RANK"]
    if required:
        found = f"{join(required)} not set, although {join(_set(env))} is"
        return [failed(check, found, f"start with torchrun, or set {join(required)}")]
    problems = _bad_numbers(env) or _bad_pairs(read_launch(env))
    if problems:
        return [failed(check, found, remedy) for found, remedy in problems]
    if missing:
        found = "LOCAL_RANK is not set: which GPU belongs to this process?"
        remedy = "start with torchrun, or set it (SLURM: $SLURM_LOCALID)"
        return [warning(check, found, remedy)]
    launch = read_launch(env)
    found = f"{join(LAUNCH)} fit together; the store is at {launch.place}"
    return [ok(check, found)]


def _set(env: Mapping[str, str]) -> list[str]:
    return [name for name in LAUNCH if env.get(name)]


def _bad_numbers(env: Mapping[str, str]) -> list[tuple[str, str]]:
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_PORT")
    return [
        (f"{name}={env[name]!r} is not a whole number", f"set {name} to a number")
        for name in names
        if env.get(name) and not env[name].isdecimal()
    ]


def _bad_pairs(launch: Launch) -> list[tuple[str, str]]:
    problems = []
    if launch.rank >= launch.world_size:
        problems.append(
            (
                f"RANK={launch.rank}, but WORLD_SIZE={launch.world_size}",
                "ranks count from 0 to WORLD_SIZE - 1",
            )
        )
    rank, count = launch.local_rank, launch.local_world_size
    if rank is not None and rank > launch.rank:
        problems.append(
            (
                f"LOCAL_RANK={rank} is more than RANK={launch.rank}",
                "LOCAL_RANK counts the processes of one host, from 0",
            )
        )
    if rank is not None and count is not None and rank >= count:
        problems.append(
            (
                f"LOCAL_RANK={rank}, but LOCAL_WORLD_SIZE={count}",
                "local ranks count from 0 to LOCAL_WORLD_SIZE - 1",
            )
        )
    if not 0 < launch.port < 2**16:
        problems.append(
            (f"MASTER_PORT={launch.port} is no port", "take one from 1024 to 65535")
        )
    if launch.has_several_hosts and is_loopback(launch.address):
        problems.append(
            (
                f"MASTER_ADDR={launch.address} is this host, but there are several",
                "set it to the name of rank 0's host (torchrun: --rdzv-endpoint)",
            )
        )
    return problems


def is_loopback(address: str) -> bool:
    """Whether an address means this host, whoever reads it."""
    names = ("localhost", "::1", "0.0.0.0", "::")
    return address in names or address.startswith("127.")


def judge_shared_memory(total: int, free: int) -> Finding:
    """Whether loader workers have room; both in bytes."""
    check, found = "shared memory", f"/dev/shm: {_size(free)} free of {_size(total)}"
    remedy = (
        "loaders with num_workers > 0 end with a bus error when it is full: "
        "docker run --shm-size=8g (or --ipc=host), or remove old files there"
    )
    if free < _TINY_SHARED_MEMORY:
        return failed(check, found, remedy)
    if free < _SMALL_SHARED_MEMORY:
        return warning(check, found, remedy)
    return ok(check, found)


def judge_threads(threads: int, processes: int, cores: int) -> Finding:
    """Whether the processes of this host have more threads than cores."""
    check = "threads"
    found = f"{processes} x {threads} threads on {cores} cores"
    fair = max(1, cores // processes)
    if processes == 1 or processes * threads <= cores:
        return ok(check, found)
    if threads > fair:
        return warning(check, found, f"set OMP_NUM_THREADS={fair}")
    remedy = (
        f"more processes than cores take turns: start at most {cores} on this host "
        "(--nproc-per-node), if it is for speed"
    )
    return warning(check, found, remedy)


def judge_gpus(env: Mapping[str, str], num_gpus: int, num_processes: int) -> Finding:
    """Whether each process of this host has a GPU of its own, by count."""
    check = "GPUs"
    found = f"{num_gpus} GPUs for {num_processes} processes on this host"
    if num_gpus == 0:
        return skipped(check, "torch sees no GPU: training runs on the CPU, with Gloo")
    if num_gpus == 1 and num_processes > 1 and env.get("CUDA_VISIBLE_DEVICES"):
        found = "this process sees one GPU, other processes perhaps others"
        remedy = 'then it is "cuda:0" in each of them, and not LOCAL_RANK'
        return warning(check, found, remedy)
    if num_gpus < num_processes:
        remedy = f"start {num_gpus} processes (--nproc-per-node), one for each GPU"
        return failed(check, found, remedy)
    if num_gpus > num_processes:
        remedy = f"idle GPUs: --nproc-per-node {num_gpus}, if they are yours"
        return warning(check, found, remedy)
    return ok(check, found)


def _size(count: int) -> str:
    for unit, limit in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if count >= limit:
            return f"{count / limit:.3g} {unit}"
    return f"{count} bytes"


def read_shared_memory(path: str = "/dev/shm") -> tuple[int, int]:
    """Size and free part, in bytes.

    Raises:
        OSError: there is none.
    """
    room = os.statvfs(path)
    return room.f_blocks * room.f_frsize, room.f_bavail * room.f_frsize
