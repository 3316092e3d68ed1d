"""Compare the final weights of all ranks, for ``minidp run --report``."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

from torch import nn

from minidp.comm import gather_json, group_ranks, post_json
from minidp.errors import shortened
from minidp.replica import sum_of_bits

from .ranks import from_environment

if TYPE_CHECKING:
    from minidp.data_parallel import DataParallel

SECONDS = 60.0  # how long rank 0 waits for the other ranks
_MAX_NAMES = 3


class WeightWatch:
    """Keep the modules that a script wraps, to compare their parameters at its end.

    A script may wrap many models, one after the other. So a module is let go once its
    wrapper is gone. But if the wrapper was never used, its module is kept: it may train
    on without the wrapper, which is the mistake to be found.
    """

    def __init__(self) -> None:
        self._held: dict[int, tuple[weakref.ref[DataParallel], nn.Module]] = {}
        self._ledgers: list[Any] = []
        self._names: list[list[str]] = []  # names of averaged parameters, by model
        self._ranks: list[list[int]] = []  # ranks of the group, by model

    def add(self, ddp: DataParallel) -> None:
        """Keep the module of a new wrapper, and let go of some that are not needed."""
        for number, (wrapper, _) in list(self._held.items()):
            if wrapper() is None and self._ledgers[number].finalized:
                del self._held[number]
        self._held[len(self._ledgers)] = weakref.ref(ddp), ddp.module
        self._ledgers.append(ddp._reducer.ledger)
        self._names.append([*ddp._reducer.names])
        self._ranks.append(group_ranks(ddp.process_group))

    @property
    def num_averaged(self) -> int:
        """How many synchronised backwards all models had, also those that are gone."""
        return sum(ledger.finalized for ledger in self._ledgers)

    def gather(self, store: Any) -> str:
        """Return on rank 0 which weights differ from those of the group's first rank.

        The text is empty if none differ, and on all other ranks, which only post their
        checksums. Rank 0 waits for a minute at most, and compares those that came.
        """
        rank, size = from_environment("RANK", 0), from_environment("WORLD_SIZE", 1)
        if store is None:
            return ""
        mine = {
            str(number): [self._ranks[number], self._sums(number, module)]
            for number, (_, module) in self._held.items()
        }
        if rank:
            post_json(store, "sums", rank, mine)
            return ""
        every = gather_json(store, "sums", range(1, size), SECONDS) | {0: mine}
        texts = []
        for other, models in sorted(every.items()):
            for number, (ranks, sums) in models.items():
                first = min(ranks, default=other)
                theirs = every.get(first, {}).get(number, [ranks, sums])[1]
                odd = [n for n in sums if n in theirs and sums[n] != theirs[n]]
                if odd:
                    names = shortened(odd, _MAX_NAMES)
                    texts.append(f"rank {other} differs from rank {first} in {names}")
        return "; ".join(texts)

    def _sums(self, number: int, module: nn.Module) -> dict[str, int]:
        params = dict(module.named_parameters())
        names = [name for name in self._names[number] if name in params]
        return {name: int(sum_of_bits(params[name])) for name in names}
