"""Find parameters that joined a module after it was wrapped: nobody averages them."""

from __future__ import annotations

from itertools import chain
from operator import attrgetter, is_
from typing import Any

from torch import nn

from minidp.replica import Replica

_requires_grad, _is_leaf = attrgetter("requires_grad"), attrgetter("is_leaf")
_values = dict[str, object].values


class LateParameters:
    """Find trainable parameters that a module has got since it was wrapped."""

    def __init__(self, replica: Replica) -> None:
        self._ignored = replica.ignored
        # Also by id: names change when a module is compiled or put into another one.
        named = replica.module.named_parameters()
        known = [p for n, p in named if n in self._ignored]
        known += replica.managed.values()
        self._known = {id(param): param for param in known}  # alive: ids stay taken
        self.accept(replica.module)

    def find(self, module: nn.Module | None = None) -> dict[str, nn.Parameter]:
        """Return trainable leaf parameters, by name, neither averaged nor ignored.

        {} at once if ``module`` (None: the last one) is as at the last `accept`. If
        none is found, `accept` it.
        """
        module = self._module if module is None else module
        now = [*chain.from_iterable(map(_values, self._dicts))]
        is_same = module is self._module and len(now) == len(self._objects)
        is_same = is_same and all(map(is_, now, self._objects))
        if is_same and not any(map(_requires_grad, self.frozen.values())):
            return {}
        named = self._unknown(module)
        # What is no leaf is calculated from managed parameters.
        late = {n: p for n, p in named.items() if p.requires_grad and p.is_leaf}
        if not late and all(map(_is_leaf, module.parameters())):
            self.accept(module)  # not what a functional_call lends for a moment
        return late

    def accept(self, module: nn.Module) -> None:
        """Remember the state of ``module``: `find` returns {} until it changes."""
        self._module = module
        unknown = self._unknown(module).items()
        # Neither averaged nor ignored; an optimizer may hold them.
        self.frozen = {name: p for name, p in unknown if not p.requires_grad}
        holders: list[Any] = [
            each for m in module.modules() for each in (m._parameters, m._modules)
        ]
        # A scripted module holds its parameters elsewhere.
        self._dicts = [each for each in holders if isinstance(each, dict)]
        self._objects = [*chain.from_iterable(map(_values, self._dicts))]

    def _unknown(self, module: nn.Module) -> dict[str, nn.Parameter]:
        """Return the module's parameters that were neither averaged nor ignored."""
        return {
            name: param
            for name, param in module.named_parameters()
            if name not in self._ignored and id(param) not in self._known
        }
