"""The warm pool: rank processes that live as long as the test session.

    def sum_of_ranks(ctx, offset):             # top level of the test module
        value = torch.tensor([ctx.rank + offset])
        dist.all_reduce(value, group=ctx.group)
        return value

    def test_sum(pool):
        for result in pool.run(sum_of_ranks, 2, 10):   # ranks 0 and 1
            assert result.item() == 21

A job on two ranks costs 0.3 ms, 1.3 ms with an all-reduce in it, 3.5 ms with a torch
DDP built and stepped once in it (medians, on two cores).
Groups prepared on four ranks:

    where    1        2        3        4        (1, 2)     (2, 3)
    ranks    [0]      [0 1]    [0 1 2]  [0 1 2 3]   [1 2]      [2 3]

For two disjoint groups at once run on all four ranks and take
``ctx.subgroups[(0, 1)]`` or ``ctx.subgroups[(2, 3)]``.

A job that leaves the groups unusable (a rank died or hangs, a collective timed out, or
the ranks issued different numbers of collectives) costs the next job a restart, about
a tenth of a second, and no test sees what an earlier one left behind.

Only one pool of a test process is awake. The others are stopped (SIGSTOP) until their
next job, and so is a pool while tests without one run (`let_sleep`): each group of Gloo
has a thread that looks for messages 100 times a second, and hundreds of groups in idle
processes took an eighth of the time of all tests.

Processes come from multiprocessing's fork server, a helper that has imported torch and
what test modules import, and has run nothing: a new rank costs a fork (milliseconds),
not an import of torch (seconds), and inherits no threads, sockets or random state from
the test process.
"""

from __future__ import annotations

import atexit
import contextlib
import multiprocessing
import os
import signal
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from multiprocessing import connection as mp_connection
from pathlib import Path
from typing import Any
from unittest import mock

from tests.support.worker import (
    Context,
    Failure,
    Job,
    Ranks,
    Reply,
    Setup,
    pack,
    serve,
    unpack,
)

__all__ = ["Context", "Pool", "RankError"]

_SUBGROUPS: tuple[Ranks, ...] = ((0,), (0, 1), (0, 1, 2), (1, 2), (2, 3))
_START_LIMIT = 120.0  # seconds for all ranks to come up, on a slow and busy machine
PRELOADED = [
    *("torch", "torch.distributed", "torch.nn.parallel"),
    "torch._dynamo",  # imported by the first torch DDP of a process, for a second
    # Test modules import these; better once here than once in each rank.
    *("pytest", "hypothesis", "tests.support.worker", "minidp"),
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
        self.rank, self.kinds, self.message = rank, kinds, message
        self.traceback, self.exit_code = traceback, exit_code
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
        head = f"[rank {self.rank}] {self.kind}: {self.message}"
        texts = [head, self.traceback, *map(str, self.others)]
        if self.kind in ("Exited", "Hang"):  # stacks are long, and logs are cut
            texts.append(f"(That was: {head})")
        return "\n".join(texts)

    def __repr__(self) -> str:
        return f"RankError(rank={self.rank}, {self.kind}: {self.message!r})"


_awake: set[Pool] = set()  # whose processes are not stopped
_asleep: set[Pool] = set()  # whose processes are


def let_sleep(*, besides: Pool | None = None) -> None:
    """Stop the processes of all pools that have no job, perhaps besides one."""
    for pool in _awake - {besides}:
        pool.sleep()


@atexit.register
def _wake_all() -> None:
    # Multiprocessing asks its processes to end, and then waits for them.
    for pool in list(_asleep):
        pool.wake()


class Pool:
    """Rank processes for many jobs; replaced when a job leaves them unusable.

    Args:
        world_size: How many processes.
        group_timeout: Seconds after which a collective without its peers fails.
        env: Extra environment variables of the processes, see `run_fresh`.
        backend: Of all groups.
        devices: Of each rank; the CPU by default.
        subgroups: Groups to prepare besides the default one.
    """

    def __init__(
        self,
        world_size: int = 4,
        group_timeout: float = 20.0,
        *,
        env: Mapping[str, str] | None = None,
        backend: str = "gloo",
        devices: Sequence[str] = (),
        subgroups: Sequence[Ranks] = _SUBGROUPS,
    ) -> None:
        self._world_size, self._group_timeout = world_size, group_timeout
        self._env, self._backend, self._devices = env or {}, backend, tuple(devices)
        self._subgroups = tuple(
            ranks
            for ranks in subgroups
            if max(ranks) < world_size and len(ranks) < world_size
        )
        self._folder: tempfile.TemporaryDirectory[str] | None = None  # of these ranks:
        self._connections: list[mp_connection.Connection] = []
        self._processes: list[Any] = []
        self._replies: dict[int, Reply] = {}  # the latest of each rank
        self._is_busy = False  # whether a job runs

    def run(
        self,
        function: Callable[..., Any],
        where: int | Sequence[int],
        *args: Any,
        errors: str = "raise",
        limit: float = 45.0,
    ) -> list[Any]:
        """Call ``function(ctx, *args)`` on several ranks and collect what it returns.

        Args:
            function: A function at the top level of an importable module.
            where: World size (the first so many ranks), or the ranks of a prepared
                group.
            *args: Sent by value.  Tensors arrive contiguous and detached.
            errors: ``"raise"``: the root cause is raised (a dead process, else the
                earliest `RankError`: others often only report that a peer has left).
                ``"return"``: a failed rank's place in the result holds its `RankError`.
                A rank that died has the kind ``Exited`` and its ``exit_code`` (-9 after
                SIGKILL), one that never answered the kind ``Hang``.
            limit: Seconds after which a rank counts as hung.

        Returns:
            One result for each rank, in rank order.
        """
        ranks = tuple(range(where)) if isinstance(where, int) else tuple(where)
        prepared = (*self._subgroups, tuple(range(self._world_size)))
        if ranks not in prepared:
            raise ValueError(f"no group over ranks {ranks}; prepared: {prepared}")
        module, name = function.__module__, function.__qualname__
        if "<" in name or module == "__main__":
            raise ValueError(
                f"{module}.{name} cannot be imported by a rank process; "
                "use a function defined at the top level of an importable module"
            )
        let_sleep(besides=self)
        self.wake()
        self.start()
        begin = time.monotonic()
        self._is_busy = True
        try:
            outcomes = self._run(Job(module, name, ranks, args), limit)
        except BaseException:  # interrupted: nobody knows what the ranks are doing
            self.close()
            raise
        finally:
            self._is_busy = False
        seconds = time.monotonic() - begin
        failed = [outcome for outcome in outcomes if isinstance(outcome, RankError)]
        if self._is_broken(failed, seconds):
            self.close()
        if errors == "raise" and failed:
            first, *others = sorted(failed, key=lambda e: (e.kind != "Exited", e.at))
            first.others = tuple(others)
            raise first
        return outcomes

    def sleep(self) -> None:
        """Stop these processes until they are needed, unless a job runs."""
        if self in _awake and not self._is_busy:
            _awake.remove(self)
            _asleep.add(self)
            self._signal(signal.SIGSTOP)

    def wake(self) -> None:
        """Let these processes go on if they are stopped (`run` does this by itself)."""
        if self in _asleep:
            _asleep.remove(self)
            _awake.add(self)
            self._signal(signal.SIGCONT)

    def _signal(self, number: int) -> None:
        for process in self._processes:
            if process.is_alive():
                os.kill(process.pid, number)

    def start(self) -> None:
        """Make sure that the processes run (`run` does this by itself)."""
        if self._folder is not None:
            return
        begin = time.monotonic()
        _awake.add(self)
        self._folder = tempfile.TemporaryDirectory(prefix="minidp-ranks-")
        context: Any = multiprocessing.get_context(
            "spawn" if self._env else "forkserver"
        )
        if not self._env:
            context.set_forkserver_preload(PRELOADED)
        try:
            with mock.patch.dict(os.environ, self._env):
                for rank in range(self._world_size):
                    self._start_rank(context, rank)
            for rank, conn in enumerate(self._connections):
                left = begin + _START_LIMIT - time.monotonic()
                if not conn.poll(max(0.0, left)):
                    raise self._hang(rank, rank, _START_LIMIT)
                try:
                    conn.recv_bytes()
                except EOFError:
                    raise self._exit(rank, rank) from None
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """End these processes (and only these), whatever they are doing."""
        for conn in self._connections:
            conn.close()
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()
        if self._folder is not None:
            self._folder.cleanup()
        self._folder, self._connections, self._processes = None, [], []
        self._replies = {}
        _awake.discard(self)
        _asleep.discard(self)

    def _start_rank(self, context: Any, rank: int) -> None:
        assert self._folder is not None
        ours, theirs = context.Pipe()
        setup = Setup(
            rank=rank,
            world_size=self._world_size,
            store_path=str(Path(self._folder.name, "store")),
            stacks_path=str(self._stacks_file(rank)),
            subgroups=self._subgroups,
            group_timeout=self._group_timeout,
            backend=self._backend,
            device=self._devices[rank] if self._devices else "cpu",
        )
        process = context.Process(target=serve, args=(theirs, setup), daemon=True)
        process.start()
        theirs.close()  # so that the rank's death shows as end-of-file on `ours`
        self._connections.append(ours)
        self._processes.append(process)

    def _run(self, job: Job, limit: float) -> list[Any]:
        """Run a job on its ranks; a result or a `RankError` for each, in order."""
        blob = pack(job)
        for rank in job.ranks:
            # A dead rank is noticed below, as end-of-file.
            with contextlib.suppress(BrokenPipeError):
                self._connections[rank].send_bytes(blob)
        outcomes: dict[int, Any] = {}
        deadline = time.monotonic() + limit
        waiting: dict[Any, int] = {self._connections[rank]: rank for rank in job.ranks}
        while waiting:
            left = max(0.0, deadline - time.monotonic())
            ready = mp_connection.wait(list(waiting), left)
            if not ready:
                break
            for conn in ready:
                rank = waiting.pop(conn)
                outcomes[rank] = self._receive(rank, job.ranks.index(rank))
        for rank in waiting.values():
            outcomes[rank] = self._hang(rank, job.ranks.index(rank), limit)
        return [outcomes[rank] for rank in job.ranks]

    def _receive(self, rank: int, group_rank: int) -> Any:
        try:
            reply: Reply = unpack(self._connections[rank].recv_bytes())
        except (EOFError, ConnectionResetError):
            return self._exit(rank, group_rank)
        self._replies[rank] = reply
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
        assert self._folder is not None
        return Path(self._folder.name, f"rank{rank}.stacks")

    def _is_broken(self, failed: Sequence[RankError], seconds: float) -> bool:
        """Whether the next job cannot use these processes."""
        # One failed transfer closes a gloo connection for good.  The text of the cause
        # is in the traceback even where the package wrapped the exception.
        if any(
            error.kind in ("Exited", "Hang")
            or error.is_a("DistError")
            or "gloo/" in error.traceback
            for error in failed
        ):
            return True
        if failed and seconds >= self._group_timeout:
            return True
        # Ranks that are out of step: in groups that they made, in collectives.
        replies = self._replies
        if len({reply.groups_made for reply in replies.values()}) > 1:
            return True
        groups = {ranks for reply in replies.values() for ranks in reply.issued}
        return any(
            len({replies[r].issued[ranks] for r in ranks if r in replies}) > 1
            for ranks in groups
        )
