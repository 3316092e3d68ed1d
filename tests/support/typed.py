"""What type checkers infer of minidp's public names: read by mypy, run by nobody.

An ``ignore`` that silences no error is one itself, so that what must be refused is.
"""

from __future__ import annotations

from torch import nn
from typing_extensions import assert_type

import minidp


class Net(nn.Module):
    """Has something that other modules lack."""

    own: int


def the_module_keeps_its_type(net: Net) -> int:
    """Also without a word of the user's about it."""
    wrapped = minidp.DataParallel(net)
    assert_type(wrapped, minidp.DataParallel[Net])
    assert_type(wrapped.module, Net)
    takes_any(wrapped)
    takes_any_of_any_module(wrapped)
    return wrapped.module.own


def takes_any(model: minidp.DataParallel) -> None:
    """No parameter to be written: that of any module."""
    assert_type(model.module, nn.Module)


def takes_any_of_any_module(model: minidp.DataParallel[nn.Module]) -> None:
    """The same, in full."""


class Derived(minidp.DataParallel[Net]):
    """Of one kind of module."""

    def own(self) -> int:
        """Known to be there."""
        return self.module.own


def bucket_cap_mb_is_a_number_or_auto(net: Net) -> None:
    """And no other word."""
    minidp.DataParallel(net, bucket_cap_mb="auto")
    minidp.DataParallel(net, bucket_cap_mb=4)
    minidp.DataParallel(net, bucket_cap_mb="fast")  # type: ignore[arg-type]


def modules_are_attributes(net: Net) -> None:
    """Also those that are imported when they are asked for, and no other names."""
    minidp.nope  # type: ignore[attr-defined]  # noqa: B018
    assert_type(minidp.doctor.check_model(net), minidp.doctor.Report)
    assert_type(minidp.report.report([]), str)
    assert_type(minidp.__version__, str)
