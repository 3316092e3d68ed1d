"""Judge what the training logs of all ranks show (``doctor.watch``)."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Mapping
from itertools import pairwise
from typing import Any

from minidp.doctor.findings import Finding, failed, ok, skipped, warning
from minidp.doctor.words import differing, join, of_ranks

Logs = Mapping[int, Mapping[str, Any]]  # the facts of each rank's `TrainingLog`
_NOT_WRAPPED = skipped("the model is not wrapped", "watch the wrapped model")


def judge_epochs(logs: Logs) -> Finding:
    """Warn if two epochs in a row had the same number, and so the same order."""
    first = logs[min(logs)]
    if not first["sees_epochs"]:
        return skipped("no loader whose epochs can be seen", "watch(model, loader)")
    if not first["shuffles"]:
        return ok("not needed: no sampler that shuffles by epoch")
    count = len(first["epochs"])
    if count < 2:
        return skipped(f"{count} epoch seen, and it takes two", "watch two epochs")
    pairs = [pair for log in logs.values() for pair in pairwise(log["epochs"])]
    again = [epoch for epoch, following in pairs if epoch == following]
    if None in again:
        return skipped("the sampler shows no epoch", "call its set_epoch(epoch)")
    if again:
        found = f"several epochs were asked for as epoch {again[0]}, in the same order"
        remedy = "call loader.sampler.set_epoch(epoch) at the beginning of each epoch"
        return warning(found, remedy)
    return ok(f"called: {count} epochs, each its own order")


def judge_same_batches(logs: Logs) -> Finding:
    """Judge whether two ranks were fed the same batches, by the first few of each."""
    fed = {rank: tuple(log["batches"]) for rank, log in logs.items()}
    if not all(fed.values()):
        return skipped("not every rank had a training step with tensors")
    usual, count = Counter(fed.values()).most_common(1)[0]
    if count == 1:
        return ok("each rank is fed its own")
    ranks = [rank for rank, batches in fed.items() if batches == usual]
    remedy = "DistributedSampler(dataset); an IterableDataset must skip others' samples"
    found = f"{of_ranks(ranks)} were fed the same {len(usual)} first batches"
    return failed(found, remedy)


def judge_same_replicas(logs: Logs) -> Finding:
    """Judge whether the replicas were equal at the beginning and at the end.

    If they differ only at the end, after steps inside ``no_sync()``, it may be local
    SGD. So that is only a warning.
    """
    if not all(log["is_wrapped"] and len(log["values"]) == 2 for log in logs.values()):
        return _NOT_WRAPPED
    at_begin, at_end = (
        differing(log["values"][k] for log in logs.values()) for k in (0, 1)
    )
    if at_begin:
        remedy = (
            "load a checkpoint on all ranks, or on rank 0 before wrapping; after "
            "wrapping change parameters on all ranks alike"
        )
        found = f"ranks began with different values of {join(at_begin, 4)}"
        return failed(found, remedy)
    if not at_end:
        return ok("the same values on all ranks, before and after")
    found = f"equal before, but then ranks hold different values of {join(at_end, 4)}"
    steps = max(log["local_steps"] for log in logs.values())
    if steps:
        remedy = (
            f"optimizers stepped inside no_sync() ({steps} times): take the step, and "
            "the backward before it, out of that block; or, if this is local SGD, "
            "average the parameters at the end"
        )
        return warning(found, remedy)
    remedy = (
        "call the wrapper and not model.module, and run one backward for each forward; "
        "else find what changes parameters on some ranks only: load_state_dict, "
        "updates by hand, random numbers, unsynced='ignore'"
    )
    return failed(found, remedy)


def judge_accumulation(logs: Logs) -> Finding:
    """Warn if a usual optimizer step has several synchronised backwards before it.

    The usual step is the median of one rank.
    """
    seen = [count for count in logs[min(logs)]["backwards"] if count]
    if not seen:
        return skipped("no synchronised backward before an optimizer step seen")
    usual = statistics.median_low(seen)
    if usual > 1:
        remedy = "put all forwards and backwards but the last inside model.no_sync()"
        found = f"{usual} synchronised backwards for each optimizer step"
        return warning(found, remedy)
    return ok(f"one synchronised backward for each of {len(seen)} steps")


def judge_mean_of_means(logs: Logs) -> Finding:
    """Warn if the batches of one step differ in size, on one rank or between ranks.

    A gradient is then the mean of means, in which a sample of a small batch counts
    more.
    """
    first = logs[min(logs)]
    if not all(log["is_wrapped"] for log in logs.values()):
        return _NOT_WRAPPED
    if first["over_items"]:
        return ok("gradients are averaged over items that the script counts")
    steps = [*zip(*(log["samples"] for log in logs.values()), strict=False)]
    odd = [k for k, step in enumerate(steps) if len({n for ns in step for n in ns}) > 1]
    if not steps:
        return skipped("no optimizer step seen on some rank")
    if not odd:
        found = f"all batches of a step have one size, in {len(steps)} steps"
        return ok(f"{found}; labels that the loss ignores are not seen here")
    sizes = zip(logs, steps[odd[0]], strict=True)
    texts = [f"rank {rank}: {'+'.join(map(str, ns))}" for rank, ns in sizes]
    found = (
        f"batches of different sizes in {len(odd)} of {len(steps)} steps (step "
        f"{odd[0]}: {join(texts, 4)}), and each has the same weight in the gradient"
    )
    remedy = (
        'if the loss is a mean, pass average_over="items" to DataParallel and call '
        "loss = model.weigh_loss(loss, n), where n is the number of samples, or of "
        "labels that count; or pass drop_last=True to the loader"
    )
    return warning(found, remedy)


def judge_find_unused(logs: Logs) -> Finding:
    """Warn if find_unused_parameters is set, but no step has needed it."""
    if not logs[min(logs)]["finds_unused"]:
        return ok("not set")
    steps = min(len(log["backwards"]) for log in logs.values())
    if not steps:
        return skipped("set; no optimizer step seen")
    unused = sorted({name for log in logs.values() for name in log["unused"]})
    if unused:
        return ok(f"needed: {join(unused, 4)} got no gradient in some step")
    found = f"set, but every parameter got a gradient on every rank in {steps} steps"
    remedy = "leave it out: torch's DDP searches the whole graph in each forward for it"
    return warning(found, remedy)


def judge_saving(logs: Logs) -> Finding:
    """Judge whether two ranks of a host have saved to the same file."""
    writers = Counter(
        (log["host"], path) for log in logs.values() for path in {*log["saved"]}
    )
    twice = [path for (_, path), count in writers.items() if count > 1]
    if twice:
        remedy = (
            "call torch.save on rank 0 only, then dist.barrier() before others read it"
        )
        return failed(f"several ranks wrote {join(twice, 2)}", remedy)
    return ok("no file was written by two ranks")


def judge_printing(logs: Logs) -> Finding:
    """Warn if other ranks have printed as many lines as the lowest one."""
    (first, usual), *others = [(rank, log["lines"]) for rank, log in logs.items()]
    noisy = [rank for rank, count in others if count and count >= usual]
    if noisy:
        found = f"{of_ranks(noisy)}: as many lines as on rank {first} ({usual})"
        remedy = (
            "print on rank 0 only, and average what you log over the ranks before that"
        )
        return warning(found, remedy)
    return ok("on one rank" if usual else "nothing")


COMPARED = {
    "set_epoch": judge_epochs,
    "batches": judge_same_batches,
    "replicas": judge_same_replicas,
    "accumulation": judge_accumulation,
    "mean of means": judge_mean_of_means,
    "find_unused": judge_find_unused,
    "saving": judge_saving,
    "printing": judge_printing,
}
