"""``check_replicas_every``: have the replicas drifted apart, and which parameter first?

::

    forward    each rank sums up the bits of its parameters    (and of module buffers
                                                               that were broadcast)
    backward   at its end, ranks compare one number each: the group is idle then
    step       they differed? once more, before optimizer.step()

The second look is for weights that are only different for a while: moved to the worst
case nearby with local gradients, or disturbed by random numbers of each rank, and moved
back before the step. Only a difference costs more than one number per rank.

"auto" has to be silent wherever torch's users mean replicas to differ. It asks for
reasons (`Excuse`), and how large the difference is: other hardware rounds differently.
"""

from __future__ import annotations

import time
import weakref
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Literal, NamedTuple

import torch

from . import _desync_words as words
from ._collectives import gather_rows, start_broadcast
from ._groups import exchange_device, group_store, has_store
from ._pipeline import Pipeline
from ._waiting import wait_for
from ._warn import warn
from .config import AUTO
from .errors import ReplicaMismatchError

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store

    from ._comm_hook import CommHook
    from ._ledger import Ledger

# What "auto" compares: a checkpoint that one rank has loaded shows in the first step.
AUTO_STEPS = frozenset({0, 1, 100})  # each costs a step of a tiny model
AUTO_EVERY = 1000
PATIENCE = 10  # steps in which replicas differ, and no optimizer steps
SMALL_BYTES = 64 * 1024  # tensors of less are joined before they are summed up
ROUNDING = 1e-3  # of the largest element; or a few times what the dtype can tell
_MOST_BYTES = 64 * 2**20  # to be compared element by element
CONFIRM_SECONDS = 10.0  # for other ranks to step, too
POLL_SECONDS = 0.005
_WORD = 4  # bytes
_CHUNK = 2**17  # words to be summed up at once: they stay in a cache
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Excuse:
    """Why replicas may differ; bits that ranks tell each other."""

    LOCAL_UPDATES = 1  # parameters changed inside no_sync()
    FOREIGN_HOOK = 2  # a comm hook of somebody else: it may average over few ranks
    DECLARED = 4  # a complaint that unsynced= made a warning, or nothing


class Seen(NamedTuple):
    """What one check is about."""

    step: int  # synchronised backwards finished
    tensors: Mapping[str, torch.Tensor]  # to look at once more
    buffer_sums: Mapping[str, int]  # of module buffers, which the forward changes
    digest: torch.Tensor  # of all of them: 0-D, int64


class Comparison:
    """The exchanges between ranks, on the group that carried the buckets.

    Args:
        pipeline: whose group.
    """

    def __init__(self, pipeline: Pipeline) -> None:
        # It holds us, among its observers: a cycle would keep buckets until gc runs.
        self._pipeline: Pipeline = weakref.proxy(pipeline)

    def gather(self, row: torch.Tensor) -> torch.Tensor:
        """Collective: all ranks' rows, on the CPU."""
        group, device = self._pipeline.group, self._pipeline.specs[0].device
        row = row.to(exchange_device(group, device))
        with self._pipeline.watch.whole("comparing the replicas"):
            return gather_rows(row, group).cpu()

    def find(self, seen: Seen, agreed: int) -> words.Finding:
        """Collective: the names of what differs."""
        sums = torch.stack([sum_of_bits(t).cpu() for t in seen.tensors.values()])
        row = torch.cat([sums, torch.tensor([*seen.buffer_sums.values()]).long()])
        names = (*seen.tensors, *seen.buffer_sums)
        columns = dict(zip(names, self.gather(row).T.tolist(), strict=True))
        odd_ones = [name for name, column in columns.items() if len(set(column)) > 1]
        first = columns[odd_ones[0]] if odd_ones else [0]
        usual = Counter(first).most_common(1)[0][0]
        odd = [rank for rank, value in enumerate(first) if value != usual]
        rest = [rank for rank, value in enumerate(first) if value == usual]
        here = (self._pipeline.rank, seen.step, agreed)
        return words.Finding(*here, odd_ones, odd, rest)

    def is_rounding(self, seen: Seen, names: Sequence[str]) -> bool:
        """Collective: whether no element is off by more than arithmetic explains."""
        worst, left = 0.0, _MOST_BYTES
        for tensor in (seen.tensors[name] for name in names):
            if left > 0:
                worst = max(worst, self._distance(tensor.detach()))
                left -= tensor.nbytes
        mine = torch.tensor([worst], dtype=torch.float64)
        return bool(self.gather(mine).max() <= 1)  # NaN is not

    def _distance(self, tensor: torch.Tensor) -> float:
        """Collective: from rank 0's, in units of what may be rounding."""
        values = torch.view_as_real(tensor) if tensor.is_complex() else tensor
        root = values.contiguous().clone()
        group = self._pipeline.group
        root = root.to(exchange_device(group, root.device))
        with self._pipeline.watch.whole("finding out how much replicas differ"):
            wait_for(start_broadcast(root, group, 0))
        root, mine = root.double(), values.to(root.device).double()
        off = (root - mine).abs().nan_to_num(nan=torch.inf, posinf=torch.inf)
        off[(root == mine) | (root.isnan() & mine.isnan())] = 0.0
        if not off.any():
            return 0.0
        eps = torch.finfo(values.dtype).eps if values.is_floating_point() else 0.0
        scale = root[root.isfinite()].abs().max() if root.isfinite().any() else 0.0
        return float(off.max() / (max(ROUNDING, 16 * eps) * scale))


class ReplicaCheck:
    """Compares the replicas now and then; an `Observer` of the pipeline.

    Args:
        pipeline: its group compares.
        names: of the managed parameters.
        every: steps from one check to the next, or "auto".
        ledger: knows some excuses.
    """

    uses_grads = False
    awaits_step = True  # optimizers step after backwards, not inside them

    def __init__(
        self,
        pipeline: Pipeline,
        names: Sequence[str],
        every: int | Literal["auto"],
        ledger: Ledger,
    ) -> None:
        self._pipeline: Pipeline = weakref.proxy(pipeline)
        self._comparison = Comparison(pipeline)
        self.names = names
        self._every = every
        self._ledger = ledger
        self._has_warned = False
        self.name = ""  # where ranks meet that doubt: new and equal on all; "": all do
        self.start_over()

    @property
    def compares_buffers(self) -> bool:
        """Whether module buffers that were broadcast are looked at, too."""
        return self._every != AUTO

    @property
    def compares_frozen(self) -> bool:
        """Whether frozen parameters are. Later one rank may keep averages in them."""
        return self._every != AUTO or self._agreed < 0

    def start_over(self) -> None:
        """What is under way is lost."""
        self._agreed = -1  # the last step at whose beginning all replicas were equal
        self._under_way: Seen | None = None
        self._suspect: Seen | None = None  # differed, and nobody has stepped since
        self._waited = 0  # steps, for an optimizer
        self._was_hooked = False  # by a foreign comm hook, since the last agreement

    def is_due(self, step: int) -> bool:
        """Whether to `begin`; step: synchronised backwards, equal on all ranks."""
        if self._suspect is not None:
            return True
        if self._every == AUTO:
            return step in AUTO_STEPS or step % AUTO_EVERY == 0
        return step % self._every == 0

    def begin(
        self,
        step: int,
        params: Sequence[torch.Tensor],
        frozen: Mapping[str, torch.Tensor],
        buffers: Mapping[str, torch.Tensor],
    ) -> None:
        """Before a forward: look at this replica.

        The last forward before a backward counts. A rank may run others, also between
        a backward and its step, when parameters are still those of the step before.

        Args:
            step: for which a check is due.
            params: managed parameters, in parameter-index order.
            frozen: other parameters, by name.
            buffers: module buffers, by name, if they should be equal now.
        """
        tensors = {**dict(zip(self.names, params, strict=True)), **frozen}
        sums = {name: int(sum_of_bits(buffer)) for name, buffer in buffers.items()}
        digest = digest_of([*tensors.values(), *buffers.values()])
        self._under_way = Seen(step, tensors, sums, digest)

    def postpone(self) -> None:
        """Gradients are averaged without a backward, perhaps after no forward."""
        self._under_way = None

    # -- at the end of a backward ------------------------------------------------------

    def reduced(self, params: Sequence[torch.nn.Parameter]) -> None:
        """Nothing to do for a bucket."""

    def finished(self) -> None:
        """Collective, if a check is under way: compare.

        Raises:
            ReplicaMismatchError: on all ranks, naming the first parameter that differs.
        """
        was_hooked = self._was_hooked
        self._was_hooked |= is_foreign(self._pipeline.averaging.comm_hook)
        seen, self._under_way = self._under_way, None
        if seen is None:
            return
        ledger = self._ledger
        excuses = (
            Excuse.LOCAL_UPDATES * ledger.was_local
            | Excuse.FOREIGN_HOOK * was_hooked
            | Excuse.DECLARED * ledger.was_excused
        )
        mine = [seen.step, excuses, int(seen.digest)]
        rows = self._comparison.gather(torch.tensor(mine)).tolist()
        steps = [step for step, _, _ in rows]
        if len(set(steps)) > 1:
            rank = self._pipeline.rank
            raise ReplicaMismatchError(words.other_steps(rank, steps))
        if len({digest for _, _, digest in rows}) == 1:
            self._agree(seen.step)
            ledger.was_local = ledger.was_excused = False
        elif self._every == AUTO and any(excuses for _, excuses, _ in rows):
            self._excuse({excuses for _, excuses, _ in rows}, seen)
        else:
            self._doubt(seen)

    def _excuse(self, excuses: set[int], seen: Seen) -> None:
        """They differ, for a reason; which may be a mistake as well."""
        self._suspect = None
        if excuses <= {0, Excuse.LOCAL_UPDATES} and not self._has_warned:
            found = self._comparison.find(seen, self._agreed)
            self._warn(words.local_updates, found)
            self._ledger.was_told = True

    def _agree(self, step: int) -> None:
        self._agreed = step
        self._suspect, self._waited = None, 0
        # What the last reduction brought is still to be applied.
        self._was_hooked = is_foreign(self._pipeline.averaging.comm_hook)

    def _doubt(self, seen: Seen) -> None:
        """They differ; does an optimizer step before the next backward?"""
        self._suspect = seen
        self._waited += 1
        limit = PATIENCE if self._every == AUTO else 1
        if self._waited > limit or seen.buffer_sums or not self.awaits_step:
            self._confirm()

    # -- before a step -----------------------------------------------------------------

    def confirm(self) -> None:
        """If the replicas differed in the backward, and all ranks come here: still?

        Only some ranks may step, and send the others their parameters. Then the next
        backward compares again.

        Raises:
            ReplicaMismatchError: on all ranks, naming the first parameter that differs.
        """
        seen, group = self._suspect, self._pipeline.group
        if seen is None:
            return
        if self.name and has_store(group):
            store = group_store(group, f"{self.name}/{seen.step}")
            if not all_come(store, group.size()):
                return
        self._confirm()

    def _confirm(self) -> None:
        """Collective: are the suspects different now?"""
        seen, self._suspect = self._suspect, None
        self._under_way = None  # of a forward that not all ranks ran, before the step
        assert seen is not None
        found = self._comparison.find(seen, self._agreed)
        if not found.names:
            self._agree(seen.step)
        elif self._every == AUTO and self._comparison.is_rounding(seen, found.names):
            self._warn(words.rounding, found)
        else:
            raise ReplicaMismatchError(words.drifted_apart(found))

    def _warn(self, text: Callable[[words.Finding], str], found: words.Finding) -> None:
        if found.names and not self._has_warned:
            self._has_warned = True
            warn(text(found))


def is_foreign(hook: CommHook | None) -> bool:
    """Whether a comm hook may bring other averages on other ranks.

    Not those of minidp and of torch, unless they wrap one of somebody else; but after
    torch's for local SGD replicas differ.
    """
    if hook is None:
        return False
    place = getattr(hook.hook, "__module__", None) or ""
    name = getattr(hook.hook, "__qualname__", "")
    is_known = place.startswith(("minidp.", "torch.distributed.algorithms."))
    is_wrapper = not name.isidentifier()  # a function in a function, or with arguments
    return not is_known or is_wrapper or "post_localSGD" in name


def all_come(store: Store, num_ranks: int) -> bool:
    """Whether all ranks come here before one gives up; the same answer on all.

    Args:
        store: for this one question.
        num_ranks: to wait for.
    """
    deadline = time.monotonic() + CONFIRM_SECONDS
    if store.add("come", 1) == num_ranks:
        store.compare_set("verdict", "", "all")
    while not store.check(["verdict"]):
        if time.monotonic() > deadline:
            store.compare_set("verdict", "", "not all")
        time.sleep(POLL_SECONDS)
    return store.get("verdict") == b"all"


def digest_of(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """One number for several tensors: 0-D, int64, on the device of the first."""
    small: dict[torch.device, list[torch.Tensor]] = {}
    sums = []
    for tensor in tensors:
        if tensor.nbytes < SMALL_BYTES:
            small.setdefault(tensor.device, []).append(_plain(tensor).view(torch.uint8))
        else:
            sums.append(sum_of_bits(tensor))
    sums += [sum_of_bits(torch.cat(pieces)) for pieces in small.values()]
    found = torch.stack([each.to(sums[0].device) for each in sums])
    # Odd factors: no change of one number is lost, and their order counts.
    factors = torch.arange(1, 2 * len(sums), 2, device=found.device)
    return (found * factors).sum()


def sum_of_bits(tensor: torch.Tensor) -> torch.Tensor:
    """All bits of a tensor in one int64 (0-D, on its device): a sum that wraps around.

    Each four bytes count with an odd factor that depends on their place: any change
    of one element changes the sum, and so does any exchange of two.
    """
    flat = _plain(tensor)
    size = flat.element_size()
    if flat.storage_offset() * size % _WORD:  # a part of another tensor, on this rank
        flat = flat.clone()
    count = flat.numel() * size // _WORD * _WORD // size
    words = flat[:count].view(torch.int32)
    rest = flat[count:].view(_INTEGERS[size]).long()  # less than a word
    factors = 2 * torch.arange(min(len(words), _CHUNK), device=flat.device) + 1
    places = len(words) + torch.arange(len(rest), device=flat.device)
    total = (rest * (2 * places + 1)).sum()
    for start in range(0, len(words), _CHUNK):
        chunk = words[start : start + _CHUNK].long()
        total += (chunk * factors[: len(chunk)]).sum() + 2 * start * chunk.sum()
    return total


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    """The values as they lie in memory: 1-D, contiguous, real."""
    flat = tensor.detach().resolve_conj().resolve_neg().contiguous().view(-1)
    if flat.stride(0) != 1:  # one element with a stride counts as contiguous
        flat = flat.clone(memory_format=torch.contiguous_format)
    return torch.view_as_real(flat).view(-1) if flat.is_complex() else flat
