"""`SyncBatchNorm`: batch norm over the batches of all ranks, on the CPU too.

A training step on two ranks costs one all-gather and one all-reduce::

    forward                                    backward
    rank 0  x0 -> count, mean, M2 --.          dy0, x0 -> sums --.
                                    merge                        add
    rank 1  x1 -> count, mean, M2 --'          dy1, x1 -> sums --'
                                    |                            |
            y = (x - mean) / std    v          dx (formula of    v
            the same mean, std everywhere      all ranks' sums)

M2 is the sum of squared distances from the mean. Ranks exchange it, and not the sum of
squares, because the latter cancels where the mean is large. Gradients of weight and
bias stay sums over the local batch: averaging them is the job of `DataParallel`.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.lazy import LazyModuleMixin

from ._collectives import all_reduce, gather_rows
from ._groups import is_group, joined_group, side_group
from ._untraced import untraced
from ._waiting import wait_for
from ._watch import Watch
from .errors import CollectiveError, explain

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

# What a rank's forward lets its backward do; in the order of how much it takes part.
NO_BACKWARD, PARAMETERS_ONLY, INPUTS_TOO = range(3)


class SyncBatchNorm(nn.SyncBatchNorm):
    """torch's ``nn.SyncBatchNorm``, which also works on CPU tensors.

    In training mode, statistics are those of all ranks' batches together, also under
    ``torch.no_grad()`` and ``no_sync()``: every forward is a collective of the layer's
    ``process_group`` (None is the default group), and so is a backward that needs the
    gradient of the input. Batches may differ in number of samples between ranks, or be
    empty. Double backward works on CPU. On an accelerator it is torch's layer.
    """

    @untraced
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Normalise; a collective in training mode, never part of a compiled graph.

        Raises:
            ValueError: one value per channel in all ranks' batches together, or an
                input without channels.
            CollectiveError: the other ranks did not take part in time.
        """
        if not (input.is_cpu and self.training):
            return super().forward(input)
        self._check_input_dim(input)
        self._check_non_zero_input_channels(input)
        group = self._group()
        if group is None or group.size() == 1:
            return _BatchNorm.forward(self, input)
        self._check_against_parameters(input)
        batch = merge_moments(input, self._wants(input), group)
        if batch.count == 1:
            raise ValueError(
                explain(
                    group.rank(),
                    "Expected more than 1 value per channel when training, got input "
                    f"size {input.shape} and only one value on all ranks together.",
                )
            )
        if self.track_running_stats:
            self._track(batch)
        return _apply(_Normalize, input, self.weight, self.bias, batch, self.eps)

    def _group(self) -> ProcessGroup | None:
        group = joined_group(self.process_group)
        if group is not None and not is_group(group):
            raise TypeError(
                "process_group of a SyncBatchNorm must be a process group of which "
                f"this process is a member, but it is {group!r}."
            )
        return group

    def _check_against_parameters(self, input: torch.Tensor) -> None:
        """What batch norm's kernel would find, before other ranks wait for us."""
        if not input.is_floating_point():
            raise NotImplementedError(
                f"SyncBatchNorm needs floating-point inputs, but got {input.dtype}."
            )
        for mine in (self.weight, self.running_mean):
            if mine is not None and mine.numel() != input.size(1):
                raise RuntimeError(
                    f"SyncBatchNorm of {mine.numel()} channels got an input of shape "
                    f"{tuple(input.shape)}, with {input.size(1)} channels."
                )

    def _wants(self, input: torch.Tensor) -> int:
        tensors = (input, self.weight, self.bias)
        if not torch.is_grad_enabled() or not any(
            t is not None and t.requires_grad for t in tensors
        ):
            return NO_BACKWARD
        return INPUTS_TOO if input.requires_grad else PARAMETERS_ONLY

    @torch.no_grad()
    def _track(self, batch: Batch) -> None:
        """Update the running statistics, alike on all ranks."""
        factor = self.momentum
        if self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
            if factor is None:  # the plain average of all batches so far
                factor = 1.0 / int(self.num_batches_tracked)
        if self.running_mean is None or self.running_var is None or not batch.count:
            return
        unbiased = batch.var * (batch.count / (batch.count - 1))
        for running, new in (
            (self.running_mean, batch.mean),
            (self.running_var, unbiased),
        ):
            running.copy_(torch.lerp(running.double(), new, factor or 0.0))

    def __deepcopy__(self, memo: dict[int, Any]) -> SyncBatchNorm:
        """A copy in this process shares the group, which cannot be copied."""
        twin = type(self).__new__(type(self))
        memo[id(self)] = twin
        memo[id(self.process_group)] = self.process_group
        twin.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return twin

    @classmethod
    def convert_sync_batchnorm(
        cls, module: nn.Module, process_group: ProcessGroup | None = None
    ) -> nn.Module:
        """Replace every ``nn.BatchNorm*`` and ``nn.SyncBatchNorm`` by this class.

        The new layers take over parameters, module buffers, flags and hooks as they
        are. Convert before an optimizer or `DataParallel` sees the module, as in torch.

        Args:
            module: changed in place, unless it is such a layer itself.
            process_group: of the new layers; None leaves a ``nn.SyncBatchNorm`` its
                group, and is the default group for others.

        Returns:
            The module, or the new layer if the module is such a layer itself.

        Raises:
            RuntimeError: a lazy batch norm has no parameters yet; nothing is changed.
        """
        lazy = [
            f"{name or 'module'} ({type(layer).__name__})"
            for name, layer in module.named_modules()
            if isinstance(layer, _BatchNorm)
            and isinstance(layer, LazyModuleMixin)
            and layer.has_uninitialized_params()
        ]
        if lazy:
            raise RuntimeError(
                "Lazy batch norms without parameters can't be converted. Run a dummy "
                "forward pass to initialize them first. Uninitialized: "
                f"{', '.join(lazy)}."
            )
        return cls._convert(module, process_group, {})

    @classmethod
    def _convert(
        cls,
        module: nn.Module,
        process_group: ProcessGroup | None,
        done: dict[nn.Module, nn.Module],
    ) -> nn.Module:
        """``done`` keeps a layer that sits in two places one layer."""
        if module in done:
            return done[module]
        done[module] = module
        if isinstance(module, _BatchNorm):
            done[module] = cls._take_over(module, process_group)
        for name, child in list(module._modules.items()):
            if child is not None:
                module._modules[name] = cls._convert(child, process_group, done)
        return done[module]

    @classmethod
    def _take_over(
        cls, layer: _BatchNorm, process_group: ProcessGroup | None
    ) -> SyncBatchNorm:
        """The same state under our class, so that nothing is forgotten."""
        ours = cls.__new__(cls)
        ours.__dict__.update(layer.__dict__)
        ours.process_group = process_group or getattr(layer, "process_group", None)
        return ours


def refuse_torchs(module: nn.Module, device: torch.device) -> None:
    """Refuse torch's own layers in a CPU module: their forward would raise.

    Raises:
        ValueError: with their names.
    """
    if device.type != "cpu":
        return
    names = [
        name or "module"
        for name, layer in module.named_modules()
        if isinstance(layer, nn.SyncBatchNorm) and not isinstance(layer, SyncBatchNorm)
    ]
    if names:
        raise ValueError(
            "torch's SyncBatchNorm layers only work with GPU modules, but this module "
            f"is on the CPU: {', '.join(names)}. Pass "
            "minidp.SyncBatchNorm.convert_sync_batchnorm(module) instead."
        )


@dataclass(frozen=True)
class Batch:
    """The batches of all ranks, as one."""

    mean: torch.Tensor  # 1D float64, one element per channel
    var: torch.Tensor  # 1D float64, biased
    count: int  # values per channel
    wants: tuple[int, ...]  # by rank: what its forward lets its backward do
    group: ProcessGroup


@torch.no_grad()
def merge_moments(x: torch.Tensor, wants: int, group: ProcessGroup) -> Batch:
    """Collective: the mean and variance of all ranks' values, equal in every bit.

    Args:
        x: this rank's values, channels in dimension 1.
        wants: what this rank's forward lets its backward do.
        group: the ranks.
    """
    num_channels = x.size(1)
    count = x.numel() // num_channels
    x = x.to(_wide(x))
    mean = x.sum(_all_but_channels(x)) / max(count, 1)
    m2 = (x - _along(x, mean)).square_().sum(_all_but_channels(x))
    # float64 also counts exactly: 2**24 values, where float32 stops, are one big image.
    numbers = torch.tensor([count, wants], dtype=torch.float64)
    message = torch.cat([mean.double(), m2.double(), numbers])
    with _watch(group, "forward"):
        group = side_group(group)
        rows = gather_rows(message, group)
    means, m2s, counts, everyones_wants = rows.split([num_channels] * 2 + [1] * 2, 1)
    total = int(counts.sum())
    mean = (means * counts).sum(0) / max(total, 1)
    m2 = (m2s + counts * (means - mean).square()).sum(0)
    all_wants = tuple(int(value) for value in everyones_wants)
    return Batch(mean, m2 / max(total, 1), total, all_wants, group)


class _Normalize(torch.autograd.Function):
    """``(x - mean) / sqrt(var + eps) * weight + bias`` with all ranks' mean and var."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        batch: Batch,
        eps: float,
    ) -> torch.Tensor:
        """Local: the statistics are there already."""
        mean = batch.mean.to(_wide(x))
        invstd = (batch.var + eps).rsqrt().to(_wide(x))
        ctx.save_for_backward(x, weight, mean, invstd)
        ctx.batch, ctx.eps = batch, eps
        # Centered first: x * scale + shift would cancel where the mean is large.
        y = x - _along(x, mean)
        y.mul_(_along(x, invstd if weight is None else invstd * weight))
        if bias is not None:
            y.add_(_along(x, bias))
        return y.to(x.dtype)

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> Any:
        """Collective if any rank needs the gradient of its input."""
        x, weight, mean, invstd = ctx.saved_tensors
        batch: Batch = ctx.batch
        is_collective = INPUTS_TOO in batch.wants
        if is_collective:
            _expect_everyone(batch, with_graph=torch.is_grad_enabled())
        if is_collective and torch.is_grad_enabled():  # create_graph=True
            mean, invstd = _moments_of_inputs(x, batch, ctx.eps)
        x, dy = x.to(_wide(x)), dy.to(_wide(x))
        centered = x - _along(x, mean)
        sum_dy = dy.sum(_all_but_channels(x))
        sum_dy_centered = (dy * centered).sum(_all_but_channels(x))
        dx = None
        if is_collective:
            # Also for a rank that does not need dx: the others need its sums.
            sums = torch.cat([sum_dy, sum_dy_centered])
            means = _apply(_SumOverRanks, sums, batch.group) / max(batch.count, 1)
            mean_dy, mean_dy_centered = means.chunk(2)
            scale = invstd if weight is None else invstd * weight
            slope = -scale * mean_dy_centered * invstd.square()
            dx = torch.addcmul(
                torch.addcmul(_along(x, -mean_dy * scale), dy, _along(x, scale)),
                centered,
                _along(x, slope),
            )
        needs_dx, needs_dweight, needs_dbias, *_ = ctx.needs_input_grad
        return (  # the engine casts to the dtypes of x, weight and bias
            dx if needs_dx else None,
            sum_dy_centered * invstd if needs_dweight else None,
            sum_dy if needs_dbias else None,
            None,
            None,
        )


def _moments_of_inputs(
    x: torch.Tensor, batch: Batch, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Collective: mean and invstd again, with a graph to the inputs of all ranks."""
    x = x.to(_wide(x))
    count = max(batch.count, 1)
    mean = _apply(_SumOverRanks, x.sum(_all_but_channels(x)), batch.group) / count
    squares = (x - _along(x, mean)).square().sum(_all_but_channels(x))
    var = _apply(_SumOverRanks, squares, batch.group) / count
    return mean, (var + eps).rsqrt()


def _expect_everyone(batch: Batch, *, with_graph: bool) -> None:
    """All ranks see all wants, so all raise here instead of waiting for one another."""
    least = INPUTS_TOO if with_graph else PARAMETERS_ONLY
    absent = [str(rank) for rank, wants in enumerate(batch.wants) if wants < least]
    if absent:
        raise CollectiveError(
            explain(
                batch.group.rank(),
                "SyncBatchNorm cannot run its backward, which needs all ranks.",
                expected="every rank's input to require a gradient"
                if with_graph
                else "every rank's forward to have a backward",
                found=f"otherwise on rank(s) {', '.join(absent)}",
                remedy="use no_grad() and requires_grad alike on all ranks",
            )
        )


class _SumOverRanks(torch.autograd.Function):
    """A SUM over all ranks; so is its backward, as all ranks depend on the result."""

    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, group: ProcessGroup) -> torch.Tensor:
        """Collective."""
        ctx.group = group
        total = values.clone()
        with _watch(group, "backward"):
            wait_for(all_reduce(total, group))
        return total

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        """Collective."""
        return _apply(_SumOverRanks, grad, ctx.group), None


def _apply(function: type[torch.autograd.Function], *args: Any) -> torch.Tensor:
    result: torch.Tensor = function.apply(*args)
    return result


def _watch(group: ProcessGroup, which: str) -> Watch:
    return Watch(group).over(f"SyncBatchNorm ran its {which}")


def _wide(x: torch.Tensor) -> torch.dtype:
    """What to calculate in."""
    return torch.float64 if x.dtype is torch.float64 else torch.float32


def _all_but_channels(x: torch.Tensor) -> list[int]:
    return [0, *range(2, x.dim())]


def _along(x: torch.Tensor, per_channel: torch.Tensor) -> torch.Tensor:
    """A value per channel, shaped to broadcast over ``x``."""
    return per_channel.view(1, -1, *[1] * (x.dim() - 2))
