"""Mixed precision: the module computes in one dtype, gradients travel in another.

    fp32 parameter --cast--> low precision --module--> loss
    fp32 .grad <--cast-- (the cast's own backward)
       '--> bucket --cast to reduce_dtype--> SUM --/ world size--> fp32 .grad

The cast is a node of the graph, so parameters stay what they are all the time, and
their gradients arrive at the usual hooks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.func import functional_call

from ._autograd import reachable_nodes
from ._collectives import all_reduce
from ._grad_bucket import GradBucket
from ._inputs import map_tensors
from ._waiting import then
from .errors import MiniDPError, explain

if TYPE_CHECKING:
    from ._managed import Replica


_REENTRANT = "CheckpointFunctionBackward"  # how autograd calls it


@dataclass(frozen=True)
class Precision:
    """The dtypes of torch's private ``_MixedPrecision``; None leaves a dtype alone."""

    param_dtype: torch.dtype | None
    reduce_dtype: torch.dtype | None  # None: that of the parameters
    buffer_dtype: torch.dtype | None


def precision_from(given: Any) -> Precision | None:
    """The constructor's ``mixed_precision``, checked.

    Raises:
        TypeError: it has no such dtypes.
    """
    if given is None:
        return None
    names = ("param_dtype", "reduce_dtype", "buffer_dtype")
    dtypes: list[Any] = [getattr(given, name, "missing") for name in names]
    if not all(
        d is None or (isinstance(d, torch.dtype) and d.is_floating_point)
        for d in dtypes
    ):
        raise TypeError(
            "mixed_precision must have a param_dtype, a reduce_dtype and a "
            "buffer_dtype, each a floating torch.dtype or None (torch.nn.parallel."
            f"distributed._MixedPrecision), but got {given!r}."
        )
    return Precision(*dtypes)


class MixedPrecision:
    """Runs a module in low precision.

    Args:
        module: the module.
        replica: which of its parameters to cast.
        precision: the dtypes.
        rank: group rank, for errors.
    """

    def __init__(
        self, module: nn.Module, replica: Replica, precision: Precision, rank: int
    ) -> None:
        self._rank = rank
        self._module = module
        self._precision = precision
        own = {name for name, _ in module.named_parameters()}  # not those of others
        self._parameters = {
            name: param
            for name, param in replica.parameters.items()
            if param.is_floating_point() and name in own
        }
        self._sparse = replica.sparse
        self._recurrent = [m for m in module.modules() if isinstance(m, nn.RNNBase)]

    def run(self, *inputs: Any, **kwargs: Any) -> Any:
        """The module's forward, with parameters and floating inputs cast.

        Raises:
            MiniDPError: it checkpoints: what is computed again, in the backward, would
                not be cast. (The reentrant kind; the other finds different dtypes.)
        """
        dtype = self._precision.param_dtype
        if dtype is None:
            return self._module(*inputs, **kwargs)

        def to_low(tensor: Any) -> Any:
            is_floating = tensor.data.is_floating_point()  # or a packed sequence's
            return tensor.to(dtype) if is_floating else tensor

        inputs, kwargs = map_tensors(inputs, to_low), map_tensors(kwargs, to_low)
        low = {name: self._cast(name, dtype) for name in self._parameters}
        try:
            output = functional_call(self._module, low, inputs, kwargs)
        finally:
            for module in self._recurrent:  # keep their weights in a list, too
                names = module._flat_weights_names
                module._flat_weights = [getattr(module, n, None) for n in names]
        if any(n.name() == _REENTRANT for n in reachable_nodes(output)):
            raise MiniDPError(
                explain(
                    self._rank,
                    "mixed_precision does not go together with checkpointing: what is "
                    "computed again in the backward would not be cast.",
                    remedy="use torch.autocast in the module instead",
                )
            )
        return output

    def _cast(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        param = self._parameters[name]
        if name in self._sparse:
            return _cast_sparse(param, dtype)
        return param.to(dtype)

    def cast_module_buffers(self, module_buffers: Mapping[str, torch.Tensor]) -> None:
        """Cast floating module buffers for good."""
        dtype = self._precision.buffer_dtype
        for value in module_buffers.values():
            if dtype is not None and value.is_floating_point():
                value.data = value.data.to(dtype)


class _CastSparse(torch.autograd.Function):
    """As ``param.to(dtype)``, whose own backward takes no sparse gradients."""

    @staticmethod
    def forward(ctx: Any, param: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        ctx.dtype = param.dtype
        return param.to(dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0].to(ctx.dtype), None


def _cast_sparse(param: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    function: Any = _CastSparse
    low: torch.Tensor = function.apply(param, dtype)
    return low


def reduce_in_low_precision(
    precision: Precision, bucket: GradBucket
) -> torch.futures.Future[torch.Tensor]:
    """Comm hook: cast, SUM, then divide (in this order, as torch does)."""
    buffer = bucket.buffer()
    dtype = precision.reduce_dtype or precision.param_dtype
    if dtype is not None and bucket.parameters()[0].is_floating_point():
        buffer = buffer.to(dtype)
    future = all_reduce(buffer, bucket.process_group()).get_future()
    return then(future, lambda: buffer.div_(bucket.divisor()))
