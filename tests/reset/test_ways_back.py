"""Every way back to training ends in equal replicas, or in an error that names ranks.

One rank misses a step, or has other weights; then training goes on after ``reset()``,
``join()``, `attach`, in another process group, or after a mistake that was excused.
"""

from __future__ import annotations

import copy
import gc
import math
import threading
from typing import Any

import numpy
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
from torch.distributed.algorithms.ddp_comm_hooks.debugging_hooks import noop_hook
from torch.distributed.optim import ZeroRedundancyOptimizer

from minidp import DataParallel, attach
from minidp.guard import comparison
from tests.support.both import error_of, same, wrapped
from tests.support.optimized import (
    OPTIMIZERS,
    Own,
    loss_of,
    made,
    state_of,
    step,
    told,
)
from tests.support.ranks import on_ranks, on_simulated_ranks

pytestmark = pytest.mark.fault

MISMATCH = "ReplicaMismatchError: [rank {}] The replicas differ: before averaged"


def missed(ctx: Any, net: Any, optimizer: Any, steps: int = 3) -> None:
    """Train; in the last step rank 1 raises before ``optimizer.step()``."""
    for number in range(steps):
        is_last = number == steps - 1
        step(ctx, net, optimizer, number, raises=is_last and ctx.rank == 1)


# ------------------------------------------------------------------ after reset()


@on_simulated_ranks(2)
@pytest.mark.parametrize(
    ("name", "steps"), [("sgd", 3), ("momentum", 1), ("adam", 3), ("lbfgs", 1)]
)
def test_a_rank_that_missed_a_step_is_named(ctx, name, steps):
    ddp = wrapped(ctx, made())
    optimizer = OPTIMIZERS[name](ddp.parameters())
    missed(ctx, ddp, optimizer, steps)
    (text,) = told(ddp.reset)
    kind = type(optimizer).__name__
    assert text.startswith(f"[rank {ctx.rank}] After reset() the replicas are not the")
    if ctx.rank:
        assert text.endswith("the same: see rank 0's warning.")
    else:
        assert f"({kind}: {steps} on rank 0, {steps - 1} on rank 1)" in text
        assert "different parameters 0.weight" in text
        assert ("state of" in text) == (name != "sgd")
        assert "reset(copy_from=0)" in text
    for _ in range(2):  # another reset() mends nothing
        error = error_of(lambda: step(ctx, ddp, optimizer, 7))
        assert error.startswith(MISMATCH.format(ctx.rank)), error
        assert f"({kind}: {steps} on rank 0, {steps - 1} on rank 1)" in error
        assert told(ddp.reset)


@on_simulated_ranks(3)
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize(("steps", "root"), [(1, 0), (1, 1), (3, 0)])
def test_one_rank_s_state_is_copied(ctx, name, steps, root):
    """Also to a rank whose optimizer has never stepped."""
    ddp = wrapped(ctx, made())
    optimizer = OPTIMIZERS[name](ddp.parameters())
    missed(ctx, ddp, optimizer, steps)
    before = [*state_of(ddp, optimizer), ddp.module[1].running_mean.clone()]
    assert not told(lambda: ddp.reset(copy_from=root))
    if ctx.rank == root:
        after = [*state_of(ddp, optimizer), ddp.module[1].running_mean]
        assert same(before, after)
    for number in range(3):
        step(ctx, ddp, optimizer, number)
    return state_of(ddp, optimizer)


@on_simulated_ranks(2)
def test_a_checkpoint_may_be_loaded_after_reset(ctx):
    ddp = wrapped(ctx, made())
    optimizer = OPTIMIZERS["momentum"](ddp.parameters())
    step(ctx, ddp, optimizer)
    saved = copy.deepcopy([ddp.state_dict(), optimizer.state_dict()])
    missed(ctx, ddp, optimizer)
    assert told(ddp.reset)
    ddp.load_state_dict(saved[0])
    optimizer.load_state_dict(copy.deepcopy(saved[1]))
    assert not told(lambda: [step(ctx, ddp, optimizer, n) for n in range(3)])
    missed(ctx, ddp, optimizer)
    ddp.load_state_dict(saved[0])
    optimizer.load_state_dict(copy.deepcopy(saved[1]))
    assert not told(ddp.reset)
    assert not told(lambda: [step(ctx, ddp, optimizer, n) for n in range(3)])
    return state_of(ddp, optimizer)


@on_simulated_ranks(2)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_equal_replicas_hear_nothing_of_the_steps_before_a_checkpoint(ctx, name):
    ddp = wrapped(ctx, made())
    optimizer = OPTIMIZERS[name](ddp.parameters())
    step(ctx, ddp, optimizer, 0)
    saved = copy.deepcopy([ddp.state_dict(), optimizer.state_dict()])
    missed(ctx, ddp, optimizer)
    ddp.load_state_dict(saved[0])
    optimizer.load_state_dict(saved[1])
    assert not told(ddp.reset)
    step(ctx, ddp, optimizer, 7)
    return state_of(ddp, optimizer)


class Lookahead(torch.optim.SGD):
    """What its next step depends on is in attributes that no checkpoint has."""

    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        self.slow, self.steps = [torch.zeros(2)], 0

    def step(self, closure=None):
        self.steps += 1
        return super().step(closure)


class Silent(torch.optim.SGD):
    """Has nothing that the next step depends on, but nobody can know that."""

    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        self.note = print


class Logs(Silent):
    """The same, and it can be compared."""

    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        self.note = "x"


class Warmup:
    """A scheduler of no class that anybody knows, which counts its steps."""

    def __init__(self, optimizer):
        self.optimizer, self.steps = optimizer, 0

    def step(self):
        self.steps += 1


def hooked(params, **options):
    optimizer = torch.optim.SGD(params, **options)
    optimizer.register_step_pre_hook(lambda *_: None)
    return optimizer


def warmed(params, **options):
    optimizer = torch.optim.SGD(params, **options)
    optimizer.warmup = Warmup(optimizer)
    plain = optimizer.step

    def step(closure=None):
        plain(closure)
        optimizer.warmup.step()

    optimizer.step = step
    return optimizer


# A kind of optimizer, and what reset(copy_from=) says of it.
HIDES = {
    Lookahead: "Lookahead",
    Silent: "Silent",
    hooked: "hooks in the step of SGD",
    warmed: "Warmup",
}


@on_simulated_ranks(2)
@pytest.mark.parametrize("kind", [*HIDES, Logs, torch.optim.SGD])
def test_unequal_steps_are_named_where_a_state_may_be_hidden(ctx, kind):
    """All that can be compared is equal, but ranks may still train apart."""
    ddp = wrapped(ctx, made())
    optimizer = kind(ddp.parameters(), lr=0.1)
    step(ctx, ddp, optimizer, 0)
    saved = copy.deepcopy(ddp.state_dict())

    missed(ctx, ddp, optimizer)
    ddp.load_state_dict(saved)
    texts = told(ddp.reset)
    left = told(lambda: ddp.reset(copy_from=0))
    assert not told(lambda: ddp.reset(copy_from=0))
    if kind not in HIDES:
        assert not texts
        assert not left
        return
    assert ctx.rank or "numbers of optimizer steps" in texts[0]
    assert f"cannot copy the state of {HIDES[kind]}." in left[0]


@on_simulated_ranks(2)
def test_momentum_alone_is_named(ctx):
    """The rate is 0, as in a warm-up: parameters are equal."""
    ddp = wrapped(ctx, made())
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.0, momentum=0.9)
    missed(ctx, ddp, optimizer)
    (text,) = told(ddp.reset)
    assert "different parameters" not in text
    assert ("state of SGD for 0.weight" in text) == (ctx.rank == 0)
    optimizer.param_groups[0]["lr"] = 0.1
    step(ctx, ddp, optimizer)  # equal parameters: drifts now
    assert error_of(lambda: step(ctx, ddp, optimizer)).startswith("ReplicaMismatch")


@on_simulated_ranks(2)
def test_a_learning_rate_is_compared_and_copied(ctx):
    ddp = wrapped(ctx, made())
    optimizer = OPTIMIZERS["sgd"](ddp.parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    step(ctx, ddp, optimizer)
    if ctx.rank == 0:
        scheduler.step()
    (text,) = told(ddp.reset)
    assert ("settings of SGD (learning rate ...) on rank 1" in text) == (ctx.rank == 0)
    ddp.reset(copy_from=0)
    assert optimizer.param_groups[0]["lr"] == 0.05


class Halves(torch.optim.lr_scheduler.LRScheduler):
    """A class that minidp knows nothing of."""

    def get_lr(self):
        return [rate * 0.5 ** (self.last_epoch // 3) for rate in self.base_lrs]


def halved(optimizer):
    return [torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)]


def warm(optimizer):
    """Schedulers inside another one."""
    rates = torch.optim.lr_scheduler
    parts = [rates.LinearLR(optimizer, 0.1, 1.0, 3), rates.StepLR(optimizer, 2, 0.5)]
    return [*parts, rates.SequentialLR(optimizer, parts, milestones=[3])]


def unknown(optimizer):
    return [Halves(optimizer)]


def twice(optimizer):
    """Two that nobody can tell from each other."""
    return [torch.optim.lr_scheduler.StepLR(optimizer, n, 0.5) for n in (3, 4)]


def chained(optimizer):
    """Inside a scheduler that counts nothing itself."""
    inner = halved(optimizer)
    return [*inner, torch.optim.lr_scheduler.ChainedScheduler(inner)]


class Falls:
    """A function with a memory, which a `LambdaLR` saves, too."""

    calls = 0

    def __call__(self, _epoch):
        self.calls += 1
        return 1 / self.calls


def remembering(optimizer):
    return [torch.optim.lr_scheduler.LambdaLR(optimizer, Falls())]


class Counts(torch.optim.lr_scheduler.LRScheduler):
    """Has nothing of its base class, and leaves no trace in the optimizer."""

    def __init__(self, optimizer):
        self.optimizer, self.calls = optimizer, 1

    def step(self):
        self.calls += 1


# For each: what the ranks have counted, when rank 1 has missed a step.
SCHEDULERS = {
    halved: "2 on rank 0, 1",
    warm: "2 on rank 0, 1",
    chained: "2 on rank 0, 1",
    remembering: "2 on rank 0, 1",
    unknown: "2 on rank 0, 1",
    Counts: "3 on rank 0, 2",
    twice: "0 and 2 on rank 0, 0 and 1",
}
CANNOT_BE_COPIED = (unknown, Counts, twice)


@on_simulated_ranks(2)
@pytest.mark.parametrize("made_by", SCHEDULERS)
def test_a_scheduler_that_missed_a_step_is_named_and_copied(ctx, made_by):
    """The learning rates are still equal: rank 1's would change one step later."""
    ddp = wrapped(ctx, made())
    optimizer = OPTIMIZERS["momentum"](ddp.parameters())
    found = made_by(optimizer)
    schedulers = found if isinstance(found, list) else [found]

    def advance(steps=1):
        for _ in range(steps):
            step(ctx, ddp, optimizer)
            schedulers[-1].step()

    advance()
    step(ctx, ddp, optimizer)
    if ctx.rank == 0:
        schedulers[-1].step()
    (text,) = told(ddp.reset)
    left = told(lambda: ddp.reset(copy_from=0))
    is_copied = made_by not in CANNOT_BE_COPIED
    if is_copied:  # else the replicas may differ from now on
        advance(6)
        assert told(ddp.reset) == []
    name = type(schedulers[0]).__name__
    if ctx.rank == 0:
        assert f"last_epoch of {name} ({SCHEDULERS[made_by]} on" in text
    if not is_copied:
        assert f"cannot copy the state of {name}." in left[0]
        return []
    assert left == []
    return [optimizer.param_groups[0]["lr"], *state_of(ddp, optimizer)]


class Table:
    """A function for a `LambdaLR` with attributes that are no plain data."""

    def __init__(self):
        self.calls, self.function, self.factors = 0, math.sqrt, {0: [1.0]}

    def __call__(self, _epoch):
        self.calls += 1
        return self.function(self.factors[0][0] / self.calls)


@on_simulated_ranks(2)
def test_what_a_scheduler_cannot_send_stays(ctx):
    ddp = wrapped(ctx, made())
    optimizer = OPTIMIZERS["sgd"](ddp.parameters())
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, Table())
    missed(ctx, ddp, optimizer)
    if ctx.rank == 0:
        scheduler.step()
    (text,) = told(lambda: ddp.reset(copy_from=0))
    assert "cannot copy the state of LambdaLR." in text
    for number in range(3):
        step(ctx, ddp, optimizer, number)
        scheduler.step()
    return state_of(ddp, optimizer), scheduler.get_last_lr()


class Trainer:
    """Steps an optimizer; what it counts is no number yet."""

    def __init__(self, optimizer, last_epoch):
        self.optimizer, self.last_epoch = optimizer, last_epoch

    def step(self):
        self.optimizer.step()


@on_simulated_ranks(2)
@pytest.mark.parametrize("copies", [False, True])
def test_objects_of_any_kind_may_step_an_optimizer(ctx, copies):
    ddp = wrapped(ctx, made())
    optimizer = OPTIMIZERS["sgd"](ddp.parameters())
    trainers = [Trainer(optimizer, each) for each in (None, "ckpt", 3.5)]
    missed(ctx, ddp, optimizer)
    texts = told(lambda: ddp.reset(copy_from=0 if copies else None))
    assert len(texts) == (not copies)
    del trainers


class Bare(torch.optim.Optimizer):
    """Around another optimizer, without what the constructor of its class makes."""

    def __init__(self, inner):
        self.inner, self.param_groups, self.state = inner, inner.param_groups, {}

    def step(self, closure=None):
        self.inner.step(closure)


@on_simulated_ranks(2)
@pytest.mark.parametrize("copies", [False, True])
def test_an_optimizer_may_have_attributes_of_any_kind(ctx, copies):
    ddp = wrapped(ctx, made())
    optimizer = Silent(ddp.parameters(), lr=0.1)
    optimizer.note = [torch.ones(2, device="meta")]
    optimizer.note.append(optimizer.note)
    bare = Bare(optimizer)
    missed(ctx, ddp, optimizer)
    (text, *_) = told(lambda: ddp.reset(copy_from=0 if copies else None))
    assert ctx.rank or ("cannot copy" if copies else "different parameters") in text
    del bare


@on_simulated_ranks(2)
def test_a_rate_of_numpy_is_a_number(ctx):
    ddp = wrapped(ctx, made())
    rate = numpy.float32(0.1 if ctx.rank else 0.2)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=rate)
    (text,) = told(lambda: [step(ctx, ddp, optimizer), ddp.reset()])
    assert ctx.rank or "settings of SGD (learning rate ...) on rank 1" in text
    assert not told(lambda: ddp.reset(copy_from=0))
    return optimizer.param_groups[0]["lr"]


@on_ranks(2, fresh={})
def test_what_is_frozen_is_found(ctx):
    """Trainers do so, to keep Python's collector from looking at all objects."""
    ddp = wrapped(ctx, made())
    optimizer = OPTIMIZERS["sgd"](ddp.parameters())
    (scheduler,) = halved(optimizer)
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(torch.ones(()))
    gc.collect()
    gc.freeze()
    step(ctx, ddp, optimizer)
    if ctx.rank == 0:
        scheduler.step()
    (text,) = told(ddp.reset)
    assert ctx.rank or "last_epoch of StepLR (1 on rank 0, 0 on rank 1)" in text
    missed(ctx, ddp, optimizer)
    scaler.update(8.0 + ctx.rank)
    assert not told(lambda: ddp.reset(copy_from=0))
    return scheduler.last_epoch, scaler.get_scale()


@on_simulated_ranks(2)
@pytest.mark.parametrize("is_best", [True, False])
def test_a_scheduler_that_waits_for_a_plateau_is_copied(ctx, is_best):
    """It writes nothing into the optimizer, and counts more than its steps."""
    ddp = wrapped(ctx, made())
    optimizer = OPTIMIZERS["sgd"](ddp.parameters())
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=1)
    step(ctx, ddp, optimizer)
    plateau.step(1.0)
    if ctx.rank == 0:
        plateau.step(0.5 if is_best else 2.0)
    (text,) = told(ddp.reset)
    assert told(lambda: ddp.reset(copy_from=0)) == []
    for _ in range(3):
        plateau.step(0.6)
    assert ctx.rank or "last_epoch of ReduceLROnPlateau (2 on rank 0, 1" in text
    return [optimizer.param_groups[0]["lr"], plateau.best, plateau.num_bad_epochs]


@on_simulated_ranks(2)
@pytest.mark.parametrize("name", ["Muon", "Adafactor"])
def test_optimizers_of_every_module_of_torch_are_copied(ctx, name):
    ddp = wrapped(ctx, nn.Linear(4, 4, bias=False))
    optimizer = getattr(torch.optim, name)(ddp.parameters(), lr=0.1)
    missed(ctx, ddp, optimizer)
    assert told(lambda: ddp.reset(copy_from=0)) == []
    step(ctx, ddp, optimizer)
    return state_of(ddp, optimizer)


@on_simulated_ranks(2)
def test_an_optimizer_with_an_empty_group_is_copied(ctx):
    """A script that decays no parameter has one."""
    ddp = wrapped(ctx, made())
    groups = [{"params": [], "lr": 0.2}, {"params": [*ddp.parameters()]}]
    optimizer = torch.optim.SGD(groups, lr=0.1, momentum=0.9)
    missed(ctx, ddp, optimizer)
    assert told(lambda: ddp.reset(copy_from=0)) == []
    return state_of(ddp, optimizer)


# How an optimizer's groups are made on a rank, of parameters that all ranks have, some
# with another learning rate, and of this rank's own.
def rotated(rank, first, last, own):
    return [{"params": [*last, *first][:: 1 - 2 * rank]}]


def one_by_one(rank, first, last, own):
    fast = [{"params": [each], "lr": 0.3} for each in last]
    slow = [{"params": [each]} for each in first]
    return [*fast, *slow] if rank else [*slow, *fast]


def with_own_at_last(rank, first, last, own):
    return [{"params": [*first, *last, *own]}]


def with_own_at_first(rank, first, last, own):
    fast = {"params": last, "lr": 0.3}
    groups = [{"params": own, "lr": 0.5 + rank}, {"params": first}, fast]
    return groups[:: 1 - 2 * rank]


GROUPINGS = [rotated, one_by_one, with_own_at_last, with_own_at_first]


def rates_of(optimizer, ddp):
    groups = optimizer.param_groups
    rates = {id(param): group["lr"] for group in groups for param in group["params"]}
    return [rates[id(param)] for param in ddp.parameters()]


@on_simulated_ranks(2)
@pytest.mark.parametrize(
    ("grouping", "root"), list(zip(GROUPINGS, [0, 1, 1, 0], strict=True))
)
def test_an_optimizer_is_known_by_its_parameters(ctx, grouping, root):
    """Their order, groups, and parameters of a rank's own do not matter."""
    ddp = wrapped(ctx, made())
    *first, weight, bias = ddp.parameters()
    own = [nn.Parameter(torch.ones(3)) for _ in range(1 + ctx.rank)]
    groups = grouping(ctx.rank, first, [weight, bias], own)
    optimizer = torch.optim.SGD(groups, lr=0.1, momentum=0.9)
    (scheduler,) = halved(optimizer)
    before = rates_of(optimizer, ddp)
    for number in range(3):
        step(ctx, ddp, optimizer, number, raises=number == 2 and ctx.rank == 1)
        if ctx.rank == 0:  # so that the rate has fallen
            scheduler.step()
    (text,) = told(ddp.reset)
    assert ctx.rank or "state of SGD for" in text
    assert ctx.rank or "last_epoch of StepLR (3 on rank 0, 0 on rank 1)" in text
    assert not told(lambda: ddp.reset(copy_from=root))
    assert not told(ddp.reset)
    factor = 1.0 if root else 0.5
    assert rates_of(optimizer, ddp) == [rate * factor for rate in before]
    for number in range(4):
        step(ctx, ddp, optimizer, number)
        scheduler.step()
    assert scheduler.get_last_lr() == [g["lr"] for g in optimizer.param_groups]
    momenta = [optimizer.state[p]["momentum_buffer"] for p in ddp.parameters()]
    return state_of(ddp)[0], copy.deepcopy(momenta), scheduler.last_epoch


@on_simulated_ranks(2)
def test_one_group_cannot_have_the_settings_of_two(ctx):
    ddp = wrapped(ctx, made())
    first, *rest = ddp.parameters()
    groups = [{"params": [first], "lr": 0.2}, {"params": rest}]
    optimizer = torch.optim.SGD([first, *rest] if ctx.rank else groups, lr=0.1)
    missed(ctx, ddp, optimizer, steps=1)
    left = told(lambda: ddp.reset(copy_from=0))
    assert len(left) == ctx.rank
    assert all("cannot copy the state of SGD" in text for text in left)


@on_simulated_ranks(2)
@pytest.mark.parametrize(
    ("rank_with_old", "root", "has_stepped"),
    [
        (0, 0, False),
        (0, 1, False),
        (1, 1, False),  # nobody knows which one to copy
        (0, 1, True),
        (1, 0, True),
    ],
)
def test_an_old_optimizer_is_alive_on_one_rank(ctx, rank_with_old, root, has_stepped):
    """Another one of its class has taken its place, perhaps just before the error."""
    ddp = wrapped(ctx, made())
    old = OPTIMIZERS["momentum"](ddp.parameters())
    step(ctx, ddp, old)
    optimizer = OPTIMIZERS["momentum"](ddp.parameters())
    if ctx.rank != rank_with_old:
        del old
        gc.collect()
    if has_stepped:
        step(ctx, ddp, optimizer, 1)
    step(ctx, ddp, optimizer, 2, raises=ctx.rank == 1)
    (text,) = told(ddp.reset)
    assert ctx.rank or "different parameters" in text
    left = told(lambda: ddp.reset(copy_from=root))
    may_be_new = root == 1 and not has_stepped  # the one that has not stepped yet
    if root == rank_with_old and may_be_new:
        assert "cannot copy the state of SGD." in left[0]
        return []
    assert not left
    step(ctx, ddp, optimizer, 3)
    assert not told(lambda: step(ctx, ddp, optimizer, 4))
    momenta = [optimizer.state[p]["momentum_buffer"] for p in ddp.parameters()]
    return state_of(ddp)[0], copy.deepcopy(momenta)


@on_simulated_ranks(2)
def test_what_only_one_rank_has_is_named_if_nothing_else_holds_its_parameters(ctx):
    ddp = wrapped(ctx, made())
    kind = torch.optim.AdamW if ctx.rank else torch.optim.Adam
    optimizer = kind(ddp.parameters(), lr=0.0)
    missed(ctx, ddp, optimizer)
    with torch.no_grad():
        next(ddp.parameters()).add_(ctx.rank)
    (text,) = told(lambda: ddp.reset(copy_from=0))
    assert "cannot copy the state of Adam and the state of AdamW" in text


@on_simulated_ranks(2)
def test_what_only_one_rank_has_beside_the_others_optimizer_is_no_news(ctx):
    ddp = wrapped(ctx, made())
    optimizer = OPTIMIZERS["momentum"](ddp.parameters())
    old = torch.optim.SGD(list(ddp.parameters())[:1]) if ctx.rank else None
    missed(ctx, ddp, optimizer)
    assert not told(lambda: ddp.reset(copy_from=0))
    del old


@on_simulated_ranks(2)
def test_what_a_hook_of_torch_counts_is_compared_and_copied(ctx):
    """Else some ranks would send a bucket in one way, and some in another."""
    ddp = wrapped(ctx, made())
    state = powerSGD_hook.PowerSGDState(ctx.group, start_powerSGD_iter=4)
    ddp.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    optimizer = OPTIMIZERS["sgd"](ddp.parameters())
    for number in range(3):
        step(ctx, ddp, optimizer, number)
    state.iter += ctx.rank
    ddp._reducer.communicator.has_failed = True  # so that reset() renews the group
    (text,) = told(ddp.reset)
    told_of = f"iter of the comm hook's state ({state.iter} on rank 0, "
    assert ctx.rank or told_of in text
    assert state.process_group is ddp.process_group is not ctx.group
    assert not told(lambda: ddp.reset(copy_from=1))
    for number in range(6):
        step(ctx, ddp, optimizer, number)
    return state.iter, state_of(ddp)[0]


@on_simulated_ranks(2)
def test_a_scheduler_that_is_behind_is_named_beside_an_old_one(ctx):
    """Rank 1 still has an old scheduler, so that the numbers of them differ."""
    ddp = wrapped(ctx, made())
    optimizer = OPTIMIZERS["sgd"](ddp.parameters())
    kept = halved(optimizer) + (halved(optimizer) if ctx.rank else [])
    for last in (False, True):
        step(ctx, ddp, optimizer)
        if not (last and ctx.rank):
            kept[0].step()
    (text,) = told(ddp.reset)
    (left,) = told(lambda: ddp.reset(copy_from=0))
    assert ctx.rank or "last_epoch of StepLR (2 on rank 0, 0 and 1 on rank 1)" in text
    assert "cannot copy the state of StepLR." in left


@on_simulated_ranks(2)
def test_a_rank_with_another_number_of_schedulers_is_no_news(ctx):
    """One of them may be garbage, which Python has not freed yet on this rank."""
    ddp = wrapped(ctx, made())
    optimizer = OPTIMIZERS["sgd"](ddp.parameters())
    kept = halved(optimizer) if ctx.rank == 0 else twice(optimizer)
    step(ctx, ddp, optimizer)
    kept[0].step()
    assert told(ddp.reset) == told(lambda: ddp.reset(copy_from=0)) == []
    missed(ctx, ddp, optimizer)
    (text,) = told(lambda: ddp.reset(copy_from=1))
    assert "cannot copy the state of StepLR." in text


@on_ranks(2)
@pytest.mark.parametrize("overflows", [True, False])
def test_a_loss_scale_is_compared_and_copied(ctx, overflows):
    """After a step with infinite gradients it shrinks, and nothing else changes."""
    ddp = wrapped(ctx, made())
    optimizer, scaler = OPTIMIZERS["sgd"](ddp.parameters()), torch.amp.GradScaler("cpu")
    for number in range(2):
        optimizer.zero_grad()
        loss = scaler.scale(ddp(torch.ones(3, 4)).square().mean())
        (loss * float("inf") if overflows and number else loss).backward()
        if not overflows:  # only its growth is missed: it will come later
            scaler.step(optimizer)
        if ctx.rank and number:
            break
        if overflows:
            scaler.step(optimizer)
        scaler.update()
    (text,) = told(ddp.reset)
    said = "32768, right for 0 on rank 0, 65536, right for 1 on rank 1"
    if not overflows:
        said = "65536, right for 2 on rank 0, 65536, right for 1 on rank 1"
    assert ctx.rank or f"scale of GradScaler ({said})" in text
    assert not told(lambda: ddp.reset(copy_from=1))
    assert scaler.get_scale() == 65536.0
    assert not told(ddp.reset)
    return scaler.state_dict()


@on_ranks(2)
@pytest.mark.parametrize("copies", [False, True])
def test_a_disabled_scaler_is_none(ctx, copies):
    ddp = wrapped(ctx, made())
    optimizer = OPTIMIZERS["sgd"](ddp.parameters())
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    scaler.scale(ddp(torch.ones(3, 4)).mean()).backward()
    scaler.step(optimizer)
    scaler.update()
    assert not told(lambda: ddp.reset(copy_from=0 if copies else None))


@on_ranks(2)
@pytest.mark.parametrize("misses", [False, True])
def test_a_scaler_may_be_of_a_model_that_each_rank_has_of_its_own(ctx, misses):
    ddp = wrapped(ctx, made())
    optimizer = OPTIMIZERS["sgd"](ddp.parameters())
    helper = torch.optim.SGD([nn.Parameter(torch.ones(2))])
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(torch.ones(()))
    scaler.update(8.0 + ctx.rank)
    step(ctx, ddp, optimizer)
    assert not told(ddp.reset)
    if misses:
        missed(ctx, ddp, optimizer)
    texts = told(lambda: ddp.reset(copy_from=0))
    named = ["cannot copy the state of a GradScaler." in text for text in texts]
    assert named == [True] * misses
    assert scaler.get_scale() == 8.0 + ctx.rank
    del helper


@on_ranks(2)
def test_of_several_scalers_nobody_knows_which_is_which(ctx):
    ddp = wrapped(ctx, made())
    optimizer = OPTIMIZERS["sgd"](ddp.parameters())
    scalers = [torch.amp.GradScaler("cpu") for _ in range(2)]
    for scaler in scalers:
        scaler.scale(torch.ones(()))
    missed(ctx, ddp, optimizer)
    assert not told(lambda: ddp.reset(copy_from=0))
    scalers[0].update(8.0 + ctx.rank)
    (text,) = told(lambda: ddp.reset(copy_from=0))
    assert "cannot copy the state of a GradScaler." in text


@on_ranks(1, 2)
def test_a_scaler_unscales_again_after_an_error_in_its_step(ctx):
    ddp, x = wrapped(ctx, nn.Linear(3, 3)), torch.ones(2, 3)
    optimizer, scaler = (
        torch.optim.SGD(ddp.parameters(), lr=0.1),
        torch.amp.GradScaler("cpu"),
    )

    def train():
        optimizer.zero_grad()
        scaler.scale(ddp(x).square().mean()).backward()
        scaler.step(optimizer)
        scaler.update()

    train()
    handle = optimizer.register_step_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        train()
    handle.remove()
    ddp.reset()
    before = max(p.abs().max() for p in ddp.parameters())
    train()
    assert max(p.abs().max() for p in ddp.parameters()) < 2 * before


@on_simulated_ranks(2)
def test_what_cannot_be_copied_is_named(ctx):
    ddp = wrapped(ctx, made())
    optimizer = Own(ddp.parameters())
    missed(ctx, ddp, optimizer)
    (text,) = told(lambda: ddp.reset(copy_from=0))
    assert "cannot copy the state of Own." in text
    if ctx.rank:
        assert text == (
            f"[rank {ctx.rank}] reset(copy_from=0) cannot copy the state of Own. What "
            "to do: give all ranks rank 0's state of these."
        )
    else:
        assert text.startswith("[rank 0] reset(copy_from=0) gave all ranks rank 0's")
        assert "Optimizer steps: Own: 3 on rank 0, 2 on rank 1." in text


@on_simulated_ranks(2)
def test_ranks_have_to_agree_from_whom_to_copy(ctx):
    ddp = wrapped(ctx, made())
    error = error_of(lambda: ddp.reset(copy_from=[None, 0][ctx.rank]))
    assert "Found: None on rank 0, 0 on rank 1." in error
    assert error.startswith("ReplicaMismatchError")
    for wrong in (2, -1, True, "0"):
        kind = "ValueError" if isinstance(wrong, int) else "TypeError"
        kind = "TypeError" if wrong is True else kind
        assert error_of(lambda w=wrong: ddp.reset(copy_from=w)).startswith(kind)
    ddp.reset()
    step(ctx, ddp, OPTIMIZERS["sgd"](ddp.parameters()))


@on_simulated_ranks(2)
@pytest.mark.parametrize(
    "options", [{"check_replicas_every": 0}, {"forward_sync_buffers": False}], ids=str
)
def test_right_trainings_hear_nothing_after_reset(ctx, options):
    """Running statistics of their own; and the user said never."""
    ddp = wrapped(ctx, made(), **options)
    optimizer = OPTIMIZERS["momentum"](ddp.parameters())
    step(ctx, ddp, optimizer)
    if options == {"check_replicas_every": 0}:
        missed(ctx, ddp, optimizer)
    heard = told(lambda: [ddp.reset(), *(step(ctx, ddp, optimizer) for _ in range(3))])
    assert not heard


@on_simulated_ranks(2)
def test_local_steps_and_work_divided_among_ranks_are_no_difference(ctx):
    ddp = wrapped(ctx, made())
    optimizer = ZeroRedundancyOptimizer(
        ddp.parameters(), torch.optim.Adam, process_group=ctx.group, lr=0.1
    )
    own = list(ddp.parameters())[ctx.rank :: 2]  # the same, by hand
    mine = torch.optim.Adam(own, lr=0.1)
    step(ctx, ddp, optimizer)
    step(ctx, ddp, mine)
    for i, param in enumerate(ddp.parameters()):
        root = dist.get_global_rank(ctx.group, i % 2)
        dist.broadcast(param.data, root, group=ctx.group)
    assert not told(lambda: [ddp.reset(), step(ctx, ddp, optimizer)])
    local = OPTIMIZERS["momentum"](ddp.parameters())
    with ddp.no_sync():
        step(ctx, ddp, local)
    assert not told(ddp.reset)


@on_simulated_ranks(2)
def test_a_hook_that_kept_replicas_equal_excuses_no_missed_step(ctx):
    def halved(_state, bucket):
        work = dist.all_reduce(bucket.buffer().div_(2), group=ctx.group, async_op=True)
        return work.get_future().then(lambda done: done.value()[0])

    halved.__annotations__.clear()
    ddp = wrapped(ctx, made())
    ddp.register_comm_hook(None, halved)
    optimizer = OPTIMIZERS["sgd"](ddp.parameters())
    missed(ctx, ddp, optimizer)
    assert told(ddp.reset)
    error = error_of(lambda: step(ctx, ddp, optimizer))
    assert error.startswith(MISMATCH.format(ctx.rank)), error


@on_simulated_ranks(2)
def test_attached_models(ctx):
    net = made()
    handle = attach(net, process_group=ctx.group)
    optimizer = OPTIMIZERS["momentum"](net.parameters())
    missed(ctx, net, optimizer)
    assert not told(lambda: handle.reset(copy_from=0))
    step(ctx, net, optimizer)
    missed(ctx, net, optimizer)
    handle.detach()
    handle = attach(net, process_group=ctx.group)  # gives all ranks rank 0's weights
    step(ctx, net, optimizer)  # but not its momentum
    assert error_of(lambda: step(ctx, net, optimizer)).startswith("ReplicaMismatch")


# ---------------------------------------------------- other groups, and wrapping alone


def wrapped_anew(ctx: Any, how: str, **options: Any) -> Any:
    """Wrap, or move a wrapper to the group; not all ranks need to do the same."""
    if how == "move":
        ddp = DataParallel(made(ctx.rank), process_group=ctx.group, **options)
        step(ctx, ddp, OPTIMIZERS["sgd"](ddp.parameters()))
        ddp._update_process_group(ctx.group)
    else:
        net = made(0 if how == "equal" else ctx.rank)
        ddp = wrapped(ctx, net, init_sync=False, **options)
    return ddp


@on_simulated_ranks(2)
@pytest.mark.parametrize("how", ["move", "alone"])
def test_weights_of_some_ranks_are_other_ones(ctx, how):
    ddp = wrapped_anew(ctx, how)
    optimizer = OPTIMIZERS["sgd"](ddp.parameters())
    if how == "move" and ctx.rank == 1:
        with torch.no_grad():
            ddp.module[0].weight.add_(1)
    error = error_of(lambda: step(ctx, ddp, optimizer))
    assert error.startswith(MISMATCH.format(ctx.rank)), error
    assert "0.weight" in error


@on_simulated_ranks(2, 3)
@pytest.mark.parametrize("how", ["move", "equal"])
def test_equal_weights_train_on_and_are_compared_later(ctx, how):
    ddp = wrapped_anew(ctx, how)
    optimizer = OPTIMIZERS["sgd"](ddp.parameters())
    assert not told(lambda: [step(ctx, ddp, optimizer) for _ in range(3)])
    final = state_of(ddp)
    if ctx.rank == 1:
        with torch.no_grad():
            ddp.module[0].weight.add_(1)
    ddp._reducer.ledger.finalized += 97
    assert error_of(lambda: step(ctx, ddp, optimizer)).startswith("ReplicaMismatch")
    return final


@on_simulated_ranks(2)
@pytest.mark.parametrize("how", ["move", "alone"])
def test_a_rank_that_never_compares_is_not_waited_for(ctx, how):
    """Ranks need not pass the same options: none of them hangs."""
    ddp = wrapped_anew(ctx, "equal")
    if how == "move":
        ddp._update_process_group(ctx.group)
    if ctx.rank == 1:
        ddp._replication.stop_comparing()
    optimizer = OPTIMIZERS["sgd"](ddp.parameters())
    for number in range(4):
        step(ctx, ddp, optimizer, number)
    return state_of(ddp)


@on_simulated_ranks(2)
def test_a_rank_that_raised_before_its_first_forward(ctx):
    """Nobody has made sure before that the others compare."""
    torch.manual_seed(0)  # without module buffers, whose group a forward would connect
    ddp = wrapped(ctx, nn.Linear(4, 1), init_sync=False, hang_timeout=5.0)
    optimizer = OPTIMIZERS["sgd"](ddp.parameters())
    if ctx.rank == 0:
        assert error_of(lambda: step(ctx, ddp, optimizer)).startswith("Collective")
    ddp.reset(copy_from=0)
    for number in range(3):
        step(ctx, ddp, optimizer, number)
    return state_of(ddp)


@on_simulated_ranks(2)
def test_options_that_differ_are_no_matter_of_the_next_wrapper(ctx):
    """It is compared with that of the other rank, whoever has compared before."""
    for odd in (0, 1):
        every = "auto" if ctx.rank == odd else 0
        ddp = wrapped_anew(ctx, "equal", check_replicas_every=every)
        optimizer = OPTIMIZERS["sgd"](ddp.parameters())
        for number in range(2):
            step(ctx, ddp, optimizer, number)
        ddp = wrapped_anew(ctx, "equal")
        optimizer = OPTIMIZERS["sgd"](ddp.parameters())
        for number in range(4):
            step(ctx, ddp, optimizer, number)
        ddp = wrapped_anew(ctx, "alone")
        optimizer = OPTIMIZERS["sgd"](ddp.parameters())
        error = error_of(lambda d=ddp, o=optimizer: step(ctx, d, o))
        assert error.startswith(MISMATCH.format(ctx.rank)), error


# -------------------------------------------------------------------- excused mistakes


@on_simulated_ranks(2)
@pytest.mark.parametrize("policy", ["warn", "ignore"])
def test_an_excused_mistake_is_followed_up(ctx, policy):
    ddp = wrapped(ctx, made(), unsynced=policy)
    optimizer = OPTIMIZERS["sgd"](ddp.parameters())
    for number in range(3):
        step(ctx, ddp, optimizer, number)
    heard = told(lambda: step(ctx, ddp.module, optimizer))
    assert len(heard) == (policy == "warn")
    heard = told(lambda: [step(ctx, ddp, optimizer, n) for n in range(4)])
    if policy == "ignore":
        assert not heard
        return
    (text,) = heard
    assert text.startswith(
        f"[rank {ctx.rank}] The replicas differ: before averaged backward"
    )
    assert "a mistake was only warned of, because of unsynced='warn'" in text


@on_simulated_ranks(2)
def test_a_mistake_of_one_rank_is_followed_up_on_schedule(ctx):
    """The other one does not know, and nobody waits for it."""
    ddp = wrapped(ctx, made(), unsynced="warn")
    optimizer = OPTIMIZERS["sgd"](ddp.parameters())
    for number in range(3):
        step(ctx, ddp, optimizer, number)
    if ctx.rank == 1:
        assert told(lambda: step(ctx, ddp.module, optimizer))
    assert not told(lambda: [step(ctx, ddp, optimizer, n) for n in range(3)])
    ddp._reducer.ledger.finalized = 100
    assert len(told(lambda: step(ctx, ddp, optimizer))) == 1


@on_simulated_ranks(2, fresh={"group_timeout": 20.0})
@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_two_wrappers_on_one_group_leave_it_together(ctx, order):
    """Rank 1 raises before the second one's forward; the first one has failed nowhere.

    In the group that both share, rank 0 has begun the second one's collectives.
    """
    both = [wrapped(ctx, made(), hang_timeout=4) for _ in range(2)]
    optimizer = torch.optim.SGD([p for net in both for p in net.parameters()], lr=0.1)

    def train(raises=False):
        optimizer.zero_grad()
        for net in both:
            assert not (raises and net is both[1])
            net(torch.randn(3, 4)).square().mean().backward()
        optimizer.step()

    train()
    assert error_of(lambda: train(raises=ctx.rank == 1))
    for i in order:
        both[i].reset(copy_from=0)
    train()
    return [param.detach() for net in both for param in net.parameters()]


def unsynced(ctx: Any, **options: Any) -> tuple[Any, Any]:
    """Wrap equal modules without module buffers, with ``init_sync=False``."""
    torch.manual_seed(0)
    options |= {"init_sync": False, "hang_timeout": 20.0}
    ddp = wrapped(ctx, nn.Linear(4, 1), **options)
    return ddp, torch.optim.SGD(ddp.parameters(), lr=0.1)


def average_by_hand(ctx: Any, ddp: Any, optimizer: Any, number: int) -> None:
    optimizer.zero_grad()
    with ddp.no_sync():
        loss_of(ddp, 10 * number + ctx.rank).backward()
    for param in ddp.parameters():
        dist.all_reduce(param.grad, group=ctx.group)
        param.grad /= ctx.world_size
    optimizer.step()


@on_simulated_ranks(2)
@pytest.mark.parametrize(("odd", "does"), [(0, "evaluates"), (1, "goes forward")])
def test_one_rank_has_made_one_more_wrapper(ctx, odd, does):
    """The next ones meet all the same, or soon give up to wait for each other.

    Gradients that are averaged by hand make each rank ask the others.
    """

    def one_more():
        more, _ = unsynced(ctx)
        with torch.set_grad_enabled(does != "evaluates"):
            more(torch.ones(1, 4))

    if ctx.rank == odd:
        one_more()
    ddp, optimizer = unsynced(ctx)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(comparison, "PATIENCE_SECONDS", 0.5)
        for number in range(4):
            act = average_by_hand if number % 2 else step
            act(ctx, ddp, optimizer, number)
    if ctx.rank != odd:  # for the tests that follow on these ranks
        one_more()
    return state_of(ddp)


@on_simulated_ranks(2)
def test_a_first_comparison_that_join_drops_comes_later(ctx):
    """A forward without a backward has begun it."""
    ddp, optimizer = unsynced(ctx)
    ddp(torch.ones(1, 4))
    with ddp.join():
        step(ctx, ddp, optimizer)
    if ctx.rank == 1:
        with torch.no_grad():
            ddp.module.weight.add_(1)
    error = error_of(lambda: step(ctx, ddp, optimizer))
    assert error.startswith(MISMATCH.format(ctx.rank)), error


@on_simulated_ranks(2)
@pytest.mark.parametrize("late", [0, 1])
def test_what_a_wrapper_of_one_rank_has_posted_is_not_taken_for_the_next_ones(
    ctx, late
):
    """A hook that does not communicate lets one rank train alone, as in torch."""

    def train_alone():
        more, optimizer = unsynced(ctx)
        more.register_comm_hook(None, noop_hook)
        step(ctx, more, optimizer)

    if ctx.rank == late:
        threading.Event().wait(0.5)  # rank 1 may be in its backward by then
    if ctx.rank == 0:
        train_alone()
    ddp, optimizer = unsynced(ctx)
    for number in range(8):
        step(ctx, ddp, optimizer, number)
    if ctx.rank == 1:  # for the tests that follow on these ranks
        train_alone()
    return state_of(ddp)
