"""The simulated world: clock, threads and tables of each rank, and torch's groups."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, TypeVar

from minidp import world

from .network import Network
from .scheduler import Process, Scheduler, Thread, of_the_system

Value = TypeVar("Value")


class Event:
    """`threading.Event` for the threads of one process."""

    def __init__(self, scheduler: Scheduler) -> None:
        # Weakly, because a future that never ends keeps its callbacks, and they this.
        self._scheduler: Scheduler = weakref.proxy(scheduler)
        self._is_set = False
        self._waiters: list[Thread] = []

    def is_set(self) -> bool:
        return self._is_set

    def clear(self) -> None:
        self._is_set = False

    def set(self) -> None:
        self._is_set = True
        self._scheduler.wake_all(self._waiters)

    @of_the_system
    def wait(self, timeout: float | None = None) -> bool:
        if not self._is_set:
            self._scheduler.block(timeout, "an event", self._waiters)
        return self._is_set


class SimulatedWorld(world.World):
    """What `minidp.world` asks, answered for the rank that runs just now."""

    def __init__(self, scheduler: Scheduler, network: Network) -> None:
        self._scheduler, self._network = scheduler, network

    def now(self) -> float:
        process = self._scheduler.process
        return self._scheduler.time + (process.clock_offset if process else 0.0)

    def timer(self) -> Callable[[], int]:
        return lambda: round(1e9 * self.now())

    @of_the_system
    def sleep(self, seconds: float) -> None:
        if not self._scheduler.is_over:
            self._scheduler.block(seconds, f"{seconds:g} s to pass")

    def event(self) -> Any:
        return Event(self._scheduler)

    def thread(self, target: Callable[..., Any], **options: Any) -> Any:
        process = self._scheduler.process
        assert process is not None
        return Thread(self._scheduler, process, target, **options)

    def own(self, each: world.PerProcess[Value]) -> Value:
        process = self._scheduler.process
        if process is None:  # what is collected after the end of the run
            return each.of_this_process
        if each not in process.owned:
            process.owned[each] = each.make()
        value: Value = process.owned[each]
        return value

    def at_exit(self, function: Callable[[], object]) -> None:
        process = self._scheduler.process
        assert process is not None
        process.at_exit.append(function)

    def keep_for_good(self, kept: object) -> None:
        """Who calls this has it in a table of its own, which lives as long as a run."""

    def let_go(self, kept: object) -> None:
        """It lives as long as its other references."""

    @of_the_system
    def connect(
        self, make: Callable[[], Value], name: str, ranks: int, *, is_listed: bool
    ) -> Value:
        group: Any = self._network.join(name, ranks, is_listed=is_listed)
        return group


class TorchsWorld:
    """Torch's tables of process groups, of the rank that runs just now.

    Torch calls its own `distributed_c10d._world` a point to put another one in.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        self.__dict__["_scheduler"] = scheduler
        self.__dict__["_outside"] = _tables()
        for each in scheduler.processes:
            each.torchs = _tables()

    def _here(self) -> Any:
        process: Process | None = self._scheduler.process
        return self._outside if process is None else process.torchs

    def __getattr__(self, name: str) -> Any:
        return getattr(self._here(), name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._here(), name, value)


def _tables() -> Any:
    return SimpleNamespace(
        default_pg=None,
        pg_map={},
        pg_names={},
        pg_group_ranks={},
        pg_backend_config={},
        group_count=0,
        tags_to_pg={},
        pg_to_tag={},
        pg_coalesce_state={},
        comms=[],
    )
