"""Faults planted in models, loaders and training logs of one process.

What several ranks compare is given as data here, and played in
``tests/distributed/test_doctor.py``.
"""

from __future__ import annotations

import builtins
import contextlib
import importlib
import io
import warnings
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import (
    DataLoader,
    DistributedSampler,
    IterableDataset,
    Subset,
    TensorDataset,
)

from minidp import DataParallel, SyncBatchNorm, doctor
from minidp.doctor._checks_loader import (
    judge_batches,
    judge_parts,
    judge_sampler,
    judge_workers,
)
from minidp.doctor._checks_model import (
    SMALL_BATCH,
    check_unused,
    describe,
    judge_batch_norm,
    judge_devices,
    judge_own_gpu,
    judge_places,
    judge_replicas,
)
from minidp.doctor._checks_training import (
    judge_accumulation,
    judge_epochs,
    judge_find_unused,
    judge_printing,
    judge_same_batches,
    judge_same_gradients,
    judge_same_replicas,
    judge_saving,
)
from minidp.doctor._findings import Status
from minidp.doctor._random_streams import digest_of_states, judge_streams
from minidp.doctor._training_log import TrainingLog

optimizers = importlib.import_module("torch.optim.optimizer")
OK, WARNING, FAILED, SKIPPED = Status
DATA = TensorDataset(torch.arange(32.0).reshape(16, 2))


class Net(nn.Module):
    """Everything a check may stumble over."""

    def __init__(self, *, with_spare=False):
        super().__init__()
        self.first = nn.Linear(2, 4)
        self.norm = nn.BatchNorm1d(4)
        self.drop = nn.Dropout(0.5)
        self.last = nn.Linear(4, 1)
        if with_spare:
            self.spare = nn.Linear(1, 1)

    def forward(self, x):
        return self.last(self.drop(self.norm(self.first(x))))


def problems(findings):
    findings = findings if isinstance(findings, list) else [findings]
    return [f for f in findings if f.status in (WARNING, FAILED)]


# ------------------------------------------------------------------------- devices


def test_devices_that_are_well():
    assert problems(judge_devices(Net(), torch.ones(8, 2))) == []


def test_a_module_buffer_left_behind():
    net = Net()
    net.norm.running_var = torch.ones(4, device="meta")
    (finding,) = judge_devices(net, None)
    assert finding.status is FAILED
    assert "1 on meta (norm.running_var)" in finding.found


def test_a_parameter_on_another_device():
    net = Net()
    net.last = nn.Linear(4, 1, device="meta")
    (finding,) = judge_devices(net, None)
    assert finding.status is FAILED
    assert "2 on meta (last.weight and last.bias)" in finding.found


def test_a_batch_on_another_device():
    (finding,) = problems(judge_devices(Net(), {"x": torch.ones(8, 2, device="meta")}))
    assert finding.status is FAILED
    assert finding.found == "the batch is on meta, the model on cpu"


@pytest.mark.parametrize("model", [nn.LazyLinear(3), nn.ReLU()])
def test_a_model_without_parameters(model):
    assert problems(judge_devices(model, None))[0].status is FAILED


@pytest.mark.parametrize(
    ("devices", "status", "words"),
    [
        (["cuda:0"], OK, ""),
        (["cuda:0", "cuda:1"], WARNING, "model-parallel"),
        (["cuda:0", "cpu"], FAILED, "register_buffer"),
    ],
)
def test_places(devices, status, words):
    finding = judge_places("found", {torch.device(device): [] for device in devices})
    assert finding.status is status
    assert words in finding.remedy


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
    monkeypatch.setattr(torch.cuda, "device_count", lambda: num_gpus)
    found = judge_own_gpu({torch.device(device): ["weight"]})
    assert [finding.status for finding in found] == statuses


# ----------------------------------------------------------------------- batch norm


@pytest.mark.parametrize(
    ("samples", "world_size", "status"),
    [(4, 2, WARNING), (4, 1, OK), (16, 2, OK), (None, 2, SKIPPED)],
)
def test_batch_norm_at_small_batches(samples, world_size, status):
    batch = None if samples is None else torch.ones(samples, 2)
    finding = judge_batch_norm(Net(), batch, world_size)
    assert finding.status is status
    if status is WARNING:  # from where on, is said there and in the documents
        assert f"fewer than {SMALL_BATCH}" in finding.remedy
        assert f"fewer than {SMALL_BATCH}" in doctor.check_model.__doc__
        readme = Path(doctor.__file__).parents[1] / "README.md"
        assert f"`check_model` warns below {SMALL_BATCH}" in readme.read_text()


def test_batch_norm_that_is_well_at_small_batches():
    synced = SyncBatchNorm.convert_sync_batchnorm(Net())
    assert judge_batch_norm(synced, torch.ones(2, 2), 2).found == "synchronised"
    assert judge_batch_norm(Net().eval(), torch.ones(2, 2), 2).status is OK


# ----------------------------------------------------------------- unused parameters


@pytest.mark.parametrize("batch", [torch.ones(8, 2), (torch.ones(8, 2),), {"x": None}])
def test_a_probe_leaves_no_trace(batch):
    if isinstance(batch, dict):
        batch = {"x": torch.ones(8, 2)}
    net = Net()
    before = {name: value.clone() for name, value in net.state_dict().items()}
    streams = digest_of_states()
    assert check_unused(net, batch).status is OK
    assert digest_of_states() == streams
    assert all(torch.equal(v, before[n]) for n, v in net.state_dict().items())
    assert all(param.grad is None for param in net.parameters())
    assert net.training
    assert net.norm.training


@pytest.mark.usefixtures("lone_group")
@pytest.mark.parametrize(
    ("with_spare", "finds", "status", "words"),
    [
        (False, False, OK, "none of 6"),
        (True, False, FAILED, "spare.weight and spare.bias"),
        (True, True, OK, "take no part"),
        (False, True, WARNING, "uses every parameter"),
    ],
)
def test_unused_parameters(with_spare, finds, status, words):
    net = Net(with_spare=with_spare)
    model = DataParallel(net, find_unused_parameters=finds)
    finding = check_unused(model, torch.ones(8, 2))
    assert finding.status is status
    assert words in finding.found


def test_a_forward_that_raises_is_a_finding():
    finding = check_unused(Net(), torch.ones(8, 3))
    assert finding.status is FAILED
    assert "the forward raised RuntimeError" in finding.found
    assert "batch is what the model is called with" in finding.remedy


def test_outputs_that_cannot_be_seen():
    assert check_unused(nn.Identity(), torch.ones(1)).status is SKIPPED
    assert check_unused(Net(), None).status is SKIPPED


# ---------------------------------------------------------------- replicas and seeds


def replica(seed, *, is_wrapped=True, **options):
    torch.manual_seed(seed)
    shapes, sums = describe(Net(**options))
    return {"shapes": shapes, "sums": sums, "is_wrapped": is_wrapped}


def test_replicas_from_different_seeds():
    finding = judge_replicas({0: replica(0), 1: replica(1)})
    assert finding.status is FAILED
    assert "rank 1 has other values than rank 0 in first.weight" in finding.found
    assert judge_replicas({0: replica(0), 1: replica(0)}).status is OK
    before = {0: replica(0, is_wrapped=False), 1: replica(1, is_wrapped=False)}
    assert judge_replicas(before).status is OK


def test_replicas_of_different_models():
    finding = judge_replicas({0: replica(0), 1: replica(0, with_spare=True)})
    assert finding.status is FAILED
    assert "spare.weight and spare.bias" in finding.found


@pytest.mark.parametrize(
    ("digests", "who", "status"),
    [
        (["a", "a"], "dropout runs", WARNING),
        (["a", "a"], "", OK),
        (["a", "b"], "dropout runs", OK),
        (["a"], "dropout runs", OK),
    ],
)
def test_random_streams(digests, who, status):
    of_rank = {rank: {"torch": digest} for rank, digest in enumerate(digests)}
    assert judge_streams(of_rank, who).status is status


# --------------------------------------------------------------------------- loader


class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(3))


def split(**options):
    return DistributedSampler(DATA, **{"num_replicas": 2, "rank": 1, **options})


class Everything:
    def __iter__(self):
        return iter(range(16))

    def __len__(self):
        return 16


@pytest.mark.parametrize(
    ("loader", "status", "words"),
    [
        (DataLoader(DATA, sampler=split()), OK, "made for this rank"),
        (DataLoader(DATA, sampler=split(shuffle=False)), OK, "validation"),
        (DataLoader(DATA, shuffle=True), WARNING, "shuffle=True"),
        (DataLoader(DATA), WARNING, "in the same order"),
        (DataLoader(DATA, sampler=split(rank=0)), FAILED, "made for rank 0 of 2"),
        (DataLoader(DATA, sampler=split(num_replicas=4)), FAILED, "rank 1 of 4"),
        (DataLoader(Subset(DATA, [1, 2])), OK, "Subset"),
        (DataLoader(Stream()), SKIPPED, "split itself"),
        (DataLoader(DATA, sampler=Everything()), SKIPPED, "Everything is unknown"),
        (
            DataLoader(
                DATA,
                batch_sampler=torch.utils.data.BatchSampler(split(), 2, drop_last=True),
            ),
            OK,
            "made for this rank",
        ),
    ],
)
def test_sampler(loader, status, words):
    finding = judge_sampler(loader, 1, 2)
    assert finding.status is status
    assert words in finding.found


def test_one_rank_needs_no_sampler():
    assert judge_sampler(DataLoader(DATA, shuffle=True), 0, 1).status is OK


@pytest.mark.parametrize(("workers", "status"), [(0, OK), (1, OK), (500, WARNING)])
def test_loader_workers(monkeypatch, workers, status):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.setattr("os.cpu_count", lambda: 4)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns of 500, too
        loader = DataLoader(DATA, num_workers=workers)
    finding = judge_workers(loader)
    assert finding.status is status
    assert finding.found == f"2 x {workers} on 4 cores"


PART = {"splits": True, "seed": 0, "samples": 16, "epoch": 0, "subset": None}


@pytest.mark.parametrize(
    ("changes", "status", "words"),
    [
        ({}, OK, "fit together"),
        ({"part": 0}, FAILED, "ranks 0 and 0"),
        ({"seed": 1}, FAILED, "differ in seed (0 and 1)"),
        ({"samples": 15}, FAILED, "differ in samples"),
        ({"epoch": 3}, FAILED, "differ in epoch"),
    ],
)
def test_parts(changes, status, words):
    other = {**PART, "part": 1, **changes}
    (finding,) = judge_parts({0: {**PART, "part": 0}, 1: other})
    assert finding.status is status
    assert words in finding.found


@pytest.mark.parametrize(
    ("subsets", "statuses"), [("ab", [OK]), ("aa", [WARNING]), ((None, "a"), [])]
)
def test_subsets(subsets, statuses):
    facts = {r: {"splits": False, "subset": s} for r, s in enumerate(subsets)}
    assert [f.status for f in judge_parts(facts)] == statuses


@pytest.mark.parametrize(
    ("counts", "status"), [((8, 8), OK), ((8, 9), FAILED), ((8, None), SKIPPED)]
)
def test_numbers_of_batches(counts, status):
    facts = {rank: {"batches": count} for rank, count in enumerate(counts)}
    assert judge_batches(facts).status is status


def test_a_loader_that_is_none_is_a_finding_and_no_traceback(capsys):
    report = doctor.check_loader(None)
    assert report.exit_code == 1
    assert "minidp doctor: the loader" in capsys.readouterr().out


# ------------------------------------------------------------------------- training

LOG = {
    "host": "h",
    "batches": [1, 2, 3],
    "gradients": [{"w": 5}, {"w": 6}],
    "backwards": [1, 1],
    "unused": [],
    "epochs": [0, 1],
    "lines": [],
    "saved": [],
    "has_loader": True,
    "shuffles": True,
    "finds_unused": False,
    "is_wrapped": True,
    "local_steps": 0,
    "values": [{"w": 7}, {"w": 8}],
}
OTHER = {**LOG, "batches": [4, 5, 6]}


@pytest.mark.parametrize(
    ("judge", "first", "second", "status", "words"),
    [
        (judge_epochs, {}, {}, OK, "called"),
        (judge_epochs, {"epochs": [0, 0]}, {"epochs": [0, 0]}, WARNING, "epoch 0"),
        (judge_epochs, {}, {"epochs": [0, 0]}, WARNING, "same order"),
        (judge_epochs, {"epochs": [0]}, {}, SKIPPED, "takes two"),
        (judge_epochs, {"has_loader": False}, {}, SKIPPED, "no loader"),
        (judge_epochs, {"shuffles": False}, {}, OK, "not needed"),
        (judge_same_batches, {}, {}, OK, "its own"),
        (judge_same_batches, {}, {"batches": [1, 2, 3]}, FAILED, "ranks 0 and 1"),
        (judge_same_batches, {}, {"batches": []}, SKIPPED, "not every rank"),
        (judge_same_gradients, {}, {}, OK, "in 2 steps"),
        (judge_same_gradients, {}, {"gradients": [{"w": 7}]}, FAILED, "of w"),
        (judge_same_gradients, {}, {"gradients": [{}]}, FAILED, "of w"),
        (judge_same_gradients, {}, {"gradients": []}, SKIPPED, "no synchronised"),
        (judge_same_gradients, {"is_wrapped": False}, {}, SKIPPED, "not wrapped"),
        (judge_accumulation, {}, {}, OK, "one synchronised backward"),
        (judge_accumulation, {"backwards": [4, 4, 2]}, {}, WARNING, "4 synchronised"),
        (judge_accumulation, {"backwards": [1, 1, 2]}, {}, OK, "one"),
        (judge_accumulation, {"backwards": [0]}, {}, SKIPPED, "no synchronised"),
        (judge_find_unused, {}, {}, OK, "not set"),
        (judge_find_unused, {"finds_unused": True}, {}, WARNING, "in 2 steps"),
        (
            judge_find_unused,
            {"finds_unused": True},
            {"unused": ["w"]},
            OK,
            "needed: w",
        ),
        (judge_saving, {}, {}, OK, "no file"),
        (judge_saving, {"saved": ["/a"]}, {"saved": ["/b"]}, OK, "no file"),
        (judge_saving, {"saved": ["/a"]}, {"saved": ["/a"]}, FAILED, "/a"),
        (
            judge_saving,
            {"saved": ["/a"], "host": "g"},
            {"saved": ["/a"]},
            OK,
            "no file",
        ),
        (judge_same_replicas, {}, {}, OK, "before and after"),
        (judge_same_replicas, {"is_wrapped": False}, {}, SKIPPED, "not wrapped"),
        (judge_same_replicas, {"values": [{"w": 7}]}, {}, SKIPPED, "not wrapped"),
        (
            judge_same_replicas,
            {"values": [{"w": 6}, {"w": 8}]},
            {},
            FAILED,
            "ranks began",
        ),
        (judge_same_replicas, {"values": [{"w": 7}, {"w": 9}]}, {}, FAILED, "of w"),
        (judge_same_replicas, {"values": [{"w": 7}, {}]}, {}, FAILED, "equal before"),
        (
            judge_same_replicas,
            {"values": [{"w": 7}, {"w": 9}], "local_steps": 3},
            {},
            WARNING,
            "equal before, but then",
        ),
        (judge_same_replicas, {"local_steps": 3}, {}, OK, "before and after"),
        (judge_printing, {}, {}, OK, "nothing"),
        (judge_printing, {"lines": ["x"]}, {}, OK, "one rank"),
        (judge_printing, {"lines": ["x"]}, {"lines": ["y"]}, WARNING, "rank 1"),
    ],
)
def test_what_logs_say(judge, first, second, status, words):
    finding = judge({0: {**LOG, **first}, 1: {**OTHER, **second}})
    assert finding.status is status
    assert words in finding.found


def patched_places(model, sampler):
    """Everything that a `TrainingLog` touches."""
    return {
        "print": builtins.print,
        "save": torch.save,
        "sampler": type(sampler),
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
    model, sampler = Net(), split()
    loader = DataLoader(DATA, sampler=sampler)
    before = patched_places(model, sampler)
    try:
        with doctor.watch(model, loader, quiet=True) as watched:
            during = patched_places(model, sampler)
            if end == "raises":
                raise KeyError
    except KeyError:
        assert watched.report is None
        assert list(watched) == []
    else:
        assert watched.report is not None
    assert all(during[place] != before[place] for place in before)
    assert patched_places(model, sampler) == before


def test_a_log_that_cannot_start_leaves_nothing():
    model = Net()
    model.first.weight = nn.Parameter(torch.ones(4, 2))
    before = patched_places(model, None)
    model.register_forward_hook = None  # what is not callable raises
    with pytest.raises(TypeError), doctor.watch(model, quiet=True):
        pytest.fail("it starts")
    assert patched_places(model, None) == before


def test_what_cannot_be_noted_does_not_end_the_training():
    class Unreadable:
        def __str__(self):
            raise ZeroDivisionError

        def __format__(self, spec):
            return "fine"

    model = Net()
    sampler = range(16)  # of a class that cannot be changed
    loader = DataLoader(DATA, sampler=sampler)
    with doctor.watch(model, loader, quiet=True) as watched:
        model(torch.ones(4, 2).to_sparse().to_dense())
        model.forward = lambda x: x
        model(torch.ones(4, 2).to_sparse())
        with contextlib.suppress(ZeroDivisionError):
            print(Unreadable())
    (epochs,) = [f for f in watched if f.check == "set_epoch"]
    assert epochs.status is SKIPPED
    mishaps = [f.found for f in watched if f.check == "watching"]
    assert len(mishaps) == 3
    assert all("not everything could be noted" in found for found in mishaps)


def test_what_a_log_writes_down(tmp_path, capsys):
    model, sampler = Net(with_spare=True), split()
    loader = DataLoader(DATA, sampler=sampler, batch_size=4)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    log = TrainingLog(model, loader)
    log.start()
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
    log.stop()
    print("not written down")
    assert log.epochs == [0, 1]
    assert log.backwards == [1, 1, 1, 1]
    assert log.unused == {"spare.weight", "spare.bias"}
    assert log.local_steps == 0
    assert [set(values) for values in log.values] == [
        set(dict(model.named_parameters()))
    ]
    assert len(log.batches) == len(log.gradients) == 3
    assert len(set(log.batches)) == 3
    assert len(log.lines) == 2
    assert log.saved == [str(tmp_path / name) for name in ("last.pt", "other.pt")]
    assert "loss 1" in capsys.readouterr().out
