"""Checks inside a training script: run them, compare facts between ranks, report.

Facts travel through the store of the script's own group, so that no collective of ours
mixes with the script's, and a rank that never calls the check is a finding.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from minidp._groups import group_store, joined_group
from minidp.attachment import attached_to

from ._findings import Finding, Report, failed, merge, of_ranks, skipped
from ._meeting import Meeting

Check = Callable[[], "Finding | list[Finding]"]
Facts = Mapping[str, Any]  # plain data of one rank
_calls: Counter[tuple[str, str]] = Counter()  # (group, title) -> consultations


def synchroniser(model: nn.Module) -> nn.Module | None:
    """What averages the gradients of a model: the wrapper, or what is attached."""
    if isinstance(model, DistributedDataParallel):
        wrapper: nn.Module = model
        return wrapper
    return attached_to(model)


def option(model: nn.Module, name: str, *, default: Any) -> Any:
    """An attribute of what averages the gradients of a model, else of the model.

    A compiled wrapper passes on what it is asked.
    """
    wrapper = synchroniser(model)
    return getattr(model if wrapper is None else wrapper, name, default)


def wrapped_module(model: nn.Module) -> nn.Module:
    """What a `DataParallel` or torch's DDP wraps; else the model itself."""
    if isinstance(model, DistributedDataParallel):
        module: nn.Module = model.module
        return module
    return model


def group_of(model: nn.Module | None, group: Any = None) -> Any:
    """``group``, or that of a model's wrapper, or the default one; None: alone."""
    if group is None and model is not None:
        group = getattr(synchroniser(model), "process_group", None)
    return joined_group(group)


def collect(checks: Mapping[str, Check]) -> list[Finding]:
    """Run checks; what one of them raises is a finding, too."""
    findings: list[Finding] = []
    for name, check in checks.items():
        try:
            found = check()
        except Exception as error:
            text = " ".join(str(error).split())[:300]
            remedy = "please report this, with the traceback of the call"
            found = failed(name, f"{type(error).__name__}: {text}", remedy)
        findings += [found] if isinstance(found, Finding) else found
    return findings


@dataclass
class Consultation:
    """What one call of `doctor` found on this rank, and on all of them.

    Args:
        title: of the report.
        group: the ranks; None: this process alone.
        seconds: how long to wait for the others.
    """

    title: str
    group: Any
    seconds: float
    findings: list[Finding] = field(default_factory=list)

    @property
    def rank(self) -> int:
        """Of this process in the group."""
        return 0 if self.group is None else int(self.group.rank())

    @property
    def world_size(self) -> int:
        """Ranks in the group."""
        return 1 if self.group is None else int(self.group.size())

    def conclude(
        self, facts: Facts, judge: Callable[[Mapping[int, Facts]], list[Finding]]
    ) -> Report:
        """Exchange facts, judge them, exchange findings.

        Args:
            facts: of this rank.
            judge: what to say about the facts of all ranks, the same on each of them.
        """
        if self.world_size == 1:
            self.findings += collect({"this rank": lambda: judge({0: facts})})
            if self.group is None:
                found = "no process group: nothing is compared between ranks"
                remedy = "call this after init_process_group()"
                self.findings.append(skipped("other ranks", found, remedy))
            return merge(self.title, {0: self.findings}, 1)
        try:
            meeting = self._meet()
        except Exception as error:
            found = f"the group's store cannot be used ({error})"
            remedy = "is rank 0's process still there?"
            self.findings.append(failed("other ranks", found, remedy))
            return merge(self.title, {self.rank: self.findings}, self.world_size)
        return self._conclude(meeting, facts, judge)

    def _meet(self) -> Meeting:
        key = (str(self.group.group_name), self.title)
        number = _calls[key]
        _calls[key] += 1
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        store = group_store(self.group, f"doctor/{attempt}/{self.title}/{number}")
        return Meeting(store, self.rank, self.world_size, seconds=self.seconds)

    def _conclude(
        self,
        meeting: Meeting,
        facts: Facts,
        judge: Callable[[Mapping[int, Facts]], list[Finding]],
    ) -> Report:
        heard = meeting.gather("facts", facts)
        self.findings += collect({"all ranks": lambda: judge(heard.values)})
        if heard.absent:
            missing = sorted(heard.absent)
            why = heard.absent[missing[0]]
            found = f"{of_ranks(missing)} did not take part: {why}"
            remedy = "call doctor on all ranks, at the same place of the script"
            self.findings.append(failed("other ranks", found, remedy))
        mine = [finding.as_json() for finding in self.findings]
        answers = meeting.gather("findings", mine, heard.values)
        of_rank: dict[int, Sequence[Finding]] = {
            rank: [Finding.of_json(plain) for plain in said]
            for rank, said in answers.values.items()
        }
        return merge(self.title, of_rank, self.world_size)
