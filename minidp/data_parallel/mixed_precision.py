"""Cast inputs, parameters and gradients: the argument ``mixed_precision``.

    fp32 parameter --cast--> low precision --module--> loss
    fp32 .grad <--cast-- (the cast's own backward)
       '--> bucket --cast to reduce_dtype--> SUM --/ world size--> fp32 .grad

The cast is a node of the graph: gradients of fp32 parameters arrive at the usual hooks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn
from torch.func import functional_call
from torch.nn.utils.rnn import PackedSequence

from minidp.comm import GradBucket, all_reduce, then
from minidp.core import reachable_nodes
from minidp.errors import MiniDPError, explain

if TYPE_CHECKING:
    from minidp.replica import Replica


class Precision(NamedTuple):
    """Hold the dtypes of ``mixed_precision``; None: no cast, but see `reduce_dtype`."""

    param_dtype: torch.dtype | None
    reduce_dtype: torch.dtype | None  # None: as `param_dtype` says
    buffer_dtype: torch.dtype | None


def precision_from(given: Any) -> Precision | None:
    """Return ``mixed_precision`` as a `Precision`, None for None.

    TypeError unless it has the three attributes, each a floating dtype or None.
    """
    if given is None:
        return None
    dtypes: list[Any] = [getattr(given, name, "missing") for name in Precision._fields]
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


def map_tensors(value: Any, change: Callable[[Any], Any]) -> Any:
    """Return ``value`` with ``change`` applied to every tensor and packed sequence.

    Copies tuples, lists and dicts, nested ones too; returns other objects as they are.
    """
    if isinstance(value, torch.Tensor | PackedSequence):
        return change(value)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(map_tensors(item, change) for item in value))
    if isinstance(value, tuple | list):
        return type(value)(map_tensors(item, change) for item in value)
    if isinstance(value, dict):
        return type(value)((k, map_tensors(item, change)) for k, item in value.items())
    return value


class MixedPrecision:
    """Run a replica's module with floating parameters and inputs in ``param_dtype``.

    `DataParallel.forward` calls `run`. Each parameter's cast is in the graph: ``.grad``
    has its own dtype. Parameters on the ignore list are not cast. The constructor only
    looks up what to cast.
    """

    def __init__(self, replica: Replica, precision: Precision, rank: int) -> None:
        self._rank, self._dtype = rank, precision.param_dtype
        self._module = module = replica.module
        self._parameters = {
            name: param
            for name, param in module.named_parameters()
            if name in replica.parameters and param.is_floating_point()
        }
        self._sparse = replica.sparse
        self._recurrent = [m for m in module.modules() if isinstance(m, nn.RNNBase)]

    def run(self, *inputs: Any, **kwargs: Any) -> Any:
        """Run the module with floating inputs and parameters cast to ``param_dtype``.

        Return its output as it is, usually in that dtype. MiniDPError if its graph has
        a reentrant checkpoint. If ``param_dtype`` is None just call the module.
        """
        dtype = self._dtype
        if dtype is None:
            return self._module(*inputs, **kwargs)

        def to_low(tensor: Any) -> Any:
            is_floating = tensor.data.is_floating_point()  # or a packed sequence's
            return tensor.to(dtype) if is_floating else tensor

        inputs, kwargs = map_tensors(inputs, to_low), map_tensors(kwargs, to_low)
        cast_sparse: Any = _CastSparse
        low = {
            name: cast_sparse.apply(p, dtype) if name in self._sparse else p.to(dtype)
            for name, p in self._parameters.items()
        }
        try:
            output = functional_call(self._module, low, inputs, kwargs)
        finally:
            for module in self._recurrent:  # keep their weights in a list, too
                names = module._flat_weights_names
                module._flat_weights = [getattr(module, n, None) for n in names]
        checkpoint = "CheckpointFunctionBackward"  # reentrant, as autograd calls it
        if any(node.name() == checkpoint for node in reachable_nodes(output)):
            raise MiniDPError(
                explain(
                    self._rank,
                    "mixed_precision does not go together with checkpointing: what is "
                    "computed again in the backward would not be cast.",
                    remedy="use torch.autocast in the module instead",
                )
            )
        return output


class _CastSparse(torch.autograd.Function):
    """Cast a parameter to a dtype; the backward casts the (sparse) gradient back."""

    @staticmethod
    def forward(ctx: Any, param: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        ctx.dtype = param.dtype
        return param.to(dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0].to(ctx.dtype), None


def reduce_in_low_precision(
    precision: Precision, bucket: GradBucket
) -> torch.futures.Future[torch.Tensor]:
    """Start a bucket's all-reduce in ``reduce_dtype``; return a future of its average.

    The comm hook of ``mixed_precision``; does not wait. ``reduce_dtype`` None means
    ``param_dtype``; with both None, or complex gradients, there is no cast. The
    future's tensor is not cast back: the bucket does that when it copies out.
    """
    buffer = bucket.buffer()
    dtype = precision.reduce_dtype or precision.param_dtype
    if dtype is not None and bucket.parameters()[0].is_floating_point():
        buffer = buffer.to(dtype)
    future = all_reduce(buffer, bucket.process_group()).get_future()
    return then(future, lambda: buffer.div_(bucket.divisor()))
