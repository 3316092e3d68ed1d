"""What is trained: features that torch's DDP has, too, and those of minidp alone."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.utils.checkpoint import checkpoint

import minidp
from minidp import DataParallel, comm_hooks
from tests.accelerator.training import SMALL, Run, conv_net, net

Tensors = list[torch.Tensor]

# ---------------------------------------------------------------- both, by options only

OPTIONS: dict[str, dict[str, Any]] = {
    "default": {},
    "small_buckets": SMALL,
    "views": {"gradient_as_bucket_view": True} | SMALL,
    "find_unused": {"find_unused_parameters": True} | SMALL,
    "static_graph": {"static_graph": True} | SMALL,
    "views_of_a_static_graph": {"static_graph": True, "gradient_as_bucket_view": True},
}


def with_options(run: Run, name: str) -> Tensors:
    """A training with options of torch."""
    return run.train(run.wrap(net().to(run.device()), **OPTIONS[name]))


def keeps_gradients(run: Run, name: str) -> Tensors:
    """The same with `zero_grad(set_to_none=False)`."""
    model = run.wrap(net().to(run.device()), **OPTIONS[name])
    return run.train(model, set_to_none=False)


# ----------------------------------------------------------------------- both, by calls


class Branches(nn.Module):
    """Uses one of its branches, another one in each step and on each rank."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.branches = nn.ModuleList(nn.Linear(12, 12) for _ in range(3))
        self.last = nn.Linear(12, 2)

    def forward(self, x: torch.Tensor, branch: int) -> torch.Tensor:
        return self.last(self.branches[branch % 3](x))


def unused_branches(run: Run) -> Tensors:
    """Parameters without gradient, others on each rank."""
    return _unused_branches(run, views=False, set_to_none=True)


def unused_branches_in_place(run: Run) -> Tensors:
    """The same with gradients that are views, and are kept."""
    return _unused_branches(run, views=True, set_to_none=False)


def _unused_branches(run: Run, *, views: bool, set_to_none: bool) -> Tensors:
    options = {"find_unused_parameters": True, "gradient_as_bucket_view": views}
    model = run.wrap(Branches().to(run.device()), **options, **SMALL)

    def step(n: int) -> None:
        model(run.batch(n), n + run.ctx.rank).square().mean().backward()

    return run.train(model, step=step, set_to_none=set_to_none)


def accumulation(run: Run) -> Tensors:
    """`no_sync` in two of three backwards."""
    model = run.wrap(net().to(run.device()), **SMALL)

    def step(n: int) -> None:
        with model.no_sync():
            for k in range(2):
                model(run.batch(10 * n + k)).square().mean().backward()
        model(run.batch(10 * n + 2)).square().mean().backward()

    return run.train(model, step=step)


def compressed(run: Run) -> Tensors:
    """The comm hook that sends fp16."""
    return _compressed(run, "fp16_compress_hook")


def compressed_to_bf16(run: Run) -> Tensors:
    """The comm hook that sends bf16."""
    return _compressed(run, "bf16_compress_hook")


def _compressed(run: Run, name: str) -> Tensors:
    model = run.wrap(net().to(run.device()), **SMALL)
    ours = isinstance(model, DataParallel)
    hooks: Any = comm_hooks if ours else default_hooks

    # By another name: torch refuses its hook for bf16 where there is no CUDA.
    def hook(state, bucket):  # type: ignore[no-untyped-def]  # torch would compare
        return getattr(hooks, name)(state, bucket)

    model.register_comm_hook(run.ctx.group, hook)
    return run.train(model)


def hook_of_the_user(run: Run) -> Tensors:
    """A comm hook with work of its own on the result."""

    def hook(state, bucket):  # type: ignore[no-untyped-def]  # torch would compare
        buffer = bucket.buffer().div_(2)
        work = torch.distributed.all_reduce(buffer, group=run.ctx.group, async_op=True)
        return work.get_future().then(lambda future: future.value()[0] * 1.5)

    model = run.wrap(net().to(run.device()), **SMALL)
    model.register_comm_hook(None, hook)
    return run.train(model)


def frozen(run: Run) -> Tensors:
    """Parameters that are not trained, among others that are."""
    module = net().to(run.device())
    for param in module[2].parameters():
        param.requires_grad = False
    return run.train(run.wrap(module, **SMALL))


def module_buffers(run: Run) -> Tensors:
    """Batch norms, whose buffers are sent from rank 0 before each forward."""
    model = run.wrap(conv_net().to(run.device()), **SMALL)
    torch.manual_seed(5)  # for the dropout

    def step(n: int) -> None:
        model(run.batch(n, 4, 3, 12, 12)).square().mean().backward()

    return run.train(model, step=step)


def synced_batch_norms(run: Run, kind: type[nn.SyncBatchNorm]) -> Tensors:
    """Batch norms over the batches of all ranks, which differ in size."""
    module = kind.convert_sync_batchnorm(conv_net(), run.ctx.group).double()
    module[6] = nn.Identity()  # a dropout would need other numbers on each rank
    model = run.wrap(module.to(run.device()), **SMALL)

    def step(n: int) -> None:
        batch = run.batch(n, 3 + run.ctx.rank, 3, 12, 12).double()
        model(batch).square().mean().backward()

    return run.train(model, step=step)


class Checkpointed(nn.Module):
    """Computes the activations of its first half again in the backward."""

    def __init__(self) -> None:
        super().__init__()
        layers = net()
        self.first, self.second = layers[:4], layers[4:]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(checkpoint(self.first, x, use_reentrant=False))


def activation_checkpointing(run: Run) -> Tensors:
    """Parts of the forward run in the backward."""
    return run.train(run.wrap(Checkpointed().to(run.device()), **SMALL))


class TwoDevices(nn.Module):
    """Its halves are on two devices."""

    def __init__(self, run: Run) -> None:
        super().__init__()
        layers = net()
        self.first = layers[:4].to(run.device(0))
        self.second = layers[4:].to(run.device(1))
        self.there = run.device(1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x).to(self.there, non_blocking=True))


def two_devices(run: Run) -> Tensors:
    """A process with parameters on two devices, where gradients are kept and added."""
    return run.train(run.wrap(TwoDevices(run), **SMALL), set_to_none=False)


class FarBranches(nn.Module):
    """One of two branches on device 0, and a layer on device 1."""

    def __init__(self, run: Run) -> None:
        super().__init__()
        torch.manual_seed(0)
        branches = nn.ModuleList(nn.Linear(12, 12) for _ in "ab")
        self.branches = branches.to(run.device(0))
        self.last = nn.Linear(12, 4).to(run.device(1))

    def forward(self, x: torch.Tensor, branch: int) -> torch.Tensor:
        found = self.branches[branch](x).to(self.last.weight.device, non_blocking=True)
        return self.last(found)


def unused_on_another_device(run: Run) -> Tensors:
    """Each rank uses another branch of device 0; the backward begins on device 1."""
    return _unused_on_another_device(run, views=False)


def unused_views_on_another_device(run: Run) -> Tensors:
    """The same, with gradients in buckets. Its first step takes a launch more."""
    return _unused_on_another_device(run, views=True)


def _unused_on_another_device(run: Run, *, views: bool) -> Tensors:
    options = {"find_unused_parameters": True, "gradient_as_bucket_view": views}
    model = run.wrap(FarBranches(run), bucket_cap_mb=0.5 / 1024, **options)

    def step(n: int) -> None:
        model(run.batch(n), run.ctx.rank).square().mean().backward()

    return run.train(model, step=step, set_to_none=False)


def large_layers(run: Run) -> Tensors:
    """Hooks copy the weights, and biases are left that do not adjoin."""
    return _large_layers(run)


def large_unused_layers(run: Run) -> Tensors:
    """The same with unused parameters, and local gradients."""
    return _large_layers(run, find_unused_parameters=True)


def _large_layers(run: Run, **options: bool) -> Tensors:
    torch.manual_seed(0)
    layers = nn.Sequential(*(nn.Linear(256, 256) for _ in range(4))).to(run.device())
    options["gradient_as_bucket_view"] = True
    model = run.wrap(layers, bucket_cap_mb=0.6, **options)

    def step(n: int) -> None:
        with model.no_sync():
            model(run.batch(n, 4, 256)).square().mean().backward()
        model(run.batch(n + 50, 4, 256)).square().mean().backward()

    return run.train(model, 3, step=step)


def lone_layers(run: Run) -> Tensors:
    """Each gradient has a bucket of its own."""
    torch.manual_seed(0)
    layers = [nn.Linear(size, size, bias=False) for size in (12, 12)]
    module = nn.Sequential(*layers).to(run.device())
    return run.train(run.wrap(module, bucket_cap_mb=0.1 / 1024))


def uneven_inputs(run: Run) -> Tensors:
    """`join`: rank 1 has two batches more than rank 0."""
    model = run.wrap(net().to(run.device()), **SMALL)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    with run.training(), model.join():
        for n in range(2 + 2 * run.ctx.rank):
            with run.count(run.costs):
                sgd.zero_grad()
                model(run.batch(n)).square().mean().backward()
                sgd.step()
    return [value.clone() for value in model.state_dict().values()]


def copied(run: Run) -> Tensors:
    """A deep copy of the module, wrapped and trained after the original."""
    module = net().to(run.device())
    found = run.train(run.wrap(module, **SMALL), 2)
    return found + run.train(run.wrap(copy.deepcopy(module), **SMALL), 2)


BOTH = (
    *(unused_branches, unused_branches_in_place, accumulation, frozen),
    *(compressed, compressed_to_bf16, hook_of_the_user, module_buffers),
    *(activation_checkpointing, two_devices, uneven_inputs, copied),
    *(unused_on_another_device, large_layers, large_unused_layers, lone_layers),
)

# ------------------------------------------------------------------------- minidp alone


def items(run: Run) -> Tensors:
    """Averages over items, of which each rank has another number."""
    model = run.wrap(net().to(run.device()), average_over="items", **SMALL)

    def step(n: int) -> None:
        batch = run.batch(n, 3 + (n + run.ctx.rank) % 3, 12)
        model.count_items(len(batch))
        model(batch).square().sum(1).sum().backward()

    return run.train(model, step=step)


def items_on_two_devices(run: Run) -> Tensors:
    """Averages that are kept are looked at from the other device."""
    return _items_on_two_devices(run, views=True)


def items_counted_on_another_device(run: Run) -> Tensors:
    """The count lies on each device in turn, the loss always on the second one."""
    return _items_on_two_devices(run, weighs=True)


def _items_on_two_devices(
    run: Run, *, weighs: bool = False, views: bool = False
) -> Tensors:
    options = {"average_over": "items", "gradient_as_bucket_view": views}
    model = run.wrap(TwoDevices(run), **options, **SMALL)

    def step(n: int) -> None:
        loss = model(run.batch(n)).square().mean()
        if weighs:
            count = torch.tensor(5.0 + run.ctx.rank).to(run.device(n % 2))
            loss = model.weigh_loss(loss, count)
        else:
            model.count_items(6, loss.detach())
        loss.backward()

    return run.train(model, step=step, set_to_none=False)


def replicas_checked(run: Run) -> Tensors:
    """Digests of the parameters are compared in each step."""
    return run.train(run.wrap(net().to(run.device()), check_replicas_every=1, **SMALL))


def finite(run: Run) -> Tensors:
    """Gradients are looked at for NaN."""
    return run.train(run.wrap(net().to(run.device()), check_finite_grads=True, **SMALL))


def automatic_buckets(run: Run) -> Tensors:
    """Layouts are tried and timed."""
    return run.train(run.wrap(net().to(run.device()), bucket_cap_mb="auto"), 30)


def lazy_buckets(run: Run) -> Tensors:
    """Buckets are allocated in the first backward."""
    return run.train(
        run.wrap(net().to(run.device()), lazy_bucket_allocation=True, **SMALL)
    )


def recorded(run: Run) -> Tensors:
    """All moments of a training are recorded."""
    model = run.wrap(net().to(run.device()), **SMALL)
    with minidp.record(model):
        return run.train(model)


def speed_watched(run: Run) -> Tensors:
    """Phases of all ranks are compared."""
    model = run.wrap(net().to(run.device()), **SMALL)
    watch = minidp.watch_speed(model)
    found = run.train(model)
    watch.stop()
    return found


def made_fresh(run: Run) -> Tensors:
    """A training that goes on after `reset`."""
    model = run.wrap(net().to(run.device()), **SMALL)
    found = run.train(model, 2)
    model.reset()
    return found + run.train(model, 2)


class Fails(torch.autograd.Function):
    """The identity, whose backward raises."""

    @staticmethod
    def forward(_ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(_ctx: Any, _grad: torch.Tensor) -> torch.Tensor:
        raise ValueError("out of luck")


def raised_and_reset(run: Run) -> Tensors:
    """A backward raises when some gradients are in their buckets already."""
    layers = net().to(run.device())
    middle = nn.Identity()
    module = nn.Sequential(layers[:4], middle, layers[4:])
    model = run.wrap(module, gradient_as_bucket_view=True, **SMALL)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    found: Tensors = []
    for _ in range(2):
        found += run.train(model, 2, optimizer=sgd, set_to_none=False)
        with run.training():
            sgd.zero_grad(set_to_none=False)
            middle.forward = Fails.apply
            loss = model(run.batch(9)).square().mean()
            try:
                loss.backward()
            except ValueError:
                del middle.forward
            del loss
            model.reset()
    return found + run.train(model, 2, optimizer=sgd, set_to_none=False)


def steps_in_backward(run: Run) -> Tensors:
    """The optimizer steps on each bucket as soon as that is reduced."""
    model = run.wrap(net().to(run.device()), **SMALL)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model.step_in_backward(sgd)

    def step(n: int) -> None:
        sgd.zero_grad()
        model(run.batch(n)).square().mean().backward()

    # The optimizer of `train` has nothing to do.
    nothing = torch.optim.SGD([torch.zeros(1, requires_grad=True)])
    return run.train(model, step=step, optimizer=nothing)


def attached(run: Run) -> Tensors:
    """Minidp inside a model that keeps its class."""
    model = net().to(run.device())
    with run.wrapping(model):
        attached = minidp.attach(model, process_group=run.ctx.group, **SMALL)
    with attached:
        return run.train(model)


def views_of_lazy_buckets(run: Run) -> Tensors:
    """Buckets that are allocated in the first backward, and gradients in them."""
    options = {"lazy_bucket_allocation": True, "gradient_as_bucket_view": True}
    return run.train(run.wrap(net().to(run.device()), **options, **SMALL))


def logical_ranks(run: Run, number: int = 4, **options: Any) -> Tensors:
    """Logical ranks, which on two ranks are one sum on each."""
    module = conv_net().to(run.device())
    options = {"logical_ranks": number} | SMALL | options
    model = run.wrap(module, **options)

    def step(n: int) -> None:
        for leaf in model.each_logical_rank():
            x = torch.randn(4, 3, 12, 12, generator=torch.Generator().manual_seed(leaf))
            x = x.pin_memory().to(run.device(), non_blocking=True)
            (model(x) + n).square().mean().backward()

    return run.train(model, step=step)


def logical_ranks_with_several_sums(run: Run) -> Tensors:
    """Two sums on one rank and two on the other, so that an order has to be kept."""
    return logical_ranks(run, 5)


def logical_ranks_and_views(run: Run) -> Tensors:
    """The sums of logical ranks are written to gradients in place."""
    return logical_ranks(run, 5, gradient_as_bucket_view=True)


def audited_logical_ranks(run: Run) -> Tensors:
    """The ranks compute logical ranks and sums again."""
    return logical_ranks(run, 5, audit_every=1)


OURS = (
    *(steps_in_backward, attached, items, replicas_checked, finite),
    *(items_on_two_devices, items_counted_on_another_device),
    *(unused_views_on_another_device, raised_and_reset),
    *(automatic_buckets, lazy_buckets, views_of_lazy_buckets),
    *(recorded, speed_watched, made_fresh),
    *(logical_ranks, logical_ranks_with_several_sums, logical_ranks_and_views),
    audited_logical_ranks,
)
