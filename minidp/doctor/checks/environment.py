"""Judge what a launcher has set, and the machine: /dev/shm, threads, GPUs."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch

from minidp import accelerator
from minidp.doctor.findings import Finding, Found, failed, ok, skipped, warning
from minidp.doctor.words import join

LAUNCH = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_NUMBERS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_PORT")
TORCHRUN = "torchrun --nproc-per-node 2 -m minidp.doctor"


@dataclass(frozen=True)
class Launch:
    """This process's place in the job, read from its environment variables."""

    rank: int
    world_size: int
    local_rank: int | None  # None if it is not set
    local_world_size: int | None
    address: str  # of the store
    port: int
    is_agents: bool  # whether torchrun's agent serves the store, and not rank 0

    @property
    def has_several_hosts(self) -> bool:
        """Whether the job is known to have ranks on other hosts, too."""
        count = self.local_world_size
        return count is not None and count < self.world_size


def read_launch(env: Mapping[str, str]) -> Launch:
    """Return this process's place in the job, once `judge_launch` finds no fault."""
    numbers = {name: int(env[name]) for name in _NUMBERS if env.get(name)}
    return Launch(
        rank=numbers["RANK"],
        world_size=numbers["WORLD_SIZE"],
        local_rank=numbers.get("LOCAL_RANK"),
        local_world_size=numbers.get("LOCAL_WORLD_SIZE"),
        address=env["MASTER_ADDR"],
        port=numbers["MASTER_PORT"],
        is_agents=env.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
    )


def judge_launch(env: Mapping[str, str]) -> Found:
    """Judge whether the variables of a launch are set, valid, and fit together."""
    missing = [name for name in LAUNCH if not env.get(name)]
    if len(missing) == len(LAUNCH):
        found = f"this process is alone: none of {join(LAUNCH)} is set"
        return skipped(found, f"to check a whole job: {TORCHRUN}")
    required = join(name for name in missing if name != "LOCAL_RANK")
    if required:
        present = join(name for name in LAUNCH if env.get(name))
        found = f"{required} not set, although {present} is"
        return failed(found, f"start with torchrun, or set {required} yourself")
    problems = [
        failed(f"{name}={env[name]!r} is not a whole number", f"set {name} to a number")
        for name in _NUMBERS
        if env.get(name) and not env[name].isdecimal()
    ] or [*_contradictions(read_launch(env))]
    if problems:
        return problems
    if missing:
        found = "LOCAL_RANK is not set: which GPU belongs to this process?"
        return warning(found, "start with torchrun, or set it (SLURM: $SLURM_LOCALID)")
    place = f"{env['MASTER_ADDR']}:{env['MASTER_PORT']}"
    return ok(f"{join(LAUNCH)} fit together; the store is at {place}")


def _contradictions(launch: Launch) -> Iterator[Finding]:
    rank, count = launch.local_rank, launch.local_world_size
    if launch.rank >= launch.world_size:
        found = f"RANK={launch.rank}, but WORLD_SIZE={launch.world_size}"
        yield failed(found, "ranks count from 0 to WORLD_SIZE - 1")
    if (rank or 0) > launch.rank:
        found = f"LOCAL_RANK={rank} is more than RANK={launch.rank}"
        yield failed(found, "LOCAL_RANK counts the processes of one host, from 0")
    if rank is not None and count is not None and rank >= count:
        found = f"LOCAL_RANK={rank}, but LOCAL_WORLD_SIZE={count}"
        yield failed(found, "local ranks count from 0 to LOCAL_WORLD_SIZE - 1")
    if not 0 < launch.port < 2**16:
        found = f"MASTER_PORT={launch.port} is no port"
        yield failed(found, "take one from 1024 to 65535")
    if launch.has_several_hosts and is_loopback(launch.address):
        found = f"MASTER_ADDR={launch.address} is this host, but there are several"
        remedy = "set it to the name of rank 0's host (torchrun: --rdzv-endpoint)"
        yield failed(found, remedy)


def is_loopback(address: str) -> bool:
    """Return whether an address means "this host" on each host, as localhost does."""
    names = ("localhost", "::1", "0.0.0.0", "::")
    return address in names or address.startswith("127.")


def judge_shared_memory() -> Finding:
    """Judge whether /dev/shm has room for the batches that workers of loaders send."""
    total, _, free = shutil.disk_usage("/dev/shm")
    found = f"/dev/shm: {free / 2**30:.3g} GiB free of {total / 2**30:.3g} GiB"
    remedy = (
        "give it more, or workers of loaders crash: docker run --shm-size=8g (or "
        "--ipc=host)"
    )
    if free < 512 * 2**20:  # Docker's default is 64 MiB
        return (failed if free < 16 * 2**20 else warning)(found, remedy)
    return ok(found)


def judge_threads(processes: int) -> Finding:
    """Warn if the torch threads of several processes are more than the cores."""
    threads, cores = torch.get_num_threads(), os.cpu_count() or 1
    found = f"{processes} x {threads} threads on {cores} cores"
    fair = max(1, cores // processes)
    if processes == 1 or processes * threads <= cores:
        return ok(found)
    if threads > fair:
        return warning(found, f"set OMP_NUM_THREADS={fair}")
    remedy = f"processes take turns; to be fast, start at most {cores} on this host"
    return warning(found, remedy)


def judge_gpus(env: Mapping[str, str], num_processes: int) -> Finding:
    """Judge whether this host has as many GPUs as processes."""
    num_gpus = accelerator.count()
    found = f"{num_gpus} GPUs for {num_processes} processes on this host"
    if num_gpus == 0:
        return skipped("torch sees no GPU: training runs on the CPU, with Gloo")
    if num_gpus == 1 and num_processes > 1 and env.get("CUDA_VISIBLE_DEVICES"):
        found = "this process sees one GPU; other processes may see others"
        first = f'"{accelerator.kind()}:0"'
        return warning(found, f"call it {first} in each process, and not by LOCAL_RANK")
    if num_gpus < num_processes:
        remedy = f"start {num_gpus} processes (--nproc-per-node), one for each GPU"
        return failed(found, remedy)
    if num_gpus > num_processes:
        remedy = f"if the idle GPUs are yours, too: --nproc-per-node {num_gpus}"
        return warning(found, remedy)
    return ok(found)
