"""torch.compile around, inside and far outside the wrapper, next to torch's DDP."""

from __future__ import annotations

import contextlib
from collections import OrderedDict

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.support.both import MODES, grads, on_both, same, wrapped
from tests.support.compiling import Counting, clean_compiler, compiled_backwards
from tests.support.ranks import as_in_torch, on_ranks

pytestmark = pytest.mark.fresh


class Net(nn.Module):
    """Has module buffers, and two parameters that some modes may leave out."""

    def __init__(self, *, checkpointed=""):
        super().__init__()
        self.first = nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.ReLU())
        self.last = nn.Linear(5, 2)
        self.spare = nn.Linear(2, 2)
        self.checkpointed = checkpointed

    def forward(self, x, use_spare=True):
        x = self.first(x)
        if self.checkpointed:
            reentrant = self.checkpointed == "reentrant"
            x = checkpoint(self.last, x, use_reentrant=reentrant)
        else:
            x = self.last(x)
        return self.spare(x) if use_spare else x


def input_of(ctx, step):
    return torch.cos(torch.arange(12.0).reshape(4, 3) * (step + 2) + 5 * ctx.rank)


def build(wrap, module, backend, place):
    """The wrapped module, and a step; compiled at ``place``, if any."""
    ddp = wrap(torch.compile(module, backend=backend) if place == "module" else module)
    call = torch.compile(ddp, backend=backend) if place == "wrapper" else ddp
    if place == "in place":
        ddp.compile(backend=backend)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)

    def step(x, *more):
        call(x, *more).pow(2).sum().backward()

    @torch.compile(backend=backend)
    def whole(x, *more):
        ddp.zero_grad()
        ddp(x, *more).pow(2).sum().backward()
        optimizer.step()

    return ddp, whole if place == "step" else step


def history(ctx, wrap, place, mode, backend, use_spare):
    """Gradients of three steps, and module buffers after them."""
    torch.manual_seed(0)
    ddp, step = build(lambda m: wrap(m, **mode), Net(), backend, place)
    found = []
    for i in range(3):
        if place != "step":
            ddp.zero_grad()
            if "static_graph" not in mode:  # where torch's DDP fails an assertion
                with ddp.no_sync():
                    step(input_of(ctx, 10 + i), use_spare)
        step(input_of(ctx, i), use_spare)
        found.append(grads(ddp))
    return [found, [b.clone() for b in ddp.buffers()]]


def trained(ctx, wrap, place, mode, backend, config):
    with clean_compiler(**config):
        how = backend or Counting()
        return history(ctx, wrap, place, mode, how, mode in MODES[:2])


SLOW = pytest.mark.slow
AT_NIGHT = [SLOW, pytest.mark.nightly]
LIMIT = 200.0  # compiling takes long where other processes compile, too
VIEWS = {"gradient_as_bucket_view": True}


@on_ranks(limit=LIMIT)
@pytest.mark.parametrize(
    ("where", "place", "mode", "backend"),
    [
        *((2, "wrapper", mode, "") for mode in MODES),
        *((2, place, VIEWS, "") for place in ("in place", "module", "step")),
        *((2, "wrapper", {}, "aot_eager"), (1, "wrapper", {}, "")),
        *(pytest.param(2, "step", mode, "aot_eager", marks=AT_NIGHT) for mode in MODES),
    ],
    ids=str,
)
def test_compiled_as_on_torch_and_as_uncompiled(ctx, place, mode, backend):
    _, plain = on_both(ctx, trained, "", mode, "", {})
    theirs, ours = on_both(ctx, trained, place, mode, backend, {})
    assert not isinstance(ours, str), ours
    assert same(theirs, ours)
    assert place == "step" or same(plain, ours)
    return ours[0]  # the same gradients on all ranks


@on_ranks(2, limit=LIMIT)
@SLOW
def test_inductor(ctx):
    _, expected = on_both(ctx, trained, "", {}, "", {})
    _, ours = on_both(ctx, trained, "wrapper", {}, "inductor", {})
    torch.testing.assert_close(ours, expected)
    return ours[0]


@on_ranks(2, limit=LIMIT)
@pytest.mark.parametrize("static_graph", [False, True])
def test_nothing_is_compiled_again(ctx, static_graph):
    """Six steps compile one graph: neither buckets nor phases are guards of it.

    Torch's DDP compiles no bare layer at all. So its `test_ddp_compile_static_graph`
    is faster there, by the time in which Inductor makes this graph.
    """
    with clean_compiler():
        backend = Counting()
        ddp = wrapped(ctx, nn.Linear(10, 10), static_graph=static_graph)
        model = torch.compile(ddp, backend=backend)
        for _ in range(6):
            model(torch.ones(2, 10)).sum().backward()
    assert backend.num_graphs == 1


# -- with other features ---------------------------------------------------------------


@as_in_torch(2)
@pytest.mark.parametrize("feature", ["reentrant", "non-reentrant", "amp"])
def test_checkpoint_and_amp_in_a_compiled_wrapper(ctx, wrap, feature):
    with clean_compiler():
        ddp = wrap(Net(checkpointed=feature.removeprefix("amp")))
        compiled = torch.compile(ddp, backend="eager")
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler("cpu", enabled=feature == "amp")
        for i in range(2):
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.bfloat16, enabled=feature == "amp"):
                loss = compiled(input_of(ctx, i)).float().pow(2).sum()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        return grads(ddp), [p.detach().clone() for p in ddp.parameters()]


# -- compiled autograd -----------------------------------------------------------------


def pair():
    first, last = nn.Linear(3, 2, bias=False), nn.Linear(2, 2, bias=False)
    return nn.Sequential(OrderedDict(first=first, relu=nn.ReLU(), last=last))


@on_ranks(2)
@pytest.mark.parametrize(
    ("mode", "autograd", "is_local"),
    [
        *((mode, "captured", False) for mode in MODES),
        ({}, "eager", False),
        ({}, "captured", True),
        ({}, "eager", True),
    ],
    ids=str,
)
def test_compiled_autograd_is_refused(ctx, mode, autograd, is_local):
    """As torch does, also where gradients stay local. `reset` leads on."""
    backend = None if autograd == "captured" else autograd
    theirs, (refusal, after_reset, fresh) = on_both(
        ctx, refused_then_reset, mode, backend, is_local
    )
    assert "Compiled autograd is not compatible with C++ DDP Reducer" in theirs
    assert refusal.startswith(f"[rank {ctx.rank}] This backward runs under compiled")
    assert "leave torch._dynamo.config.compiled_autograd at False" in refusal
    assert same(after_reset, fresh)


def refused_then_reset(ctx, wrap, mode, backend, is_local):
    with clean_compiler():
        ddp, step = build(lambda m: wrap(m, **mode), pair(), "eager", "")
        try:
            where = ddp.no_sync() if is_local else contextlib.nullcontext()
            with where, compiled_backwards(backend):
                step(input_of(ctx, 0))
        except RuntimeError as error:
            refusal = str(error)
        if not hasattr(ddp, "reset"):
            raise RuntimeError(refusal)
        ddp.reset()
        ddp.zero_grad()
        step(input_of(ctx, 0))
    fresh = wrap(pair(), **mode)
    fresh.load_state_dict(ddp.state_dict())
    fresh(input_of(ctx, 0)).pow(2).sum().backward()
    return refusal, grads(ddp), grads(fresh)
