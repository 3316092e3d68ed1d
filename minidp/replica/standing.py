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

from minidp.comm import ProcessGroup, exchange_device, gather_bytes
from minidp.errors import shortened

from .optimizers import OptimizerFacts
from .schedulers import are_apart, can_copy_scheduler

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
    texts = gather_bytes(mine.to_bytes(), group, exchange_device(group, device))
    return [from_bytes(each) for each in texts]


class Differences(NamedTuple):
    """What differs between ranks: sentences for people, and facts to act upon."""

    texts: list[str]
    names: list[str]  # of parameters that differ, frozen ones last
    parameters: list[str]
    steps: str  # how many optimizer steps each rank made, if not equally many
    shared: list[str]  # keys of optimizers that all ranks have
    left: list[str]  # names of optimizers and schedulers that cannot be copied


def find_differences(standings: Sequence[Standing]) -> Differences:
    """Compare the standings of all ranks, which come in the order of the ranks."""
    parameters = _differing([s.parameters for s in standings])
    frozen = _differing([s.frozen for s in standings])
    buffers = _differing([s.buffers for s in standings])
    texts = []
    for kind, found in (("parameters", parameters), ("frozen parameters", frozen)):
        if found:
            texts.append(f"{kind} {shortened([*found], _SHOWN)} on {_odd_ranks(found)}")
    every = [s.optimizers for s in standings]
    shared = [k for k in every[0] if all(k in each for each in every)]
    of_optimizers = [
        _compare_optimizer([each[key] for each in every]) for key in shared
    ]
    texts += [text for each in of_optimizers for text in each.texts]
    missed = "; ".join(each.steps for each in of_optimizers if each.steps)
    # Where a checkpoint was loaded, equal replicas have made different steps. They are
    # told if something else differs, or if there may be what nobody can compare.
    is_whole = all(each.is_whole for facts in every for each in facts.values())
    if missed and (texts or not is_whole):
        texts.append(f"numbers of optimizer steps since ranks agreed ({missed})")
    # Running statistics that no forward broadcasts differ in every healthy training. So
    # they are told only beside another difference.
    if texts and buffers:
        texts.append(
            f"module buffers {shortened([*buffers], _SHOWN)} on {_odd_ranks(buffers)}"
        )
    return Differences(
        texts,
        [*parameters, *frozen],
        [*parameters],
        missed,
        shared,
        sorted({name for each in of_optimizers for name in each.left}),
    )


class _OfOptimizer(NamedTuple):
    """What differs between ranks in one optimizer, which all of them have."""

    texts: list[str]
    steps: str  # how many it made on each rank, if not equally many
    left: list[str]  # names of classes, its own or schedulers', which cannot be copied


def _compare_optimizer(facts: Sequence[OptimizerFacts]) -> _OfOptimizer:
    name, is_known = facts[0].name, facts[0].is_known
    texts, missed, left = [], "", []
    steps = [each.steps for each in facts]
    if len(set(steps)) > 1:
        missed = f"{name}: {_on_ranks(steps)}"
    if not is_known and any(each.has_state for each in facts):
        left.append(name)
    if own := _differing([{"": each.settings} for each in facts]):
        texts.append(f"settings of {name} (learning rate ...) on {_odd_ranks(own)}")
    if state := _differing([each.state for each in facts]):
        texts.append(
            f"state of {name} for {shortened([*state], _SHOWN)} on {_odd_ranks(state)}"
        )
    for path, row in _differing([each.schedulers for each in facts]).items():
        progress, scheduler = [each or [] for each in row], path.rpartition(".")[2]
        if not (is_known and can_copy_scheduler(path, progress)):
            left.append(scheduler)
        if are_apart(progress):
            epochs = [" and ".join(map(str, each)) or "none" for each in progress]
            texts.append(f"last_epoch of {scheduler} ({_on_ranks(epochs)})")
    return _OfOptimizer(texts, missed, left)


def _on_ranks(values: Sequence[object]) -> str:
    """Return "2 on rank 0, 1 on rank 1"."""
    return ", ".join(f"{value} on rank {rank}" for rank, value in enumerate(values))


def _differing(of_ranks: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """Return the values of all ranks under each name where they differ.

    The value of a rank that lacks the name is None.
    """
    names = dict.fromkeys(name for each in of_ranks for name in each)
    rows = {name: [each.get(name) for each in of_ranks] for name in names}
    return {n: row for n, row in rows.items() if any(v != row[0] for v in row)}


def _odd_ranks(found: Mapping[str, Sequence[Any]]) -> str:
    """Return "rank 1, 2": the ranks whose values are not the most frequent ones."""

    def odd(row: Sequence[Any]) -> Iterator[int]:
        usual = max(row, key=list(row).count)  # the first one of equally frequent ones
        return (rank for rank, value in enumerate(row) if value != usual)

    ranks = sorted({rank for row in found.values() for rank in odd(row)})
    return f"rank {', '.join(map(str, ranks))}"
