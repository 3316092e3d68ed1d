"""The parent side of a set of rank processes: start, send a job, collect, kill.

`Team` is the mechanism and knows no policy.  `pool.Pool` keeps one alive for a whole
test session, `fresh.run_fresh` makes one per call.

Processes come from multiprocessing's fork server, a helper that has imported torch and
what test modules import, and has run nothing: a new rank costs a fork (milliseconds),
not an import of torch (seconds), and inherits no threads, sockets or random state from
the test process.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from multiprocessing import connection as mp_connection
from pathlib import Path
from typing import Any

from tests.support.wire import pack, unpack
from tests.support.worker import Failure, Job, Ranks, Reply, Setup, serve

_START_LIMIT = 120.0  # seconds for all ranks to come up, on a slow and busy machine
_PRELOADED = [
    "torch",
    "torch.distributed",
    "torch.nn.parallel",
    "torch._dynamo",  # imported by the first torch DDP of a process, for a second
    # Test modules import these; better once here than once in each rank.
    "pytest",
    "hypothesis",
    "tests.support.worker",
]


class RankError(Exception):
    """What went wrong on one rank.

    Attributes:
        rank: The rank within the job's group.
        kinds: Class names of the exception along its MRO (``kinds[0]`` is its own);
            ``("Exited",)`` if the process ended, ``("Hang",)`` if it never answered.
        message: The exception's text.
        traceback: Its traceback, or the stacks of all threads for a hang or a crash.
        exit_code: For ``Exited`` only; negative numbers are signals.
        others: When this error was raised: the errors of the other ranks.
    """

    def __init__(
        self,
        rank: int,
        kinds: tuple[str, ...],
        message: str,
        traceback: str = "",
        exit_code: int | None = None,
    ) -> None:
        super().__init__(message)
        self.rank = rank
        self.kinds = kinds
        self.message = message
        self.traceback = traceback
        self.exit_code = exit_code
        self.others: tuple[RankError, ...] = ()
        self.at = time.monotonic()

    @property
    def kind(self) -> str:
        """The exception's class name."""
        return self.kinds[0]

    def is_a(self, name: str) -> bool:
        """Whether the exception's class, or one of its bases, has this name."""
        return name in self.kinds

    def __str__(self) -> str:
        own = f"[rank {self.rank}] {self.kind}: {self.message}\n{self.traceback}"
        return "\n".join([own, *map(str, self.others)])

    def __repr__(self) -> str:
        return f"RankError(rank={self.rank}, {self.kind}: {self.message!r})"


def settle(outcomes: Sequence[Any], errors: str) -> list[Any]:
    """Turn per-rank outcomes into what the caller asked for.

    With ``errors="return"`` a failed rank's entry is its `RankError`.  With ``"raise"``
    the root cause is raised (a dead process, else the earliest exception: the others
    often only report that a peer has left), and carries the rest in ``others``.
    """
    if errors not in ("raise", "return"):
        raise ValueError(f"errors must be 'raise' or 'return', got {errors!r}")
    failed = [outcome for outcome in outcomes if isinstance(outcome, RankError)]
    if errors == "raise" and failed:
        first, *others = sorted(failed, key=lambda e: (e.kind != "Exited", e.at))
        first.others = tuple(others)
        raise first
    return list(outcomes)


def make_job(
    function: Callable[..., Any],
    ranks: Ranks,
    args: tuple[Any, ...],
    *,
    strict_warnings: bool,
) -> Job:
    """Describe a call so that another process can make it; refuse what cannot be."""
    name = f"{function.__module__}.{function.__qualname__}"
    if "<" in name or function.__module__ == "__main__":
        raise ValueError(
            f"{name} cannot be imported by a rank process; "
            "use a function defined at the top level of an importable module"
        )
    return Job(function.__module__, function.__qualname__, ranks, args, strict_warnings)


class Team:
    """World-size many rank processes with their process groups.

    Args:
        world_size: How many.
        group_timeout: Seconds after which a collective without its peers fails.
        subgroups: Groups to prepare besides the default one.
        env: Extra environment variables; new interpreters, then.
        backend: Of all groups.
        devices: Of each rank; the CPU by default.
    """

    def __init__(
        self,
        world_size: int,
        *,
        group_timeout: float,
        subgroups: tuple[Ranks, ...] = (),
        env: Mapping[str, str] | None = None,
        backend: str = "gloo",
        devices: Sequence[str] = (),
    ) -> None:
        self.issued: dict[int, Mapping[Ranks, int]] = {}
        self.groups_made: dict[int, int] = {}
        self._folder = tempfile.TemporaryDirectory(prefix="minidp-ranks-")
        self._connections: list[mp_connection.Connection] = []
        self._processes: list[Any] = []
        context = _context(fresh_interpreter=bool(env))
        try:
            with _environment(env or {}):
                for rank in range(world_size):
                    setup = Setup(
                        rank=rank,
                        world_size=world_size,
                        store_path=str(Path(self._folder.name, "store")),
                        stacks_path=str(self._stacks_file(rank)),
                        subgroups=subgroups,
                        group_timeout=group_timeout,
                        backend=backend,
                        device=devices[rank] if devices else "cpu",
                    )
                    self._start(context, setup)
            self._await_ready()
        except BaseException:
            self.kill()
            raise

    def _start(self, context: Any, setup: Setup) -> None:
        ours, theirs = context.Pipe()
        process = context.Process(
            target=serve,
            args=(theirs, setup),
            name=f"minidp-rank-{setup.rank}",
            daemon=True,
        )
        process.start()
        theirs.close()  # so that the rank's death shows as end-of-file on `ours`
        self._connections.append(ours)
        self._processes.append(process)

    def _await_ready(self) -> None:
        deadline = time.monotonic() + _START_LIMIT
        for rank, conn in enumerate(self._connections):
            if not conn.poll(max(0.0, deadline - time.monotonic())):
                raise self._hang(rank, rank, _START_LIMIT)
            try:
                conn.recv_bytes()
            except EOFError:
                raise self._exit(rank, rank) from None

    def run(self, job: Job, limit: float) -> list[Any]:
        """Run a job on its ranks; a result or a `RankError` for each, in order."""
        blob = pack(job)
        for rank in job.ranks:
            # A dead rank is noticed below, as end-of-file.
            with contextlib.suppress(BrokenPipeError):
                self._connections[rank].send_bytes(blob)
        outcomes: dict[int, Any] = {}
        deadline = time.monotonic() + limit
        waiting = {self._connections[rank]: rank for rank in job.ranks}
        while waiting:
            left = max(0.0, deadline - time.monotonic())
            ready = mp_connection.wait(list(waiting), left)
            if not ready:
                break
            for conn in ready:
                assert isinstance(conn, mp_connection.Connection)
                rank = waiting.pop(conn)
                outcomes[rank] = self._receive(conn, rank, job.ranks.index(rank))
        for rank in waiting.values():
            outcomes[rank] = self._hang(rank, job.ranks.index(rank), limit)
        return [outcomes[rank] for rank in job.ranks]

    def _receive(
        self, conn: mp_connection.Connection, rank: int, group_rank: int
    ) -> Any:
        try:
            reply: Reply = unpack(conn.recv_bytes())
        except (EOFError, ConnectionResetError):
            return self._exit(rank, group_rank)
        self.issued[rank] = reply.issued
        self.groups_made[rank] = reply.groups_made
        if isinstance(reply.result, bytes):
            return unpack(reply.result)
        failure: Failure = reply.result
        error = RankError(group_rank, failure.kinds, failure.message, failure.traceback)
        error.at = reply.finished_at
        return error

    def _exit(self, rank: int, group_rank: int) -> RankError:
        process = self._processes[rank]
        process.join(5)
        code = process.exitcode
        message = f"the process ended with exit code {code}"
        stacks = self._stacks_file(rank).read_text(errors="replace")
        return RankError(group_rank, ("Exited",), message, stacks, exit_code=code)

    def _hang(self, rank: int, group_rank: int, limit: float) -> RankError:
        message = f"no answer within {limit:g} s; its threads are at:"
        return RankError(group_rank, ("Hang",), message, self._dump_stacks(rank))

    def _dump_stacks(self, rank: int) -> str:
        """Ask a rank, however stuck, to write down where each of its threads is."""
        path, process = self._stacks_file(rank), self._processes[rank]
        if not process.is_alive() or not path.exists():
            return "(no stacks: the process is gone or had not started)"
        os.kill(process.pid, signal.SIGUSR1)
        deadline, last = time.monotonic() + 2.0, -1
        while time.monotonic() < deadline:  # until it has text that stopped growing
            num_bytes = path.stat().st_size
            if num_bytes and num_bytes == last:
                break
            last = num_bytes
            time.sleep(0.05)
        return path.read_text(errors="replace") or "(no stacks: no answer to SIGUSR1)"

    def _stacks_file(self, rank: int) -> Path:
        return Path(self._folder.name, f"rank{rank}.stacks")

    def kill(self) -> None:
        """End these processes (and only these), whatever they are doing."""
        for conn in self._connections:
            conn.close()
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()
        self._folder.cleanup()


def _context(*, fresh_interpreter: bool) -> Any:
    if fresh_interpreter:
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOADED)
    return context


@contextlib.contextmanager
def _environment(extra: Mapping[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in extra}
    os.environ.update(extra)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
