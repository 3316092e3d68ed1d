"""Random sequences of wrong uses: drawn in the parent, played on every rank.

A rank that fails an action says so and goes on with the next one, as users do; so ranks
may be out of step, and nothing that the harness itself needs goes through the group
that the word breaks: ranks return what they saw, and the parent compares.
"""

from __future__ import annotations

import dataclasses
import gc
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from hypothesis import strategies as st

import tests.wrong_uses.wrong_actions  # noqa: F401  (its actions)
from minidp.comm.replacements import fresh_group
from tests.support.actions import Net, Record, Stage, Step, has_drifted, run

# hang_timeout of every word; longer on a machine that does other things meanwhile.
HANG_SECONDS = float(os.environ.get("MINIDP_WORDS_HANG", "1.0"))
# What a rank may leave out, or do alone.
ONE_MAY_SKIP = (
    *("forward", "forward(ac)", "quiet", "no_grad", "eval", "bare", "method"),
    *("backward", "oldest", "retain", "part", "grad", "sync"),
)
ONE_MAY_DO = (
    *("freeze(b.weight)", "unfreeze(b.weight)", "parameter replaced", "cast(double)"),
    *("raise in backward", "drop .grad", "NaN"),
    *("hook fails early", "hook returns None early", "hook raises"),
)
ALL_DO = (
    *("parameter added to the optimizer", "blind step", "step others", "step half"),
    *("zero", "zero to 0", "train mode", "reset"),
)


@dataclass(frozen=True)
class Word:
    """A training that goes wrong."""

    text: str  # of actions
    options: tuple[tuple[str, Any], ...] = ()
    has_hook: bool = False
    has_norm: bool = False

    @property
    def is_out_of_step(self) -> bool:
        """Whether ranks may leave collectives out, so that others pair up wrongly."""
        return "!" in self.text or "@" in self.text


def play(ctx: Any, word: Word, key: str) -> Record:
    """Play a word on a rank."""
    ctx = dataclasses.replace(ctx, group=fresh_group(ctx.group, f"words/{key}"))
    stage = Stage(
        ctx,
        "minidp",
        lambda: Net("abc", has_norm=word.has_norm, has_parts=True),
        options={"hang_timeout": HANG_SECONDS, **dict(word.options)},
        key=f"words/{key}",
    )
    stage.has_hook = word.has_hook
    record = run(stage, word.text, goes_on=True)
    has_raised = bool(record.errors or record.recovery)
    record.leaves_a_group = has_raised or stage.group is not ctx.group
    if not record.leaves_a_group:  # else this may wait for ever
        dist.destroy_process_group(stage.group)
    del stage
    gc.collect()
    return record


# --------------------------------------------------------------------------- the laws


def judge(word: Word, records: Sequence[Record]) -> str:
    """Return which law a word broke; empty if none."""
    for rank, record in enumerate(records):
        if record.undocumented:
            return f"rank {rank}: {record.undocumented}"
    recoveries = [record.recovery for record in records]
    if any(recoveries) or has_drifted(records, -1):
        return f"does not train after reset(): {recoveries}"
    if len({len(record.steps) for record in records}) > 1:
        return f"reset() raised on some ranks: {[each.errors for each in records]}"
    for stretch in zip(*(record.steps for record in records), strict=True):
        difference = _first_difference(word, stretch)
        if difference:
            return difference
    for ends in zip(*(record.ends for record in records), strict=True):
        if all(ends) and len(set(ends)) > 1:
            return f"silently different in the end: {ends}"
    return ""


def _first_difference(word: Word, stretch: Sequence[list[Step]]) -> str:
    """Return after which step replicas differ, if no rank was refused one before.

    Ranks that left something out may be a backward ahead of others: their gradients
    then pair up with those of another step, until one waits in vain. Nobody can know
    before (but for ``check_replicas_every``), so they are compared only where they are
    at the same action, and at the end if none of them has raised.
    """
    for number, steps in enumerate(zip(*stretch, strict=False)):
        digests = [step.digest for step in steps]
        if not all(digests):
            return ""  # from here on it is no secret
        if word.is_out_of_step and len({step.where for step in steps}) > 1:
            return ""
        if len(set(digests)) > 1:
            return f"silently different after step {number}: {digests}"
    return ""


# ------------------------------------------------------------------------- strategies

UNUSED, STATIC = ("find_unused_parameters", True), ("static_graph", True)
VIEWS = ("gradient_as_bucket_view", True)
EACH_ALONE, TWO_BUCKETS = ("bucket_cap_mb", 0), ("bucket_cap_mb", 40 / 2**20)
OPTIONS: list[tuple[tuple[str, Any], ...]] = [
    *((), (EACH_ALONE,), (VIEWS, TWO_BUCKETS), (STATIC, TWO_BUCKETS)),
    *((UNUSED,), (UNUSED, EACH_ALONE), (UNUSED, VIEWS)),
]
STEP = "zero, forward, backward, blind step"


def words(world_size: int) -> st.SearchStrategy[Word]:
    """Draw words: steps that are right, and actions that go wrong on some ranks."""
    ranks = range(world_size)
    skipped = [f"{action} !{rank}" for action in ONE_MAY_SKIP for rank in ranks]
    alone = [f"{action} @{rank}" for action in ONE_MAY_DO for rank in ranks]
    wrong = st.sampled_from([*ONE_MAY_SKIP, *ONE_MAY_DO, *skipped, *alone])
    right = st.sampled_from([*ALL_DO, *STEP.split(", "), "forward"])
    pieces = st.lists(st.just(STEP) | right | wrong, min_size=1, max_size=9)
    return st.builds(
        Word,
        text=pieces.map(", ".join),
        options=st.sampled_from(OPTIONS),
        has_hook=st.booleans(),
        has_norm=st.booleans(),
    )
