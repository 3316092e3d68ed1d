"""The compiled arrivals are the twin of those in Python, and nothing leaks."""

from __future__ import annotations

import contextlib
import gc
import threading
import traceback
import warnings
import weakref
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch._dynamo import compiled_autograd
from torch.testing._internal.two_tensor import TwoTensor

from minidp import DataParallel, native
from minidp.core.grad_hooks import GradHooks, GradState, GradTable, PendingGrads

NUM_PARAMS = 5
MEMBERS = [(2, 0), (1, 3), (4,)]  # parameters of the buckets, in slot order


def make_params(count=NUM_PARAMS):
    return [torch.nn.Parameter(torch.tensor(float(i))) for i in range(count)]


def native_arrivals(library, params, *, on_ready=None, admit=None):
    """Open, one bucket."""
    made = library.GradTable(
        params,
        tuple(GradState),
        GradState.UNSET,
        GradState.COPIED,
        (on_ready or (lambda bucket: None), admit or (lambda i: None)),
    )
    made.adopt([range(len(params))])
    made.entries[:] = [GradState.UNSET] * len(params)
    return made


@contextlib.contextmanager
def attached(arrivals):
    hooks = arrivals.attach()
    yield hooks
    hooks.remove()


# --------------------------------------------------------------------------- the twin


class NoGradient(torch.autograd.Function):
    """Reaches its input's node with an undefined gradient."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return None


class World:
    """Parameters, their arrivals and hooks, and a log of what was called."""

    def __init__(self, library):
        self.params = make_params()
        self.log = []
        reducer = SimpleNamespace(
            on_bucket_ready=self._on_ready,
            admit=self._admit,
            queue=SimpleNamespace(copy_now=lambda i, grad: grad),
        )
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(native, "library", lambda: library)
            self.pending = reducer.pending = PendingGrads(self.params, reducer)
            self.hooks = GradHooks(self.params, self.pending, as_view=False)
        self.arrivals = self.pending.table
        assert isinstance(self.arrivals, GradTable) == (library is None)
        self.arrivals.adopt(MEMBERS)

    def _on_ready(self, bucket, entries):
        self.log.append(("full", bucket, self.read(entries)))

    def _admit(self, i):
        self.log.append(("unusual", i, self.read([self.arrivals.entries[i]])))

    def read(self, entries):
        return [
            entry.item() if isinstance(entry, torch.Tensor) else entry
            for entry in entries
        ]

    def do(self, name, *arguments):
        """One of the operations below."""
        match name, arguments:
            case "entry", (i, entry):
                self.arrivals.entries[i] = entry
            case "entries", (given,):
                self.arrivals.entries[:] = given
            case "pending", (counts,):
                self.arrivals.num_left.clear()
                self.arrivals.num_left.extend(counts)
            case "clear", ():
                self.arrivals.ready.clear()
            case "zero_grad", ():
                for param in self.params:
                    param.grad = None
            case "gather", (bucket,):
                self.log.append(("gather", self.read(self.arrivals.gather(bucket))))
            case "backward", (uses,):
                self.backward(uses)
            case _:
                getattr(self.arrivals, name)(*arguments)

    def backward(self, uses):
        terms = [
            NoGradient.apply(self.params[i]) if factor == 0 else self.params[i] * factor
            for i, factor in uses
        ]
        torch.stack(terms).sum().backward()

    def state(self):
        found = self.arrivals
        return {
            "entries": self.read(found.entries),
            "ready": list(found.ready),
            "pending": list(found.num_left),
            "bucket_of": list(found.bucket_of),
            "used": list(found.used()),
            "log": self.log,
            "grads": self.read([p.grad for p in self.params]),
        }


def in_three_buckets(order):
    return [tuple(order[:2]), tuple(order[2:4]), tuple(order[4:])]


def some(strategy, count):
    return st.lists(strategy, min_size=count, max_size=count)


indices = st.integers(0, NUM_PARAMS - 1)
entries = st.one_of(
    st.just(GradState.UNSET),
    st.sampled_from(list(GradState)),
    st.none(),
    st.integers(100, 200).map(float).map(torch.tensor),
)
uses = st.lists(st.tuples(indices, st.integers(0, 5)), min_size=1, max_size=6)
operations = st.one_of(
    st.tuples(st.just("entry"), indices, entries),
    st.tuples(st.just("entries"), some(entries, NUM_PARAMS)),
    st.tuples(st.just("entries"), st.just([GradState.UNSET] * NUM_PARAMS)),
    st.tuples(st.just("pending"), some(st.integers(0, 3), 3)),
    st.tuples(st.sampled_from(["refill", "clear", "zero_grad"])),
    st.tuples(
        st.just("adopt"), st.permutations(range(NUM_PARAMS)).map(in_three_buckets)
    ),
    st.tuples(st.just("gather"), st.integers(0, 2)),
    st.tuples(st.just("backward"), uses),
)


@given(st.lists(operations, max_size=12))
def test_both_arrivals_see_the_same(library, operations):
    worlds = [World(library), World(None)]
    for name, *arguments in [("entries", [GradState.UNSET] * NUM_PARAMS), *operations]:
        for world in worlds:
            world.do(name, *arguments)
        states = [world.state() for world in worlds]
        assert states[0] == states[1], name
    for world in worlds:
        world.hooks.remove()


def test_entries_are_the_very_objects(library):
    params = make_params()
    arrivals = native_arrivals(library, params)
    mine = torch.ones(3)
    arrivals.entries[2] = mine
    assert arrivals.entries[2] is mine
    assert arrivals.gather(0)[2] is mine
    with attached(arrivals):
        params[1].backward()
    assert arrivals.entries[1] is params[1].grad
    assert all(arrivals.entries[i] is GradState.UNSET for i in (0, 3, 4))


def test_gathered_stays_as_it_was(library):
    arrivals = native_arrivals(library, make_params())
    arrivals.adopt([(3, 4), (1, 0), (2,)])
    arrivals.entries[1] = None
    gathered = arrivals.gather(1)
    arrivals.entries[:] = [GradState.CLOSED] * NUM_PARAMS
    assert len(gathered) == 2
    assert list(gathered) == [None, GradState.UNSET]


def test_the_lists_are_views(library):
    arrivals = native_arrivals(library, make_params())
    ready, pending, held = arrivals.ready, arrivals.num_left, arrivals.entries
    del arrivals
    gc.collect()
    ready.append(3)
    pending[0] = 7
    held[0] = None
    assert (list(ready), list(pending), held[0]) == ([3], [7], None)


# ------------------------------------------------------------------- copied at once


@pytest.mark.parametrize("as_view", [False, True])
def test_a_gradient_is_copied_by_its_own_hook(library, as_view):
    param = torch.nn.Parameter(torch.zeros(100))
    buffer = torch.zeros(102)
    view = buffer[1:-1]
    slots = library.Slots([param], [view], view, as_view=as_view)
    arrivals = native_arrivals(library, [param])
    arrivals.copy_at_once(0, slots, 0)
    arrivals.scale = 1 / 3
    grad = torch.randn(100)
    with attached(arrivals):
        param.backward(grad)
        assert arrivals.entries[0] is GradState.COPIED
        assert list(arrivals.used()) == [0]
        assert torch.equal(view, grad * (1 / 3))
        assert (buffer[0], buffer[-1]) == (0, 0)
        assert (param.grad is view) == as_view

        # What does not fit is kept, for Python to look at.
        param.grad = None
        buffer.zero_()
        arrivals.entries[0] = GradState.UNSET
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # a reference cycle
            (param * (param + 1)).sum().backward(create_graph=True)
        assert arrivals.entries[0] is param.grad
        assert not buffer.any()

        param.grad = None
        arrivals.adopt([[0]])  # other buckets
        arrivals.entries[0] = GradState.UNSET
        param.backward(grad)
        assert arrivals.entries[0] is param.grad
        assert not buffer.any()
    param.grad = None


# -------------------------------------------------------------------------- exceptions


class Boom(Exception):
    def __init__(self, message, *, code):
        super().__init__(message)
        self.code = code


def explode(_index):
    raise Boom("with these words", code=17)


@pytest.mark.parametrize("name", ["on_ready", "admit"])
@pytest.mark.parametrize("in_thread", [False, True])
def test_exceptions_arrive_whole(library, name, in_thread):
    params = make_params(1)
    arrivals = native_arrivals(library, params, **{name: explode})
    if name == "admit":
        arrivals.entries[0] = GradState.CLOSED
    caught = []

    def run():
        arrivals.refill()  # as the thread does on which a backward is opened
        with pytest.raises(Boom, match=r"^with these words$") as info:
            (params[0] * 2).backward()
        caught.append(info.value)

    with attached(arrivals):
        if in_thread:
            in_new_thread(run)
        else:
            run()
        (error,) = caught
        assert error.code == 17
        frames = [frame.name for frame in traceback.extract_tb(error.__traceback__)]
        assert frames[-1] == "explode"
        assert "run" in frames

        # And the hook goes on as before.
        arrivals.entries[0] = None
        if name == "on_ready":
            (params[0] * 2).backward()


def in_new_thread(work):
    failures = []

    def guarded():
        try:
            work()
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=guarded)
    thread.start()
    thread.join(60)
    assert not thread.is_alive()
    if failures:
        raise failures[0]


# ---------------------------------------------------------------------- where it sits


def test_a_backward_in_another_thread(library):
    params = make_params()
    threads = []
    arrivals = native_arrivals(
        library, params, on_ready=lambda b: threads.append(threading.current_thread())
    )

    def run():
        arrivals.refill()  # it is this thread that opens the backward
        torch.stack(params).sum().backward()

    with attached(arrivals):
        in_new_thread(run)
    assert len(threads) == 1
    assert threads[0] is not threading.main_thread()
    assert sorted(arrivals.ready) == list(range(NUM_PARAMS))
    assert list(arrivals.num_left) == [0]


def test_a_backward_in_a_callback(library):
    params = make_params(2)

    @torch.enable_grad()
    def go_deeper(i):
        (params[1] * 3).backward()

    arrivals = native_arrivals(library, params, admit=go_deeper)
    arrivals.entries[0] = GradState.CLOSED
    with attached(arrivals):
        (params[0] * 2).backward()
    assert list(arrivals.ready) == [1]
    assert params[1].grad == 3


# ----------------------------------------------------------------- attach and remove


def test_remove_is_idempotent(library):
    params = make_params()
    arrivals = native_arrivals(library, params)
    hooks = arrivals.attach()
    hooks.remove()
    hooks.remove()
    torch.stack(params).sum().backward()
    assert list(arrivals.ready) == []
    again = arrivals.attach()
    hooks.remove()  # takes away nobody else's
    torch.stack(params).sum().backward()
    assert sorted(arrivals.ready) == list(range(NUM_PARAMS))
    del again  # as does letting go
    torch.stack(params).sum().backward()
    assert len(arrivals.ready) == NUM_PARAMS


def test_two_sets_of_hooks_on_one_node(library):
    params = make_params(2)
    first, second = (native_arrivals(library, params) for _ in range(2))
    with attached(first) as hooks:
        assert hooks.shared() == []
        with attached(second) as others:
            assert hooks.shared() == others.shared() == [0, 1]
            params[0].backward()
        assert hooks.shared() == []
        params[1].backward()
        assert hooks.shared() == []
    assert (list(first.ready), list(second.ready)) == ([0, 1], [0])
    assert hooks.shared() == []


# ------------------------------------------------------------------------------ freed


class Callback:
    def __call__(self, index):
        pass


def make_watched(library, *, as_view=True):
    """(what to hold on to, weak references to all of it)"""
    params = [torch.nn.Parameter(torch.zeros(20)) for _ in range(3)]
    buffer = torch.zeros(60)
    views = list(buffer.view(3, 20).unbind())
    slots = library.Slots(params, views, buffer, as_view=as_view)
    on_ready, admit = Callback(), Callback()
    arrivals = native_arrivals(library, params, on_ready=on_ready, admit=admit)
    for k in range(2):
        arrivals.copy_at_once(k, slots, k)
    hooks = arrivals.attach()
    things = [*params, buffer, *views, on_ready, admit]
    refs = [weakref.ref(thing) for thing in things]
    held = SimpleNamespace(
        params=params, arrivals=arrivals, hooks=hooks, slots=slots, views=views
    )
    return held, refs


def alive(refs):
    gc.collect()
    return [ref() for ref in refs if ref() is not None]


def test_everything_is_freed(library):
    held, refs = make_watched(library)
    torch.stack(held.params).sum().backward()
    grads = [weakref.ref(p.grad) for p in held.params]
    gathered = held.arrivals.gather(0)
    del held
    assert alive(refs)  # `gathered` holds the arrivals
    del gathered
    assert alive(refs) == []
    assert alive(grads) == []


def test_gradients_are_let_go(library):
    held, _ = make_watched(library, as_view=False)
    held.arrivals.scale = 0.5
    torch.stack(held.params).sum().backward()
    grads = [weakref.ref(p.grad) for p in held.params]
    for param in held.params:
        param.grad = None
    assert len(alive(grads)) == 1  # the entry that was not copied at once
    held.arrivals.entries[:] = [GradState.CLOSED] * 3
    assert alive(grads) == []


@pytest.mark.parametrize("names", [("arrivals", "hooks"), ("hooks", "arrivals")])
def test_a_graph_outlives_the_hooks(library, names):
    held, refs = make_watched(library)
    loss = torch.stack(held.params).sum()
    for name in names:
        delattr(held, name)
    del held
    left = alive(refs)
    assert {type(thing) for thing in left} <= {torch.nn.Parameter}
    del left
    loss.backward()  # through nodes that had hooks
    del loss
    assert alive(refs) == []


def test_hooks_keep_the_arrivals_alive(library):
    held, _ = make_watched(library)
    params, hooks = held.params, held.hooks
    ready = held.arrivals.ready
    del held
    gc.collect()
    params[0].backward(torch.ones(20))
    assert list(ready) == [0]
    hooks.remove()
    params[0].backward(torch.ones(20))
    assert list(ready) == [0]


def test_freed_by_a_thread_that_runs_a_backward(library):
    """The last reference may go with a node, in a thread without the GIL."""
    held, refs = make_watched(library)
    holder = [held]
    del held

    def drop(_grad):
        holder.clear()

    loss = torch.stack(holder[0].params).sum()
    loss.register_hook(drop)
    in_new_thread(loss.backward)
    del loss
    assert alive(refs) == []


# ------------------------------------------------------------------ compiled autograd


@pytest.mark.parametrize("raises", [True, False])
def test_compiled_autograd_asks_for_admission(library, raises):
    """The answer must be an error: a hook that is not captured is not called."""

    def admit(i):
        seen.append(i)
        if raises:
            raise KeyError(i)

    params = make_params(3)
    seen = []
    arrivals = native_arrivals(library, params, admit=admit)
    loss = torch.stack(params).sum()
    with attached(arrivals):
        error = KeyError if raises else RuntimeError
        with compiled_autograd._enable(lambda graph: graph), pytest.raises(error):
            loss.backward()
        assert len(seen) == 1
        assert list(arrivals.ready) == []
        torch.stack(params).sum().backward()
        assert sorted(arrivals.ready) == [0, 1, 2]


# ------------------------------------------- found by an attacker; each was a crash


@pytest.mark.parametrize(
    ("make", "value"),
    [
        (lambda g: TwoTensor(g, g.clone()), 2.0),  # a wrapper subclass
        (lambda g: torch._efficientzerotensor(g.shape), 0.0),  # lazy zeros
    ],
)
def test_odd_gradients(lone_group, either_kernels, make, value):
    module = nn.Linear(4, 4)
    ddp = DataParallel(module, process_group=lone_group, gradient_as_bucket_view=True)
    module.weight.register_hook(make)
    ddp(torch.ones(2, 4)).sum().backward()
    assert (module.weight.grad == value).all()


def test_a_wrapper_that_dies_inside_a_hook_of_another(lone_group, either_kernels):
    """Its hooks may not leave the nodes whose hooks the engine is walking."""
    module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    old = [DataParallel(module, process_group=lone_group)]
    new = DataParallel(module, process_group=lone_group)
    queue = new._reducer.queue
    start = queue.start  # called by the first grad hook

    def start_after_a_death(*args, **options):
        old.clear()
        start(*args, **options)

    queue.start = start_after_a_death
    for _ in range(3):
        new(torch.ones(1, 4)).sum().backward()
    assert old == []
    assert all(param.grad is not None for param in module.parameters())
