"""``doctor`` inside scripts on two ranks: planted faults are found, sound ones not."""

from __future__ import annotations

import io
from contextlib import nullcontext, redirect_stdout

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, Subset, TensorDataset

import minidp
from minidp import doctor
from minidp.doctor.checks import collectives
from tests.support.broken import NoReduce
from tests.support.judged import Net
from tests.support.ranks import on_ranks

pytestmark = pytest.mark.fresh


def attached(net, **options):
    """The net itself; `step` asks it for ``no_sync``."""
    net.no_sync = minidp.attach(net, **options).no_sync
    return net


WRAPPERS = {
    "minidp": minidp.DataParallel,
    "torch": DistributedDataParallel,
    "attached": attached,
}
SECONDS = 20.0
DATA = TensorDataset(torch.arange(128.0).reshape(64, 2))


def unwell(report):
    """check -> status, of warnings and failures."""
    return {
        finding.check: finding.status.value
        for finding in report
        if finding.status.value in ("warning", "failed")
    }


@on_ranks(2)
def test_model_faults(ctx):
    def check(net, wrap=True, seed=None, **options):
        if wrap:
            net = minidp.DataParallel(net, process_group=ctx.group, **options)
        torch.manual_seed(ctx.rank if seed is None else seed)
        report = doctor.check_model(
            net, x, process_group=ctx.group, seconds=SECONDS, quiet=True
        )
        return unwell(report)

    def seeded(**options):
        torch.manual_seed(ctx.rank)
        return Net(**options)

    def attach(net, **options):
        return attached(net, process_group=ctx.group, **options)

    x, unused = torch.ones(8, 2), "unused parameters"
    assert check(Net()) == {}
    assert check(Net(norm=True)) == {"batch norm": "warning"}
    assert check(Net(spare=True)) == {unused: "failed"}
    assert check(Net(), find_unused_parameters=True) == {unused: "warning"}
    assert check(Net(spare=True), find_unused_parameters=True) == {}
    assert check(Net(drop=True), seed=0) == {"random streams": "warning"}
    assert check(seeded(), init_sync=False) == {"replicas": "failed"}
    assert check(attach(Net()), wrap=False) == {}
    net = attach(Net(), find_unused_parameters=True)
    assert check(net, wrap=False) == {unused: "warning"}
    net = attach(seeded(), init_sync=False)
    assert check(net, wrap=False) == {"replicas": "failed"}
    assert check(seeded(), wrap=False) == {}
    net = Net()
    if ctx.rank == 1:
        net.register_buffer("late", torch.ones(1, device="meta"))
    report = doctor.check_model(net, process_group=ctx.group, quiet=True)
    assert [f.ranks for f in report if f.status.value == "failed"] == [(1,)]
    assert unwell(report) == {"devices": "failed"}


@on_ranks(2)
def test_loader_faults(ctx):
    def split(data=DATA, **options):
        options = {"num_replicas": 2, "rank": ctx.rank, **options}
        return DataLoader(data, 4, sampler=DistributedSampler(data, **options))

    def check(loader, seed=None):
        torch.manual_seed(ctx.rank if seed is None else seed)
        report = doctor.check_loader(
            loader, process_group=ctx.group, seconds=SECONDS, quiet=True
        )
        return unwell(report)

    half = Subset(DATA, range(32 * ctx.rank, 32 * ctx.rank + 32))
    other_length = TensorDataset(*DATA[: 32 + 16 * ctx.rank])
    augmented = split(Augmented(*DATA.tensors))
    both = {"parts": "failed"}
    assert check(split()) == {}
    assert check(DataLoader(half, 4, shuffle=True)) == {}
    assert check(DataLoader(DATA, 4)) == {"sampler": "warning"}
    assert check(DataLoader(DATA, 4, shuffle=True)) == {"sampler": "warning"}
    assert check(split(rank=0)) == {"sampler": "failed"} | both
    assert check(split(seed=ctx.rank)) == both
    assert check(split(other_length)) == {"batches": "failed"} | both
    assert check(augmented, seed=0) == {"random streams": "warning"}


class Augmented(TensorDataset):
    transform = staticmethod(torch.flip)


@on_ranks(2)
@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_training_faults(ctx, wrapper, tmp_path):
    def train(deeds=(), net=None, **options):
        net = net or Net()
        model = WRAPPERS[wrapper](net, process_group=ctx.group, **options)
        optimizer = torch.optim.SGD(model.parameters(), 0.01)
        part = 0 if "same batches" in deeds else ctx.rank
        sampler = DistributedSampler(DATA, num_replicas=2, rank=part)
        loader = DataLoader(DATA, 8, sampler=sampler)
        with doctor.watch(model, loader, seconds=SECONDS, quiet=True) as watched:
            for epoch in range(2):
                if "no set_epoch" not in deeds:
                    sampler.set_epoch(epoch)
                for i, (x,) in enumerate(loader):
                    step(model, optimizer, x, deeds, is_last=bool(i % 2))
                if "prints" in deeds or ctx.rank == 0:
                    print("epoch", epoch)
            if "saves" in deeds or ctx.rank == 0:
                torch.save({}, tmp_path / "last.pt")
        return unwell(watched.report)

    assert train() == {}
    assert train(("no_sync",)) == {}
    assert train(("no set_epoch",)) == {"set_epoch": "warning"}
    assert train(("same batches",)) == {"batches": "failed"}
    assert train(("accumulates",)) == {"accumulation": "warning"}
    assert train(find_unused_parameters=True) == {"find_unused": "warning"}
    assert train(net=Net(spare=True), find_unused_parameters=True) == {}
    assert train(("saves",)) == {"saving": "failed"}
    assert train(("prints",)) == {"printing": "warning"}
    assert train(("ragged",)) == {"mean of means": "warning"}


def step(model, optimizer, x, deeds, *, is_last):
    if "ragged" in deeds:
        x = x[: 8 - dist.get_rank()]
    accumulates = "accumulates" in deeds or "no_sync" in deeds
    if "no_sync" in deeds and not is_last:
        with model.no_sync():
            model(x).sum().backward()
    else:
        model(x).sum().backward()
    if is_last or not accumulates:
        optimizer.step()
        optimizer.zero_grad()


def watched_steps(ctx, model, step, end=lambda: None):
    """The report on four steps of ``step(number, input)``, and then ``end()``."""
    with doctor.watch(model, seconds=SECONDS, quiet=True) as watched:
        for i in range(4):
            step(i, torch.full((8, 2), ctx.rank + i + 1.0))
        end()
    return watched.report


@on_ranks(2)
def test_torch_ddp_that_is_gone_around(ctx):
    """Torch's DDP says nothing when ``.module`` is called; minidp raises by itself."""
    model = DistributedDataParallel(Net(), process_group=ctx.group)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)

    def step(_, x):
        model.module(x).sum().backward()
        optimizer.step()

    found = unwell(watched_steps(ctx, model, step))
    assert found == {"replicas": "failed"}


@on_ranks(2)
@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize(
    ("deed", "status", "found", "remedy"),
    [
        ("", "ok", "before and after", ""),
        ("checkpoint on one rank", "failed", "ranks began with", "load a checkpoint"),
        ("by hand", "failed", "equal before, but then", "what changes parameters on"),
        ("steps inside no_sync", "warning", "equal before, but", "no_sync() (3 times)"),
    ],
)
def test_watch_compares_replicas(ctx, wrapper, deed, status, found, remedy):
    """What `watch` says when nobody else compares replicas."""
    options = {} if wrapper == "torch" else {"check_replicas_every": 0}
    model = WRAPPERS[wrapper](Net(), process_group=ctx.group, **options)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    if deed == "checkpoint on one rank" and ctx.rank == 1:
        model.load_state_dict({k: v + 1 for k, v in model.state_dict().items()})

    def step(i, x):
        is_inside = deed == "steps inside no_sync" and i != 3
        with model.no_sync() if is_inside else nullcontext():
            model(x).sum().backward()
            optimizer.step()
            optimizer.zero_grad()

    def end():
        if deed == "by hand" and ctx.rank == 1:
            with torch.no_grad():
                next(model.parameters()).mul_(1.01)

    report = watched_steps(ctx, model, step, end)
    (finding,) = [f for f in report if f.check == "replicas"]
    assert finding.status.value == status
    assert found in finding.found
    assert remedy in finding.remedy


@on_ranks(2)
def test_only_rank_0_prints(ctx):
    text = io.StringIO()
    with redirect_stdout(text):
        doctor.check_model(Net(), process_group=ctx.group)
    assert ("minidp doctor: the model" in text.getvalue()) == (ctx.rank == 0)


def checked_and_watched(ctx, model, step):
    torch.manual_seed(ctx.rank)
    checked = doctor.check_model(model, torch.ones(8, 2), seconds=SECONDS, quiet=True)
    return [unwell(checked), unwell(watched_steps(ctx, model, step))]


@on_ranks(2)
@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize("mode", ["static_graph", "gradient_as_bucket_view"])
def test_modes_and_loss_scaling_are_not_blamed(ctx, wrapper, mode):
    model = WRAPPERS[wrapper](Net(), process_group=ctx.group, **{mode: True})
    optimizer = torch.optim.AdamW(model.parameters())
    scaler = torch.amp.GradScaler("cpu")

    def step(_, x):
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(x).float().sum()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()

    assert checked_and_watched(ctx, model, step) == [{}, {}]


@on_ranks(2)
@pytest.mark.parametrize("deed", ["steps in the backward", "ignores a parameter"])
def test_what_ranks_do_on_purpose_is_not_blamed(ctx, deed):
    net = Net()
    if deed == "ignores a parameter":
        names = ["last.weight", "last.bias"]
        wrapper = minidp.DataParallel
        wrapper._set_params_and_buffers_to_ignore_for_model(net, names)
        nn.init.constant_(net.last.weight, ctx.rank + 1.0)
    model = minidp.DataParallel(net, process_group=ctx.group, bucket_cap_mb=1e-5)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    if deed == "steps in the backward":
        model.step_in_backward(optimizer)

    def step(_, x):
        model(x).sum().backward()
        if deed != "steps in the backward":
            optimizer.step()
        optimizer.zero_grad()

    assert checked_and_watched(ctx, model, step) == [{}, {}]


CPU = torch.device("cpu")


class Halved(minidp.DataParallel):
    """All ranks get the same gradients, but not the mean."""

    def forward(self, x):
        return super().forward(x) / 2


class OtherBits(minidp.DataParallel):
    """Gradients are nearly those of torch."""

    def forward(self, x):
        return super().forward(x) * (1 + 1e-6)


@on_ranks(2)
def test_collectives_that_are_well(ctx):
    """Times are those of the slowest rank."""
    findings = [
        collectives.check_all_reduce(ctx.group, CPU, 4),
        collectives.check_gradients(ctx.group, CPU),
        collectives.check_clocks(ctx.group, CPU, clock=lambda: 5.0),
    ]
    assert [finding.status.value for finding in findings] == ["ok"] * 3
    return [finding.as_json() for finding in findings]


@on_ranks(2)
def test_collectives_that_are_broken(ctx):
    def break_one(value, *args, **options):
        all_reduce(value, *args, **options)
        if ctx.rank == 1 and value.numel() == 100:
            value[7] += 1

    clock = collectives.check_clocks(ctx.group, CPU, lambda: 100.0 * ctx.rank)
    all_reduce, dist.all_reduce = dist.all_reduce, break_one
    try:
        sums = collectives.check_all_reduce(ctx.group, CPU, 400)
    finally:
        dist.all_reduce = all_reduce
    wrappers = (NoReduce, Halved, OtherBits)
    grads = [collectives.check_gradients(ctx.group, CPU, wrap) for wrap in wrappers]
    found = [[f.status.value, f.found] for f in (clock, sums, *grads)]
    assert found == [
        ["warning", "rank 1 is +100.0 s off rank 0"],
        # 6 rounds, in each of them one element, on one rank.
        ["failed", "400 B: 6 elements are not the sum of all ranks"],
        ["failed", "a probe model has different gradients on rank 1 than on rank 0"],
        [
            "failed",
            "of a probe model: 0.weight, 0.bias, 2.weight and 2.bias did not get "
            "the ranks' mean",
        ],
        [
            "warning",
            "a probe model gets the mean of all ranks, bit for bit the same on "
            "each; torch's DDP gives different bits",
        ],
    ]
