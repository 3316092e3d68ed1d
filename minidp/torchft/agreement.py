"""Let the bucket layout be a part of the committed state, as the parameters are.

Replicas with different layouts would add up different gradients. A replica that joins
has not seen the backward by which the others have rebuilt their buckets. So the layout
of participating rank 0 is agreed on in a backward, and used once the step of that
backward is committed. A replica that has not committed it gets it with the state of one
that has.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from minidp.config import ReducerConfig
from minidp.core import RebuildPolicy, Reducer, layout_after
from minidp.errors import MAX_NAMES, MiniDPError, explain
from minidp.layout import Layout, ParamSpec, read_plain, resumed_layout, to_plain

# The options on which the messages of a backward depend.
DECISIVE = "caps", "last_is_small", "find_unused_parameters"


class NotByItself(RebuildPolicy):
    """A rebuild policy that keeps the ready order, but never lets a forward rebuild.

    An `Agreement` reads the order, and replaces the buckets itself.
    """

    is_due = False

    @property
    def order(self) -> list[int]:
        """The indices of parameters in the order of their gradients, [] if unknown."""
        return self._order or []

    def plain_layout(
        self, now: Layout, specs: Sequence[ParamSpec], config: ReducerConfig
    ) -> dict[str, Any]:
        """Return the layout as plain data. No rebuild is ever due here."""
        return to_plain(now, specs, rebuilt=self.has_rebuilt)


class Agreement:
    """Decide on the layout of each backward, alike on all replicas.

    A `Quorum` makes it and calls its methods. Layouts are plain data here, as
    `to_plain` makes them.

    Args:
        reducer: The reducer whose layout it is.
        logical_ranks: Their number, which must be the same on all replicas.
    """

    def __init__(self, reducer: Reducer, logical_ranks: int | None = None) -> None:
        self._reducer, self._logical_ranks = reducer, logical_ranks
        queue = reducer.queue
        self._policy = NotByItself(queue.config.saved_layout)
        reducer.rebuild_policy = self._policy
        rebuilt = self._policy.has_rebuilt
        # The committed layout, and one that was agreed on, with the step of that.
        self.layout = to_plain(queue.layout, queue.specs, rebuilt=rebuilt)
        self._agreed: tuple[int, dict[str, Any]] | None = None
        self._received: object = None  # the last state that came from another replica

    def begin(self) -> bool:
        """Return whether this backward must agree on a layout, equally on all replicas.

        It must until a layout in ready order is committed, if the options ask for one.
        What was agreed on but not committed is forgotten.
        """
        self._agreed = None
        follows = self._reducer.queue.config.follows_ready_order
        return follows and not self.layout["rebuilt"]

    def proposal(self) -> Layout | None:
        """Return the layout for the ready order of this replica, if that is known."""
        queue, order = self._reducer.queue, self._policy.order
        return layout_after(order, queue.specs, queue.config) if order else None

    def agree(self, step: int, layout: Layout | None) -> None:
        """Keep a layout, rank 0's proposal, to be used once ``step`` is committed."""
        if layout is not None:
            specs = self._reducer.queue.specs
            self._agreed = step, to_plain(layout, specs, rebuilt=True)

    def state(self, step: int) -> dict[str, Any]:
        """Return the layout committed at ``step``, and more, for a replica that joins.

        Any thread may call this.
        """
        layout, agreed = self.layout, self._agreed
        if agreed is not None and step > agreed[0]:
            layout = agreed[1]
        return {"layout": layout, "facts": self._facts()}

    def _facts(self) -> list[str]:
        # Parameters and options that all replicas must have in common.
        queue, params = self._reducer.queue, self._reducer.params
        config = queue.config
        found = [
            f"{spec.name}: {spec.dtype} {tuple(param.shape)}"
            for spec, param in zip(queue.specs, params, strict=True)
        ]
        found += [f"{name}={getattr(config, name)}" for name in DECISIVE]
        return [*found, f"logical_ranks={self._logical_ranks}"]

    def follow(self, step: int) -> None:
        """Use what was agreed on in an earlier step, if that step is committed."""
        if self._agreed is not None and step > self._agreed[0]:
            self.adopt(self._agreed[1])

    def receive(self, state: dict[str, Any]) -> None:
        """Use the layout of another replica's state, and forget what was agreed on.

        Raises:
            MiniDPError: That replica has another model, or other options.
        """
        if state is not self._received:
            self.layout_of(state)
            self._received, self._agreed = state, None
            self.adopt(state["layout"])

    def layout_of(self, state: dict[str, Any]) -> Layout:
        """Return the layout of another replica's state.

        Raises:
            MiniDPError: That replica has another model, or other options. This must be
                found before anything is sent: Gloo ends a process that receives more
                than it expects.
        """
        theirs, mine = state["facts"], self._facts()
        if theirs != mine:
            what = "This replica's model or options are not those of the others."
            more, other = (
                [fact for fact in one if fact not in others][:MAX_NAMES]
                for one, others in ((theirs, mine), (mine, theirs))
            )
            expected, found = "; ".join(more) or "no more", "; ".join(other) or "less"
            remedy = "start all replicas with the same model, dtype and options"
            rank = self._reducer.rank
            text = explain(rank, what, expected=expected, found=found, remedy=remedy)
            raise MiniDPError(text)
        return resumed_layout(read_plain(state["layout"]), self._reducer.queue.specs)

    def adopt(self, plain: dict[str, Any]) -> None:
        """Use a committed layout, and replace the buckets if it is a new one."""
        layout = resumed_layout(read_plain(plain), self._reducer.queue.specs)
        self.layout, self._policy.has_rebuilt = plain, plain["rebuilt"]
        if layout != self._reducer.queue.layout:
            self._reducer.adopt(layout)
