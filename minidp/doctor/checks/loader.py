"""Check that each rank reads its own part of the data (``doctor.check_loader``)."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from torch.utils.data import IterableDataset, RandomSampler, SequentialSampler, Subset

from minidp.doctor.findings import Finding, Found, failed, ok, skipped, warning
from minidp.doctor.words import join

from .ranks import digest_of, digest_of_states, judge_streams

_SPLIT = (
    "DataLoader(dataset, sampler=DistributedSampler(dataset), shuffle=False): the "
    "sampler shuffles and splits; call sampler.set_epoch(epoch) before each epoch"
)
Facts = Mapping[int, Mapping[str, Any]]  # results of `read_loader` by rank


def sampler_of(loader: Any) -> Any:
    """Return the loader's sampler or batch sampler that splits data by rank.

    If neither does, ``loader.sampler``; None if there is no such attribute.
    """
    batch_sampler = getattr(loader, "batch_sampler", None)
    inner = getattr(batch_sampler, "sampler", None)
    sampler = getattr(loader, "sampler", None)
    return next(filter(splits, (batch_sampler, inner, sampler)), sampler)


def splits(sampler: Any) -> bool:
    """Return whether a sampler splits data by rank (has ``num_replicas``, ``rank``)."""
    return hasattr(sampler, "num_replicas") and hasattr(sampler, "rank")


def judge_sampler(loader: Any, rank: int, world_size: int) -> Finding:
    """Judge whether a loader's sampler gives this rank a part of its own.

    Ok: it splits for this rank; or does not, but there is one rank, or a Subset.
    Failed: made for another rank or world size, or no dataset. Warning: each rank reads
    all. Skipped: an IterableDataset, or a sampler of an unknown class.
    """
    if not hasattr(loader, "dataset"):
        found = f"a {type(loader).__name__} has no dataset to split"
        return failed(found, "pass the DataLoader of the training data")
    watch = "doctor.watch compares what the ranks are fed"
    sampler = sampler_of(loader)
    kind = type(sampler).__name__
    if splits(sampler):
        made_for = f"{sampler.rank} of {sampler.num_replicas}"
        here = f"{rank} of {world_size}"
        if made_for != here:
            found = f"the {kind} is made for rank {made_for}, this is rank {here}"
            remedy = "make it after init_process_group(), without num_replicas and rank"
            return failed(found, remedy)
        if not getattr(sampler, "shuffle", True):
            return ok(f"{kind} without shuffling: right for validation only")
        return ok(f"{kind}, made for this rank; it shuffles")
    if world_size == 1:
        return ok(f"{kind}; one rank")
    if isinstance(loader.dataset, IterableDataset):
        found = "an IterableDataset must split itself by rank, which cannot be seen"
        return skipped(found, watch)
    if isinstance(loader.dataset, Subset):
        return ok(f"{kind} over a Subset: compared below")
    if isinstance(sampler, RandomSampler):
        found = f"shuffle=True ({kind}): every rank draws from all the data"
        return warning(found, _SPLIT)
    if isinstance(sampler, SequentialSampler):
        found = f"no sampler ({kind}): every rank reads all the data, in the same order"
        return warning(found, _SPLIT)
    return skipped(f"a {kind} is unknown here: does it split by rank?", watch)


def read_loader(loader: Any) -> dict[str, Any]:
    """Return facts of a loader for the judges in `COMPARED`; None for what it lacks."""
    dataset, sampler = getattr(loader, "dataset", None), sampler_of(loader)
    samples, subset = _length(dataset), None
    if isinstance(dataset, Subset):
        subset = digest_of([*dataset.indices])
        dataset = dataset.dataset
    names = ("augment", "augmentation", "transform", "transforms")
    transforms = [name for name in names if getattr(dataset, name, None) is not None]
    return {
        "batches": _length(loader),
        "samples": samples,
        "subset": subset,
        "splits": splits(sampler),
        "part": getattr(sampler, "rank", None),
        "seed": getattr(sampler, "seed", None),
        "epoch": getattr(sampler, "epoch", None),
        "streams": digest_of_states(),
        "draws": f"the dataset has a {join(transforms)}" if transforms else "",
    }


def _length(sized: Any) -> int | None:
    """Return ``len(sized)``; None if it has no length."""
    with suppress(TypeError, NotImplementedError):
        return len(sized)
    return None


def judge_batches(of_rank: Facts) -> Finding:
    """Judge numbers of batches: failed if unequal; skipped if one is None; or ok."""
    counts = {rank: facts["batches"] for rank, facts in of_rank.items()}
    if None in counts.values():
        return skipped("the loader has no length")
    if len(set(counts.values())) > 1:
        rows = join(f"{count} on rank {rank}" for rank, count in counts.items())
        remedy = (
            "else the last step hangs: one dataset, drop_last=True, or model.join()"
        )
        return failed(rows, remedy)
    return ok(f"{next(iter(counts.values()))} on each rank")


def judge_parts(of_rank: Facts) -> Found:
    """Return failed if ranks' samplers overlap, a warning if Subsets are equal; or ok.

    Overlap: two have one rank, or seeds, lengths, epochs differ. [] with one rank, or
    if neither all have a sampler that splits nor all a Subset.
    """
    all_facts = [*of_rank.values()]
    if len(all_facts) == 1:
        return []  # judge_sampler has reported on the sampler
    if not all(facts["splits"] for facts in all_facts):
        subsets = [facts["subset"] for facts in all_facts]
        if None in subsets:
            return []
        if len({*subsets}) < len(subsets):
            return warning("ranks have the same Subset of the data", _SPLIT)
        return ok("each rank has a Subset of its own")
    parts = [facts["part"] for facts in all_facts]
    if len({*parts}) < len(parts):
        found = f"samplers for ranks {join(parts)}: some data is read twice, some never"
        remedy = "make the sampler after init_process_group(), without rank"
        return failed(found, remedy)
    for name, remedy in {
        "seed": "give all samplers the same seed: each must shuffle alike",
        "samples": "build the same dataset on all ranks; the sampler splits it",
        "epoch": "call sampler.set_epoch(epoch) on all ranks alike",
    }.items():
        values = [facts[name] for facts in all_facts]
        if any(value != values[0] for value in values):
            found = f"the ranks differ in {name} ({join(values)}): parts overlap"
            return failed(found, remedy)
    return ok("the ranks' samplers fit together")


COMPARED = {
    "batches": judge_batches,
    "parts": judge_parts,
    "random streams": judge_streams,
}
