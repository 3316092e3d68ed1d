"""What type checkers infer of minidp's public names: read by mypy, run by nobody.

An ``ignore`` that silences no error is one itself, so that what must be refused is.
"""

from __future__ import annotations

from torch import nn
from typing_extensions import assert_type

import minidp


class Net(nn.Module):
    """A module with an attribute that `nn.Module` lacks."""

    own: int


def the_module_keeps_its_type(net: Net) -> int:
    """Wrapping infers the type of the module."""
    wrapped = minidp.DataParallel(net)
    assert_type(wrapped, minidp.DataParallel[Net])
    assert_type(wrapped.module, Net)
    takes_any(wrapped)
    takes_any_of_any_module(wrapped)
    return wrapped.module.own


def takes_any(model: minidp.DataParallel) -> None:
    """Without a type parameter, the module may be any."""
    assert_type(model.module, nn.Module)


def takes_any_of_any_module(model: minidp.DataParallel[nn.Module]) -> None:
    """The same, written out."""


class Derived(minidp.DataParallel[Net]):
    """A subclass for one kind of module."""

    def own(self) -> int:
        """Return an attribute that only `Net` has."""
        return self.module.own


def bucket_cap_mb_is_a_number_or_auto(net: Net) -> None:
    """Another word is refused."""
    minidp.DataParallel(net, bucket_cap_mb="auto")
    minidp.DataParallel(net, bucket_cap_mb=4)
    minidp.DataParallel(net, bucket_cap_mb="fast")  # type: ignore[arg-type]


def modules_are_attributes(net: Net) -> None:
    """Modules that are imported on first use are known; other names are refused."""
    minidp.nope  # type: ignore[attr-defined]  # noqa: B018
    assert_type(minidp.doctor.check_model(net), minidp.doctor.Report)
    assert_type(minidp.report.report([]), str)
    assert_type(minidp.__version__, str)
