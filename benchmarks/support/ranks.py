"""Rank processes: one thread each, a Gloo group, and the result of rank 0."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import tempfile
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from support.links import Link

TIMEOUT = timedelta(seconds=120)  # of a collective without its peers
# Freed memory stays with the process. Else it depends on who took the step before
# whether gradients lie in memory that the system has to clear first, page by page: more
# than what any wrapper adds.
KEEP_MEMORY = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(2**40)}


def run_ranks(
    function: Callable[..., Any],
    world_size: int,
    *arguments: Any,
    link: Link | None = None,
    is_cuda: bool = False,
) -> Any:
    """Call ``function(*arguments)`` on new ranks; return what rank 0 returned.

    Args:
        function: at the top level of a module.
        world_size: number of processes.
        *arguments: sent by pickle.
        link: how the ranks are connected; None is the loopback device.
        is_cuda: each rank has a GPU of its own, and NCCL.
    """
    # A rank is a fork of a process that has imported torch and done nothing else: it
    # starts at once, and with the same memory whatever was measured before.
    multiprocessing.set_forkserver_preload(["torch", "torch._dynamo"])
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # read by that import
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # the profiler's: fatal errors
    for name, value in KEEP_MEMORY.items():  # read by glibc when a process starts
        os.environ.setdefault(name, value)
    with tempfile.TemporaryDirectory() as folder:
        job = Job(world_size, Path(folder), link, is_cuda, function, arguments)
        mp.start_processes(_main, (job,), nprocs=world_size, start_method="forkserver")
        return pickle.loads((job.folder / "result").read_bytes())


@dataclass(frozen=True)
class Job:
    """What a rank is told; see `run_ranks`."""

    world_size: int
    folder: Path  # common to all ranks
    link: Link | None
    is_cuda: bool
    function: Callable[..., Any]
    arguments: tuple[Any, ...]


def _main(rank: int, job: Job) -> None:
    warnings.simplefilter("ignore")  # find_unused_parameters warns when all are used
    torch.set_num_threads(1)
    # A file, because it also works where the ranks have no network in common.
    store = dist.FileStore(str(job.folder / "store"), job.world_size)
    device = "lo"
    if job.link is not None:
        device = job.link.join(rank, job.world_size, store)
    os.environ["GLOO_SOCKET_IFNAME"] = device
    if job.is_cuda:
        torch.cuda.set_device(rank)
    dist.init_process_group(
        "nccl" if job.is_cuda else "gloo",
        store=store,
        rank=rank,
        world_size=job.world_size,
        timeout=TIMEOUT,
    )
    result = job.function(*job.arguments)
    if rank == 0:
        (job.folder / "result").write_bytes(pickle.dumps(result))
    dist.barrier()
    dist.destroy_process_group()
