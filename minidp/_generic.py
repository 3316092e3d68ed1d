"""``DataParallel[Net]``: type checkers know that its ``module`` is a ``Net``."""

from __future__ import annotations

import types
from typing import TYPE_CHECKING, Generic

from torch import nn
from typing_extensions import TypeVar

# Covariant, with a default: whoever takes a `DataParallel` takes one of any module.
M_co = TypeVar("M_co", bound=nn.Module, covariant=True, default=nn.Module)

if TYPE_CHECKING:

    class OfModule(Generic[M_co]):
        """Makes a class generic in the type of its ``module``."""
else:

    class OfModule:
        """Makes ``X[Net]`` legal for classes derived from it, as it is for `list`.

        Not by `Generic`: with that among the bases of `DataParallel`, the order of
        ``class X(Generic[T], DataParallel)``, legal with torch's class, would be an
        error.
        """

        __class_getitem__ = classmethod(types.GenericAlias)
