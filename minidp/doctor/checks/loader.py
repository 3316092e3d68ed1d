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
    "use DataLoader(dataset, sampler=DistributedSampler(dataset), shuffle=False): this "
    "sampler shuffles and splits; call sampler.set_epoch(epoch) before each epoch"
)
Facts = Mapping[int, Mapping[str, Any]]  # results of `read_loader` by rank


def sampler_of(loader: Any) -> Any:
    """Return the loader's sampler or batch sampler that splits the data by rank.

    If neither does, it is the sampler, or None if the loader has none.
    """
    batch_sampler = getattr(loader, "batch_sampler", None)
    inner = getattr(batch_sampler, "sampler", None)
    sampler = getattr(loader, "sampler", None)
    return next(filter(splits, (batch_sampler, inner, sampler)), sampler)


def splits(sampler: Any) -> bool:
    """Return whether a sampler splits the data by rank, as DistributedSampler does."""
    return hasattr(sampler, "num_replicas") and hasattr(sampler, "rank")


def judge_sampler(loader: Any, rank: int, world_size: int) -> Finding:
    """Judge whether the sampler of a loader gives this rank a part of its own.

    The check fails for a sampler that was made for another rank, and warns of one that
    reads everything on each rank. What cannot be seen from outside is skipped.
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
    """Return facts of a loader, for `COMPARED`. What it does not tell is None."""
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
    with suppress(TypeError, NotImplementedError):
        return len(sized)
    return None


def judge_batches(of_rank: Facts) -> Finding:
    """Judge whether all ranks have equally many batches."""
    counts = {rank: facts["batches"] for rank, facts in of_rank.items()}
    if None in counts.values():
        return skipped("the loader has no length")
    if len(set(counts.values())) > 1:
        rows = join(f"{count} on rank {rank}" for rank, count in counts.items())
        remedy = (
            "use the same dataset on all ranks, drop_last=True, or model.join(); as it "
            "is, the last step hangs"
        )
        return failed(rows, remedy)
    return ok(f"{next(iter(counts.values()))} on each rank")


def judge_parts(of_rank: Facts) -> Found:
    """Judge whether the parts that the ranks read overlap.

    The parts of two samplers overlap if both were made for the same rank, and also if
    they shuffle differently, because their seeds, lengths or epochs differ.
    """
    all_facts = [*of_rank.values()]
    if len(all_facts) == 1:
        return []  # `judge_sampler` has said everything
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
