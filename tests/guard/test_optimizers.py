"""The guard fires for every optimizer of torch, before a bit of a parameter changes."""

from __future__ import annotations

import inspect

import pytest
import torch
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer

from minidp import DataParallel, UnsyncedGradientsError

X = torch.arange(6.0).reshape(2, 3)
# Every class, whatever a later torch adds.
CLASSES = [
    cls
    for cls in vars(torch.optim).values()
    if inspect.isclass(cls)
    and issubclass(cls, torch.optim.Optimizer)
    and cls is not torch.optim.Optimizer
]


class Net(nn.Module):
    """Matrices only (Muon takes nothing else), or a sparse embedding."""

    def __init__(self, *, sparse: bool):
        super().__init__()
        self.table = nn.Embedding(4, 3, sparse=sparse)
        self.layer = nn.Linear(3, 2, bias=False)
        self.layer.requires_grad_(not sparse)

    def forward(self, x):
        return self.layer(x + self.table(torch.tensor([1, 2]))).square().sum()


class Setting:
    def __init__(self, group, cls, options):
        torch.manual_seed(0)
        net = Net(sparse=cls is torch.optim.SparseAdam)
        self.ddp = DataParallel(net, process_group=group)
        self.params = [p for p in net.parameters() if p.requires_grad]
        self.optimizer = cls(self.params, **options)

    def closure(self, backward):
        def closure():
            self.ddp.zero_grad()
            return backward()

        return closure

    def synchronised(self):
        loss = self.ddp(X)
        loss.backward()
        return loss

    def step(self, backward):
        """With a closure where one is needed."""
        if isinstance(self.optimizer, torch.optim.LBFGS):
            self.optimizer.step(self.closure(backward))
        else:
            self.ddp.zero_grad()
            backward()
            self.optimizer.step()

    def local_loss(self):
        loss = self.ddp.module(X)
        loss.backward()
        return loss

    def refuses_local(self):
        """A synchronised step changes parameters, a local one raises and does not."""
        before = self.bits()
        self.step(self.synchronised)
        assert not same(before, self.bits()), "it does not even train"
        before = self.bits()
        for _ in range(2):  # trying again does not help
            with pytest.raises(
                UnsyncedGradientsError, match=r"Parameters: .*table\.weight"
            ):
                self.step(self.local_loss)
            assert same(before, self.bits())

    def bits(self):
        return [p.detach().clone() for p in self.params]


def same(before, after):
    return all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


@pytest.mark.parametrize("cls", CLASSES)
def test_optimizer(lone_group, cls):
    is_slow = cls is torch.optim.LBFGS
    setting = Setting(lone_group, cls, {"lr": 0.01, "max_iter": 2} if is_slow else {})
    setting.refuses_local()
    setting.refuses_local()  # it goes on


@pytest.mark.parametrize("cls", [torch.optim.SGD, torch.optim.Adam])
def test_zero_redundancy_optimizer(lone_group, cls):
    setting = Setting(lone_group, torch.optim.SGD, {})
    setting.optimizer = ZeroRedundancyOptimizer(
        setting.params, cls, process_group=lone_group, lr=0.1
    )
    setting.refuses_local()


class Own(torch.optim.Optimizer):
    """Somebody's, with a wrapper around another one as schedulers and AMP have."""

    def __init__(self, params):
        super().__init__(params, {})

    @torch.no_grad()
    def step(self, closure=None):
        loss = None if closure is None else torch.enable_grad()(closure)()
        for group in self.param_groups:
            for param in group["params"]:
                param -= 0.1 * param.grad
        return loss


def test_somebodys_own(lone_group):
    """It may average the gradients itself, so what it made of them is compared."""
    setting = Setting(lone_group, Own, {})
    setting.step(setting.synchronised)
    for _ in range(2):
        with pytest.raises(UnsyncedGradientsError, match="on all ranks after the step"):
            setting.step(setting.local_loss)
    with pytest.raises(UnsyncedGradientsError, match="on all ranks after the step"):
        setting.optimizer.step(setting.closure(setting.local_loss))


def test_scheduler_around_it(lone_group):
    """A scheduler replaces ``optimizer.step`` by a wrapper."""
    setting = Setting(lone_group, torch.optim.SGD, {"lr": 0.1})
    torch.optim.lr_scheduler.StepLR(setting.optimizer, 1)
    setting.refuses_local()


@pytest.mark.slow
def test_compiled_step(lone_group):
    setting = Setting(lone_group, torch.optim.Adam, {"lr": torch.tensor(0.1)})
    step = torch.compile(setting.optimizer.step, backend="eager")
    for _ in range(2):
        setting.ddp.zero_grad()
        setting.synchronised()
        step()
    before = setting.bits()
    setting.ddp.zero_grad()
    setting.local_loss()
    with pytest.raises(UnsyncedGradientsError):
        step()
    assert same(before, setting.bits())
