"""torch.compile around, inside and far outside the wrapper, next to torch's DDP."""

from __future__ import annotations

import contextlib
import functools
from collections import OrderedDict

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.support.both import MODES, grads, modes, on_both, same
from tests.support.compiling import Counting, clean_compiler, compiled_backwards


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


def assert_as_torch_and_uncompiled(pool, place, mode, backend="", world_size=2):
    plain = pool.run(on_both, world_size, trained, "", mode, "", {})
    compiled = pool.run(on_both, world_size, trained, place, mode, backend, {})
    for (_, ours_plain), (theirs, ours) in zip(plain, compiled, strict=True):
        assert same(theirs, ours), f"torch {theirs}, minidp {ours}"
        assert place == "step" or same(ours_plain, ours)
        assert same(compiled[0][1][0], ours[0])  # the same gradients on all ranks


@modes
def test_compiled_wrapper(pool, mode):
    assert_as_torch_and_uncompiled(pool, "wrapper", mode)


@pytest.mark.parametrize("place", ["in place", "module", "step"])
def test_places_to_compile(pool, place):
    assert_as_torch_and_uncompiled(pool, place, {"gradient_as_bucket_view": True})


def test_aot_autograd_and_one_rank(pool):
    assert_as_torch_and_uncompiled(pool, "wrapper", {}, "aot_eager")
    assert_as_torch_and_uncompiled(pool, "wrapper", {}, world_size=1)


@pytest.mark.slow
@modes
def test_compiled_step(pool, mode):
    assert_as_torch_and_uncompiled(pool, "step", mode, "aot_eager")


def test_python_reducer_of_torch_changes_nothing(pool):
    plain = pool.run(on_both, 2, trained, "", {}, "", {})
    config = {"optimize_ddp": "python_reducer"}
    compiled = pool.run(on_both, 2, trained, "wrapper", {}, "", config)
    for (_, expected), (_, found) in zip(plain, compiled, strict=True):
        assert same(expected, found)


@pytest.mark.slow
def test_inductor(pool):
    plain = pool.run(on_both, 2, trained, "", {}, "", {})
    how = ("wrapper", {}, "inductor", {})
    compiled = pool.run(on_both, 2, trained, *how, limit=200)
    for (_, expected), (_, ours) in zip(plain, compiled, strict=True):
        torch.testing.assert_close(ours, expected)
    assert same(compiled[0][1][0], compiled[1][1][0])


# -- with other features ---------------------------------------------------------------


def with_feature(ctx, wrap, feature):
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


@pytest.mark.parametrize("feature", ["reentrant", "non-reentrant", "amp"])
def test_checkpoint_and_amp_in_a_compiled_wrapper(pool, feature):
    results = pool.run(on_both, 2, with_feature, feature)
    for theirs, ours in results:
        assert same(theirs, ours), f"torch {theirs}, minidp {ours}"
        assert same(ours, results[0][1])


# -- compiled autograd -----------------------------------------------------------------


def pair():
    first, last = nn.Linear(3, 2, bias=False), nn.Linear(2, 2, bias=False)
    return nn.Sequential(OrderedDict(first=first, relu=nn.ReLU(), last=last))


def some_steps(ctx, wrap, autograd, mode, place):
    with clean_compiler():
        wrapping = functools.partial(wrap, bucket_cap_mb=1, **mode)
        ddp, step = build(wrapping, pair(), "eager", place)
        found = []
        for i in range(3):
            ddp.zero_grad()
            with in_backwards(autograd):
                with ddp.no_sync():
                    step(input_of(ctx, 10 + i))
                step(input_of(ctx, i))
            found.append(grads(ddp))
        return found


def in_backwards(autograd):
    if not autograd:
        return contextlib.nullcontext()
    if autograd == "captured":
        return compiled_backwards()
    return compiled_backwards(autograd)


@pytest.mark.parametrize("mode", MODES[:2], ids=lambda m: "-".join(m) or "default")
@pytest.mark.parametrize(
    ("autograd", "place"),
    [("captured", ""), pytest.param("eager", "wrapper", marks=pytest.mark.slow)],
)
def test_compiled_autograd_gives_the_same_gradients(pool, mode, autograd, place):
    """Torch refuses."""
    plain = pool.run(on_both, 2, some_steps, "", mode, "")
    compiled = pool.run(on_both, 2, some_steps, autograd, mode, place)
    for (_, expected), (theirs, ours) in zip(plain, compiled, strict=True):
        assert "Compiled autograd is not compatible with C++ DDP Reducer" in theirs
        assert same(expected, ours), ours


@pytest.mark.parametrize("mode", MODES[2:], ids=lambda m: "-".join(m))
def test_compiled_autograd_refuses_modes_that_need_the_end(pool, mode):
    for theirs, ours in pool.run(on_both, 2, refused_then_reset, mode):
        assert "Compiled autograd is not compatible with C++ DDP Reducer" in theirs
        assert ours[0].startswith("[rank ")
        assert "Compiled autograd does not say when a backward ends" in ours[0]
        assert "compiled_autograd = False" in ours[0]
        assert same(ours[1], ours[2])


def refused_then_reset(ctx, wrap, mode):
    with clean_compiler():
        ddp, step = build(lambda m: wrap(m, **mode), pair(), "eager", "")
        try:
            with compiled_backwards():
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
