"""`DataParallel` over replicas that may die and come back.

This is what happens in a step::

    forward      the manager looks for a quorum, in a thread of its own
    backward     the first gradient waits for the quorum. A full bucket starts the
                 manager's all-reduce, and waits for nothing
    its end      all buckets are waited for. If a replica has died, a new quorum sums
                 the same local gradients, divided by the number of replicas left
    step         torchft's optimizer asks the manager whether to commit it

For the rest of minidp a replica is alone, in a group of one rank. The all-reduce of
that group is the manager's (`quorum.ReplicaGroup`), and its divisor is the number of
contributors.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from torch import nn

from minidp import data_parallel
from minidp.core import Observer, Reducer
from minidp.errors import UnsyncedGradientsError, explain

from .logical import ReplicaRounds, TreeOfReplicas
from .quorum import OverReplicas, Quorum, ReplicaGroup, decides_alone


class DataParallel(data_parallel.DataParallel):
    """`minidp.DataParallel` over the replicas of a torchft ``Manager``.

    Train as with torchft's own DDP. The manager needs ``state_dict`` and
    ``load_state_dict`` of model and optimizer, and the bucket layout is added to these.
    Module buffers stay each replica's own, but a joining replica receives some::

        model = minidp.torchft.DataParallel(manager, net)
        optimizer = torchft.Optimizer(manager, torch.optim.AdamW(net.parameters()))
        for x, y in batches:
            optimizer.zero_grad()            # starts to look for a quorum
            loss_fn(model(x), y).backward()  # averages over the participants
            optimizer.step()                 # if the manager commits the step

    Args:
        manager: A torchft ``Manager``, for this module only.
        module: The module, with the same parameters in all replicas.
        options: The options of `minidp.DataParallel`. ``hang_timeout`` has no effect,
            because the timeout of the manager's process group holds.

    Raises:
        ValueError: An option, or the model, does not go with changing replicas.
        MiniDPError: In a backward, if no quorum was started, or the manager cannot save
            the model.
        UnsyncedGradientsError: In a step of an optimizer, if the manager has not
            committed the step of the last backward.
    """

    def __init__(self, manager: Any, module: nn.Module, **options: Any) -> None:
        if isinstance(manager, nn.Module):
            raise TypeError("The manager is the first argument, the module the second.")
        for name in {"process_group", "device_mesh"} & options.keys():
            _refuse(f"the argument {name}", "the manager has the process group")
        group = ReplicaGroup(manager)
        super().__init__(module, process_group=group, **options)
        reducer = self._reducer
        self._refuse_options(reducer, manager)
        logical = self._logical
        number = None if logical is None else logical.options.number
        self._quorum = group.quorum = Quorum(manager, reducer, number)
        commits = _Commits(self._quorum, reducer)
        if logical is None:
            reducer.queue.averaging = _ByContributors(self._quorum, reducer)
        else:
            rounds = ReplicaRounds(self._quorum, logical)
            logical.share_out(
                rounds,
                lambda sums: TreeOfReplicas(reducer, rounds, sums, self._quorum),
            )
            commits.refuse_in_loop = logical.refuse_step
        # First, because logical ranks look at what a backward has left.
        reducer.queue.observers.append(commits, first=True)
        self._guard.precondition = commits.refuse_uncommitted

    def _refuse_options(self, reducer: Reducer, manager: Any) -> None:
        """Refuse what does not go with replicas that change.

        Raises:
            ValueError: The model or an option is such a thing.
        """
        config, specs = reducer.queue.config, reducer.queue.specs
        cannot_repeat = self._logical is not None and not decides_alone(manager)
        past = "a replica that joins knows nothing of the others' earlier backwards"
        dense = "the manager reduces dense buckets, as they are"
        skips = "skip_all_reduce_unused_params"
        alone = (
            "a replica that repeats a step by itself has one process only, and a "
            "manager with use_async_quorum=True"
        )
        changes = "the replicas, whose counts and times would be compared, change"
        for is_wanted, name, why in (
            (config.static_graph, "static_graph", past),
            (config.skip_all_reduce_unused_params, skips, past),
            (self._replication.check is not None, "check_replicas_every", past),
            (config.tunes, 'bucket_cap_mb="auto"', changes),
            (config.averages_items, 'average_over="items"', changes),
            (bool(self._given.audit_every), "audit_every", changes),
            (cannot_repeat, "logical_ranks", alone),
            (any(spec.sparse for spec in specs), "a sparse gradient", dense),
        ):
            if is_wanted:
                _refuse(name, why)

    @property
    def participants(self) -> list[int]:
        """The numbers of the replicas in the quorum, catching up or not.

        These are the numbers at the end of their ids, or places in the quorum if an id
        has none, or if two have the same. This waits for the quorum.
        """
        return self._quorum.members()

    @property
    def logical_state(self) -> dict[str, Any]:
        """What a checkpoint needs of logical ranks, see `minidp.DataParallel`.

        The next step is the manager's, also after one that it has not committed. A run
        that resumes has to load the manager's ``state_dict()``, too.
        """
        state: dict[str, Any] = super().logical_state
        return state | {"first_step": self._quorum.step_now}

    def reset(self, *, copy_from: int | None = None) -> None:
        """Recover from a backward that raised, whose step the manager will not commit.

        It waits for no other replica. Call ``zero_grad()`` next.

        Raises:
            ValueError: ``copy_from`` was passed. The manager heals a replica that is
                behind.
        """
        if copy_from is not None:
            _refuse("copy_from in reset()", "the manager heals replicas by itself")
        quorum = self._quorum
        layout = quorum.agreement.state(quorum.own_step)["layout"]
        quorum.manager.report_error(RuntimeError("minidp: reset() was called"))
        super().reset()
        quorum.agreement.adopt(layout)

    def register_comm_hook(self, state: object, hook: Any) -> None:
        """Raise a ValueError, because the manager reduces the buckets."""
        _refuse("register_comm_hook()", "the manager reduces the buckets")

    def step_in_backward(self, *args: Any, **kwargs: Any) -> None:
        """Raise a ValueError, because the manager commits a step after its backward."""
        _refuse("step_in_backward()", "the manager commits a step after its backward")

    def join(self, *args: Any, **kwargs: Any) -> Any:
        """Raise a ValueError, because a replica without inputs may just leave."""
        _refuse("join()", "a replica without inputs may leave, and the others go on")

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        _refuse("a copy", "it would use the original's manager; copy model.module")


def _refuse(what: str, why: str) -> None:
    raise ValueError(
        f"minidp.torchft.DataParallel does not have {what}: {why}. What to do: leave "
        "it out (also the environment variable that sets it)."
    )


class _ByContributors(OverReplicas):
    """Divide by the number of contributors in the quorum."""

    def __init__(self, quorum: Quorum, reducer: Reducer) -> None:
        batched = reducer.queue.config.batched_grad_copy
        device = reducer.queue.specs[0].device
        super().__init__(reducer.communicator, device, batched=batched)
        self.no_shared_memory = "the manager reduces the buckets"
        self.quorum = quorum


class _Commits(Observer):
    """Watch over what is written and stepped before the manager commits.

    The optimizer guard calls `refuse_uncommitted` before each step.
    """

    def __init__(self, quorum: Quorum, reducer: Reducer) -> None:
        # The reducer holds this object, so this one holds the reducer weakly.
        self._quorum, self._reducer = quorum, weakref.proxy(reducer)
        self.refuse_in_loop: Callable[[], None] = lambda: None  # of logical ranks

    def finished(self) -> None:
        """Set ``.grad`` to None where no contributor has used the parameter.

        Contributors have None there. A replica that does not contribute still has its
        local gradient, so only that has something to do.
        """
        queue = self._reducer.queue
        if queue.config.find_unused_parameters and not self._quorum.contributes:
            counts = queue.used_map.last_counts.tolist()
            for param, count in zip(self._reducer.params, counts, strict=True):
                param.grad = param.grad if count else None

    def refuse_uncommitted(self) -> None:
        """Refuse a step before the manager has committed the last backward.

        Raises:
            UnsyncedGradientsError: The manager has not committed it.
            LogicalRankError: A loop over logical ranks has not ended.
        """
        self.refuse_in_loop()
        if not self._reducer.ledger.sync_enabled:  # a local step
            return
        step, rank = self._quorum.step, self._quorum.rank
        if self._quorum.manager.current_step() == step:
            what = f"An optimizer steps, but the manager has not committed step {step}."
            remedy = "step with torchft's optimizer, or if manager.should_commit()"
            raise UnsyncedGradientsError(explain(rank, what, remedy=remedy))
