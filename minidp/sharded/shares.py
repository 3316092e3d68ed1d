"""Know what a script does to the gradients of a share, between backward and step.

After a backward each rank has the averages of its own parameters, and no other
gradients. A script that was written for DDP may clip them by their norm, and would take
the norm of one share. Or it leaves out ``zero_grad()``: then the next backward adds
gradients to an average that only its owner has. Neither is a mean over the ranks, so
both have to be noticed before a step. (What is zeroed before it does no harm: the
gradients that a generator's loss leaves in a discriminator, for example.) A tensor
counts the changes in place (``_version``), and another tensor is another object.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor, nn

from minidp.accelerator import to_host


class _Stamp(NamedTuple):
    """Which tensor a gradient was, and how often it had been changed."""

    grad: weakref.ref[Tensor]
    version: int


class Shares:
    """The gradients of this rank's share as the last reduction has left them.

    Args:
        params: All parameters, by index.
        own: The indices of those that this rank owns.
    """

    def __init__(self, params: Sequence[nn.Parameter], own: Iterable[int]) -> None:
        self._params = params
        self._own = tuple(own)
        self._stamps: dict[int, _Stamp] = {}
        self._is_looked_at = (
            False  # whether averages were left over, since the last ones
        )
        self._mixed: dict[int, weakref.ref[Tensor]] = {}  # added to such averages

    def note(self) -> None:
        """Note the averages of a reduction.

        Those that it has left untouched are of an earlier one, or were zeroed since.
        """
        for i in self._own:
            self._stamp(i)
        self._is_looked_at = False

    @contextmanager
    def changing(self) -> Iterator[None]:
        """Change gradients inside the block in place, as all ranks do together.

        These changes do not count, but those before the block still do.
        """
        params, before = self._params, {}
        for i, (_, version) in self._stamps.items():
            if (grad := params[i].grad) is not None:
                before[i] = grad._version - version
        yield
        for i, times in before.items():
            grad = params[i].grad
            assert grad is not None
            self._stamps[i] = self._stamps[i]._replace(version=grad._version - times)

    def unchanged(self) -> list[int]:
        """Return which averages are as the reduction has left them."""
        return [*{*self._stamps} - {*self.changed(self._stamps)}]

    def restamp(self, indices: Iterable[int]) -> None:
        """Take gradients as they are now for those of the reduction."""
        for i in indices:
            self._stamp(i)

    def _stamp(self, i: int) -> None:
        grad = self._params[i].grad
        if grad is None:
            self._stamps.pop(i, None)
        else:
            self._stamps[i] = _Stamp(weakref.ref(grad), grad._version)

    def forget(self) -> None:
        """Forget all gradients."""
        self._stamps.clear()
        self._mixed.clear()
        self._is_looked_at = False

    def changed(self, held: Collection[int]) -> list[int]:
        """Return which parameters have another gradient than after the reduction.

        Args:
            held: The indices of own parameters to look at. A ``.grad`` that is None has
                not changed: it is not applied. What a ``GradScaler`` does to gradients
                torch does not count.
        """
        found = []
        for i in held:
            grad, stamp = self._params[i].grad, self._stamps.get(i)
            if grad is None:
                continue
            is_same = stamp is not None and stamp.grad() is grad
            if not is_same or grad._version != stamp.version:  # type: ignore[union-attr]
                found.append(i)
        return found

    @property
    def may_be_mixed(self) -> bool:
        """Whether gradients were added to averages, or nobody has looked for that."""
        return bool(self._mixed) or not self._is_looked_at

    def begin_backward(self) -> None:
        """Look for averages to which gradients are added now.

        Call it when the first gradient of a backward has come, which may be local.
        """
        if not self._is_looked_at:
            grads = {i: self._params[i].grad for i in self._left_over()}
            self._mixed = {i: weakref.ref(g) for i, g in grads.items() if g is not None}
            self._is_looked_at = True
        elif self._mixed:
            # Zeroed since, but for the gradient that has just come?
            still = self._nonzero(self.mixed(self._mixed))
            if len(still) < min(2, len(self._mixed)):
                self._mixed.clear()

    def mixed(self, held: Iterable[int]) -> list[int]:
        """Return which parameters have a sum of averages and of later gradients.

        Args:
            held: The indices of parameters to look at.
        """
        if not self._mixed:
            return []
        params, known = self._params, self._mixed
        grads = {i: params[i].grad for i in held if i in known}
        return [i for i, g in grads.items() if g is not None and known[i]() is g]

    def _nonzero(self, indices: Sequence[int]) -> list[int]:
        """Return which gradients are not all zeros. Devices are asked once for all."""
        grads = {i: g for i in indices if (g := self._params[i].grad) is not None}
        found = [i for i, grad in grads.items() if grad.is_cpu and bool(grad.any())]
        others = {i: g.any() for i, g in grads.items() if not g.is_cpu}
        for device in {flag.device for flag in others.values()}:
            here = [i for i, flag in others.items() if flag.device == device]
            flags = to_host(torch.stack([others[i] for i in here])).tolist()
            found += [i for i, flag in zip(here, flags, strict=True) if flag]
        return sorted(found)

    def _left_over(self) -> list[int]:
        """Return which averages are still there when the first new gradient comes.

        One gradient may have been added to already. Those that were zeroed in place do
        not count.
        """
        times = {  # how often it was changed
            i: grad._version - version
            for i, (reference, version) in self._stamps.items()
            if (grad := self._params[i].grad) is not None and reference() is grad
        }
        found = [i for i, number in times.items() if not number]
        found += self._nonzero([i for i, number in times.items() if number])
        # It may have been zeroed, and then added to.
        may_be_new = len(found) == 1 and times[found[0]] > 1
        return [] if may_be_new else sorted(found)
