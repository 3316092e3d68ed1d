"""One replica of a training whose every committed step can be computed again.

Gradients are a function of parameters, replica and step. A parameter without effect,
`Net.who`, has the replica's own one-hot vector as gradient: what comes back is how much
each replica has contributed to the average.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

REPLICAS = 3
RATE = 0.01
SECONDS = timedelta(seconds=10)
PLACES = ("forward", "backward", "hook", "optimizer")  # where an exception is raised


class Raises(torch.autograd.Function):
    """The identity, whose backward calls a function."""

    @staticmethod
    def forward(ctx, x, call):
        ctx.call = call
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        ctx.call("backward")
        return grad, None


class Net(nn.Module):
    """A small regression in double precision."""

    def __init__(self, raises=lambda place: None):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(24, 24) for _ in range(4))
        self.who = nn.Parameter(torch.zeros(REPLICAS))
        self.raises = raises
        self.double()

    def forward(self, x, mine):
        self.raises("forward")
        x = torch.tanh(self.layers[1](torch.tanh(self.layers[0](x))))
        x = Raises.apply(x, self.raises)
        x = self.layers[3](torch.tanh(self.layers[2](x)))
        return x.square().mean() + (self.who * mine).sum()


def first_net(raises=lambda place: None):
    torch.manual_seed(3)
    return Net(raises)


def batch(replica, step):
    generator = torch.Generator().manual_seed(1000 * step + replica)
    return torch.randn(8, 24, generator=generator, dtype=torch.float64)


def one_hot(replica):
    return torch.eye(REPLICAS, dtype=torch.float64)[replica]


def trained(net):
    return [param for layer in net.layers for param in layer.parameters()]


def flat(net):
    return torch.cat([param.detach().flatten() for param in trained(net)])


def digest(net):
    return hashlib.sha256(flat(net).numpy().tobytes()).hexdigest()[:16]


class Stepper(torch.optim.SGD):
    """SGD that may raise when half of the parameters have stepped."""

    raises = staticmethod(lambda place: None)

    def step(self, closure=None):
        everything = self.param_groups[0]["params"]
        for half in (everything[:4], everything[4:]):
            self.param_groups[0]["params"] = half
            super().step()
            self.raises("optimizer")
        self.param_groups[0]["params"] = everything


def make_store():
    return dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)


def make_manager(replica, lighthouse, load, save, **options):
    from torchft import Manager, ProcessGroupGloo

    store = options.pop("store", None) or make_store()
    patience = options.pop("patience", SECONDS)
    manager = Manager(
        pg=options.pop("group", ProcessGroupGloo)(timeout=patience),
        load_state_dict=load,
        state_dict=save,
        replica_id=str(replica),
        store_addr="localhost",
        store_port=store.port,
        lighthouse_addr=lighthouse,
        **{"rank": 0, "world_size": 1, "min_replica_size": 1, "timeout": SECONDS}
        | {"quorum_timeout": 2 * SECONDS}
        | options,
    )
    manager.kept = store
    return manager


def wrap(name, manager, net):
    if name != "torchft":
        import minidp.torchft

        return minidp.torchft.DataParallel(manager, net, bucket_cap_mb=0.01)
    from torchft import DistributedDataParallel

    return DistributedDataParallel(manager, net, bucket_cap_mb=0.01)


def train(replica, lighthouse, folder, wrapper="minidp"):
    """Train until the file ``folder/stop`` names a step that is committed."""
    import logging

    from torchft import Optimizer

    logging.disable(logging.CRITICAL)
    said = os.open(f"{folder}/out.{replica}.{os.getpid()}", os.O_WRONLY | os.O_CREAT)
    os.dup2(said, 1)
    os.dup2(said, 2)
    torch.set_num_threads(1)
    folder = Path(folder)
    plan, stop = folder / f"{os.getpid()}.raise", folder / "stop"

    def raises(place):
        if plan.exists() and plan.read_text() == place:
            raise RuntimeError(f"raised in {place}")

    net = first_net(raises)
    model = optimizer = None

    def save():
        return {"net": net.state_dict(), "optimizer": optimizer.state_dict()}

    def load(state):
        net.load_state_dict(state["net"])
        optimizer.load_state_dict(state["optimizer"])

    manager = make_manager(replica, lighthouse, load, save)
    model = wrap(wrapper, manager, net)
    net.layers[2].weight.register_post_accumulate_grad_hook(lambda _: raises("hook"))
    inner = Stepper(trained(net), lr=RATE)
    inner.raises = raises
    optimizer = Optimizer(manager, inner)
    with open(folder / f"log.{replica}.{os.getpid()}", "a", buffering=1) as log:
        while not stop.exists() or manager.current_step() < int(stop.read_text()):
            began, step = time.time(), manager.current_step()
            x = batch(replica, step)
            optimizer.zero_grad()
            net.who.grad = None
            model(x, one_hot(replica)).backward()
            before = []  # stays empty if the step is not committed here
            inner_step = inner.step

            def noted(closure=None, run=inner_step, before=before):
                before.append(digest(net))  # who joins has just received it
                run()

            inner.step = noted
            try:
                optimizer.step()
            finally:
                inner.step = inner_step
            if before:
                note = {
                    "step": manager.current_step() - 1,
                    "before": before[0],
                    "after": digest(net),
                    "who": net.who.grad.tolist(),
                    "params": flat(net)[::97].tolist(),
                    "began": began,
                    "time": time.time(),
                    "replica": replica,
                }
                log.write(json.dumps(note) + "\n")
    os._exit(0)
