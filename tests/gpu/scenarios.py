"""What ranks do, on any device; each on torch's DDP and on minidp.

A scenario is ``scenario(ctx, wrap, *args)``: tensors live on ``ctx.device``,
``wrap(module, **options)`` wraps on the group of ``ctx``, and what it returns is
compared bit for bit. Options and methods that only minidp has are for who has them:
without them a scenario does the same in torch's words.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

import minidp
from minidp import DataParallel, comm_hooks
from minidp.torch_compat.names import BUILTIN_HOOKS
from tests.support.both import grads
from tests.support.models import ModelSpec, ParamShape, Patchwork

SMALL = {"bucket_cap_mb": 64 / 2**20}  # several buckets
STEPS = 4


def exactly(ctx: Any, function: Any, *args: Any) -> Any:
    """Call a function with kernels that give the same bits each time."""
    backend = torch.backends.cudnn
    before = backend.deterministic, backend.benchmark, backend.allow_tf32
    backend.deterministic, backend.benchmark, backend.allow_tf32 = True, False, False
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        return function(ctx, *args)
    finally:
        torch.use_deterministic_algorithms(False)
        backend.deterministic, backend.benchmark, backend.allow_tf32 = before


# ------------------------------------------------------------------------------ models


class Net(nn.Module):
    """Matrices and vectors, small ones and one that is copied by its own hook."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(7, 7) for _ in range(3)])
        self.wide = nn.Linear(7, 3000)  # 84 KB
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.wide(x).mean(1, keepdim=True) * self.scale


def inputs(ctx: Any, step: int, *shape: int) -> torch.Tensor:
    """Other numbers on each rank, and in each step."""
    generator = torch.Generator().manual_seed(100 * step + ctx.rank)
    return torch.randn(shape or (5, 7), generator=generator).to(ctx.device)


def net(ctx: Any, kind: Any = Net) -> Any:
    """The same weights on all ranks."""
    torch.manual_seed(1)
    return kind().to(ctx.device)


def values(module: nn.Module) -> list[torch.Tensor]:
    """Copies of all parameters."""
    return [param.detach().clone() for param in module.parameters()]


# --------------------------------------------------------------------------- scenarios


def mixed_dtypes(ctx: Any, wrap: Any, options: dict[str, Any]) -> Any:
    """Every dtype, and all kinds of strides; buckets of each dtype."""
    shapes = [
        ParamShape((5, 3), dtype, strides)
        for dtype in ("fp32", "fp64", "bf16", "fp16", "complex64")
        for strides in ("contiguous", "transposed", "holes")
    ]
    shapes += [ParamShape((2, 3, 4, 5), "fp32", "channels_last"), ParamShape(())]
    spec = ModelSpec(tuple(shapes), (tuple(range(len(shapes))),))
    ddp = wrap(Patchwork(spec).to(ctx.device), **options)
    history = []
    for step in range(STEPS):
        (loss,) = ddp(inputs(ctx, step, 4, 3), (True,))
        loss.backward()
        history.append(grads(ddp))
        ddp.zero_grad(set_to_none=step % 2 == 0)
    return history


BUILTIN = {str(kind): kind for kind in BUILTIN_HOOKS}  # torch's, in C++
# The matrix has torch's allreduce and fp16 hooks.
HOOKS = ["fp16", "power_sgd", *BUILTIN]


def with_hook(ctx: Any, wrap: Any, name: str, options: dict[str, Any]) -> Any:
    """Torch's hooks on both; our fp16 beside torch's."""
    # In one bucket: several make PowerSGD hang on Gloo.
    ddp = wrap(net(ctx), **({} if name == "power_sgd" else SMALL), **options)
    if name in BUILTIN:
        ddp._register_builtin_comm_hook(BUILTIN[name])
    elif name == "fp16":
        ours = isinstance(ddp, DataParallel)
        hooks = comm_hooks if ours else default_hooks
        ddp.register_comm_hook(ctx.group, hooks.fp16_compress_hook)
    else:
        logging.getLogger(powerSGD_hook.__name__).setLevel(logging.ERROR)
        state = powerSGD_hook.PowerSGDState(ctx.group, start_powerSGD_iter=2)
        ddp.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    return _train(ctx, ddp)


def sparse_and_dense(ctx: Any, options: dict[str, Any]) -> Any:
    """Gradients of embeddings, sparse and not, that get the same small integers."""
    tables = [
        nn.Embedding(9, 4, sparse=sparse, device=ctx.device) for sparse in (True, False)
    ]
    models = [
        DataParallel(table, process_group=ctx.group, **options) for table in tables
    ]
    history = []
    for step in range(STEPS):
        generator = torch.Generator().manual_seed(100 * step + ctx.rank)
        tokens = torch.randint(9, (6,), generator=generator).to(ctx.device)
        for model in models:
            model.zero_grad()
            (model(tokens) * torch.arange(4.0, device=ctx.device)).sum().backward()
        assert tables[0].weight.grad.is_sparse
        history.append([table.weight.grad.to_dense().clone() for table in tables])
    return history


def _train(ctx: Any, ddp: Any) -> Any:
    history = []
    for step in range(STEPS):
        ddp.zero_grad(set_to_none=step != 2)
        ddp(inputs(ctx, step)).pow(2).sum().backward()
        history.append(grads(ddp))
    return history


def with_amp(ctx: Any, wrap: Any, options: dict[str, Any]) -> Any:
    """Autocast and a scaler, which skips the step of an overflow."""
    ddp = wrap(net(ctx), **options)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1, momentum=0.9)
    scaler = torch.amp.GradScaler(ctx.device.type, init_scale=2.0**8, growth_interval=2)
    history = []
    for step in range(6):
        optimizer.zero_grad()
        with torch.autocast(ctx.device.type, dtype=torch.float16):
            loss = ddp(inputs(ctx, step)).pow(2).sum()
        if step == 2:
            loss = loss * torch.inf
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(ddp.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        # After the overflow there are NaN, which are equal to nothing.
        numbers = [None if g is None else g.nan_to_num(nan=-7.0) for g in grads(ddp)]
        history.append((numbers, values(ddp), scaler.get_scale()))
    return history


class Image(nn.Module):
    """Convolutions with a norm between."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8)
        self.second = nn.Conv2d(8, 4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.relu(self.norm(self.first(x))))


def sync_batch_norm(ctx: Any) -> Any:
    """Gradients and module buffers on minidp."""
    module = minidp.SyncBatchNorm.convert_sync_batchnorm(net(ctx, Image), ctx.group)
    return _train_images(DataParallel(module, process_group=ctx.group), [ctx])


def full_batches(ctx: Any) -> Any:
    """The same without ranks: one process has the batches of all."""
    others = [replace(ctx, rank=rank) for rank in range(ctx.world_size)]
    return _train_images(net(ctx, Image), others)


def _train_images(module: Any, ranks: list[Any]) -> Any:
    """Gradients of all steps, then the module buffers; the loss is a rank's sum."""
    optimizer = torch.optim.SGD(module.parameters(), lr=0.01)
    history: list[Any] = []
    for step in range(STEPS):
        parts = [inputs(rank, step, 2 + rank.rank, 3, 6, 6) for rank in ranks]
        optimizer.zero_grad()
        (module(torch.cat(parts)).square().sum() / len(ranks)).backward()
        optimizer.step()
        history += grads(module)
    return history + [b.clone() for b in module.buffers()]


def moved_inputs(ctx: Any, wrap: Any) -> Any:
    """``device_ids``: inputs of the CPU, nested; what is no tensor stays."""
    ddp = wrap(Nested().to(ctx.device), device_ids=[ctx.device.index])
    history = []
    for step in range(STEPS):
        x = inputs(ctx, step).cpu()
        out = ddp([x, {"y": x + 1}], scale=(x[:1] * 2, 3.0))
        out.sum().backward()
        history.append((out.detach(), grads(ddp)))
    return history, str(ddp.device), ddp.device_ids, ddp.output_device


class Nested(nn.Module):
    """Takes tensors in lists, dicts and tuples."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.layer = nn.Linear(7, 7)

    def forward(self, xs: Any, *, scale: Any) -> torch.Tensor:
        first, second = xs
        return self.layer(first + second["y"]) * scale[0] * scale[1]


def auto_layout(ctx: Any, wrap: Any, options: dict[str, Any]) -> Any:
    """Until a layout stays; minidp only, gradients as with torch's layout."""
    ddp = wrap(net(ctx), **options)
    if isinstance(ddp, DataParallel):
        ddp = wrap(net(ctx), bucket_cap_mb="auto", **options)
    history = []
    for step in range(LAST_TRIAL):
        ddp.zero_grad()
        ddp(inputs(ctx, step)).pow(2).sum().backward()
        history.append(grads(ddp))
    if isinstance(ddp, DataParallel):
        is_final = ddp.bucket_layout["rebuilt"]
        assert is_final or ctx.world_size == 1, "no layout stays"
    return history


LAST_TRIAL = 52  # backwards; see _autotune


def recorded(ctx: Any, wrap: Any, options: dict[str, Any]) -> Any:
    """Gradients before and while minidp records; assert what the recording says."""
    ddp = wrap(net(ctx), **SMALL, **options)
    if not isinstance(ddp, DataParallel):
        return [_train(ctx, ddp) for _ in range(2)]
    found = [_train(ctx, ddp)]
    with minidp.record(ddp) as recording:
        found.append(_train(ctx, ddp))
    (timeline,) = recording.timelines
    assert timeline.where.device.startswith(ctx.device.type)
    assert len(timeline.steps) == STEPS
    for step in timeline.steps:
        begin = step.backward.begin_ns
        assert step.forwards[0].begin_ns < begin < step.backward.end_ns
        assert step.backward.end_ns <= step.finalize_end_ns < begin + 60e9
        assert len(step.buckets) > 1
    ready = timeline.steps[0].ready_ns
    assert sum(t is not None for t in ready) == 9, "the first step's hooks are timed"
    assert "backward" in recording.report()
    assert len(recording.gather().timelines) == ctx.world_size
    return found
