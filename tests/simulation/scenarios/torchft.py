"""torchft: replicas die, freeze, join and part, and what is committed stays right.

A training on simulated managers (`replicas`), of which `torchft_checks` computes every
committed step again. In `torchft` each replica has its own batch. A parameter without
effect, `Marked.who`, has the replica's one-hot vector as gradient, so that an average
tells who has contributed. In `torchft_logical` a step is the work of logical ranks, and
each committed one has the bits of one process.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn
from torch.distributed import distributed_c10d as c10d
from torchft import Optimizer

from minidp.torchft import DataParallel
from tests.simulation import faults, training
from tests.simulation.faults import Fault, InjectedError, Kind
from tests.simulation.lighthouse import Cut, Lighthouse, Limits
from tests.simulation.play import Play, Rank
from tests.simulation.replicas import Replica
from tests.simulation.scheduler import Life, Process, Thread
from tests.simulation.tape import Tape
from tests.simulation.training import Net, Settings, batch, heads_of

from .logical import SEED, loss_of

REPLICAS = 4  # at most
STEPS = 6
TRIES = 30  # of a replica that stays alone
MOMENTUM = 0.5
SEAMS, POINTS = 400, 24  # up to which something goes wrong with a rank
KINDS = (
    Kind.NOTHING,
    Kind.FREEZES,
    Kind.HEARS_LATE,
    Kind.IS_SLOW,
    Kind.DIES,
    Kind.RAISES,
    Kind.DIES_SILENTLY,
    Kind.INTERRUPTED,
)
HASTY = Limits(heartbeat=0.6, join=1.0, quorum=20.0, manager=10.0, group=10.0)
# Of a parameter its values, and of its momentum; of a buffer its values.
State = tuple[bytes, ...]


@dataclass(frozen=True)
class Elastic:
    """A training whose replicas come and go.

    Attributes:
        training: The training.
        limits: What the managers and their lighthouse wait for.
        number: How many logical ranks there are; None if each replica has its batch.
        pause: How many seconds a step takes.
        late: The last rank joins when another one has begun this step, if not 0.
        replaces: Or when one has died, whose number it gets.
        recovers: Whether a script that raises goes on after a `reset`.
        skips: The first time that a replica comes to this step it does not vote.
        more_faults: What else goes wrong, beside the fault of the run.
        parts: Ranks that the lighthouse does not hear for so many seconds from a step
            on, and then for how many seconds it does not hear the others. It is
            (ranks, step, seconds, seconds), or () if it hears all.
    """

    training: Settings
    limits: Limits
    number: int | None
    pause: float
    late: int
    replaces: bool
    recovers: bool
    skips: int
    more_faults: tuple[Fault, ...]
    parts: tuple[Any, ...]


def draw_elastic(tape: Tape, *, is_logical: bool = False) -> Elastic:
    """Draw a training, and what happens to its replicas."""
    drawn = training.draw(tape)
    options = [pair for pair in drawn.options if pair[0] in _OPTIONS]
    mode = "all" if drawn.mode == "static" else drawn.mode
    settings = Settings(mode, STEPS, drawn.local, options=tuple(options))
    limits = (HASTY, Limits())[tape.choose(2)]
    size = 1 + tape.choose(2)
    limits = replace(limits, min_replica_size=size, min_replicas=1 + tape.choose(size))
    join = tape.choose(4)
    parts: tuple[Any, ...] = ()
    if tape.choose(3) == 2:
        ranks = ((0,), (1,), (0, 1), (2,))[tape.choose(4)]
        seconds = [(1.5, 4.0, 8.0, 15.0)[tape.choose(4)] for _ in range(2)]
        parts = (ranks, 1 + tape.choose(3), *seconds)
    return Elastic(
        settings,
        limits,
        (4, 3, 5, 7, 2, 1)[tape.choose(6)] if is_logical else None,
        pause=(0.0, 0.5, 2.0)[tape.choose(3)],
        late=join if join < 3 else 0,
        replaces=join == 3,
        recovers=tape.choose(2) == 1,
        skips=(-1, -1, 1, 2)[tape.choose(4)],
        more_faults=(faults.draw(tape, REPLICAS, SEAMS, POINTS, list(KINDS)),),
        parts=parts,
    )


_OPTIONS = "bucket_cap_mb", "gradient_as_bucket_view", "batched_grad_copy"


def draw_elastic_logical(tape: Tape) -> Elastic:
    """Draw the same by logical ranks."""
    return draw_elastic(tape, is_logical=True)


class Marked(Net):
    """A net that tells whose gradients an average has."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.who = nn.Parameter(torch.zeros(REPLICAS))

    def forward(self, x: torch.Tensor, heads: Any, number: int = 0) -> torch.Tensor:
        return super().forward(x, heads) + self.who[number]


def trained(net: nn.Module) -> list[nn.Parameter]:
    """Return the parameters that have an effect."""
    return [each for name, each in net.named_parameters() if name != "who"]


class Stepper(torch.optim.SGD):
    """SGD that may be struck when half of the parameters have stepped."""

    def __init__(self, net: Net, halfway: Callable[[], None]) -> None:
        super().__init__(trained(net), training.LEARNING_RATE, MOMENTUM)
        self._net, self._halfway = net, halfway
        self.before: State | None = None  # the state with which a step began

    def step(self, closure: Any = None) -> None:
        self.before = state_of(self._net, self)
        (group,) = self.param_groups
        everything = group["params"]
        for half in (everything[:3], everything[3:]):
            group["params"] = half
            super().step()
            self._halfway()
        group["params"] = everything


def tensor_bytes(tensor: torch.Tensor | None) -> bytes:
    # The sign of a zero depends on who brings zeros to a sum.
    return b"" if tensor is None else (tensor.detach() + 0.0).numpy().tobytes()


def state_of(net: Net, optimizer: torch.optim.Optimizer) -> State:
    """Return all of a state but the module buffer."""
    rows = [optimizer.state.get(param, {}) for param in trained(net)]
    momenta = [row.get("momentum_buffer") for row in rows]
    return tuple(map(tensor_bytes, [*trained(net), *momenta]))


@dataclass
class Commit:
    """A step that a replica has committed."""

    rank: int
    step: int
    quorum: int
    who: Sequence[float]  # how much each replica has contributed
    before: State
    after: State
    buffer: bytes | None  # None if it only caught up


@dataclass
class Job:
    """What the replicas of a run have in common, and have done."""

    lighthouse: Lighthouse
    ready: set[int] = field(default_factory=set)  # ranks that have made a manager
    gave_up: list[tuple[int, int]] = field(default_factory=list)  # and how many lived
    first_states: set[State] = field(default_factory=set)
    commits: list[Commit] = field(default_factory=list)
    # From which states each replica has computed gradients of each step.
    seen: set[tuple[int, int, State]] = field(default_factory=set)
    waiting: list[Thread] = field(default_factory=list)  # for any change of this

    def wait_until(self, is_so: Callable[[], bool]) -> None:
        """Wait for something that replicas do, or that happens to them."""
        scheduler = self.lighthouse.scheduler
        while not is_so():
            scheduler.block(0.5, "the other replicas", self.waiting)

    def tell(self) -> None:
        """Let those look again who wait."""
        self.lighthouse.scheduler.wake_all(self.waiting)


def job_of(play: Play) -> Job:
    """Return the job of a run."""
    if "job" not in play.board:
        limits = play.settings.limits
        play.board["job"] = Job(Lighthouse(play.scheduler, play.network, limits))
    job: Job = play.board["job"]
    return job


class Trainer:
    """One replica: its net, its manager, and what it does in a step."""

    def __init__(self, ctx: Rank, job: Job, number: int) -> None:
        self._ctx, self._job, self._number = ctx, job, number
        self._has_skipped = False
        self._settings: Elastic = ctx.settings
        options = self._settings.training.constructor
        if self._settings.number is None:
            self.net: Net = Marked(number)
        else:
            self.net, options["logical_ranks"] = Net(0), self._settings.number
        self.inner = Stepper(self.net, lambda: ctx.point("in the optimizer"))
        watched = weakref.proxy(ctx)  # or the hook, and so all of this, lives for ever
        self.net.second.bias.register_hook(lambda _: watched.point("in a backward"))
        self.manager = Replica(ctx, job.lighthouse, number, self._load, self._save)
        self.model = DataParallel(self.manager, self.net, **options)
        self._optimizer = Optimizer(self.manager, self.inner)
        job.first_states.add(state_of(self.net, self.inner))

    def _save(self) -> Any:
        return {"net": self.net.state_dict(), "optimizer": self.inner.state_dict()}

    def _load(self, state: Any) -> None:
        self.net.load_state_dict(state["net"])
        self.inner.load_state_dict(state["optimizer"])

    def try_step(self) -> None:
        """Try one step, and keep it if it was committed."""
        self.inner.before = None
        self._optimizer.zero_grad()
        if self._settings.number is None:
            self.net.who.grad = None
            self._turn(self._number)
        else:
            for leaf in self.model.each_logical_rank():
                self._turn(leaf)
        self._ctx.point("before a step")
        if self._votes():
            self._optimizer.step()
        if self.inner.before is not None:
            self._job.commits.append(self._commit(self.inner.before))
            self._job.tell()

    def _votes(self) -> bool:
        """Return whether the script goes on to the vote, and not to the next step."""
        is_it = self.manager.current_step() == self._settings.skips
        if not is_it or self._has_skipped:
            return True
        self._has_skipped = True  # as one that leaves out what is not finite
        return False

    def _commit(self, before: State) -> Commit:
        manager, net = self.manager, self.net
        return Commit(
            self._ctx.rank,
            manager.current_step() - 1,
            manager._quorum_id,
            net.who.grad.tolist() if isinstance(net, Marked) else (),
            before,
            state_of(net, self.inner),
            tensor_bytes(net.seen) if manager.is_participating() else None,
        )

    def _turn(self, number: int) -> None:
        step, settings = self.manager.current_step(), self._settings.training
        self._job.seen.add((number, step, state_of(self.net, self.inner)))
        self._job.tell()
        loss_by = loss_in if self._settings.number is None else loss_of
        for part in range(settings.local + 1):
            is_local = part < settings.local
            with self.model.no_sync() if is_local else nullcontext():
                self._ctx.point("before a forward")
                loss_by(self.model, settings, number, step, part).backward()


def loss_in(
    model: nn.Module, settings: Settings, number: int, step: int, part: int
) -> torch.Tensor:
    """Return the loss of one micro-batch of a replica."""
    heads = heads_of(settings, number, step)
    loss: torch.Tensor = model(batch(number, step, part), heads, number)
    return loss


def train_elastic(ctx: Rank) -> None:
    """Join when it is time, and train until all steps are committed."""
    settings, play = ctx.settings, ctx._play
    job = job_of(play)
    c10d._world.default_pg = None  # torchft needs none
    c10d._world.pg_map.clear()
    torch.manual_seed(SEED)
    number = _join(ctx, job, play.scheduler.processes)
    if number is None:
        return
    with ctx.step(-1):
        trainer = Trainer(ctx, job, number)
    job.ready.add(ctx.rank)
    job.tell()
    num_first = ctx.size - _num_late(settings, ctx.size)
    if ctx.rank < num_first:
        _wait_for_others(job, play.scheduler.processes[:num_first])
    for _ in range(TRIES):
        step = trainer.manager.current_step()
        if step >= STEPS:
            return
        _part(ctx, job, step)
        try:
            with ctx.step(step):
                trainer.try_step()
        except InjectedError:
            if not settings.recovers or trainer.inner.before is not None:
                raise
            trainer.model.reset()
        ctx.sleep(settings.pause)
    living = [each for each in play.scheduler.processes if each.life is Life.LIVES]
    job.gave_up.append((ctx.rank, sum(each.rank in job.ready for each in living)))


def _num_late(settings: Elastic, size: int) -> int:
    """Return how many replicas come late, if the others can begin without them."""
    comes_late = settings.late or settings.replaces
    return int(comes_late and size > settings.limits.min_replica_size)


def _join(ctx: Rank, job: Job, processes: Sequence[Process]) -> int | None:
    """Return the number of a replica when it may join, or None if it never may."""
    if ctx.rank < ctx.size - _num_late(ctx.settings, ctx.size):
        return ctx.rank
    settings, others = ctx.settings, processes[:-1]

    def dead() -> list[int]:
        return [each.rank for each in others if each.life is Life.KILLED]

    def is_time() -> bool:
        step = max((step for _, step, _ in job.seen), default=0)
        return bool(dead()) if settings.replaces else step >= settings.late

    job.wait_until(
        lambda: is_time() or all(each.life is not Life.LIVES for each in others)
    )
    if not is_time():
        return None
    return dead()[0] if settings.replaces else ctx.rank


def _wait_for_others(job: Job, first: Sequence[Process]) -> None:
    """Begin when all managers are there, or their replicas have died."""
    job.wait_until(
        lambda: job.ready.issuperset(r.rank for r in first if r.life is Life.LIVES)
    )


def _part(ctx: Rank, job: Job, step: int) -> None:
    """Let the lighthouse hear some replicas no longer, and then the others."""
    if not ctx.settings.parts or job.lighthouse.cuts or step < ctx.settings.parts[1]:
        return
    ranks, _, first, second = ctx.settings.parts
    others, now = [r for r in range(ctx.size) if r not in ranks], ctx.time
    job.lighthouse.cuts = [
        Cut(ranks, now, now + first),
        Cut(others, now + first, now + first + second),
    ]
