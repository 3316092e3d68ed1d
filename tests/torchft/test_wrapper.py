"""minidp.torchft.DataParallel, with replicas that are threads of one process."""

from __future__ import annotations

import copy
import os
import re
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import minidp

torchft = pytest.importorskip("torchft", reason="bash tests/run.sh torchft")

from torchft._torchft import LighthouseServer

from minidp.report import report
from minidp.torchft import DataParallel
from minidp.torchft.quorum import require_known
from tests.support.both import error_of

from .line import Line, hasty_lighthouse, leave_whole, meet
from .replica import make_manager, make_store

pytestmark = [
    pytest.mark.torchft,
    pytest.mark.timeout(120),
    pytest.mark.filterwarnings("ignore"),  # torchft's and those of its servers
]
RATE = 0.05
PATIENCE = timedelta(seconds=6)  # a thread that dies does not close its connections
LOCK = threading.Lock()  # of the global random generator
SMALL = {"bucket_cap_mb": 0.01}
VIEWS = SMALL | {"gradient_as_bucket_view": True}
UNUSED = {"find_unused_parameters": True}


class Net(nn.Module):
    def __init__(self, seed=0):
        super().__init__()
        with LOCK:
            torch.manual_seed(seed)
            self.first = nn.Linear(6, 40)
            self.left, self.right = nn.Linear(40, 40), nn.Linear(40, 40)
            self.last = nn.Linear(40, 2)
            self.double()

    def forward(self, x, way="both"):
        x = torch.tanh(self.first(x))
        x = self.left(x) if way != "right" else x
        x = self.right(x) if way != "left" else x
        return self.last(x)


def batch(replica, step):
    generator = torch.Generator().manual_seed(1000 * step + replica)
    return torch.randn(8, 6, generator=generator, dtype=torch.float64)


def flat(net):
    return torch.cat([param.detach().flatten() for param in net.parameters()])


class Replica:
    """One replica, with other parameters than the others; `step` trains one step."""

    def __init__(self, number, lighthouse, *, manager=None, **options):
        manager = {"patience": PATIENCE} | (manager or {})
        self.number, self.net = number, Net(number + 10 * manager.get("rank", 0))
        self.manager = make_manager(number, lighthouse, self.load, self.save, **manager)
        self.model = DataParallel(self.manager, self.net, **options)
        inner = torch.optim.SGD(self.net.parameters(), lr=RATE)
        self.optimizer = torchft.Optimizer(self.manager, inner)
        self.backwards = 0
        self.seen = {}  # step -> parameters after it
        self.in_threes = set()  # steps to which three replicas have contributed
        self.is_dead = False

    def save(self):
        return {"net": self.net.state_dict(), "optimizer": self.optimizer.state_dict()}

    def load(self, state):
        self.net.load_state_dict(state["net"])
        self.optimizer.load_state_dict(state["optimizer"])

    @property
    def layout(self):
        return self.model._reducer.queue.layout

    def micro_batch(self, x, way):
        self.model(x, way).square().mean().backward()

    def step(self, way="both", quiet=0):
        step = self.manager.current_step()
        self.optimizer.zero_grad()
        for number in range(quiet + 1):
            is_local = number < quiet
            with self.model.no_sync() if is_local else nullcontext():
                self.micro_batch(batch(self.number, step) + number, way)
        self.backwards += 1
        self.optimizer.step()
        if self.manager.current_step() > step:
            self.seen[self.manager.current_step()] = flat(self.net)
            if self.manager.num_participants() == 3:
                self.in_threes.add(self.manager.current_step())

    def train(self, steps, **how):
        while self.manager.current_step() < steps:
            self.step(**how)
        return self

    def train_and_die(self, steps):
        """Train, and let nobody wait for this replica afterwards."""
        self.train(steps)
        self.die()

    def die(self):
        """End as a killed process: heartbeats and connections are gone."""
        if not self.is_dead:
            self.is_dead = True
            self.manager.shutdown(wait=False)
            self.manager._pg.abort()

    def die_in_backward(self, **how):
        """Take a step, in whose backward this replica dies."""

        def die(_):
            self.die()
            raise RuntimeError("dead")

        self.net.first.weight.register_post_accumulate_grad_hook(die)
        with pytest.raises(RuntimeError):
            self.step(**how)


@pytest.fixture
def lighthouse():
    server = LighthouseServer(
        bind="[::]:0",
        min_replicas=2,
        join_timeout_ms=2000,
        quorum_tick_ms=20,
        heartbeat_timeout_ms=600,
    )
    yield server.address()
    server.shutdown()


@pytest.fixture
def start(lighthouse):
    """``start(0, 1, **options)`` makes these replicas; they die when the test ends."""
    started = []

    def start(*numbers, kind=Replica, **options):
        found = together(*(partial(kind, k, lighthouse, **options) for k in numbers))
        started.extend(found)
        return found

    yield start
    for each in started:
        each.die()


def together(*calls):
    with ThreadPoolExecutor(len(calls)) as pool:
        futures = [pool.submit(call) for call in calls]
        return [future.result(timeout=60) for future in futures]


def train(steps, *replicas, **how):
    together(*(partial(each.train, steps, **how) for each in replicas))


def one_step(net, step, replicas, ways=("both",) * 3, quiet=0):
    """Take a step of ``net`` with the average gradients of ``replicas``."""
    optimizer = torch.optim.SGD(net.parameters(), lr=RATE)
    for number in replicas:
        for more in range(quiet + 1):
            loss = net(batch(number, step) + more, ways[number]).square().mean()
            (loss / len(replicas)).backward()
    optimizer.step()
    optimizer.zero_grad()
    return net


def is_reference(found, steps, ways=("both",) * 3, quiet=0, *, is_async=True):
    """Whether replicas 0 and 1 may have come to the parameters ``found``.

    Step 0 begins with the parameters of one of them. The other one receives these
    meanwhile, and contributes nothing, if the quorum is asynchronous.
    """

    def reference(first):
        net = Net(first)
        for step in range(steps):
            replicas = (0, 1) if step or not is_async else (first,)
            one_step(net, step, replicas, ways, quiet)
        return flat(net)

    return any(torch.allclose(found, reference(k), rtol=1e-9) for k in (0, 1))


def same(found, expected):
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(
    ("options", "ways", "quiet"),
    [
        *((mode, ("both", "both"), 0) for mode in ({}, SMALL, VIEWS)),
        ({"batched_grad_copy": True}, ("both", "both"), 0),
        (UNUSED, ("left", "right"), 0),
        (SMALL, ("both", "both"), 2),
    ],
    ids=str,
)
@pytest.mark.parametrize("is_async", [True, False], ids=["async", "sync"])
def test_gradients_are_averages_over_the_participants(
    start, is_async, options, ways, quiet
):
    a, b = start(0, 1, manager={"use_async_quorum": is_async}, **options)
    together(
        *(partial(each.train, 5, way=ways[each.number], quiet=quiet) for each in (a, b))
    )
    assert torch.equal(a.seen[5], b.seen[5])
    assert a.layout == b.layout
    assert is_reference(a.seen[5], 5, ways, quiet, is_async=is_async)


def test_buckets_are_rebuilt_and_a_joining_replica_receives_the_layout(start):
    a, b = start(0, 1, **SMALL)
    first = a.layout
    train(4, a, b)
    assert a.layout == b.layout != first
    (c,) = start(2, **SMALL)
    assert c.layout == first
    train(60, a, b, c)  # so that the third one finds the others, however late it asks
    assert c.layout == a.layout
    assert c.seen
    for step, params in c.seen.items():
        assert torch.equal(params, a.seen[step])
    assert a.model.participants == [0, 1, 2]


@pytest.mark.parametrize(
    ("how", "options"),
    [
        ({}, {}),
        ({"quiet": 1}, {}),
        ({"way": "left"}, UNUSED),
        ({}, {"set_to_none": False}),
    ],
    ids=["plain", "no_sync", "find_unused_parameters", "zeros in .grad"],
)
def test_a_step_in_which_a_replica_dies_is_repeated_from_the_same_gradients(
    start, how, options
):
    options = dict(options)
    set_to_none = options.pop("set_to_none", True)
    replicas = start(0, 1, 2, **SMALL, **options)
    for each in replicas:
        zero_grad = each.optimizer.zero_grad
        each.optimizer.zero_grad = partial(zero_grad, set_to_none=set_to_none)
    train(3, *replicas, **how)
    a, b, victim = replicas
    before, counts = copy.deepcopy(victim.net), [a.backwards, b.backwards]
    together(
        *(partial(each, **how) for each in (victim.die_in_backward, a.step, b.step))
    )
    assert [a.backwards, b.backwards] == [count + 1 for count in counts]
    for each in (a, b):
        assert each.manager.current_step() == 4
        assert each.model.participants == [0, 1]
    assert torch.equal(a.seen[4], b.seen[4])
    before.zero_grad()
    ways = (how.get("way", "both"),) * 2
    same(a.seen[4], flat(one_step(before, 3, (0, 1), ways, how.get("quiet", 0))))


def then_do(work, call):
    """Call ``call`` whenever somebody has waited for the manager's ``work``."""
    inner = work._work
    work._work = SimpleNamespace(
        wait=lambda: (inner.wait(), call()), get_future=inner.get_future
    )


@pytest.mark.parametrize("step", [1, 3], ids=["other buckets", "the same buckets"])
def test_a_replica_that_fails_where_the_other_commits_catches_up(start, step):
    """In step 1 the layout is agreed on: who commits it has other buckets in step 2."""
    a, b = start(0, 1, **SMALL)
    train(step, a, b)
    all_reduce = b.manager.allreduce

    def fails(tensor, **options):
        work = all_reduce(tensor, **options)
        if tensor.dtype is torch.float64:  # a bucket
            b.manager.allreduce = all_reduce
            lost = RuntimeError("lost")
            then_do(work, lambda: b.manager.report_error(lost))
        return work

    b.manager.allreduce = fails
    stood_in, stand_in = [], b.model._quorum._stand_in
    b.model._quorum._stand_in = lambda layout, others: (
        stood_in.append(len(layout.buckets)),
        stand_in(layout, others),
    )
    train(8, a, b)
    assert a.layout == b.layout
    assert stood_in == [len(a.layout.buckets)] * (step == 1)
    assert set(a.seen) == {*range(1, 9)}
    assert set(b.seen) >= {*range(1, step + 1), 8}
    for number, params in b.seen.items():
        assert torch.equal(params, a.seen[number]), number


def test_with_bucket_views_such_a_step_is_not_committed(start):
    a, b, victim = start(0, 1, 2, **VIEWS)
    train(3, a, b, victim)
    before = flat(a.net)
    together(victim.die_in_backward, a.step, b.step)
    for each in (a, b):
        assert each.manager.current_step() == 3
        assert torch.equal(flat(each.net), before)
    train(5, a, b)
    assert torch.equal(a.seen[5], b.seen[5])


def test_several_processes_per_replica(start):
    """Rank r of each replica averages with rank r of the others; both commit or none.

    A step in which a replica dies is not repeated: the other rank may not have noticed.
    """

    def replica(number):
        store = make_store()
        options = [{"rank": r, "world_size": 2, "store": store} for r in range(2)]
        make = partial(start, number, **SMALL)
        found = together(*(partial(make, manager=each) for each in options))
        return [rank for (rank,) in found]

    a, b, victim = replica(0), replica(1), replica(2)
    train(3, *a, *b, *victim)
    assert a[0].model.participants == a[1].model.participants == [0, 1, 2]

    def dies():
        victim[1].optimizer.zero_grad()  # both ask for the quorum
        victim[0].net.first.weight.register_post_accumulate_grad_hook(
            lambda _: victim[1].die()
        )
        victim[0].die_in_backward()

    backwards = a[0].backwards
    together(dies, *(rank.step for rank in (*a, *b)))
    assert {rank.manager.current_step() for rank in (*a, *b)} == {3}
    assert a[0].backwards == backwards + 1
    joins = replica(2)
    train(9, *a, *b, *joins)
    for r in range(2):
        assert torch.equal(a[r].seen[9], b[r].seen[9])
        assert torch.equal(a[r].seen[9], joins[r].seen[9])
        assert a[r].layout == joins[r].layout
        assert a[r].model.participants == [0, 1, 2]
    assert not torch.equal(a[0].seen[9], a[1].seen[9])


def test_steps_are_recorded_and_measured(start):
    def recorded(each):
        speed = minidp.watch_speed(each.model)
        with minidp.record(each.model) as recording:
            each.train(8)
        with pytest.raises(ValueError, match="save\\(\\) on each"):
            recording.gather()
        assert speed.numbers()["backward_s"] > 0
        return recording

    found = together(*(partial(recorded, each) for each in start(0, 1, **SMALL)))
    for number, recording in enumerate(found):
        text = recording.report()
        assert text.startswith(f"rank {number} of 2; torchft on cpu")
        assert "the manager reduces the buckets" in text
        assert "There is none" not in text
    assert "ranks 0, 1 of 2" in report([each.timelines[0] for each in found])


@pytest.mark.parametrize(
    ("change", "options", "words"),
    [
        (nn.Module.float, SMALL, r"first\.weight: torch\.float32 \(40, 6\)"),
        (
            lambda net: setattr(net, "last", nn.Linear(40, 3).double()),
            SMALL,
            r"last\.bias: torch\.float64 \(3,\)",
        ),
        (lambda net: None, UNUSED | SMALL, "find_unused"),
        (lambda net: None, {"bucket_cap_mb": 1}, "caps"),
    ],
    ids=["dtype", "shape", "find_unused_parameters", "bucket_cap_mb"],
)
def test_a_replica_with_another_model_is_named_and_the_others_go_on(
    start, monkeypatch, change, options, words
):
    """Gloo ends a process that receives more than it expects."""
    a, b = start(0, 1, **SMALL)
    train(3, a, b)

    class Other(Net):
        def __init__(self, seed):
            super().__init__(seed)
            change(self)

        def forward(self, x, way):
            return super().forward(x.to(self.first.weight.dtype))

    monkeypatch.setattr(sys.modules[__name__], "Net", Other)
    (other,) = start(2, **options)

    def fails():
        says = rf"^\[rank 0 of replica 2\].*Found:.*{words}"
        with pytest.raises(minidp.MiniDPError, match=says):
            other.step()
        other.die()

    # Long enough that the other one finds them, however late it asks for a quorum.
    together(fails, partial(train, 60, a, b))
    assert torch.equal(a.seen[60], b.seen[60])


def test_a_replica_that_stays_alone_names_what_is_missing(start):
    (a,) = start(0, manager={"quorum_timeout": timedelta(seconds=1)})
    words = r"\[rank 0 of replica 0\] No quorum was found for step 0"
    with pytest.raises(minidp.CollectiveError, match=words):
        a.step()


def test_fewer_replicas_than_the_manager_wants_are_reported(start, caplog):
    replicas = start(0, 1, manager={"min_replica_size": 3})
    with caplog.at_level("WARNING", "minidp"):
        together(*(each.step for each in replicas))
    assert "Step 0 waits until 3 replicas (min_replica_size) are there." in caplog.text
    assert [each.manager.current_step() for each in replicas] == [0, 0]


def test_a_replica_without_minidps_wrapper_is_named(start):
    a, b = start(0, 1)
    train(3, a, b)
    for each in (a, b):
        del each.manager._user_state_dicts["minidp"]
    (joins,) = start(2)

    def fails():
        with pytest.raises(minidp.MiniDPError, match="sends no bucket layout"):
            joins.step()
        joins.die()

    together(fails, partial(train, 5, a, b))


def test_nothing_waits_before_the_backward_has_ended(start):
    a, b = start(0, 1, **SMALL)
    train(3, a, b)
    events, all_reduce = [], a.manager.allreduce

    def noted(tensor, **options):
        work = all_reduce(tensor, **options)
        then_do(work, lambda: events.append("wait"))
        events.append("launch")
        return work

    a.manager.allreduce = noted
    a.net.first.weight.register_post_accumulate_grad_hook(
        lambda _: events.append("the last gradients")
    )
    together(a.step, b.step)
    last, count = events.index("the last gradients"), len(a.layout.buckets)
    assert events.count("launch") == events.count("wait") == count > 2
    assert "wait" not in events[:last]
    assert events[:last].count("launch") >= count - 1


def test_an_exception_in_a_backward_can_be_survived_by_reset(start):
    a, b, unlucky = start(0, 1, 2, **SMALL)
    train(3, a, b, unlucky)
    layout = unlucky.layout

    def raises_once():
        def fail(_):
            handle.remove()
            raise RuntimeError("once")

        handle = unlucky.net.first.weight.register_post_accumulate_grad_hook(fail)
        with pytest.raises(RuntimeError, match="once"):
            unlucky.step()
        unlucky.manager._pg.abort()  # the others wait for its gradients no longer
        unlucky.model.reset()
        assert unlucky.layout == layout
        unlucky.train(6)

    together(raises_once, partial(train, 6, a, b))
    assert torch.equal(a.seen[6], b.seen[6])
    assert torch.equal(a.seen[6], unlucky.seen[6])


def test_a_state_is_taken_over_though_its_step_had_no_vote(start, caplog):
    """As where gradients are not finite. The manager forgets that one was behind."""
    a, b = start(0, 1, **SMALL)
    train(3, a, b)
    (joins,) = start(2, **SMALL)
    replicas = a, b, joins

    def skip_once(each):
        while True:  # until the first step of all three
            each.optimizer.zero_grad()
            each.model(batch(each.number, each.manager.current_step())).sum().backward()
            if len(each.model.participants) == 3:
                break
            each.optimizer.step()
        each.train(40)

    together(*(partial(skip_once, each) for each in replicas))
    common = a.seen.keys() & joins.seen.keys()
    assert max(common) > 10
    for step in common:
        assert torch.equal(joins.seen[step], a.seen[step])
    assert "but the step ended without a vote" in caplog.text


def test_an_optimizer_that_asks_nobody_is_stopped(start):
    def step_alone(each):
        each.optimizer.zero_grad()
        each.model(batch(0, 0)).sum().backward()
        with pytest.raises(minidp.UnsyncedGradientsError, match="not committed step 0"):
            each.optimizer.optim.step()
        each.optimizer.step()
        assert each.manager.current_step() == 1

    together(*(partial(step_alone, each) for each in start(0, 1)))


class Alone:
    """A manager of one replica, without a lighthouse."""

    def __init__(self):
        self._user_state_dicts, self._quorum_future = {"model": None}, None
        self._use_async_quorum, self._group_world_size = True, 2

    def register_state_dict_fn(self, key, load, save):
        assert key not in self._user_state_dicts  # as torchft's
        self._user_state_dicts[key] = save


def alone(module=None, **options):
    return DataParallel(Alone(), module or Net(), **options)


def train_without(quorum, state):
    manager = Alone()
    model = DataParallel(manager, Net())
    manager._quorum_future = quorum
    if state is None:
        del manager._user_state_dicts["model"]
    model(batch(0, 0)).sum().backward()


def twice():
    manager = Alone()
    return [DataParallel(manager, Net()) for _ in range(2)]


SKIPS = UNUSED | {"skip_all_reduce_unused_params": True}
HAS_NOT = r"ValueError: minidp\.torchft\.DataParallel does not have "
REFUSED = {
    HAS_NOT + "the argument process_group": lambda: alone(process_group=None),
    HAS_NOT + "static_graph": lambda: alone(static_graph=True),
    HAS_NOT + "check_replicas_every": lambda: alone(check_replicas_every=1),
    HAS_NOT + "skip_all_reduce_unused": lambda: alone(**SKIPS),
    HAS_NOT + 'bucket_cap_mb="auto"': lambda: alone(bucket_cap_mb="auto"),
    HAS_NOT + 'average_over="items"': lambda: alone(average_over="items"),
    HAS_NOT + "logical_ranks": lambda: alone(logical_ranks=2),
    HAS_NOT + "a sparse": lambda: alone(nn.Embedding(4, 4, sparse=True)),
    HAS_NOT + "join": lambda: alone().join(),
    HAS_NOT + "register_comm_hook": lambda: alone().register_comm_hook(None, None),
    HAS_NOT + "step_in_backward": lambda: alone().step_in_backward(None),
    HAS_NOT + "a copy": lambda: copy.deepcopy(alone()),
    "ValueError: This manager has .* already": twice,
    "TypeError: The manager is the first": lambda: DataParallel(Net(), Alone()),
    "MiniDPError: .*no quorum was started": lambda: train_without(None, {}),
    "MiniDPError: .*bring a joining rep": lambda: train_without(object(), None),
    r"ImportError: .*torchft==0\.2\.0": lambda: require_known("9.9"),
}


@pytest.mark.parametrize("words", REFUSED)
def test_what_does_not_go_with_changing_replicas_is_refused(words):
    assert re.match(words, error_of(REFUSED[words]))


HIDDEN = "import sys; sys.modules['torchft'] = None; import minidp"
MISSING = r"ImportError: minidp\.torchft needs .* pip install 'minidp\[torchft\]'"


@pytest.mark.parametrize(
    ("script", "says"),
    [
        ("import minidp; print('torchft' in dir(minidp), minidp.torchft)", "^False <"),
        (f"{HIDDEN}.torchft", MISSING),
        (f"{HIDDEN}; minidp.torchft", MISSING),
    ],
)
def test_the_module_is_an_attribute_of_the_package(script, says):
    """Loaded when asked for; without torchft the error names the extra."""
    done = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=200,
        check=False,
    )
    assert re.search(says, done.stdout)


@pytest.mark.parametrize("parts", [("a", "bc"), ("ab", "c"), ("a", "b", "c")], ids=str)
def test_replicas_that_went_on_without_each_other_find_a_common_state(parts, caplog):
    """All are at the same step, so that torchft takes them for equal."""
    server = hasty_lighthouse()
    lines = {name: Line(server.address()) for name in "abc"}
    makes = [
        partial(Replica, number, line.address, manager={"patience": PATIENCE}, **SMALL)
        for number, line in enumerate(lines.values())
    ]
    a, b, c = together(*makes)
    replicas = {"a": a, "b": b, "c": c}
    train(3, a, b, c)
    for part in parts:
        leave_whole([lines[name] for name in part], lines.values())
        train(6, *(replicas[name] for name in part))
    assert [each.manager.current_step() for each in (a, b, c)] == [6, 6, 6]
    assert not torch.equal(flat(a.net), flat(c.net))
    for each in (a, b, c):
        each.in_threes.clear()
    leave_whole(lines.values(), lines.values())
    ends = {name: partial(each.train_and_die, 10) for name, each in replicas.items()}
    with caplog.at_level("WARNING", "minidp"):
        meet([[ends[name] for name in part] for part in parts])
    common = set.intersection(*(each.in_threes for each in (a, b, c)))
    assert common
    assert "on different ways" in caplog.text
    for step in common:
        assert torch.equal(a.seen[step], b.seen[step])
        assert torch.equal(a.seen[step], c.seen[step])
    for line in lines.values():
        line.close()
    server.shutdown()


def test_a_replica_that_must_catch_up_finds_nobody_and_goes_on_from_its_own_step():
    """It has told the manager that it is one step behind, for a state to come."""
    server = hasty_lighthouse()
    lines = [Line(server.address()) for _ in range(4)]
    replicas = together(
        *(
            partial(Replica, k, line.address, manager={"patience": PATIENCE}, **SMALL)
            for k, line in enumerate(lines)
        )
    )
    leave_whole(lines[:2], lines)
    train(3, *replicas[:2])
    for each in replicas[:2]:
        leave_whole([lines[each.number]], lines)
        each.train(5)
    first, second, *joining = replicas
    leave_whole(lines, lines)
    # The third one joins with the state of the first, and the fourth with the other.
    meet([[each.step] for each in (first, *joining, second)])
    assert [each.manager.current_step() for each in replicas] == [5, 4, 5, 4]
    state = copy.deepcopy(second.net)
    for each in (second, replicas[3]):
        assert torch.equal(flat(each.net), flat(state))
        leave_whole([lines[each.number]], lines)
        each.train(7)
        alone = copy.deepcopy(state)
        for step in (5, 6):
            alone.zero_grad()
            one_step(alone, step, (each.number,), ("both",) * 4)
            same(each.seen[step + 1], flat(alone))
    for each in replicas:
        each.die()
    for line in lines:
        line.close()
    server.shutdown()


def test_who_has_not_taken_over_a_state_brings_nobody_up_to_date(start):
    """The manager believes it at the step of the others, with its old parameters."""
    a, b = start(1, 2, **SMALL)
    train(3, a, b)
    short = {"manager": {"timeout": timedelta(seconds=2)}}
    (late,) = start(0, **SMALL, **short)  # the first one of those at the highest step

    def skip_once(each):
        while True:  # until the first step of all three
            each.optimizer.zero_grad()
            each.model(batch(each.number, each.manager.current_step())).sum().backward()
            if len(each.model.participants) == 3:
                return
            each.optimizer.step()

    together(*(partial(skip_once, each) for each in (a, b, late)))
    (joins,) = start(3, **SMALL, **short)
    meet([[partial(each.train, 30)] for each in (joins, a, b, late)])
    for each in (late, joins):
        common = a.seen.keys() & each.seen.keys()
        assert max(common) == 30
        for step in common:
            assert torch.equal(each.seen[step], a.seen[step]), (each.number, step)
