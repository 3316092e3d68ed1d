"""Random words of wrong uses: never silently different, never stuck, always mended.

python -m tests.fault.test_wrong_words --words 5000 --world-size 2
"""

from __future__ import annotations

import argparse
import itertools
import os
import sys
import time
from collections import Counter
from typing import Any

import hypothesis
import pytest
from hypothesis import given

from tests.fault.wrong_words import Op, Story, Word, judge, play, words
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
        for outcome in outcomes:
            if isinstance(outcome, RankError):
                self.pool.close()
                is_abort = outcome.kind == "Exited" and outcome.exit_code == -6
                self.counts["aborted by Gloo" if is_abort else outcome.kind] += 1
                return str(outcome)[:3000]
        self._count(outcomes)
        return judge(word, outcomes)

    def _count(self, stories: list[Story]) -> None:
        self.longest = max(self.longest, *(story.longest for story in stories))
        self.counts["steps"] += sum(len(s) for story in stories for s in story.steps)
        differed = any(story.rebuilds_differed for story in stories)
        self.counts["words in which only some ranks rebuilt"] += differed
        self.counts["words with errors"] += any(story.errors for story in stories)
        for story in stories:
            for _, text in story.errors:
                self.counts[text.split(":")[0]] += 1


@pytest.fixture(scope="module")
def stage() -> Any:
    made = Stage()
    yield made
    made.pool.close()


def ops(text: str) -> tuple[Op, ...]:
    """``"forward, backward 1, step"``: a number is the odd rank."""
    made = []
    for letter in text.split(", "):
        name, _, odd = letter.rpartition(" ")
        is_odd = bool(name) and odd.isdigit() and letter != "zero to 0"
        made.append(Op(name, int(odd)) if is_odd else Op(letter))
    return tuple(made)


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [2, 3])
def test_random_words(stage: Stage, world_size: int) -> None:
    profile = hypothesis.settings.default
    num_words = {50: 15, 200: 25}.get(profile.max_examples, profile.max_examples)

    @hypothesis.settings(profile, max_examples=num_words)
    @given(words(world_size))
    def run(word: Word) -> None:
        assert not stage.play(word, world_size)

    run()


# ------------------------------------------------------------------------ by hand, long


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--words", type=int, default=5000)
    parser.add_argument("--world-size", type=int, default=2, choices=[2, 3])
    parser.add_argument("--keep-going", action="store_true", help="do not shrink")
    arguments = parser.parse_args()
    stage = Stage()
    begin = time.monotonic()
    failures = 0

    @hypothesis.settings(
        max_examples=arguments.words,
        deadline=None,
        database=None,
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    @given(words(arguments.world_size))
    def run(word: Word) -> None:
        nonlocal failures
        broken = stage.play(word, arguments.world_size)
        if broken and arguments.keep_going:
            failures += 1
            sys.stdout.write(f"FAILED {word}\n    {broken[:600]}\n")
            sys.stdout.flush()
        elif broken:
            raise AssertionError(broken)

    try:
        run()
    finally:
        stage.pool.close()
        seconds = time.monotonic() - begin
        lines = [f"{name:40s} {count}" for name, count in stage.counts.most_common()]
        lines.append(f"longest letter {stage.longest:.1f} s; {seconds:.0f} s in all")
        lines.append(f"failures {failures}")
        sys.stdout.write("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
