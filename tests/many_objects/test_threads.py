"""Several objects at once: in two threads, or one behind the other.

``MINIDP_STRESS_STEPS=5000`` makes the stress runs long; see also tests/native/tsan.sh.
"""

from __future__ import annotations

import os
import threading
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import nn

from minidp import DataParallel
from minidp.comm.replacements import fresh_group
from tests.support.both import same, wrapped
from tests.support.ranks import on_ranks

pytestmark = pytest.mark.fault

STEPS = int(os.environ.get("MINIDP_STRESS_STEPS", "60"))


class Net(nn.Module):
    """Five layers with values of their own generator: other threads draw, too."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            *(nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(4))
        )
        self.last = nn.Linear(6, 2)
        generator = torch.Generator().manual_seed(seed)
        for param in self.parameters():
            nn.init.uniform_(param, -0.5, 0.5, generator=generator)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.layers(x))


def inputs(seed: int) -> torch.Tensor:
    return torch.randn(3, 6, generator=torch.Generator().manual_seed(seed))


def grads(module: nn.Module) -> list[torch.Tensor]:
    return [p.grad.clone() for p in module.parameters() if p.grad is not None]


def in_threads(*jobs: Callable[[], Any]) -> list[Any]:
    """Run jobs in threads that start together; return results, or raise an error."""
    barrier = threading.Barrier(len(jobs))

    def run(job: Callable[[], Any]) -> Any:
        barrier.wait()
        return job()

    with ThreadPoolExecutor(len(jobs)) as threads:
        return list(threads.map(run, jobs))


# -------------------------------------------------------------- two threads, two groups


def train(
    group: Any, rank: int, seed: int, steps: int, options: dict[str, Any]
) -> list[Any]:
    """Gradients of some steps, and the parameters in the end."""
    ddp = DataParallel(Net(seed), process_group=group, **options)
    optimizer = torch.optim.Adam(ddp.parameters(), lr=0.01)
    log: list[Any] = []
    for step in range(steps):
        optimizer.zero_grad()
        ddp(inputs(1000 * rank + 10 * step + seed)).pow(2).sum().backward()
        if step % 10 == 0:
            log.append(grads(ddp))
        optimizer.step()
    return [*log, [p.detach().clone() for p in ddp.parameters()]]


OPTIONS: dict[str, dict[str, Any]] = {
    "default": {},
    "small buckets": {"bucket_cap_mb": 0},
    "views": {"gradient_as_bucket_view": True, "bucket_cap_mb": 100 / 2**20},
    "unused": {"find_unused_parameters": True},
    "static graph": {"static_graph": True},
}


@on_ranks(2)
@pytest.mark.parametrize("name", OPTIONS)
def test_two_objects_step_from_two_threads(ctx, name):
    """As each alone, bit for bit."""
    other = fresh_group(ctx.group, f"concurrency/{name}")
    jobs = [
        lambda: train(ctx.group, ctx.rank, 1, STEPS, OPTIONS[name]),
        lambda: train(other, ctx.rank, 2, STEPS, OPTIONS[name]),
    ]
    alone = [job() for job in jobs]
    together = in_threads(*jobs)
    torch.distributed.destroy_process_group(other)
    assert same(alone, together)
    return [log[-1] for log in together]


# ---------------------------------------------------------------- one process, a stress


def plain_gradients(seed: int, step: int) -> list[torch.Tensor]:
    net = Net(seed)
    net(inputs(10 * step + seed)).pow(2).sum().backward()
    return grads(net)


def hammer(group: Any, seed: int, options: dict[str, Any]) -> int:
    """Wrap, train and drop, over and over; return how many steps were wrong."""
    wrong = 0
    expected = [plain_gradients(seed, step) for step in range(5)]
    for _ in range(max(1, STEPS // 5)):
        ddp = DataParallel(Net(seed), process_group=group, init_sync=False, **options)
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.0)
        for step in range(5):
            optimizer.zero_grad()
            ddp(inputs(10 * step + seed)).pow(2).sum().backward()
            wrong += not same(grads(ddp), expected[step])
            optimizer.step()
    return wrong


@pytest.mark.parametrize("name", OPTIONS)
def test_objects_come_and_go_in_four_threads(lone_group: Any, name: str) -> None:
    """Guards of one thread's objects come and go while another's optimizer steps."""
    jobs = [
        lambda seed=seed: hammer(lone_group, seed, OPTIONS[name]) for seed in range(4)
    ]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert in_threads(*jobs) == [0, 0, 0, 0]


# ---------------------------------------------------------------------- two models, GAN


class Pair:
    """Generator and discriminator, wrapped by ``wrap``."""

    def __init__(self, wrap: Callable[[nn.Module], nn.Module]) -> None:
        torch.manual_seed(3)
        self.g = wrap(nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 6)))
        self.d = wrap(nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1)))

    def discriminate(self, real: Any, z: Any, how: str) -> torch.Tensor | None:
        """Its loss; None if the backward has run already."""
        fake = self.g(z).detach()
        if how == "one backward":
            return (self.d(real) - 1).pow(2).mean() + self.d(fake).pow(2).mean()
        if how == "one forward":
            scores = self.d(torch.cat([real, fake]))
            return (scores[: len(real)] - 1).pow(2).mean() + scores.pow(2).mean()
        (self.d(real) - 1).pow(2).mean().backward()
        self.d(fake).pow(2).mean().backward()
        return None

    def generate(self, z: Any) -> torch.Tensor:
        return (self.d(self.g(z)) - 1).pow(2).mean()


def batch(rank: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(100 * rank + step)
    return torch.randn(5, 6, generator=generator), torch.randn(
        5, 4, generator=generator
    )


def run(pair: Pair, turn: str, real: Any, z: Any, how: str) -> None:
    """One backward of one of the two."""
    loss = pair.discriminate(real, z, how) if turn == "d" else pair.generate(z)
    if loss is not None:
        loss.backward()


@on_ranks(2)
@pytest.mark.parametrize("options", [{}, {"gradient_as_bucket_view": True}], ids=str)
@pytest.mark.parametrize("how", ["one backward", "one forward", "two backwards"])
def test_generator_through_discriminator(ctx, how, options):
    """Gradients are those of all ranks' data."""
    pair = Pair(lambda module: wrapped(ctx, module, **options))
    plain = Pair(lambda module: module)
    optimizers = {
        "g": torch.optim.Adam(pair.g.parameters(), lr=0.01, betas=(0.5, 0.9)),
        "d": torch.optim.RMSprop(pair.d.parameters(), lr=0.01),
    }
    for step in range(8):
        for turn in "dg":
            real, z = batch(ctx.rank, step)
            plain.g.load_state_dict(pair.g.module.state_dict())
            plain.d.load_state_dict(pair.d.module.state_dict())
            plain.g.zero_grad()
            plain.d.zero_grad()
            optimizers[turn].zero_grad()  # of this one only, as everywhere
            run(pair, turn, real, z, how)
            for rank in range(ctx.world_size):
                run(plain, turn, *batch(rank, step), how)
            model, oracle = getattr(pair, turn), getattr(plain, turn)
            for (name, p), q in zip(
                model.named_parameters(), oracle.parameters(), strict=True
            ):
                near = torch.allclose(p.grad, q.grad / ctx.world_size, atol=1e-6)
                assert near, f"step {step}, {turn}, {name}"
            optimizers[turn].step()
