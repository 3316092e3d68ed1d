"""``bucket_cap_mb="auto"`` while replicas, threads of one process, die and join."""

from __future__ import annotations

import itertools
import os
import random
import threading
from datetime import timedelta
from functools import partial

import pytest
import torch

pytest.importorskip("torchft", reason="bash tests/run.sh torchft")

from torchft._torchft import LighthouseServer

from minidp.autotune import NUM_TRIALS
from minidp.autotune.trials import Search
from minidp.overlap import AUTO, AUTO_TRIES, Stopwatch
from minidp.torchft import tuning
from tests.distributed.test_autotune import wild

from .test_wrapper import (
    UNUSED,
    Replica,
    is_reference,
    lighthouse,
    pytestmark,
    start,
    together,
    train,
)

__all__ = ["lighthouse", "pytestmark", "start"]  # of pytest
SEEDS = range(int(os.environ.get("MINIDP_TUNING_SEEDS", "2")))
SHORT = 3  # steps of a trial
SEARCH = 3 + NUM_TRIALS * (SHORT + 1)  # this step is the first with the last layout


class Tuned(Replica):
    def __init__(self, number, lighthouse, *, is_async=True, **options):
        # Who waits longest for the dead one is back before the join timeout.
        brief = {"patience": timedelta(seconds=1), "use_async_quorum": is_async}
        super().__init__(
            number, lighthouse, bucket_cap_mb="auto", manager=brief, **options
        )
        self.layouts = {}  # step -> layout in it, if committed here
        self.optimizer.optim.register_step_pre_hook(self.note)

    def note(self, *_):
        self.layouts[self.manager.current_step()] = self.layout.assignment

    @property
    def plan(self):
        return self.model._quorum.agreement.plan


@pytest.fixture(autouse=True)
def random_proposals(monkeypatch):
    """Each replica would try other layouts at each moment: only one's may count."""
    seeds = itertools.count()

    def proposal(search, trial):
        return wild(next(seeds))(search, trial)

    monkeypatch.setattr(Search, "proposal", proposal)
    monkeypatch.setattr(tuning, "STEPS", SHORT)


def check(replicas):
    """All replicas had equal layouts and parameters after each step that they share."""
    for one, other in itertools.combinations(replicas, 2):
        for step in one.layouts.keys() & other.layouts.keys():
            assert one.layouts[step] == other.layouts[step], step
        for step in one.seen.keys() & other.seen.keys():
            assert torch.equal(one.seen[step], other.seen[step]), step


def test_all_replicas_try_the_same_layouts_and_keep_one(start):
    a, b = start(0, 1, kind=Tuned)
    train(9, a, b)
    assert a.model.bucket_layout["rebuilt"] is False
    assert a.model._reducer.rebuild_policy.layout_by == AUTO_TRIES
    last = SEARCH + 4
    train(last, a, b)
    check([a, b])
    assert set(a.seen) == set(b.seen) == {*range(1, last + 1)}
    assert len(set(a.layouts.values())) >= 5  # else this has shown nothing
    assert len({a.layouts[step] for step in range(SEARCH + 1, last + 1)}) == 1
    for each in (a, b):
        assert each.plan["trial"] == NUM_TRIALS
        assert each.model.bucket_layout["rebuilt"] is True
        assert each.model._reducer.rebuild_policy.layout_by == AUTO
        listeners = each.model._reducer.queue.tracer.listeners
        assert not any(isinstance(listener, Stopwatch) for listener in listeners)
    assert is_reference(a.seen[last], last)


@pytest.mark.parametrize(
    "options",
    [{}, {"gradient_as_bucket_view": True}, UNUSED, {"is_async": False}],
    ids=["plain", "view", "unused", "synchronous quorum"],
)
@pytest.mark.parametrize("seed", SEEDS)
def test_one_is_killed_and_one_joins_in_the_middle_of_the_search(start, options, seed):
    chance = random.Random(f"{seed} {options}")
    replicas = start(0, 1, 2, kind=Tuned, **options)
    victim = chance.choice(replicas)  # rank 0, who decides, with a chance of a third
    survivors = [each for each in replicas if each is not victim]
    dies, joins = chance.randrange(1, SEARCH), chance.randrange(1, SEARCH)
    last = max(dies, joins) + 20 + SEARCH
    late, is_wanted, is_there = [], threading.Event(), threading.Event()

    def victim_dies():
        victim.train(dies)
        victim.die_in_backward()

    def joiner():
        is_wanted.wait(60)
        late.extend(start(3, kind=Tuned, **options))
        is_there.set()
        late[0].train(last)

    def survive(each):
        each.train(joins)
        is_wanted.set()
        is_there.wait(60)
        each.train(last)

    together(victim_dies, joiner, *(partial(survive, each) for each in survivors))
    check([*replicas, *late])
    others = [*survivors, *late]
    assert len({each.layouts[last] for each in others}) == 1
    # It was over in all, or in none: a joiner may have come late.
    assert len({each.plan["trial"] for each in others}) == 1
    assert late[0].plan["trial"] == NUM_TRIALS


def test_a_step_without_a_decision_begins_the_search_anew(start, monkeypatch):
    a, b = start(0, 1, kind=Tuned)
    train(10, a, b)
    assert a.plan["trial"] > 0
    for each in (a, b):
        monkeypatch.setattr(each.model._quorum.agreement, "proposal", lambda: None)
    train(14, a, b)
    assert a.plan["trial"] == b.plan["trial"] == 0
    check([a, b])


def test_a_replica_alone_tries_nothing_until_another_comes():
    server = LighthouseServer(bind="[::]:0", min_replicas=1, quorum_tick_ms=20)
    a = Tuned(0, server.address()).train(SEARCH)
    assert a.plan["torchs"] is not None
    assert a.plan["trial"] == -1
    b = Tuned(1, server.address())
    train(3 * SEARCH, a, b)
    check([a, b])
    assert a.plan["trial"] == b.plan["trial"] == NUM_TRIALS
    a.die(), b.die()
    server.shutdown()
