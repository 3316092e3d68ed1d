"""What joins a module after wrapping is named by the next forward, or by the step."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.func import functional_call
from torch.nn.utils import prune

from minidp import DataParallel, UnsyncedGradientsError

X = torch.ones(1, 2)


def make(group, **options):
    net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2))
    net[1].requires_grad_(False)
    return DataParallel(net, process_group=group, **options)


@pytest.fixture
def ddp(lone_group):
    return make(lone_group)


def refused(call, *args):
    """The names in the error."""
    with pytest.raises(UnsyncedGradientsError, match="joined the module") as caught:
        call(*args)
    text = str(caught.value)
    assert text.startswith("[rank 0] ")
    assert "wrap the module again" in text
    return text.split("Parameters: ")[1].split(". What")[0]


def test_unfrozen(ddp):
    ddp(X)
    ddp.module[1].requires_grad_(True)
    assert refused(ddp, X) == "1.weight, 1.bias"
    assert refused(ddp, X) == "1.weight, 1.bias"  # until it is wrapped again
    ddp.module[1].requires_grad_(False)
    ddp(X)


def test_added(ddp):
    ddp.module.append(nn.Linear(2, 2))
    assert refused(ddp, X) == "3.weight, 3.bias"


def test_a_parameter_added(ddp):
    ddp.module[0].scale = nn.Parameter(torch.ones(1))
    assert refused(ddp, X) == "0.scale"


def test_replaced(ddp):
    ddp.module[2] = nn.Linear(2, 2)
    assert refused(ddp, X) == "2.weight, 2.bias"


def test_another_module_altogether(ddp):
    ddp.module = nn.Sequential(nn.Linear(2, 2))
    assert refused(ddp, X) == "0.weight, 0.bias"


def test_without_a_word_from_torch(lone_group):
    """``ModuleList.insert`` registers nothing: the optimizer tells, or every look."""
    for options in ({}, {"find_unused_parameters": True}):
        layer = nn.Linear(2, 2)
        ddp = make(lone_group, **options)
        ddp.module._modules["3"] = layer
        if options:
            assert refused(ddp, X) == "3.weight, 3.bias"
        else:
            ddp(X).sum().backward()
            optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
            assert refused(optimizer.step) == "3.weight, 3.bias"


def test_an_optimizer_that_gets_more(ddp):
    optimizer = torch.optim.SGD([ddp.module[0].weight], lr=0.1)
    ddp(X).sum().backward()
    optimizer.step()
    ddp.module[1].requires_grad_(True)
    optimizer.add_param_group({"params": ddp.module[1].parameters()})
    ddp.module[1].weight.grad = torch.ones(2, 2)
    assert refused(optimizer.step) == "1.weight"


def test_an_optimizer_that_holds_frozen_ones(ddp):
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    ddp(X).sum().backward()
    optimizer.step()
    ddp.module[1].weight.grad = torch.ones(2, 2)  # unfrozen, and a local backward
    assert refused(optimizer.step) == "1.weight"


# ---------------------------------------------------------------- what stays legal


def test_a_teacher_that_was_frozen_and_stays_so(ddp):
    for _ in range(2):
        ddp(X).sum().backward()


def test_frozen_later(ddp):
    ddp.module[0].requires_grad_(False)
    ddp.module[0].requires_grad_(True)
    ddp(X)


def test_removed(ddp):
    del ddp.module[2]
    ddp(X)


def test_moved_to_another_name(ddp):
    ddp.module[2] = ddp.module[0]
    ddp(X)


def test_frozen_newcomers(ddp):
    ddp.module.append(nn.Linear(2, 2).requires_grad_(False))
    ddp(X)
    ddp.module[3].requires_grad_(True)
    ddp.module.append(nn.Identity())  # look again
    assert refused(ddp, X) == "3.weight, 3.bias"


def test_reparametrised(ddp):
    nn.utils.parametrizations.orthogonal(ddp.module[0])
    with_it = [n for n, p in ddp.module.named_parameters() if p.requires_grad]
    assert "0.parametrizations.weight.original" in with_it
    ddp(X)


def test_pruned(ddp):
    prune.l1_unstructured(ddp.module[0], "weight", amount=1)
    ddp(X).sum().backward()


def test_ignored(lone_group):
    net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    net._ddp_params_and_buffers_to_ignore = ["1.weight", "1.bias", "2.weight", "2.bias"]
    with pytest.warns(UserWarning, match="does not have"):
        ddp = DataParallel(net, process_group=lone_group)
    net.append(nn.Linear(2, 2))
    ddp(X).sum().backward()
    torch.optim.SGD(ddp.parameters(), lr=0.1).step()


def test_no_grad_and_no_sync_do_not_look(ddp):
    ddp.module[1].requires_grad_(True)
    with torch.no_grad():
        ddp(X)
    with ddp.no_sync():
        ddp(X)


def test_wrapped_again(ddp, lone_group):
    ddp.module[1].requires_grad_(True)
    again = DataParallel(ddp.module, process_group=lone_group)
    again(X).sum().backward()
    assert again.module[1].weight.grad is not None


def test_functional_call(ddp):
    own = dict(ddp.named_parameters())
    functional_call(ddp, {n: p * 2 for n, p in own.items()}, (X,))
    ddp(X)
    others = {n: p.detach().clone().requires_grad_() for n, p in own.items()}
    names = refused(functional_call, ddp, others, (X,))
    assert "0.weight, 0.bias, 1.weight" in names
    ddp(X)


@pytest.mark.parametrize("options", [{}, {"find_unused_parameters": True}], ids=str)
def test_functional_call_lends_one(lone_group, options):
    ddp = make(lone_group, bucket_cap_mb=0, **options)
    other = ddp.module[0].bias.detach().clone().requires_grad_()
    if options:
        assert refused(functional_call, ddp, {"module.0.bias": other}, (X,)) == "0.bias"
    else:  # its gradient is missing, which is an error of its own
        functional_call(ddp, {"module.0.bias": other}, (X,)).sum().backward()
        with pytest.raises(UnsyncedGradientsError, match=r"Parameters: 0\.bias"):
            torch.optim.SGD(ddp.parameters(), lr=0.1).step()


def test_policies(lone_group):
    for policy in ("warn", "ignore"):
        ddp = make(lone_group, unsynced=policy)
        ddp.module.append(nn.Linear(2, 2))
        if policy == "warn":
            with pytest.warns(UserWarning, match=r"Parameters: 3\.weight, 3\.bias"):
                ddp(X)
        ddp(X)  # says it once


def test_a_copy_watches_its_own_module(ddp):
    twin = copy.deepcopy(ddp)
    ddp.module.append(nn.Linear(2, 2))
    twin(X)
    twin.module.append(nn.Linear(2, 2))
    assert refused(twin, X) == "3.weight, 3.bias"
