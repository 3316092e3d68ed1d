"""Start rank processes: one thread each, a process group, and the result of rank 0."""

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
from support.report import native_line

TIMEOUT = timedelta(seconds=120)  # of a collective without its peers
# Freed memory stays with the process. With glibc's defaults it depends on the previous
# step whether gradients lie in memory that the system has to clear first, page by page.
# That costs more than any wrapper adds.
KEEP_MEMORY = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(2**40)}


@dataclass(frozen=True)
class Job:
    """What `run_ranks` sends to each rank."""

    world_size: int
    folder: Path  # common to all ranks
    link: Link | None
    is_cuda: bool
    native: str
    function: Callable[..., Any]
    arguments: tuple[Any, ...]


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
        world_size: the number of processes.
        *arguments: sent by pickle.
        link: between the ranks; None is the loopback device.
        is_cuda: each rank has a GPU of its own, and NCCL.
    """
    # Ranks are forks of a process that has imported torch and done nothing else. They
    # start at once, with the same memory whatever was measured before.
    multiprocessing.set_forkserver_preload(["torch", "torch._dynamo"])
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # read by that import
    for name, value in KEEP_MEMORY.items():  # read by glibc when a process starts
        os.environ.setdefault(name, value)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        job = Job(world_size, folder, link, is_cuda, native_line(), function, arguments)
        mp.start_processes(_main, (job,), nprocs=world_size, start_method="forkserver")
        return pickle.loads((folder / "result").read_bytes())


def _main(rank: int, job: Job) -> None:
    if native_line() != job.native:  # a source file was changed since the run started
        raise RuntimeError(
            f"[rank {rank}] expected the native extension to be {job.native}, as the "
            f"header says, but it is {native_line()}: start again, and change no file "
            "in csrc/ meanwhile"
        )
    warnings.simplefilter("ignore")  # find_unused_parameters warns when all are used
    torch.set_num_threads(1)
    # A file, because it also works where the ranks have no network in common.
    store = dist.FileStore(str(job.folder / "store"), job.world_size)
    device = "lo"
    if job.link is not None:
        device = job.link.join(rank, job.world_size, store)
        os.environ["MINIDP_SHARED_MEMORY"] = "0"  # as between hosts: messages
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
