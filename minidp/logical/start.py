"""What each logical rank of a step begins with: parameters, gradients, buffers."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from operator import attrgetter

import torch
from torch import Tensor, nn

from .arrived import Arrived, Grads, Taken
from .digests import digests_of

_version_of = attrgetter("_version")


class Start:
    """The state from which each logical rank of a step begins.

    Args:
        params: The parameters.
        module: The module.
        buffers: The buffers of the module that all ranks have in common, by name.
        arrived: Takes their gradients.
    """

    def __init__(
        self,
        params: Sequence[nn.Parameter],
        module: nn.Module,
        buffers: Mapping[str, Tensor],
        arrived: Arrived,
    ) -> None:
        self._params, self._module, self._arrived = params, module, arrived
        self._grads: Grads | None = None  # None: nobody has looked yet
        self._has_grads = False  # some of them are not None
        # Also those that are ignored, or have a second name: they stay.
        self._known = {name for _, _, name in self._places()}
        self._common = sorted(buffers)
        self.note_state()

    def note_state(self) -> None:
        """Note parameters and buffers: the step begins with what they are now."""
        self._versions = list(map(_version_of, self._params))
        self._first = self._saved_buffers(self._common)
        # Those that logical rank 0 has left, if it had its turn here.
        self._kept: Mapping[str, tuple[Tensor, Tensor]] | None = None

    def note_grads(self) -> None:
        """Note what ``.grad`` holds, in the first forward of the step.

        Not before, because `zero_grad()` may come in the first turn of the loop. It is
        usually None. Averages that are kept count once in each logical rank.
        """
        if self._grads is not None:
            return
        self._has_grads = self._arrived.is_any_there()
        self._grads = [None] * len(self._params)
        if self._has_grads:
            self._grads = [
                None if param.grad is None else param.grad.detach().clone()
                for param in self._params
            ]

    def changed_parameters(self) -> list[int]:
        """Return the indices of parameters that were changed since the beginning."""
        now = list(map(_version_of, self._params))
        if now == self._versions:
            return []
        pairs = zip(now, self._versions, strict=True)
        return [i for i, (version, before) in enumerate(pairs) if version != before]

    def take(self) -> Taken:
        """Return the gradients that a logical rank has left in ``.grad``.

        Those that were there before stay where they are; the others are set to None.
        """
        self.note_grads()
        assert self._grads is not None
        if not self._has_grads:
            return Taken(*self._arrived.take())
        found: Grads = []
        for param, before in zip(self._params, self._grads, strict=True):
            grad = param.grad
            if before is not None and grad is not None:
                found.append(grad.detach().clone())
                continue
            found.append(grad)
            param.grad = None
        return Taken(found, are_plain=False)

    @torch.no_grad()
    def restore(self) -> None:
        """Let a logical rank begin like the first one."""
        grads = self._grads if self._has_grads else None
        for param, before in zip(self._params, grads or (), strict=False):
            if before is not None and param.grad is None:
                param.grad = before.clone()
            elif before is not None and param.grad is not None:
                # A sparse tensor that is detached does not share how many rows it has.
                is_sparse = before.is_sparse
                (param.grad if is_sparse else param.grad.detach()).copy_(before)
        self._restore_buffers(self._first)
        for owner, key, name in self._places():
            if name not in self._known:  # a forward has registered it
                del owner._buffers[key]

    def begin_again(self) -> Grads | None:
        """Begin like the first logical rank, in which ``.grad`` may still be changed.

        Returns:
            What ``.grad`` held at the beginning, for each parameter.
        """
        self.restore()
        noted, self._grads = self._grads, None
        return noted

    def began_with(self, grads: Grads | None) -> bool:
        """Return whether ``.grad`` held these values at the beginning, bit for bit."""
        pairs = list(zip(grads or (), self._grads or (), strict=False))
        both = [(a, b) for a, b in pairs if a is not None and b is not None]
        if sum(a is None and b is None for a, b in pairs) + len(both) < len(pairs):
            return False
        found = digests_of(dict(enumerate(a for a, _ in both)))
        return found == digests_of(dict(enumerate(b for _, b in both)))

    def set_aside(self) -> Grads:
        """Return what ``.grad`` holds now, where nothing is left."""
        found = [param.grad for param in self._params]
        for param in self._params:
            param.grad = None
        return found

    def put_back(self, grads: Grads) -> None:
        """Let ``.grad`` be again what `set_aside` has returned."""
        for param, grad in zip(self._params, grads, strict=True):
            param.grad = grad

    def buffers(self) -> dict[str, Tensor]:
        """Return the buffers that logical ranks restore or register, as they are."""
        found = {}
        for owner, key, name in self._places():
            value = owner._buffers[key]
            is_ours = name in self._first or name not in self._known
            if is_ours and value is not None and not value.is_meta:
                found[name] = value
        return found

    def keep_buffers(self) -> None:
        """Keep the buffers of logical rank 0, which are the module's after the step."""
        late = {name for _, _, name in self._places()} - self._known
        self._kept = self._saved_buffers(late.union(self._first))

    @property
    def first_buffers(self) -> list[Tensor]:
        """The values with which the step has begun, of buffers that all ranks have."""
        return [value for _, value in self._first.values()]

    def begin_with(self, values: Sequence[Tensor]) -> None:
        """Let the step begin with other values of these buffers."""
        for mine, value in zip(self.first_buffers, values, strict=True):
            mine.copy_(value)
        self._restore_buffers(self._first)

    def buffers_of_first(self) -> list[Tensor] | None:
        """Return what logical rank 0 has left in the buffers that all ranks have.

        It is None if that had its turn elsewhere.
        """
        if self._kept is None:
            return None
        return [self._kept[name][1] for name in self._first if name in self._kept]

    def end_with(self, values: Sequence[Tensor]) -> None:
        """Let the step leave these values in the buffers that all ranks have."""
        pairs = zip(self._first.items(), values, strict=True)
        self._kept = {name: (buffer, value) for (name, (buffer, _)), value in pairs}

    @torch.no_grad()
    def end(self, *, as_before: bool = False) -> None:
        """Give the module the buffers of logical rank 0.

        If that had its turn on another rank, or with ``as_before``, it gets those with
        which the step has begun.
        """
        kept = None if as_before else self._kept
        self._restore_buffers(self._first if kept is None else kept)

    def _places(self) -> list[tuple[nn.Module, str, str]]:
        """Return for each buffer its module, and its name there and in all."""
        return [
            (owner, key, f"{prefix}.{key}" if prefix else key)
            for prefix, owner in self._module.named_modules()
            for key, value in owner._buffers.items()
            if value is not None
        ]

    def _saved_buffers(
        self, names: Collection[str]
    ) -> dict[str, tuple[Tensor, Tensor]]:
        """Return the buffers of these names, each with a copy of its values."""
        found = {}
        for owner, key, name in self._places():
            value = owner._buffers[key]
            if name in names and value is not None and not value.is_meta:
                found[name] = value, value.detach().clone()
        return found

    def _restore_buffers(self, saved: Mapping[str, tuple[Tensor, Tensor]]) -> None:
        """Put buffers back: the tensors, which may have been replaced, and values."""
        places = {name: (owner, key) for owner, key, name in self._places()}
        for name, (value, before) in saved.items():
            if name in places:
                owner, key = places[name]
                owner._buffers[key] = value
            value.copy_(before)
