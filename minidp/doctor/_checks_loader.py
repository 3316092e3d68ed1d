"""``doctor.check_loader``: does every rank get its own part of the data?"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from torch.utils.data import (
    DataLoader,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    Subset,
)

from ._consultation import Consultation, Facts, collect
from ._findings import Finding, Report, failed, join, ok, skipped, warning
from ._random_streams import digest_of_states, judge_streams, state_of

_SPLIT = (
    "DataLoader(dataset, sampler=DistributedSampler(dataset), shuffle=False): the "
    "sampler shuffles and splits; call sampler.set_epoch(epoch) before each epoch"
)


def examine_loader(loader: Any, group: Any, seconds: float) -> Report:
    """All checks of a loader; see `doctor.check_loader`."""
    consultation = Consultation("minidp doctor: the loader", group, seconds)
    rank, world_size = consultation.rank, consultation.world_size
    consultation.findings += collect(
        {
            "sampler": lambda: judge_sampler(loader, rank, world_size),
            "workers": lambda: judge_workers(loader),
        }
    )
    return consultation.conclude(_facts(loader), _judge_ranks)


def sampler_of(loader: Any) -> Any:
    """The sampler that says which samples: the one that splits, if there is one."""
    candidates = [getattr(loader, "batch_sampler", None)]
    candidates.append(getattr(candidates[0], "sampler", None))
    candidates.append(getattr(loader, "sampler", None))
    splitting = (c for c in candidates if splits(c))
    return next(splitting, candidates[-1])


def splits(sampler: Any) -> bool:
    """Whether a sampler gives each rank a part of its own."""
    return hasattr(sampler, "num_replicas") and hasattr(sampler, "rank")


def judge_sampler(loader: Any, rank: int, world_size: int) -> Finding:
    """Whether it splits the data, and for this rank."""
    check = "sampler"
    if not hasattr(loader, "dataset"):
        found = f"a {type(loader).__name__} has no dataset to split"
        return failed(check, found, "pass the DataLoader of the training data")
    if isinstance(loader.dataset, IterableDataset):
        found = "an IterableDataset must split itself by rank, which cannot be seen"
        remedy = "doctor.watch compares what the ranks are fed"
        return skipped(check, found, remedy)
    sampler = sampler_of(loader)
    kind = type(sampler).__name__
    if splits(sampler):
        return _judge_split(sampler, rank, world_size)
    if world_size == 1:
        return ok(check, f"{kind}; one rank")
    if isinstance(loader.dataset, Subset):
        return ok(check, f"{kind} over a Subset: compared below")
    if isinstance(sampler, RandomSampler):
        found = f"shuffle=True ({kind}): every rank draws from all the data"
        return warning(check, found, _SPLIT)
    if isinstance(sampler, SequentialSampler):
        found = f"no sampler ({kind}): every rank reads all the data, in the same order"
        return warning(check, found, _SPLIT)
    found = f"a {kind} is unknown here: does it split by rank?"
    return skipped(check, found, "doctor.watch compares what the ranks are fed")


def _judge_split(sampler: Any, rank: int, world_size: int) -> Finding:
    check, kind = "sampler", type(sampler).__name__
    if sampler.num_replicas != world_size or sampler.rank != rank:
        found = (
            f"the {kind} is made for rank {sampler.rank} of {sampler.num_replicas}, "
            f"this is rank {rank} of {world_size}"
        )
        remedy = "make it after init_process_group(), without num_replicas and rank"
        return failed(check, found, remedy)
    if not getattr(sampler, "shuffle", True):
        return ok(check, f"{kind} without shuffling: right for validation only")
    return ok(check, f"{kind}, made for this rank; it shuffles")


def judge_workers(loader: Any) -> Finding:
    """Whether the workers of all processes of this host have cores."""
    check = "workers"
    workers = int(getattr(loader, "num_workers", 0))
    local = os.environ.get("LOCAL_WORLD_SIZE", "1")
    processes, cores = int(local) if local.isdecimal() else 1, os.cpu_count() or 1
    found = f"{processes} x {workers} on {cores} cores"
    if workers and processes * workers > 2 * cores:
        remedy = f"num_workers={max(1, cores // processes)}"
        return warning(check, found, remedy)
    return ok(check, found)


def _facts(loader: Any) -> dict[str, Any]:
    dataset, sampler = getattr(loader, "dataset", None), sampler_of(loader)
    return {
        "batches": _length(loader),
        "samples": _length(dataset),
        "splits": splits(sampler),
        "part": getattr(sampler, "rank", None) if splits(sampler) else None,
        "seed": getattr(sampler, "seed", None),
        "epoch": getattr(sampler, "epoch", None),
        "subset": _digest_of_subset(dataset),
        "transform": _transform_of(dataset),
        "streams": digest_of_states(),
        "is_loader": isinstance(loader, DataLoader),
    }


def _digest_of_subset(dataset: Any) -> str | None:
    return state_of(list(dataset.indices)) if isinstance(dataset, Subset) else None


def _length(sized: Any) -> int | None:
    try:
        return len(sized)
    except (TypeError, NotImplementedError):
        return None


def _transform_of(dataset: Any) -> str:
    """The name of what changes samples, if the dataset says so."""
    while isinstance(dataset, Subset):
        dataset = dataset.dataset
    for name in ("transform", "transforms", "augment", "augmentation"):
        if getattr(dataset, name, None) is not None:
            return name
    return ""


def _judge_ranks(of_rank: Mapping[int, Facts]) -> list[Finding]:
    names = sorted({f["transform"] for f in of_rank.values() if f["transform"]})
    who = f"the dataset has a {join(names)}" if names else ""
    streams = {rank: facts["streams"] for rank, facts in of_rank.items()}
    return [
        judge_batches(of_rank),
        *judge_parts(of_rank),
        judge_streams(streams, who),
    ]


def judge_batches(of_rank: Mapping[int, Facts]) -> Finding:
    """Whether all ranks have equally many batches."""
    check = "batches"
    counts = {rank: facts["batches"] for rank, facts in of_rank.items()}
    if None in counts.values():
        return skipped(check, "the loader has no length")
    if len(set(counts.values())) > 1:
        rows = join(f"{count} on rank {rank}" for rank, count in counts.items())
        remedy = (
            "the longer ranks wait for ever in their last steps: drop_last=True, one "
            "dataset on all ranks, or with model.join()"
        )
        return failed(check, rows, remedy)
    return ok(check, f"{next(iter(counts.values()))} on each rank")


def judge_parts(of_rank: Mapping[int, Facts]) -> list[Finding]:
    """Whether the parts of the ranks are parts of one whole."""
    check, all_facts = "parts", list(of_rank.values())
    if len(all_facts) == 1:
        return []
    if all(facts["splits"] for facts in all_facts):
        return _judge_split_parts(check, all_facts)
    subsets = [facts["subset"] for facts in all_facts]
    if None in subsets:
        return []  # the sampler has been judged
    if len(set(subsets)) < len(subsets):
        found = "ranks have the same Subset of the data"
        return [warning(check, found, _SPLIT)]
    return [ok(check, "each rank has a Subset of its own")]


def _judge_split_parts(check: str, all_facts: list[Facts]) -> list[Finding]:
    parts = [facts["part"] for facts in all_facts]
    if len(set(parts)) < len(parts):
        found = f"samplers for ranks {join(parts)}: some data is read twice, some never"
        remedy = "make the sampler after init_process_group(), without rank"
        return [failed(check, found, remedy)]
    for name, remedy in (
        ("seed", "give all samplers the same seed: each must shuffle alike"),
        ("samples", "build the same dataset on all ranks; the sampler splits it"),
        ("epoch", "call sampler.set_epoch(epoch) on all ranks alike"),
    ):
        values = [facts[name] for facts in all_facts]
        if len(set(map(str, values))) > 1:
            found = f"the ranks differ in {name} ({join(values)}): parts overlap"
            return [failed(check, found, remedy)]
    return [ok(check, "the ranks' samplers fit together")]
