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


def train(ddp):
    """Make a step with the parameters that were there when the module was wrapped."""
    ddp(X).sum().backward()
    torch.optim.SGD([ddp.module[0].weight], lr=0.1).step()


def refused_in_training(ddp):
    """By the step: no optimizer holds them, but the other rank has other values."""
    return refused(train, ddp)


def test_unfrozen(ddp):
    ddp(X)
    ddp.module[1].requires_grad_(True)
    assert refused_in_training(ddp) == "1.weight, 1.bias"
    assert refused_in_training(ddp) == "1.weight, 1.bias"  # until it is wrapped again
    ddp.module[1].requires_grad_(False)
    train(ddp)


def test_found_without_any_optimizer(ddp):
    """In the forward after the first backward in which they were there."""
    ddp.module[1].requires_grad_(True)
    ddp(X).sum().backward()
    assert refused(ddp, X) == "1.weight, 1.bias"


def test_the_same_values_on_all_ranks_are_legal(ddp, other_rank):
    other_rank.is_equal = True
    ddp.module[1].requires_grad_(True)
    for _ in range(3):
        train(ddp)
    assert other_rank.asked.count("joined") == 1  # they have not changed since


JOINED = {  # change of the module -> names in the error
    "3.weight, 3.bias": lambda net: net.append(nn.Linear(2, 2)),
    # ``ModuleList.insert`` registers nothing.
    "x.weight, x.bias": lambda net: net._modules.update(x=nn.Linear(2, 2)),
    "0.scale": lambda net: setattr(net[0], "scale", nn.Parameter(torch.ones(1))),
}


def test_added_to_a_module_that_was_empty(lone_group):
    net = nn.Sequential(nn.Linear(2, 2), nn.Identity())
    ddp = DataParallel(net, process_group=lone_group)
    net[1].scale = nn.Parameter(torch.ones(1))
    assert refused_in_training(ddp) == "1.scale"


@pytest.mark.parametrize("names", JOINED)
def test_joined(ddp, names):
    JOINED[names](ddp.module)
    assert refused_in_training(ddp) == names


def test_replaced(lone_group):
    ddp = make(lone_group, find_unused_parameters=True)
    ddp.module[2] = nn.Linear(2, 2)
    assert refused_in_training(ddp) == "2.weight, 2.bias"


def test_added_between_backward_and_step(ddp):
    ddp(X).sum().backward()
    ddp.module.append(nn.Linear(2, 2))
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


LEGAL = {
    "frozen as before": lambda net: None,
    "frozen and back": lambda net: net[0].requires_grad_(False).requires_grad_(True),
    "removed": lambda net: net.__delitem__(2),
    "moved to another name": lambda net: net.__setitem__(2, net[0]),
    "reparametrised": lambda net: nn.utils.parametrizations.orthogonal(net[0]),
    "pruned": lambda net: prune.l1_unstructured(net[0], "weight", amount=1),
}


@pytest.mark.parametrize("change", LEGAL)
def test_legal_change(ddp, change):
    """And what is no legal one is seen afterwards, too."""
    for _ in range(2):
        ddp(X)
    LEGAL[change](ddp.module)
    ddp(X).sum().backward()
    if change in ("removed", "moved to another name", "reparametrised"):
        return  # a second step would lack their gradients
    ddp.module.add_module("late", nn.Linear(2, 2))
    ddp(X).sum().backward()
    assert refused(ddp, X) == "late.weight, late.bias"


def test_added_frozen(ddp):
    ddp.module.append(nn.Linear(2, 2).requires_grad_(False))
    train(ddp)
    ddp.module[3].requires_grad_(True)
    assert refused_in_training(ddp) == "3.weight, 3.bias"


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
    assert refused_in_training(ddp) == "1.weight, 1.bias"


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.filterwarnings("ignore::FutureWarning")  # since torch 2.14
@pytest.mark.parametrize("scripted", [nn.ReLU(), nn.Linear(2, 2)], ids=str)
def test_scripted(lone_group, scripted):
    """Scripted modules hold no dicts; their parameters cannot be replaced."""
    net = nn.Sequential(nn.Linear(2, 2), torch.jit.script(scripted))
    ddp = DataParallel(net, process_group=lone_group)
    ddp(X).sum().backward()
    net.append(nn.Linear(2, 2))
    assert refused_in_training(ddp) == "2.weight, 2.bias"


def test_wrapped_again(ddp, lone_group):
    ddp.module[1].requires_grad_(True)
    again = DataParallel(ddp.module, process_group=lone_group)
    again(X).sum().backward()
    assert again.module[1].weight.grad is not None


@pytest.mark.parametrize("way", ["evaluate", "backward", "inner steps"])
def test_lent_parameters_are_not_late(ddp, way, other_rank):
    own = dict(ddp.named_parameters())
    functional_call(ddp, {n: p * 2 for n, p in own.items()}, (X,))
    train(ddp)
    for _ in range(2):
        others = {n: nn.Parameter(p.detach() * 2) for n, p in own.items()}
        for _ in range(2):
            loss = functional_call(ddp, others, (X,)).sum()
            if way == "backward":
                loss.backward()
            elif way == "inner steps":
                grads = torch.autograd.grad(loss, [*others.values()])
                pairs = zip(others.items(), grads, strict=True)
                others = {n: (p - g).detach().requires_grad_() for (n, p), g in pairs}
        train(ddp)
    assert set(other_rank.asked) <= {"backward"}  # why no optimizer has stepped
    ddp.module.append(nn.Linear(2, 2))
    assert refused_in_training(ddp) == "3.weight, 3.bias"


def test_an_optimizer_that_holds_lent_parameters_is_refused(ddp):
    own = dict(ddp.named_parameters())
    others = {n: nn.Parameter(p.detach().clone()) for n, p in own.items()}
    functional_call(ddp, others, (X,)).sum().backward()
    optimizer = torch.optim.SGD([*others.values()][:2], lr=0.1)
    assert refused(optimizer.step) == "0.weight, 0.bias"
    optimizer.zero_grad()
    one = {"module.0.bias": others["module.0.bias"]}
    functional_call(ddp, one, (X,)).sum().backward()
    assert refused(optimizer.step) == "0.bias"


def test_policies(lone_group):
    ddp = make(lone_group, unsynced="warn")
    ddp.module.append(nn.Linear(2, 2))
    with pytest.warns(UserWarning, match=r"Parameters: 3\.weight, 3\.bias"):
        train(ddp)
    ddp = make(lone_group, unsynced="ignore")
    ddp.module.append(nn.Linear(2, 2))
    train(ddp)


def test_a_copy_watches_its_own_module(ddp):
    twin = copy.deepcopy(ddp)
    ddp.module.append(nn.Linear(2, 2))
    train(twin)
    twin.module.append(nn.Linear(2, 2))
    assert refused_in_training(twin) == "3.weight, 3.bias"
