"""The norm of the gradients of all shares, and clipping by it.

Each owner knows the norms of its parameters. All ranks exchange these, and calculate
the norm of the norms, in the order in which torch takes them. That is what
``torch.nn.utils.clip_grad_norm_`` calculates on whole gradients, with the same bits.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.utils import clip_grad

from minidp.core import Exchange, Reducer

_IS_THERE, _FAILS = 1.0, 2.0  # a gradient; one whose norm torch cannot calculate


class Norms:
    """The norms of all gradients.

    Args:
        reducer: The reducer.
        own: The indices of the parameters that this rank owns.
    """

    def __init__(self, reducer: Reducer, own: Sequence[int]) -> None:
        self._params, self._own = reducer.params, own
        # For each parameter its norm, and one of the numbers above, or 0.
        part = 2 * len(self._params), torch.float64
        cpu = torch.device("cpu")
        what = "the norms of gradients"
        self.exchange = Exchange(what, part, cpu, reducer.communicator)

    @torch.no_grad()
    def clip(self, max_norm: float, norm_type: float, *, raises: bool) -> Tensor:
        """Scale own gradients so that the norm of all is at most ``max_norm``.

        All ranks must call it together, with the same arguments.

        Returns:
            The norm before.

        Raises:
            RuntimeError: The norm is not finite, and ``raises``; or torch cannot
                calculate it. All ranks raise it.
        """
        total = self._total(norm_type)
        if raises and not bool(torch.isfinite(total)):
            raise RuntimeError(
                f"The total norm of order {norm_type} of all gradients is {total}, so "
                "it cannot be clipped. What to do: pass error_if_nonfinite=False to "
                "scale by it anyway."
            )
        factor = torch.clamp(max_norm / (total + 1e-6), max=1.0)
        for grad in self._grads().values():
            grad.mul_(factor)
        return total

    def _grads(self) -> dict[int, Tensor]:
        return {i: g for i in self._own if (g := self._params[i].grad) is not None}

    def _total(self, norm_type: float) -> Tensor:
        """Return the norm of all gradients."""
        grads = self._grads()
        mine = self.exchange.blank()
        rows = mine.view(2, -1)
        failure = ""
        if grads:
            places = torch.tensor([*grads], device="cpu")
            rows[1, places] = _IS_THERE
            try:
                norms = [torch.linalg.vector_norm(g, norm_type) for g in grads.values()]
                rows[0, places] = torch.stack([norm.double() for norm in norms])
            except RuntimeError as error:  # for example infinity, of no element
                failure = str(error)
                rows[1, places] = _FAILS
        self.exchange.start(mine)
        values, states = self.exchange.take().view(2, -1)
        present = torch.nonzero(states).flatten().tolist()
        if not present:
            return torch.tensor(0.0, device="cpu")
        if bool((states == _FAILS).any()):
            raise RuntimeError(
                f"The norm of order {norm_type} of some gradients cannot be "
                f"calculated. {failure}".rstrip()
            )
        dtypes = [self._params[i].dtype.to_real() for i in present]
        dtype = functools.reduce(torch.promote_types, dtypes)
        order = _order([self._params[i].dtype for i in present])
        norms_in_order = values[[present[k] for k in order]].to(dtype)
        total: Tensor = torch.linalg.vector_norm(norms_in_order, norm_type)
        return total


def _order(dtypes: Sequence[torch.dtype]) -> list[int]:
    """Return in which order torch takes the norms of gradients of these dtypes.

    It groups them by dtype, and the order of groups is known to torch alone.
    """
    if len(set(dtypes)) == 1:
        return [*range(len(dtypes))]
    group = getattr(clip_grad, "_group_tensors_by_device_and_dtype", None)
    if group is None:
        first = [*dict.fromkeys(dtypes)]
        return sorted(range(len(dtypes)), key=lambda k: first.index(dtypes[k]))
    like = [torch.empty(0, dtype=dtype, device="cpu") for dtype in dtypes]
    groups = group([like], with_indices=True)
    return [k for _, places in groups.values() for k in places]
