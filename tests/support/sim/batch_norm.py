"""The kernels of torch's `SyncBatchNorm`, of which the CPU has none.

They are composed of other operators, each of which is a launch of its own, and compute
as those of CUDA do: moments of 32 bits, or 64 for such inputs, which are merged by the
formula of Chan, Golub and LeVeque. So their bits are not those of minidp's layer on the
CPU, which merges all of them in 64.
"""

from __future__ import annotations

import torch
from torch import Tensor

Moments = tuple[Tensor, Tensor]  # mean and 1 / std, per channel


def register() -> None:
    """Let torch's operators find the kernels. A process can do this once."""
    for kernel in (
        *(batch_norm_stats, batch_norm_gather_stats_with_counts, batch_norm_elemt),
        *(batch_norm_backward_reduce, batch_norm_backward_elemt),
    ):
        _library.impl(kernel.__name__, kernel, "PrivateUse1")


_library = torch.library.Library("aten", "IMPL")


def batch_norm_stats(x: Tensor, eps: float) -> Moments:
    """Return the moments of this rank's batch."""
    wide = _wide(x)
    mean = wide.mean(_dims(x))
    var = (wide - _along(x, mean)).square().mean(_dims(x))
    return mean, (var + eps).rsqrt()


def batch_norm_gather_stats_with_counts(
    x: Tensor,
    means: Tensor,
    invstds: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    momentum: float,
    eps: float,
    counts: Tensor,
) -> Moments:
    """Return the moments of all ranks' batches, and let them move the running ones."""
    shares = counts.to(means.dtype).view(-1, 1)
    total = shares.sum()
    mean = (means * shares).sum(0) / total
    variances = invstds.square().reciprocal() - eps
    m2 = ((variances + (means - mean).square()) * shares).sum(0)
    if running_mean is not None:
        running_mean.lerp_(mean.to(running_mean.dtype), momentum)
    if running_var is not None:
        running_var.lerp_((m2 / (total - 1)).to(running_var.dtype), momentum)
    return mean, (m2 / total + eps).rsqrt()


def batch_norm_elemt(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    mean: Tensor,
    invstd: Tensor,
    eps: float,
) -> Tensor:
    """Return the normalised batch."""
    scale = invstd if weight is None else invstd * weight
    y = (_wide(x) - _along(x, mean)) * _along(x, scale)
    return (y if bias is None else y + _along(x, bias)).to(x.dtype)


def batch_norm_backward_reduce(
    dy: Tensor,
    x: Tensor,
    mean: Tensor,
    invstd: Tensor,
    weight: Tensor | None,
    input_g: bool,
    weight_g: bool,
    bias_g: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return what ranks add up, and the gradients of weight and bias."""
    sum_dy = _wide(dy).sum(_dims(x))
    sum_dy_xmu = (_wide(dy) * (_wide(x) - _along(x, mean))).sum(_dims(x))
    like = mean if weight is None else weight
    return sum_dy, sum_dy_xmu, (sum_dy_xmu * invstd).to(like), sum_dy.to(like)


def batch_norm_backward_elemt(
    dy: Tensor,
    x: Tensor,
    mean: Tensor,
    invstd: Tensor,
    weight: Tensor | None,
    sum_dy: Tensor,
    sum_dy_xmu: Tensor,
    counts: Tensor,
) -> Tensor:
    """Return the gradient of this rank's batch."""
    total = counts.sum()
    slope = sum_dy_xmu / total * invstd.square()
    centered = _wide(x) - _along(x, mean)
    dx = _wide(dy) - _along(x, sum_dy / total) - centered * _along(x, slope)
    return (dx * _along(x, invstd if weight is None else invstd * weight)).to(x.dtype)


def _wide(x: Tensor) -> Tensor:
    return x if x.dtype is torch.float64 else x.float()


def _dims(x: Tensor) -> list[int]:
    return [dim for dim in range(x.dim()) if dim != 1]


def _along(x: Tensor, values: Tensor) -> Tensor:
    return values.view(-1, *[1] * (x.dim() - 2))
