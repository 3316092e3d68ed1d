"""`DataParallel` over replicas that may die and come back.

    forward      the manager looks for a quorum, in its own thread
    backward     first gradient: wait for the quorum. Full buckets: start the manager's
                 all-reduce, wait for nothing
    its end      wait for all buckets. Has a replica died, a new quorum sums the same
                 local gradients, divided by the number of replicas left
    step         torchft's optimizer asks the manager whether to commit it

For the rest of minidp a replica is alone, in a group of one rank whose all-reduce is
the manager's (`quorum.ReplicaGroup`) and whose divisor is the number of contributors.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

from torch import nn

from minidp import data_parallel
from minidp.core import Averaging, Observer, Reducer
from minidp.errors import UnsyncedGradientsError, explain
from minidp.layout import Layout
from minidp.shared_memory import SharedBuffer, SmallMessage

from .quorum import Quorum, ReplicaGroup


class DataParallel(data_parallel.DataParallel):
    """`minidp.DataParallel` over the replicas of a torchft ``Manager``.

    Train as with torchft's own DDP. The manager needs ``state_dict`` and
    ``load_state_dict`` of model and optimizer; the bucket layout is added to it. Module
    buffers stay each replica's own, but a joining one receives some::

        model = minidp.torchft.DataParallel(manager, net)
        optimizer = torchft.Optimizer(manager, torch.optim.AdamW(net.parameters()))
        for x, y in batches:
            optimizer.zero_grad()            # starts to look for a quorum
            loss_fn(model(x), y).backward()  # averages over the participants
            optimizer.step()                 # if the manager commits the step

    Args:
        manager: torchft's, for this module only.
        module: with the same parameters in all replicas.
        options: those of `minidp.DataParallel`. ``hang_timeout`` has no effect: the
            timeout of the manager's process group holds.

    Raises:
        ValueError: an option, or a model, that does not go with changing replicas.
        MiniDPError: in a backward: no quorum was started, or the manager cannot save
            the model.
        UnsyncedGradientsError: an optimizer steps, but the manager has not committed
            the step of the last backward.
    """

    def __init__(self, manager: Any, module: nn.Module, **options: Any) -> None:
        if isinstance(manager, nn.Module):
            raise TypeError("The manager is the first argument, the module the second.")
        for name in {"process_group", "device_mesh"} & options.keys():
            _refuse(f"the argument {name}", "the manager has the process group")
        group = ReplicaGroup(manager)
        super().__init__(module, process_group=group, **options)
        reducer = self._reducer
        self._refuse_options(reducer)
        self._quorum = group.quorum = Quorum(manager, reducer)
        averaging = reducer.queue.averaging = _ByContributors(self._quorum, reducer)
        reducer.queue.observers.append(averaging)
        self._guard.precondition = averaging.refuse_uncommitted

    def _refuse_options(self, reducer: Reducer) -> None:
        """Raise ValueError if an option is set that changing replicas do not allow.

        Those are static_graph, skip_all_reduce_unused_params, check_replicas_every,
        averages over items, a search for the bucket layout; and a module with sparse
        gradients.
        """
        config, specs = reducer.queue.config, reducer.queue.specs
        past = "a replica that joins knows nothing of the others' earlier backwards"
        dense = "the manager reduces dense buckets, as they are"
        skips = "skip_all_reduce_unused_params"
        changes = "the replicas, whose counts and times would be compared, change"
        for is_wanted, name, why in (
            (config.static_graph, "static_graph", past),
            (config.skip_all_reduce_unused_params, skips, past),
            (self._replication.check is not None, "check_replicas_every", past),
            (config.tunes, 'bucket_cap_mb="auto"', changes),
            (config.averages_items, 'average_over="items"', changes),
            (any(spec.sparse for spec in specs), "a sparse gradient", dense),
        ):
            if is_wanted:
                _refuse(name, why)

    @property
    def participants(self) -> list[int]:
        """Numbers of the replicas in the quorum: the digits at the end of their ids.

        Places in the quorum if ids end with no number, or two with the same. Waits for
        the quorum. Includes replicas that are catching up.
        """
        return self._quorum.members()

    def reset(self, *, copy_from: int | None = None) -> None:
        """Recover from a backward that raised; the manager will not commit its step.

        Not a collective. Keeps the committed bucket layout. Call ``zero_grad()`` next.
        ValueError for ``copy_from``: the manager heals a replica that is behind.
        """
        if copy_from is not None:
            _refuse("copy_from in reset()", "the manager heals replicas by itself")
        quorum, layout = self._quorum, self._quorum.state()["layout"]
        quorum.manager.report_error(RuntimeError("minidp: reset() was called"))
        super().reset()
        quorum.agreement.adopt(layout)

    def register_comm_hook(self, state: object, hook: Any) -> None:
        """Raise ValueError: the manager reduces the buckets."""
        _refuse("register_comm_hook()", "the manager reduces the buckets")

    def step_in_backward(self, *args: Any, **kwargs: Any) -> None:
        """Raise ValueError: the manager commits a step only after its backward."""
        _refuse("step_in_backward()", "the manager commits a step after its backward")

    def join(self, *args: Any, **kwargs: Any) -> Any:
        """Raise ValueError: a replica that ran out of inputs may just leave."""
        _refuse("join()", "a replica without inputs may leave, and the others go on")

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        _refuse("a copy", "it would use the original's manager; copy model.module")


def _refuse(what: str, why: str) -> None:
    raise ValueError(
        f"minidp.torchft.DataParallel does not have {what}: {why}. What to do: leave "
        "it out (also the environment variable that sets it)."
    )


class _ByContributors(Averaging, Observer):
    """The reducer's `Averaging`: divides by the number of contributors in the quorum.

    Also an observer, see `finished`. `DataParallel` registers it, and lets the
    optimizer guard call `refuse_uncommitted` before steps; the constructor waits for
    nothing.
    """

    def __init__(self, quorum: Quorum, reducer: Reducer) -> None:
        batched = reducer.queue.config.batched_grad_copy
        device = reducer.queue.specs[0].device
        super().__init__(reducer.communicator, device, batched=batched)
        self._quorum, self._reducer = quorum, weakref.proxy(reducer)  # it holds us
        self.no_shared_memory = "the manager reduces the buckets"

    @property
    def seat(self) -> tuple[int, int]:
        """This replica's index among those in the last quorum, and their number."""
        return self._quorum.seat

    def share(
        self, layout: Layout, messages: Sequence[SmallMessage], *, asks: bool
    ) -> list[SharedBuffer]:
        """Return [], whatever the arguments: no bucket lies in shared memory."""
        return []

    def begin(self) -> None:
        """Wait for the quorum, and fix this backward's divisor, as `Averaging.begin`.

        `Quorum.begin` may replace the buckets, before any is filled; raises as that
        does.
        """
        self.num_contributors = self._quorum.begin()
        super().begin()

    def finished(self) -> None:
        """Set ``.grad`` to None where no contributor used the parameter.

        Only with find_unused_parameters, and if this replica does not contribute: there
        ``.grad`` still holds its local gradient, whereas contributors have None.
        """
        queue = self._reducer.queue
        if queue.config.find_unused_parameters and not self._quorum.contributes:
            counts = queue.used_map.last_counts.tolist()
            for param, count in zip(self._reducer.params, counts, strict=True):
                param.grad = param.grad if count else None

    def refuse_uncommitted(self) -> None:
        """Raise UnsyncedGradientsError if the last backward's step is not committed."""
        step, rank = self._quorum.step, self._quorum.rank
        if self._quorum.manager.current_step() == step:
            what = f"An optimizer steps, but the manager has not committed step {step}."
            remedy = "step with torchft's optimizer, or if manager.should_commit()"
            raise UnsyncedGradientsError(explain(rank, what, remedy=remedy))
