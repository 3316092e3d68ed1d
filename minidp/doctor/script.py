"""Check a model, a loader or a training loop inside a script.

The ranks exchange facts through the store of the script's own group. So no collective
of ours mixes with those of the script, and a rank that never calls the check is a
finding, not a hang.
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
_calls: Counter[tuple[str, str]] = Counter()  # how often, by group and subject


def check_model(
    model: nn.Module,
    batch: Any = None,
    *,
    process_group: Any = None,
    seconds: float = WAIT_SECONDS,
    quiet: bool = False,
) -> Report:
    """Check devices, replicas, batch norm, unused parameters and seeds of a model.

    All ranks must call this function, before wrapping, after it, or both. Rank 0 prints
    the table, and all ranks get the findings of all. An error of a check becomes a
    finding, too.

    If ``batch`` is given, one forward runs under ``torch.enable_grad()`` on the bare
    module. Gradients, module buffers and random streams stay as they are.

    Batch norm in training mode is a warning with fewer than 16 samples per rank.

    Args:
        model: A module, which may be wrapped (by minidp or torch) or attached.
        batch: What the model is called with: a tensor, a tuple of arguments, or a dict
            of keyword arguments. Without it, the checks that need a batch are skipped.
        process_group: The ranks that compare. By default these are the ranks of a
            wrapped model's group, or all ranks.
        seconds: How long to wait for ranks that do not call this function.
        quiet: Whether to print nothing.
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
    """Check samplers, numbers of batches and random states of the ranks' loaders.

    All ranks must call this function, and rank 0 prints the table. Only attributes are
    read, so that no index is drawn from a sampler.

    Args:
        loader: A ``torch.utils.data.DataLoader``, or an object with its attributes.
        process_group: The ranks that compare; by default all ranks.
        seconds: How long to wait for ranks that do not call this function.
        quiet: Whether to print nothing.
    """
    ranks = _Ranks("the loader", joined_group(process_group), seconds, quiet)
    rank, size = ranks.rank, ranks.world_size
    own: dict[str, Check] = {
        "sampler": lambda: loaders.judge_sampler(loader, rank, size),
    }
    return ranks.conclude(own, loaders.read_loader(loader), loaders.COMPARED)


class Watched:
    """What `watch` gives: its ``report`` is set when the block ends without an error.

    Until then the report is None. Iterating yields its findings.
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

    It finds these:

    * ``set_epoch`` is not called, or ranks are fed the same batches;
    * replicas differ at the beginning or at the end;
    * gradients are accumulated without ``no_sync``;
    * ``find_unused_parameters`` is set without need;
    * batches of one step differ in size, so that the gradient is a mean of means;
    * several ranks save to the same file, or print.

    All ranks must enter the block. When it ends without an error, the ranks exchange
    what they have recorded, rank 0 prints the table, and `Watched` holds the report.
    Inside the block the model has hooks, and ``print``, ``torch.save`` and
    ``DataLoader.__iter__`` are replaced. An error while recording becomes a finding.

    Args:
        model: The wrapped or attached model.
        loader: The ``DataLoader`` whose ``set_epoch`` is to be watched.
        process_group: The ranks that compare, as for `check_model`.
        seconds: How long to wait for ranks that do not come to the end of the block.
        quiet: Whether to print nothing.
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
    if group is None:
        group = getattr(models.synchroniser(model), "process_group", None)
    return joined_group(group)


@dataclass
class _Ranks:
    """The ranks that one call from a script compares, by its method `conclude`."""

    subject: str
    group: Any  # None if this process is alone
    seconds: float  # how long to wait for other ranks in each exchange
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
        """Run all checks, and return the findings of all ranks, which rank 0 prints.

        The ranks meet twice: to exchange their facts, then their findings. An error of
        a check or of the store becomes a finding.

        Args:
            own: Checks of this rank alone, by name.
            facts: The facts of this rank, to be compared with those of others.
            compared: Functions that judge the facts of all ranks, by name of the check.
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
        """Return a meeting in a part of the group's store that no other call uses.

        Calls are counted, so the ranks get the same part if all of them have made
        equally many calls on this subject before.
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
    if not absent:
        return []
    remedy = "call doctor on all ranks, at the same place of the script"
    return named("other ranks", failed(f"did not take part: {absent}", remedy))


def _findings_of(name: str, check: Check) -> list[Finding]:
    try:
        return named(name, check())
    except Exception as error:
        remedy = "please report this, with the traceback of the call"
        return named(name, failed(in_words(error), remedy))
