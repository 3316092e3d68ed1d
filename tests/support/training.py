"""One training as plain data: on torch's DDP, on minidp, and without either.

`Plain` is the oracle where torch is wrong: all replicas in one process, one line for
the average of their gradients, no bucket, no hook and no collective.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

from minidp import DataParallel

LEARNING_RATE = 0.1
CPU = torch.device("cpu")


@dataclass(frozen=True)
class Training:
    """What is trained, how it is wrapped, and what every rank does in every step."""

    parts: frozenset[str] = frozenset()  # of the module, see `Net`
    options: tuple[tuple[str, Any], ...] = ()
    delayed: bool = False  # the spare part travels last
    hooks: tuple[str, ...] = ()  # of HOOKS; more than one is refused
    counts: tuple[int, ...] = (6, 6)  # forwards of each rank
    joins: bool | None = None  # join(divide_by_initial_world_size=...); None: no join
    quiet: frozenset[int] = frozenset()  # forwards inside no_sync()
    zeroing: str = "Z"  # after each step, in turn: to None (Z), to zero (z), not (-)
    spare: tuple[tuple[bool, ...], ...] = ((True,),)  # [forward %][rank %]: part used

    def uses_spare(self, i: int, rank: int) -> bool:
        """Whether forward ``i`` of a rank uses the part named "spare"."""
        by_rank = self.spare[i % len(self.spare)]
        return by_rank[rank % len(by_rank)]

    def divisor(self, num_active: int) -> int:
        """Return what the sum of gradients is divided by while some ranks are active.

        Torch's hooks always divide by the world size.
        """
        by_active = self.joins is False and self.hooks in ((), ("by_divisor",))
        return num_active if by_active else len(self.counts)


@dataclass
class Log:
    """What one rank saw: the gradients after each backward, and the state at the end.

    The last gradients are those at the end: a rank that waits in join() keeps its own.
    """

    grads: list[list[torch.Tensor | None]] = field(default_factory=list)
    state: dict[str, torch.Tensor] = field(default_factory=dict)
    error: str = ""

    def note(self, module: nn.Module) -> None:
        """Append copies of the present gradients."""
        grads = [p.grad for p in module.parameters()]
        # Of sparse tensors it makes a new one, too.
        self.grads.append([g if g is None else g.clone().to_dense() for g in grads])

    def end(self, module: nn.Module) -> None:
        """Append the last gradients, and copy the state."""
        self.note(module)
        self.state = {name: t.clone() for name, t in module.state_dict().items()}


class Net(nn.Module):
    """Two layers, and more by name; no gradient is the same on two ranks or steps."""

    def __init__(self, parts: frozenset[str], seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.first, self.second = nn.Linear(3, 5), nn.Linear(5, 2)
        self.norm = nn.BatchNorm1d(3) if "batch_norm" in parts else None
        self.table = nn.Embedding(6, 3, sparse=True) if "sparse" in parts else None
        wave = nn.Parameter(torch.randn(3, 2, dtype=torch.complex64))
        self.wave = wave if "complex" in parts else None
        self.conv: nn.Module | None = None
        if "channels_last" in parts:
            conv = nn.Conv2d(3, 2, (1, 2))
            self.conv = conv.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.spare = nn.Linear(3, 2) if "spare" in parts else None
        self.never = nn.Linear(2, 2) if "never" in parts else None
        self.ignored = nn.Linear(3, 1) if "ignored" in parts else None
        if self.ignored is not None:
            names = [f"ignored.{name}" for name, _ in self.ignored.named_parameters()]
            self._ddp_params_and_buffers_to_ignore = names

    def forward(self, x: torch.Tensor, *, use_spare: bool = True) -> torch.Tensor:
        """Return the loss; ``x`` is (4, 3)."""
        if self.norm is not None:
            x = self.norm(x)
        if self.table is not None:
            rows = (x.detach().abs() * 10).long() % 6
            x = x + self.table(rows).mean(1)
        y = self.second(torch.tanh(self.first(x)))
        if self.wave is not None:
            y = y + (x.to(torch.complex64) @ self.wave).abs()
        if self.conv is not None:
            y = y + self.conv(x.reshape(2, 3, 1, 2)).reshape(4, 1)
        if self.spare is not None and use_spare:
            y = y + torch.tanh(self.spare(x))
        if self.ignored is not None:
            y = y * torch.sigmoid(self.ignored(x))
        loss: torch.Tensor = y.pow(2).mean()
        return loss

    def is_shared(self, name: str) -> bool:
        """Whether the wrapper does not ignore this parameter or module buffer."""
        return not name.startswith("ignored")


def inputs_of(rank: int, i: int) -> torch.Tensor:
    """Return the input of forward ``i`` of a rank."""
    return torch.randn(4, 3, generator=torch.Generator().manual_seed(100 * rank + i))


def by_divisor(_state: Any, bucket: Any) -> Any:
    """Average over the bucket's divisor: in join(), the ranks that are still active."""
    buffer = bucket.buffer().div_(bucket.divisor())
    work = dist.all_reduce(buffer, group=bucket.process_group(), async_op=True)
    return work.get_future().then(lambda _: buffer)


HOOKS: dict[str, Any] = {
    "allreduce": default_hooks.allreduce_hook,
    "fp16": default_hooks.fp16_compress_hook,
    "by_divisor": by_divisor,  # of minidp only
}


def train(
    training: Training,
    wrapper: Callable[..., Any],
    group: dist.ProcessGroup,
    device: torch.device = CPU,
) -> Log:
    """Run a training on this rank, until its end or an error."""
    log, rank = Log(), group.rank()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            ddp = _wrapped(training, wrapper, group, device)
            has_join = training.joins is not None
            with ddp.join(training.joins) if has_join else nullcontext():
                _train(training, ddp, rank, log)
        except Exception as error:
            log.error = f"{type(error).__name__}: {error}"
            return log
    log.end(ddp.module)
    return log


def train_both(
    ctx: Any, training: Training, with_torch: bool = True
) -> tuple[Log, Log | None]:
    """Run a training on minidp and on torch's DDP; return both logs of this rank."""
    ours = train(training, DataParallel, ctx.group, ctx.device)
    if not with_torch:
        return ours, None
    return ours, train(training, DistributedDataParallel, ctx.group, ctx.device)


def _wrapped(
    training: Training, wrapper: Any, group: dist.ProcessGroup, device: torch.device
) -> Any:
    net = Net(training.parts, seed=group.rank()).to(device)
    options = dict(training.options)
    if training.delayed:
        assert net.spare is not None
        options["delay_all_reduce_named_params"] = [
            (f"spare.{name}", param) for name, param in net.spare.named_parameters()
        ]
        # Torch's reduction starts here, so it has to be the last gradient.
        options["param_to_hook_all_reduce"] = net.first.weight
    ddp = wrapper(net, process_group=group, **options)
    for name in training.hooks:
        ddp.register_comm_hook(group, HOOKS[name])
    return ddp


def _train(training: Training, ddp: Any, rank: int, log: Log) -> None:
    optimizer = torch.optim.SGD(ddp.parameters(), lr=LEARNING_RATE)
    device = next(ddp.parameters()).device
    num_steps = 0
    for i in range(training.counts[rank]):
        use_spare = training.uses_spare(i, rank)
        with ddp.no_sync() if i in training.quiet else nullcontext():
            ddp(inputs_of(rank, i).to(device), use_spare=use_spare).backward()
        log.note(ddp.module)
        if i not in training.quiet:
            optimizer.step()
            _zero(training, num_steps, ddp)
            num_steps += 1


def _zero(training: Training, step: int, module: nn.Module) -> None:
    how = training.zeroing[step % len(training.zeroing)]
    if how != "-":
        module.zero_grad(set_to_none=how == "Z")


class Plain:
    """Run a training of all ranks in one process, without any wrapper: the oracle."""

    def __init__(self, training: Training) -> None:
        self._training = training
        ranks = range(len(training.counts))
        self.nets = [Net(training.parts, seed=rank) for rank in ranks]
        self.logs = [Log() for _ in ranks]
        self._copy_state(0)
        self._are_buffers_due = True
        self._is_static = ("static_graph", True) in training.options
        self._num_steps = 0
        self._users: set[int] = set()  # ranks that used the spare part since a step

    def run(self) -> list[Log]:
        """Return the log that each rank should have."""
        training = self._training
        num_forwards = max(training.counts)
        for i in range(num_forwards):
            self._forward(i, [r for r, n in enumerate(training.counts) if n > i])
        if training.joins is not None:
            last = max(r for r, n in enumerate(training.counts) if n == num_forwards)
            self._copy_state(last)
        for net, log in zip(self.nets, self.logs, strict=True):
            log.end(net)
        return self.logs

    def _forward(self, i: int, active: Sequence[int]) -> None:
        training, is_quiet = self._training, i in self._training.quiet
        if self._are_buffers_due:
            root = 0 if training.joins is None else max(active)
            self._copy_state(root, parameters=False)
        self._are_buffers_due = not is_quiet
        for rank in active:
            use_spare = training.uses_spare(i, rank)
            self.nets[rank](inputs_of(rank, i), use_spare=use_spare).backward()
            if use_spare:
                self._users.add(rank)
        if not is_quiet:
            self._average(active)
        for rank in active:
            self.logs[rank].note(self.nets[rank])
            if not is_quiet:
                torch.optim.SGD(self.nets[rank].parameters(), lr=LEARNING_RATE).step()
                _zero(training, self._num_steps, self.nets[rank])
        self._num_steps += not is_quiet

    def _average(self, active: Sequence[int]) -> None:
        divisor = self._training.divisor(len(active))
        if not (self._is_static and self._num_steps):  # the first backward settles it
            self._users.intersection_update(active)
        by_name = [dict(net.named_parameters()) for net in self.nets]
        for name in by_name[0]:
            part = name.split(".")[0]
            is_unused = part == "never" or (part == "spare" and not self._users)
            if is_unused or not self.nets[0].is_shared(name):
                continue
            grads = [by_name[rank][name].grad for rank in active]
            present = [g for g in grads if g is not None]
            zeros = torch.zeros_like(by_name[0][name])
            # Sparse gradients can be added to each other, not to dense zeros.
            total = sum(present[1:], present[0]) if present else zeros
            for rank in active:
                by_name[rank][name].grad = total / divisor
        if not self._is_static:
            self._users.clear()

    def _copy_state(self, root: int, *, parameters: bool = True) -> None:
        left_out = set() if parameters else dict(self.nets[root].named_parameters())
        for name, value in self.nets[root].state_dict().items():
            if self.nets[root].is_shared(name) and name not in left_out:
                for net in self.nets:
                    net.state_dict()[name].copy_(value)


def difference(expected: Log, found: Log, *, tolerance: float = 0.0) -> str:
    """Return where two logs differ; empty if nowhere. Tolerance 0: bit for bit."""
    if expected.error or found.error:
        return f"expected {expected.error or 'no error'}, got {found.error or 'none'}"
    if len(expected.grads) != len(found.grads):
        return f"{len(found.grads)} backwards, expected {len(expected.grads)}"
    for i, (theirs, ours) in enumerate(zip(expected.grads, found.grads, strict=True)):
        for k, (a, b) in enumerate(zip(theirs, ours, strict=True)):
            if not is_same(a, b, tolerance):
                return f"backward {i}: grad {k} is {short(b)}, expected {short(a)}"
    for name, value in expected.state.items():
        if not is_same(value, found.state[name], tolerance):
            return f"{name} is {short(found.state[name])}, expected {short(value)}"
    return ""


def is_same(
    a: torch.Tensor | None, b: torch.Tensor | None, tolerance: float = 0.0
) -> bool:
    """Whether two tensors have the same dtype, shape and values, or both are None."""
    if a is None or b is None:
        return a is b
    if a.dtype is not b.dtype or a.shape != b.shape:
        return False
    if not tolerance:
        return torch.equal(a, b)
    return torch.allclose(a, b, rtol=tolerance, atol=tolerance)


def short(tensor: torch.Tensor | None) -> str:
    """Return the first values as text."""
    return "None" if tensor is None else str(tensor.flatten()[:3].tolist())
