"""Random words of wrong uses: never silently different, never stuck, always mended.

``MINIDP_EXAMPLES=5000`` plays as many; ``pytest -s`` prints what the words did.
"""

from __future__ import annotations

import itertools
import os
import sys
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

import hypothesis
import pytest
from hypothesis import given

from tests.simulation.scheduler import Finding
from tests.support import simulated
from tests.support.actions import Record
from tests.support.pool import Pool, RankError
from tests.wrong_uses.wrong_words import (
    EACH_ALONE,
    STATIC,
    STEP,
    TWO_BUCKETS,
    UNUSED,
    VIEWS,
    Word,
    judge,
    play,
    words,
)

pytestmark = pytest.mark.fault

WORD_SECONDS = 90.0  # after which a rank counts as hung
_numbers = itertools.count()


class Runner:
    """Plays words on a pool, and counts what happened."""

    def __init__(self) -> None:
        self.pool = Pool(3)
        self.counts: Counter[str] = Counter()
        self.longest = 0.0
        self.aborted: list[Word] = []

    def play(self, word: Word, world_size: int) -> str:
        """Play a word on new groups; return which law it broke, empty if none.

        Simulated ranks play it first. They do not know what Gloo makes of two
        collectives that do not belong together.
        """
        key = f"{os.getpid()}/{next(_numbers)}"
        if not simulated.ARE_REAL:
            try:
                return self._law_broken_by(
                    word, simulated.run(play, world_size, word, key)
                )
            except Finding as finding:
                is_gloos = word.is_out_of_step and "is matched with" in str(finding)
                if not is_gloos:  # else Gloo shows what comes of it, below
                    return str(finding)
        outcomes = self.pool.run(
            play, world_size, word, key, errors="return", limit=WORD_SECONDS
        )
        ends = [outcome for outcome in outcomes if isinstance(outcome, RankError)]
        if ends:
            self.counts["words"] += 1
            self.pool.close()
            return self._what_ended(word, ends)
        if any(record.leaves_a_group for record in outcomes):
            # Its collectives still wait. When they end, or meet one of another size,
            # Gloo may end the process: in the middle of another word.
            self.pool.close()
        return self._law_broken_by(word, outcomes)

    def _law_broken_by(self, word: Word, outcomes: Sequence[Record]) -> str:
        """Count what happened, and return which law the word broke; empty if none."""
        self.counts["words"] += 1
        self.longest = max(self.longest, *(record.longest for record in outcomes))
        self.counts["steps"] += sum(len(s) for record in outcomes for s in record.steps)
        self.counts["words with errors"] += any(record.errors for record in outcomes)
        errors = (text for record in outcomes for _, text in record.errors)
        self.counts.update(text.split(":")[0] for text in errors)
        return judge(word, outcomes)

    def _what_ended(self, word: Word, ends: list[RankError]) -> str:
        """Return the error of a process that is gone or stuck, unless Gloo ended it.

        Gloo ends it (std::terminate on its own thread) when two messages of different
        sizes meet, which no one can catch: that is counted, and no failure of ours.
        """
        if word.is_out_of_step and any(end.exit_code in (-6, -11) for end in ends):
            self.counts["words that Gloo aborted"] += 1
            self.aborted.append(word)
            return ""
        return str(ends[0])[:3000]


@pytest.fixture(scope="module")
def runner() -> Any:
    made, begin = Runner(), time.monotonic()
    yield made
    made.pool.close()
    seconds = time.monotonic() - begin
    lines = [f"{name:40s} {count}" for name, count in made.counts.most_common()]
    lines.append(f"longest action {made.longest:.1f} s; {seconds:.0f} s in all")
    lines += [f"aborted by Gloo: {word}" for word in made.aborted]
    sys.stdout.write("\n".join(lines) + "\n")


@pytest.mark.parametrize("world_size", [2, 3])
def test_random_words(runner: Runner, world_size: int) -> None:
    count = hypothesis.settings.default.max_examples
    count = {50: 15, 40: 10, 120: 25, 25: 12}.get(count, count)

    @hypothesis.settings(max_examples=count)
    @given(words(world_size))
    def run(word: Word) -> None:
        assert not runner.play(word, world_size)

    run()


# Understood, and right: each once looked like a failure.
UNZEROED = "forward, backward, blind step"
METHOD_ON_1 = "method @1, backward @1"
PINNED = {
    "a frozen parameter on one rank": (f"freeze(b.weight) @0, {UNZEROED}",),
    "sync_gradients() meets the backward of another rank": (
        f"sync !1, blind step, {STEP}, sync !1",
        UNUSED,
    ),
    "a backward pairs up with another step's": (
        f"forward, forward(ac) !1, retain !1, part !1, {STEP}",
        UNUSED,
    ),
    "a part of the outputs on one rank": (
        *("forward, part !0, forward", UNUSED, EACH_ALONE),
    ),
    "another branch on one rank": (
        "zero, forward !0, forward(ac) !1, backward, blind step",
    ),
    "torch.autograd.grad, then a step": (
        "forward, backward, forward, grad, blind step",
    ),
    "a retained graph": ("forward, retain, backward, blind step",),
    "a method on one rank": (f"forward, backward, {METHOD_ON_1}, blind step",),
    "a cast": (f"{UNZEROED}, cast(double), {UNZEROED}",),
    "added to the module and to its optimizer": (
        f"parameter added to the optimizer, {STEP}",
    ),
    "replaced on one rank, and taken for unused": (
        *(f"parameter replaced @0, {STEP}", UNUSED),
    ),
    "a cast on one rank, and a step with the gradients of before": (
        f"{UNZEROED}, cast(double) @1, blind step",
    ),
    "sync_gradients() on one rank, with nothing to average": (
        *(f"{UNZEROED}, zero, sync !1, {UNZEROED}", EACH_ALONE),
    ),
    "sync_gradients() on one rank, before a static graph is known": (
        *(f"forward, sync !1, forward, {STEP}, sync !1", STATIC, TWO_BUCKETS),
    ),
    "replaced on one rank, and a step with the gradients of before": (
        f"{UNZEROED}, parameter replaced @1, step half",
    ),
    "replaced on one rank, and the old one stepped twice": (
        f"{UNZEROED}, parameter replaced @0, blind step, {STEP}",
    ),
    "a forward too many": (f"forward(ac) !1, {STEP}, forward", UNUSED, EACH_ALONE),
    "NaN on one rank": (f"NaN @0, {UNZEROED}",),
    "cast behind views on one rank": (
        f"{UNZEROED}, {UNZEROED}, forward, cast(double) @1, freeze(b.weight) @0, "
        f"freeze(b.weight), method, backward, {STEP}",
        *(VIEWS, EACH_ALONE),
    ),
    "nulled in the first backward of a static graph": (
        *(f"drop .grad, {STEP}, {STEP}", STATIC),
    ),
    "averages that one rank zeroes, being a step ahead": (
        f"forward, oldest !0, zero to 0, blind step, {STEP}",
    ),
}


@pytest.mark.parametrize("name", PINNED)
def test_pinned(runner: Runner, name: str) -> None:
    text, *options = PINNED[name]
    assert not runner.play(Word(text, tuple(options)), 2)


def test_a_missing_guard_is_noticed(runner: Runner) -> None:
    text = f"forward, backward, {METHOD_ON_1}, blind step"
    assert "silently different" in runner.play(Word(text, (("unsynced", "ignore"),)), 2)
