"""The norm of the gradients of all shares, and clipping by it.

Each owner knows the norms of its parameters. All ranks exchange these, and calculate
the norm of the norms, in the order in which torch takes them. That is what
``torch.nn.utils.clip_grad_norm_`` calculates on whole gradients, with the same bits.

Of a divided parameter each rank knows the norm of its rows, and the norm of these norms
is taken for that of the parameter. Torch adds up all elements in another order, so that
the last bits may differ there.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate, pairwise

import torch
from torch import Tensor
from torch.nn.utils import clip_grad

from minidp.accelerator import to_host, upload
from minidp.comm import way_of_hosts
from minidp.core import Exchange, Reducer

from .owners import Owners
from .parts import rows_of

_IS_THERE, _FAILS = 1, 2  # a gradient; one whose norm torch cannot calculate


class Norms:
    """The norms of all gradients.

    Args:
        reducer: The reducer.
        owners: Who owns which parameter.
    """

    def __init__(self, reducer: Reducer, owners: Owners) -> None:
        self._params, rank = reducer.params, reducer.rank
        self._own, self._rows = owners.owned_by(rank), owners.split(rank)
        # The places of each parameter in the vectors below: one for each rank if its
        # rows are divided, else one.
        widths = [
            owners.size if owners.is_split(i) else 1 for i in range(len(self._params))
        ]
        ends = [*accumulate(widths, initial=0)]
        self._places = [range(*each) for each in pairwise(ends)]
        self._mine = {  # that of this rank
            i: self._places[i][rank if i in self._rows else 0] for i in self._own
        }
        # For each place a norm, which on a device no host reads, ...
        communicator = reducer.communicator
        self._device = reducer.queue.averaging.device
        dtype = torch.float64  # which some devices do not have
        if self._device.type != "cpu":
            dtype = _common_dtype(self._params)
        part, what = (ends[-1], dtype), "the norms of gradients"
        self._values = Exchange(what, part, self._device, communicator)
        # ... and one of the numbers above, or 0, which hosts know.
        _, device = way_of_hosts(communicator.group, communicator.device)
        self._states = Exchange(
            "which gradients have norms", (ends[-1], torch.int32), device, communicator
        )
        self.exchanges = self._values, self._states

    @torch.no_grad()
    def clip(
        self,
        max_norm: float,
        norm_type: float,
        *,
        raises: bool,
        among: Sequence[int] | None = None,
    ) -> Tensor:
        """Scale own gradients so that the norm of all is at most ``max_norm``.

        All ranks must call it together, with the same arguments.

        Args:
            max_norm: The greatest norm that is allowed.
            norm_type: The order of the norm.
            raises: Whether to raise an error if the norm is not finite.
            among: The indices of the parameters that count, in the order in which torch
                would take them; by default all.

        Returns:
            The norm before.

        Raises:
            RuntimeError: The norm is not finite, and ``raises``; or torch cannot
                calculate it. All ranks raise it.
        """
        own, everybody = self._own, range(len(self._params))
        if among is not None:
            own = [i for i in among if i in own]
        total = self._total(norm_type, own, everybody if among is None else among)
        if raises and not bool(torch.isfinite(total)):
            raise RuntimeError(
                f"The total norm of order {norm_type} of all gradients is {total}, so "
                "it cannot be clipped. What to do: pass error_if_nonfinite=False to "
                "scale by it anyway."
            )
        factor = torch.clamp(max_norm / (total + 1e-6), max=1.0)
        for (device, _), grads in _by_kind(self._grads(own)).items():
            there = factor.to(device, non_blocking=True)
            torch._foreach_mul_([*grads.values()], there)
        return total

    def _grads(self, own: Sequence[int]) -> dict[int, Tensor]:
        """Return own gradients, and own rows of them, by the index of the parameter."""
        grads = {i: g for i in own if (g := self._params[i].grad) is not None}
        return {i: rows_of(grad, self._rows.get(i)) for i, grad in grads.items()}

    def _total(
        self, norm_type: float, own: Sequence[int], among: Sequence[int]
    ) -> Tensor:
        """Return the norm of all gradients ``among`` these parameters."""
        grads, failure, state = self._grads(own), "", _IS_THERE
        mine = self._values.blank()
        try:
            found = _norms_of(grads, norm_type)
            norms = [
                each.to(self._device, non_blocking=True) for each in found.values()
            ]
            if norms:
                mine_of = [self._mine[i] for i in found]
                places = upload(mine_of, torch.int64, self._device)
                values = torch.stack([norm.to(mine.dtype) for norm in norms])
                mine.index_copy_(0, places, values)
        except RuntimeError as error:  # for example infinity, of no element
            failure, state = str(error), _FAILS
        states = [0] * self._places[-1].stop
        for i in grads:
            states[self._mine[i]] = state
        self._states.start(upload(states, torch.int32, self._states.device))
        self._values.start(mine)
        all_states = to_host(self._states.take()).tolist()
        values = self._values.take()
        present = [i for i in among if any(all_states[p] for p in self._places[i])]
        if not present:
            return torch.tensor(0.0, device="cpu")
        if _FAILS in all_states:
            raise RuntimeError(
                f"The norm of order {norm_type} of some gradients cannot be "
                f"calculated. {failure}".rstrip()
            )
        dtype = _common_dtype([self._params[i] for i in present])
        order = _order([self._params[i] for i in present])
        if any(len(self._places[i]) > 1 for i in present):
            values = self._joined(values, norm_type)
        first = [self._places[present[k]].start for k in order]
        places = upload(first, torch.int64, self._device)
        norms_in_order = values.index_select(0, places).to(dtype)
        total: Tensor = torch.linalg.vector_norm(norms_in_order, norm_type)
        return total

    def _joined(self, values: Tensor, norm_type: float) -> Tensor:
        """Put the norm of each divided parameter to the first of its places."""
        for i, places in enumerate(self._places):
            if len(places) > 1:
                of_ranks = values[places.start : places.stop]
                # The norm of order 0 is the number of elements that are not zero.
                norm = torch.linalg.vector_norm(of_ranks, norm_type or 1.0)
                norm = norm.to(self._params[i].dtype.to_real())
                values[places.start] = norm
        return values


def _common_dtype(tensors: Iterable[Tensor]) -> torch.dtype:
    """Return the dtype that has all values of the norms of such tensors."""
    dtypes = [each.dtype.to_real() for each in tensors]
    return functools.reduce(torch.promote_types, dtypes)


Kind = tuple[torch.device, torch.dtype]


def _by_kind(grads: Mapping[int, Tensor]) -> dict[Kind, dict[int, Tensor]]:
    """Return gradients by device and dtype: kernels for lists take one kind."""
    found: dict[Kind, dict[int, Tensor]] = {}
    for i, grad in grads.items():
        found.setdefault((grad.device, grad.dtype), {})[i] = grad
    return found


def _norms_of(grads: Mapping[int, Tensor], norm_type: float) -> dict[int, Tensor]:
    """Return the norm of each gradient, by the kernels that torch takes for it."""
    if all(grad.is_cpu for grad in grads.values()):
        return {i: torch.linalg.vector_norm(g, norm_type) for i, g in grads.items()}
    norms: dict[int, Tensor] = {}
    for of_kind in _by_kind(grads).values():
        found = torch._foreach_norm([*of_kind.values()], norm_type)
        norms |= zip(of_kind, found, strict=True)
    return norms


def _order(params: Sequence[Tensor]) -> list[int]:
    """Return in which order torch takes the norms of these parameters' gradients.

    It groups them by device and dtype, and the order of groups is known to torch alone.
    """
    kinds = [(param.device, param.dtype) for param in params]
    if len(set(kinds)) == 1:
        return [*range(len(kinds))]
    group = getattr(clip_grad, "_group_tensors_by_device_and_dtype", None)
    if group is None:
        first = [*dict.fromkeys(kinds)]
        return sorted(range(len(kinds)), key=lambda k: first.index(kinds[k]))
    like = [torch.empty(0, dtype=dtype, device=device) for device, dtype in kinds]
    groups = group([like], with_indices=True)
    return [k for _, places in groups.values() for k in places]
