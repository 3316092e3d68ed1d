"""Agree on a step: all ranks make it, or none does, and all know why.

A rank that steps hands new values of its share to the others, and waits for theirs. If
one of them did not step, half of the parameters would be new. So before anything is
changed each rank says what it is about to do, in a small message. A rank that goes on
to the next backward without a step says so there::

    rank 0   backward . step() --says "step"--------------.
    rank 1   backward . (an exception is caught) . backward --says "no step"--> error
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum, IntFlag
from typing import NamedTuple

import torch

from minidp.accelerator import to_host, upload
from minidp.comm import Communicator, group_of_agreements, way_of_hosts
from minidp.core import Exchange
from minidp.errors import ShardedStepError, explain, listed


class Act(IntEnum):
    """What a rank is about to do after a backward."""

    STEP = 1
    GO_ON = 2  # with another backward, without a step
    CLIP = 3  # gradients, by the norm of all


class Problem(IntFlag):
    """Why a rank cannot step."""

    MIXED = 1  # a backward has added gradients to averages
    CHANGED = 2  # the script has changed gradients of its share
    FOREIGN = 4  # there are gradients of other ranks' parameters
    LOCAL = 8  # it is inside no_sync()
    CLOSURE = 16  # the step has a closure
    SCALER = 32  # a GradScaler of which nobody knows calls a fused step
    MOVED = 64  # its optimizer has got parameters that another one steps
    OUTSIDE = 128  # it clips gradients that no rank averages


_TEXTS = {
    Problem.CHANGED: "gradients were changed between backward() and step(), where each "
    "rank has those of its own share only",
    Problem.FOREIGN: "parameters that another rank steps have a gradient",
    Problem.LOCAL: "the step runs inside no_sync()",
    Problem.CLOSURE: "step() has a closure",
    Problem.SCALER: "a GradScaler steps, of which sharded_step does not know",
    Problem.MIXED: "a backward added gradients to averages that were still in .grad, "
    "where only the owner of a parameter has its average: the sum is no mean over the "
    "ranks",
    Problem.MOVED: "an optimizer has got parameters, perhaps by add_param_group, that "
    "sharded_step knows as those of another optimizer",
    Problem.OUTSIDE: "an optimizer that clips has gradients of parameters that are not "
    "averaged, whose norm each rank would take for itself",
}
_VERBS = {Act.STEP: "steps", Act.GO_ON: "does not", Act.CLIP: "clips"}
_REMEDIES = {
    Problem.CHANGED: "to clip, call model.clip_grad_norm_(max_norm), whose norm is "
    "over all ranks, in place of torch.nn.utils.clip_grad_norm_; what treats each "
    "parameter by itself needs sharded_step(optimizer, allow_changes=True)",
    Problem.FOREIGN: "let only a synchronised backward() make gradients, and call "
    "zero_grad() before each of them",
    Problem.LOCAL: "step after a synchronised backward, outside of no_sync()",
    Problem.CLOSURE: "call the backward before step(), and pass no closure",
    Problem.SCALER: "pass it: sharded_step(optimizer, grad_scaler=scaler)",
    Problem.MIXED: "call zero_grad() between two synchronised backwards, for example "
    "after each step; to accumulate gradients, run all forwards and backwards but the "
    "last inside no_sync(), or add up the losses",
    Problem.MOVED: "give each parameter to one optimizer, before sharded_step; to give "
    "it to another one later, wrap the module anew",
    Problem.OUTSIDE: "give parameters that are not averaged to an optimizer of their "
    "own",
}


class Intent(NamedTuple):
    """What one rank says."""

    act: Act
    # The optimizer's number; or hashes: to what it clips, or, if it goes on without a
    # step, the values of a few parameters.
    what: int
    problems: Problem


class Agreement:
    """The message in which each rank says what it is about to do.

    Args:
        communicator: The communicator of the ranks.
        amid_buckets: Whether buckets are still on their way then, behind which the
            message must not queue. All ranks must call the constructor together.
    """

    def __init__(
        self, communicator: Communicator, *, amid_buckets: bool = False
    ) -> None:
        self._communicator = communicator
        part = (len(Intent._fields), torch.int64)
        # What this rank does only its host knows, and what others do only hosts need.
        _, self._device = way_of_hosts(communicator.group, communicator.device)
        self.exchange = Exchange(
            "the agreement on a step",
            part,
            self._device,
            communicator,
            by_rank=True,
        )
        if amid_buckets:
            self.exchange.way = group_of_agreements
            self.connect()

    def connect(self) -> None:
        """Connect the ranks for agreements amid buckets. All must call it together."""
        doing = "connecting the hosts for step_in_backward"
        with self._communicator.watching(doing):
            group_of_agreements(self._communicator.group)

    def reach(self, mine: Intent, names: Sequence[str] = ()) -> None:
        """Tell the other ranks what this one is about to do, and hear what they are.

        All ranks must call it together. It returns if all do the same, and none has a
        problem.

        Args:
            mine: What this rank does.
            names: The parameters with which it has a problem.

        Raises:
            ShardedStepError: Some rank has a problem, or they do different things. All
                ranks raise it, and no rank steps.
        """
        if self._communicator.size == 1:
            intents = [mine]
        else:
            row = self.exchange.blank()
            place = self._communicator.rank * len(mine)
            row[place : place + len(mine)] = upload(
                [*map(int, mine)], torch.int64, self._device
            )
            self.exchange.start(row)
            rows = to_host(self.exchange.take()).view(-1, len(mine)).tolist()
            intents = [Intent(Act(a), o, Problem(p)) for a, o, p in rows]
        rank = self._communicator.rank
        for problem in Problem:
            having = [r for r, each in enumerate(intents) if problem & each.problems]
            if having:
                raise ShardedStepError(
                    explain(
                        rank,
                        f"No rank {_VERBS[mine.act]}, because on rank {listed(having)} "
                        f"{_TEXTS[problem]}.",
                        names=names if problem & mine.problems else (),
                        remedy=f"{_REMEDIES[problem]}. To go on, call reset() on all "
                        "ranks, and zero_grad()",
                    )
                )
        if len({(each.act, each.what) for each in intents}) > 1:
            raise ShardedStepError(_explain_different(rank, intents))


def _explain_different(rank: int, intents: Sequence[Intent]) -> str:
    doing = {
        act: [r for r, each in enumerate(intents) if each.act is act] for act in Act
    }
    found = ", ".join(f"rank {listed(doing[a])} {_VERBS[a]}" for a in Act if doing[a])
    if clipping := doing[Act.CLIP]:
        is_common = len(clipping) == len(intents)
        return explain(
            rank,
            "Ranks call model.clip_grad_norm_ with unequal arguments."
            if is_common
            else "Some ranks call model.clip_grad_norm_, and others do not.",
            expected="all ranks to clip together, to the same norm",
            found="" if is_common else found,
            remedy="call it on all ranks, also where only one of them logs the norm. "
            "Nothing was clipped and no rank has stepped; call reset() on all ranks to "
            "go on",
        )
    if all(each.act is Act.GO_ON for each in intents):
        return explain(
            rank,
            "Parameters differ between the ranks after a backward whose averages no "
            "optimizer of sharded_step has applied. Perhaps they were changed by hand "
            "where .grad is not None: on the rank that owns them, and on no other one.",
            expected="the same parameters on all ranks",
            remedy="let an optimizer apply averages; or leave out sharded_step, so "
            "that all ranks have all averages. reset() on all ranks gives them the "
            "owners' values",
        )
    if doing[Act.GO_ON]:
        return explain(
            rank,
            "Some ranks step, and others have gone on to the next backward without a "
            "step. No rank has stepped.",
            expected="all ranks to step, or none",
            found=found,
            remedy="decide on all ranks alike whether to step: by values that are "
            "equal on all of them, such as the norm that model.clip_grad_norm_ "
            "returns. A GradScaler finds what all ranks have only if it is told: "
            "sharded_step(optimizer, grad_scaler=scaler). Call reset() on all ranks to "
            "go on",
        )
    numbers = ", ".join(str(each.what) for each in intents)
    return explain(
        rank,
        "Ranks step different optimizers at the same time. No rank has stepped.",
        expected="the same order of steps on all ranks",
        found=f"the numbers {numbers}, by rank",
        remedy="step the optimizers in the same order on all ranks; call reset() on "
        "all ranks to go on",
    )
