"""Torch 2.15's manual finalization, beside torch's; and that older ones have none."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn

from minidp import DataParallel
from minidp.errors import UnfinishedReductionError, UnsyncedGradientsError
from minidp.torch_compat.manual_finalization import IS_OFFERED
from tests.support.both import MODES, error_of, grads, modes, wrapped
from tests.support.ranks import as_in_torch, on_ranks

here = pytest.mark.skipif(not IS_OFFERED, reason="it came with torch 2.15")
NAMES = (
    *("require_manual_backward_finalization", "should_finalize_after_backward"),
    "finalize_backward",
)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 3), nn.Linear(3, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(self.a(x).tanh())


def batch(ctx, step=0):
    return torch.linspace(-1, 2, 12).reshape(3, 4) * (ctx.rank + 1 + step)


def manual(ctx, **options):
    ddp = wrapped(ctx, Net(), **options)
    ddp.require_manual_backward_finalization = True
    return ddp


# ---------------------------------------------------------------- older than torch 2.15


@pytest.mark.skipif(IS_OFFERED, reason="this torch has it")
def test_an_older_torch_does_not_have_it(lone_group):
    ddp = DataParallel(nn.Linear(2, 2))
    for name in NAMES:
        with pytest.raises(AttributeError, match=f"no attribute '{name}'"):
            getattr(ddp, name)
        assert not hasattr(ddp, name)
    ddp.require_manual_backward_finalization = False  # which is how it is
    with pytest.raises(AttributeError, match=r"needs torch 2\.15 or newer"):
        ddp.require_manual_backward_finalization = True


# ------------------------------------------------------------------------- as torch's


@here
@as_in_torch(2, 3)
@pytest.mark.parametrize("batched", [False, True])
@modes
def test_gradients_and_their_moment(ctx, wrap, mode, batched):
    """Before `finalize_backward` they are local, afterwards averaged."""
    options = mode | {"batched_grad_copy": batched, "bucket_cap_mb": 0}
    ddp = wrap(Net(), **options)
    ddp.require_manual_backward_finalization = True
    history = []
    for step in range(4):
        ddp(batch(ctx, step)).pow(2).sum().backward()
        if not mode.get("gradient_as_bucket_view"):
            history.append(grads(ddp))
        ddp.finalize_backward()
        history.append(grads(ddp))
        ddp.zero_grad(set_to_none=step % 2 == 0)
    ddp.require_manual_backward_finalization = False
    ddp(batch(ctx)).pow(2).sum().backward()
    history.append(grads(ddp))
    return history


@here
@as_in_torch(2)
def test_accumulation(ctx, wrap):
    ddp = wrap(Net())
    ddp.require_manual_backward_finalization = True
    with ddp.no_sync():
        ddp(batch(ctx)).sum().backward()
        refused = [bool(error_of(ddp.finalize_backward))]
    ddp(batch(ctx, 1)).sum().backward()
    with ddp.no_sync():  # what counts is where the forward ran
        ddp.finalize_backward()
    refused.append(bool(error_of(ddp.finalize_backward)))
    return refused, grads(ddp)


@here
@as_in_torch(2)
def test_when_to_call_it(ctx, wrap):
    """True until the buckets are rebuilt; False if it is switched off."""
    answers = []
    for mode in ({}, {"static_graph": True}, {"gradient_as_bucket_view": True}):
        ddp = wrap(Net(), **mode)
        answers.append(ddp.should_finalize_after_backward)
        ddp.require_manual_backward_finalization = True
        for _ in range(4):
            out = ddp(batch(ctx))
            answers.append(ddp.should_finalize_after_backward)
            out.sum().backward()
            ddp.finalize_backward()
    return answers


@here
@as_in_torch(2)
def test_in_a_hook_of_the_backward(ctx, wrap):
    """Where all gradients have come, the rest of the backward may go on without us."""
    ddp = wrap(Net())
    ddp.require_manual_backward_finalization = True
    mine, seen = nn.Linear(4, 4), []
    for step in range(3):
        hidden = mine(batch(ctx, step))
        out = ddp(hidden)
        if not ddp.should_finalize_after_backward:
            hidden.register_hook(lambda _grad: ddp.finalize_backward())
        out.sum().backward()
        if step == 0:
            ddp.finalize_backward()
        seen.append(bool(error_of(ddp.finalize_backward)))  # it was called in the hook
        seen.append(grads(ddp))
        seen.append(grads(mine))
        ddp.zero_grad()
        mine.zero_grad()
    return seen


def pickled(ddp):
    return pickle.loads(pickle.dumps(ddp))


@here
@pytest.mark.parametrize("copied", [pickled, copy.deepcopy])
def test_copies_keep_it(lone_group, copied):
    ddp = DataParallel(Net())
    ddp.require_manual_backward_finalization = True
    twin = copied(ddp)
    assert twin.require_manual_backward_finalization
    twin(torch.ones(1, 4)).sum().backward()
    twin.finalize_backward()
    assert twin._reducer.phase.is_idle


# ------------------------------------------------------------------------------ refused


@here
def test_refusals(lone_group):
    """Those of torch, and no other: by name, and the wrapper goes on after them."""
    x = torch.ones(1, 4)
    ddp = DataParallel(Net())
    assert not ddp.require_manual_backward_finalization
    with pytest.raises(RuntimeError, match=r"\[rank 0\].*finalize by themselves"):
        ddp.finalize_backward()
    ddp.require_manual_backward_finalization = True
    with pytest.raises(RuntimeError, match=r"\[rank 0\].*no gradients wait"):
        ddp.finalize_backward()
    out = ddp(x)
    with pytest.raises(RuntimeError, match="no gradients wait"):
        ddp.finalize_backward()
    for _ in range(2):  # after the forward, then after the backward
        with pytest.raises(RuntimeError, match="changed after a forward"):
            ddp.require_manual_backward_finalization = False
        ddp.require_manual_backward_finalization = True  # no change
        if out.grad_fn is not None:
            out.sum().backward()
            out = out.detach()
    ddp.finalize_backward()
    with pytest.raises(RuntimeError, match="no gradients wait"):
        ddp.finalize_backward()
    with pytest.raises(TypeError, match="True or False, but got 'yes'"):
        ddp.require_manual_backward_finalization = "yes"
    with pytest.raises(AttributeError, match="no setter"):
        ddp.should_finalize_after_backward = True
    ddp.require_manual_backward_finalization = False


@here
def test_gradients_that_are_missing_are_named(lone_group):
    ddp = DataParallel(Net())
    ddp.require_manual_backward_finalization = True
    ddp(torch.ones(1, 4))
    ddp.module.b(torch.ones(1, 3)).sum().backward()
    with pytest.raises(UnfinishedReductionError, match=r"missing.*a\.weight, a\.bias"):
        ddp.finalize_backward()


@here
def test_all_parameters_delayed(lone_group):
    net = Net()
    pairs = list(net.named_parameters())
    options = {"param_to_hook_all_reduce": net.b.bias}
    ddp = DataParallel(net, delay_all_reduce_named_params=pairs, **options)
    ddp.require_manual_backward_finalization = False
    with pytest.raises(RuntimeError, match="all parameters use delay_all_reduce"):
        ddp.require_manual_backward_finalization = True
    ddp = DataParallel(net, delay_all_reduce_named_params=pairs[:1], **options)
    ddp.require_manual_backward_finalization = True
    ddp(torch.ones(1, 4)).sum().backward()
    ddp.finalize_backward()


@here
@on_ranks(2)
@pytest.mark.parametrize("mode", MODES, ids=str)
def test_a_step_or_a_forward_before_it_is_an_error(ctx, mode):
    """Torch's optimizer steps with local gradients: the replicas drift apart."""
    ddp = manual(ctx, **mode)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    for _ in range(3):
        ddp(batch(ctx)).sum().backward()
        with pytest.raises(UnsyncedGradientsError, match=r"finalize_backward\(\) was"):
            optimizer.step()
        with pytest.raises(UnfinishedReductionError, match=r"call finalize_backward"):
            ddp(batch(ctx))
        ddp.finalize_backward()
        optimizer.step()
        optimizer.zero_grad()
    return grads(ddp), list(ddp.parameters())


@here
@on_ranks(2)
def test_with_other_options(ctx):
    """Over items, a step in the backward (now in `finalize_backward`), reset()."""
    ddp = manual(ctx, average_over="items")
    ddp.step_in_backward(torch.optim.SGD(ddp.parameters(), lr=0.1))
    before = [p.detach().clone() for p in ddp.parameters()]
    for _ in range(2):
        ddp.zero_grad()
        ddp.weigh_loss(ddp(batch(ctx)).mean(), ctx.rank + 1).backward()
        assert all(map(torch.equal, before, ddp.parameters()))
        ddp.finalize_backward()
        assert not any(map(torch.equal, before, ddp.parameters()))
        before = [p.detach().clone() for p in ddp.parameters()]
    ddp.zero_grad()
    ddp.weigh_loss(ddp(batch(ctx)).mean(), 1).backward()
    ddp.reset()
    ddp.zero_grad()
    assert ddp.require_manual_backward_finalization
    ddp.weigh_loss(ddp(batch(ctx)).mean(), 1).backward()
    ddp.finalize_backward()
    return list(ddp.parameters())
