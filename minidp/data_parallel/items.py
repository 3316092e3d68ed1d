"""Average over items: the methods of `DataParallel` for ``average_over="items"``.

The mean over all items is the sum of all losses' gradients divided by the number of all
items. A rank knows its own number only, and so says it here; the reducer adds them up
(`minidp.core.item_counts`) and divides.
"""

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
    empty_sparse,
    find_tensors,
    is_known,
    probe_outputs,
    untraced,
    weighted,
    zeros_for,
)
from minidp.errors import ItemCountError, MiniDPError, UnavailableError, explain

if TYPE_CHECKING:
    from torch.autograd.graph import Node

    from .wrapper import DataParallel

Number = float | Tensor


@untraced
def count_items(  # noqa: D417 -- self: a method
    self: DataParallel, n: Number, loss: Number | None = None
) -> None:
    """Add items to this step, on whose *sum* of losses you then call ``backward()``.

    Call it once for each micro-batch, before its backward, inside or outside
    ``no_sync()``. The next synchronised backward divides all gradients by the number of
    items of all ranks and micro-batches. Nothing is counted under ``no_grad()``,
    because no backward follows an evaluation.

    Args:
        n: How many items (tokens, pixels, samples ...): an int, a float, or a tensor of
            one number of any real dtype. A tensor on an accelerator is not read on the
            host. A rank without items says 0. A negative number takes items back, for a
            micro-batch that gets no backward after all.
        loss: The summed loss of this micro-batch, for ``item_totals.mean_loss``. It is
            only read.

    Raises:
        ItemCountError: The model averages over ranks, or the counts of this step are
            on their way already.
        TypeError: ``n`` or ``loss`` is no real number.
    """
    counts = _counts(self, "count_items")
    if torch.is_grad_enabled():
        counts.add(n, loss)


@untraced
def weigh_loss(  # noqa: D417 -- self: a method
    self: DataParallel, loss: Tensor, n: Number
) -> Tensor:
    """Count items with a *mean* loss, and return the sum to call ``backward()`` on.

    If ``n`` is 0, the result is 0, and each parameter on which the loss depends gets a
    gradient of zeros, even if the mean of nothing is NaN, or its gradient is. For that
    the graph of the loss does not run (reentrant checkpoints do, with zeros). But a
    tensor ``n`` on an accelerator is not read on the host. There the graph runs, and
    zeros replace the gradients of the module's outputs; so what the module itself
    computes must be finite, or ``n`` a number.

    Args:
        loss: The mean loss of this micro-batch, a tensor of one floating-point number.
        n: How many items, as in `count_items`.

    Returns:
        The tensor ``loss * n``; under ``no_grad()`` the loss itself.

    Raises:
        ItemCountError, TypeError: As `count_items` raises them.
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
        devices = {product.device, *(spec.device for spec in self._reducer.queue.specs)}
        on_each = {each: is_zero.to(each, non_blocking=True) for each in devices}

        @untraced
        def note(_grads: object) -> None:
            counts.note_weighed(current_task(), on_each)

        product.grad_fn.register_prehook(note)
    return product


def _zeros(sparse: set[int], leaf: Tensor) -> Tensor:
    """Return a gradient of zeros for a leaf, which is sparse for those listed by id."""
    return empty_sparse(leaf) if id(leaf) in sparse else torch.zeros_like(leaf)


def item_totals(self: DataParallel) -> ItemTotals:
    """How many items the last synchronised backward averaged, and their mean loss.

    The numbers are float64 tensors on the device of the gradients, and nothing waits
    for them before you call ``.item()``. ``count`` and ``mean_loss``, of shape (), are
    of all ranks and micro-batches. ``mean_loss`` is NaN if a rank with items gave no
    loss. ``of_ranks``, of shape (ranks,), has the items of each rank.

    Raises:
        UnavailableError: No synchronised backward has averaged over items yet, or the
            model averages over ranks. It is an AttributeError, too, so that ``hasattr``
            is False.
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
    """Count a forward that has ended, and have its backward call `ItemCounts.look`.

    `look` notes which ``.grad`` hold averages. If the backward adds to one of them, the
    sum is no mean over items, which is an error later. If the model averages over
    ranks, nothing is done.
    """
    items = reducer.queue.averaging.items
    if items is None:
        return
    items.note_forward()
    items.home.note()
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
    """Put zeros in place of gradients that reach a node from losses weighed by 0."""

    @untraced
    def clean(grads: Sequence[Any]) -> tuple[Any, ...] | None:
        return items.cleaned(current_task(), grads)

    node.register_prehook(clean)


def _counts(
    ddp: DataParallel, name: str, kind: type[MiniDPError] = ItemCountError
) -> ItemCounts:
    """Return the counts of a wrapper, or raise an error of this kind without any."""
    items = ddp._reducer.queue.averaging.items
    if items is None:
        raise kind(
            explain(
                ddp._reducer.rank,
                f"{name} is for averages over items, and this model averages over "
                "ranks.",
                remedy=f"{passing(average_over='items')}, on all ranks",
            )
        )
    return items
