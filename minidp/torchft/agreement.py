"""Let the bucket layout be a part of the committed state, as the parameters are.

Participating rank 0's ready order is agreed on in a backward, and used once its step is
committed. A replica that has not committed it gets it with the state of one that has.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from minidp.core import RebuildPolicy, Reducer, layout_after
from minidp.errors import MAX_NAMES, MiniDPError, explain
from minidp.layout import Layout, read_plain, resumed_layout, to_plain

# Options that decide on the messages of a backward.
DECISIVE = "caps", "last_is_small", "find_unused_parameters", "averages_items"


class NotByItself(RebuildPolicy):
    """Keep the ready order, but let an `Agreement` say when buckets are rebuilt."""

    is_due = False

    @property
    def order(self) -> list[int]:
        """Indices of parameters as their gradients became ready; [] if unknown."""
        return self._order or []


class Agreement:
    """Decide on the layout of each backward of one reducer."""

    def __init__(self, reducer: Reducer) -> None:
        self._reducer = reducer
        self._policy = NotByItself(reducer.queue.config.saved_layout)
        reducer.rebuild_policy = self._policy
        self._agreed: tuple[int, dict[str, Any]] | None = None  # in which step, on what
        self._received: object = None  # the last state that came from another replica

    @property
    def is_due(self) -> bool:
        """Whether this backward agrees on an order; equal on all replicas."""
        follows = self._reducer.queue.config.follows_ready_order
        return follows and not self._policy.has_rebuilt

    def proposal(self) -> list[int]:
        """Return this replica's ready order; [] if unknown."""
        return self._policy.order

    def agree(self, step: int, order: Sequence[int]) -> None:
        """Use the layout for ``order`` as soon as ``step`` is committed."""
        queue = self._reducer.queue
        layout = layout_after(order, queue.specs, queue.config)
        self._agreed = step, to_plain(layout, queue.specs, rebuilt=True)

    def state(self, step: int) -> dict[str, Any]:
        """Return parameters, and the layout for ``step``; in another thread, too."""
        queue, agreed = self._reducer.queue, self._agreed
        if agreed is not None and step > agreed[0]:
            layout = agreed[1]
        else:
            rebuilt = self._policy.has_rebuilt
            layout = to_plain(queue.layout, queue.specs, rebuilt=rebuilt)
        return {"layout": layout, "facts": self._facts()}

    def _facts(self) -> list[str]:
        """Return in words what decides on the messages, besides the layout."""
        queue, params = self._reducer.queue, self._reducer.params
        config = queue.config
        found = [
            f"{spec.name}: {spec.dtype} {tuple(param.shape)}"
            for spec, param in zip(queue.specs, params, strict=True)
        ]
        return found + [f"{name}={getattr(config, name)}" for name in DECISIVE]

    def follow(self, step: int) -> None:
        """Before the backward of ``step``: use what was agreed on, if committed."""
        if self._agreed is not None and step > self._agreed[0]:
            self.adopt(self._agreed[1])
            self._agreed = None

    def receive(self, state: dict[str, Any]) -> None:
        """Use the `state` of another replica; once, if it is given twice."""
        if state is not self._received:
            self.layout_of(state)
            self._received, self._agreed = state, None
            self.adopt(state["layout"])

    def layout_of(self, state: dict[str, Any]) -> Layout:
        """Return the layout of another replica's `state`.

        Raises MiniDPError if its model is another one: gloo ends a process that
        receives more than it expects.
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
            raise MiniDPError(
                explain(0, what, expected=expected, found=found, remedy=remedy)
            )
        return resumed_layout(read_plain(state["layout"]), self._reducer.queue.specs)

    def adopt(self, plain: dict[str, Any]) -> None:
        """Use the layout, and its flag "rebuilt", that `state` returns as "layout".

        The buckets are replaced only if it differs. ValueError if it does not fit.
        """
        layout = resumed_layout(read_plain(plain), self._reducer.queue.specs)
        self._policy.has_rebuilt = plain["rebuilt"]
        if layout != self._reducer.queue.layout:
            self._reducer.adopt(layout)
