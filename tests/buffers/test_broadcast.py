"""Module buffers: which are broadcast, and when."""

from __future__ import annotations

import warnings
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from minidp import DataParallel
from minidp.data_parallel import arguments
from tests.support.both import Scale, wrapped
from tests.support.oracle import skip_unless_torch_takes
from tests.support.ranks import on_ranks


@on_ranks(2)
def test_reassigned_and_added_buffers_are_broadcast(ctx):
    module = Scale()
    module.register_buffer("mark", torch.zeros(1))
    ddp = wrapped(ctx, module)
    module.mark = torch.tensor([ctx.rank + 5.0])  # re-assigned
    module.register_buffer("extra", torch.tensor([ctx.rank + 7]))
    versions = [b._version for b in module.buffers()]
    ddp(torch.ones(1))
    assert versions == [b._version for b in module.buffers()]
    assert [b.item() for b in module.buffers()] == [5.0, 7]


@pytest.mark.parametrize(
    ("old", "new", "at_construction", "text"),
    [
        (None, None, True, ""),
        (True, None, True, "`broadcast_buffers` is deprecated. Use `forward_sync_buff"),
        (False, None, False, "`broadcast_buffers` is deprecated. Use `forward_sync_bu"),
        (None, True, True, ""),
        (None, False, True, ""),
        (True, False, True, "Both `broadcast_buffers` and `forward_sync_buffers` were"),
        (False, True, True, "Both `broadcast_buffers` and `forward_sync_buffers` were"),
    ],
)
def test_buffer_flags_are_torchs(lone_group, old, new, at_construction, text):
    skip_unless_torch_takes(["forward_sync_buffers"])
    options = {"broadcast_buffers": old, "forward_sync_buffers": new}
    flags = []
    for wrap in (DistributedDataParallel, DataParallel):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            ddp = wrap(nn.BatchNorm1d(2), **options)
        assert [w.category for w in caught] == [FutureWarning] * bool(text)
        flags.append((ddp.forward_sync_buffers, ddp.broadcast_buffers))
    assert flags[0] == flags[1]
    assert all(str(w.message).startswith(text) for w in caught)  # ours
    assert all(w.filename == __file__ for w in caught)
    with pytest.warns(FutureWarning, match="`check_reduction` is depre") as caught:
        DataParallel(Scale(), check_reduction=True)
    assert caught[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = arguments._buffer_flags(SimpleNamespace(**options))
    assert found == (flags[0][0], at_construction)


def test_broadcast_buffers_is_an_alias(lone_group):
    ddp = DataParallel(nn.BatchNorm1d(2), forward_sync_buffers=False)
    assert ddp.broadcast_buffers is False
    ddp.broadcast_buffers = True
    assert ddp.forward_sync_buffers is True
    assert ddp.will_sync_module_buffers() is True


def test_without_names_of_buffers_none_is_broadcast(lone_group):
    """As on torch, where an empty list switches the broadcasts off."""
    ddp = DataParallel(nn.BatchNorm1d(2))
    assert ddp.will_sync_module_buffers()
    ddp.modules_buffers = []
    assert not ddp.will_sync_module_buffers()
    ddp.named_module_buffers = dict(ddp.module.named_buffers())
    assert ddp.will_sync_module_buffers()
