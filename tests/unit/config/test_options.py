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
    ReducerConfig,
    Safety,
    bucket_caps,
)

FIRST = 1000  # bytes of the small first bucket


@pytest.mark.parametrize(
    ("cap_mb", "cap_bytes"), [(0, 0), (0.5, MIB // 2), (1e-6, 1), (3, 3 * MIB)]
)
def test_caps_are_mebibytes_rounded_down(cap_mb, cap_bytes):
    assert bucket_caps(cap_mb, None, FIRST).rest_bytes == cap_bytes


def test_only_no_cap_means_25_mib_with_a_small_first_bucket():
    for cap_mb in (None, "auto"):
        caps = bucket_caps(cap_mb, [], FIRST)
        assert caps == bucket_caps(cap_mb, None, FIRST) == BucketCaps(FIRST, 25 * MIB)
        assert caps.rebuilt_limits() == (FIRST, 25 * MIB)
    assert bucket_caps(25, None, FIRST).rebuilt_limits() == (25 * MIB,)
    assert bucket_caps(7, [], FIRST) == bucket_caps(7, None, FIRST)
    assert bucket_caps(None, None, 30 * MIB).rebuilt_limits() == (25 * MIB,)


def test_list_wins_and_serves_both_layouts():
    caps = bucket_caps(7, [1, 4, 2], FIRST)
    limits = (MIB, 4 * MIB, 2 * MIB)
    assert caps.initial_limits(one_bucket=True) == limits
    assert caps.initial_limits(one_bucket=False) == limits
    assert caps.rebuilt_limits() == limits
    assert caps.rest_bytes == 4 * MIB


def test_first_layout_is_one_bucket_unless_it_stays():
    caps = bucket_caps(None, None, FIRST)
    assert caps.initial_limits(one_bucket=True) == (UNLIMITED,)
    assert caps.initial_limits(one_bucket=False) == (FIRST, 25 * MIB)


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
        bucket_caps(cap_mb, cap_mb_list, FIRST)


def test_what_is_neither_true_nor_false_is_refused_at_once():
    assert Safety(check_finite_grads=np.bool_(True)).check_finite_grads is True
    with pytest.raises(ValueError, match="ambiguous"):
        Safety(check_finite_grads=np.ones(2))


def test_which_modes_rebuild_and_start_with_one_bucket():
    for find_unused, static_graph in itertools.product([False, True], repeat=2):
        config = ReducerConfig(BucketCaps(1, 1), find_unused, static_graph)
        assert config.follows_ready_order is (static_graph or not find_unused)
