"""Let an optimizer step this rank's rows of a divided parameter, and know no others.

While ``step()`` runs, the optimizer's groups have a *part* in the place of the
parameter: a parameter that is a view of the own rows, whose ``.grad`` is a view of the
same rows of ``.grad``. So the optimizer makes its state for these rows only, and steps
nothing else. Before and after, groups and state have the parameter itself, as the
script has put it there::

    groups  [w, b]  --enter-->  [rows of w, b]  --step()--  leave-->  [w, b]
    state   {w: rows of exp_avg}    {rows of w: ...}                  {w: ...}

So all that a script does with an optimizer between two steps finds the parameters that
it knows: schedulers, ``zero_grad()``, a ``GradScaler``, ``add_param_group``, libraries
that look parameters up. Only the state of a divided parameter has another shape.

A large part, and a large parameter of one owner, too, may be stepped in tiles, for the
sake of the cache (`tiles`). Then there are several parts in the place of one.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer

from minidp import world
from minidp.guard import is_in_step, num_running

from .tiles import Tiles, can_be_cut, is_large, may_be_tiled

_SECONDS = 0.001  # between two looks whether a step of another thread is over


class _Part(NamedTuple):
    """What an optimizer has in the place of a parameter: one part, or tiles of it."""

    param: nn.Parameter
    own: Tensor  # the parameter, or the rows of this rank
    parts: list[nn.Parameter]
    tiles: Tiles | None

    def enter(self, state: dict[Any, Any]) -> None:
        """Give the parts the state of the parameter.

        Nothing is taken away before it is elsewhere, here and in `leave`, because an
        interrupt may come between any two lines.
        """
        if self.tiles is not None:
            state.update(zip(self.parts, self.tiles.states(), strict=True))
        elif self.param in state:
            state[self.parts[0]] = state[self.param]
        state.pop(self.param, None)

    def leave(self, state: dict[Any, Any]) -> None:
        """Give the parameter the state, the values and the gradient of the parts.

        A script may have dropped the state after a step that has raised, and a call
        that was interrupted is made again.
        """
        states = [state[part] for part in self.parts if part in state]
        if len(states) == len(self.parts):
            whole = states[0] if self.tiles is None else self.tiles.whole(states)
            state[self.param] = whole
        for part in self.parts:
            state.pop(part, None)
        own = [self.own] if self.tiles is None else self.tiles.own
        for part, values in zip(self.parts, own, strict=True):
            if part.data_ptr() != values.data_ptr():  # it was given other memory
                with torch.no_grad():
                    values.copy_(part)
        if all(part.grad is None for part in self.parts):
            self.param.grad = None


class Exchanged:
    """The parts that are in an optimizer now, if any. It holds nothing but these."""

    def __init__(self) -> None:
        self.groups: list[tuple[dict[str, Any], list[Tensor]]] = []
        self.parts: list[_Part] = []
        self.thread = 0  # in which the step runs, or has raised

    def leave(self, optimizer: Optimizer) -> None:
        """Put the parameters back."""
        self._put_back(optimizer)
        self.groups.clear()
        self.parts.clear()

    def leave_for_now(self, optimizer: Optimizer) -> Callable[[], None]:
        """Put the parameters back, and return a function that takes them out again.

        The step that runs finds the same parts then, with the same states.
        """
        state, groups = optimizer.state, [group for group, _ in self.groups]
        before = [group["params"] for group in groups]
        absent = [each.param for each in self.parts if each.param not in state]
        parts = [part for each in self.parts for part in each.parts]
        states: dict[Tensor, Any] = {
            part: state[part] for part in parts if part in state
        }
        self._put_back(optimizer)

        def take_out() -> None:
            for group, params in zip(groups, before, strict=True):
                group["params"] = params
            for param in absent:
                state.pop(param, None)
            state.update(states)

        return take_out

    def _put_back(self, optimizer: Optimizer) -> None:
        for group, params in self.groups:
            group["params"] = params
        for part in self.parts:
            part.leave(optimizer.state)


class Parts:
    """The parts of one optimizer's parameters of which it steps rows, or tiles.

    Args:
        rows: The rows of this rank, by divided parameter.
        tiled: Parameters that may be stepped in tiles, if they are large enough.
    """

    def __init__(
        self,
        rows: Mapping[nn.Parameter, slice],
        tiled: Collection[nn.Parameter] = (),
    ) -> None:
        self._rows, self._tiled = rows, frozenset(tiled)
        self.now = Exchanged()
        # How often parts have come or gone. It is odd from before the first one is
        # there until the last one is gone, so that another thread can see that it has
        # looked at them.
        self._changes = 0
        # By thread: blocks of `whole`, with that number, in which `state_dict()` runs.
        self._saving: dict[int, list[tuple[Any, bool, int]]] = {}

    def enter(self, optimizer: Optimizer) -> None:
        """Put parts into the place of parameters."""
        if not self._rows and not self._tiled:
            return
        self.leave(optimizer)
        self.now.thread = threading.get_ident()
        self._changes += 1
        for group in optimizer.param_groups:
            params = group["params"]
            made = {
                p: self._part(p, group, optimizer.state)
                for p in params
                if p in self._rows or (is_large(p) and p in self._tiled)
            }
            found = {p: part for p, part in made.items() if part is not None}
            if found:
                self.now.groups.append((group, params))
                self.now.parts += found.values()
                group["params"] = [
                    each
                    for p in params
                    for each in (found[p].parts if p in found else [p])
                ]
        for part in self.now.parts:
            part.enter(optimizer.state)

    def _part(
        self, param: nn.Parameter, group: dict[str, Any], states: Mapping[Any, Any]
    ) -> _Part | None:
        """Return what takes the place of a parameter, or None if it stays."""
        rows = self._rows.get(param)
        own, grad = rows_of(param.detach(), rows), param.grad
        grad = None if grad is None else rows_of(grad, rows)
        may_be = param in self._tiled and may_be_tiled(own, grad, group)
        if may_be and grad is not None:
            state = states.get(param)
            if state and can_be_cut(state, own):
                tiles = Tiles(own, grad, state)
                return _Part(param, own, tiles.params, tiles)
        if rows is None:
            return None
        part = nn.Parameter(own, requires_grad=param.requires_grad)
        part.grad = grad
        return _Part(param, own, [part], None)

    def leave(self, optimizer: Optimizer) -> None:
        """Put the parameters back, if parts are in their place."""
        self.now.leave(optimizer)
        self._changes += self._changes % 2

    @contextmanager
    def whole(self, optimizer: Optimizer) -> Iterator[bool]:
        """Let an optimizer have its parameters inside the block, for a checkpoint.

        It may be written after a step that has raised; or while one runs, by a handler
        of a signal; or by another thread, which waits until the step is over. A step
        waits for nothing while parts are there. The block gets whether they come back
        after it.
        """
        now, me = self.now, threading.get_ident()
        while self._changes % 2 and now.thread != me and is_in_step(now.thread):
            world.sleep(_SECONDS)
        if not self._changes % 2:  # another thread may step from now on
            yield False
            return
        if now.thread != me or not num_running(optimizer):
            self.leave(optimizer)
            yield False
            return
        number, take_out = self._changes, now.leave_for_now(optimizer)
        try:
            yield True
        finally:
            if number == self._changes:
                take_out()

    def before_saving(self, optimizer: Optimizer) -> None:
        """Begin a block of `whole` in which ``state_dict()`` runs."""
        block = self.whole(optimizer)
        is_for_now = block.__enter__()
        mine = self._saving.setdefault(threading.get_ident(), [])
        mine.append((block, is_for_now, self._changes))

    def saved(self, optimizer: Optimizer, state: dict[str, Any]) -> None:
        """End it, and save once more if another thread has stepped in it."""
        block, is_for_now, number = self._saving[threading.get_ident()].pop()
        block.__exit__(None, None, None)
        if not is_for_now and (number % 2 or number != self._changes):
            state.clear()
            state.update(optimizer.state_dict())


def rows_of(tensor: Tensor, rows: slice | None) -> Tensor:
    """Return some rows of a tensor, or the tensor if it is not divided."""
    return tensor if rows is None else tensor[rows]
