"""Sum the buckets of a backward over the replicas that torchft's manager has found.

This is the only file that knows torchft: its versions, types, and private names. For
the rest of minidp a replica is in a group of one rank, the `ReplicaGroup`, whose
all-reduce makes a `Sum` over the participants. A `Quorum` says who these are, and sums
all buckets of a backward a second time if one of the participants dies.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from importlib import metadata
from typing import Any, TypeVar

import torch
from torch.distributed import ReduceOp

from minidp.accelerator import After, current_stream, has_streams
from minidp.comm import all_reduce, waiting
from minidp.core import Averaging, Reducer, decode_layout, encode_layout
from minidp.errors import CollectiveError, MiniDPError, explain
from minidp.layout import Layout
from minidp.shared_memory import SharedBuffer

from . import history
from .agreement import Agreement

try:
    from torchft.process_group import ProcessGroupDummy
except ImportError as error:
    raise ImportError(
        f"minidp.torchft needs torchft, which cannot be imported ({error}). "
        "What to do: pip install 'minidp[torchft]' if minidp is installed, else "
        "pip install torchft==0.2.0."
    ) from error

logger = logging.getLogger("minidp")
KNOWN = ("0.2.0",)  # the versions whose private names mean what is assumed below
KEY = "minidp"  # the key of the layout in the state that a joining replica receives
BUFFERS = "buffers"  # the key of module buffers there
ATTEMPTS = 3  # how often gradients are sent before the step is given up
SUM = ReduceOp.SUM
Started = TypeVar("Started")


def require_known(version: str) -> None:
    """Raise an ImportError for a version of torchft that is not one of `KNOWN`."""
    if version not in KNOWN:
        raise ImportError(
            f"minidp.torchft knows torchft {', '.join(KNOWN)}, but {version} is "
            "installed, whose private names may have a different meaning. What to do: "
            f"pip install torchft=={KNOWN[-1]}, or update minidp."
        )


require_known(metadata.version("torchft"))


def decides_alone(manager: Any) -> bool:
    """Return whether this process may repeat a step without asking any other one.

    With a synchronous quorum its gradients would be those of other parameters. And if
    the replica has several processes, another one may have noticed no error.
    """
    return bool(manager._use_async_quorum and manager._group_world_size == 1)


class Rank(int):
    """The rank 0, whose text names the replica, so that errors say which one it is."""

    text = "0"

    def __str__(self) -> str:
        """Return what errors say after the word "rank": "0 of replica 3"."""
        return self.text


class ReplicaGroup(ProcessGroupDummy):  # type: ignore[misc]
    """A group of one rank for minidp, whose all-reduce sums over the participants."""

    quorum: Quorum  # to be set after the construction

    def __init__(self, manager: Any) -> None:
        super().__init__(0, 1)
        self._me = Rank(0)
        name = getattr(manager, "_replica_id", None)
        if isinstance(name, str) and name:
            self._me.text = f"{manager._group_rank} of replica {name}"

    def rank(self) -> int:
        """Return 0, with a text that names the replica."""
        return self._me

    def getBackendName(self) -> str:
        """Return what recordings name as the backend."""
        return "torchft"

    def allreduce(self, tensors: list[torch.Tensor], opts: object) -> Sum:
        """Start to sum the first tensor over the participants, in place."""
        tensor = tensors[0]
        # If a replica dies, the sum is started again, with what was to be sent at
        # first. A map of used parameters, which is int32, is kept for that; the
        # `Quorum` fills buckets again from ``.grad``.
        if tensor.dtype is torch.int32:
            return Sum(self.quorum, partial(tensor.copy_, tensor.clone()))
        return Sum(self.quorum, lambda: tensor)


class Sum:
    """The sum of one tensor over the participants, as a work that is its own future.

    The constructor starts it. Before that, and before it is started again for a new
    quorum, ``write`` is called, which fills and returns the tensor.
    """

    def __init__(self, quorum: Quorum, write: Callable[[], torch.Tensor]) -> None:
        self._quorum, self._write = quorum, write
        self.is_over = False
        quorum.sums.append(self)
        self.launch()

    def launch(self) -> None:
        """Write the tensor, and start its sum."""
        self.tensor = self._write()
        self.work: Any = self._quorum.launch(self.tensor)
        self._note_stream()

    def _note_stream(self) -> None:
        device = self.tensor.device
        self._stream = current_stream(device) if has_streams(device) else None

    @contextmanager
    def _on_stream(self) -> Iterator[None]:
        """Let the block run on the stream of the launch, and this one wait for it.

        The manager refuses to wait on another one.
        """
        if self._stream is None:
            yield
            return
        with self._stream:
            yield
            ended = After(self.tensor.device)
        ended.hold_back()

    def pass_on(self) -> None:
        """Do what has to be done before any sum is waited for to its end: nothing."""

    def end(self) -> None:
        """Wait for this all-reduce, whose error the manager keeps."""
        if self._stream is not None:
            with self._on_stream(), waiting():
                self.work.wait()
            return
        # The manager's own `wait` makes futures and hands each to a thread with timers.
        # For a sum on the CPU, which has ended here, they have nothing to do.
        inner = getattr(self.work, "_work", None)
        if inner is None:
            with waiting():
                self.work.wait()
            return
        try:
            with waiting():
                inner.wait()
        except Exception as error:  # whatever the process group raises
            self._quorum.manager.report_error(error)

    def get_future(self) -> Sum:
        """Return itself, because it has what `minidp.comm` asks of a future."""
        return self

    def done(self) -> bool:
        """Return whether all sums of this backward have been waited for."""
        return self.is_over

    def wait(self) -> torch.Tensor:
        """Wait for all sums of this backward, and return the tensor.

        If a sum failed for good, nothing is raised. The tensor has no meaning then, but
        the manager will not commit the step.
        """
        if not self.is_over:
            self._quorum.settle()
        return self.tensor

    def add_done_callback(self, call: Callable[[Any], None]) -> None:
        """Call back when the all-reduce is over, which may be before `wait`."""
        # The manager's own future completes only when somebody waits for its work.
        inner = getattr(self.work, "_work", self.work)
        inner.get_future().add_done_callback(call)


class OverReplicas(Averaging):
    """What averages over replicas have in common, whatever their order.

    Whoever is this must set `quorum` at the end of the constructor.
    """

    quorum: Quorum

    @property
    def seat(self) -> tuple[int, int]:
        """This replica's index among those in the last quorum, and their number."""
        return self.quorum.seat

    def share(self, *_args: Any, **_options: Any) -> list[SharedBuffer]:
        """Return [], because no bucket lies in shared memory here."""
        return []

    def begin(self) -> None:
        """Wait for the quorum, and fix the divisor of this backward.

        This may replace the buckets, none of which is filled yet.
        """
        self.num_contributors = self.quorum.begin()
        super().begin()


class Quorum:
    """Find out who takes part in each backward, and sum over these replicas.

    The constructor adds the bucket layout to the state that the manager sends to
    joining replicas.

    Args:
        manager: The manager.
        reducer: The reducer whose buckets are summed.
        logical_ranks: The number of logical ranks, if there are any. They have rounds
            of their own (`logical`) when a replica dies.

    Raises:
        ValueError: Another wrapper has added a layout to this manager.
    """

    def __init__(
        self, manager: Any, reducer: Reducer, logical_ranks: int | None = None
    ) -> None:
        self.manager = manager
        self.sums: list[Sum] = []  # those of this backward, in launch order
        self.step = -1  # the manager's step when this backward began
        self.contributors = 1  # how many there are in this quorum, to divide by
        self.seat = 0, 1  # the index in the last `members`, and how many these were
        self._has_rounds = logical_ranks is not None
        self.agreement = Agreement(reducer, logical_ranks)
        self._history = history.History()
        self._compared = -1  # the last quorum in which histories were compared
        self.gave_up = False  # histories differ, so this step is not tried again
        # With logical ranks: the module buffers with which a step begins, if they are
        # not as they are just now.
        self.buffers_at: Callable[[int], Sequence[torch.Tensor] | None]
        self.buffers_at = lambda _step: None
        # The state of the replica with which this one catches up in this quorum.
        self.received: dict[str, Any] | None = None
        self._reducer, self.rank = reducer, reducer.rank
        self._told: list[int] = []  # the participants that were logged last
        try:
            manager.register_state_dict_fn(KEY, self._receive, self.state)
        except AssertionError:  # so torchft says that the key is there already
            raise ValueError(
                "This manager has a minidp.torchft.DataParallel already. What to do: "
                "wrap both networks in one module, or make a manager for each."
            ) from None

    def state(self) -> dict[str, Any]:
        """Return the state for a replica that joins. The manager calls this.

        Raises:
            MiniDPError: This replica is at a step of which it has received the state,
                but has not taken it over. Whoever joins would get an older one.
        """
        if self._is_late:
            what = f"This replica does not have the state of step {self.step_now} yet, "
            what += "for which another one asks."
            remedy = "wait: the other one asks again"
            raise MiniDPError(explain(self.rank, what, remedy=remedy))
        step = self.own_step
        state = self.agreement.state(step) | self._history.state(step)
        return state | {BUFFERS: self.buffers_at(step)}

    def _receive(self, state: dict[str, Any]) -> None:
        """Use the state of the replica with which this one catches up."""
        self._history.receive(state)
        self.agreement.receive(state)

    @property
    def contributes(self) -> bool:
        """Whether the gradients of this replica count, or it only receives averages."""
        return bool(self.manager.is_participating())

    @property
    def has_failed(self) -> bool:
        """Whether an error is known in this step, which the manager will not commit."""
        manager = self.manager
        return (manager.errored() or manager._pg.errored()) is not None

    def members(self) -> list[int]:
        """Wait for the quorum, and return the numbers of the replicas in it.

        These are the numbers at the end of their ids, or 0, 1 and so on if an id has
        none, or if two have the same.
        """
        with waiting():
            count = self.manager.num_participants()
        known = getattr(self.manager._pg, "_global_ranks", None)
        if known is None or len(set(known)) < count:  # ids have no numbers of their own
            return list(range(count))
        return [rank // self.manager._group_world_size for rank in known]

    def position(self) -> int:
        """Return this replica's index in `members`, or 0 if it has none."""
        known = getattr(self.manager._pg, "_rank", None)
        return int(self.manager.participating_rank() or 0 if known is None else known)

    @property
    def place(self) -> tuple[int, int]:
        """This replica's rank in the manager's process group, and the size of that.

        A group that could not be connected, because a replica has died meanwhile, has
        no size. Then the step has failed, and the quorum says how large it would be.
        """
        mine = self.position()
        try:
            return mine, int(self.manager._pg.size())
        except Exception:  # whatever the process group raises
            if not self.has_failed:
                raise
            return mine, max(len(self.members()), mine + 1)

    @property
    def step_now(self) -> int:
        """The number of the step that the manager will commit next."""
        return int(self.manager.current_step())

    @property
    def own_step(self) -> int:
        """The number of the step that comes next for the state of this replica."""
        own = self._history.own_step
        return self.step_now if own is None else own

    @property
    def group(self) -> Any:
        """The manager's process group, over the replicas in the quorum."""
        return self.manager._pg

    @property
    def device(self) -> torch.device:
        """The device on which messages travel."""
        return self._reducer.queue.specs[0].device

    def attempt(self, start: Callable[[], Started]) -> Started | None:
        """Start a message of the manager's process group, and return what that returns.

        It is None if an error is known, or if this raises one, of which the manager is
        told.
        """
        if self.has_failed:
            return None
        try:
            return start()
        except Exception as error:  # whatever the process group raises
            self.manager.report_error(error)
            return None

    def has_arrived(self, work: Any) -> bool:
        """Wait for a message, and return whether it has not failed.

        The manager is told of its error.
        """
        try:
            with waiting():
                work.wait()
        except Exception as error:  # whatever the process group raises
            self.manager.report_error(error)
            return False
        return True

    def add_up(self, tensor: torch.Tensor) -> bool:
        """Add up a tensor over all replicas in the quorum, also those that catch up.

        It is done in place. Wait for it, and return whether it has not failed.
        """
        work = self.attempt(lambda: all_reduce(tensor, self.group))
        return work is not None and self.has_arrived(work)

    def close_state(self) -> None:
        """Let nobody read a state that this replica has sent, since all have it.

        Forwards change module buffers now. The manager closes it at the vote, so that
        without one a replica that joins next could still read it.
        """
        self.manager._checkpoint_transport.disallow_checkpoint()

    def note_used(self, sums: Iterable[Sequence[torch.Tensor | None]]) -> None:
        """Note that the next reduction has gradients of these parameters, too."""
        used = {i for grads in sums for i, grad in enumerate(grads) if grad is not None}
        self._reducer.ledger.used_locally |= used

    def give_up(self, why: str) -> None:
        """Let the manager not commit this step."""
        self.manager.report_error(RuntimeError(f"minidp: {why}"))

    def launch(self, tensor: torch.Tensor) -> Any:
        """Start the manager's sum of a tensor, in place, and return its work.

        If this replica is catching up, the manager sends zeros.
        """
        return self.manager.allreduce(tensor, reduce_op=SUM)

    # -- a backward begins -------------------------------------------------------------

    def begin(self) -> int:
        """Wait for the quorum, and return how many contribute, to divide by.

        The buckets are replaced if another layout was committed, or comes from the
        replica to catch up with.

        Raises:
            MiniDPError: No quorum was started, the manager cannot save the model, or
                the other replicas have another model or other options.
            CollectiveError: No quorum was found.
        """
        self.sums = []
        self.meet()
        self.contributors = self._count()
        return self.contributors

    def meet(self) -> None:
        """Wait for the quorum, and replace the buckets if that is due.

        Raises:
            MiniDPError, CollectiveError: As `begin`.
        """
        self.gave_up = False
        self._find_out()
        self._take_over_late()
        self.received = self._received()
        has_returned = False
        if self.received is None:
            has_returned = self._return_to_own_step()
            self.agreement.follow(self.manager.current_step())
        else:
            self._receive(self.received)
        self._compare_histories()
        if has_returned:
            self.gave_up = True
            self.give_up("this replica was believed to be at an earlier step")

    def _return_to_own_step(self) -> bool:
        """Let the manager have the step of our state, if nobody had another one.

        Else this replica would do a step again from the state after it. The backward
        that has begun may have the batch of that step, so its gradients do not count.
        """
        manager, step = self.manager, self._history.own_step
        if step is None or manager._healing:
            return False
        manager.load_state_dict(manager.state_dict() | {"step": step})
        self._history.own_step = None
        return True

    @property
    def _is_late(self) -> bool:
        """Whether the state of another replica has come, but its step had no vote."""
        manager = self.manager
        return not manager._healing and manager._pending_state_dict is not None

    def _take_over_late(self) -> None:
        """Give this step up if the state of another replica came before, for nothing.

        A replica that catches up has the step of the others from its quorum on, but
        their state only from its vote on. If it never votes, because the script skips
        the step or an error ends it, the manager forgets that it was behind, and lets
        gradients of its old parameters count. So it votes against this step, and the
        vote loads the state. The others hear of it at once, and repeat the step.
        """
        manager = self.manager
        if not self._is_late:
            return
        what = f"This replica has received the state of step {self.step_now}, but the "
        what += "step ended without a vote. It takes the state over now."
        remedy = "call step() of torchft's optimizer in each step, whatever happens"
        logger.warning("%s", explain(self.rank, what, remedy=remedy))
        manager._healing = self.gave_up = True
        self.give_up("the state of another replica is taken over late")
        manager._pg.abort()

    def _compare_histories(self) -> None:
        """Give this step up if replicas have come to it on different ways.

        Those outside of the largest part that has a common history tell the manager
        that they are behind. So the next quorum brings them the state of one of it, if
        one is there. Replicas of different steps need only a new quorum: the manager
        believes the highest one.
        """
        manager, step, now = self.manager, self.step_now, self.manager._quorum_id
        mine = self._history.at(step)
        if now == self._compared:
            self._history.begin(step, now)
            return
        place, size = self.place
        message = torch.zeros(2, size, dtype=torch.int64, device=self.device)
        message[:, place] = torch.tensor([mine, step], device=self.device)
        if not self.add_up(message):
            return
        numbers, steps = message.tolist()
        if len({*steps}) > 1:
            self.gave_up = True
            self.give_up("replicas are at different steps")
            return
        wanted = history.believed(numbers)
        others = [place for place, number in enumerate(numbers) if number != wanted]
        if not others:
            self._compared = now
            self._history.begin(step, now)
            return
        names = self.members()
        names = names if len(names) == size else list(range(size))
        text = history.warning(self.rank, step, [names[place] for place in others])
        logger.warning("%s", text)
        if mine != wanted:
            manager.load_state_dict(manager.state_dict() | {"step": step - 1})
            self._history.own_step = step
        self.gave_up = True
        self.give_up("replicas have different histories")

    def _find_out(self) -> None:
        """Wait for the quorum, and log the replicas in it if they have changed."""
        manager, rank = self.manager, self.rank
        if manager._quorum_future is None:
            remedy = "call zero_grad() of torchft's optimizer, or "
            remedy += "manager.start_quorum(), at the beginning of each step"
            what = "A backward began, but no quorum was started."
            raise MiniDPError(explain(rank, what, remedy=remedy))
        if set(manager._user_state_dicts) == {KEY}:
            remedy = "give it state_dict and load_state_dict of model and optimizer"
            what = "The manager cannot bring a joining replica up to date."
            raise MiniDPError(explain(rank, what, remedy=remedy))
        try:
            now, count = self.members(), int(manager.num_participants())
        except Exception as error:  # whatever the thread of the quorum has raised
            what = f"No quorum was found for step {manager.current_step()}: {error}."
            expected = "min_replicas of the lighthouse to ask it in quorum_timeout"
            remedy = "look for the lighthouse and for the replicas that are missing, "
            remedy += "and start this process again: its manager cannot go on"
            text = explain(rank, what, expected=expected, remedy=remedy)
            raise CollectiveError(text) from error
        self.seat = self.position(), len(now)
        if now != self._told:
            step, who = manager.current_step(), ", ".join(map(str, now))
            logger.info("From step %d on the replicas in the quorum are %s.", step, who)
            if count < (least := manager._min_replica_size):
                text = "Step %d waits until %d replicas (min_replica_size) are there."
                logger.warning(text, step, least)
            self._told = now

    def _received(self) -> dict[str, Any] | None:
        """Return the state of the replica that this one catches up with, if any."""
        found = self.manager._healing and self.manager._pending_state_dict
        if not found:
            return None
        if KEY not in found["user"]:
            what = "The replica that this one catches up with sends no bucket layout."
            remedy = "wrap the model by minidp.torchft.DataParallel in all replicas"
            raise MiniDPError(explain(self.rank, what, remedy=remedy))
        state: dict[str, Any] = found["user"][KEY]
        return state

    def _count(self) -> int:
        """Agree on a layout if that is due, and return how many replicas contribute."""
        # The manager's own count is right, but for step 0: there it counts replicas
        # whose gradients it sets to zero. So in step 0, and to agree on a layout, there
        # is one more all-reduce.
        manager, specs = self.manager, self._reducer.queue.specs
        self.step = step = manager.current_step()
        count = max(int(manager.num_participants()), 1)
        is_due = self.agreement.begin()
        if step and not is_due:
            return count
        mine = None
        if is_due and manager.participating_rank() == 0:
            mine = self.agreement.proposal()
        numbers = [0] * 2 * len(specs) if mine is None else encode_layout(mine)
        numbers = [1, int(mine is not None), *numbers]
        sums = torch.tensor(numbers, dtype=torch.int64, device=self.device)
        with waiting():
            self.launch(sums).wait()
        if self.has_failed:
            return count
        contributors, is_known, *numbers = map(int, sums.tolist())
        if is_due:
            layout = decode_layout(numbers, specs) if is_known else None
            self.agreement.agree(step, layout)
        return max(contributors, 1)

    # -- it ends -----------------------------------------------------------------------

    def settle(self) -> None:
        """Wait for all sums of the backward, and repeat them if one has failed.

        They are repeated over a new quorum, up to three times in all. If that does not
        help, or gradients cannot be summed again, the manager knows of the error, and
        will not commit the step.
        """
        sums = self.sums
        for attempt in range(1, ATTEMPTS + 1):
            for each in sums:
                each.pass_on()
            for each in sums:
                each.end()
            is_last = attempt == ATTEMPTS or not self._may_repeat()
            if is_last or not self.has_failed:
                break
            self.begin_again()
            self._repeat(sums)
        for each in sums:
            each.is_over = True

    def begin_again(self) -> bool:
        """Begin to look for a new quorum, because a message of this step has failed.

        Returns:
            Whether this replica was catching up, and has now the state of another one.
        """
        manager = self.manager
        error, was_behind = manager.errored() or manager._pg.errored(), manager._healing
        why = str(error).partition("\n")[0]  # the lines below it are a traceback
        logger.info("Step %d is repeated with the survivors: %s", self.step_now, why)
        # The answer is no. But it lets the next quorum get a new group.
        manager.should_commit()
        manager.start_quorum()
        return bool(was_behind)

    def _may_repeat(self) -> bool:
        """Return whether a failed backward can be summed again, from ``.grad``."""
        # Logical ranks repeat by themselves. Views of buckets hold partial sums by now,
        # and with create_graph=True the sums have a history. If this replica was
        # catching up, its gradients are of other parameters than it would have then.
        manager, config = self.manager, self._reducer.queue.config
        is_local = not config.gradient_as_bucket_view and not torch.is_grad_enabled()
        is_free = is_local and decides_alone(manager) and not manager._healing
        return is_free and not self._has_rounds and not self.gave_up

    def _repeat(self, sums: list[Sum]) -> None:
        """Wait for a new quorum, and start to sum the local gradients over it.

        Another replica may have committed the step meanwhile. Then the manager lets
        this one bring zeros to the next step of the others, whose state and averages it
        gets. If their buckets differ from ours, see `_stand_in`.
        """
        self._find_out()
        received = self._received()
        if received is not None:
            layout = self.agreement.layout_of(received)
            self._history.receive(received)
        self._compare_histories()
        if received is not None:
            if layout != self._reducer.queue.layout:
                self._stand_in(layout, sums[len(self._reducer.queue.buckets) :])
                return
            self.agreement.receive(received)
        self.contributors = self._count()
        factors = self._reducer.queue.averaging.factors_of(self.contributors)
        for bucket in self._reducer.queue.buckets:
            bucket.copy_in([param.grad for param in bucket.params], factors)
        for each in sums:
            each.launch()

    def _stand_in(self, layout: Layout, others: list[Sum]) -> None:
        """Take part in the others' all-reduces with zeros, in buckets of their layout.

        Our own buckets cannot be replaced at the end of a backward. So an error is
        reported, for this replica not to commit the step. The ``others`` are sums that
        follow those of the buckets, and are started again.
        """
        for plan in layout.buckets:
            zeros = torch.zeros(plan.numel, dtype=plan.dtype, device=plan.device)
            real = torch.view_as_real(zeros) if plan.dtype.is_complex else zeros
            with waiting():
                self.launch(real).wait()
        for each in others:
            each.launch()
        self.manager.report_error(RuntimeError("minidp: the others' buckets differ"))
