"""Small modules as plain data: drawn in the parent, built alike in every rank."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

DTYPES = {
    "fp32": torch.float32,
    "fp64": torch.float64,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "complex64": torch.complex64,
}


@dataclass(frozen=True)
class ParamShape:
    """One parameter of a `Patchwork`."""

    shape: tuple[int, ...]
    dtype: str = "fp32"
    strides: str = "contiguous"  # or "transposed", "holes", "channels_last"
    frozen: bool = False


@dataclass(frozen=True)
class ModelSpec:
    """A module made of branches; a parameter may sit in several of them."""

    params: tuple[ParamShape, ...]
    branches: tuple[tuple[int, ...], ...]
    batch_norm: bool = False
    in_two_parts: bool = False  # two losses, of odd and of even parameters


class Patchwork(nn.Module):
    """The loss of branch b is the sum over its parameters of ``p * p * c(x, p)``.

    Every gradient depends on the input, the parameter and the element, so a gradient
    in the wrong place or of the wrong step cannot go unnoticed.
    """

    def __init__(self, spec: ModelSpec, seed: int = 0) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.spec = spec
        self.params = nn.ParameterList(
            [_make_parameter(p, generator) for p in spec.params]
        )
        self.norm = nn.BatchNorm1d(3) if spec.batch_norm else None

    def forward(
        self, x: torch.Tensor, used: tuple[bool, ...]
    ) -> tuple[torch.Tensor, ...]:
        """Return the loss of the branches that are ``used``, in one part or two.

        ``x`` is (4, 3), fp32.
        """
        scale = x if self.norm is None else self.norm(x)
        base = scale.double().pow(2).mean() if self.norm is not None else x.sum() * 0.0
        indices = [
            i
            for branch, is_used in zip(self.spec.branches, used, strict=True)
            for i in branch
            if is_used
        ]
        if not self.spec.in_two_parts:
            return (sum((self._term(i, x) for i in indices), base),)
        odd = [self._term(i, x) for i in indices if i % 2]
        even = [self._term(i, x) for i in indices if not i % 2]
        return sum(odd, x.sum() * 0.0), sum(even, base)

    def _term(self, i: int, x: torch.Tensor) -> torch.Tensor:
        param = self.params[i]
        count = torch.arange(param.numel(), dtype=torch.float32, device=x.device)
        count = count.reshape(param.shape)
        factor = (torch.cos(count * 0.7 + i) * x[i % 4, i % 3]).to(param.dtype)
        term: torch.Tensor = (param * param * factor).sum()
        if term.is_complex():
            term = term.real + term.imag
        return term.double()


def _make_parameter(spec: ParamShape, generator: torch.Generator) -> nn.Parameter:
    dtype = DTYPES[spec.dtype]
    shape = spec.shape
    if spec.strides == "holes" and shape:
        wide = (*shape[:-1], shape[-1] * 2)
        values = _random(wide, dtype, generator)[..., ::2]
    elif spec.strides == "transposed" and len(shape) > 1:
        values = _random(shape[::-1], dtype, generator).permute(
            *range(len(shape) - 1, -1, -1)
        )
    elif spec.strides == "channels_last" and len(shape) == 4:
        values = _random(shape, dtype, generator).contiguous(
            memory_format=torch.channels_last
        )
    else:
        values = _random(shape, dtype, generator)
    return nn.Parameter(values, requires_grad=not spec.frozen)


def _random(
    shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator
) -> torch.Tensor:
    values = torch.randn(shape, generator=generator, dtype=torch.float64)
    if dtype.is_complex:
        return torch.complex(values, values.flip(0) if shape else -values).to(dtype)
    return values.to(dtype)
