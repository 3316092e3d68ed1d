"""``swapped()``: every spelling of torch's class, and nothing left behind."""

from __future__ import annotations

import copy
import functools
import importlib
import multiprocessing
import pickle
import sys
import textwrap
import types
import warnings

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.nn.parallel import DistributedDataParallel as Early
from torch.nn.parallel import distributed

import minidp
from minidp import swapping

KEPT = {"ddp": Early}  # a reference that no module holds at its top


def everything():
    """All that a swap changes."""
    modules = {
        (name, key)
        for name, module in list(sys.modules.items())
        if isinstance(module, types.ModuleType)
        for key, value in list(vars(module).items())
        if value is swapping.DistributedDataParallel
    }
    return (
        type(swapping.TORCHS),
        type(torch.nn.parallel),
        type(distributed),
        Early is swapping.TORCHS,
        torch.nn.parallel.DistributedDataParallel is swapping.TORCHS,
        distributed.DistributedDataParallel is swapping.TORCHS,
        modules,
        swapping._swapping.depth,
        dict(multiprocessing.process.current_process()._config),
    )


@pytest.fixture(autouse=True)
def _nothing_left():
    before = everything()
    yield
    assert everything() == before


def test_every_spelling():
    with minidp.swapped():
        from torch.nn.parallel import DistributedDataParallel as Late
        from torch.nn.parallel.distributed import DistributedDataParallel as Last

        names = [
            Late,
            Last,
            Early,
            torch.nn.parallel.DistributedDataParallel,
            torch.nn.parallel.distributed.DistributedDataParallel,
            nn.parallel.DistributedDataParallel,
            sys.modules["torch.nn.parallel"].DistributedDataParallel,
        ]
        assert set(names) == {swapping.DistributedDataParallel}


def test_what_is_made_is_ours(lone_group):
    with minidp.swapped():
        made = [
            nn.parallel.DistributedDataParallel(nn.Linear(1, 1)),
            KEPT["ddp"](nn.Linear(1, 1)),
            functools.partial(KEPT["ddp"], bucket_cap_mb=1)(module=nn.Linear(1, 1)),
        ]
        for ddp in made:
            assert type(ddp) is swapping.DistributedDataParallel
            assert isinstance(ddp, minidp.DataParallel)
            assert isinstance(ddp, nn.parallel.DistributedDataParallel)
            assert isinstance(ddp, Early)
            assert isinstance(ddp, KEPT["ddp"])
            assert type(ddp) in (nn.DataParallel, nn.parallel.DistributedDataParallel)
    assert isinstance(made[0], Early)


@pytest.mark.parametrize("base", ["name", "kept"])
def test_classes_derived_inside(lone_group, base):
    with minidp.swapped():
        parent = KEPT["ddp"] if base == "kept" else Early

        class Mine(parent):
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
    assert Mine.__mro__[1:3] == (swapping.DistributedDataParallel, minidp.DataParallel)
    assert issubclass(Mine, swapping.TORCHS)
    assert type(Mine) is type(swapping.TORCHS)
    mine(torch.ones(1, 2)).sum().backward()
    assert mine.in_features == 2
    assert mine._reducer.ledger.finalized == 1


def test_torch_itself_sees_torchs(lone_group):
    with minidp.swapped():
        ours = nn.parallel.DistributedDataParallel(nn.Linear(1, 1))
        assert list(get_model_state_dict(ours)) == ["weight", "bias"]
        assert distributed.__dict__["DistributedDataParallel"] is swapping.TORCHS
        source = "from torch.nn.parallel import DistributedDataParallel as D"
        torchs = {"__name__": "torch.distributed.new"}
        exec(source, torchs)
        assert torchs["D"] is swapping.TORCHS


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
        textwrap.dedent(
            """
            from torch.nn.parallel import DistributedDataParallel as DDP
            import torch.nn.parallel as parallel
            from minidp import DataParallel as ByOurName
            Kept = parallel.DistributedDataParallel
            """
        )
    )
    monkeypatch.syspath_prepend(tmp_path)
    with minidp.swapped():
        import late_library

        names = (late_library.DDP, late_library.Kept, late_library.ByOurName)
        assert names == (
            swapping.DistributedDataParallel,
            swapping.DistributedDataParallel,
            minidp.DataParallel,
        )
    names = (late_library.DDP, late_library.Kept, late_library.ByOurName)
    assert names == (swapping.TORCHS, swapping.TORCHS, minidp.DataParallel)
    del sys.modules["late_library"]


def test_an_error_puts_everything_back():
    with pytest.raises(ValueError, match="boo"), minidp.swapped():
        raise ValueError("boo")
    # and the fixture looks


def test_nested_blocks():
    with minidp.swapped():
        with minidp.swapped():
            pass
        assert Early is swapping.DistributedDataParallel
    assert Early is swapping.TORCHS


def test_a_second_swap_warns_and_does_nothing():
    minidp.swap()
    try:
        before = everything()
        with pytest.warns(UserWarning, match="is swapped already"):
            minidp.swap()
        with minidp.swapped():
            pass
        assert everything() == before
        assert Early is swapping.DistributedDataParallel
    finally:
        swapping._swapping.end()


class Registry:
    """As OpenMMLab's: what is registered is found by its ``__name__``."""

    def __init__(self):
        self.kinds = {}

    def register(self, kind):
        if kind.__name__ in self.kinds:
            raise KeyError(f"{kind.__name__} is already registered")
        self.kinds[kind.__name__] = kind

    def holds_class_of(self, thing):
        return isinstance(thing, tuple(self.kinds.values()))


def test_registries_by_name_take_both_classes_of_torch(lone_group):
    registry = Registry()
    with minidp.swapped():
        registry.register(nn.DataParallel)
        registry.register(nn.parallel.DistributedDataParallel)
        registry.register(minidp.SyncBatchNorm)

        class MMDistributedDataParallel(nn.parallel.DistributedDataParallel):
            pass

        registry.register(MMDistributedDataParallel)
        assert registry.holds_class_of(MMDistributedDataParallel(nn.Linear(1, 1)))
        assert registry.holds_class_of(Early(nn.Linear(1, 1)))
        assert registry.holds_class_of(minidp.DataParallel(nn.Linear(1, 1)))
        assert not registry.holds_class_of(nn.Linear(1, 1))
        with pytest.raises(KeyError, match="DataParallel is already registered"):
            registry.register(minidp.DataParallel)  # nn.DataParallel's name as well


def test_what_is_made_answers_to_the_name_of_torchs_class(lone_group):
    with minidp.swapped():
        kind = nn.parallel.DistributedDataParallel
        made = kind(nn.Linear(1, 1))
        by_our_name = minidp.DataParallel(nn.Linear(1, 1))
    # Also later: whoever only wraps inside prints summaries outside.
    assert (kind.__name__, kind.__qualname__) == ("DistributedDataParallel",) * 2
    assert type(made).__name__ in (
        "DistributedDataParallel",
        "FullyShardedDataParallel",
    )
    assert str(made).startswith("DistributedDataParallel(\n  (module): Linear")
    assert made._get_name() == "DistributedDataParallel"
    # And ours keeps its own.
    assert str(by_our_name).startswith("DataParallel(\n  (module): Linear")
    assert str(minidp.DataParallel) == "<class 'minidp.DataParallel'>"


def test_whole_objects_are_pickled_by_a_name_that_is_always_there(lone_group):
    with minidp.swapped():
        model = nn.parallel.DistributedDataParallel(nn.Linear(1, 1))
        inside = pickle.loads(pickle.dumps(model))
        kinds = pickle.dumps((Early, type(model)))
    outside = pickle.loads(pickle.dumps(model))
    for twin in (inside, outside, copy.deepcopy(model)):
        assert type(twin) is type(model)
        assert torch.equal(twin.module.weight, model.module.weight)
    assert pickle.loads(kinds) == (
        swapping.DistributedDataParallel,
        swapping.DistributedDataParallel,
    )


def test_either_name_holds_for_instances_of_the_other():
    class Mine(swapping.DistributedDataParallel):
        pass

    assert issubclass(minidp.DataParallel, swapping.DistributedDataParallel)
    assert issubclass(swapping.DistributedDataParallel, minidp.DataParallel)
    assert not issubclass(minidp.DataParallel, Mine)
    assert not issubclass(swapping.TORCHS, swapping.DistributedDataParallel)
    assert not issubclass(nn.Linear, swapping.DistributedDataParallel)


def test_classes_derived_before_are_named():
    class Older(swapping.TORCHS):
        pass

    with pytest.warns(UserWarning, match=r"test_swapping.*Older"), minidp.swapped():
        pass
    del Older
    import gc

    gc.collect()
    with warnings.catch_warnings(), minidp.swapped():
        pass


def test_whoever_puts_another_class_there_gets_it(monkeypatch):
    with minidp.swapped():
        monkeypatch.setattr(nn.parallel, "DistributedDataParallel", int)
        assert nn.parallel.DistributedDataParallel is int
        monkeypatch.undo()
        assert nn.parallel.DistributedDataParallel is swapping.DistributedDataParallel


def is_swapped_here(queue):
    from torch.nn.parallel import DistributedDataParallel as Now

    queue.put(
        (
            Now is swapping.DistributedDataParallel,
            Early is swapping.DistributedDataParallel,
        )
    )


def test_a_star_is_taken_back(tmp_path, monkeypatch):
    (tmp_path / "starred.py").write_text("from torch.nn.parallel import *\n")
    monkeypatch.syspath_prepend(tmp_path)
    with minidp.swapped():
        starred = importlib.import_module("starred")
        assert starred.DistributedDataParallel is swapping.DistributedDataParallel
    assert starred.DistributedDataParallel is Early


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
        assert swapping.has_reached_children() is (method == "spawn")
