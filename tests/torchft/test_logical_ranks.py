"""Logical ranks on replicas that die: the bits of one process."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

pytest.importorskip("torchft", reason="bash tests/run.sh torchft")

from torchft import Optimizer, process_group
from torchft._torchft import LighthouseServer

import minidp.torchft
from minidp.errors import LogicalRankError
from minidp.logical import Node, cover
from minidp.torchft.logical import share_out

from . import elastic
from .elastic import Death, Training
from .line import Line, hasty_lighthouse, leave_whole, meet
from .replica import make_manager

pytestmark = [
    pytest.mark.torchft,
    pytest.mark.timeout(180),
    pytest.mark.filterwarnings("ignore"),  # torchft's and those of its servers
]
UNUSED = {"find_unused_parameters": True}
VIEWS = {"gradient_as_bucket_view": True, "bucket_cap_mb": 0.001}


def check(pool: Any, training: Training) -> list[dict[str, Any]]:
    """Compare all steps with one process, and return what the replicas have noted."""
    (digests,) = pool.run(elastic.alone, 1, training)
    notes = elastic.run(training)
    assert elastic.wrong_of(notes, digests) == []
    assert {note["step"] for note in notes} == {*range(training.steps)}
    return notes


def turns_of(notes: list[dict[str, Any]], step: int) -> list[int]:
    """Return how many turns the replicas took that have committed a step."""
    return sorted(len(note["turns"]) for note in notes if note["step"] == step)


DEATHS = {
    "in_a_forward": [Death(1, 4, "forward", 1)],
    "in_the_backward_that_reduces": [Death(2, 4, "backward", 1)],
    "between_quorum_and_loop": [Death(0, 4, "quorum")],
    "before_its_commit": [Death(1, 4, "loop")],
    "within_the_optimizer": [Death(1, 4, "optimizer")],
    "two_in_one_step": [Death(0, 4, "forward", 0), Death(2, 4, "backward", 1)],
    "again_and_again": [Death(k % 3, 2 + 4 * k) for k in range(4)],
    "in_the_second_round": [Death(1, 4, "forward", 0), Death(0, 4, "forward", 2)],
}


@pytest.mark.parametrize("name", DEATHS)
def test_the_bits_of_a_training_in_which_nobody_died(pool, name):
    leaves = 5 + [*DEATHS].index(name) % 2  # shared out evenly or not
    notes = check(pool, Training(leaves, deaths=tuple(DEATHS[name])))
    assert {note["replica"] for note in notes} == {0, 1, 2}


@pytest.mark.parametrize(
    "training",
    [
        Training(4, deaths=(Death(1, 5),), options=UNUSED, sometimes=True),
        Training(8, deaths=(Death(0, 5),), options=VIEWS),
        Training(6, deaths=(Death(2, 5),), micro_batches=3),
        Training(2, deaths=(Death(0, 5),)),  # one of three replicas has no turn
        Training(1, deaths=(Death(0, 5),)),
        Training(12, deaths=(Death(0, 5),), late=(2,)),
    ],
    ids=["unused", "views", "micro_batches", "two", "one", "late"],
)
def test_what_is_trained_and_how(pool, training):
    check(pool, training)


def test_only_what_died_or_was_lost_is_computed_again(pool):
    # Each of three replicas has four logical ranks, and has added three of them up when
    # the reduction fails. So the two that are left have six to share. The lighthouse is
    # patient, because one that lives must not be left out beside other work.
    deaths = (Death(1, 4, "backward", 3),)
    notes = check(pool, Training(12, deaths=deaths, heartbeat=3.0, join=20.0))
    assert turns_of(notes, 3) == [4, 4, 4]
    assert turns_of(notes, 4) == [7, 7]


@st.composite
def holdings(draw):
    """How many logical ranks there are; what replicas hold of them; who contributes."""
    leaves, replicas = draw(st.integers(1, 20)), draw(st.integers(1, 5))
    owners = draw(st.lists(st.integers(0, replicas), min_size=leaves, max_size=leaves))
    held = [
        cover(leaves, [leaf for leaf in range(leaves) if owners[leaf] == replica])
        for replica in range(replicas)
    ]
    twice = draw(st.integers(0, replicas - 1))
    held[twice] = sorted(
        {*held[twice], *draw(st.sampled_from(held))}, key=lambda node: node.first
    )
    contributes = draw(st.lists(st.booleans(), min_size=replicas, max_size=replicas))
    contributes[draw(st.integers(0, replicas - 1))] = True
    return leaves, held, contributes


def below(node: Node, leaves: int) -> range:
    """Return the logical ranks that a node covers."""
    return range(node.first, min(node.first + (1 << node.level), leaves))


@given(holdings())
def test_each_logical_rank_counts_once(found):
    leaves, held, contributes = found
    shares = share_out(leaves, held, contributes)
    counted = [
        leaf
        for replica in range(len(held))
        for node in shares.nodes(replica)
        for leaf in below(node, leaves)
    ]
    assert sorted(counted) == [*range(leaves)]
    for replica, can in enumerate(contributes):
        assert can or not shares.nodes(replica)
        assert {*shares.held[replica]} <= {*held[replica]}
    turns = [len(mine) for mine in shares.turns if mine]
    assert max(turns, default=0) - min(turns, default=0) <= 1


class Small(nn.Linear):
    """A net of one layer."""

    def __init__(self):
        super().__init__(2, 1)


@pytest.fixture
def lighthouse():
    server = LighthouseServer(
        bind="[::]:0", min_replicas=1, join_timeout_ms=100, quorum_tick_ms=20
    )
    yield server.address()
    server.shutdown()


def manager_for(lighthouse, **options):
    options = {"patience": timedelta(seconds=10)} | options
    return make_manager(0, lighthouse, lambda _: None, lambda: {"x": 1}, **options)


def test_an_optimizer_step_inside_the_loop_is_refused(lighthouse):
    manager, net = manager_for(lighthouse), Small()
    model = minidp.torchft.DataParallel(manager, net, logical_ranks=2)
    optimizer = Optimizer(manager, torch.optim.SGD(net.parameters(), lr=0.1))
    optimizer.zero_grad()
    for _ in model.each_logical_rank():
        model(torch.ones(3, 2)).sum().backward()
        with pytest.raises(LogicalRankError, match="before the loop"):
            optimizer.optim.step()
        break
    manager.shutdown(wait=False)


def test_a_step_that_is_not_committed_is_repeated_with_the_same_bits(lighthouse):
    """Buffers and random numbers, too: 2 replicas are needed, and 1 is there."""
    manager = manager_for(lighthouse, min_replica_size=2)
    torch.manual_seed(0)
    net = nn.Sequential(nn.BatchNorm1d(2), nn.Dropout(0.5), nn.Linear(2, 1))
    model = minidp.torchft.DataParallel(manager, net, logical_ranks=3)
    optimizer = Optimizer(manager, torch.optim.SGD(net.parameters(), lr=0.1))
    found = []
    for _ in range(2):
        optimizer.zero_grad()
        for leaf in model.each_logical_rank():
            model(torch.arange(6.0).view(3, 2) + leaf).sum().backward()
        found.append([param.grad.clone() for param in net.parameters()])
        found[-1] += [buffer.clone() for buffer in net.buffers()]
        optimizer.step()
        assert manager.current_step() == 0
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
    assert net[0].num_batches_tracked == 1
    manager.shutdown(wait=False)


class Counting:
    """A replica whose module buffer counts the steps."""

    def __init__(self, number: int, address: str) -> None:
        self.net = nn.Sequential(nn.BatchNorm1d(2), nn.Linear(2, 1))
        self.manager = make_manager(number, address, self._load, self._save)
        options = {"logical_ranks": 2}
        self.model = minidp.torchft.DataParallel(self.manager, self.net, **options)
        inner = torch.optim.SGD(self.net.parameters(), lr=0.1)
        self.optimizer = Optimizer(self.manager, inner)

    def _save(self) -> Any:
        return {"net": self.net.state_dict()}

    def _load(self, state: Any) -> None:
        self.net.load_state_dict(state["net"])

    def loop(self) -> None:
        for leaf in self.model.each_logical_rank():
            self.model(torch.arange(6.0).view(3, 2) + leaf).sum().backward()

    def finish_step(self) -> None:
        self.loop()
        self.optimizer.step()

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.finish_step()

    def die(self) -> None:
        self.manager.shutdown(wait=False)
        self.manager._pg.abort()

    @property
    def count(self) -> int:
        return int(self.net[0].num_batches_tracked)


def test_a_replica_to_which_no_state_comes_keeps_its_own_buffers():
    """It has received some before, in a step that its source had begun before."""
    server = hasty_lighthouse()
    a = Counting(0, server.address())
    a.step()
    a.step()
    a.optimizer.zero_grad()
    a.loop()
    a.manager.report_error(RuntimeError("once"))
    a.optimizer.step()
    assert a.manager.current_step() == 2
    b = Counting(1, server.address())
    b.optimizer.zero_grad()  # asks before the first one, which goes on alone else
    time.sleep(0.5)
    a.optimizer.zero_grad()
    with ThreadPoolExecutor() as pool:
        for calls in ([a.finish_step, b.finish_step], [a.step, b.step]):
            for future in [pool.submit(call) for call in calls]:
                future.result(timeout=30)
    assert [each.manager.current_step() for each in (a, b)] == [4, 4]
    assert [each.count for each in (a, b)] == [4, 4]
    transport = b.manager._checkpoint_transport
    receive = transport.recv_checkpoint

    def fails(**_arguments: Any) -> None:
        transport.recv_checkpoint = receive
        a.die()
        raise RuntimeError("lost")

    transport.recv_checkpoint = fails
    a.manager.load_state_dict(a.manager.state_dict() | {"step": 6})
    a.optimizer.zero_grad()
    b.step()
    assert b.manager.current_step() == 5
    assert b.count == 5
    b.die()
    server.shutdown()


@pytest.mark.parametrize("logical", [{}, {"logical_ranks": 2}], ids=["plain", "tree"])
def test_a_group_that_cannot_be_connected_costs_no_step(
    lighthouse, monkeypatch, logical
):
    """The host of its store has died meanwhile, so the next quorum gets a new group."""
    failures = [RuntimeError("no store")]
    connect = process_group.create_store_client

    def connect_later(*arguments, **options):
        if failures:
            raise failures.pop()
        return connect(*arguments, **options)

    monkeypatch.setattr(process_group, "create_store_client", connect_later)
    manager, net = manager_for(lighthouse), Small()
    model = minidp.torchft.DataParallel(manager, net, **logical)
    optimizer = Optimizer(manager, torch.optim.SGD(net.parameters(), lr=0.5))
    before = net.weight.detach().clone()
    while manager.current_step() < 1:
        optimizer.zero_grad()
        for _ in model.each_logical_rank() if logical else range(1):
            model(torch.ones(3, 2)).sum().backward()
        optimizer.step()
    assert failures == []
    assert torch.equal(net.weight, before - 0.5 * 3)
    manager.shutdown(wait=False)


def test_managers_that_cannot_repeat_a_step_are_refused(lighthouse):
    manager = manager_for(lighthouse, use_async_quorum=False)
    with pytest.raises(ValueError, match="use_async_quorum=True"):
        minidp.torchft.DataParallel(manager, Small(), logical_ranks=2)
    manager.shutdown(wait=False)


def test_the_state_for_a_checkpoint_has_the_step_of_the_manager(lighthouse):
    manager, net = manager_for(lighthouse), Small()
    model = minidp.torchft.DataParallel(manager, net, logical_ranks=2)
    optimizer = Optimizer(manager, torch.optim.SGD(net.parameters(), lr=0.1))
    for _ in range(3):
        optimizer.zero_grad()
        for _ in model.each_logical_rank():
            model(torch.ones(3, 2)).sum().backward()
        assert model.logical_state["first_step"] == manager.current_step()
        optimizer.step()
    assert manager.current_step() == 3
    assert model.logical_state["first_step"] == 3
    assert [*model.logical_block] == [0, 1]
    manager.shutdown(wait=False)


def test_replicas_that_went_on_without_each_other_find_a_common_state(caplog):
    """Alone each of them does all logical ranks, with batches of its own."""
    server = hasty_lighthouse()
    lines = [Line(server.address()) for _ in range(2)]
    a, b = replicas = [Lonely(k, line.address) for k, line in enumerate(lines)]
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda each: each.train(2), replicas))
        for each, line in zip(replicas, lines, strict=True):
            leave_whole([line], lines)
            each.train(4)
        assert a.manager.current_step() == b.manager.current_step() == 4
        assert not torch.equal(a.net.weight, b.net.weight)
        leave_whole(lines, lines)
    with caplog.at_level("WARNING", "minidp"):
        meet([[lambda each=each: each.train_and_die(8)] for each in replicas])
    common = {*a.seen} & {*b.seen} - {*range(5)}
    assert common
    assert "came to step" in caplog.text
    for step in common:
        assert all(map(torch.equal, a.seen[step], b.seen[step]))
    for line in lines:
        line.close()
    server.shutdown()


class Lonely:
    """A replica of a batch norm, which is a thread and has batches of its own."""

    def __init__(self, number, lighthouse):
        self.number, self.net = number, nn.BatchNorm1d(2)
        inner = torch.optim.SGD(self.net.parameters(), lr=0.1, momentum=0.9)
        self.manager = make_manager(number, lighthouse, self.load, self.save)
        self.model = minidp.torchft.DataParallel(
            self.manager, self.net, logical_ranks=3
        )
        self.optimizer = Optimizer(self.manager, inner)
        self.seen = {}  # the state after steps to which both have contributed

    def save(self):
        return {"net": self.net.state_dict(), "inner": self.optimizer.state_dict()}

    def load(self, state):
        self.net.load_state_dict(state["net"])
        self.optimizer.load_state_dict(state["inner"])

    def train_and_die(self, steps):
        """Train, and let nobody wait for this replica afterwards."""
        self.train(steps)
        self.manager.shutdown(wait=False)

    def train(self, steps):
        while (step := self.manager.current_step()) < steps:
            self.optimizer.zero_grad()
            for leaf in self.model.each_logical_rank():
                seed = step + 10 * leaf + 100 * self.number
                x = torch.randn(4, 2, generator=torch.Generator().manual_seed(seed))
                self.model(x).square().sum().backward()
            self.optimizer.step()
            both = self.model.participants == [0, 1] and self.manager.is_participating()
            if both and (now := self.manager.current_step()) > step:
                self.seen[now] = [v.clone() for v in self.net.state_dict().values()]
