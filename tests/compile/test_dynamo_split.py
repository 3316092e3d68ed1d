"""Where dynamo starts, stops and splits, without other ranks."""

from __future__ import annotations

import subprocess
import sys
import warnings
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from minidp import DataParallel, GradientError
from tests.support.compiling import Counting, clean_compiler, compiled_backwards

WRAPPERS = (DistributedDataParallel, DataParallel)


class Eight(nn.Module):
    """2.8 MiB of parameters."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(*[nn.Linear(300, 300) for _ in range(8)])

    def forward(self, x):
        return self.layers(x)


def compile_outside(ddp, backend):
    return torch.compile(ddp, backend=backend)


def compile_inside(ddp, backend):
    ddp.module = torch.compile(ddp.module, backend=backend)
    return ddp


def compile_in_place(ddp, backend):
    ddp.compile(backend=backend)
    return ddp


def count_graphs(wrapper, module, cap, compile_it):
    """Graphs of two steps, or what they raise."""
    backend = Counting()
    with clean_compiler(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        compiled = compile_it(wrapper(module, bucket_cap_mb=cap), backend)
        try:
            for _ in range(2):
                compiled(torch.ones(2, 300)).sum().backward()
        except AssertionError as error:
            return str(error)
    return backend.num_graphs


@pytest.mark.parametrize(
    ("cap", "compile_it", "theirs", "ours"),
    [
        (None, compile_outside, 2, 2),
        (1, compile_outside, 3, 3),
        (1, compile_inside, 3, 3),
        (1, compile_in_place, 3, 3),
        (0.5, compile_outside, "First bucket should be smaller", 3),
    ],
)
def test_graphs_end_at_buckets(lone_group, cap, compile_it, theirs, ours):
    found = count_graphs(DistributedDataParallel, Eight(), cap, compile_it)
    assert str(found).startswith(str(theirs))
    assert count_graphs(DataParallel, Eight(), cap, compile_it) == ours


def test_class_of_torch_is_compiled_too(lone_group):
    counts = [count_graphs(w, Eight().layers, 1, compile_outside) for w in WRAPPERS]
    assert counts == [0, 3]  # torch leaves it uncompiled, without a word


@pytest.mark.parametrize("compile_it", [compile_outside, compile_inside])
def test_one_graph_for_all_buckets_is_announced(lone_group, compile_it):
    backend = Counting()
    with clean_compiler(optimize_ddp=False):
        DataParallel(nn.Linear(2, 2))(torch.ones(1, 2)).sum().backward()  # no word
        compiled = compile_it(DataParallel(Eight()), backend)
        with pytest.warns(UserWarning, match="optimize_ddp=False: the module is"):
            compiled(torch.ones(2, 300)).sum().backward()
    assert backend.num_graphs == 1


def test_forward_inside_a_whole_graph_is_an_error(lone_group):
    """But the wrapped module may be one: torch would have to break its forward out."""
    for wrapper in WRAPPERS:
        ddp = wrapper(nn.Linear(2, 2))
        with clean_compiler():

            @torch.compile(backend="eager", fullgraph=True)
            def step(x, ddp=ddp):
                return ddp(x).sum()

            with pytest.raises(torch._dynamo.exc.Unsupported):
                step(torch.ones(1, 2))
    with clean_compiler():
        compiled = torch.compile(ddp, backend="eager", fullgraph=True)
        compiled(torch.ones(1, 2)).sum().backward()
    assert ddp.module.weight.grad is not None


def test_active_module_is_restored(lone_group):
    class Failing(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(1))

        def forward(self, x):
            seen.append(DistributedDataParallel._active_ddp_module)
            raise KeyError

    seen: list[Any] = []
    ddp = DataParallel(Failing())
    with pytest.raises(KeyError):
        ddp(torch.ones(1))
    assert seen == [ddp]
    assert DistributedDataParallel._active_ddp_module is None


def test_the_python_reducer_of_torch_is_refused(lone_group):
    """Torch reads the setting when a module is wrapped, not later."""
    with clean_compiler(optimize_ddp="python_reducer"):
        with pytest.raises(ValueError, match=r"minidp has none.* set it to True"):
            DataParallel(nn.Linear(2, 2))
        assert DistributedDataParallel(nn.Linear(2, 2))._use_python_reducer


def test_the_python_reducer_is_too_late_after_wrapping(lone_group):
    ddp = DataParallel(nn.Linear(2, 2))
    with clean_compiler(optimize_ddp="python_reducer"):
        ddp(torch.ones(1, 2)).sum().backward()
    assert ddp.module.weight.grad.tolist() == [[1.0, 1.0]] * 2


def test_gradients_for_the_caller_only_are_refused(lone_group):
    """No grad hook runs: the probe at the outputs must see it."""
    ddp = DataParallel(nn.Linear(2, 2))
    with clean_compiler():
        loss = ddp(torch.ones(1, 2)).sum()
        with (
            compiled_backwards(),
            pytest.raises(GradientError, match="under compiled autograd"),
        ):
            torch.autograd.grad(loss, list(ddp.parameters()))
    ddp.reset()
    ddp(torch.ones(1, 2)).sum().backward()
    assert ddp.module.weight.grad.tolist() == [[1.0, 1.0]] * 2


def test_whole_compiled_backward_is_an_error_that_names_us(lone_group):
    ddp = DataParallel(nn.Linear(2, 2))
    with clean_compiler():
        loss = ddp(torch.ones(1, 2)).sum()
        with (
            compiled_backwards("eager", fullgraph=True),
            pytest.raises(RuntimeError, match="compiled autograd"),
        ):
            loss.backward()


@pytest.mark.slow
def test_import_does_not_load_the_compiler():
    code = "import minidp, sys; assert 'torch._dynamo' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
