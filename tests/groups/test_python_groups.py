"""Process groups written in Python, in all the shapes that torch's DDP takes."""

from __future__ import annotations

import logging
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import HashStore, _create_work_from_future
from torch.nn.parallel import DistributedDataParallel

from minidp import DataParallel
from minidp.comm import PeerMonitor, barrier
from tests.support.both import Scalars, done, error_of, same, values, x_of
from tests.support.ranks import on_ranks

CPU = torch.device("cpu")


class OnlyWaits(dist.Work):
    """Its ``wait`` must be given a timeout."""

    def __init__(self, work: Any, log: list[str]) -> None:
        super().__init__()
        self._work, self._log = work, log

    def wait(self, timeout: timedelta) -> bool:
        self._log.append("wait")
        return bool(self._work.wait())


class OnlyPromises(dist.Work):
    """It has a future, and the ``wait`` of its base class, which would never end."""

    def __init__(self, work: Any, log: list[str]) -> None:
        super().__init__()
        self._work, self._log = work, log

    def get_future(self) -> Any:
        self._log.append("get_future")
        return self._work.get_future()


class Both(OnlyWaits):
    def get_future(self) -> Any:
        self._log.append("get_future")
        return self._work.get_future()


class NoWork:
    """Not even a subclass."""

    def __init__(self, work: Any, log: list[str]) -> None:
        self._work, self._log = work, log

    def wait(self) -> None:
        self._log.append("wait")
        self._work.wait()


class Delegating(dist.ProcessGroup):
    """Hands everything to a group of torch's; options must be given, as torch does.

    Args:
        group: does the work.
        kind: class of its works; None: torch's own.
    """

    lacks: tuple[str, ...] = ()

    def __init__(self, group: Any, kind: Any) -> None:
        super().__init__(group.rank(), group.size())
        self.group, self.kind = group, kind
        self.log: list[str] = []

    def _run(self, name: str, *args: Any) -> Any:
        if name in self.lacks:
            raise NotImplementedError(name)
        self.log.append(name)
        work = getattr(self.group, name)(*args)
        return work if self.kind is None else self.kind(work, self.log)

    def allreduce(self, tensors: Any, opts: Any) -> Any:
        return self._run("allreduce", tensors, opts)

    def allgather(self, outputs: Any, inputs: Any, opts: Any) -> Any:
        return self._run("allgather", outputs, inputs, opts)

    def broadcast(self, tensors: Any, opts: Any) -> Any:
        return self._run("broadcast", tensors, opts)


class WithoutAllgather(Delegating):
    lacks = ("allgather",)


class BringsNewTensors(Delegating):
    """The sum is the value of the future; what was given stays as it is."""

    def allreduce(self, tensors: Any, opts: Any) -> Any:
        summed = [tensor.clone() for tensor in tensors]
        self.group.allreduce(summed, opts).wait()
        return _create_work_from_future(done(summed))


class Nameless(Delegating):
    """As those of torchft: the properties raise."""

    @property
    def group_name(self) -> str:
        raise ValueError("ProcessGroup name not set")

    def size(self) -> int:
        return int(self.group.size())


GROUPS: dict[str, Any] = {
    "torch's works": lambda group: Delegating(group, None),
    "wait with a timeout": lambda group: Delegating(group, OnlyWaits),
    "a future only": lambda group: Delegating(group, OnlyPromises),
    "both": lambda group: Delegating(group, Both),
    "no subclass": lambda group: Delegating(group, NoWork),
    "without all-gather": lambda group: WithoutAllgather(group, None),
    "new tensors": lambda group: BringsNewTensors(group, None),
    "nameless": lambda group: Nameless(group, Both),
}
OPTIONS: dict[str, dict[str, Any]] = {
    "default": {},
    "views": {"gradient_as_bucket_view": True},
    "unused": {"find_unused_parameters": True},
    "static graph": {"static_graph": True},
    "compared": {"check_replicas_every": 1},
    "auto": {"bucket_cap_mb": "auto"},
}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
        self.spare = nn.Linear(3, 2)

    def forward(self, x: torch.Tensor, *, all_of_it: bool = True) -> torch.Tensor:
        y = self.layers(x)
        return y + self.spare(x) if all_of_it else y


def train(ctx: Any, wrapper: Any, group: Any, options: dict[str, Any]) -> list[Any]:
    torch.manual_seed(ctx.rank)
    net = wrapper(Net(), process_group=group, **options)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    log: list[Any] = []
    for step in range(4):
        x = torch.randn(5, 3, generator=torch.Generator().manual_seed(9 * step))
        uses_all = "find_unused_parameters" not in options or (step + ctx.rank) % 2 == 0
        net.zero_grad()
        net(x * (ctx.rank + 1), all_of_it=uses_all).square().sum().backward()
        log.append([p.grad.clone() for p in net.parameters()])
        optimizer.step()
    return [*log, list(net.state_dict().values())]


@on_ranks(2)
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("name", GROUPS)
def test_it_trains_with_torchs_bits(ctx, name, options):
    group = GROUPS[name](ctx.group)
    plain = {} if options in ("compared", "auto") else OPTIONS[options]  # torch's
    expected = train(ctx, DistributedDataParallel, ctx.group, plain)
    assert same(expected, train(ctx, DataParallel, group, OPTIONS[options]))
    # Futures for buckets and waits for the rest, as torch's DDP: tests count them.
    assert name != "both" or {"wait", "get_future"} <= {*group.log}


@on_ranks(2)
def test_a_future_that_brings_no_tensor(ctx):
    class BringsText(Delegating):
        def allreduce(self, tensors: Any, opts: Any) -> Any:
            return _create_work_from_future(done("done"))

    net = DataParallel(Scalars(), process_group=BringsText(ctx.group, None))
    text = error_of(lambda: net(torch.ones(1)).sum().backward())
    assert text.startswith("CollectiveError: ")
    assert "a list of one tensor, or None" in text
    assert "found str" in text or "brought str" in text
    net.reset()
    net.process_group.__class__ = Delegating
    net.zero_grad()
    net(torch.ones(1)).sum().backward()
    assert values(net) == [1.0]


@on_ranks(2)
def test_it_says_once_what_does_not_work_there(ctx):
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore
    logger = logging.getLogger("minidp")
    logger.addHandler(handler)
    from minidp.comm import stores

    stores._warned_without_store = False
    try:
        for _ in range(2):
            DataParallel(Scalars(), process_group=Delegating(ctx.group, None))
    finally:
        logger.removeHandler(handler)
    assert len(said) == 1
    assert said[0].startswith(f"[rank {ctx.rank}] Delegating: ")
    assert "without a report of who is missing" in said[0]


class HasBarrier(Delegating):
    def barrier(self, opts: Any) -> Any:
        return self._run("barrier", opts)


class BrokenBarrier(Delegating):
    def barrier(self, opts: Any) -> Any:
        raise RuntimeError("Connection closed by peer")


class LacksBarrier(HasBarrier):
    lacks = ("barrier",)


@on_ranks(2)
def test_a_barrier_that_fails_is_no_missing_barrier(ctx):
    for kind in (Delegating, LacksBarrier):
        barrier(kind(ctx.group, None), CPU)  # has none: nobody waits
    group = HasBarrier(ctx.group, None)
    barrier(group, CPU)
    assert group.log == ["barrier"]
    with pytest.raises(RuntimeError, match="Connection closed by peer"):
        barrier(BrokenBarrier(ctx.group, None), CPU)


# -------------------------------------------------- without any default process group


@pytest.mark.parametrize("kind", [None, OnlyWaits, OnlyPromises, Both, NoWork])
def test_one_rank_and_no_default_group(kind: Any) -> None:
    assert not dist.is_initialized()
    alone = dist.ProcessGroupGloo(HashStore(), 0, 1, timedelta(seconds=20))
    group = Delegating(alone, kind)
    net = DataParallel(nn.Linear(2, 2), process_group=group, init_sync=False)
    assert group.log == []
    net = DataParallel(nn.Linear(2, 2), process_group=group)
    for _ in range(3):
        net.zero_grad()
        net(torch.ones(1, 2)).sum().backward()
    assert [p.grad.tolist() for p in net.parameters()] == [[[1.0, 1.0]] * 2, [1.0, 1.0]]
    assert group.log.count("allreduce") >= 3


# ------------------------------------------------------------------ registered backends


@on_ranks(2)
def test_a_registered_backend_has_hang_reports(ctx):
    """A backend that torch makes: it has a name, and torch's store."""

    def create(store: Any, rank: int, size: int, timeout: Any) -> Any:
        return Delegating(dist.ProcessGroupGloo(store, rank, size, timeout), Both)

    dist.Backend.register_backend("delegating", create, devices=["cpu"])
    group = dist.new_group(
        dist.get_process_group_ranks(ctx.group),
        backend="delegating",
        use_local_synchronization=True,
    )
    assert type(group) is Delegating
    net = DataParallel(Scalars(), process_group=group, hang_timeout=5)
    net(x_of(ctx)).sum().backward()
    assert type(net._reducer.communicator.peers).__name__ == "Heartbeat"
    net.reset()
    net.zero_grad()
    net(x_of(ctx)).sum().backward()
    assert values(net) == [1.5]


@on_ranks(2)
def test_reports_of_the_old_group_end_where_the_new_one_has_no_store(ctx):
    """They would tell of ranks that have other numbers here."""
    net = DataParallel(Scalars(), process_group=ctx.group, hang_timeout=5)
    net(x_of(ctx)).sum().backward()
    assert type(net._reducer.communicator.peers).__name__ == "Heartbeat"
    net._update_process_group(GROUPS["nameless"](ctx.group))
    assert type(net._reducer.communicator.peers) is PeerMonitor
    net.zero_grad()
    net(x_of(ctx)).sum().backward()
    assert values(net) == [1.5]


def fake(options: dict[str, Any]) -> list[float]:
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=4)
    net = DataParallel(Scalars(), **options)
    found = []
    for _ in range(3):
        net.zero_grad()
        net(torch.ones(1)).sum().backward()
        found.append(net.module.w[0].grad.item())
    dist.destroy_process_group()
    return found


@pytest.mark.parametrize("options", OPTIONS)
def test_the_fake_backend(options: str) -> None:
    if options != "compared":  # its all-gather leaves rows as they are
        assert fake(OPTIONS[options]) == [0.25] * 3
