"""Parameters that joined a module after it was wrapped: their gradients stay local.

Added, replaced, unfrozen, or lent by ``torch.func.functional_call``. Modules tell when
something is registered, so an everyday forward compares one number, asks the frozen
parameters (if any) whether they still are, and looks at two parameters as a sample: a
`functional_call` puts its tensors in place without telling. One that lends some tensors
only leaves gradients missing, which is an error of its own; but not if parameters may
be unused, so then every parameter is compared.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from itertools import chain
from operator import attrgetter, is_

import torch
from torch import nn
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)

from ._managed import Replica

_requires_grad = attrgetter("requires_grad")
_values = dict[str, "nn.Parameter | None"].values


class Newcomers:
    """Looks for them in one module.

    Args:
        replica: what was wrapped, and took part then.
    """

    def __init__(self, replica: Replica) -> None:
        self._root = replica.module
        self._ignored = replica.ignored
        # Names change when a module is compiled or put into another one.
        named = replica.module.named_parameters()
        self._left_out = {id(p): p for n, p in named if n in self._ignored}
        self._managed = {id(p): p for p in replica.managed.values()}  # ids stay taken
        self._frozen = [p for p in replica.parameters.values() if not p.requires_grad]
        self._remember()
        _listen()

    def find(
        self, module: nn.Module | None = None, *, compares_all: bool = False
    ) -> list[str]:
        """Names of parameters in ``module`` that nobody averages.

        Args:
            module: what is wrapped now; None: the one of the last time.
            compares_all: not only if something was registered.
        """
        module = self._root if module is None else module
        if (
            module is self._root
            and _registered.count == self._count
            and all(place.get(name) is param for place, name, param in self._sample)
            and not any(map(_requires_grad, self._frozen))
            and not (compares_all and self._has_changed())
        ):
            return []
        return self._search(module)

    def __getitem__(self, name: str) -> nn.Parameter:
        """A parameter of the module, as it is now."""
        return self._root.get_parameter(name)

    def accept(self, module: nn.Module) -> None:
        """Do not speak of those again that are in the module now."""
        self._root = module
        self._frozen = [param for param in self._frozen if not param.requires_grad]
        self._remember()

    def find_held(
        self, params: Iterable[torch.Tensor]
    ) -> list[tuple[str, nn.Parameter]]:
        """Those among ``params`` that are in the module, and nobody averages."""
        held = {id(param) for param in params} - self._managed.keys()
        if not held:
            return []
        named = self._root.named_parameters()
        return [
            (name, param)
            for name, param in named
            if id(param) in held and not self._is_ignored(name, param)
        ]

    def _search(self, module: nn.Module) -> list[str]:
        is_same = module is self._root and not self._has_changed()
        if is_same and not any(map(_requires_grad, self._frozen)):
            self._count = _registered.count
            return []
        found = dict(module.named_parameters())
        names = [
            name
            for name, param in found.items()
            if param.requires_grad
            and param.is_leaf  # not one that is made from ours
            and id(param) not in self._managed
            and not self._is_ignored(name, param)
        ]
        if not names and all(map(attrgetter("is_leaf"), found.values())):
            self._root = module
            self._remember()  # not what a functional_call lends
        return names

    def _is_ignored(self, name: str, param: nn.Parameter) -> bool:
        return name in self._ignored or id(param) in self._left_out

    def _has_changed(self) -> bool:
        now = [*chain.from_iterable(map(_values, self._dicts))]
        return len(now) != len(self._known) or not all(map(is_, now, self._known))

    def _remember(self) -> None:
        """The module is as it should be."""
        self._count = _registered.count
        modules = list(self._root.modules())
        self._dicts = [m._parameters for m in modules if m._parameters]
        self._dicts += [m._modules for m in modules if m._modules]  # type: ignore[misc]
        self._known = [*chain.from_iterable(map(_values, self._dicts))]
        places = [
            (place, name, param)
            for place in self._dicts
            for name, param in place.items()
            if id(param) in self._managed
        ]
        self._sample = places[:1] + places[-1:]


class _Registered:
    """How often any module of the process registered a parameter or a module."""

    def __init__(self) -> None:
        self.count = 0
        self.is_told = False
        self.lock = threading.Lock()

    def note(self, _module: nn.Module, _name: str, _what: object) -> None:
        """Called by torch."""
        self.count += 1


_registered = _Registered()


def _listen() -> None:
    with _registered.lock:
        if not _registered.is_told:
            register_module_parameter_registration_hook(_registered.note)
            register_module_module_registration_hook(_registered.note)
            _registered.is_told = True
