"""Warnings point at the line of the user, whichever way leads to the constructor.

Such a line ends with a comment that says whose it is.
"""

from __future__ import annotations

import contextlib
import linecache
import subprocess
import sys
import warnings

import pytest
from torch import nn
from torch.nn.parallel import distributed

import minidp
from minidp import DataParallel


class Derived(DataParallel):
    def __init__(self, module, **options):
        super().__init__(module, **options)  # Derived


class TwiceDerived(Derived):
    pass


def plainly(**options):
    DataParallel(nn.Linear(1, 1), **options)  # user


def by_the_swapped_name(**options):
    with minidp.swapped():
        distributed.DistributedDataParallel(nn.Linear(1, 1), **options)  # user


def by_a_class_kept_from_before(**options):
    kept = distributed.DistributedDataParallel
    with minidp.swapped():
        kept(nn.Linear(1, 1), **options)  # user


def attached(**options):
    with minidp.attach(nn.Linear(1, 1), **options):  # user
        pass


def inside_a_with(**options):
    @contextlib.contextmanager
    def wrapping():
        yield DataParallel(nn.Linear(1, 1), **options)  # user

    with wrapping():
        pass


WAYS = [
    plainly,
    by_the_swapped_name,
    by_a_class_kept_from_before,
    attached,
    inside_a_with,
]


def caught(call, *given, **options):
    """What was warned of: its category, and whose the line is."""
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        call(*given, **options)
    lines = [(w.category, linecache.getline(w.filename, w.lineno)) for w in found]
    return [(kind, line.rpartition("  # ")[2].strip()) for kind, line in lines]


@pytest.mark.parametrize("way", WAYS)
def test_the_way_in_does_not_matter(lone_group, way):
    for options in ({"check_reduction": True}, {"broadcast_buffers": True}):
        assert caught(way, **options) == [(FutureWarning, "user")]


def test_a_derived_class_is_the_users_code(lone_group):
    found = caught(TwiceDerived, nn.Linear(1, 1), check_reduction=True)
    assert found == [(FutureWarning, "Derived")]


def test_a_name_on_the_ignore_list_that_nothing_has(lone_group):
    module = nn.Linear(1, 1)
    module._ddp_params_and_buffers_to_ignore = ["nobody"]
    found = caught(lambda: DataParallel(module))  # user
    assert found == [(UserWarning, "user")]


def test_a_library_that_wraps_is_not_ours(lone_group, tmp_path):
    """The nearest code outside of minidp and torch: it passes the argument."""
    file = tmp_path / "accelerator.py"
    file.write_text(
        "def prepare(wrap, module):\n"
        "    return wrap(module, check_reduction=True)  # library\n"
    )
    names = {"__name__": "accelerator"}
    exec(compile(file.read_text(), str(file), "exec"), names)
    found = caught(names["prepare"], DataParallel, nn.Linear(1, 1))
    assert found == [(FutureWarning, "library")]


def test_a_swap_that_is_done_already():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(minidp.swapping._swapping, "is_for_good", True)
        found = caught(lambda: minidp.swap())  # user
    assert found == [(UserWarning, "user")]


def test_a_command_line_without_a_file():
    """``__main__`` has a loader there that refuses to be asked for its source."""
    script = "from minidp.console import warn; warn('here')"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=200
    )
    assert done.stderr.startswith("<string>:1: UserWarning: here")
