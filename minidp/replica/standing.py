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
from .scalers import Scale, can_copy_scales
from .schedulers import are_apart, can_copy_scheduler, class_of

_SHOWN = 3  # names of one kind that a text shows


class Standing(NamedTuple):
    """What one replica holds, as checksums by name, and what its optimizers did."""

    parameters: Mapping[str, int]  # those that are averaged
    frozen: Mapping[str, int]
    buffers: Mapping[str, int]  # those that no forward broadcasts
    optimizers: Mapping[str, list[OptimizerFacts]]  # by key, see `optimizers.by_key`
    scales: list[Scale] | None  # of losses, see `scalers.scales_of`
    hook: Mapping[str, int]  # what the comm hook's state counts, see `CommHook.counts`

    def to_bytes(self) -> bytes:
        """Return the same as JSON. Equal standings give equal bytes."""
        return json.dumps(self).encode()


def from_bytes(text: bytes) -> Standing:
    """Return what `Standing.to_bytes` wrote."""
    found = Standing(*json.loads(text))
    facts = {
        key: [OptimizerFacts(*each) for each in alike]
        for key, alike in found.optimizers.items()
    }
    if found.scales is not None:
        scales = [(scale, steps) for scale, steps in found.scales]
        found = found._replace(scales=scales)
    return found._replace(optimizers=facts)


def exchange(
    mine: Standing, group: ProcessGroup, device: torch.device
) -> list[Standing]:
    """Return the standings of all ranks, by rank. All ranks must call this together."""
    texts = gather_bytes(mine.to_bytes(), group, exchange_device(group, device))
    return [from_bytes(each) for each in texts]


class Shared(NamedTuple):
    """An optimizer that all ranks have."""

    key: str  # see `optimizers.by_key`
    # Its place among those of this key, or None if ranks have unequally many of them,
    # and it can be any.
    place: int | None


class Differences(NamedTuple):
    """What differs between ranks: sentences for people, and facts to act upon."""

    texts: list[str]
    names: list[str]  # of parameters that differ, frozen ones last
    parameters: list[str]
    steps: str  # how many optimizer steps each rank made, if not equally many
    shared: list[Shared]
    left: list[str]  # names of optimizers and schedulers that cannot be copied


def find_differences(
    standings: Sequence[Standing], missed_before: str = ""
) -> Differences:
    """Compare the standings of all ranks, which come in the order of the ranks.

    ``missed_before`` has the numbers of optimizer steps, where these were not equal
    when they were last counted and nothing has made the ranks agree since then.
    """
    parameters = _differing([s.parameters for s in standings])
    frozen = _differing([s.frozen for s in standings])
    buffers = _differing([s.buffers for s in standings])
    texts = []
    for kind, found in (("parameters", parameters), ("frozen parameters", frozen)):
        if found:
            texts.append(f"{kind} {shortened([*found], _SHOWN)} on {_odd_ranks(found)}")
    shared, of_optimizers, left = _compare_optimizers([s.optimizers for s in standings])
    texts += [text for each in of_optimizers for text in each.texts]
    scales = [s.scales or [] for s in standings]
    has_doubtful_scale = any(s.scales is None for s in standings)
    if not has_doubtful_scale and are_apart(scales):
        said = [" and ".join(f"{s:g}, right for {n}" for s, n in row) for row in scales]
        texts.append(f"scale of GradScaler ({_on_ranks([s or 'none' for s in said])})")
        left += [] if can_copy_scales(scales) else ["a GradScaler"]
    for name, row in _differing([s.hook for s in standings]).items():
        texts.append(f"{name} of the comm hook's state ({_on_ranks(row)})")
    missed_now = "; ".join(each.steps for each in of_optimizers if each.steps)
    missed = missed_now or missed_before
    left += ["a GradScaler"] if missed and has_doubtful_scale else []
    # Where a checkpoint was loaded, equal replicas have made different steps. They are
    # told if something else differs, or if there may be what nobody can compare.
    may_hide = has_doubtful_scale or any(each.doubts for each in of_optimizers)
    if missed and (texts or may_hide):
        texts.append(f"numbers of optimizer steps since ranks agreed ({missed})")
    # Running statistics that no forward broadcasts differ in every healthy training. So
    # they are told only beside another difference.
    if texts and buffers:
        texts.append(
            f"module buffers {shortened([*buffers], _SHOWN)} on {_odd_ranks(buffers)}"
        )
    left += [name for each in of_optimizers for name in each.left]
    in_doubt = [each for each in of_optimizers if each.steps or missed_before]
    left += [name for each in in_doubt for name in each.doubts]
    names = [*parameters, *frozen]
    return Differences(texts, names, [*parameters], missed, shared, sorted(set(left)))


class _OfOptimizer(NamedTuple):
    """What differs between ranks in one optimizer, which all of them have."""

    texts: list[str]
    steps: str  # how many it made on each rank, if not equally many
    left: list[str]  # names of classes, its own or schedulers', which cannot be copied
    # Names of what its next step may depend on, and of which nobody knows that it is
    # equal on all ranks: a class, or hooks in its step.
    doubts: list[str]


_Alike = Sequence[OptimizerFacts]  # a rank's optimizers of one key


def _compare_optimizers(
    of_ranks: Sequence[Mapping[str, _Alike]],
) -> tuple[list[Shared], list[_OfOptimizer], list[str]]:
    """Return what all ranks have, how that differs, and what only some of them have.

    The last are names of classes, without those whose parameters are all in optimizers
    that every rank has: these are old ones, which Python has not freed yet.
    """
    shared, found = [], []
    covered: set[str] = set()  # names of parameters
    only_some: list[OptimizerFacts] = []
    for key in dict.fromkeys(key for each in of_ranks for key in each):
        alike = [each.get(key, []) for each in of_ranks]
        if not all(alike):
            only_some += [facts for each in alike for facts in each]
            continue
        covered.update(alike[0][0].settings)
        if len({*map(len, alike)}) == 1:
            shared += [Shared(key, place) for place in range(len(alike[0]))]
            found += [_compare_optimizer(facts) for facts in zip(*alike, strict=True)]
        else:
            shared.append(Shared(key, None))
            found.append(_compare_alike(alike))
    left = [facts.name for facts in only_some if not covered.issuperset(facts.settings)]
    return shared, found, left


def _compare_optimizer(facts: Sequence[OptimizerFacts]) -> _OfOptimizer:
    name, is_known = facts[0].name, facts[0].is_known
    texts, missed, left = [], "", []
    steps = [each.steps for each in facts]
    if len(set(steps)) > 1:
        missed = f"{name}: {_on_ranks(steps)}"
    if not is_known and any(each.has_state for each in facts):
        left.append(name)
    if own := _differing([each.settings for each in facts]):
        texts.append(f"settings of {name} (learning rate ...) on {_odd_ranks(own)}")
    if state := _differing([each.state for each in facts]):
        texts.append(
            f"state of {name} for {shortened([*state], _SHOWN)} on {_odd_ranks(state)}"
        )
    for path, row in _differing([each.schedulers for each in facts]).items():
        progress, scheduler = [each or [] for each in row], class_of(path)
        if not (is_known and can_copy_scheduler(path, progress)):
            left.append(scheduler)
        if are_apart(progress):
            epochs = [" and ".join(map(str, each)) or "none" for each in progress]
            texts.append(f"last_epoch of {scheduler} ({_on_ranks(epochs)})")
    others = _differing([each.steppers for each in facts])
    return _OfOptimizer(texts, missed, left, [*map(class_of, others), *_doubts(facts)])


def _doubts(facts: Sequence[OptimizerFacts]) -> list[str]:
    """Return names of what an optimizer's next step may depend on, if not equal."""
    are_equal = len({each.attributes for each in facts}) == 1
    unknown = [name for each in facts for name in each.hidden]
    return unknown if are_equal else [facts[0].name, *unknown]


def _compare_alike(of_ranks: Sequence[_Alike]) -> _OfOptimizer:
    """Compare optimizers of one key, of which ranks have unequally many.

    Some may be old ones, which Python has not freed yet. So a rank with fewer must have
    among its own nothing that a rank with more has not.
    """
    name, texts, missed = of_ranks[0][0].name, [], ""
    steps = [sorted(facts.steps for facts in alike) for alike in of_ranks]
    if are_apart(steps):
        said = [" and ".join(map(str, each)) for each in steps]
        missed = f"{name}: {_on_ranks(said)}"
    if are_apart([_points_of(alike) for alike in of_ranks]):
        numbers = _on_ranks([len(alike) for alike in of_ranks])
        texts.append(f"state of {name} (objects of the class: {numbers})")
    every = [facts for alike in of_ranks for facts in alike]
    return _OfOptimizer(texts, missed, [], _doubts(every))


def in_use(alike: _Alike) -> int | None:
    """Return which of a rank's optimizers of one key it uses, or None if unknown.

    Others may be old ones, which Python has not freed yet. The one that is used has
    stepped last, if all of them have stepped. If one has not, it may be a new one.
    """
    if len(alike) == 1:
        return 0
    last = [[*facts.last_step] for facts in alike]
    return last.index(max(last)) if all(last) and last.count(max(last)) == 1 else None


def _points_of(alike: _Alike) -> list[str]:
    """Return what must be the same on all ranks of each optimizer, as text."""
    return [
        json.dumps([facts.settings, facts.state, facts.schedulers], sort_keys=True)
        for facts in alike
    ]


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
