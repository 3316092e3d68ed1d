"""Trainings on the simulated device, and on the CPU for their bits.

A scenario is a function of a `Run`: it makes models, wraps and trains them, and returns
tensors. The run says on which device, by which wrapper, and in which of the ways in
which a script can use streams; it counts what the device was asked to do meanwhile.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

from minidp import native
from minidp.core import kernels
from tests.support import sim
from tests.support.combined import combined

# How a script uses streams. Hooks of gradients run on the stream that was current when
# the node of their parameter was made: `mixed_nodes` gives neighbours different ones.
WAYS = ("default", "wrapped_aside", "run_aside", "mixed_nodes")
STEPS = 5
SMALL = {"bucket_cap_mb": 4 / 1024}  # several buckets


def in_ways(name: str, values: Iterable[Any], every: int = 3) -> Any:
    """Parametrise: each value is tried in the hardest way, some in another one, too."""
    pairs = combined(values, WAYS, always="mixed_nodes", every=every)
    return pytest.mark.parametrize((name, "way"), pairs)


@contextlib.contextmanager
def no_races() -> Iterator[None]:
    """Fail if the block has a race; those before it do not count."""
    sim.load().drain()
    sim.races()
    yield
    sim.load().drain()
    found = sim.races()
    assert not found, "\n".join(found)


@contextlib.contextmanager
def slots_of_extension() -> Iterator[None]:
    """Let the extension fill the buckets of wrappers that are made in this block.

    It does so where it has a kernel for the device, which it has for CUDA only. Here
    torch's multiplications take that kernel's place; all else of it is the same.
    """

    def extension(_tensors: Any) -> Any:  # a Mock would keep the tensors alive
        return native.library()

    with mock.patch.object(kernels, "extension_for", extension):
        yield


class Run:
    """One training.

    Args:
        ctx: The rank's context.
        wrapper: torch's class, or minidp's.
        kind: Type of the device: ``"cpu"``, ``"sim"``, or that of a real one.
        way: One of `WAYS`; on the CPU all are the same.
    """

    def __init__(self, ctx: Any, wrapper: Any, kind: str, way: str = "default") -> None:
        self.ctx, self.wrapper, self.kind = ctx, wrapper, kind
        self.on_device = kind != "cpu"
        self.way = way if self.on_device else "default"
        self.costs = sim.Costs()  # of all steps
        self.construction = sim.Costs()
        self._nodes: list[Any] = []
        self._wrappers: list[Any] = []  # live until the device is done with them
        self._indices: set[int] = set()  # of the devices that are in use

    def device(self, index: int = 0) -> torch.device:
        """Return a device; on the CPU there is one."""
        self._indices.add(index)
        return torch.device(self.kind, index) if self.on_device else torch.device("cpu")

    def batch(self, step: int, *shape: int) -> torch.Tensor:
        """Return other numbers on each rank and in each step."""
        generator = torch.Generator().manual_seed(100 * step + self.ctx.rank)
        batch = torch.randn(shape or (6, 12), generator=generator)
        return batch.pin_memory().to(self.device(), non_blocking=True)

    def wrap(self, module: nn.Module, **options: Any) -> Any:
        """Wrap a module of the device, in the way of this run."""
        options = {"process_group": self.ctx.group} | options
        with self.wrapping(module):
            model = self.wrapper(module, **options)
        self._wrappers.append(model)
        return model

    @contextlib.contextmanager
    def wrapping(self, module: nn.Module) -> Iterator[None]:
        """Let the block wrap a module of the device, in the way of this run."""
        if self.way == "mixed_nodes":
            self._make_nodes(module)
        with self._aside(self.way == "wrapped_aside"), self.count(self.construction):
            yield

    def _make_nodes(self, module: nn.Module) -> None:
        trained = [param for param in module.parameters() if param.requires_grad]
        devices = {param.device for param in trained}
        sides = {
            device: [sim.new_stream(device) for _ in range(2)] for device in devices
        }
        for index, param in enumerate(trained):
            with sides[param.device][index % 2]:
                node = torch.autograd.graph.get_gradient_edge(param).node
            self._nodes.append(node)  # or it is made again

    def training(self) -> contextlib.AbstractContextManager[object]:
        """Return the context in which a model is trained."""
        return self._aside(self.way == "run_aside")

    @contextlib.contextmanager
    def _aside(self, is_aside: bool) -> Iterator[None]:
        if not is_aside:
            yield
            return
        with contextlib.ExitStack() as stack:
            # Device 0 comes last: to enter a stream selects its device, too.
            for index in sorted(self._indices | {0}, reverse=True):
                here = torch.accelerator.current_stream(index)
                side = sim.new_stream(self.device(index))
                side.wait_stream(here)
                stack.callback(here.wait_stream, side)
                stack.enter_context(side)
            yield

    @contextlib.contextmanager
    def count(self, costs: sim.Costs) -> Iterator[None]:
        """Add what the block costs on a simulated device, which counts it."""
        if self.kind != "sim":
            yield
            return
        gc.collect()
        with sim.costs() as found:
            yield
        costs.kernels += found.kernels
        costs.collectives += found.collectives
        costs.host_waits += found.host_waits
        costs.peak = max(costs.peak, found.peak)

    def train(
        self,
        model: nn.Module,
        steps: int = STEPS,
        *,
        step: Callable[[int], object] | None = None,
        optimizer: torch.optim.Optimizer | None = None,
        set_to_none: bool = True,
    ) -> list[torch.Tensor]:
        """Train, and return all gradients of each step, and the parameters at last.

        Args:
            model: What is trained.
            steps: How many steps.
            step: Does the forward and the backward of step ``n``.
            optimizer: SGD with momentum if None.
            set_to_none: As of `torch.optim.Optimizer.zero_grad`.
        """
        step = step or (lambda n: model(self.batch(n)).square().mean().backward())
        sgd = optimizer or torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        found: list[torch.Tensor] = []
        with self.training():
            for number in range(steps):
                with self.count(self.costs):
                    sgd.zero_grad(set_to_none=set_to_none)
                    step(number)
                    sgd.step()
                found += [
                    p.grad.clone() for p in model.parameters() if p.grad is not None
                ]
            found += [value.clone() for value in model.state_dict().values()]
        return found


def result_of(run: Run, scenario: Scenario) -> list[torch.Tensor]:
    """Return what a scenario returns, on the CPU; there must be no race in it."""
    torch.manual_seed(0)
    if not run.on_device:
        return scenario(run)
    sim.delay(100, seed=run.ctx.rank + 1)
    with no_races():
        found = scenario(run)
    sim.delay(0, seed=0)
    return [tensor.detach().cpu() for tensor in found]


def net() -> nn.Sequential:
    """Return a small network with several buckets, always the same."""
    torch.manual_seed(0)
    return nn.Sequential(
        *(nn.Linear(12, 40), nn.Tanh(), nn.Linear(40, 30), nn.ReLU()),
        *(nn.Linear(30, 20), nn.LayerNorm(20), nn.Linear(20, 4)),
    )


def conv_net() -> nn.Sequential:
    """Return a small network of many kinds of layers, always the same."""
    torch.manual_seed(0)
    return nn.Sequential(
        *(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(288, 64), nn.Dropout(0.3), nn.Tanh()),
        *(nn.LayerNorm(64), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 5)),
    )


Scenario = Callable[[Run], list[torch.Tensor]]
