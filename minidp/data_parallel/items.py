"""Average over items: the methods of `DataParallel` for ``average_over="items"``."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from minidp.config import passing
from minidp.core import (
    ItemCounts,
    ItemTotals,
    Reducer,
    current_task,
    find_tensors,
    is_known,
    probe_outputs,
    untraced,
    weighted,
    zeros_for,
)
from minidp.errors import UnavailableError, explain

if TYPE_CHECKING:
    from torch.autograd.graph import Node

    from .wrapper import DataParallel

Number = float | Tensor


@untraced
def count_items(self: DataParallel, n: Number, loss: Number | None = None) -> None:
    """Add ``n`` items to this step; call backward() on their *sum* of losses.

    Call it once per micro-batch, before its backward, inside or outside ``no_sync()``.
    The next synchronised backward divides all gradients by the items of all ranks and
    micro-batches. A rank without items says 0. A negative ``n`` takes items back, of a
    micro-batch that gets no backward.

    ``n`` counts tokens, pixels, samples ...: an int, a float, or a tensor of one number
    of any real dtype. A tensor on a GPU is not read on the host. ``loss`` is this
    micro-batch's loss, the sum, for ``item_totals.mean_loss``; it is only read. Nothing
    is counted under ``no_grad()``: no backward follows an evaluation.

    Raises:
        RuntimeError: constructed without ``average_over="items"``, or this step's
            counts have been sent.
        TypeError: ``n`` or ``loss`` is no real number.
    """
    counts = _counts(self, "count_items")
    if torch.is_grad_enabled():
        counts.add(n, loss)


@untraced
def weigh_loss(self: DataParallel, loss: Tensor, n: Number) -> Tensor:
    """Count ``n`` items whose *mean* loss is ``loss``; return ``loss * n``.

    Call backward() on what is returned. With ``n`` = 0 that is 0, and each parameter
    that ``loss`` depends on gets a gradient of zeros, even if the mean of nothing is
    NaN, or its gradient is: the graph of ``loss`` does not run (reentrant checkpoints
    do, with zeros). A tensor ``n`` on an accelerator is not read on the host, so there
    the graph runs, and zeros replace the gradients of the module's outputs: what the
    module itself computes must be finite then, or ``n`` a number.

    ``loss`` is one floating-point number; all else is as in `count_items`. Under
    ``no_grad()`` return ``loss``.
    """
    counts = _counts(self, "weigh_loss")
    if not torch.is_grad_enabled():
        return loss
    product = weighted(loss, n)
    counts.add(n, 0.0 if product is None else product)
    if product is None:
        params, specs = self._reducer.params, self._reducer.queue.specs
        sparse = {id(p) for p, s in zip(params, specs, strict=True) if s.sparse}
        return zeros_for(loss, partial(_zeros, sparse))
    if isinstance(n, Tensor) and not is_known(n) and product.grad_fn is not None:
        is_zero = n.detach().reshape(()) == 0

        @untraced
        def note(_grads: object) -> None:
            counts.note_weighed(current_task(), is_zero)

        product.grad_fn.register_prehook(note)
    return product


def _zeros(sparse: set[int], leaf: Tensor) -> Tensor:
    """Return a gradient of zeros for ``leaf``; ``sparse``: ids of those with sparse."""
    if id(leaf) not in sparse:
        return torch.zeros_like(leaf)
    return torch.sparse_coo_tensor(
        torch.empty(1, 0, dtype=torch.int64, device=leaf.device),
        leaf.new_empty((0, *leaf.shape[1:])),
        leaf.shape,
        device=leaf.device,  # else the user's default device
    )


def item_totals(self: DataParallel) -> ItemTotals:
    """Return how many items the last synchronised backward averaged, and the mean loss.

    ``count`` and ``mean_loss``, of all ranks (NaN if a rank with items gave no loss):
    float64 tensors of shape (); ``of_ranks``: items of each rank, float64. They are on
    the gradients' device; no rank waits before ``.item()``.

    Raises:
        UnavailableError: no such backward yet, or no ``average_over="items"``. It is an
            AttributeError, so that ``hasattr`` is False then.
    """
    totals = _counts(self, "item_totals", UnavailableError).totals
    if totals is None:
        raise UnavailableError(
            explain(
                self._reducer.rank,
                "item_totals has no value: no synchronised backward has averaged over "
                "items yet.",
                remedy="read it after the first backward() that is not in no_sync()",
            )
        )
    return totals


def watch(reducer: Reducer, output: object, *, will_reduce: bool) -> None:
    """Count a forward that ended; have its backward call `ItemCounts.look` first.

    `look` notes ``.grad`` that hold averages: if the backward adds to them, that is an
    error later. No-op unless averaging over items.
    """
    items = reducer.queue.averaging.items
    if items is None:
        return
    items.note_forward()
    for tensor in find_tensors(output):
        if tensor.grad_fn is not None and not is_known(tensor):
            _clean_grads_of(tensor.grad_fn, items)
    if not (items.holds_averages or will_reduce):
        return

    @untraced
    def look(_grads: object) -> None:
        items.look()

    probe_outputs(output, look)


def _clean_grads_of(node: Node, items: ItemCounts) -> None:
    """Replace gradients that reach ``node`` from losses weighed by 0, by zeros."""

    @untraced
    def clean(grads: Sequence[Any]) -> tuple[Any, ...] | None:
        return items.cleaned(current_task(), grads)

    node.register_prehook(clean)


def _counts(
    ddp: DataParallel, name: str, kind: type[RuntimeError] = RuntimeError
) -> ItemCounts:
    """Return the wrapper's item counts; an error ``kind``, naming ``name``, if none."""
    items = ddp._reducer.queue.averaging.items
    if items is None:
        raise kind(
            f"{name} is for averages over items, and this model averages over ranks. "
            f"What to do: {passing(average_over='items')}, on all ranks."
        )
    return items
