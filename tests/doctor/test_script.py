"""Faults planted in models, loaders and training logs of one process.

What several ranks compare is given as data here, and played in
``tests/doctor/test_script_on_ranks.py``.
"""

from __future__ import annotations

import builtins
import contextlib
import importlib
import io
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils import data
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from minidp import SyncBatchNorm, accelerator, doctor
from minidp.doctor.checks import loader as loaders
from minidp.doctor.checks import model as models
from minidp.doctor.checks import training
from minidp.doctor.checks.ranks import digest_of_states, judge_streams
from minidp.doctor.training_log import TrainingLog
from tests.support.judged import FAILED, OK, SKIPPED, WARNING, Net, judged, says

optimizers = importlib.import_module("torch.optim.optimizer")
DATA = TensorDataset(torch.arange(32.0).reshape(16, 2))


def whole_net(**options):
    return Net(norm=True, drop=True, **options)


def with_stray(*, is_buffer):
    net = whole_net()
    if is_buffer:
        net.norm.running_var = torch.ones(4, device="meta")
    else:
        net.last = nn.Linear(4, 1, device="meta")
    return net


BATCH = torch.ones(8, 2)


@judged(
    (whole_net(), BATCH, OK, "9 on cpu"),
    (with_stray(is_buffer=True), None, FAILED, "1 on meta (norm.running_var)"),
    (with_stray(is_buffer=False), None, FAILED, "(last.weight and last.bias)"),
    (nn.LazyLinear(3), None, FAILED, "lazy"),
    (nn.ReLU(), None, FAILED, "no parameters"),
)
def test_devices(net, batch):
    return models.judge_devices(net, batch)


def test_a_batch_on_another_device():
    fine, wrong = models.judge_devices(whole_net(), {"x": BATCH.to("meta")})
    says(fine, OK)
    says(wrong, FAILED, "the batch is on meta, the model on cpu")


@judged(
    ("cuda:0", OK, ""),
    ("cuda:0", "cuda:1", WARNING, "model-parallel"),
    ("cuda:0", "cpu", FAILED, "register_buffer"),
)
def test_places(*devices):
    return models.judge_places({torch.device(each): ["weight"] for each in devices})


@pytest.mark.parametrize(
    ("local_rank", "device", "num_gpus", "statuses"),
    [
        ("1", "cuda:0", 2, [WARNING]),
        ("1", "cuda:1", 2, []),
        ("1", "cuda:0", 1, []),  # each process sees its own as the first
        ("1", "cpu", 2, []),
        ("", "cuda:0", 2, []),
    ],
)
def test_the_gpu_of_another_rank(monkeypatch, local_rank, device, num_gpus, statuses):
    monkeypatch.setenv("LOCAL_RANK", local_rank)
    monkeypatch.setattr(accelerator, "count", lambda: num_gpus)
    monkeypatch.setattr(accelerator, "has_streams", lambda each: each.type != "cpu")
    found = models.judge_own_gpu(torch.device(device))
    assert [finding.status for finding in found] == statuses


@judged(
    (whole_net(), 4, 2, WARNING, f"fewer than {models.SMALL_BATCH}"),
    (whole_net(), 4, 1, OK, "one rank"),
    (whole_net(), 16, 2, OK, "samples per rank: 16"),
    (whole_net(), None, 2, SKIPPED, "pass a batch"),
    (SyncBatchNorm.convert_sync_batchnorm(whole_net()), 2, 2, OK, "synchronised"),
    (whole_net().eval(), 2, 2, OK, "none in training mode"),
)
def test_batch_norm_at_small_batches(net, samples, world_size):
    batch = None if samples is None else torch.ones(samples, 2)
    return models.judge_batch_norm(net, batch, world_size)


def test_documents_say_what_a_small_batch_is():
    assert f"fewer than {models.SMALL_BATCH}" in doctor.check_model.__doc__
    readme = Path(doctor.__file__).with_name("README.md").read_text()
    assert f"`check_model` warns below {models.SMALL_BATCH}" in readme


@pytest.mark.parametrize("batch", [BATCH, (BATCH,), {"x": BATCH}], ids=type)
def test_a_probe_leaves_no_trace(batch):
    net = whole_net()
    before = {name: value.clone() for name, value in net.state_dict().items()}
    streams = digest_of_states()
    says(models.check_unused(net, batch), OK)
    assert digest_of_states() == streams
    assert all(torch.equal(v, before[n]) for n, v in net.state_dict().items())
    assert all(param.grad is None for param in net.parameters())
    assert net.training
    assert net.norm.training


@judged(
    (whole_net(), torch.ones(8, 3), FAILED, "the forward raised RuntimeError"),
    (whole_net(), torch.ones(8, 3), FAILED, "batch is what the model is called with"),
    (whole_net(spare=True), BATCH, WARNING, "spare.weight"),  # not wrapped yet
    (nn.Identity(), torch.ones(1), SKIPPED, "no tensor with a gradient"),
    (whole_net(), None, SKIPPED, "needs a forward"),
)
def test_forwards_without_a_wrapper(net, batch):
    return models.check_unused(net, batch)


def replica(seed, *, is_wrapped=True, **changes):
    torch.manual_seed(seed)
    net = whole_net(spare=changes.pop("spare", False))
    return {**models.read_model(net), "is_wrapped": is_wrapped, **changes}


@judged(
    (replica(0), OK, "same values"),
    (replica(1), FAILED, "rank 1 has different values than rank 0"),
    (replica(1, is_wrapped=False), OK, "init_sync"),
    (replica(0, spare=True), FAILED, "spare.weight and spare.bias"),
    (replica(0, unreadable="lazy"), SKIPPED, "rank 1: lazy"),
)
def test_replicas(second):
    return models.judge_replicas({0: replica(0), 1: second})


@judged(
    ("aa", "dropout runs", WARNING, "dropout runs, and all"),
    ("aa", "", OK, "nothing seen uses it"),
    ("ab", "dropout", OK, "of its own"),
    ("a", "d", OK, "one rank"),
)
def test_random_streams(digests, who):
    streams = [{"streams": {"torch": digest}, "draws": who} for digest in digests]
    return judge_streams(dict(enumerate(streams)))


class Stream(data.IterableDataset):
    def __iter__(self):
        return iter(range(3))


def split(**options):
    return DistributedSampler(DATA, **{"num_replicas": 2, "rank": 1, **options})


BATCHES = data.BatchSampler(split(), 2, drop_last=True)


class Everything:
    def __iter__(self):
        return iter(range(16))

    def __len__(self):
        return 16


@judged(
    (DataLoader(DATA, sampler=split()), OK, "made for this rank"),
    (DataLoader(DATA, sampler=split(shuffle=False)), OK, "validation"),
    (DataLoader(DATA, shuffle=True), WARNING, "shuffle=True"),
    (DataLoader(DATA), WARNING, "in the same order"),
    (DataLoader(DATA, sampler=split(rank=0)), FAILED, "made for rank 0 of 2"),
    (DataLoader(DATA, sampler=split(num_replicas=4)), FAILED, "rank 1 of 4"),
    (DataLoader(data.Subset(DATA, [1, 2])), OK, "Subset"),
    (DataLoader(Stream()), SKIPPED, "split itself"),
    (DataLoader(DATA, sampler=Everything()), SKIPPED, "Everything is unknown"),
    (DataLoader(DATA, batch_sampler=BATCHES), OK, "made for this rank"),
)
def test_sampler(loader):
    return loaders.judge_sampler(loader, 1, 2)


@judged((DataLoader(DATA, shuffle=True), OK, "one"), (DataLoader(DATA), OK, "one"))
def test_one_rank_needs_no_sampler(loader):
    return loaders.judge_sampler(loader, 0, 1)


PART = {"splits": True, "seed": 0, "samples": 16, "epoch": 0, "subset": None}


@judged(
    ({}, OK, "fit together"),
    ({"part": 0}, FAILED, "ranks 0 and 0"),
    ({"seed": 1}, FAILED, "differ in seed (0 and 1)"),
    ({"samples": 15}, FAILED, "differ in samples"),
    ({"epoch": 3}, FAILED, "differ in epoch"),
)
def test_parts(changes):
    other = {**PART, "part": 1, **changes}
    return loaders.judge_parts({0: {**PART, "part": 0}, 1: other})


@judged(("ab", OK, "of its own"), ("aa", WARNING, "the same Subset"))
def test_subsets(subsets):
    facts = {r: {"splits": False, "subset": s} for r, s in enumerate(subsets)}
    without = {2: {"splits": False, "subset": None}}  # nothing can be said then
    assert loaders.judge_parts({**facts, **without}) == []
    return loaders.judge_parts(facts)


@judged((8, 8, OK, "8 on"), (8, 9, FAILED, "9 on rank 1"), (8, None, SKIPPED, "no len"))
def test_numbers_of_batches(*counts):
    return loaders.judge_batches({r: {"batches": n} for r, n in enumerate(counts)})


def test_a_loader_that_is_none_is_a_finding_and_no_traceback(capsys):
    report = doctor.check_loader(None)
    assert report.exit_code == 1
    assert "minidp doctor: the loader" in capsys.readouterr().out


# ------------------------------------------------------------------------- training

LOG = {
    "host": "h",
    "batches": [1, 2, 3],
    "backwards": [1, 1],
    "over_items": False,
    "samples": [[8], [8]],
    "unused": [],
    "epochs": [0, 1],
    "lines": 0,
    "saved": [],
    "sees_epochs": True,
    "shuffles": True,
    "finds_unused": False,
    "is_wrapped": True,
    "local_steps": 0,
    "values": [{"w": 7}, {"w": 8}],
}
OTHER = {**LOG, "batches": [4, 5, 6]}
APART = {"values": [{"w": 7}, {"w": 9}]}
FINDS = {"finds_unused": True}


@judged(
    ("set_epoch", {}, {}, OK, "called"),
    ("set_epoch", {"epochs": [0, 0]}, {"epochs": [0, 0]}, WARNING, "epoch 0"),
    ("set_epoch", {}, {"epochs": [0, 0]}, WARNING, "same order"),
    ("set_epoch", {}, {"epochs": [0, 1, 1]}, WARNING, "epoch 1"),
    ("set_epoch", {"epochs": [None, None]}, {}, SKIPPED, "shows no epoch"),
    ("set_epoch", {"epochs": [0]}, {}, SKIPPED, "takes two"),
    ("set_epoch", {"sees_epochs": False}, {}, SKIPPED, "no loader"),
    ("set_epoch", {"shuffles": False}, {}, OK, "not needed"),
    ("batches", {}, {}, OK, "its own"),
    ("batches", {}, {"batches": [1, 2, 3]}, FAILED, "ranks 0 and 1"),
    ("batches", {}, {"batches": []}, SKIPPED, "not every rank"),
    ("accumulation", {}, {}, OK, "one synchronised backward"),
    ("accumulation", {"backwards": [4, 4, 2]}, {}, WARNING, "4 synchronised"),
    ("accumulation", {"backwards": [1, 1, 2]}, {}, OK, "one"),
    ("accumulation", {"backwards": [0]}, {}, SKIPPED, "no synchronised"),
    ("mean of means", {}, {}, OK, "one size, in 2 steps"),
    ("mean of means", {"samples": [[8], [3]]}, {}, WARNING, "rank 0: 3 and rank 1: 8"),
    ("mean of means", {"samples": [[8, 8], [8]]}, {}, OK, "ignores are not seen"),
    ("mean of means", {"samples": [[8, 2], [8]]}, {}, WARNING, "rank 0: 8+2"),
    ("mean of means", {"samples": [[8]], "over_items": True}, {}, OK, "counts"),
    ("mean of means", {"samples": []}, {}, SKIPPED, "no optimizer step"),
    ("mean of means", {"is_wrapped": False}, {}, SKIPPED, "not wrapped"),
    ("find_unused", {}, {}, OK, "not set"),
    ("find_unused", FINDS, {}, WARNING, "in 2 steps"),
    ("find_unused", FINDS, {"unused": ["w"]}, OK, "needed: w"),
    ("saving", {}, {}, OK, "no file"),
    ("saving", {"saved": ["/a"]}, {"saved": ["/b"]}, OK, "no file"),
    ("saving", {"saved": ["/a"]}, {"saved": ["/a"]}, FAILED, "/a"),
    ("saving", {"saved": ["/a", "/a"]}, {}, OK, "no file"),
    ("saving", {"saved": ["/a"], "host": "g"}, {"saved": ["/a"]}, OK, "no file"),
    ("replicas", {}, {}, OK, "before and after"),
    ("replicas", {"is_wrapped": False}, {}, SKIPPED, "not wrapped"),
    ("replicas", {"values": [{"w": 7}]}, {}, SKIPPED, "not wrapped"),
    ("replicas", {"values": [{"w": 6}, {"w": 8}]}, {}, FAILED, "ranks began"),
    ("replicas", {"values": [{"w": 7}, {"w": 9}]}, {}, FAILED, "of w"),
    ("replicas", {"values": [{"w": 7}, {}]}, {}, FAILED, "equal before"),
    ("replicas", {**APART, "local_steps": 3}, {}, WARNING, "equal before, but then"),
    ("replicas", {"local_steps": 3}, {}, OK, "before and after"),
    ("printing", {}, {}, OK, "nothing"),
    ("printing", {"lines": 1}, {}, OK, "one rank"),
    ("printing", {"lines": 1}, {"lines": 1}, WARNING, "rank 1"),
)
def test_what_logs_say(check, first, second):
    logs = {0: {**LOG, **first}, 1: {**OTHER, **second}}
    return training.COMPARED[check](logs)


def patched_places(model):
    """Everything that a `TrainingLog` touches."""
    return {
        "print": builtins.print,
        "save": torch.save,
        "loader": DataLoader.__iter__,
        "forward hooks": dict(model._forward_hooks),
        "forward pre-hooks": dict(model._forward_pre_hooks),
        "step hooks": dict(optimizers._global_optimizer_pre_hooks),
        "grad hooks": [
            dict(param._post_accumulate_grad_hooks or {})
            for param in model.parameters()
        ],
    }


@pytest.mark.parametrize("end", ["well", "raises"])
def test_nothing_stays_patched(end):
    model, loader = whole_net(), DataLoader(DATA, sampler=split())
    before = patched_places(model)
    try:
        with doctor.watch(model, loader, quiet=True) as watched:
            during = patched_places(model)
            if end == "raises":
                raise KeyError
    except KeyError:
        assert watched.report is None
    else:
        assert watched.report is not None
    assert all(during[place] != before[place] for place in before)
    assert patched_places(model) == before


def test_a_log_that_cannot_start_leaves_nothing():
    model = whole_net()
    model.first.weight = nn.Parameter(torch.ones(4, 2))
    before = patched_places(model)
    model.register_forward_hook = None  # what is not callable raises
    with pytest.raises(TypeError), doctor.watch(model, quiet=True):
        pytest.fail("it starts")
    assert patched_places(model) == before


def test_what_cannot_be_noted_does_not_end_the_training():
    class Unreadable:
        def __str__(self):
            raise ZeroDivisionError

        def __format__(self, spec):
            return "fine"

    model = whole_net()
    with doctor.watch(model, [], quiet=True) as watched:
        model(torch.ones(4, 2).to_sparse().to_dense())
        model.forward = lambda x: x
        model(torch.ones(4, 2).to_sparse())
        with contextlib.suppress(ZeroDivisionError):
            print(Unreadable())
    (epochs,) = [f for f in watched.report if f.check == "set_epoch"]
    assert epochs.status is SKIPPED
    mishaps = [f.found for f in watched.report if f.check == "watching"]
    assert len(mishaps) == 2
    assert all("not everything could be noted" in found for found in mishaps)


def test_what_a_log_writes_down(tmp_path, capsys):
    model, sampler = whole_net(spare=True), split()
    loader = DataLoader(DATA, sampler=sampler, batch_size=4)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    log = TrainingLog(model, loader)
    with log.recording():
        for epoch in range(2):
            sampler.set_epoch(epoch)
            for (x,) in loader:
                model(x).sum().backward()
                optimizer.step()
            print("loss", epoch)
            print(f"[rank 1] is here {epoch}")
        with (tmp_path / "log").open("w") as file:
            print("in a file", file=file)
        torch.save(model.state_dict(), tmp_path / "last.pt")
        torch.save(obj={}, f=str(tmp_path / "other.pt"))
        torch.save({}, io.BytesIO())
    print("not written down")
    facts = log.facts
    assert facts["epochs"] == [0, 1]
    assert facts["backwards"] == [1, 1, 1, 1]
    assert facts["unused"] == ["spare.bias", "spare.weight"]
    assert facts["local_steps"] == 0
    names = {*dict(model.named_parameters())}
    assert [{*values} for values in facts["values"]] == [names, names]
    assert facts["values"][0] != facts["values"][1]
    assert len(facts["batches"]) == 3
    assert len({*facts["batches"]}) == 3
    assert facts["lines"] == 2
    assert facts["saved"] == [str(tmp_path / name) for name in ("last.pt", "other.pt")]
    assert "loss 1" in capsys.readouterr().out
