"""The child side of a rank process: set up groups, then run one job after another.

    test process                          rank process (this file)
    ------------                          ------------------------
    Job --pack--> pipe -----------------> import fn by name, run fn(ctx, *args)
    Reply <------ pipe <--pack----------- value or failure, and the group counters
    pipe closed  -----------------------> exit at once

A `Reply` also carries how many collectives each group has issued so far.  Ranks that
do not agree about that number would pair up the wrong collectives in the next job;
the pool compares the numbers and starts afresh when they differ.

What travels is pickled, but for dense CPU tensors: torch's own pickling either moves
them to shared memory (slow to set up, and gone with the process that owns it) or writes
a whole zip archive per storage.  Here a tensor is its dtype, shape and bytes: exact to
the last bit, NaN payloads included.  Strides, ``requires_grad`` and the identity of
shared storages do *not* travel; build those on the rank if a test is about them.
"""

from __future__ import annotations

import faulthandler
import gc
import importlib
import io
import os
import pickle
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist

from minidp.run.children import die_with_parent
from tests.support import sim

Ranks = tuple[int, ...]
CPU = torch.device("cpu")
START_SECONDS = 60.0  # within which all processes of a pool must start, beside load


@dataclass(frozen=True)
class Setup:
    """What a rank process must know to make its process groups."""

    rank: int
    world_size: int
    store_path: str
    stacks_path: str
    subgroups: tuple[Ranks, ...]
    group_timeout: float
    backend: str = "gloo"
    device: str = "cpu"


@dataclass(frozen=True)
class Job:
    """One call of a module-level function, by name, on the given ranks."""

    module: str
    qualname: str
    ranks: Ranks
    args: tuple[Any, ...]


@dataclass(frozen=True)
class Context:
    """What a function on a rank gets as its first argument.

    ``rank`` and ``world_size`` count within ``group``; ``global_rank`` counts all
    processes.  Always pass ``group`` on: in the pool, the default group spans all
    ranks, the idle ones too, and a collective on it would wait for them.
    ``subgroups`` holds every prepared group that this process belongs to; tensors
    belong on ``device``.
    """

    rank: int
    world_size: int
    group: dist.ProcessGroup
    global_rank: int
    subgroups: Mapping[Ranks, dist.ProcessGroup]
    device: torch.device = CPU


@dataclass(frozen=True)
class Failure:
    """An exception on a rank, as text: the object itself may not survive a pipe."""

    kinds: tuple[str, ...]  # class names along the MRO, the exception's own first
    message: str
    traceback: str


@dataclass(frozen=True)
class Reply:
    """What a rank sends back for a job."""

    result: bytes | Failure
    finished_at: float  # time.monotonic(), which all processes of a machine share
    issued: Mapping[Ranks, tuple[int, ...]]  # collectives so far, see `_collectives`
    groups_made: int  # process groups ever made in this process


def _rebuild_tensor(
    dtype: torch.dtype, shape: tuple[int, ...], raw: bytes
) -> torch.Tensor:
    if not raw:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(bytearray(raw), dtype=dtype).reshape(shape)


class _Pickler(pickle.Pickler):
    def reducer_override(self, obj: Any) -> Any:
        plain = type(obj) in (torch.Tensor, torch.nn.Parameter)
        if not plain or obj.layout != torch.strided or obj.is_quantized:
            return NotImplemented
        dense = obj.detach().cpu().resolve_conj().resolve_neg().contiguous()
        raw = dense.reshape(-1).view(torch.uint8).numpy().tobytes()
        return _rebuild_tensor, (dense.dtype, tuple(dense.shape), raw)


def pack(value: object) -> bytes:
    """Pickle a value; dense CPU tensors as dtype, shape and bytes."""
    stream = io.BytesIO()
    _Pickler(stream, protocol=pickle.HIGHEST_PROTOCOL).dump(value)
    return stream.getvalue()


def unpack(blob: bytes) -> Any:
    """Return the value that `pack` has pickled."""
    return pickle.loads(blob)


def serve(connection: Connection, setup: Setup) -> None:
    """Make the process groups, then answer jobs until the pipe is closed."""
    # A process that is stopped would not see that the pipe is closed.
    die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the test process
    stacks = open(setup.stacks_path, "w")  # noqa: SIM115  (lives as long as we do)
    faulthandler.enable(file=stacks)
    faulthandler.register(signal.SIGUSR1, file=stacks)
    torch.set_num_threads(1)
    torch.set_printoptions(threshold=8, edgeitems=1)  # in the variables of an assertion
    if setup.device.startswith("sim"):
        sim.load()  # not before, because its threads do not survive a fork
    if setup.device != "cpu":
        torch.accelerator.set_device_index(torch.device(setup.device))
    groups = _make_groups(setup)
    gc.freeze()
    connection.send_bytes(b"ready")
    while True:
        try:
            blob = connection.recv_bytes()
        except (EOFError, OSError):
            # No interpreter shutdown: the peers may be gone, and tearing down a gloo
            # group whose peers are gone only prints noise.
            os._exit(0)
        reply = _answer(blob, setup, groups)
        connection.send_bytes(pack(reply))
        # Free the job's reference cycles (models, hooks) now, not in the middle of some
        # later job.  Freezing what is left keeps this fast: otherwise every collection
        # walks all modules imported so far, 80 ms once a job has made a torch DDP.
        gc.collect()
        gc.freeze()


def _make_groups(setup: Setup) -> dict[Ranks, dist.ProcessGroup]:
    timeout = timedelta(seconds=setup.group_timeout)
    # Public and documented, but missing from the type stubs' list of exports.
    store = dist.FileStore(setup.store_path, setup.world_size)  # type: ignore[attr-defined]
    place: dict[str, Any] = {"rank": setup.rank, "world_size": setup.world_size}
    # The groups' timeout is for what a test does: beside load a process may start later
    # than another one by more than that.
    store.set(f"started/{setup.rank}", "")
    started = [f"started/{rank}" for rank in range(setup.world_size)]
    store.wait(started, timedelta(seconds=START_SECONDS))
    dist.init_process_group(setup.backend, store=store, timeout=timeout, **place)
    groups: dict[Ranks, dist.ProcessGroup] = {}
    for ranks in setup.subgroups:  # every process makes every group, in one order
        group = dist.new_group(list(ranks), timeout=timeout)
        if setup.rank in ranks:
            groups[ranks] = group
    world = dist.group.WORLD
    assert world is not None
    groups[tuple(range(setup.world_size))] = world
    return groups


def _answer(
    blob: bytes, setup: Setup, groups: Mapping[Ranks, dist.ProcessGroup]
) -> Reply:
    result: bytes | Failure
    try:
        job: Job = unpack(blob)
        result = pack(_run(job, setup, groups))
    except SystemExit:
        raise
    except BaseException as error:
        # Pytest explains no assertion here: the variables must do.
        frames = error.__traceback__
        told = traceback.TracebackException(
            *(type(error), error, frames and frames.tb_next and frames.tb_next.tb_next),
            capture_locals=isinstance(error, AssertionError),
        )
        result = Failure(
            kinds=tuple(kind.__name__ for kind in type(error).__mro__),
            message=str(error),
            traceback="".join(told.format()),
        )
    sys.stdout.flush()
    sys.stderr.flush()
    return Reply(
        result=result,
        finished_at=time.monotonic(),
        issued={
            ranks: _collectives(group, {"cpu", torch.device(setup.device).type})
            for ranks, group in groups.items()
        },
        groups_made=dist.distributed_c10d._world.group_count,
    )


def _collectives(group: dist.ProcessGroup, types: set[str]) -> tuple[int, ...]:
    """Return how many collectives a group has issued, and each of its side groups."""
    # minidp keeps side groups for the next job, and torch does not know them.
    ours = sys.modules.get("minidp.comm.groups")
    made = {} if ours is None else ours.groups_beside().get(group, {})
    beside = [
        made[purpose]._get_sequence_number_for_group() for purpose in sorted(made)
    ]
    return _num_collectives(group, types), *beside


def _num_collectives(group: dist.ProcessGroup, types: set[str]) -> int:
    # Private to torch: the numbers its own flight recorder compares between ranks. A
    # group of several backends does not know one, and NCCL's has none for the CPU.
    devices = [device for device in group._device_types if device.type in types]
    backends: list[Any] = [group._get_backend(device) for device in devices]
    return sum(backend._get_sequence_number_for_group() for backend in backends)


def _run(job: Job, setup: Setup, groups: Mapping[Ranks, dist.ProcessGroup]) -> Any:
    function: Any = importlib.import_module(job.module)
    for part in job.qualname.split("."):
        function = getattr(function, part)
    context = Context(
        rank=job.ranks.index(setup.rank),
        world_size=len(job.ranks),
        group=groups[job.ranks],
        global_rank=setup.rank,
        subgroups=groups,
        device=torch.device(setup.device),
    )
    torch.manual_seed(0)
    with warnings.catch_warnings():  # what a job filters is not filtered in the next
        return function(context, *job.args)
