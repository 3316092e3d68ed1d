"""Play one simulated run from a tape, and check what must always hold."""

from __future__ import annotations

import functools
import gc
import logging
import sys
import warnings
from collections.abc import Callable, Container, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.distributed import distributed_c10d as c10d
from torch.nn.modules import module as modules

from minidp import randomness, world

from .faults import Fault, Kind, Striker, draw
from .network import Network
from .scheduler import Finding, Life, Process, Scheduler, Thread
from .store import MARK, Connection, Server
from .tape import Tape
from .world import SimulatedWorld, TorchsWorld

GROUP_SECONDS = 1800.0  # the timeout of the groups
_forward_hooks = modules._global_forward_pre_hooks


@dataclass
class Outcome:
    """How one step of one rank ended: with gradients, or with an error."""

    rank: int
    step: int
    began: float
    ended: float = 0.0
    error: BaseException | None = None
    is_own: bool = False  # the script called collectives of its own
    num_waits: int = 1  # how many limits of a wait it may take
    grads: dict[str, torch.Tensor] = field(default_factory=dict)


class Rank:
    """What a scenario gets on each rank.

    Attributes:
        rank: This rank.
        size: How many ranks there are.
        settings: What the scenario's `Plan` has drawn.
    """

    def __init__(self, play: Play, process: Process) -> None:
        self._play, self._process = play, process
        self.rank, self.size = process.rank, len(play.scheduler.processes)
        self.settings = play.settings
        self._points = 0
        self.board = play.board  # what ranks tell each other, outside of minidp

    @property
    def fault(self) -> Fault:
        return self._play.fault

    def point(self, what: str) -> None:
        """Mark a line of the user's script, at which others may go on."""
        self._play.scheduler.turn(what)
        number, self._points = self._points, self._points + 1
        for each in self._play.strikers:
            each.at_point(self._process, number)

    def sleep(self, seconds: float) -> None:
        world.sleep(seconds)

    @property
    def time(self) -> float:
        return self._play.scheduler.time

    @contextmanager
    def step(self, number: int) -> Iterator[Outcome]:
        """Keep how the block ended as the outcome of step ``number``."""
        outcome = Outcome(self.rank, number, self.time)
        self._play.outcomes.append(outcome)
        try:
            yield outcome
        except BaseException as error:
            error.__traceback__ = None
            outcome.error = error
            raise
        finally:
            outcome.ended = self.time
            how = "ok" if outcome.error is None else _line(outcome.error)
            self._play.scheduler.note(f"step {number}: {how}")


def _line(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".partition("\n")[0]


Scenario = Callable[[Rank], None]


class Play:
    """One run of a scenario.

    Args:
        scenario: What each rank does.
        tape: Makes all choices.
        ranks: How many ranks there are.
        settings: Whatever the scenario wants.
        kinds: What may go wrong.
        seams, points: Up to which seam of a rank, and which point of its script,
            something may go wrong.
        fault: What goes wrong, if it is not to be drawn.
        more_faults: What else goes wrong.
        has_numbers: Whether each rank has random generators of its own. Else all have
            those of this process, and draw nothing.
        is_users: Whether the script is a user's: its comm hooks may wait in callbacks,
            and the account tells which of its lines starts a collective.
    """

    def __init__(
        self,
        scenario: Scenario,
        tape: Tape,
        ranks: int,
        settings: Any = None,
        kinds: tuple[Kind, ...] = (Kind.NOTHING,),
        seams: int = 160,
        points: int = 10,
        fault: Fault | None = None,
        more_faults: Sequence[Fault] = (),
        has_numbers: bool = False,
        is_users: bool = False,
    ) -> None:
        self.scenario, self.tape, self.settings = scenario, tape, settings
        self.scheduler = Scheduler(tape, ranks)
        self.network = Network(self.scheduler, GROUP_SECONDS)
        self.network.is_users = is_users
        self.server = Server(self.scheduler)
        self.scheduler.on_switch = _swap_numbers if has_numbers else None
        self.fault = fault or draw(tape, ranks, seams, points, list(kinds))
        self.strikers = [
            Striker(each, self.scheduler, self.network, self.server, hosts_store=False)
            for each in (self.fault, *more_faults)
        ]
        self.outcomes: list[Outcome] = []
        self.board: dict[Any, Any] = {}
        self.ends: dict[int, BaseException | None] = {}  # what each script raised
        self.warned: list[tuple[int, str]] = []

    def run(self) -> None:
        """Run all ranks to their ends, and raise the first `Finding`."""
        scheduler = self.scheduler
        torchs = TorchsWorld(scheduler)
        stores = [Connection(self.server) for _ in scheduler.processes]
        simulated = SimulatedWorld(scheduler, self.network)
        before, c10d._world = c10d._world, torchs  # type: ignore[assignment]
        hooks = {**_forward_hooks}
        try:
            self.network.start(stores)
            with _quiet(self), world.replaced(simulated), randomness.kept():
                for process in scheduler.processes:
                    # A user's ranks are on one host, which has one clock.
                    offset = 0.0 if self.network.is_users else 1000.0
                    process.clock_offset = offset * process.rank
                    process.on_seam = self._strikes_at(process)
                    main = functools.partial(self._main, process)
                    Thread(scheduler, process, main, name="main").start()
                scheduler.run()
        finally:
            c10d._world = before
            _forward_hooks.clear()  # of ranks that died
            _forward_hooks.update(hooks)
            vars(sys).pop("last_value", None)
            self._clear()

    def _main(self, process: Process) -> None:
        self.ends[process.rank] = None
        try:
            self.scenario(Rank(self, process))
        except Exception as error:
            self.ends[process.rank] = error
            error.__traceback__ = None
            if isinstance(error, Finding):
                raise
        except (KeyboardInterrupt, SystemExit) as error:
            self.ends[process.rank] = error
            error.__traceback__ = None
        self.scheduler.note(f"the script ends: {self.ends[process.rank]!r:.300}")
        for function in reversed(process.at_exit):
            # What Python keeps of the error that ends a process, until it exits.
            sys.last_value = self.ends[process.rank]
            function()
        self.network.finish(process)
        self.strikers[0].end(process, Life.ENDED)

    def _strikes_at(self, process: Process) -> Callable[[Thread, str], None] | None:
        mine = [each for each in self.strikers if each.fault.rank == process.rank]

        def strike(thread: Thread, what: str) -> None:
            for each in mine:
                each.on_seam(thread, what)

        return strike if mine else None

    def _clear(self) -> None:
        for process in self.scheduler.processes:
            process.owned.clear()
            process.torchs = None
            process.on_seam = None
        self.network.clear()
        self.server.connections.clear()

    def tell(self, lines: int | None = None, *, without: Container[str] = ()) -> str:
        """Return the account of the run, or its last lines.

        Args:
            lines: How many of the last ones.
            without: Names of threads that it says nothing of.
        """
        account = self.scheduler.account
        shown = [each for each in account if each[2] not in without]
        rows = shown if lines is None else shown[-lines:]
        first = account[0][0] if account else 0.0
        indent = "    "
        text = "\n".join(
            f"{time - first:10.4f} {indent * 2 * rank}r{rank} {thread}: {text}"
            for time, rank, thread, text in rows
        )
        return MARK.sub("~", text)  # random, and nothing follows from it


def _swap_numbers(before: Process | None, after: Process) -> None:
    """Let the random generators of this process be those of another rank."""
    if before is not None:
        before.numbers = randomness.Numbers()
    if after.numbers is not None:
        after.numbers.restore()


@contextmanager
def _quiet(play: Play) -> Iterator[None]:
    """Keep what minidp logs and warns of for the account, and collect no garbage.

    What a collection finds depends on what ran before in this process, and finalizers
    would run at other places in a replay.
    """
    handler = _ToAccount(play)
    logger = logging.getLogger("minidp")
    before = logger.propagate
    logger.propagate = False
    logger.addHandler(handler)
    was_enabled = gc.isenabled()
    gc.disable()

    def show(message: Any, *_args: Any, **_kwargs: Any) -> None:
        process = play.scheduler.process
        play.warned.append((process.rank if process else -1, str(message)))
        play.scheduler.note(f"warns: {message}")

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("always")
            warnings.showwarning = show
            yield
    finally:
        if was_enabled:
            gc.enable()
        logger.removeHandler(handler)
        logger.propagate = before


class _ToAccount(logging.Handler):
    def __init__(self, play: Play) -> None:
        super().__init__()
        self._play = play

    def emit(self, record: logging.LogRecord) -> None:
        process = self._play.scheduler.process
        text = record.getMessage()
        self._play.warned.append((process.rank if process else -1, text))
        self._play.scheduler.note(f"logs: {text}")
