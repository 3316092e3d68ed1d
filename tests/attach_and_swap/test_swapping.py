"""``swapped()``: every spelling of torch's class, and nothing left behind."""

from __future__ import annotations

import contextlib
import copy
import functools
import gc
import importlib
import multiprocessing
import pickle
import sys
import types

import pytest
import torch
from torch import nn
from torch.distributed._composable.replicate import replicate
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.nn.parallel import DistributedDataParallel as Early
from torch.nn.parallel import distributed

import minidp
from minidp import swapping
from tests.support.both import averages

KEPT = {
    "ddp": Early,
    "ours": swapping.DistributedDataParallel,
}  # a reference that no module holds at its top


def everything():
    """All that a swap changes."""
    modules = {
        (name, key)
        for name, module in list(sys.modules.items())
        if isinstance(module, types.ModuleType)
        for key, value in list(vars(module).items())
        if value is KEPT["ours"]
    }
    return (
        type(swapping.TORCHS),
        swapping.TORCHS.__init__ is swapping._TORCHS_INIT,
        type(distributed),
        Early is swapping.TORCHS,
        torch.nn.parallel.DistributedDataParallel is swapping.TORCHS,
        distributed.DistributedDataParallel is swapping.TORCHS,
        modules,
        swapping._swapping.depth,
        swapping._swapping.is_for_good,
        dict(multiprocessing.process.current_process()._config),
    )


@pytest.fixture(autouse=True)
def _nothing_left():
    before = everything()
    yield
    assert everything() == before


def test_every_spelling_makes_ours(lone_group, monkeypatch):
    with minidp.swapped():
        from torch.nn.parallel import DistributedDataParallel as Late
        from torch.nn.parallel.distributed import DistributedDataParallel as Last

        names = [Late, Last, Early, nn.parallel.DistributedDataParallel]
        assert {*names, distributed.DistributedDataParallel} == {KEPT["ours"]}
        made = [
            Late(nn.Linear(1, 1)),
            KEPT["ddp"](nn.Linear(1, 1)),
            functools.partial(KEPT["ddp"], bucket_cap_mb=1)(module=nn.Linear(1, 1)),
        ]
        for ddp in made:
            assert type(ddp) is KEPT["ours"]
            for kind in (minidp.DataParallel, Late, Early, KEPT["ddp"]):
                assert isinstance(ddp, kind)
        # What torch itself sees: its checkpoints, its compiler.
        assert list(get_model_state_dict(made[0])) == ["weight", "bias"]
        assert vars(distributed)["DistributedDataParallel"] is swapping.TORCHS
        with monkeypatch.context() as patch:
            patch.setattr(swapping.TORCHS, "_active_ddp_module", made[0])
            assert Late._get_active_ddp_module() is made[0]
    assert isinstance(made[0], Early)
    # Also later: whoever only wraps inside prints summaries outside.
    assert (KEPT["ours"].__name__, KEPT["ours"].__qualname__) == (
        "DistributedDataParallel",
    ) * 2
    assert str(made[0]).startswith("DistributedDataParallel(\n  (module): Linear")
    by_our_name = minidp.DataParallel(nn.Linear(1, 1))
    assert str(by_our_name).startswith("DataParallel(\n  (module): Linear")
    assert str(minidp.DataParallel) == "<class 'minidp.DataParallel'>"


def test_classes_derived_inside(lone_group):
    with minidp.swapped():

        class Mine(Early):
            def __init__(self, module):
                super().__init__(module, bucket_cap_mb=1)
                self.extra = 7

            def forward(self, x):
                return super().forward(x) + 1

            def __getattr__(self, name):
                try:
                    return super().__getattr__(name)
                except AttributeError:
                    return getattr(self.module, name)

        mine = Mine(nn.Linear(2, 2))
    assert Mine.__mro__[1:3] == (KEPT["ours"], nn.Module)
    assert issubclass(Mine, minidp.DataParallel)
    assert issubclass(Mine, swapping.TORCHS)
    assert type(Mine) is type(swapping.TORCHS)
    averaged = averages(mine)
    mine(torch.ones(1, 2)).sum().backward()
    assert mine.in_features == 2
    assert len(averaged) == 1


@pytest.mark.parametrize("is_swapped", [True, False], ids=["swapped", "imported"])
def test_a_class_that_wraps_only_its_children(is_swapped, lone_group):
    """As mmengine's MMSeparateDistributedDataParallel: nn.Module's constructor runs."""
    with minidp.swapped() if is_swapped else contextlib.nullcontext():
        DDP = Early if is_swapped else minidp.DataParallel

        class Separate(DDP):
            def __init__(self, module):
                super(DDP, self).__init__()
                self.module = module
                for name, child in module.named_children():
                    setattr(module, name, DDP(child))

            @contextlib.contextmanager
            def no_sync(self):
                with contextlib.ExitStack() as stack:
                    for child in self.module.children():
                        stack.enter_context(child.no_sync())
                    yield

            def forward(self, x):
                return self.module(x)

            def train(self, mode=True):
                super().train(mode)
                return self

        model = Separate(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1)))
    assert isinstance(model, (minidp.DataParallel, swapping.TORCHS))
    model.eval().train()
    x = torch.ones(1, 2, requires_grad=True)
    averaged = [averages(ddp) for ddp in model.module.children()]
    with model.no_sync():
        model(x).backward()
    assert averaged == [[], []]
    model(x).backward()
    assert [len(each) for each in averaged] == [1, 1]
    assert next(iter(model.state_dict())) == "module.0.module.weight"
    assert "Separate(" in repr(model)


def test_replicate_makes_ours(lone_group):
    net = nn.Linear(1, 1)
    with minidp.swapped():
        replicate(net)
        net(torch.ones(1, 1)).backward()
    inside = replicate.state(net)._ddp
    assert type(inside) is KEPT["ours"]
    averaged = averages(inside)
    net(torch.ones(1, 1)).backward()
    assert len(averaged) == 1


def test_objects_of_torch_go_on(lone_group):
    old = swapping.TORCHS(nn.Linear(2, 2))
    with minidp.swapped():
        assert isinstance(old, KEPT["ddp"])
        twin = copy.deepcopy(old)
        for ddp in (old, twin):
            ddp(torch.ones(1, 2)).sum().backward()
            assert type(ddp) is swapping.TORCHS
        with pytest.raises(pickle.PicklingError):
            pickle.dumps(old)
    assert pickle.dumps(old)


def test_modules_first_imported_inside(tmp_path, monkeypatch):
    (tmp_path / "late_library.py").write_text(
        "from torch.nn.parallel import DistributedDataParallel as DDP\n"
        "from torch.nn.parallel import *\n"
        "from minidp import DataParallel as ByOurName\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    of_torch = types.ModuleType("torch.new")
    monkeypatch.setitem(sys.modules, "torch.new", of_torch)
    with minidp.swapped():
        late = importlib.import_module("late_library")
        of_torch.D = late.DDP
        names = (late.DDP, late.DistributedDataParallel, late.ByOurName)
        assert names == (KEPT["ours"], KEPT["ours"], minidp.DataParallel)
    names = (late.DDP, late.DistributedDataParallel, late.ByOurName, of_torch.D)
    assert names == (Early, Early, minidp.DataParallel, Early)
    del sys.modules["late_library"]


@pytest.mark.parametrize("is_inside", [False, True])
def test_a_second_swap_warns_and_nested_blocks_do_nothing(is_inside):
    with minidp.swapped() if is_inside else contextlib.nullcontext():
        minidp.swap()
    try:
        before = everything()
        with pytest.warns(UserWarning, match="is swapped already"):
            minidp.swap()
        with pytest.raises(ValueError, match="boo"), minidp.swapped():
            raise ValueError("boo")
        assert everything() == before
        assert Early is KEPT["ours"]
    finally:
        swapping._swapping.is_for_good = False
        swapping._swapping.end()
    with pytest.raises(ValueError, match="boo"), minidp.swapped():
        raise ValueError("boo")
    # and the fixture looks


def test_whole_objects_are_pickled_by_a_name_that_is_always_there(lone_group):
    with minidp.swapped():
        model = nn.parallel.DistributedDataParallel(nn.Linear(1, 1))
        inside = pickle.loads(pickle.dumps(model))
        kinds = pickle.dumps((Early, type(model)))
    outside = pickle.loads(pickle.dumps(model))
    for twin in (inside, outside, copy.deepcopy(model)):
        assert type(twin) is type(model)
        assert torch.equal(twin.module.weight, model.module.weight)
    assert pickle.loads(kinds) == (KEPT["ours"], KEPT["ours"])


def test_either_name_holds_for_instances_of_the_other():
    class Mine(KEPT["ours"]):
        pass

    assert issubclass(minidp.DataParallel, KEPT["ours"])
    assert issubclass(KEPT["ours"], minidp.DataParallel)
    assert not issubclass(minidp.DataParallel, Mine)
    assert not issubclass(swapping.TORCHS, KEPT["ours"])
    assert not issubclass(nn.Linear, KEPT["ours"])


def test_classes_derived_before_are_named():
    class Older(swapping.TORCHS):
        pass

    older = r"test_swapping.*Older"
    with pytest.warns(UserWarning, match=older) as found, minidp.swapped():
        pass
    assert found[0].filename == __file__  # where the block begins, not contextlib's
    del Older
    gc.collect()
    with minidp.swapped():  # warnings are errors here
        pass


def test_whoever_puts_another_class_there_gets_it(monkeypatch):
    with minidp.swapped():
        for module in (nn.parallel, distributed):
            monkeypatch.setattr(module, "DistributedDataParallel", int)
            assert module.DistributedDataParallel is int
            monkeypatch.undo()
            assert module.DistributedDataParallel is KEPT["ours"]


def is_swapped_here(queue):
    from torch.nn.parallel import DistributedDataParallel as Now

    queue.put((Now is KEPT["ours"], Early is KEPT["ours"]))


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_processes_that_start_inside(method):
    context = multiprocessing.get_context(method)
    with minidp.swapped():
        queue = context.SimpleQueue()
        process = context.Process(target=is_swapped_here, args=(queue,))
        process.start()
        process.join(120)
        assert process.exitcode == 0
        assert queue.get() == (True, True)
