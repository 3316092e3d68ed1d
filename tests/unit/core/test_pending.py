"""What has arrived: entries, ready order, pending counts."""

from __future__ import annotations

from types import SimpleNamespace

import torch

from minidp.core.grad_hooks import (
    COPY_AT_ONCE_BYTES,
    GradState,
    PendingGrads,
    is_copied_at_once,
)

CLOSED, UNSET, COPIED = GradState.CLOSED, GradState.UNSET, GradState.COPIED


def bucket_of(*indices):
    return SimpleNamespace(
        plan=SimpleNamespace(indices=indices),
        streams=SimpleNamespace(written_on=set()),
        native=None,
        copied_by_hook=(),
    )


def test_a_bucket_is_full_with_its_last_gradient():
    """Parameters 2 and 0 lie in bucket 0, parameter 1 in bucket 1."""
    full, small = [], torch.ones(1)
    queue = SimpleNamespace(copy_now=lambda _, g: COPIED if g.numel() > 1 else g)
    reducer = SimpleNamespace(on_full=full.append, admit=None, queue=queue)
    params = [torch.nn.Parameter(torch.ones(1)) for _ in range(3)]
    pending = PendingGrads(params, reducer)
    pending.adopt([bucket_of(2, 0), bucket_of(1)])
    assert list(pending.entries) == [CLOSED] * 3
    assert list(pending.bucket_of) == [0, 1, 0]
    pending.open([UNSET] * 3, 1)
    assert list(pending.num_left) == [2, 1]
    pending.arrive(0, torch.ones(2))
    pending.arrive(1, small)
    assert full == [1]
    pending.arrive(2, None)
    assert full == [1, 0]
    assert list(pending.ready) == [0, 1, 2]
    assert list(pending.num_left) == [0, 0]
    assert list(pending.entries) == [COPIED, small, None]
    assert pending.used() == {0, 1}  # with a gradient
    assert list(pending.of_bucket(0)) == [None, COPIED]  # in slot order
    assert list(pending.of_bucket(1)) == [small]


def test_large_gradients_are_copied_at_once():
    numel = COPY_AT_ONCE_BYTES // 4
    assert is_copied_at_once(torch.empty(numel))
    assert not is_copied_at_once(torch.empty(numel - 1))
    assert is_copied_at_once(torch.empty(numel // 2, dtype=torch.float64))
