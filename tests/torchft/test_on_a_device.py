"""Replicas of torchft on the simulated device, with the bits of the CPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.accelerator import removal
from tests.accelerator.conftest import pool  # noqa: F401 -- the ranks of these tests
from tests.accelerator.training import SMALL, WAYS, Run, net, result_of
from tests.support import sim
from tests.support.ranks import on_ranks
from tests.torchft.replica import make_manager

pytest.importorskip("torchft", reason="bash tests/run.sh torchft")

import torchft
from torchft._torchft import LighthouseServer

from minidp.torchft import DataParallel

pytestmark = [
    pytest.mark.torchft,
    pytest.mark.filterwarnings("ignore"),  # torchft's and those of its servers
]
STEPS = 4


class Group(torchft.ProcessGroupGloo):
    """torchft's group of the replicas, with simccl for tensors on the device."""

    def _create_pg(self, store: Any, rank: int, world_size: int) -> Any:
        group = super()._create_pg(store, rank, world_size)
        backend = sim._make_group(store, rank, world_size, self._timeout)
        kind = dist.ProcessGroup.BackendType.CUSTOM
        group._register_backend(torch.device("sim"), kind, backend)
        return group


@contextmanager
def lighthouse(ctx: Any) -> Iterator[str]:
    """Run a server on rank 0, and return its address on all ranks."""
    server = None
    if ctx.rank == 0:
        server = LighthouseServer("127.0.0.1:0", ctx.world_size, join_timeout_ms=5000)
    address = [server and server.address()]
    cpu = torch.device("cpu")
    dist.broadcast_object_list(address, group=ctx.group, device=cpu)
    yield str(address[0])
    if server:
        server.shutdown()


def replicas(run: Run) -> list[torch.Tensor]:
    """Each rank is a replica, and starts with parameters of its own."""
    module = net()
    with torch.no_grad():
        for param in module.parameters():
            param.add_(run.ctx.rank)
    module.to(run.device())

    def save() -> dict[str, torch.Tensor]:
        # torchft itself copies only the tensors of CUDA and XPU to the host.
        return {name: value.cpu() for name, value in module.state_dict().items()}

    with lighthouse(run.ctx) as address:
        manager = make_manager(
            *(run.ctx.rank, address, module.load_state_dict, save),
            group=Group,
            min_replica_size=run.ctx.world_size,
        )
        run.wrapper = lambda module, process_group, **options: DataParallel(
            manager, module, **options
        )
        model = run.wrap(module, **SMALL)
        sgd = torch.optim.SGD(module.parameters(), lr=0.1)
        found = run.train(model, STEPS, optimizer=torchft.Optimizer(manager, sgd))
        assert manager.current_step() == STEPS
        manager.shutdown(wait=False)
    return found


@on_ranks(2)
@pytest.mark.parametrize("way", WAYS)
def test_replicas_on_the_device(ctx, way):
    expected = result_of(Run(ctx, DataParallel, "cpu"), replicas)
    found = result_of(Run(ctx, DataParallel, "sim", way), replicas)
    assert len(expected) == len(found)
    assert all(map(torch.equal, expected, found))
    return found


# A wait that is taken out, and the way in which its loss shows.
WAITS = {
    "Sum.end self.work.wait": "default",
    "Sum._on_stream ended.hold_back": "mixed_nodes",
}


@on_ranks(2)
@pytest.mark.parametrize("wait", WAITS)
def test_without_one_of_its_waits_a_replica_races(ctx, wait):
    (site,) = (each for each in removal.sites() if str(each).endswith(f".py {wait}"))
    run = Run(ctx, DataParallel, "sim", WAITS[wait])
    with removal.removed(site), pytest.raises(AssertionError, match=r"reads|writes"):
        result_of(run, replicas)
    sim.delay(0, seed=0)
