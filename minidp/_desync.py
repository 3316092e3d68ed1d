"""``check_replicas_every``: have the replicas drifted apart, and which parameter first?

Every so many steps each rank sums up the bits of its parameters, and of its module
buffers if those are broadcast. The sums, one number per bucket, travel while forward
and backward run; they are compared when the backward ends. Only a difference costs a
second exchange, of one number per tensor, to find the name.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch

from ._collectives import gather_rows, start_gathering
from ._groups import side_group
from ._pipeline import Pipeline
from ._waiting import wait_for
from .errors import MAX_NAMES, ReplicaMismatchError, explain

if TYPE_CHECKING:
    from ._collectives import Gathering

PURPOSE = "replicas"  # of the side group
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class ReplicaCheck:
    """Compares the replicas now and then; an `Observer` of the pipeline.

    Args:
        pipeline: its buckets say which parameters belong together.
        names: of the managed parameters.
        every: steps from one check to the next.
    """

    uses_grads = False

    def __init__(self, pipeline: Pipeline, names: Sequence[str], every: int) -> None:
        # It holds us, among its observers: a cycle would keep buckets until gc runs.
        self._pipeline: Pipeline = weakref.proxy(pipeline)
        self._names = names
        self._every = every
        self._agreed = 0  # the last step at whose beginning all replicas were equal
        self._sums: dict[str, int] = {}  # name -> bits of the tensor, at that step
        self._under_way: Gathering | None = None
        self._row: list[int] = []
        self._begun = -1  # the last step that was compared

    def meet(self) -> None:
        """Collective: connect the ranks; a group of its own cannot mix up buckets."""
        self._under_way, self._begun = None, -1  # what began before a reset is lost
        side_group(self._pipeline.group, PURPOSE)

    def begin(
        self,
        step: int,
        params: Sequence[torch.Tensor],
        others: Mapping[str, torch.Tensor],
    ) -> None:
        """Collective, if one is due: start comparing.

        Args:
            step: synchronised backwards finished; equal on all ranks.
            params: managed parameters, in parameter-index order.
            others: what must be equal besides, by name.
        """
        if step % self._every or step == self._begun:
            return  # once per step: a rank may run more forwards than the others
        self._begun = step
        bits = [sum_of_bits(tensor) for tensor in (*params, *others.values())]
        sums = torch.stack([each.cpu() for each in bits]).tolist()
        self._sums = dict(zip((*self._names, *others), sums, strict=True))
        layout = self._pipeline.layout
        groups = [[self._names[i] for i in bucket.indices] for bucket in layout.buckets]
        self._row = [step, *map(self._combine, [*groups, list(others)])]
        row = torch.tensor(self._row, dtype=torch.int64)
        group = side_group(self._pipeline.group, PURPOSE)
        with self._pipeline.watch.whole("starting to compare the replicas"):
            self._under_way = start_gathering(row, group)

    def _combine(self, names: Sequence[str]) -> int:
        """One number for several tensors; depends on their order."""
        total = 0
        for name in names:
            total = (31 * total + self._sums[name]) % 2**62
        return total

    def reduced(self, params: Sequence[torch.nn.Parameter]) -> None:
        """Nothing to do for a bucket."""

    def finished(self) -> None:
        """The backward is over: look at what the others have sent.

        Raises:
            ReplicaMismatchError: on all ranks, naming the first parameter that differs.
        """
        if self._under_way is None:
            return
        gathering, self._under_way = self._under_way, None
        with self._pipeline.watch.over("comparing the replicas"):
            wait_for(gathering.work)
        rows = gathering.rows.tolist()
        steps = [row[0] for row in rows]
        if len(set(steps)) > 1:
            raise ReplicaMismatchError(self._other_steps(steps))
        if any(row != self._row for row in rows):
            self._name_difference(steps[0])
        self._agreed = steps[0]

    def _name_difference(self, step: int) -> None:
        group = side_group(self._pipeline.group, PURPOSE)
        mine = torch.tensor(list(self._sums.values()), dtype=torch.int64)
        with self._pipeline.watch.over("finding out which parameters differ"):
            columns = gather_rows(mine, group).T.tolist()
        names = [
            name
            for name, column in zip(self._sums, columns, strict=True)
            if len(set(column)) > 1
        ]
        first = columns[list(self._sums).index(names[0])]
        usual = Counter(first).most_common(1)[0][0]
        odd = [rank for rank, value in enumerate(first) if value != usual]
        rest = [rank for rank, value in enumerate(first) if value == usual]
        raise ReplicaMismatchError(
            explain(
                self._pipeline.rank,
                f"The replicas have drifted apart: at the beginning of step {step}, "
                f"{names[0]} differs{_more(len(names) - 1)}. They agreed at the "
                f"beginning of step {self._agreed}.",
                names=names[:MAX_NAMES],
                expected=f"the bits of rank {_join(rest)}",
                found=f"other ones on rank {_join(odd)}",
                remedy="look at what changes parameters on some ranks only (updates by "
                "hand, load_state_dict, random numbers, unsynced='ignore'); load the "
                "last checkpoint on all ranks and call reset(), or wrap it again",
            )
        )

    def _other_steps(self, steps: Sequence[int]) -> str:
        return explain(
            self._pipeline.rank,
            "The ranks are at different steps.",
            expected="equally many synchronised backwards on all ranks",
            found=", ".join(f"{n} on rank {rank}" for rank, n in enumerate(steps)),
            remedy="look for a rank that skipped or repeated a step; load the last "
            "checkpoint on all ranks, or wrap the module again",
        )


def sum_of_bits(tensor: torch.Tensor) -> torch.Tensor:
    """All bits of a tensor in one int64 (0-D, on its device): a sum that wraps around.

    Any single change of one element changes it.
    """
    flat = tensor.detach().resolve_conj().resolve_neg().contiguous().view(-1)
    if flat.is_complex():
        flat = torch.view_as_real(flat)
    return flat.view(_INTEGERS[flat.element_size()]).sum(dtype=torch.int64)


def _more(count: int) -> str:
    return f" (and {count} more)" if count else ""


def _join(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks))
