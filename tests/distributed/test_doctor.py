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


class Net(nn.Module):
    def __init__(self, *, norm=False, spare=False, drop=False):
        super().__init__()
        self.first = nn.Linear(2, 4)
        self.norm = nn.BatchNorm1d(4) if norm else nn.Identity()
        self.drop = nn.Dropout(0.5 if drop else 0.0)
        self.last = nn.Linear(4, 1)
        self.spare = nn.Linear(1, 1) if spare else None

    def forward(self, x):
        return self.last(self.drop(self.norm(self.first(x))))


def unwell(report):
    """check -> status, of warnings and failures."""
    return {
        finding.check: finding.status.value
        for finding in report
        if finding.status.value in ("warning", "failed")
    }


def test_model_faults(pool):
    for found in pool.run(model_faults, 2):
        assert found == {
            "sound": {},
            "small batch": {"batch norm": "warning"},
            "unused": {"unused parameters": "failed"},
            "flag": {"unused parameters": "warning"},
            "same dropout": {"random streams": "warning"},
            "other seeds": {"replicas": "failed"},
            "attached": {},
            "attached, flag": {"unused parameters": "warning"},
            "attached, other seeds": {"replicas": "failed"},
            "one rank's buffer": {"devices": "failed"},
            "not wrapped": {},
        }


def model_faults(ctx):
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

    x = torch.ones(8, 2)
    found = {
        "sound": check(Net()),
        "small batch": check(Net(norm=True)),
        "unused": check(Net(spare=True)),
        "flag": check(Net(), find_unused_parameters=True),
        "same dropout": check(Net(drop=True), seed=0),
        "other seeds": check(seeded(), init_sync=False),
        "attached": check(attached(Net(), process_group=ctx.group), wrap=False),
        "attached, flag": check(
            attached(Net(), process_group=ctx.group, find_unused_parameters=True),
            wrap=False,
        ),
        "attached, other seeds": check(
            attached(seeded(), process_group=ctx.group, init_sync=False), wrap=False
        ),
    }
    net = Net()
    if ctx.rank == 1:
        net.register_buffer("late", torch.ones(1, device="meta"))
    report = doctor.check_model(net, process_group=ctx.group, quiet=True)
    assert [f.ranks for f in report if f.status.value == "failed"] == [(1,)]
    found["one rank's buffer"] = unwell(report)
    found["not wrapped"] = check(seeded(), wrap=False)
    return found


def test_loader_faults(pool):
    for found in pool.run(loader_faults, 2):
        assert found == {
            "sound": {},
            "own subset": {},
            "no sampler": {"sampler": "warning"},
            "shuffled": {"sampler": "warning"},
            "always rank 0": {"sampler": "failed", "parts": "failed"},
            "own seeds": {"parts": "failed"},
            "own lengths": {"batches": "failed", "parts": "failed"},
            "same augmentation": {"random streams": "warning"},
        }


class Augmented(TensorDataset):
    transform = staticmethod(torch.flip)


def loader_faults(ctx):
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
    return {
        "sound": check(split()),
        "own subset": check(DataLoader(half, 4, shuffle=True)),
        "no sampler": check(DataLoader(DATA, 4)),
        "shuffled": check(DataLoader(DATA, 4, shuffle=True)),
        "always rank 0": check(split(rank=0)),
        "own seeds": check(split(seed=ctx.rank)),
        "own lengths": check(split(TensorDataset(*DATA[: 32 + 16 * ctx.rank]))),
        "same augmentation": check(split(Augmented(*DATA.tensors)), seed=0),
    }


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_training_faults(pool, wrapper, tmp_path):
    for found in pool.run(training_faults, 2, wrapper, str(tmp_path)):
        assert found == {
            "sound": {},
            "accumulates with no_sync": {},
            "no set_epoch": {"set_epoch": "warning"},
            "same batches": {"batches": "failed"},
            "accumulates": {"accumulation": "warning"},
            "flag": {"find_unused": "warning"},
            "flag needed": {},
            "saves": {"saving": "failed"},
            "prints": {"printing": "warning"},
            "ragged": {"mean of means": "warning"},
        }


def training_faults(ctx, wrapper, folder):
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
                torch.save({}, f"{folder}/last.pt")
        return unwell(watched.report)

    return {
        "sound": train(),
        "accumulates with no_sync": train(("no_sync",)),
        "no set_epoch": train(("no set_epoch",)),
        "same batches": train(("same batches",)),
        "accumulates": train(("accumulates",)),
        "flag": train(find_unused_parameters=True),
        "flag needed": train(net=Net(spare=True), find_unused_parameters=True),
        "saves": train(("saves",)),
        "prints": train(("prints",)),
        "ragged": train(("ragged",)),
    }


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


def test_torch_ddp_that_is_gone_around(pool):
    """Torch's DDP says nothing when ``.module`` is called; minidp raises by itself."""
    for found in pool.run(gone_around, 2):
        assert found == {"gradients": "failed", "replicas": "failed"}


def gone_around(ctx):
    model = DistributedDataParallel(Net(), process_group=ctx.group)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)

    def step(_, x):
        model.module(x).sum().backward()
        optimizer.step()

    return unwell(watched_steps(ctx, model, step))


def replicas_apart(ctx, wrapper, deed):
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
    (found,) = [f for f in report if f.check == "replicas"]
    return found.status.value, found.found, found.remedy


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
def test_watch_compares_replicas(pool, wrapper, deed, status, found, remedy):
    for theirs in pool.run(replicas_apart, 2, wrapper, deed):
        assert theirs[0] == status
        assert found in theirs[1]
        assert remedy in theirs[2]


def test_only_rank_0_prints(pool):
    assert pool.run(who_prints, 2) == [True, False]


def who_prints(ctx):
    text = io.StringIO()
    with redirect_stdout(text):
        doctor.check_model(Net(), process_group=ctx.group)
    return "minidp doctor: the model" in text.getvalue()


def checked_and_watched(ctx, model, step):
    torch.manual_seed(ctx.rank)
    checked = doctor.check_model(model, torch.ones(8, 2), seconds=SECONDS, quiet=True)
    return [unwell(checked), unwell(watched_steps(ctx, model, step))]


@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize("mode", ["static_graph", "gradient_as_bucket_view"])
def test_modes_and_loss_scaling_are_not_blamed(pool, wrapper, mode):
    for found in pool.run(scaled_training, 2, wrapper, {mode: True}):
        assert found == [{}, {}]


def scaled_training(ctx, wrapper, options):
    model = WRAPPERS[wrapper](Net(), process_group=ctx.group, **options)
    optimizer = torch.optim.AdamW(model.parameters())
    scaler = torch.amp.GradScaler("cpu")

    def step(_, x):
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(x).float().sum()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()

    return checked_and_watched(ctx, model, step)


@pytest.mark.parametrize("deed", ["steps in the backward", "ignores a parameter"])
def test_what_ranks_do_on_purpose_is_not_blamed(pool, deed):
    for found in pool.run(on_purpose, 2, deed):
        assert found == [{}, {}]


def on_purpose(ctx, deed):
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

    return checked_and_watched(ctx, model, step)


CPU = torch.device("cpu")


class Halved(minidp.DataParallel):
    """All ranks get the same gradients, but not the mean."""

    def forward(self, x):
        return super().forward(x) / 2


class OtherBits(minidp.DataParallel):
    """Gradients are nearly those of torch."""

    def forward(self, x):
        return super().forward(x) * (1 + 1e-6)


def test_collectives_that_are_well(pool):
    first, second = pool.run(communicate, 2)
    assert first == second  # times are those of the slowest rank
    assert [finding["status"] for finding in first] == ["ok"] * 3


def communicate(ctx):
    findings = [
        collectives.check_all_reduce(ctx.group, CPU, 4),
        collectives.check_gradients(ctx.group, CPU),
        collectives.check_clocks(ctx.group, CPU, clock=lambda: 5.0),
    ]
    return [finding.as_json() for finding in findings]


def test_collectives_that_are_broken(pool):
    for found in pool.run(broken, 2):
        assert found == [
            ["warning", "rank 1 is +100.0 s off rank 0"],
            # 6 rounds, in each of them one element, on one rank.
            ["failed", "400 B: 6 elements are not the sum of all ranks"],
            ["failed", "a probe model has other gradients on rank 1 than on rank 0"],
            [
                "failed",
                "of a probe model: 0.weight, 0.bias, 2.weight and 2.bias did not get "
                "the ranks' mean",
            ],
            [
                "warning",
                "a probe model gets the mean of all ranks, bit for bit the same on "
                "each; torch's DDP gives other bits",
            ],
        ]


def broken(ctx):
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
    return [[f.status.value, f.found] for f in (clock, sums, *grads)]
