"""Random words of wrong uses: never silently different, never stuck, always mended.

``MINIDP_EXAMPLES=5000`` plays as many; ``pytest -s`` prints what the words did.
"""

from __future__ import annotations

import itertools
import os
import sys
import time
from collections import Counter
from typing import Any

import hypothesis
import pytest
from hypothesis import given

from tests.fault.wrong_words import (
    EACH_ALONE,
    STATIC,
    TWO_BUCKETS,
    UNUSED,
    VIEWS,
    Op,
    Word,
    is_out_of_step,
    judge,
    play,
    words,
)
from tests.support.pool import Pool, RankError

WORD_SECONDS = 90.0  # after which a rank counts as hung
WORDS_PER_TEAM = 150  # a broken group keeps its threads for good: new processes
_numbers = itertools.count()


class Stage:
    """Plays words on its own pool, and counts."""

    def __init__(self) -> None:
        self.pool = Pool(3)
        self.counts: Counter[str] = Counter()
        self.longest = 0.0
        self.aborted: list[Word] = []

    def play(self, word: Word, world_size: int) -> str:
        """Which law the word broke; empty: none."""
        number = next(_numbers)
        if number % WORDS_PER_TEAM == WORDS_PER_TEAM - 1:
            self.pool.close()
        key = f"{os.getpid()}/{number}"
        outcomes = self.pool.run(
            play, world_size, word, key, errors="return", limit=WORD_SECONDS
        )
        self.counts["words"] += 1
        ends = [outcome for outcome in outcomes if isinstance(outcome, RankError)]
        if ends:
            self.pool.close()
            return self._what_ended(word, ends)
        self.longest = max(self.longest, *(story.longest for story in outcomes))
        self.counts["steps"] += sum(len(s) for story in outcomes for s in story.steps)
        self.counts["words with errors"] += any(story.errors for story in outcomes)
        errors = (text for story in outcomes for _, text in story.errors)
        self.counts.update(text.split(":")[0] for text in errors)
        return judge(word, outcomes)

    def _what_ended(self, word: Word, ends: list[RankError]) -> str:
        """A process is gone, or stuck.

        Gloo ends it (std::terminate on its own thread) when two messages of different
        sizes meet, which no one can catch: that is counted, and no failure of ours.
        """
        if is_out_of_step(word) and any(end.exit_code in (-6, -11) for end in ends):
            self.counts["words that Gloo aborted"] += 1
            self.aborted.append(word)
            return ""
        return str(ends[0])[:3000]


@pytest.fixture(scope="module")
def stage() -> Any:
    made, begin = Stage(), time.monotonic()
    yield made
    made.pool.close()
    seconds = time.monotonic() - begin
    lines = [f"{name:40s} {count}" for name, count in made.counts.most_common()]
    lines.append(f"longest letter {made.longest:.1f} s; {seconds:.0f} s in all")
    lines += [f"aborted by Gloo: {word}" for word in made.aborted]
    sys.stdout.write("\n".join(lines) + "\n")


def ops(text: str) -> tuple[Op, ...]:
    """``"forward, backward 1, step"``: a number is the odd rank."""
    made = []
    for letter in text.split(", "):
        name, _, odd = letter.rpartition(" ")
        uses_forward_group = bool(name) and odd.isdigit() and letter != "zero to 0"
        made.append(Op(name, int(odd)) if uses_forward_group else Op(letter))
    return tuple(made)


@pytest.mark.parametrize("world_size", [2, 3])
def test_random_words(stage: Stage, world_size: int) -> None:
    count = hypothesis.settings.default.max_examples
    count = {50: 15, 60: 10, 120: 25}.get(count, count)

    @hypothesis.settings(max_examples=count)
    @given(words(world_size))
    def run(word: Word) -> None:
        assert not stage.play(word, world_size)

    run()


# Understood, and right: each once looked like a failure.
STEP, FROM_ZERO = "forward, backward, step", "zero to None, forward, backward, step"
PINNED = {
    "a frozen parameter on one rank": ("freeze 0, " + STEP,),
    "sync_gradients() meets the backward of another rank": (
        f"sync 1, step, {FROM_ZERO}, sync 1",
        UNUSED,
    ),
    "a backward pairs up with another step's": (
        "forward, branch 1, retain 1, part 1, " + FROM_ZERO,
        UNUSED,
    ),
    "a part of the outputs on one rank": (
        *("forward, part 0, forward", UNUSED, EACH_ALONE),
    ),
    "another branch on one rank": (
        "zero to None, forward 0, branch 1, backward, step",
    ),
    "torch.autograd.grad, then a step": ("forward, backward, forward, grad, step",),
    "a retained graph": ("forward, retain, backward, step",),
    "a method on one rank": ("forward, backward, method 0, step",),
    "a cast": (f"{STEP}, cast, {STEP}",),
    "added to the module and to its optimizer": ("add, " + FROM_ZERO,),
    "replaced on one rank, and taken for unused": ("replace 0, " + FROM_ZERO, UNUSED),
    "a cast on one rank, and a step with the gradients of before": (
        STEP + ", cast 1, step",
    ),
    "sync_gradients() on one rank, with nothing to average": (
        *(f"{STEP}, zero to None, sync 1, {STEP}", EACH_ALONE),
    ),
    "sync_gradients() on one rank, before a static graph is known": (
        *(f"forward, sync 1, forward, {FROM_ZERO}, sync 1", STATIC, TWO_BUCKETS),
    ),
    "replaced on one rank, and a step with the gradients of before": (
        STEP + ", replace 1, step half",
    ),
    "a forward too many": (f"branch 1, {FROM_ZERO}, forward", UNUSED, EACH_ALONE),
    "NaN on one rank": ("NaN 0, " + STEP,),
    "cast behind views on one rank": (
        f"{STEP}, {STEP}, forward, cast 1, freeze 0, freeze, method, {FROM_ZERO}",
        *(VIEWS, EACH_ALONE),
    ),
    "nulled in the first backward of a static graph": (
        *(f"nulling hook, {FROM_ZERO}, {FROM_ZERO}", STATIC),
    ),
    "averages that one rank zeroes, being a step ahead": (
        "forward, oldest 0, zero to 0, step, " + FROM_ZERO,
    ),
}


@pytest.mark.parametrize("name", PINNED)
def test_pinned(stage: Stage, name: str) -> None:
    text, *options = PINNED[name]
    assert not stage.play(Word(ops(text), tuple(options)), 2)


def test_a_missing_guard_is_noticed(stage: Stage) -> None:
    word = Word(ops("forward, backward, method 0, step"), (("unsynced", "ignore"),))
    assert "silently different" in stage.play(word, 2)
