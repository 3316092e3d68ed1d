"""minidp.torchft.DataParallel, with replicas that are threads of one process."""

from __future__ import annotations

import copy
import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from torch import nn

import minidp

torchft = pytest.importorskip("torchft", reason="bash tests/run.sh torchft")

from torchft._torchft import LighthouseServer

from minidp.torchft import DataParallel
from minidp.torchft.quorum import require_known

from .replica import make_manager

pytestmark = [
    pytest.mark.torchft,
    pytest.mark.timeout(120),
    pytest.mark.filterwarnings("ignore"),  # torchft's and those of its servers
]
RATE = 0.05
LOCK = threading.Lock()  # of the global random generator
SMALL = {"bucket_cap_mb": 0.01}


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
    """One replica; `step` trains one step of the manager's."""

    def __init__(self, number, lighthouse, *, seed=0, is_async=True, **options):
        self.number, self.net = number, Net(seed)
        self.manager = make_manager(
            number, lighthouse, self.load, self.save, use_async_quorum=is_async
        )
        self.model = DataParallel(self.manager, self.net, **options)
        inner = torch.optim.SGD(self.net.parameters(), lr=RATE)
        self.optimizer = torchft.Optimizer(self.manager, inner)
        self.backwards = 0
        self.seen = {}  # step -> parameters after it

    def save(self):
        return {"net": self.net.state_dict(), "optimizer": self.optimizer.state_dict()}

    def load(self, state):
        self.net.load_state_dict(state["net"])
        self.optimizer.load_state_dict(state["optimizer"])

    @property
    def layout(self):
        return self.model._reducer.queue.layout

    def step(self, *ways, quiet=0):
        step = self.manager.current_step()
        self.optimizer.zero_grad()
        for number in range(quiet + 1):
            is_local = number < quiet
            with self.model.no_sync() if is_local else nullcontext():
                x = batch(self.number, step) + number
                self.model(x, *ways).square().mean().backward()
        self.backwards += 1
        self.optimizer.step()
        if self.manager.current_step() > step:
            self.seen[self.manager.current_step()] = flat(self.net)

    def train(self, steps, *ways, quiet=0):
        while self.manager.current_step() < steps:
            self.step(*ways, quiet=quiet)
        return self

    def die(self):
        """End as a killed process: heartbeats and connections are gone."""
        self.manager.shutdown(wait=False)
        self.manager._pg.abort()


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


def together(*calls):
    with ThreadPoolExecutor(len(calls)) as pool:
        futures = [pool.submit(call) for call in calls]
        return [future.result(timeout=60) for future in futures]


def reference(steps, replicas, ways=("both",) * 3, quiet=0, start=None):
    """Train one net on the average gradients of ``replicas(step)``."""
    net = copy.deepcopy(start or Net())
    optimizer = torch.optim.SGD(net.parameters(), lr=RATE)
    for step in range(steps):
        optimizer.zero_grad()
        who = replicas(step)
        for number in who:
            for more in range(quiet + 1):
                x = batch(number, step) + more
                loss = net(x, ways[number]).square().mean() / len(who)
                loss.backward()
        optimizer.step()
    return flat(net)


def everybody(step):
    # At step 0 all but one receive the parameters, and contribute nothing.
    return (0, 1)


def same(found, expected):
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("is_async", [True, False], ids=["async", "sync"])
@pytest.mark.parametrize(
    "options",
    [{}, SMALL, {"gradient_as_bucket_view": True} | SMALL, {"batched_grad_copy": True}],
    ids=str,
)
def test_gradients_are_averages_over_the_participants(lighthouse, is_async, options):
    replicas = together(
        *(
            lambda k=k: Replica(
                k, lighthouse, seed=k, is_async=is_async, **options
            ).train(5)
            for k in range(2)
        )
    )
    a, b = replicas
    assert torch.equal(a.seen[5], b.seen[5])
    assert a.layout == b.layout
    # One replica's seed and gradients count at step 0, with an asynchronous quorum.
    found = [
        reference(5, lambda step, k=k: (0, 1) if step or not is_async else (k,))
        if k == 0
        else reference(
            5, lambda step: (0, 1) if step or not is_async else (1,), start=Net(1)
        )
        for k in range(2)
    ]
    assert any(torch.allclose(a.seen[5], one, rtol=1e-10) for one in found)
    for each in replicas:
        each.die()


def test_buckets_are_rebuilt_and_a_joining_replica_receives_the_layout(lighthouse):
    a, b = together(*(lambda k=k: Replica(k, lighthouse, **SMALL) for k in range(2)))
    first = a.layout
    together(lambda: a.train(4), lambda: b.train(4))
    assert a.layout == b.layout != first
    c = Replica(2, lighthouse, seed=5, **SMALL)
    assert c.layout == first
    together(*(lambda each=each: each.train(12) for each in (a, b, c)))
    assert c.layout == a.layout
    assert c.seen
    for step, params in c.seen.items():
        assert torch.equal(params, a.seen[step])
    assert a.model.participants == [0, 1, 2]
    for each in (a, b, c):
        each.die()


def test_a_step_in_which_a_replica_dies_is_repeated_from_the_same_gradients(lighthouse):
    replicas = together(
        *(lambda k=k: Replica(k, lighthouse, **SMALL) for k in range(3))
    )
    together(*(lambda each=each: each.train(3) for each in replicas))
    *survivors, victim = replicas
    start = copy.deepcopy(victim.net)
    counts = [each.backwards for each in survivors]

    def dies():
        def die(_):
            victim.die()
            raise RuntimeError("dead")

        handle = victim.net.first.weight.register_post_accumulate_grad_hook(die)
        with pytest.raises(RuntimeError):
            victim.step()
        handle.remove()

    together(dies, *(each.step for each in survivors))
    for each, count in zip(survivors, counts, strict=True):
        assert each.manager.current_step() == 4
        assert each.backwards == count + 1
        assert each.model.participants == [0, 1]
    a, b = survivors
    assert torch.equal(a.seen[4], b.seen[4])
    optimizer = torch.optim.SGD(start.parameters(), lr=RATE)
    optimizer.zero_grad()
    for number in (0, 1):
        (start(batch(number, 3)).square().mean() / 2).backward()
    optimizer.step()
    same(a.seen[4], flat(start))
    for each in survivors:
        each.die()


@pytest.mark.parametrize("step", [1, 3], ids=["other buckets", "the same buckets"])
def test_a_replica_that_fails_where_the_other_commits_catches_up(lighthouse, step):
    """In step 1 the layout is agreed on: who commits it has other buckets in step 2."""
    a, b = together(*(lambda k=k: Replica(k, lighthouse, **SMALL) for k in range(2)))
    together(lambda: a.train(step), lambda: b.train(step))
    all_reduce = b.manager.allreduce

    def fails(tensor, **options):
        work = all_reduce(tensor, **options)
        if tensor.dtype is torch.float64:  # a bucket
            wait, b.manager.allreduce = work.wait, all_reduce
            work.wait = lambda: (
                wait(),
                b.manager.report_error(RuntimeError("lost")),
            )
        return work

    b.manager.allreduce = fails
    stood_in, stand_in = [], b.model._quorum._stand_in
    b.model._quorum._stand_in = lambda buckets: (
        stood_in.append(len(buckets)),
        stand_in(buckets),
    )
    together(lambda: a.train(8), lambda: b.train(8))
    assert a.layout == b.layout
    assert stood_in == [len(a.layout.buckets)] * (step == 1)
    assert set(a.seen) == {*range(1, 9)}
    assert set(b.seen) >= {*range(1, step + 1), 8}
    for number, params in b.seen.items():
        assert torch.equal(params, a.seen[number]), number
    a.die(), b.die()


def test_with_bucket_views_such_a_step_is_not_committed(lighthouse):
    options = SMALL | {"gradient_as_bucket_view": True}
    replicas = together(
        *(lambda k=k: Replica(k, lighthouse, **options) for k in range(3))
    )
    together(*(lambda each=each: each.train(3) for each in replicas))
    *survivors, victim = replicas

    def dies():
        def die(_):
            victim.die()
            raise RuntimeError("dead")

        victim.net.first.weight.register_post_accumulate_grad_hook(die)
        with pytest.raises(RuntimeError):
            victim.step()

    before = flat(survivors[0].net)
    together(dies, *(each.step for each in survivors))
    for each in survivors:
        assert each.manager.current_step() == 3
        assert torch.equal(flat(each.net), before)
    together(*(lambda each=each: each.train(5) for each in survivors))
    assert torch.equal(survivors[0].seen[5], survivors[1].seen[5])
    for each in survivors:
        each.die()


def test_parameters_that_one_replica_does_not_use(lighthouse):
    ways = ("left", "right")
    replicas = together(
        *(
            lambda k=k: Replica(k, lighthouse, find_unused_parameters=True).train(
                4, ways[k]
            )
            for k in range(2)
        )
    )
    a, b = replicas
    assert torch.equal(a.seen[4], b.seen[4])
    expected = [
        reference(4, lambda step, k=k: (0, 1) if step else (k,), ways) for k in range(2)
    ]
    assert any(torch.allclose(a.seen[4], one, rtol=1e-10) for one in expected)
    for each in replicas:
        each.die()


def test_accumulation_in_no_sync(lighthouse):
    replicas = together(
        *(lambda k=k: Replica(k, lighthouse, **SMALL).train(4, quiet=2) for k in (0, 1))
    )
    a, b = replicas
    assert torch.equal(a.seen[4], b.seen[4])
    expected = [
        reference(4, lambda step, k=k: (0, 1) if step else (k,), quiet=2)
        for k in range(2)
    ]
    assert any(torch.allclose(a.seen[4], one, rtol=1e-10) for one in expected)
    for each in replicas:
        each.die()


def test_nothing_waits_before_the_backward_has_ended(lighthouse):
    a, b = together(*(lambda k=k: Replica(k, lighthouse, **SMALL) for k in range(2)))
    together(lambda: a.train(3), lambda: b.train(3))
    events, all_reduce = [], a.manager.allreduce

    def noted(tensor, **options):
        work = all_reduce(tensor, **options)
        wait = work.wait
        work.wait = lambda: (events.append("wait"), wait())
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
    a.die(), b.die()


def test_an_exception_in_a_backward_can_be_survived_by_reset(lighthouse):
    replicas = together(
        *(lambda k=k: Replica(k, lighthouse, **SMALL) for k in range(3))
    )
    together(*(lambda each=each: each.train(3) for each in replicas))
    unlucky = replicas[2]
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

    together(raises_once, *(lambda e=each: e.train(6) for each in replicas[:2]))
    assert len({tuple(each.seen[6].tolist()) for each in replicas}) == 1
    for each in replicas:
        each.die()


def test_an_optimizer_that_asks_nobody_is_stopped(lighthouse):
    def alone(number):
        each = Replica(number, lighthouse)
        each.optimizer.zero_grad()
        each.model(batch(0, 0)).sum().backward()
        with pytest.raises(minidp.UnsyncedGradientsError, match="not committed step 0"):
            each.optimizer.optim.step()
        each.optimizer.step()
        assert each.manager.current_step() == 1
        each.die()

    together(lambda: alone(0), lambda: alone(1))


class Alone:
    """A manager of one replica, without a lighthouse."""

    def __init__(self):
        self._user_state_dicts, self._quorum_future = {"model": None}, None

    def register_state_dict_fn(self, key, load, save):
        self._user_state_dicts[key] = save


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"process_group": None}, "process_group"),
        ({"static_graph": True}, "static_graph"),
        ({"bucket_cap_mb": "auto"}, "bucket_cap_mb"),
        ({"check_replicas_every": 1}, "check_replicas_every"),
        ({"average_over": "items"}, 'average_over="items"'),
        (
            {"skip_all_reduce_unused_params": True, "find_unused_parameters": True},
            "skip_all_reduce_unused_params",
        ),
    ],
)
def test_options_that_need_history_are_refused(options, words):
    with pytest.raises(ValueError, match=words):
        DataParallel(Alone(), Net(), **options)


def test_sparse_gradients_are_refused():
    with pytest.raises(ValueError, match="sparse"):
        DataParallel(Alone(), nn.Embedding(4, 4, sparse=True))


@pytest.mark.parametrize(
    "call",
    [
        lambda model: model.join(),
        lambda model: model.register_comm_hook(None, minidp.comm_hooks.all_reduce_hook),
        lambda model: model.step_in_backward(torch.optim.SGD(model.parameters(), 1)),
        copy.deepcopy,
    ],
)
def test_what_does_not_go_with_a_manager_is_refused(call):
    with pytest.raises(ValueError, match=r"minidp\.torchft\.DataParallel"):
        call(DataParallel(Alone(), Net()))


def test_a_backward_without_quorum_names_the_remedy():
    model = DataParallel(Alone(), Net())
    with pytest.raises(minidp.MiniDPError, match="no quorum was started"):
        model(batch(0, 0)).sum().backward()


def test_a_manager_without_the_models_state_is_refused():
    manager = Alone()
    manager._user_state_dicts.clear()
    manager._quorum_future = object()
    model = DataParallel(manager, Net())
    with pytest.raises(minidp.MiniDPError, match="cannot bring a joining replica up"):
        model(batch(0, 0)).sum().backward()


def test_another_version_is_refused():
    with pytest.raises(ImportError, match=r"pip install torchft==0\.2\.0"):
        require_known("9.9")


def test_without_torchft_the_error_names_the_extra():
    script = "import sys; sys.modules['torchft'] = None; import minidp.torchft"
    done = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert "ImportError: minidp.torchft needs torchft" in done.stderr
    assert "pip install 'minidp[torchft]'" in done.stderr
