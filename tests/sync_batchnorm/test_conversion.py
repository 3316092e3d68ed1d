"""`SyncBatchNorm` without other ranks: conversion, errors, and plain batch norm."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from minidp import DataParallel, SyncBatchNorm

convert = SyncBatchNorm.convert_sync_batchnorm


# ------------------------------------------------------------------------ conversion


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.BatchNorm2d(3, eps=1e-3, momentum=None)
        self.inner = nn.Sequential(
            nn.Conv2d(3, 4, 1),
            nn.BatchNorm2d(4, affine=False),
            nn.ModuleDict({"deep": nn.BatchNorm3d(2, track_running_stats=False)}),
        )
        self.torchs = nn.SyncBatchNorm(5)
        self.instance = nn.InstanceNorm2d(3, affine=True, track_running_stats=True)


class Mine(SyncBatchNorm):
    pass


def test_convert_replaces_all_batch_norms_and_keeps_every_tensor_option_and_flag():
    net = Net()
    kinds = {name: type(layer) for name, layer in net.named_modules()}
    net.first.weight.requires_grad_(False)
    net.inner[1].eval()
    tensors = {**dict(net.named_parameters()), **dict(net.named_buffers())}
    keys = list(net.state_dict())
    options = [(m.training, getattr(m, "eps", 0), str(m)) for m in net.modules()]
    assert convert(net) is net
    for name, layer in net.named_modules():
        is_norm = kinds[name].__name__.startswith(("BatchNorm", "SyncBatchNorm"))
        assert type(layer) is (SyncBatchNorm if is_norm else kinds[name]), name
    kept = {**dict(net.named_parameters()), **dict(net.named_buffers())}
    assert list(kept) == list(tensors)
    assert all(kept[name] is tensors[name] for name in tensors)
    assert list(net.state_dict()) == keys
    for (training, eps, text), layer in zip(options, net.modules(), strict=True):
        assert (layer.training, getattr(layer, "eps", 0)) == (training, eps)
        if isinstance(layer, SyncBatchNorm):
            assert text.partition("(")[2] == str(layer).partition("(")[2]
    layer = nn.BatchNorm1d(2)
    ours = Mine.convert_sync_batchnorm(layer)
    assert (type(layer), type(ours)) == (nn.BatchNorm1d, Mine)
    assert ours.weight is layer.weight


def test_convert_keeps_hooks():
    """torch's conversion forgets them."""
    for change, kept in ((nn.SyncBatchNorm.convert_sync_batchnorm, 0), (convert, 1)):
        net = nn.Sequential(nn.BatchNorm1d(2))
        seen = []
        handle = net[0].register_forward_hook(lambda m, *_, seen=seen: seen.append(m))
        change(net)
        net(torch.randn(3, 2))
        assert seen == [net[0]] * kept
        handle.remove()
        net(torch.randn(3, 2))
        assert len(seen) == kept


def test_convert_keeps_a_shared_layer_shared():
    """torch's conversion leaves the second name on the old layer."""
    layer = nn.BatchNorm1d(2)
    net = nn.Sequential(layer, nn.ReLU(), layer, nn.Sequential(layer))
    convert(net)
    assert type(net[0]) is SyncBatchNorm
    assert net[0] is net[2] is net[3][0]


def test_convert_group(lone_group):
    net = nn.Sequential(nn.SyncBatchNorm(2, process_group=lone_group))
    net.append(nn.BatchNorm1d(2))
    convert(net)
    assert [layer.process_group for layer in net] == [lone_group, None]
    convert(net, lone_group)
    assert [layer.process_group for layer in net] == [lone_group, lone_group]


def test_convert_refuses_lazy_layers_and_changes_nothing():
    net = nn.Sequential(nn.BatchNorm1d(3), nn.Sequential(nn.LazyBatchNorm1d()))
    text = r"Run a dummy forward pass .* Uninitialized: 1\.0 \(LazyBatchNorm1d\)\."
    with pytest.raises(RuntimeError, match=text):
        convert(net)
    assert type(net[0]) is nn.BatchNorm1d
    net(torch.randn(4, 3))
    convert(net)
    assert type(net[1][0]) is SyncBatchNorm
    assert net[1][0].num_features == 3


def test_a_copy_shares_only_the_group(lone_group):
    layer = convert(nn.BatchNorm1d(2), lone_group)
    with pytest.raises(TypeError, match="cannot pickle"):
        copy.deepcopy(nn.SyncBatchNorm(2, process_group=lone_group))
    first, second = copy.deepcopy([layer, layer])
    assert first is second
    assert type(first) is SyncBatchNorm
    assert first.process_group is lone_group
    assert first.weight is not layer.weight
    assert first.running_mean is not layer.running_mean
    assert list(first.state_dict()) == list(layer.state_dict())


# ------------------------------------------------------------------------ errors


def error_of(layer, x):
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        layer(x)
    return str(caught.value)


@pytest.mark.parametrize(
    ("x", "torchs"),
    [
        (torch.ones(3), nn.SyncBatchNorm),
        (torch.ones(2, 0), nn.SyncBatchNorm),
        (torch.ones(1, 3), nn.BatchNorm1d),  # the other one says "on GPU" first
    ],
    ids=["1-D", "no channels", "one value"],
)
def test_bad_input_is_told_in_torchs_words(lone_group, x, torchs):
    assert error_of(SyncBatchNorm(3), x) == error_of(torchs(3), x)


def test_without_any_group_it_is_plain_batch_norm():
    assert not torch.distributed.is_initialized()
    x = torch.randn(4, 3)
    assert torch.equal(SyncBatchNorm(3)(x), nn.BatchNorm1d(3)(x))


def test_group_must_be_a_group(lone_group):
    with pytest.raises(TypeError, match=r"must be a process group of which .*'world'"):
        SyncBatchNorm(3, process_group="world")(torch.ones(2, 3))


class Theirs(nn.SyncBatchNorm):
    pass


def nested(kind):
    norms = nn.Sequential(kind(3), nn.ReLU(), kind(3))
    return nn.Sequential(nn.Linear(3, 3), norms)


def test_torchs_layers_are_refused_by_name_and_the_remedy_helps(lone_group):
    for kind in (nn.SyncBatchNorm, SyncBatchNorm):  # torch refuses ours, too
        with pytest.raises(ValueError, match="only work with GPU modules"):
            DistributedDataParallel(nested(kind))
    for kind in (nn.SyncBatchNorm, Theirs):
        text = (
            r"on the CPU: 1\.0, 1\.2\. Pass minidp\.SyncBatchNorm\.convert_sync_batch"
        )
        with pytest.raises(ValueError, match=text):
            DataParallel(nested(kind))
    with pytest.raises(ValueError, match=r"on the CPU: module\. Pass"):
        DataParallel(nn.SyncBatchNorm(3))
    module = convert(nested(nn.SyncBatchNorm))
    DataParallel(module)(torch.randn(4, 3)).pow(3).sum().backward()
    assert all(p.grad is not None for p in module.parameters())
