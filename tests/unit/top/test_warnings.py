"""Warnings point at the line of the user, whichever way leads to the constructor."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import warnings

import pytest
from torch import nn
from torch.nn.parallel import distributed

import minidp
from minidp import DataParallel

FILE = __file__


class Derived(DataParallel):
    def __init__(self, module, **options):
        super().__init__(module, **options)


class TwiceDerived(Derived):
    pass


def plainly(**options):
    DataParallel(nn.Linear(1, 1), **options)


def by_the_swapped_name(**options):
    with minidp.swapped():
        distributed.DistributedDataParallel(nn.Linear(1, 1), **options)


def by_a_class_kept_from_before(**options):
    kept = distributed.DistributedDataParallel
    with minidp.swapped():
        kept(nn.Linear(1, 1), **options)


def attached(**options):
    with minidp.attach(nn.Linear(1, 1), **options):
        pass


def inside_a_with(**options):
    @contextlib.contextmanager
    def wrapping():
        yield DataParallel(nn.Linear(1, 1), **options)

    with wrapping():
        pass


WAYS = [
    plainly,
    by_the_swapped_name,
    by_a_class_kept_from_before,
    attached,
    inside_a_with,
]


def caught(call):
    """What was warned of: category, file, the function that the line is in."""
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        call()
    return [(w.category, w.filename, function_at(w.lineno)) for w in found]


def function_at(line):
    """The outermost function of this file that a line is in."""
    starts = {
        f.__code__.co_firstlineno: f.__qualname__
        for f in (*WAYS, Derived.__init__, the_users_line, in_a_library)
    }
    return starts[max(start for start in starts if start <= line)]


@pytest.mark.parametrize("way", WAYS)
def test_the_way_in_does_not_matter(lone_group, way):
    for options in ({"check_reduction": True}, {"broadcast_buffers": True}):
        found = caught(lambda options=options: way(**options))
        assert found == [(FutureWarning, FILE, way.__qualname__)]


def test_a_derived_class_is_the_users_code(lone_group):
    found = caught(lambda: TwiceDerived(nn.Linear(1, 1), check_reduction=True))
    assert found == [(FutureWarning, FILE, "Derived.__init__")]


def the_users_line():
    module = nn.Linear(1, 1)
    module._ddp_params_and_buffers_to_ignore = ["nobody"]
    DataParallel(module)


def test_a_name_on_the_ignore_list_that_nothing_has(lone_group):
    assert caught(the_users_line) == [(UserWarning, FILE, "the_users_line")]


LIBRARY = """
def prepare(wrap, module):
    return wrap(module, check_reduction=True)
"""


def in_a_library(names):
    names["prepare"](DataParallel, nn.Linear(1, 1))


def test_a_library_that_wraps_is_not_ours(lone_group, tmp_path):
    """The nearest code outside of minidp and torch: it passes the argument."""
    file = tmp_path / "accelerator.py"
    file.write_text(LIBRARY)
    names = {"__name__": "accelerator"}
    exec(compile(LIBRARY, str(file), "exec"), names)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        in_a_library(names)
    assert [(w.filename, w.lineno) for w in found] == [(str(file), 3)]


def test_a_swap_that_is_done_already():
    with minidp.swapped():
        found = caught(minidp.swap)
    assert found[0][1] == FILE


def test_a_command_line_without_a_file():
    """``__main__`` has a loader there that refuses to be asked for its source."""
    script = "from minidp.console import warn; warn('here')"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60
    )
    assert done.stderr.startswith("<string>:1: UserWarning: here")
