"""`SyncBatchNorm`: batch norm over the batches of all ranks, on the CPU too.

A batch norm that sees only the batch of its own rank estimates mean and variance from
few samples, and each rank normalises differently. This layer merges the statistics of
all ranks, so that the result is that of one large batch. Torch has such a layer for
accelerators only.

A training step on two ranks costs one all-gather and one all-reduce:

    forward                                    backward
    rank 0  x0 -> count, mean, M2 --.          dy0, x0 -> sums --.
                                    merge                        add
    rank 1  x1 -> count, mean, M2 --'          dy1, x1 -> sums --'
                                    |                            |
            y = (x - mean) / std    v          dx (formula of    v
            the same mean, std everywhere      all ranks' sums)

M2 is the sum of squared distances from the mean. It is merged by the formula of Chan,
Golub and LeVeque ("Algorithms for Computing the Sample Variance", 1983), because the
difference of two sums, E[x^2] - E[x]^2, loses all digits where the mean is large. The
gradients of weight and bias stay sums over the local batch: `DataParallel` averages
them like those of any other parameter.

The layer needs no wrapper. Inside of one, its waits are those of the wrapper: they have
the same limit, hear of the same ranks, and leave the wrapper to `DataParallel.reset`.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.lazy import LazyModuleMixin

from .comm import (
    Communicator,
    ProcessGroup,
    all_reduce,
    gather_rows,
    group_ranks,
    joined_group,
    side_group,
    wait_for,
)
from .core import Reducer, untraced
from .errors import CollectiveError, explain

# How far a rank takes part in the backward.
NO_BACKWARD, PARAMETERS_ONLY, INPUTS_TOO = range(3)
_PURPOSE = "layers"  # of the side group on which layers communicate
# The reducer of the wrapper in which a layer was wrapped last.
_reducers: WeakKeyDictionary[nn.Module, weakref.ref[Reducer]] = WeakKeyDictionary()


class SyncBatchNorm(nn.SyncBatchNorm):
    """Torch's ``nn.SyncBatchNorm``, which also works on CPU tensors.

    In training mode all ranks of the layer's process group must run each forward
    together, also under ``torch.no_grad()`` and ``no_sync()``, because it communicates.
    The same holds for the backward if the input of any rank requires a gradient. The
    ranks' batches may differ in size, and may be empty. A double backward works on the
    CPU. On an accelerator this is torch's own layer, tried on the tests' simulated
    device only.
    """

    @untraced
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Normalise the input by all ranks' statistics, and update the running ones.

        ``torch.compile`` leaves this method out, because it communicates.

        Args:
            input: A floating-point tensor of shape (samples, channels, ...).

        Returns:
            A tensor of the shape and dtype of the input.

        Raises:
            TypeError: This process is not a member of the process group.
            ValueError: All ranks together have one value per channel, which has no
                variance; or the input has no channels.
            NotImplementedError: The input is not of floating-point numbers.
            RuntimeError: The input has another number of channels than this layer.
            CollectiveError: Other ranks do not take part in time.
        """
        if not (input.is_cpu and self.training):
            return super().forward(input)
        self._check_input_dim(input)
        self._check_non_zero_input_channels(input)
        group = joined_group(self.process_group)
        if group is not None and not isinstance(group, ProcessGroup):
            raise TypeError(
                "process_group of a SyncBatchNorm must be a process group of which "
                f"this process is a member, but it is {group!r}."
            )
        if group is None or group.size() == 1:
            return _BatchNorm.forward(self, input)
        self._check_against_parameters(input)
        wants = INPUTS_TOO if input.requires_grad else PARAMETERS_ONLY
        tensors = [t for t in (input, self.weight, self.bias) if t is not None]
        if not torch.is_grad_enabled() or not any(t.requires_grad for t in tensors):
            wants = NO_BACKWARD
        batch = merge_moments(input, wants, group, _reducer_of(self, group))
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

    def _check_against_parameters(self, input: torch.Tensor) -> None:
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

    @torch.no_grad()
    def _track(self, batch: Batch) -> None:
        """Count the batch, and let it move the running mean and variance."""
        factor = self.momentum
        if self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
            if factor is None:  # the plain average of all batches so far
                factor = 1.0 / int(self.num_batches_tracked)
        if self.running_mean is None or self.running_var is None or not batch.count:
            return
        unbiased = batch.var * (batch.count / (batch.count - 1))
        pairs = (self.running_mean, batch.mean), (self.running_var, unbiased)
        for running, new in pairs:
            running.copy_(torch.lerp(running.double(), new, factor or 0.0))

    def __deepcopy__(self, memo: dict[int, Any]) -> SyncBatchNorm:
        """Return a deep copy that shares the process group, which cannot be copied."""
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

        The new layers share parameters, module buffers, flags and hooks with the old.

        Args:
            module: The module, whose layers are replaced in place.
            process_group: The ranks whose batches are normalised together. With None, a
                ``nn.SyncBatchNorm`` keeps its group, and other layers get the default.

        Returns:
            The module, or the new layer if the module is a batch norm layer itself.

        Raises:
            RuntimeError: A lazy batch norm has no parameters yet. Nothing is replaced.
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
        layers: dict[nn.Module, nn.Module] = {}
        for layer in module.modules():  # a shared layer stays one layer
            if isinstance(layer, _BatchNorm):
                layers[layer] = ours = cls.__new__(cls)
                ours.__dict__.update(layer.__dict__)
                old_group = getattr(layer, "process_group", None)
                ours.process_group = process_group or old_group
        for parent in list(module.modules()):
            for name, child in parent._modules.items():
                if child in layers:
                    parent._modules[name] = layers[child]
        return layers.get(module, module)


def refuse_torchs(module: nn.Module, device: torch.device) -> None:
    """Refuse layers of torch's SyncBatchNorm in a module on the CPU.

    Raises:
        ValueError: There are some; the text names them.
    """
    names = [
        name or "module"
        for name, layer in module.named_modules()
        if isinstance(layer, nn.SyncBatchNorm) and not isinstance(layer, SyncBatchNorm)
    ]
    if names and device.type == "cpu":
        raise ValueError(
            "torch's SyncBatchNorm layers only work with GPU modules, but this module "
            f"is on the CPU: {', '.join(names)}. Pass "
            "minidp.SyncBatchNorm.convert_sync_batchnorm(module) instead."
        )


def adopt_layers(module: nn.Module, reducer: Reducer) -> None:
    """Let the layers in a wrapped module wait as its wrapper does, and fail with it.

    This communicates nothing. A layer that is in several wrappers belongs to the last.
    """
    for layer in module.modules():
        if isinstance(layer, SyncBatchNorm):
            _reducers[layer] = weakref.ref(reducer)


def connect_layers(module: nn.Module) -> None:
    """Create the groups on which the layers in a wrapped module will communicate.

    All ranks of the wrapper must call it together. Without it the first forward creates
    them. There a rank that raises before it would leave the others waiting until the
    timeout of the process group, because no limit ends a wait for a connection.
    """
    for layer in module.modules():
        if isinstance(layer, SyncBatchNorm):
            group = joined_group(layer.process_group)
            if not isinstance(group, ProcessGroup) or group.size() == 1:
                continue
            if _reducer_of(layer, group) is not None:
                side_group(group, _PURPOSE)


def _reducer_of(layer: nn.Module, group: ProcessGroup) -> weakref.ref[Reducer] | None:
    """Return the reducer of a layer's wrapper, if that knows all ranks of the group.

    It is None without a wrapper. A wrapper on another device is left out, because there
    the host does not wait, as it does here.
    """
    reference = _reducers.get(layer)
    reducer = None if reference is None else reference()
    if reducer is None or reducer.communicator.device.type != "cpu":
        return None
    known = reducer.communicator.group
    mine = group_ranks(group)
    is_known = known is group or (mine and {*mine} <= {*group_ranks(known)})
    return reference if is_known else None


@dataclass(frozen=True)
class Batch:
    """The statistics of all ranks' batches, and which ranks will run a backward."""

    mean: torch.Tensor  # float64, shape (channels,)
    var: torch.Tensor  # float64, shape (channels,): biased, so divided by `count`
    count: int  # values per channel on all ranks together
    wants: tuple[int, ...]  # for each rank: how far it takes part in the backward
    group: ProcessGroup  # the group on which the backward communicates
    reducer: weakref.ref[Reducer] | None  # that of the wrapper


@torch.no_grad()
def merge_moments(
    x: torch.Tensor,
    wants: int,
    group: ProcessGroup,
    reducer: weakref.ref[Reducer] | None,
) -> Batch:
    """Return the `Batch` of all ranks, which is equal on each of them.

    All ranks of the group must call it together. It communicates on a side group, as
    the backward does later: buckets are on their way on the group itself meanwhile, and
    a collective between them would come in another order on each rank.

    Args:
        x: This rank's input; dimension 1 counts the channels.
        wants: How far this rank takes part in the backward.
        group: The group whose ranks are normalised together.
        reducer: The reducer of the wrapper, if there is one.
    """
    num_channels = x.size(1)
    count = x.numel() // num_channels
    x = x.to(_wide(x))
    mean = x.sum(_all_but_channels(x)) / max(count, 1)
    m2 = (x - _along(x, mean)).square_().sum(_all_but_channels(x))
    # float64 also counts exactly: 2**24 values, where float32 stops, are one big image.
    numbers = torch.tensor([count, wants], dtype=torch.float64, device=x.device)
    message = torch.cat([mean.double(), m2.double(), numbers])
    with _watch(group, reducer, "forward"):
        group = side_group(group, _PURPOSE)
        rows = gather_rows(message, group)
    means, m2s, counts, everyones_wants = rows.split([num_channels] * 2 + [1] * 2, 1)
    total = int(counts.sum())
    mean = (means * counts).sum(0) / max(total, 1)
    m2 = (m2s + counts * (means - mean).square()).sum(0)
    all_wants = tuple(int(value) for value in everyones_wants)
    return Batch(mean, m2 / max(total, 1), total, all_wants, group, reducer)


class _Normalize(torch.autograd.Function):
    """Compute ``(x - mean) / sqrt(var + eps) * weight + bias``."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        batch: Batch,
        eps: float,
    ) -> torch.Tensor:
        """Return ``x`` normalised by ``batch``, in the dtype of ``x``."""
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
        """Return the gradients of x, weight and bias.

        If x needs a gradient on any rank, all ranks must call this together.

        Raises:
            CollectiveError: A rank will not take part. All ranks raise it.
        """
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
            means = _apply(_SumOverRanks, sums, batch) / max(batch.count, 1)
            mean_dy, mean_dy_centered = means.chunk(2)
            scale = invstd if weight is None else invstd * weight
            slope = -scale * mean_dy_centered * invstd.square()
            dx = torch.addcmul(_along(x, -mean_dy * scale), dy, _along(x, scale))
            dx = torch.addcmul(dx, centered, _along(x, slope))
        # The engine casts to the dtypes of x, weight and bias.
        grads = (dx, sum_dy_centered * invstd, sum_dy)
        needed = zip(grads, ctx.needs_input_grad, strict=False)
        return (*(grad if needs else None for grad, needs in needed), None, None)


def _moments_of_inputs(
    x: torch.Tensor, batch: Batch, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return mean and 1 / std per channel, as differentiable functions of all ranks' x.

    All ranks must call it together. A double backward needs it, because there the
    numbers that the forward has sent carry no graph.
    """
    x = x.to(_wide(x))
    count = max(batch.count, 1)
    mean = _apply(_SumOverRanks, x.sum(_all_but_channels(x)), batch) / count
    squares = (x - _along(x, mean)).square().sum(_all_but_channels(x))
    var = _apply(_SumOverRanks, squares, batch) / count
    return mean, (var + eps).rsqrt()


def _expect_everyone(batch: Batch, *, with_graph: bool) -> None:
    """Refuse a backward that some rank will not run.

    All ranks know that without a message, because the forward has sent it.

    Args:
        batch: What the forward has exchanged.
        with_graph: Whether the backward has ``create_graph=True``. Then each rank's
            input must require a gradient, too.

    Raises:
        CollectiveError: A rank will not take part. All ranks raise it.
    """
    least, expected = PARAMETERS_ONLY, "every rank's forward to have a backward"
    if with_graph:
        least, expected = INPUTS_TOO, "every rank's input to require a gradient"
    absent = [str(rank) for rank, wants in enumerate(batch.wants) if wants < least]
    if absent:
        raise CollectiveError(
            explain(
                batch.group.rank(),
                "SyncBatchNorm cannot run its backward, which needs all ranks.",
                expected=expected,
                found=f"otherwise on rank(s) {', '.join(absent)}",
                remedy="use no_grad() and requires_grad alike on all ranks",
            )
        )


class _SumOverRanks(torch.autograd.Function):
    """Sum over all ranks. All use the result, so that gradients are summed, too."""

    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, batch: Batch) -> torch.Tensor:
        """Return the sum of ``values`` over all ranks, which must call it together."""
        ctx.batch = batch
        total = values.clone()
        with _watch(batch.group, batch.reducer, "backward"):
            wait_for(all_reduce(total, batch.group))
        return total

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        """Return the sum of ``grad`` over all ranks, which must call it together."""
        return _apply(_SumOverRanks, grad, ctx.batch), None


def _apply(function: type[torch.autograd.Function], *args: Any) -> torch.Tensor:
    result: torch.Tensor = function.apply(*args)
    return result


@contextmanager
def _watch(
    group: ProcessGroup, reference: weakref.ref[Reducer] | None, which: str
) -> Iterator[None]:
    """Limit the waits in a block, and let errors say which pass waited, and for whom.

    In a wrapper an error is one of its reducer, too: the next forward would take the
    messages that other ranks have sent to this one.
    """
    reducer = None if reference is None else reference()
    doing = f"SyncBatchNorm ran its {which}"
    if reducer is None:
        with Communicator(group).watching(doing):
            yield
        return
    try:
        with reducer.communicator.beside(doing):
            yield
    except BaseException as error:
        reducer.fail(error)
        raise


def _wide(x: torch.Tensor) -> torch.dtype:
    """Return the dtype in which to calculate, which is never one of 16 bits."""
    return torch.float64 if x.dtype is torch.float64 else torch.float32


def _all_but_channels(x: torch.Tensor) -> list[int]:
    return [0, *range(2, x.dim())]


def _along(x: torch.Tensor, per_channel: torch.Tensor) -> torch.Tensor:
    """Reshape one value per channel so that it broadcasts over ``x``."""
    return per_channel.view(1, -1, *[1] * (x.dim() - 2))
