"""Say where each replica stands, for ways back to training: ``reset()`` and ``join()``.

A rank that raised before its step has other parameters than one that stepped, and so
has a rank whose batch came too late for the others. No rank can see this alone. So the
ranks exchange a digest of their `Standing`, and if it differs, the whole of it.
`find_differences` then says what is not equal, and on which ranks.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from minidp.comm import ProcessGroup, exchange_device, gather_bytes, gather_integers

from .optimizers import OptimizerFacts

_SHOWN = 3  # names of one kind that a text shows


class Standing(NamedTuple):
    """What one replica holds, as checksums by name, and what its optimizers did."""

    parameters: Mapping[str, int]  # those that are averaged
    frozen: Mapping[str, int]
    buffers: Mapping[str, int]  # those that no forward broadcasts
    optimizers: Mapping[str, OptimizerFacts]  # by key, see `optimizers.by_key`

    def to_bytes(self) -> bytes:
        """Return the same as JSON. Equal standings give equal bytes."""
        return json.dumps(self).encode()


def from_bytes(text: bytes) -> Standing:
    """Return what `Standing.to_bytes` wrote."""
    parameters, frozen, buffers, optimizers = json.loads(text)
    facts = {key: OptimizerFacts(*each) for key, each in optimizers.items()}
    return Standing(parameters, frozen, buffers, facts)


def exchange(
    mine: Standing, group: ProcessGroup, device: torch.device
) -> list[Standing]:
    """Return the standings of all ranks, by rank. All ranks must call this together."""
    text, device = mine.to_bytes(), exchange_device(group, device)
    lengths = [length for (length,) in gather_integers([len(text)], group, device)]
    return [from_bytes(each) for each in gather_bytes(text, lengths, group, device)]


class Differences(NamedTuple):
    """What differs between ranks: sentences for people, and facts to act upon."""

    texts: list[str]
    names: list[str]  # of parameters that differ, frozen ones last
    parameters: list[str]
    steps: str  # how many optimizer steps each rank made, if not equally many
    settings: bool  # of optimizers: learning rate ...
    shared: list[str]  # keys of optimizers that all ranks have
    unknown: list[str]  # names of classes among them whose state cannot be copied


def find_differences(standings: Sequence[Standing]) -> Differences:
    """Compare the standings of all ranks, which come in the order of the ranks."""
    parameters = _differing([s.parameters for s in standings])
    frozen = _differing([s.frozen for s in standings])
    buffers = _differing([s.buffers for s in standings])
    texts = []
    for kind, found in (("parameters", parameters), ("frozen parameters", frozen)):
        if found:
            texts.append(f"{kind} {_some([*found])} on {_odd_ranks(found)}")
    every = [s.optimizers for s in standings]
    shared = [k for k in every[0] if all(k in each for each in every)]
    missed, settings, unknown = [], False, []
    for key in shared:
        facts = [each[key] for each in every]
        name, steps = facts[0].name, [each.steps for each in facts]
        if len(set(steps)) > 1:
            counts = ", ".join(f"{n} on rank {rank}" for rank, n in enumerate(steps))
            missed.append(f"{name}: {counts}")
        if not facts[0].is_known and any(each.has_state for each in facts):
            unknown.append(name)
        if own := _differing([{"": each.settings} for each in facts]):
            settings = True
            texts.append(f"settings of {name} (learning rate ...) on {_odd_ranks(own)}")
        if state := _differing([each.state for each in facts]):
            texts.append(
                f"state of {name} for {_some([*state])} on {_odd_ranks(state)}"
            )
    if missed:
        text = f"numbers of optimizer steps since ranks agreed ({'; '.join(missed)})"
        texts.append(text)
    # Running statistics that no forward broadcasts differ in every healthy training. So
    # they are told only beside another difference.
    if texts and buffers:
        texts.append(f"module buffers {_some([*buffers])} on {_odd_ranks(buffers)}")
    return Differences(
        texts,
        [*parameters, *frozen],
        [*parameters],
        "; ".join(missed),
        settings,
        shared,
        sorted(set(unknown)),
    )


def _differing(of_ranks: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """Return the values of all ranks under each name where they differ.

    The value of a rank that lacks the name is None.
    """
    names = dict.fromkeys(name for each in of_ranks for name in each)
    rows = {name: [each.get(name) for each in of_ranks] for name in names}
    return {name: row for name, row in rows.items() if len({*row}) > 1}


def _odd_ranks(found: Mapping[str, Sequence[Any]]) -> str:
    """Return "rank 1, 2": the ranks whose values are not the most frequent ones."""

    def odd(row: Sequence[Any]) -> Iterator[int]:
        usual = max(row, key=list(row).count)  # the first one of equally frequent ones
        return (rank for rank, value in enumerate(row) if value != usual)

    ranks = sorted({rank for row in found.values() for rank in odd(row)})
    return f"rank {', '.join(map(str, ranks))}"


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more
