"""Say which rank is wrong after an audit has found that ranks differ.

An `Inquiry` has the same facts on all ranks, and so comes to the same words there. It
communicates nothing: `Audit` asks it what is to be computed again, and brings votes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from minidp.errors import explain, listed, shortened

from .verdicts import Pair, arbiter, of_everybody, of_pair, of_sum

MOST_REPEATS = 4  # how many logical ranks are computed once more in one step
Settings = Mapping[str, str]


class Row(NamedTuple):
    """What a rank says after each audited step, in checksums."""

    may_repeat: int  # whether it can compute logical ranks once more
    settings: int
    weights: int  # the parameters at the beginning of the step
    own: int  # gradients of its own logical rank that is audited
    own_buffers: int  # the module buffers that this one has left
    is_comparable: int  # whether what follows began with the same ``.grad``
    other: int  # gradients of the logical rank that it audits
    other_buffers: int
    summed: int  # the slices that it has added up again
    received: tuple[int, ...]  # each slice of all buckets, by the rank that owns it

    @classmethod
    def read(cls, numbers: Sequence[int]) -> Row:
        """Return the row whose `plain` these numbers are."""
        count = len(cls._fields) - 1
        return cls._make([*numbers[:count], tuple(numbers[count:])])

    @property
    def plain(self) -> list[int]:
        """All numbers, of 64 bits."""
        return [*self[:-1], *self.received]


@dataclass(frozen=True)
class Details:
    """What a rank tells once checksums differ: single ones, by name."""

    host: str
    settings: Settings
    weights: Mapping[str, int]
    own: Mapping[str, int]
    own_buffers: Mapping[str, int]
    other: Mapping[str, int]
    other_buffers: Mapping[str, int]
    summed: Mapping[str, int]  # by bucket
    received: Mapping[str, int]  # by "bucket/slice"


class Inquiry:
    """The search for the wrong rank of one step.

    Args:
        step: The number of the step.
        pairs: Who audits whom, by owner.
        rows: What each rank has said.
    """

    def __init__(self, step: int, pairs: Sequence[Pair], rows: Sequence[Row]) -> None:
        self._step, self._rows, self._ranks = step, rows, len(rows)
        self._weights = of_everybody([row.weights for row in rows])
        self._pairs = [pair for pair in pairs if self._differs(pair)]
        self.slices = [  # those whose sums differ, by the rank that owns them
            owner
            for owner in range(self._ranks)
            if {row.received[owner] for row in rows}
            != {rows[(owner - 1) % self._ranks].summed}
        ]
        self._details: Sequence[Details] = ()
        self._named: set[int] = set()
        self._sentences: list[str] = []
        self._doubts: list[str] = []  # sentences that name nobody for certain
        self._suspects: set[int] = set()
        self._repeats_left = MOST_REPEATS * all(row.may_repeat for row in rows)
        self._has_owners = False
        self._is_script = False  # the script is the likely cause
        self._has_judged_pairs = bool(self._pairs)

    def _differs(self, pair: Pair) -> bool:
        own, other = self._rows[pair.owner], self._rows[pair.auditor]
        mine, theirs = (own.own, own.own_buffers), (other.other, other.other_buffers)
        is_other_start = own.weights != other.weights  # which is judged by itself
        return bool(other.is_comparable) and mine != theirs and not is_other_start

    @property
    def is_needed(self) -> bool:
        """Whether anything differs that should be equal."""
        return bool(self._weights or self._pairs or self.slices)

    def begin(self, details: Sequence[Details]) -> None:
        """Judge the parameters, now that each rank has told its details."""
        self._details = details
        if self._weights is None:
            return
        ranks, names = self._weights.ranks, _differing(d.weights for d in details)
        when = f"at the beginning of step {self._step}: {shortened(names)}"
        if self._weights.is_certain:
            self._name(ranks, f"It has other parameters than most ranks {when}")
        else:
            self._doubt(ranks, f"Their parameters differ {when}")

    # -- logical ranks that two ranks have computed ------------------------------------

    def next_pair(self) -> Pair | None:
        """Return whose logical rank has to be computed once more, or None."""
        unknown = [
            pair for pair in self._pairs if not self._named.intersection(pair[:2])
        ]
        if unknown and self._repeats_left:
            self._pairs.remove(unknown[0])
            self._repeats_left -= 1
            return unknown[0]
        for owner, auditor, leaf in unknown:
            place = f"logical rank {leaf} of step {self._step}"
            text = f"They have different results for {place}, which was not repeated"
            self._doubt((owner, auditor), text)
        return None

    def judges(self, pair: Pair) -> list[int]:
        """Return the ranks that compute it: both again, and a third one if possible."""
        suspects = {rank for each in self._pairs for rank in each[:2]}
        third = arbiter(pair, self._ranks, suspects)
        return [pair.owner, pair.auditor, *([] if third is None else [third])]

    def judge_pair(self, pair: Pair, again: Mapping[int, tuple[int, int]]) -> None:
        """Judge a pair by what the judges have computed: gradients, and buffers."""
        owner, auditor, leaf = pair
        own, other = self._rows[owner], self._rows[auditor]
        first = {
            owner: (own.own, own.own_buffers),
            auditor: (other.other, other.other_buffers),
        }
        verdict = of_pair(first, again)
        mine, theirs = self._details[owner], self._details[auditor]
        what, names = "gradients", _differing([mine.own, theirs.other])
        if not names:
            what = "module buffers"
            names = _differing([mine.own_buffers, theirs.other_buffers])
        place = f"logical rank {leaf} of step {self._step}"
        found = f"{what} of {place} differ: {shortened(names)}"
        others = listed({*again} - {*verdict.ranks})
        if verdict.is_certain and verdict.is_unsteady:
            text = (
                f"It computed {place} twice, with different {what}, and rank {others} "
                f"got the same both times. The {found}"
            )
            self._name(verdict.ranks, text)
        elif verdict.is_certain:
            (wrong,) = verdict.ranks
            when = ""
            if again[wrong] != first[wrong]:
                when = ", which it did not get a second time,"
            text = f"Its {what} in {place}{when} are not those of rank {others}"
            self._name(verdict.ranks, f"{text}: {shortened(names)}")
        elif verdict.is_unsteady:
            self._is_script = True
            text = (
                f"Nobody agrees with anybody about {place}, so the script is the likely"
                " cause: sums in an order that is left to chance (atomics), or samples,"
                " module buffers or random numbers that depend on the rank, or on what "
                "came before"
            )
            self._doubt(verdict.ranks, f"{text}. The {found}")
        else:
            text = f"Each of the two has computed {place} twice, with the same result"
            self._doubt(verdict.ranks, f"{text}, but they differ. The {found}")

    # -- sums over the ranks -----------------------------------------------------------

    def judge_sums(
        self,
        votes: Mapping[int, Sequence[Mapping[str, int]]],
        names_of: Mapping[str, Sequence[str]],
        *,
        has_owners: bool,
    ) -> None:
        """Judge the sums of slices.

        Args:
            votes: What each rank has added up again, by bucket; the rank with number r
                is the owner of the slice r + shift, by shift.
            names_of: The parameters in a part of a bucket, by "bucket/slice".
            has_owners: Whether one rank has added up a slice for all. An all-reduce
                does not tell who has.
        """
        self._has_owners = has_owners
        for owner in self.slices:
            buckets = sorted({key.split("/")[0] for key in names_of}, key=int)
            for bucket in buckets:
                key = f"{bucket}/{owner}"
                received = [d.received.get(key, 0) for d in self._details]
                again = {
                    (owner - shift) % self._ranks: by_rank[
                        (owner - shift) % self._ranks
                    ].get(bucket, 0)
                    for shift, by_rank in votes.items()
                }
                adder = (owner - 1) % self._ranks
                if {*received} != {*again.values()} or len({*received}) > 1:
                    self._judge_sum(owner, bucket, again, received, names_of[key])
                elif self._details[adder].summed.get(bucket, 0) != received[0]:
                    place = f"slice {owner} of bucket {bucket} in step {self._step}"
                    text = f"In the audit it has added up {place} to another sum, once"
                    self._name((adder,), f"{text}: {shortened(names_of[key])}")

    def _judge_sum(
        self,
        owner: int,
        bucket: str,
        again: Mapping[int, int],
        received: Sequence[int],
        names: Sequence[str],
    ) -> None:
        verdict = of_sum(again, received)
        place = f"slice {owner} of bucket {bucket} in step {self._step}"
        which = f": {shortened(names)}"
        if not verdict.is_certain:
            self._doubt(tuple(again), f"They have different sums of {place}{which}")
            return
        if verdict.adders:
            text = f"In the audit it has added up {place} to another sum"
            self._name(verdict.adders, f"{text}{which}")
        if len(verdict.receivers) == self._ranks and not self._has_owners:
            text = f"They got a sum of {place} that nobody gets when adding up again"
            self._doubt(verdict.receivers, f"{text}{which}")
        elif len(verdict.receivers) == self._ranks:
            text = f"It has sent all ranks a wrong sum of {place}, or got wrong parts"
            self._name((owner,), f"{text}{which}")
        elif verdict.receivers:
            text = f"It has not got the sum of {place} that the others have"
            self._name(verdict.receivers, f"{text}{which}")

    # -- what is said ------------------------------------------------------------------

    def _name(self, ranks: Sequence[int], sentence: str) -> None:
        self._named.update(ranks)
        self._sentences.append(f"Rank {listed(ranks)}: {sentence}.")

    def _doubt(self, ranks: Sequence[int], sentence: str) -> None:
        self._suspects.update(ranks)
        self._doubts.append(f"Ranks {listed(ranks)}: {sentence}.")

    @property
    def subject(self) -> tuple[object, ...]:
        """Who is named or suspected, and of what: equal if an alarm is the same again.

        It is the same on all ranks.
        """
        kinds = (bool(self._weights), self._has_judged_pairs, bool(self.slices))
        return (frozenset(self._named), frozenset(self._suspects), *kinds)

    def text_again(self, rank: int, first: int, count: int) -> str:
        """Return the short line that every rank warns if an alarm is the same again.

        Args:
            rank: The rank that speaks.
            first: The step of the first such alarm.
            count: How many there were before.
        """
        what = "names" if self._named else "finds a difference and suspects"
        return (
            f"[rank {rank}] The audit of step {self._step} {what} {self._hosts} again: "
            f"the same as in step {first}, whose warning says more ({count + 1} such "
            "audits by now)."
        )

    @property
    def _hosts(self) -> str:
        return ", ".join(
            f"rank {each} on host {self._details[each].host}"
            for each in sorted(self._named or self._suspects)
        )

    def text(self, rank: int, last_good: int | None, *, has_stepped: bool) -> str:
        """Return the line that every rank raises or warns.

        Args:
            rank: The rank that speaks.
            last_good: The last audited step in which nothing differed.
            has_stepped: Whether the optimizer has stepped already.
        """
        whom = self._named or self._suspects
        if self._named:
            what = f"The audit of step {self._step} names {self._hosts}."
        else:
            what = (
                f"The audit of step {self._step} has found a difference, and cannot say"
                f" which rank is wrong: {self._hosts}."
            )
        sentences = [what, *self._sentences, *self._doubts]
        settings = [details.settings for details in self._details]
        sentences += [f"{text}." for text in other_settings(settings, whom)]
        if has_stepped:
            sentences.append("step_in_backward() has applied the gradients already.")
        since = "a checkpoint from before this step"
        if last_good is not None:
            since = (
                f"a checkpoint whose logical_state has first_step {last_good} or less "
                f"(step {last_good} had the last good audit)"
            )
        remedy = (
            "look at the script first: do samples depend on step and logical rank only,"
            " also what workers, random and numpy draw, and does nothing change "
            "parameters or the optimizer on one rank only? Then compare settings, "
            "libraries and hardware of these ranks; if they are alike, do without that "
            f"device, and go on from {since}"
        )
        if self._is_script and not self._named:
            remedy = (
                "call torch.use_deterministic_algorithms(True), and let samples depend "
                "on step and logical rank only; without that no rank can audit another"
            )
        return explain(rank, " ".join(sentences), remedy=remedy)


def other_settings(settings: Sequence[Settings], ranks: Iterable[int]) -> list[str]:
    """Say in what some ranks differ from what most ranks have, without full stops."""
    found = []
    for rank in sorted(ranks):
        usual = {
            name: Counter(each.get(name) for each in settings).most_common(1)[0][0]
            for name in settings[rank]
        }
        other = [
            f"{name} ({value}, elsewhere {usual[name]})"
            for name, value in settings[rank].items()
            if usual[name] != value
        ]
        if other:
            found.append(f"Rank {rank} has other settings: {', '.join(other)}")
    return found


def _differing(values: Iterable[Mapping[str, int]]) -> list[str]:
    """Return the names for which some of the checksums differ; a missing one is 0."""
    each = list(values)
    names = dict.fromkeys(name for one in each for name in one)
    return [name for name in names if len({one.get(name, 0) for one in each}) > 1]
