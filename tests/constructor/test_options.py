"""Options become limits in bytes by torch's rules, and bad ones are refused."""

from __future__ import annotations

import itertools
import re

import numpy as np
import pytest

from minidp.config.options import (
    MIB,
    UNLIMITED,
    BucketCaps,
    OwnOptions,
    ReducerConfig,
    bucket_caps,
)

FIRST = 1000  # bytes of the small first bucket


def caps(cap_mb=None, cap_mb_list=None, first=FIRST):
    return bucket_caps(first, bucket_cap_mb=cap_mb, bucket_cap_mb_list=cap_mb_list)


@pytest.mark.parametrize(
    ("found", "limits"),
    [
        # MiB, rounded down.
        *((caps(mb), (size,)) for mb, size in [(0, 0), (0.5, MIB // 2), (1e-6, 1)]),
        (caps(25), (25 * MIB,)),
        (caps(7, []), (7 * MIB,)),
        # Without a cap the first bucket is small.
        (caps(), (FIRST, 25 * MIB)),
        (caps("auto", []), (FIRST, 25 * MIB)),
        (caps(first=30 * MIB), (25 * MIB,)),
        (caps(7, [1, 4, 2]), (MIB, 4 * MIB, 2 * MIB)),
    ],
)
def test_caps(found, limits):
    is_list = len(limits) == 3
    assert found.rebuilt_limits() == found.initial_limits(one_bucket=False) == limits
    first = found.initial_limits(one_bucket=True)
    assert first == (limits if is_list else (UNLIMITED,))
    assert found.rest_bytes == (4 * MIB if is_list else limits[-1])


NUMBER = 'bucket_cap_mb must be a number of MiB (int or float), or "auto", but got '
RANGE = " must be finite and not negative (MiB), but got "


@pytest.mark.parametrize(
    ("cap_mb", "cap_mb_list", "error", "text"),
    [
        ("25", None, TypeError, f"{NUMBER}'25' (str)."),
        (True, None, TypeError, f"{NUMBER}True (bool)."),
        (None, [1, None], TypeError, "(int or float), but got None (NoneType)."),
        ("auto", [1, 2], ValueError, "bucket_cap_mb_list gives one: [1, 2]."),
        (-1, None, ValueError, f"bucket_cap_mb{RANGE}-1; 0 gives every parameter"),
        (None, [float("inf")], ValueError, f"bucket_cap_mb_list{RANGE}inf; 0 gives"),
        (float("nan"), None, ValueError, f"bucket_cap_mb{RANGE}nan; 0 gives"),
        (10**400, None, ValueError, RANGE),
    ],
)
def test_bad_caps_are_refused(cap_mb, cap_mb_list, error, text):
    with pytest.raises(error, match=re.escape(text)):
        caps(cap_mb, cap_mb_list)


def test_what_is_neither_true_nor_false_is_refused_at_once():
    assert OwnOptions(check_finite_grads=np.bool_(True)).check_finite_grads is True
    with pytest.raises(ValueError, match="ambiguous"):
        OwnOptions(check_finite_grads=np.ones(2))


def test_which_modes_rebuild_and_start_with_one_bucket():
    for find_unused, static_graph in itertools.product([False, True], repeat=2):
        config = ReducerConfig(BucketCaps(1, 1), find_unused, static_graph)
        assert config.follows_ready_order is (static_graph or not find_unused)
