"""A user's function on simulated ranks: what it may call, and what is told of it."""

from __future__ import annotations

import os
import random
import sys
import threading
import time
from collections.abc import Callable

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook

import minidp

from . import own, scheduler
from .scheduler import Finding, NotSimulatedError

SEEDS = range(12)


def wrapped(module: nn.Module | None = None) -> minidp.DataParallel:
    return minidp.DataParallel(nn.Linear(3, 2) if module is None else module)


def train(model: nn.Module, steps: int = 3) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.ones(2, 3)).sum().backward()
        optimizer.step()


# ------------------------------------------------- what runs as on real ranks does


def begins_and_ends(rank: int) -> None:
    dist.init_process_group("gloo")
    assert int(os.environ["RANK"]) == rank == dist.get_rank()
    assert int(os.environ["WORLD_SIZE"]) == dist.get_world_size()
    train(wrapped())
    assert int(os.environ["RANK"]) == rank
    dist.destroy_process_group()
    assert not dist.is_initialized()


def groups_of_its_own(rank: int) -> None:
    pair, alone = dist.new_group([0, 1]), dist.new_group([2])
    mine = alone if rank == 2 else pair
    total = torch.ones(1)
    dist.all_reduce(total, group=mine)
    assert total == dist.get_world_size(mine) == (1 if rank == 2 else 2)
    train(minidp.DataParallel(nn.Linear(3, 2), process_group=mine))
    everybody = dist.new_group()
    dist.barrier(group=everybody)
    dist.destroy_process_group(everybody)


def objects(rank: int) -> None:
    size = dist.get_world_size()
    found: list[object] = [None] * size
    dist.all_gather_object(found, {"rank": rank})
    assert found == [{"rank": r} for r in range(size)]
    told = [rank]
    dist.broadcast_object_list(told, src=1)
    assert told == [1]


def less_common_collectives(rank: int) -> None:
    size, mine = dist.get_world_size(), torch.tensor([rank + 1.0])
    dist.reduce(mine, dst=0)
    assert mine == (sum(range(1, size + 1)) if rank == 0 else rank + 1)
    rows = [torch.zeros(1) for _ in range(size)] if rank == 1 else None
    dist.gather(torch.tensor([float(rank)]), rows, dst=1)
    assert rows is None or rows == [torch.tensor([float(r)]) for r in range(size)]
    came = torch.zeros(1)
    sent = [torch.tensor([10.0 * r]) for r in range(size)] if rank == 2 else None
    dist.scatter(came, sent, src=2)
    assert came == 10 * rank
    average, bits = torch.tensor([float(rank)]), torch.tensor([1 << rank])
    dist.all_reduce(average, op=dist.ReduceOp.AVG)
    dist.all_reduce(bits, op=dist.ReduceOp.BOR)
    assert (average, bits) == (torch.tensor([1.0]), torch.tensor([7]))
    dist.monitored_barrier()


def hooks_that_wait(rank: int) -> None:
    model = wrapped(nn.Linear(8, 8))
    state = powerSGD_hook.PowerSGDState(None, 1, start_powerSGD_iter=2)
    model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    for _ in range(4):
        model(torch.ones(2, 8)).sum().backward()
    once = dist.all_reduce(torch.ones(1), async_op=True).get_future()
    twice = once.then(
        lambda f: dist.all_reduce(f.value()[0], async_op=True).get_future().wait()
    )
    assert twice.wait()[0] == 9


def whole_models(rank: int) -> None:
    layers = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    train(wrapped(minidp.SyncBatchNorm.convert_sync_batchnorm(layers)))
    model = wrapped()
    with minidp.record(model) as recording:
        train(model)
    recording.gather()
    assert "ranks 0, 1, 2 of 3" in recording.report()


def time_passes(rank: int) -> None:
    began = time.monotonic(), time.time(), time.perf_counter_ns()
    time.sleep(300 * (1 + rank))
    dist.barrier()
    assert time.monotonic() - began[0] >= 900
    assert time.time() - began[1] >= 900
    assert time.perf_counter_ns() - began[2] >= 900e9


LEGAL = (
    begins_and_ends,
    groups_of_its_own,
    objects,
    less_common_collectives,
    hooks_that_wait,
    whole_models,
    time_passes,
)


@pytest.mark.parametrize("function", LEGAL, ids=lambda each: each.__name__)
def test_what_runs_under_torchrun_runs_here(function: own.Function) -> None:
    real, began = time.sleep, time.monotonic()
    environment = {**os.environ}
    for seed in range(3):
        own.play(function, seed, ranks=3)
    assert time.monotonic() - began < 60  # of the real clock
    assert time.sleep is real
    assert {**os.environ} == environment


# ----------------------------------------------------------------- a seed is a run


def test_random_numbers_are_those_of_the_seed_and_the_rank():
    drawn: list[tuple[int, float, float, float]] = []

    def draws(rank: int) -> None:
        dist.barrier()
        numbers = random.random(), np.random.rand(), float(torch.rand(1))
        drawn.append((rank, *numbers))

    for seed in (0, 0, 1):
        own.play(draws, seed)
        drawn.sort(key=lambda row: row[0])
    of_seed_0, of_seed_1 = {row for row in drawn if drawn.count(row) == 2}, drawn
    assert len(of_seed_0) == 2
    for column in (1, 2):  # Python's and numpy's
        assert len({row[column] for row in of_seed_1}) == 4
    assert len({row[3] for row in drawn}) == 1  # torch begins alike in each process


def test_a_coin_that_each_rank_tosses_is_found_and_replayed():
    def tosses(rank: int) -> None:
        for _ in range(2):
            if random.random() < 0.5:
                dist.barrier()

    seed = own.find(tosses, SEEDS)
    assert seed is not None
    for _ in range(2):
        with pytest.raises(Finding):
            own.play(tosses, seed)


# ------------------------------------------------------------ what is told of it


def raises_alone(rank: int) -> None:
    model = wrapped()
    train(model)
    if rank == 1:
        raise ValueError("corrupt image")
    train(model)


def test_who_raises_first_is_named_first_with_the_line():
    with pytest.raises(Finding) as caught:
        own.play(raises_alone, 0)
    line = raises_alone.__code__.co_firstlineno + 4
    where = f"raises_alone (test_own.py:{line})"
    assert str(caught.value).startswith(
        f"rank 1 raised ValueError in {where}: corrupt image; then rank 0 raised "
        "CollectiveError in train (test_own.py:"
    )


def comes_late(rank: int) -> None:
    model = minidp.DataParallel(nn.Linear(3, 2), hang_timeout=10)
    if rank == 1:
        time.sleep(30)
    train(model)


def swallows(rank: int) -> None:
    try:
        dist.all_reduce(torch.ones(2 + rank))
    except Exception:
        dist.barrier()


@pytest.mark.parametrize(
    ("function", "text"),
    [
        (comes_late, "did not finish within 10 s"),
        (
            swallows,
            "collective 0 in default is allreduce (3 elements, torch.float32) on rank "
            "1, and it is matched with allreduce (2 elements, torch.float32) on rank 0",
        ),
    ],
)
def test_what_is_wrong_is_found(function: own.Function, text: str) -> None:
    found = ""
    for seed in SEEDS:
        try:
            own.play(function, seed)
        except Finding as finding:
            found = f"{finding}"
            if text in found:
                account = finding.play.tell()  # type: ignore[attr-defined]
                break
    assert text in found
    if function is swallows:  # the run ends there
        assert account.splitlines()[-1].endswith(f"FOUND: {text}")
        assert "starts allreduce 0 in default in swallows (test_own.py:" in account


def sends(rank: int) -> None:
    dist.send(torch.ones(1), 1 - rank)


def has_threads(rank: int) -> None:
    failed: list[BaseException] = []

    def reduces() -> None:
        try:
            dist.all_reduce(torch.ones(1))
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=reduces)
    thread.start()
    thread.join()
    raise failed[0]


@pytest.mark.parametrize(
    ("function", "text"),
    [
        (sends, r"send\(\) of a process group is not simulated in sends \(test_own"),
        (has_threads, "a thread that the script has started are not simulated"),
    ],
)
def test_what_is_not_simulated_is_no_finding(function: own.Function, text: str) -> None:
    with pytest.raises(NotSimulatedError, match=text):
        own.play(function, 0)


def test_a_rank_that_lets_nobody_run_is_named(monkeypatch):
    monkeypatch.setattr(scheduler, "STUCK_SECONDS", 0.5)
    lets_go = threading.Event()

    def waits(rank: int) -> None:
        dist.barrier()
        if rank == 1:
            lets_go.wait()

    with pytest.raises(Finding, match=r"rank 1, main, has been in wait .*waits \(test"):
        own.play(waits, 0)
    lets_go.set()


@pytest.fixture
def command(monkeypatch, capsys) -> Callable[..., tuple[int, str]]:
    def command(*words: str) -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", ["own", *words])
        try:
            code = own.main()
        except SystemExit as error:
            code = int(error.code or 0)
        told = capsys.readouterr()
        return code, told.out + told.err

    return command


def test_the_command(command):
    code, told = command(f"{__name__}:objects", "--ranks", "3", "--runs", "2")
    assert (code, told) == (0, "nothing was found with 2 seeds\n")
    code, told = command(f"{__name__}:raises_alone")
    *account, zero, one, last = told.splitlines()
    assert code == 1
    assert " in train (test_own.py:" in told
    assert account
    assert "minidp watchdog: " not in told
    assert zero.startswith("rank 0 ended with CollectiveError(")
    assert one == "rank 1 ended with ValueError('corrupt image')"
    assert last.startswith("FOUND with --seed 0: rank 1 raised ValueError in ")
    again = command(f"{__name__}:raises_alone", "--seed", "0")
    assert again == (1, told)
    code, told = command(f"{__name__}:raises_alone", "--seed", "0", "--watchdog")
    assert code == 1
    assert "minidp watchdog: " in told
    code, told = command(f"{__name__}:objects", "--seed", "1")
    assert code == 0
    assert told.endswith("rank 1 came to its end\nnothing was found with seed 1\n")
    code, told = command(f"{__name__}:sends")
    assert code == 2
    assert told.startswith("cannot be played: send() of a process group is not")


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ([f"{__name__}:nosuch"], "is no function that can be imported"),
        (["no_such_module:train"], "is no function that can be imported"),
        ([f"{__name__}:objects", "--ranks", "0"], "there is at least one rank"),
    ],
)
def test_bad_words_are_told(command, words, text):
    code, told = command(*words)
    assert code == 2
    assert text in told
