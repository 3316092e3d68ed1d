"""Large parameters are stepped tile by tile, and nothing but the time shows it."""

from __future__ import annotations

import copy
import sys
import threading
from collections import defaultdict
from contextlib import contextmanager, suppress

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

from minidp.sharded import tiles
from minidp.sharded.parts import Parts
from tests.sharded.test_split import OPTIMIZERS, TINY, made, params_of, train, words
from tests.support.both import same
from tests.support.combined import combined
from tests.support.ranks import on_ranks

WITHOUT = {"foreach", "fused"}  # optimizers that gain nothing by tiles


@contextmanager
def tiles_of(numel, counts=None):
    """Let tiles have so many elements, and count how many optimizers get."""
    before, init = tiles.TILE, tiles.Tiles.__init__

    def counted(self, *arguments):
        init(self, *arguments)
        if counts is not None:
            counts.append(len(self.params))

    tiles.TILE, tiles.Tiles.__init__ = numel, counted
    try:
        yield
    finally:
        tiles.TILE, tiles.Tiles.__init__ = before, init


def whole_state(ddp, optimizer):
    return ddp.whole_optimizer_state(optimizer, to=0)


# A tile of 64 floats, and an odd one, whose last elements no vector has.
TILES = [(64, None), (19, TINY), (64, TINY), (19, None)]


@pytest.mark.parametrize(("name", "tile"), combined(OPTIMIZERS, TILES))
@on_ranks(2)
def test_bits_and_states_of_the_plain_loop(ctx, name, tile):
    numel, split = tile
    plain = made(ctx, name=name, kind=DistributedDataParallel)
    ours, optimizer = made(ctx, name=name, split=split)
    counts = []
    with tiles_of(numel, counts):
        found = train(ctx, ours, optimizer)
    assert bool(counts) == (name not in WITHOUT)
    assert same(found, train(ctx, *plain))
    own = [ours._reducer.params[i] for i in ours._sharded.owners.owned_by(ctx.rank)]
    assert {*map(id, optimizer.state)} <= {*map(id, own)}
    assert [len(g["params"]) for g in optimizer.param_groups] == [
        len(g["params"]) for g in plain[1].param_groups
    ]
    whole = whole_state(ours, optimizer)
    if ctx.rank == 0:
        assert_same_states(whole["state"], plain[1].state_dict()["state"])
    return found


def assert_same_states(found, expected):
    assert found.keys() == expected.keys()
    for number, state in expected.items():
        assert found[number].keys() == state.keys()
        for key, value in state.items():
            mine = found[number][key]
            if isinstance(value, torch.Tensor):
                assert torch.equal(mine, value), (number, key)
            else:
                assert mine == value


@pytest.mark.parametrize("split", [None, TINY])
@on_ranks(2)
def test_steps_in_the_backward(ctx, split):
    def run(numel):
        ddp, optimizer = made(ctx, split=split)
        ddp.step_in_backward(optimizer)
        counts = []
        with tiles_of(numel, counts):
            train(ctx, ddp, StepsThere(optimizer))
        return params_of(ddp), len(counts)

    whole, none = run(2**18)
    found, some = run(64)
    assert (none, some > 0) == (0, True)
    assert same(found, whole)
    return found


class StepsThere:
    """Stands for an optimizer whose steps the backward makes."""

    def __init__(self, optimizer):
        self.zero_grad = optimizer.zero_grad

    def step(self):
        pass


def stepped(make, numel=16, dtype=torch.float32, steps=3, shape=(10, 10)):
    """Return a parameter after steps by tiles and whole, the optimizer, and counts."""
    torch.manual_seed(1)
    value, grads = torch.randn(shape), torch.randn(steps, *shape)
    param = torch.nn.Parameter(value.to(dtype))
    optimizer = make([param])
    parts, counts = Parts({}, [param]), []
    with tiles_of(numel, counts):
        for grad in grads:
            param.grad = grad.to(dtype)
            parts.enter(optimizer)
            optimizer.step()
            parts.leave(optimizer)
    return param, optimizer, counts


def adamw(params, **options):
    return torch.optim.AdamW(params, 0.1, **options)


def test_the_first_step_makes_a_whole_state():
    *_, counts = stepped(adamw)
    assert counts == [7, 7]  # the second and the third


def test_what_has_no_state_is_not_tiled():
    *_, counts = stepped(lambda params: torch.optim.SGD(params, 0.1))
    assert not counts


@pytest.mark.parametrize("way", ["foreach", "fused"])
def test_other_ways_to_step_are_not_tiled(way):
    *_, counts = stepped(lambda params: adamw(params, **{way: True}))
    assert not counts


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.complex64])
def test_other_dtypes_are_not_tiled(dtype):
    *_, counts = stepped(adamw, dtype=dtype)
    assert not counts


def test_small_parameters_are_not_tiled():
    *_, counts = stepped(adamw, numel=51)
    assert not counts


def test_a_parameter_of_real_size():
    shape = (3, tiles.TILE + 5)
    param, optimizer, counts = stepped(adamw, tiles.TILE, shape=shape)
    whole, other, none = stepped(adamw, 2**30, shape=shape)
    assert (counts, none) == ([4, 4], [])
    assert torch.equal(param, whole)
    assert_same_states(optimizer.state_dict()["state"], other.state_dict()["state"])


@pytest.mark.parametrize("threads", [2, 3])
def test_each_thread_has_a_tile(threads):
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        assert tiles.tile_numel() == threads * tiles.TILE
    finally:
        torch.set_num_threads(before)


def one_more(make=adamw):
    """Return a parameter with a state and a gradient, and its optimizer."""
    param, optimizer, _ = stepped(make, steps=1)
    param.grad = torch.randn(10, 10)
    return param, optimizer


def test_state_keeps_its_tensors():
    """A script may hold them, and a checkpoint is written while the next step runs."""
    param, optimizer = one_more()
    state = optimizer.state[param]
    tensors = dict(state)
    parts = Parts({}, [param])
    with tiles_of(16):
        parts.enter(optimizer)
        assert len(optimizer.state) == len(optimizer.param_groups[0]["params"]) == 7
        optimizer.step()
        parts.leave(optimizer)
    assert optimizer.state[param] is state
    assert all(state[key] is value for key, value in tensors.items())
    assert float(state["step"]) == 2


def test_a_step_that_raises_leaves_no_tiles():
    param, optimizer = one_more()
    state = copy.deepcopy(optimizer.state[param])
    optimizer.param_groups[0]["betas"] = None, None
    parts = Parts({}, [param])
    with tiles_of(16):
        parts.enter(optimizer)
        with pytest.raises(TypeError):
            optimizer.step()
        parts.leave(optimizer)
    assert [*optimizer.state] == optimizer.param_groups[0]["params"] == [param]
    assert torch.equal(optimizer.state[param]["exp_avg"], state["exp_avg"])


@pytest.mark.parametrize("saves", ["state_dict", "deepcopy"])
@on_ranks(2)
def test_an_emergency_checkpoint_after_a_step_that_raised(ctx, saves):
    """It has whole parameters, and what the share had before."""
    with tiles_of(64):
        ddp, optimizer = made(ctx)
        params = [*ddp.parameters()]
        train(ctx, ddp, optimizer, range(2))
        before = copy.deepcopy(optimizer.state_dict())
        raises_in_a_step(ctx, ddp, optimizer, 2)
        if saves == "deepcopy":
            assert len(copy.deepcopy(optimizer).param_groups[0]["params"]) == 8
        else:
            found = optimizer.state_dict()
            assert len(found["param_groups"][0]["params"]) == 8 + 1  # and the mark
            assert found["state"].keys() == before["state"].keys()
            assert all(
                each["exp_avg"].shape == before["state"][number]["exp_avg"].shape
                for number, each in found["state"].items()
            )
        assert optimizer.param_groups[0]["params"] == params


def raises_in_a_step(ctx, ddp, optimizer, step):
    """Let a step raise when tiles are in the optimizer."""
    ddp(words(ctx, step)).square().mean().backward()
    group = optimizer.param_groups[0]
    rate, group["lr"] = group["lr"], "no number"
    with pytest.raises(TypeError):
        optimizer.step()
    group["lr"] = rate


@pytest.mark.parametrize("first", ["load", "clear", "save_with_dcp"])
@on_ranks(2)
def test_what_may_follow_a_step_that_raised(ctx, first):
    """Before ``reset()``, too: a script may load its checkpoint, or drop the state."""
    with tiles_of(64):
        ddp, optimizer = made(ctx)
        train(ctx, ddp, optimizer, range(2))
        saved = copy.deepcopy(optimizer.state_dict())
        names = ddp.sharded_optimizer_state(optimizer).state_dict()["state"].keys()
        raises_in_a_step(ctx, ddp, optimizer, 2)
        if first == "load":
            optimizer.load_state_dict(saved)
        elif first == "clear":
            optimizer.state.clear()
        else:
            found = ddp.sharded_optimizer_state(optimizer).state_dict()
            assert found["state"].keys() == names
        ddp.reset()
        optimizer.zero_grad()
        assert optimizer.param_groups[0]["params"] == [*ddp.parameters()]
        assert len(optimizer.state) == (0 if first == "clear" else len(names))
        return train(ctx, ddp, optimizer, range(3, 5))


class Looked(defaultdict):
    """A state that calls something when an optimizer asks for it, once."""

    def __init__(self, values, at, act):
        super().__init__(dict, values)
        self.left, self.act = at, act

    def __getitem__(self, key):
        self.left -= 1
        if self.left == 0:
            self.act()
        return super().__getitem__(key)

    def __copy__(self):
        return defaultdict(dict, self)

    def __reduce__(self):
        return defaultdict, (dict,), None, None, iter(self.items())


@pytest.mark.parametrize("saves", ["state_dict", "deepcopy"])
@pytest.mark.parametrize("at", [1, 5, 30])
@pytest.mark.parametrize("name", ["sgd", "adam"])
@on_ranks(2)
def test_a_checkpoint_in_the_middle_of_a_step(ctx, name, at, saves):
    """A handler of a signal may write one, and training goes on."""
    found, saved = [], []
    for disturbs in (False, True):
        ddp, optimizer = made(ctx, name=name)
        with tiles_of(64):
            train(ctx, ddp, optimizer, range(2))
            plain = copy.deepcopy(optimizer.state_dict())

            def save(optimizer=optimizer):
                if saves == "state_dict":
                    saved.append(optimizer.state_dict())
                else:
                    saved.append(copy.deepcopy(optimizer).state_dict())

            if disturbs:
                optimizer.state = state = Looked(optimizer.state, at, save)
            found.append(train(ctx, ddp, optimizer, range(2, 5)))
            assert not disturbs or state.left < 0
    (once,) = saved
    for number, each in plain["state"].items():
        assert once["state"][number].keys() == each.keys()
        for key, value in each.items():
            assert not torch.is_tensor(value) or (
                once["state"][number][key].shape == value.shape
            )
    (mine,), (theirs,) = once["param_groups"], plain["param_groups"]
    mark = [] if saves == "state_dict" else theirs["params"][-1:]  # a copy has none
    assert mine["params"] + mark == theirs["params"]
    assert same(*found)
    assert {*optimizer.state} <= {*ddp.parameters()}
    return found[1]


@on_ranks(2)
def test_checkpoints_of_another_thread(ctx):
    """It may ask at any moment, also in a step."""
    saved, is_over = [], threading.Event()
    usual = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)  # so that it asks at many moments

    def save(optimizer):
        while not is_over.is_set():
            state = optimizer.state_dict()
            saved.append([each["exp_avg"].shape for each in state["state"].values()])

    found = []
    for disturbs in (False, True):
        ddp, optimizer = made(ctx)
        with tiles_of(16):
            train(ctx, ddp, optimizer, range(2))
            shapes = [s["exp_avg"].shape for s in optimizer.state.values()]
            thread = threading.Thread(target=save, args=(optimizer,))
            if disturbs:
                thread.start()
            found.append(train(ctx, ddp, optimizer, range(2, 30)))
            is_over.set()
            if disturbs:
                thread.join()
            is_over.clear()
    sys.setswitchinterval(usual)
    assert len(saved) > 3
    assert all(sorted(each) == sorted(shapes) for each in saved)
    assert same(*found)
    return found[1]


class Interrupted(defaultdict):
    """A state whose change of some number is interrupted before it is made."""

    def __init__(self, values):
        super().__init__(dict, values)
        self.left = -1

    def count(self):
        self.left -= 1
        if self.left == 0:
            raise KeyboardInterrupt

    def __setitem__(self, key, value):
        self.count()
        super().__setitem__(key, value)

    def pop(self, *arguments):
        self.count()
        return super().pop(*arguments)

    def update(self, *arguments):
        self.count()
        super().update(*arguments)


@pytest.mark.parametrize("call", ["enter", "leave"])
@pytest.mark.parametrize("at", range(1, 9))
def test_an_interrupt_loses_no_state(call, at):
    """Ctrl-C may come between any two lines, and a checkpoint be written after it."""
    param, optimizer = one_more()
    optimizer.state = state = Interrupted(optimizer.state)
    expected = state[param]["exp_avg"].clone()
    parts = Parts({}, [param])
    with tiles_of(16):
        state.left = at if call == "enter" else -1
        with suppress(KeyboardInterrupt):
            parts.enter(optimizer)
            state.left = at if call == "leave" else -1
            parts.leave(optimizer)
        state.left = -1
        parts.leave(optimizer)
    assert optimizer.param_groups[0]["params"] == [*state] == [param]
    assert torch.equal(state[param]["exp_avg"], expected)


class Own(torch.Tensor):
    """A tensor whose functions may do anything."""


def test_subclasses_of_tensors_are_not_tiled():
    param = torch.nn.Parameter(torch.randn(10, 10).as_subclass(Own))
    optimizer, parts, counts = adamw([param]), Parts({}, [param]), []
    with tiles_of(16, counts):
        for _ in range(2):
            param.grad = torch.randn(10, 10)
            parts.enter(optimizer)
            optimizer.step()
            parts.leave(optimizer)
    assert not counts


def test_tensors_made_anew_come_back():
    """An optimizer need not change its state in place, nor keep what it has had."""
    param, optimizer = one_more()
    state = optimizer.state[param]
    average, parts = state["exp_avg"], Parts({}, [param])
    with tiles_of(16):
        parts.enter(optimizer)
        for number, tile in enumerate(optimizer.param_groups[0]["params"]):
            of_tile = optimizer.state[tile]
            of_tile["exp_avg"] = torch.full_like(tile, number)
            of_tile["more"] = of_tile["exp_avg"] + 1
            del of_tile["exp_avg_sq"]
            tile.data = torch.full_like(tile, 2 * number)
        parts.leave(optimizer)
    expected = torch.arange(100).div(16, rounding_mode="floor").view(10, 10).float()
    assert state["exp_avg"] is average
    assert torch.equal(average, expected)
    assert torch.equal(state["more"], expected + 1)
    assert torch.equal(param.data, 2 * expected)
    assert state.keys() == {"step", "exp_avg", "more"}


@pytest.mark.parametrize("odd", ["shape", "strides", "dtype"])
def test_a_state_of_another_form_is_not_cut(odd):
    param, optimizer = one_more()
    values = {
        "shape": torch.zeros(10),
        "strides": torch.zeros(10, 10).t(),
        "dtype": torch.zeros(10, 10, dtype=torch.float64),
    }
    optimizer.state[param]["exp_avg"] = values[odd]
    counts = []
    with tiles_of(16, counts):
        parts = Parts({}, [param])
        parts.enter(optimizer)
        parts.leave(optimizer)
    assert not counts


def test_a_state_that_was_cleared_stays_cleared():
    param, optimizer = one_more()
    parts = Parts({}, [param])
    with tiles_of(16):
        parts.enter(optimizer)
        optimizer.state.clear()
        parts.leave(optimizer)
    assert not optimizer.state
    assert optimizer.param_groups[0]["params"] == [param]


def test_gradients_that_a_step_drops_are_dropped():
    param, optimizer = one_more()
    parts = Parts({}, [param])
    with tiles_of(16):
        parts.enter(optimizer)
        optimizer.zero_grad()
        parts.leave(optimizer)
    assert param.grad is None
