"""``doctor.watch``: what only shows while a script trains.

Every ``judge_*`` is pure: what each rank's `TrainingLog` holds, in; findings out.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ._checks_loader import sampler_of
from ._consultation import Consultation, Facts, option, synchroniser
from ._findings import (
    Finding,
    Report,
    failed,
    join,
    of_ranks,
    ok,
    skipped,
    warning,
)
from ._training_log import TrainingLog

Logs = Mapping[int, Facts]


class Watched:
    """What ``with doctor.watch(...) as watched`` gives: empty until the block ends.

    Iterating gives findings, ``str()`` the table; ``report`` is None if the block
    raised.
    """

    report: Report | None = None

    def __iter__(self) -> Iterator[Finding]:
        return iter(self.report or ())

    def __len__(self) -> int:
        return 0 if self.report is None else len(self.report)

    def __str__(self) -> str:
        return "nothing yet" if self.report is None else str(self.report)


def examine_training(
    log: TrainingLog, loader: Any, group: Any, seconds: float
) -> Report:
    """Judge a log that was stopped, together with those of the other ranks."""
    consultation = Consultation("minidp doctor: training", group, seconds)
    model = log.model
    log.note_values()
    finds_unused = bool(option(model, "find_unused_parameters", default=False))
    is_wrapped = synchroniser(model) is not None
    facts = log.as_json()
    facts["finds_unused"], facts["is_wrapped"] = finds_unused, is_wrapped
    facts["has_loader"], facts["shuffles"] = log.sees_epochs, _shuffles(loader)
    consultation.findings += [
        skipped("watching", f"not everything could be noted: {mishap}")
        for mishap in sorted(log.mishaps)
    ]
    return consultation.conclude(facts, judge_training)


def _shuffles(loader: Any) -> bool:
    sampler = sampler_of(loader)
    return hasattr(sampler, "set_epoch") and bool(getattr(sampler, "shuffle", True))


def judge_training(logs: Logs) -> list[Finding]:
    """All that the logs say."""
    return [
        judge_epochs(logs),
        judge_same_batches(logs),
        judge_same_gradients(logs),
        judge_same_replicas(logs),
        judge_accumulation(logs),
        judge_find_unused(logs),
        judge_saving(logs),
        judge_printing(logs),
    ]


def judge_epochs(logs: Logs) -> Finding:
    """Was ``set_epoch`` called between two epochs?"""
    check = "set_epoch"
    first = logs[min(logs)]
    if not first["has_loader"]:
        return skipped(
            check, "no loader whose epochs can be seen", "watch(model, loader)"
        )
    if not first["shuffles"]:
        return ok(check, "not needed: no sampler that shuffles by epoch")
    if len(first["epochs"]) < 2:
        found = f"{len(first['epochs'])} epoch seen, and it takes two"
        return skipped(check, found, "watch two epochs")
    repeated = [
        rank
        for rank, log in logs.items()
        if any(a == b for a, b in zip(log["epochs"], log["epochs"][1:], strict=False))
    ]
    if repeated:
        found = (
            f"the sampler was asked for several epochs as epoch {first['epochs'][0]}: "
            "all of them have the same order"
        )
        remedy = "call loader.sampler.set_epoch(epoch) at the beginning of each epoch"
        return warning(check, found, remedy)
    return ok(check, f"called: {len(first['epochs'])} epochs, each its own order")


def judge_same_batches(logs: Logs) -> Finding:
    """Were two ranks fed the same?"""
    check = "batches"
    fed = {rank: tuple(log["batches"]) for rank, log in logs.items()}
    if not all(fed.values()):
        return skipped(check, "not every rank had a training step with tensors")
    usual, count = Counter(fed.values()).most_common(1)[0]
    if count > 1:
        ranks = [rank for rank, batches in fed.items() if batches == usual]
        found = f"{of_ranks(ranks)} were fed the same {len(usual)} first batches"
        remedy = (
            "split the data: DistributedSampler(dataset), or, for an IterableDataset, "
            "skip the samples of other ranks"
        )
        return failed(check, found, remedy)
    return ok(check, "each rank is fed its own" if len(fed) > 1 else "one rank")


def judge_same_gradients(logs: Logs) -> Finding:
    """Do optimizers step with the same gradients on all ranks?"""
    check = "gradients"
    if not all(log["is_wrapped"] for log in logs.values()):
        return skipped(check, "the model is not wrapped", "watch the wrapped model")
    steps = min(len(log["gradients"]) for log in logs.values())
    if not steps:
        return skipped(check, "no synchronised optimizer step seen on some rank")
    first = logs[min(logs)]["gradients"]
    odd = {
        name
        for log in logs.values()
        for mine, theirs in zip(first[:steps], log["gradients"][:steps], strict=True)
        for name in {*mine, *theirs}
        if mine.get(name) != theirs.get(name)
    }
    if odd:
        found = f"ranks step with different gradients of {join(sorted(odd), 4)}"
        remedy = (
            "call the wrapper and not model.module; one backward for each forward; no "
            "step after no_sync() alone; same optimizer and clipping on all ranks"
        )
        return failed(check, found, remedy)
    return ok(check, f"the same on all ranks in {steps} steps that were compared")


def judge_same_replicas(logs: Logs) -> Finding:
    """Do the replicas hold the same values, before and after?"""
    check = "replicas"
    if not all(log["is_wrapped"] and len(log["values"]) == 2 for log in logs.values()):
        return skipped(check, "the model is not wrapped", "watch the wrapped model")
    at_begin, at_end = (
        _differing([log["values"][k] for log in logs.values()]) for k in (0, 1)
    )
    if at_begin:
        found = f"ranks began with different values of {join(at_begin, 4)}"
        remedy = (
            "load a checkpoint on all ranks, or on rank 0 before wrapping; after "
            "wrapping change parameters on all ranks alike"
        )
        return failed(check, found, remedy)
    if not at_end:
        return ok(check, "the same values on all ranks, before and after")
    found = f"equal before, but then ranks hold different values of {join(at_end, 4)}"
    steps = max(log["local_steps"] for log in logs.values())
    if steps:
        remedy = (
            f"optimizers stepped inside no_sync() ({steps} times): take the step, and "
            "the backward before it, out of that block; or, if this is local SGD, "
            "average the parameters at the end"
        )
        return warning(check, found, remedy)
    remedy = (
        "look for what changes parameters on some ranks only: load_state_dict, updates "
        "by hand, random numbers, unsynced='ignore'"
    )
    return failed(check, found, remedy)


def _differing(values: Sequence[Mapping[str, int]]) -> list[str]:
    """Names of what is not the same everywhere."""
    first = values[0]
    names = dict.fromkeys(name for each in values for name in each)
    return [n for n in names if any(each.get(n) != first.get(n) for each in values)]


def judge_accumulation(logs: Logs) -> Finding:
    """Does one optimizer step take one synchronised backward?"""
    check = "accumulation"
    counts = logs[min(logs)]["backwards"]
    seen = [count for count in counts if count]
    if not seen:
        return skipped(check, "no synchronised backward before an optimizer step seen")
    usual = statistics.median_low(seen)
    if usual > 1:
        found = f"{usual} synchronised backwards for each optimizer step"
        remedy = (
            "all but the last forward and backward belong inside model.no_sync(): one "
            "all-reduce does"
        )
        return warning(check, found, remedy)
    return ok(check, f"one synchronised backward for each of {len(seen)} steps")


def judge_find_unused(logs: Logs) -> Finding:
    """Is ``find_unused_parameters`` needed?"""
    check = "find_unused"
    log = logs[min(logs)]
    if not log["finds_unused"]:
        return ok(check, "not set")
    steps = min(len(each["backwards"]) for each in logs.values())
    if not steps:
        return skipped(check, "set; no optimizer step seen")
    unused = sorted({name for each in logs.values() for name in each["unused"]})
    if unused:
        return ok(check, f"needed: {join(unused, 4)} got no gradient in some step")
    found = (
        "find_unused_parameters is set, but every parameter got a gradient on every "
        f"rank in {steps} steps"
    )
    remedy = "leave it out: torch's DDP searches the whole graph in each forward for it"
    return warning(check, found, remedy)


def judge_saving(logs: Logs) -> Finding:
    """Did several ranks write the same file?"""
    check = "saving"
    writers = Counter(
        (log["host"], path) for log in logs.values() for path in log["saved"]
    )
    twice = [path for (_, path), count in writers.items() if count > 1]
    if twice:
        found = f"several ranks wrote {join(twice, 2)}"
        remedy = (
            "torch.save on rank 0 only, then dist.barrier() before others read it: "
            "two writers leave a broken file"
        )
        return failed(check, found, remedy)
    return ok(check, "no file was written by two ranks")


def judge_printing(logs: Logs) -> Finding:
    """Does every rank print what rank 0 prints?"""
    check = "printing"
    counts = {rank: len(log["lines"]) for rank, log in logs.items()}
    first = counts[min(counts)]
    noisy = [r for r, n in counts.items() if r != min(counts) and n and n >= first]
    if noisy:
        found = f"{of_ranks(noisy)}: as many lines as on rank {min(counts)} ({first})"
        remedy = "if dist.get_rank() == 0: print(...); average what you log over ranks"
        return warning(check, found, remedy)
    return ok(check, "on one rank" if first else "nothing")
