"""Torch's own DDP tests, and what lets them run on the CPU, on any implementation.

The tests were written for one GPU per rank. Only where things are placed is changed:
moves to a GPU do nothing, tensors asked for on a GPU are made on the CPU, streams and
events of an accelerator do nothing, the constructor's `device_ids` and `output_device`
are left out, and "needs a GPU" is no reason to skip. Two waits are added or made longer
where a busy machine would fail the test. No assertion is touched.

Import this module once, in the process from which ranks are forked: it takes seconds.
"""

from __future__ import annotations

import faulthandler
import functools
import importlib
import multiprocessing
import os
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal import common_distributed, common_utils
from torch.testing._internal.distributed.rpc import tensorpipe_rpc_agent_test_fixture

import minidp
from minidp.hang import the_watchdog
from tests.support import broken

IMPLEMENTATIONS: dict[str, Any] = {
    "minidp": minidp.DataParallel,
    "torch": DistributedDataParallel,
    "broken-no-reduce": broken.NoReduce,
    "broken-no-sync": broken.NoSyncIgnored,
}
_FACTORIES = ("arange", "empty", "eye", "full", "ones", "rand", "randint", "randn")
_FACTORIES += ("tensor", "zeros")


def _import_torch_tests(name: str) -> ModuleType:
    # Read when the module is imported. Four is the largest number of ranks that any
    # test is given here; each rank process sets the number of its own test.
    os.environ["BACKEND"] = "gloo"
    os.environ["WORLD_SIZE"] = "4"
    common_distributed.skip_if_no_gpu = lambda test: test
    common_distributed.skip_if_lt_x_gpu = lambda _gpus, **_: lambda test: test
    common_distributed.requires_nccl = lambda: lambda test: test
    common_distributed.logger.setLevel("ERROR")  # not of each process that starts
    # One "GPU" per rank, under the rank's own number.
    common_distributed.init_multigpu_helper = lambda world_size, _backend: {
        rank: [rank] for rank in range(world_size)
    }
    # Some tests are switched off on Linux because they were flaky on torch's GPU
    # machines. They count here if torch passes them.
    with mock.patch.object(common_utils, "IS_LINUX", new=False):
        folder = "torch.testing._internal.distributed"
        return importlib.import_module(f"{folder}.{name}")


_distributed = _import_torch_tests("distributed_test")
_rpc = _import_torch_tests("ddp_under_dist_autograd_test")


class _Forked:
    """Fork the ranks of a test, in the place of torch's way to start them.

    A process that has threads could not be forked safely: none runs in the harness.
    """

    implementation: str
    folder: Path  # of this test alone: temporary files, and what each rank prints

    def setUp(self) -> None:
        super().setUp()
        self._start_processes(multiprocessing.get_context("fork").Process)

    @classmethod
    def _run(cls, rank: int, name: str, *others: Any, **more: Any) -> None:
        """Run the test on a rank and exit with the code that torch's harness chose."""
        log = os.open(cls.folder / f"rank{rank}.log", os.O_WRONLY | os.O_CREAT)
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
            os.dup2(log, stream.fileno())
        sys.stdout.reconfigure(line_buffering=True)  # a killed rank flushes nothing
        # Should there be no harness any more.
        faulthandler.dump_traceback_later(
            common_distributed.get_timeout(name) + 60, exit=True
        )
        code = 1
        try:
            torch.set_num_threads(1)
            place_on_cpu()
            bind(cls.implementation, at_instance=(cls.folder / "reached").touch)
            super()._run(rank, name, *others, **more)
            code = 0  # torch's main tests leave by sys.exit() instead
        except SystemExit as request:
            code = request.code
        except BaseException:
            traceback.print_exc()
        sys.stdout.flush()
        sys.stderr.flush()
        # No interpreter shutdown: process groups whose peers are gone may hang in it.
        # But the watchdog must not be cut off while it writes to the rendezvous file:
        # half a record there makes the other rank wait for the other half, for ever.
        the_watchdog()._leave_with_the_process()
        os._exit(code)


class Distributed(
    _Forked, _distributed.TestDistBackend, _distributed.DistributedTest._DistTestBase
):
    """Torch's main DDP tests; each of its methods is one."""

    def _barrier(self, wait_for: int | None = None, timeout: float = 10) -> None:
        # Torch waits for 10 s, which a rank on a busy machine may need to get here.
        super()._barrier(wait_for, max(timeout, 60))


class _OverRpc(
    _Forked,
    tensorpipe_rpc_agent_test_fixture.TensorPipeRpcAgentTestFixture,
    common_distributed.MultiProcessTestCase,
):
    """Base classes that torch's tests of distributed autograd need beside their own."""


# Torch's classes come first: their world sizes are the right ones.
class UnderDistAutograd(_rpc.DdpUnderDistAutogradTest, _OverRpc):
    """Torch's tests with trainers, a parameter server and a master over RPC."""

    def _do_test(self, *arguments: Any, **options: Any) -> None:
        # The master calls a trainer as soon as RPC is up, on a thread of its own. If
        # the trainer has no default group yet, the test fails, also with torch's DDP.
        new_group = dist.new_group

        @functools.wraps(new_group)
        def when_there_is_a_default_group(*words: Any, **more: Any) -> Any:
            end = time.monotonic() + 60
            while not dist.is_initialized() and time.monotonic() < end:
                time.sleep(0.01)
            return new_group(*words, **more)

        with mock.patch.object(dist, "new_group", when_there_is_a_default_group):
            super()._do_test(*arguments, **options)


class ComparedWithDistAutograd(
    _rpc.DdpComparisonTest, _rpc.CudaDdpComparisonTest, _OverRpc
):
    """Torch's comparisons of local with distributed autograd."""


CASE_OF: dict[str, Any] = {
    name: case
    for case in (Distributed, UnderDistAutograd, ComparedWithDistAutograd)
    for name in dir(case)
    if name.startswith("test_")
}


def fixed_num_ranks(name: str) -> int | None:
    """Return how many ranks a test needs; None if its class does not fix that."""
    case = CASE_OF[name]
    return None if case is Distributed else int(case(name).world_size)


def why_skipped(name: str) -> str:
    """Return why a decorator of unittest skips a test; empty if none does."""
    test = getattr(CASE_OF[name], name)
    is_skipped = getattr(test, "__unittest_skip__", False)
    return str(test.__unittest_skip_why__) if is_skipped else ""


# -- in a rank process, before its test ------------------------------------------------


def bind(name: str, at_instance: Callable[[], None]) -> None:
    """Replace torch's DDP class by an implementation everywhere in this process."""
    implementation = IMPLEMENTATIONS[name]
    construct = implementation.__init__

    @functools.wraps(construct)
    def construct_on_cpu(self: nn.Module, *args: Any, **kwargs: Any) -> None:
        at_instance()
        for device in ("device_ids", "output_device"):  # passed by name
            kwargs.pop(device, None)
        construct(self, *args, **kwargs)

    implementation.__init__ = construct_on_cpu
    if implementation is not DistributedDataParallel:
        _take_the_place_of_torchs(implementation)


def _take_the_place_of_torchs(implementation: Any) -> None:
    # What tests and the compiler call on the class, without an instance.
    for attribute, value in vars(DistributedDataParallel).items():
        is_helper = isinstance(value, (staticmethod, classmethod))
        if is_helper and not hasattr(implementation, attribute):
            setattr(implementation, attribute, value)
    if not hasattr(implementation, "_active_ddp_module"):
        implementation._active_ddp_module = None
    for module in list(sys.modules.values()):
        if module.__name__.split(".")[0] in ("torch", "__main__"):
            for attribute, value in list(vars(module).items()):
                if value is DistributedDataParallel:
                    setattr(module, attribute, implementation)


def place_on_cpu() -> None:
    """Patch torch so that this process places everything on the CPU.

    Some modules compile functions when they are imported, and would find the patches.
    """
    for kind in (torch.Tensor, nn.Module):
        kind.cuda = lambda self, *_, **__: self
        kind.to = _with_places_on_cpu(kind.to)
    for name in _FACTORIES:
        setattr(torch, name, _with_places_on_cpu(getattr(torch, name)))
    for name in ("set_device", "synchronize", "manual_seed"):
        setattr(torch.cuda, name, lambda *_, **__: None)
    torch.cuda.current_device = lambda: 0
    for name in ("device", "stream"):
        setattr(torch.cuda, name, lambda *_, **__: nullcontext())
    # Without an accelerator all of these raise, also where torch's DDP uses them.
    torch.Stream = torch.Event = torch.cuda.Stream = _InOrder
    torch.accelerator.current_stream = _InOrder


def _with_places_on_cpu(function: Callable[..., Any]) -> Callable[..., Any]:
    is_method = function.__name__ == "to"

    @functools.wraps(function)
    def on_cpu(*args: Any, **kwargs: Any) -> Any:
        if is_method and len(args) > 1 and _is_gpu(args[1]):
            args = (args[0], "cpu", *args[2:])
        if _is_gpu(kwargs.get("device")):
            kwargs["device"] = "cpu"
        return function(*args, **kwargs)

    return on_cpu


def _is_gpu(place: Any) -> bool:
    if isinstance(place, int):  # `.to(rank)`
        return not isinstance(place, bool)
    if isinstance(place, torch.device):
        return place.type == "cuda"
    return isinstance(place, str) and place.startswith("cuda")


class _InOrder(nullcontext):
    """A stream, or an event on one, of a device that does one thing after another."""

    def __init__(self, *_: Any, **__: Any) -> None:
        super().__init__(self)

    def wait(self, *_: Any, **__: Any) -> None:
        pass

    record = synchronize = wait_event = wait_stream = wait

    def record_event(self, *_: Any) -> _InOrder:
        return self
