"""Copies and pickles of a wrapper."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch

from minidp import DataParallel
from tests.module.net import Net, step
from tests.support.both import MODES, Scale, same, values, wrapped, x_of
from tests.support.ranks import on_ranks


@pytest.mark.parametrize("method", ["deepcopy", "pickle"])
@pytest.mark.parametrize("mode", MODES, ids=str)
def test_copies_train_alike(lone_group, mode, method):
    ddp = DataParallel(Net(), **mode)
    ddp._register_buffer_comm_hook(None, lambda *_: None)  # is not copied
    step(ddp)
    is_deep = method == "deepcopy"
    twin = copy.deepcopy(ddp) if is_deep else pickle.loads(pickle.dumps(ddp))
    assert type(twin) is DataParallel
    assert twin.module is not ddp.module
    assert twin.process_group is ddp.process_group is lone_group
    assert same([*twin.state_dict().values()], [*ddp.state_dict().values()])
    for _ in range(3):
        assert same(step(twin), step(ddp))
    assert twin.reducer is not ddp.reducer
    assert twin._get_ddp_logging_data()["world_size"] == 1


@on_ranks((1, 2))
def test_copies_on_another_group(ctx):
    ddp = wrapped(ctx, Scale())
    ddp(x_of(ctx)).backward()
    twin = copy.deepcopy(ddp)
    twin.zero_grad()
    twin(x_of(ctx)).backward()
    assert values(twin) == [1.5]
    assert twin.process_group is ctx.group
    with pytest.raises(RuntimeError, match="DDP with the default process group"):
        pickle.dumps(ddp)


class Names(pickle.Unpickler):
    """Notes which of our classes a pickle names."""

    def find_class(self, module, name):
        self.seen = {*getattr(self, "seen", ()), f"{module}.{name}"}
        return super().find_class(module, name)


def test_pickles_name_public_classes_only(lone_group):
    """Private ones may move: old pickles must still load."""
    ddp = DataParallel(Scale(), bucket_cap_mb_list=[1])
    ddp(torch.ones(1)).backward()
    names = Names(io.BytesIO(pickle.dumps(ddp)))
    twin = names.load()
    assert {n for n in names.seen if n.startswith("minidp")} == {"minidp.DataParallel"}
    assert twin.bucket_bytes_cap_list == [2**20]


def test_copies_keep_flags_and_warn_no_second_time(lone_group):
    with pytest.warns(FutureWarning):
        ddp = DataParallel(Net(), broadcast_buffers=True, unsynced="warn")
    ddp.forward_sync_buffers = False
    ddp.require_backward_grad_sync = False
    for twin in (copy.deepcopy(ddp), pickle.loads(pickle.dumps(ddp))):
        assert twin.forward_sync_buffers is False
        assert twin.require_backward_grad_sync is False
        assert twin._guard.policy == "warn"
