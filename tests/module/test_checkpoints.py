"""Names in a checkpoint, with and without ``module.`` in front."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from torch import nn
from torch.nn.modules.utils import consume_prefix_in_state_dict_if_present
from torch.nn.parallel import DistributedDataParallel

from minidp import DataParallel
from tests.module.net import Net, step
from tests.support.both import same

BOTH = [DistributedDataParallel, DataParallel]


def test_state_dict_is_torchs(lone_group):
    module = Net()
    theirs, ours = (wrap(copy.deepcopy(module)) for wrap in BOTH)
    assert list(ours.state_dict()) == list(theirs.state_dict())
    assert next(iter(ours.state_dict())) == "module.linear.weight"
    with torch.no_grad():
        theirs.module.linear.weight.fill_(7.0)
    ours.load_state_dict(theirs.state_dict())
    assert same(list(ours.state_dict().values()), list(theirs.state_dict().values()))
    step(ours)


def hint_of(load, checkpoint):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(RuntimeError, match="Missing key") as caught:
            load(checkpoint)
    text = str(caught.value)
    return text[text.index("\tThe checkpoint has") :] if "What to do" in text else ""


def test_a_checkpoint_under_other_names(lone_group):
    plain = nn.Linear(2, 2).state_dict()
    ddp = DataParallel(nn.Linear(2, 2))
    before = ddp.module.weight.clone()
    hint = hint_of(ddp.load_state_dict, plain)
    assert "has 'weight' where this wrapper has 'module.weight'" in hint
    assert "into the wrapper's .module" in hint
    ddp.module.load_state_dict(plain)
    assert not torch.equal(ddp.module.weight, before)

    twice = {f"module.module.{name}": value for name, value in plain.items()}
    hint = hint_of(ddp.load_state_dict, dict(twice))
    assert (
        "consume_prefix_in_state_dict_if_present(checkpoint, 'module.module.')" in hint
    )
    consume_prefix_in_state_dict_if_present(twice, "module.module.")
    ddp.module.load_state_dict(twice)
    compiled = {f"module._orig_mod.{name}": value for name, value in plain.items()}
    assert "'module._orig_mod.'" in hint_of(ddp.load_state_dict, compiled)


def test_a_checkpoint_of_something_around_a_wrapper(lone_group):
    holder = nn.ModuleDict({"net": DataParallel(nn.Linear(2, 2))})
    plain = nn.ModuleDict({"net": nn.Linear(2, 2)}).state_dict()
    told = r"where this wrapper has 'net\.module\.weight'"
    missing = pytest.raises(RuntimeError, match="Missing key")
    with pytest.warns(UserWarning, match=told), missing:
        holder.load_state_dict(plain)


def test_a_checkpoint_without_a_hint(lone_group):
    ddp = DataParallel(nn.Linear(2, 2))
    assert hint_of(ddp.load_state_dict, {}) == ""
    assert hint_of(ddp.load_state_dict, {"module.weight": ddp.module.weight}) == ""
    assert hint_of(ddp.load_state_dict, {"other.weight": ddp.module.weight}) == ""
    ddp.load_state_dict(ddp.state_dict())
    ddp.load_state_dict({"module.weight": ddp.module.weight}, strict=False)


def test_a_checkpoint_of_which_nothing_would_be_loaded(lone_group):
    ddp = DataParallel(nn.Linear(2, 2))
    with pytest.warns(UserWarning, match="has 'weight' where this wrapper has"):
        ddp.load_state_dict(ddp.module.state_dict(), strict=False)
