"""Check a model, a loader or a training loop inside a script.

Facts travel through the store of the script's own group, so that no collective of ours
mixes with the script's, and a rank that never calls the check is a finding.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import nn

from minidp.comm import group_store, joined_group

from .checks import loader as loaders
from .checks import model as models
from .checks import training
from .command import print_report
from .findings import Check, Finding, Found, Report, failed, merge, named, skipped
from .meeting import Meeting
from .training_log import TrainingLog
from .words import in_words

WAIT_SECONDS = 10.0  # how long a check waits for other ranks
_calls: Counter[tuple[str, str]] = Counter()  # (group, title) -> consultations


def check_model(
    model: nn.Module,
    batch: Any = None,
    *,
    process_group: Any = None,
    seconds: float = WAIT_SECONDS,
    quiet: bool = False,
) -> Report:
    """Check devices, replicas, batch norm, unused parameters and seeds of a model.

    All ranks call this function, before wrapping, after it, or both; rank 0 prints the
    table, and all return the findings of all. Errors of a check become findings. If
    ``batch`` is given, one forward runs under ``torch.enable_grad()`` on the bare
    module; gradients, module buffers and random streams stay as they are. Batch norm in
    training mode is a warning with fewer than 16 samples per rank.

    Args:
        model: a module, wrapped (by minidp or torch), attached or not.
        batch: what the model is called with: a tensor, a tuple of arguments, or a dict
            of keyword arguments. None: checks that need a batch are skipped.
        process_group: the ranks; None: the group of a wrapped model, or all ranks.
        seconds: how long to wait for ranks that do not call this function.
        quiet: do not print.
    """
    ranks = _Ranks("the model", _group_of(model, process_group), seconds, quiet)
    module, size = models.wrapped_module(model), ranks.world_size
    own: dict[str, Check] = {
        "devices": lambda: models.judge_devices(model, batch),
        "batch norm": lambda: models.judge_batch_norm(module, batch, size),
        "unused parameters": lambda: models.check_unused(model, batch),
    }
    return ranks.conclude(own, models.read_model(model), models.COMPARED)


def check_loader(
    loader: Any,
    *,
    process_group: Any = None,
    seconds: float = WAIT_SECONDS,
    quiet: bool = False,
) -> Report:
    """Check samplers, numbers of batches and random states of ranks' loaders.

    All ranks call this function; rank 0 prints the table. Only attributes are read: no
    index is drawn. ``loader`` is a ``torch.utils.data.DataLoader``, or has its
    attributes; the other arguments and the result are those of `check_model`.
    """
    ranks = _Ranks("the loader", joined_group(process_group), seconds, quiet)
    rank, size = ranks.rank, ranks.world_size
    own: dict[str, Check] = {
        "sampler": lambda: loaders.judge_sampler(loader, rank, size),
    }
    return ranks.conclude(own, loaders.read_loader(loader), loaders.COMPARED)


class Watched:
    """Hold the ``report`` that `watch` sets when its block ends, not if that raises.

    None until then. Iterating yields its findings, or nothing.
    """

    report: Report | None = None

    def __iter__(self) -> Iterator[Finding]:
        return iter(self.report or ())

    def __str__(self) -> str:
        return str(self.report or "nothing yet")


@contextmanager
def watch(
    model: nn.Module,
    loader: Any = None,
    *,
    process_group: Any = None,
    seconds: float = WAIT_SECONDS,
    quiet: bool = False,
) -> Iterator[Watched]:
    """Watch two short epochs of training for mistakes that show only at run time.

    Found are: no ``set_epoch``; ranks fed the same batches; replicas that differ at the
    begin or end; accumulation without ``no_sync``; ``find_unused_parameters`` without
    need; batches of one step that differ in size (a mean of means); several ranks that
    save or print. All ranks enter the block. At its end (not if it raises) ranks
    exchange what they recorded, rank 0 prints the table, and `Watched` holds the
    report. Inside, the model has hooks; ``print``, ``torch.save`` and
    ``DataLoader.__iter__`` are replaced. A hook that cannot be attached raises; later
    errors are findings.

    ``model``: wrapped or attached. ``loader``: a ``DataLoader``, for ``set_epoch``
    only. The other arguments are those of `check_model`.
    """
    watched, log = Watched(), TrainingLog(model, loader)
    with log.recording():
        yield watched
    ranks = _Ranks("training", _group_of(model, process_group), seconds, quiet)
    own: dict[str, Check] = {
        "watching": lambda: (
            skipped(f"not everything could be noted: {mishap}")
            for mishap in sorted(log.mishaps)
        )
    }
    watched.report = ranks.conclude(own, log.facts, training.COMPARED)


def _group_of(model: nn.Module, group: Any) -> Any:
    """Return ``group``, else that of the model's DDP, else the default group.

    None if there is no default group.
    """
    if group is None:
        group = getattr(models.synchroniser(model), "process_group", None)
    return joined_group(group)


@dataclass
class _Ranks:
    """Hold the group and settings of one call from a script; `conclude` runs checks."""

    subject: str
    group: Any  # None: this process alone
    seconds: float  # how long to wait for other ranks, per exchange
    quiet: bool

    def __post_init__(self) -> None:
        self.rank = 0 if self.group is None else int(self.group.rank())
        self.world_size = 1 if self.group is None else int(self.group.size())

    def conclude(
        self,
        own: Mapping[str, Check],
        facts: Mapping[str, Any],
        compared: Mapping[str, Callable[[Mapping[int, Any]], Found]],
    ) -> Report:
        """Run ``own`` checks; judge all ranks' ``facts``; return all ranks' findings.

        Rank 0 prints them unless `quiet`. ``compared``: functions that judge the facts,
        by check. Waits `seconds` at most for all ranks' facts, then again for the
        findings of ranks whose facts came. An error of a check, a judge or the store
        becomes a finding.
        """
        findings = [f for name in own for f in _findings_of(name, own[name])]
        of_rank = {self.rank: findings}
        try:
            meeting = self._meet()
        except Exception as error:
            found = f"the group's store cannot be used ({error})"
            problem = failed(found, "is rank 0's process still there?")
            findings += named("other ranks", problem)
        else:
            heard, absent = meeting.gather("facts", facts)
            for name, judge in compared.items():
                findings += _findings_of(name, partial(judge, heard))
            if self.group is None:
                found = "no process group: nothing is compared between ranks"
                problem = skipped(found, "call this after init_process_group()")
                findings += named("other ranks", problem)
            findings += _absence(absent)
            mine = [finding.as_json() for finding in findings]
            answers, absent = meeting.gather("findings", mine, heard)
            of_rank = {r: [*map(Finding.of_json, answers[r])] for r in answers}
            of_rank[self.rank] += _absence(absent)
        report = merge(f"minidp doctor: {self.subject}", of_rank, self.world_size)
        if not self.quiet and self.rank == 0:
            print_report(report)
        return report

    def _meet(self) -> Meeting:
        """Return a Meeting in a part of the group's store that no other call uses.

        With one rank its store is None. Calls are counted: ranks get the same part if
        all made as many on this subject before.
        """
        store = None
        if self.world_size > 1:
            key = (str(self.group.group_name), self.subject)
            attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
            name = f"doctor/{attempt}/{self.subject}/{_calls[key]}"
            _calls[key] += 1
            store = group_store(self.group, name)
        return Meeting(store, self.rank, self.world_size, self.seconds)


def _absence(absent: str) -> list[Finding]:
    """Return a failed finding for ranks that did not answer; [] for ""."""
    if not absent:
        return []
    remedy = "call doctor on all ranks, at the same place of the script"
    return named("other ranks", failed(f"did not take part: {absent}", remedy))


def _findings_of(name: str, check: Check) -> list[Finding]:
    """Run a check; return its findings, or one that says failed if the check raises."""
    try:
        return named(name, check())
    except Exception as error:
        remedy = "please report this, with the traceback of the call"
        return named(name, failed(in_words(error), remedy))
