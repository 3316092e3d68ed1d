"""Options become limits in bytes by torch's rules, and bad ones are refused."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from minidp.config import (
    MIB,
    UNLIMITED,
    BucketCaps,
    ReducerConfig,
    Safety,
    bucket_caps,
    unsynced_policy,
)

FIRST = 1000  # bytes of the small first bucket


def test_no_cap_means_25_mib_with_a_small_first_bucket():
    caps = bucket_caps(None, None, FIRST)
    assert caps == BucketCaps(FIRST, 25 * MIB)
    assert caps.rebuilt_limits() == (FIRST, 25 * MIB)


def test_a_cap_of_25_has_no_small_first_bucket():
    caps = bucket_caps(25, None, FIRST)
    assert caps.rebuilt_limits() == (25 * MIB,)


@pytest.mark.parametrize(
    ("cap_mb", "cap_bytes"), [(0, 0), (0.5, MIB // 2), (1e-6, 1), (3, 3 * MIB)]
)
def test_caps_are_mebibytes_rounded_down(cap_mb, cap_bytes):
    assert bucket_caps(cap_mb, None, FIRST).rest_bytes == cap_bytes


def test_list_wins_and_serves_both_layouts():
    caps = bucket_caps(7, [1, 4, 2], FIRST)
    limits = (MIB, 4 * MIB, 2 * MIB)
    assert caps.initial_limits(one_bucket=True) == limits
    assert caps.initial_limits(one_bucket=False) == limits
    assert caps.rebuilt_limits() == limits
    assert caps.rest_bytes == 4 * MIB


def test_empty_list_counts_as_none():
    assert bucket_caps(7, [], FIRST) == bucket_caps(7, None, FIRST)


def test_first_layout_is_one_bucket_unless_it_stays():
    caps = bucket_caps(None, None, FIRST)
    assert caps.initial_limits(one_bucket=True) == (UNLIMITED,)
    assert caps.initial_limits(one_bucket=False) == (FIRST, 25 * MIB)


def test_first_bucket_is_never_larger_than_the_rest():
    assert bucket_caps(None, None, 30 * MIB).rebuilt_limits() == (25 * MIB,)


def test_auto_starts_with_torchs_caps():
    assert bucket_caps("auto", None, FIRST) == bucket_caps(None, None, FIRST)
    assert bucket_caps("auto", [], FIRST) == bucket_caps(None, None, FIRST)


@pytest.mark.parametrize(
    ("cap_mb", "cap_mb_list", "error", "text"),
    [
        (
            "25",
            None,
            TypeError,
            'bucket_cap_mb must be a number of MiB (int or float), or "auto", but got '
            "'25' (str).",
        ),
        (
            True,
            None,
            TypeError,
            'bucket_cap_mb must be a number of MiB (int or float), or "auto", but got '
            "True (bool).",
        ),
        (
            None,
            [1, None],
            TypeError,
            "bucket_cap_mb_list must be a number of MiB (int or float), but got None "
            "(NoneType).",
        ),
        (
            "auto",
            [1, 2],
            ValueError,
            'bucket_cap_mb="auto" looks for the best layout by itself, but '
            "bucket_cap_mb_list gives one: [1, 2]. Leave one out.",
        ),
        (
            -1,
            None,
            ValueError,
            "bucket_cap_mb must be finite and not negative (MiB), but got -1; 0 gives "
            "every parameter its own bucket.",
        ),
        (
            None,
            [float("inf")],
            ValueError,
            "bucket_cap_mb_list must be finite and not negative (MiB), but got inf; 0 "
            "gives every parameter its own bucket.",
        ),
        (
            float("nan"),
            None,
            ValueError,
            "bucket_cap_mb must be finite and not negative (MiB), but got nan; 0 gives "
            "every parameter its own bucket.",
        ),
    ],
)
def test_bad_caps_are_refused(cap_mb, cap_mb_list, error, text):
    with pytest.raises(error) as caught:
        bucket_caps(cap_mb, cap_mb_list, FIRST)
    assert str(caught.value) == text


@pytest.mark.parametrize("policy", ["raise", "warn", "ignore"])
def test_unsynced_policies_pass(policy):
    assert unsynced_policy(policy) == policy


@pytest.mark.parametrize("policy", ["Raise", "", None, 1])
def test_other_unsynced_policies_are_refused(policy):
    with pytest.raises(ValueError, match="unsynced") as caught:
        unsynced_policy(policy)
    assert str(caught.value) == (
        f"unsynced must be one of 'raise', 'warn', 'ignore', but got {policy!r}."
    )


@pytest.mark.parametrize(
    ("find_unused", "static_graph", "expected"),
    [
        (False, False, True),
        (True, False, False),
        (False, True, True),
        (True, True, True),
    ],
)
def test_which_modes_start_with_one_bucket(find_unused, static_graph, expected):
    config = ReducerConfig(BucketCaps(1, 1), find_unused, static_graph)
    assert config.starts_with_one_bucket is expected


def test_options_are_frozen():
    config = ReducerConfig(BucketCaps(1, 1))
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.static_graph = True


def test_what_is_neither_true_nor_false_is_refused_at_once():
    assert Safety(check_finite_grads=np.bool_(True)).check_finite_grads is True
    with pytest.raises(ValueError, match="ambiguous"):
        Safety(check_finite_grads=np.ones(2))
