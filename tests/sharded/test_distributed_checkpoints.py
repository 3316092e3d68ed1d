"""torch.distributed.checkpoint saves shares, which any number of ranks can load."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

from minidp import DataParallel
from minidp.errors import ShardedStepError
from tests.support.both import same
from tests.support.combined import combined
from tests.support.ranks import on_ranks

OPTIMIZERS = {
    "adamw": lambda ps: torch.optim.AdamW(ps, 0.01),
    "amsgrad": lambda ps: torch.optim.Adam(ps, 0.01, amsgrad=True, foreach=True),
    "fused": lambda ps: torch.optim.AdamW(ps, 0.01, fused=True),
    "sgd": lambda ps: torch.optim.SGD(ps, 0.1),
    "momentum": lambda ps: torch.optim.SGD(ps, 0.1, momentum=0.9),
    "adagrad": lambda ps: torch.optim.Adagrad(ps, 0.1),
    "adafactor": lambda ps: torch.optim.Adafactor(ps, 0.01),
    "rprop": lambda ps: torch.optim.Rprop(ps, 0.01),
    "asgd": lambda ps: torch.optim.ASGD(ps, 0.01),
    "groups": lambda ps: torch.optim.NAdam(
        [{"params": ps[1::2], "lr": 0.1}, {"params": ps[::2], "betas": (0.5, 0.9)}]
    ),
}


class Counts(torch.optim.Optimizer):
    """Keeps numbers, lists and tensors inside lists, and draws random numbers."""

    def __init__(self, params):
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in (p for p in group["params"] if p.grad is not None):
                state = self.state[p]
                state["steps"] = state.get("steps", 0) + 1
                state.setdefault("old", []).append(p.grad.mean())
                state["mean"] = p.grad.clone() + 0 * torch.rand_like(p)
                p -= group["lr"] * state["mean"] / state["steps"] + sum(state["old"])


class Net(nn.Module):
    """Of one layer only every other step has gradients, and of another one none."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(4, 6), nn.Linear(6, 4)
        self.sometimes, self.never = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x, number):
        x = self.last(torch.tanh(self.first(x)))
        return self.sometimes(x) if number % 2 else x


def made(ctx, name, *, group=None, divides=True, overlaps=False):
    torch.manual_seed(0)
    net = Net()
    options = {"find_unused_parameters": True, "process_group": group or ctx.group}
    ddp = DataParallel(net, **options)
    params = list(net.parameters())
    optimizer = Counts(params) if name == "counts" else OPTIMIZERS[name](params)
    if divides:
        options = {"per_parameter": name == "counts", "overlap_param_gather": overlaps}
        ddp.sharded_step(optimizer, **options)
    return ddp, optimizer


def train(ddp, optimizer, numbers):
    """Train on the same batches on all ranks, so that their number plays no role."""
    for number in numbers:
        x = torch.randn(3, 4, generator=torch.Generator().manual_seed(number))
        ddp(x, number).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [param.detach().clone() for param in ddp.parameters()]


def state_of(ddp, optimizer):
    state = ddp.sharded_optimizer_state(optimizer)
    return {"model": ddp.module, "optimizer": state}


def save(ddp, optimizer, folder):
    dcp.save(
        state_of(ddp, optimizer),
        checkpoint_id=folder,
        process_group=ddp.process_group,
    )


def load(ddp, optimizer, folder):
    dcp.load(
        state_of(ddp, optimizer),
        checkpoint_id=folder,
        process_group=ddp.process_group,
    )


def folder_of(ctx, tmp_path):
    found = [str(tmp_path)]
    torch.distributed.broadcast_object_list(found, 0, group=ctx.group)
    return f"{found[0]}/checkpoint"


@on_ranks()
@pytest.mark.parametrize(("name", "where"), combined([*OPTIMIZERS, "counts"], [2, 3]))
def test_a_training_goes_on_with_the_same_bits(ctx, tmp_path, name):
    folder = folder_of(ctx, tmp_path)
    ddp, optimizer = made(ctx, name)
    train(ddp, optimizer, range(3))
    optimizer.param_groups[0]["lr"] *= 0.5
    optimizer.param_groups[0]["initial_lr"] = 0.3  # as a scheduler would
    save(ddp, optimizer, folder)
    before = torch.get_rng_state()
    end = train(ddp, optimizer, range(3, 6))
    again = made(ctx, name)
    torch.set_rng_state(before)
    load(*again, folder)
    if name != "counts":
        assert torch.equal(torch.get_rng_state(), before)
    assert again[1].param_groups[0]["initial_lr"] == 0.3
    assert same(end, train(*again, range(3, 6)))
    assert same(again[1].state_dict(), optimizer.state_dict())
    plain = made(ctx, name, divides=False)
    load(*plain, folder)
    assert same(end, train(*plain, range(3, 6)))
    return end


# In this order each optimizer is saved and loaded by each number of ranks.
NUMBERS = [(1, 1), (1, 2), (1, 3), (2, 2), (2, 3), (2, 1), (3, 3), (3, 1), (3, 2)]


@on_ranks(3)
@pytest.mark.parametrize(
    ("numbers", "name"), combined(NUMBERS, ["adamw", "groups", "counts"])
)
def test_any_number_of_ranks_saves_and_loads(ctx, tmp_path, numbers, name):
    saves, loads = numbers
    folder = folder_of(ctx, tmp_path)
    groups = {n: ctx.subgroups.get(tuple(range(n))) for n in (1, 2)} | {3: ctx.group}
    whole = end = None
    if ctx.rank < saves:
        ddp, optimizer = made(ctx, name, group=groups[saves])
        train(ddp, optimizer, range(3))
        whole = copy.deepcopy(ddp.whole_optimizer_state(optimizer))  # on rank 0
        save(ddp, optimizer, folder)
        end = train(ddp, optimizer, range(3, 6))
    torch.distributed.barrier(ctx.group)
    if ctx.rank < loads:
        ddp, optimizer = made(ctx, name, group=groups[loads])
        load(ddp, optimizer, folder)
        assert same(whole, ddp.whole_optimizer_state(optimizer))
        of = ddp._sharded.owners.of
        assert len(optimizer.state) <= sum(rank == ctx.rank for rank in of)
        mine = train(ddp, optimizer, range(3, 6))
        if end is not None and (3 not in (saves, loads) or saves == loads):
            assert same(end, mine)  # a third of three times a gradient is another one
    torch.distributed.barrier(ctx.group)


@on_ranks(2)
def test_values_that_are_on_their_way_are_saved_and_replaced(ctx, tmp_path):
    folder = folder_of(ctx, tmp_path)
    ddp, optimizer = made(ctx, "adamw", overlaps=True)
    train(ddp, optimizer, range(2))
    ddp(torch.ones(1, 4), 0).sum().backward()
    optimizer.step()  # nobody has read a parameter since
    save(ddp, optimizer, folder)
    optimizer.zero_grad()
    end = train(ddp, optimizer, range(3, 6))
    ddp(torch.ones(1, 4), 0).sum().backward()
    optimizer.step()
    load(ddp, optimizer, folder)
    optimizer.zero_grad()
    assert same(end, train(ddp, optimizer, range(3, 6)))
    return end


@on_ranks(2)
def test_each_rank_writes_its_share(ctx, tmp_path):
    folder = folder_of(ctx, tmp_path)
    ddp, optimizer = made(ctx, "adamw")
    train(ddp, optimizer, range(2))
    mine = ddp.sharded_optimizer_state(optimizer).state_dict()
    own = {ddp._reducer.names[i] for i in ddp._sharded.owners.owned_by(ctx.rank)}
    assert mine["state"].keys() == mine["share"].keys() == own
    save(ddp, optimizer, folder)
    saved = dcp.FileSystemReader(folder).read_metadata().state_dict_metadata
    for name in ddp._reducer.names:
        assert saved[f"optimizer.state.{name}.exp_avg"].size is not None
        assert f"optimizer.share.{name}" in saved


@on_ranks(2)
def test_a_state_is_asked_for_before_sharded_step(ctx, tmp_path):
    """Who owns what is looked up when it is saved."""
    folder = folder_of(ctx, tmp_path)
    ddp, optimizer = made(ctx, "adamw", divides=False)
    state = {"optimizer": ddp.sharded_optimizer_state(optimizer)}
    ddp.sharded_step(optimizer)
    train(ddp, optimizer, range(2))
    dcp.save(state, checkpoint_id=folder, process_group=ctx.group)
    whole = ddp.whole_optimizer_state(optimizer)
    again = made(ctx, "adamw", divides=False)
    fresh = {"optimizer": again[0].sharded_optimizer_state(again[1])}
    dcp.load(fresh, checkpoint_id=folder, process_group=ctx.group)
    if whole is not None:
        assert same(whole["state"], again[1].state_dict()["state"])


@on_ranks(2)
def test_schedulers_scalers_and_hooks_notice_nothing(ctx, tmp_path):
    """Of the step for trial, and of the random numbers that it draws."""
    folder = folder_of(ctx, tmp_path)
    ddp, optimizer = made(ctx, "counts")
    save(ddp, optimizer, folder)  # before any step: all of it is made up
    again, other = made(ctx, "counts")
    scheduler = torch.optim.lr_scheduler.StepLR(other, 1, 0.5)
    other.register_step_pre_hook(lambda *_: pytest.fail("a hook was called"))
    other.register_step_post_hook(lambda *_: pytest.fail("a hook was called"))
    before, params = torch.get_rng_state(), [*again.parameters()]
    values = [param.detach().clone() for param in params]
    mine = again.sharded_optimizer_state(other).state_dict()
    assert any("mean" in each for each in mine["state"].values())
    assert torch.equal(before, torch.get_rng_state())
    assert same(values, [param.detach() for param in params])
    assert not other.state
    assert all(param.grad is None for param in params)
    assert scheduler.last_epoch == 0
    load(again, other, folder)
    assert not other.state  # as it was saved


@on_ranks(2)
@pytest.mark.parametrize("name", ["adamw", "counts"])
def test_a_training_goes_on_while_its_checkpoint_is_written(ctx, tmp_path, name):
    folder = folder_of(ctx, tmp_path)
    ddp, optimizer = made(ctx, name)
    train(ddp, optimizer, range(3))
    state = state_of(ddp, optimizer)
    group = torch.distributed.new_group([0, 1], use_local_synchronization=True)
    future = dcp.async_save(state, checkpoint_id=folder, process_group=group)
    kept = {k: v for k, v in state["optimizer"].state_dict().items() if k != "state"}
    before = copy.deepcopy(kept)
    end = train(ddp, optimizer, range(3, 6))
    optimizer.param_groups[0]["lr"] = 7.0
    assert same(kept, before)
    future.result(timeout=20)
    again = made(ctx, name)
    load(*again, folder)
    assert same(end, train(*again, range(3, 6)))


# ------------------------------------------------------------------------ mistakes


@on_ranks(2)
def test_an_optimizer_with_other_groups_is_refused(ctx, tmp_path):
    folder = folder_of(ctx, tmp_path)
    save(*made(ctx, "adamw"), folder)
    torch.manual_seed(0)
    net = Net()
    ddp = DataParallel(net, process_group=ctx.group, find_unused_parameters=True)
    optimizer = torch.optim.AdamW([*net.parameters()][::-1], 0.01)
    ddp.sharded_step(optimizer)
    with pytest.raises(ShardedStepError, match="whose groups have other parameters"):
        load(ddp, optimizer, folder)


@on_ranks(2)
def test_state_that_would_be_lost_is_named_on_all_ranks(ctx, tmp_path):
    """DCP looks up what is wanted, and does not say what else there is."""
    folder = folder_of(ctx, tmp_path)
    ddp, optimizer = made(ctx, "adamw")
    train(ddp, optimizer, range(2))
    if ctx.rank == 1:
        next(iter(optimizer.state.values()))["more"] = torch.ones(2)
    save(ddp, optimizer, folder)
    says = "would keep here" if ctx.rank == 1 else "Rank 1 could not load its share"
    with pytest.raises(ShardedStepError, match=says):
        load(*made(ctx, "adamw"), folder)


@on_ranks(2)
def test_what_a_checkpoint_lacks_dcp_names(ctx, tmp_path):
    folder = folder_of(ctx, tmp_path)
    save(*made(ctx, "momentum"), folder)
    with pytest.raises(
        CheckpointException, match=r"Missing key .*: optimizer\.state\.first"
    ):
        load(*made(ctx, "adamw"), folder)


@on_ranks(2)
def test_torchs_own_functions_do_not_take_a_share_for_all_of_it(ctx):
    ddp, optimizer = made(ctx, "adamw")
    train(ddp, optimizer, range(2))
    with pytest.raises(KeyError, match="minidp_share"):
        get_optimizer_state_dict(ddp.module, optimizer)


@on_ranks(2)
def test_parameters_outside_of_the_module_are_refused(ctx):
    ddp, _ = made(ctx, "adamw", divides=False)
    extra = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.AdamW([*ddp.parameters(), extra])
    with pytest.raises(ShardedStepError, match="1 of them in AdamW"):
        ddp.sharded_optimizer_state(optimizer)
