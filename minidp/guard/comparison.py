"""Ask the other ranks whether a suspicion is true, before it becomes an error.

One rank alone can only suspect. It knows that a gradient was never averaged by us, but
not whether the script has averaged it itself; it knows that parameters have changed
after a local backward, but not whether they have changed alike everywhere. An error
needs a proof: that the replicas differ now, or that the coming step makes them differ.

So the ranks that suspect something at the same point of the training post a digest in
the store, wait for the others' digests, and compare. This is no collective, because a
rank that suspects nothing does not come to it:

    gradients    Its heartbeat tells where it is instead. If it waits in the next
                 backward, and has not made the step that this rank is about to make,
                 that proves a mistake. If it has made the step, or is elsewhere,
                 nothing is proved, and the parameters decide later.
    parameters   This rank asks after its step, or when it begins its next backward.
                 The others answer from inside their wait in their next forward or
                 backward (`Comparison.answer`): their parameters stay as they are
                 until this rank has joined.
"""

from __future__ import annotations

import math
import os
import zlib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from minidp import world
from minidp.comm import answerers, group_store, has_store, post_json, read_json
from minidp.core import Phase, Reducer
from minidp.errors import listed
from minidp.replica import SMALL_BYTES, are_close_on_all_ranks, digest_of

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store

    from minidp.comm import Question

# Without a heartbeat, or while others compute, only time tells who does not come.
PATIENCE_SECONDS = 10.0
# The moments of comparisons that belong to one of several forwards before a backward.
_IN_FORWARDS = ("forward", "opened", "cast")
FIRST_PAUSE, LONGEST_PAUSE = 0.0005, 0.02  # seconds between two looks at the store
# Gradients that ranks have averaged by hand may differ by rounding: this part of the
# largest element, or twice what the dtype can tell.
ROUNDING = 1e-5


class Kind(str, Enum):
    """Why a rank has come to a comparison, which it tells the others."""

    ANSWER = ""  # because another rank has asked: it may not come to a collective
    NOW = "now"  # it has a suspicion, and compares what there is now
    # It compares parameters as they were before the change that it suspects.
    AT_REST = "at rest"
    # In a backward, where weights may be moved for a while:
    CHANGE = "change"  # parameters changed by hand, and only some ranks know
    SKIP = "skip"  # this rank has left out an optimizer step
    STEP = "step"  # it has made a step of gradients that were not averaged


@dataclass(frozen=True)
class Verdict:
    """What a comparison has found. The `Guard` decides what follows from it."""

    digests: Mapping[int, int]  # by rank, of the ranks that answered
    ranks: frozenset[int]  # without those that ran out of inputs, in join()
    can_ask: bool = True
    stepped: frozenset[int] = frozenset()  # ranks that made the step unsuspecting
    reducing: frozenset[int] = frozenset()  # ranks that went on without the step
    # Ranks that have not come, but answer a later question if they are merely late:
    # nothing shows that they have gone on to where nobody will ask them.
    awaited: frozenset[int] = frozenset()
    is_rounding: bool = False  # the digests differ, but no value does by much
    is_same_part: bool = True  # all that answered step the same parameters
    kinds: frozenset[Kind] = frozenset({Kind.NOW})  # why the ranks have come

    @property
    def are_all_here(self) -> bool:
        """Whether all ranks answered."""
        return self.digests.keys() == self.ranks

    @property
    def have_all_left_out(self) -> bool:
        """Whether all ranks ask because they have left out a step."""
        return self.are_all_here and self.kinds == {Kind.SKIP}

    @property
    def is_equal(self) -> bool:
        """Whether all ranks answered, and hold the same values."""
        return self.are_all_here and not self.is_proof

    @property
    def late(self) -> frozenset[int]:
        """Ranks that may still come to where the others are.

        To be late is no mistake, and without these ranks nobody knows whether the
        others differ by more than rounding, or have all done the same. So nothing is
        decided, and the ranks have to ask once more.
        """
        return self.awaited - self.stepped - self.reducing

    @property
    def is_proof(self) -> bool:
        """Whether all ranks but those that went on hold different values."""
        differ = len(set(self.digests.values())) > 1
        return differ and not self.is_rounding and not self.late

    @property
    def proves_mistake(self) -> bool:
        """Whether the coming optimizer step makes the replicas differ.

        If the ranks step different parts, or if some ranks step without a suspicion, it
        need not, because they may send each other the results. If nobody can be asked,
        the suspicion counts as a proof.
        """
        if not self.can_ask or self.reducing:
            return True
        return self.is_proof and self.is_same_part

    @property
    def have_all_stepped(self) -> bool:
        """Whether all ranks make this step, though some of them suspect nothing."""
        return not self.is_proof and self.digests.keys() | self.stepped == self.ranks

    def describe(self, what: str) -> str:
        """Return the part "Found" of an error, where ``what`` may be "gradients"."""
        if not self.can_ask:
            return (
                f"no store through which the ranks could compare their {what}, so "
                "that this rank cannot know whether they are equal"
            )
        if absent := sorted(self.ranks - self.digests.keys()):
            return f"rank {listed(absent)} did not see this problem and went on"
        values = [*self.digests.values()]
        usual = max(values, key=values.count)
        odd = [rank for rank, value in self.digests.items() if value != usual]
        rest = [rank for rank, value in self.digests.items() if value == usual]
        return f"different {what} on rank {listed(odd)} than on rank {listed(rest)}"


class _Question(NamedTuple):
    """What a rank tells those that do not come to a comparison by themselves."""

    kind: Kind
    # If they differ, all of them compare after the next step. Then this is what has
    # happened, and the remedy; else it is None.
    looks_again: tuple[str, str] | None = None


class Comparison:
    """Compare gradients or parameters of one wrapper between ranks.

    They meet through the store, because some may not come. Only if all have come does a
    collective find out whether a difference is mere rounding.

    Args:
        reducer: The reducer of the wrapper.
        key: Returns the wrapper's place in the store, which is the same on all ranks.
        replaced: Returns, by name, the parameters that the module has got since it was
            wrapped. A rank that asks compares these in the place of those of the same
            names.
    """

    # The ranks that still make steps, in `join()`, or None for all.
    ranks_with_inputs: Collection[int] | None = None

    def __init__(
        self,
        reducer: Reducer,
        key: Callable[[], str],
        replaced: Callable[[], Mapping[str, torch.Tensor]] = dict,
    ) -> None:
        self._reducer, self._key, self._replaced = reducer, key, replaced
        self._process = os.getpid()
        # Called in a wait for other ranks: one of them has asked whether parameters are
        # equal, and wants to look again after the next step, and they differ.
        self.on_difference: Callable[[str, str], None] = lambda *_: None
        self._is_asking = False
        self._asked = ""  # the last comparison to which this rank came by itself
        # The ledger's `finalized` and `steps` when the last forward began.
        self._at_forward: tuple[int, int] | None = None
        self._place, self._repeats = "", 0  # of the last comparison
        self._answered = ""  # the last question that `answer` has answered
        self._topics: list[str] = []  # of comparisons that all ranks came to
        answerers().add(self)

    @property
    def is_needed(self) -> bool:
        """Whether there is another rank that could differ.

        A forked child of a rank has inherited the wrapper, but no rank knows of it.
        """
        if os.getpid() != self._process:
            return False
        ranks = self.ranks_with_inputs
        return (self._reducer.communicator.size if ranks is None else len(ranks)) > 1

    def _ranks(self) -> frozenset[int]:
        """Return the ranks that train, which in join() are those with inputs left."""
        everybody = range(self._reducer.communicator.size)
        with_inputs = self.ranks_with_inputs
        return frozenset(everybody if with_inputs is None else with_inputs)

    @property
    def can_ask(self) -> bool:
        """Whether the ranks share a store."""
        return has_store(self._reducer.communicator.group)

    def of_gradients(
        self, params: Sequence[torch.nn.Parameter], which: Sequence[int]
    ) -> Verdict:
        """Compare ``.grad`` of ``params``, which a coming optimizer step applies.

        Args:
            params: All parameters of the optimizer.
            which: The indices of those that we average. Other ranks may step others,
                and the verdict tells whether they do.
        """
        part = zlib.crc32(repr([*which]).encode())
        return self._compare("step", [param.grad for param in params], part=part)

    def of_parameters(self, moment: str, which: Sequence[int]) -> Verdict:
        """Compare the parameters with the indices ``which``, as they are now.

        Args:
            moment: A name of the place in the training loop, equal on all ranks.
            which: The indices of the parameters.
        """
        return self._compare(moment, [self._reducer.params[i] for i in which])

    def of_values(self, moment: str, tensors: Sequence[torch.Tensor]) -> Verdict:
        """Compare any other tensors."""
        return self._compare(moment, tensors)

    def of_digest(self, moment: str, digest: int) -> Verdict:
        """Compare what `digest` has returned on each rank."""
        return self._compare(moment, (), digest=digest)

    def digest(self) -> int:
        """Return a checksum of the parameters as they are now."""
        return _digest(self._reducer.params)

    def with_waiting_ranks(
        self,
        kind: Kind,
        patience: float | None = None,
        *,
        looks_again: tuple[str, str] | None = None,
    ) -> Verdict:
        """Compare all parameters at the beginning of a synchronised backward.

        The other ranks wait for this rank in the same backward, and answer from there.
        In a backward, too, the wait has an end, because a late rank may wait for this
        one elsewhere. Then nothing is decided, and `Verdict.late` tells who may answer
        in the next backward. If a rank never comes, the wait for the first bucket,
        which follows, names it.

        Args:
            kind: Why this rank asks.
            patience: After this rank's step, and not in a backward, how many seconds to
                wait for the others, which come to the next forward and backward if all
                goes well.
            looks_again: What has happened, and the remedy, if a difference is to be
                looked at again after the next step. Ranks that only answer are told of
                it then (`on_difference`).
        """
        moment = "backward" if patience is None else "stepped"
        if patience is None:
            limit = self._reducer.communicator.limit or math.inf
            patience = min(PATIENCE_SECONDS, limit / 4)
        return self._compare(
            moment,
            self._present(),
            patience=patience,
            question=_Question(kind, looks_again),
        )

    def _present(self) -> list[torch.Tensor]:
        """Return the parameters that the module has now in the places of ours."""
        reducer, replaced = self._reducer, self._replaced()
        if not replaced:
            return [*reducer.params]
        named = zip(reducer.names, reducer.params, strict=True)
        return [replaced.get(name, param) for name, param in named]

    def note_forward(self) -> None:
        """Note that a synchronising forward begins, with the parameters as they are."""
        ledger = self._reducer.ledger
        self._at_forward = ledger.finalized, ledger.steps

    def _compare(
        self,
        moment: str,
        tensors: Sequence[torch.Tensor | None],
        *,
        patience: float | None = None,
        question: _Question | None = None,
        part: int = 0,
        digest: int | None = None,
    ) -> Verdict:
        """Meet the other ranks in the store, and compare digests of these tensors.

        Args:
            moment: The place in the training loop.
            tensors: What to compare.
            patience: How many seconds to wait for them; None: as long as it takes.
            question: If there is one, ranks that wait for this one answer it.
            part: Which part of the parameters this is; only equal parts can be equal.
            digest: A checksum of before, to be compared instead, without a look at
                rounding.
        """
        communicator, ranks = self._reducer.communicator, self._ranks()
        kind = Kind.NOW if question is None else question.kind
        if digest is None:
            digest = _digest(tensors)
        else:
            kind = Kind.AT_REST
        if len(ranks) == 1:
            return Verdict({communicator.rank: digest}, ranks)
        if not has_store(communicator.group):
            return Verdict({communicator.rank: digest}, ranks, can_ask=False)
        topic = self._next_topic(moment)
        post = [digest, kind, part]
        # This rank has asked, so `answer` must never replace its post by an answer. The
        # others read from it whether this rank will come to the collective below.
        self._asked = topic
        posts, passed = self._meet(moment, topic, post, patience, question)
        posts = self._agree_who_came(topic, posts)
        return self._verdict(topic, tensors, posts, passed)

    def _verdict(
        self,
        topic: str,
        tensors: Sequence[torch.Tensor | None],
        posts: dict[int, Any],
        passed: Question | None,
    ) -> Verdict:
        """Return what follows from the posts; ranks with equal ones get the same.

        If all ranks have come by themselves and differ, this is a collective.
        """
        communicator, ranks = self._reducer.communicator, self._ranks()
        digests = {rank: value for rank, (value, *_) in posts.items()}
        absent = ranks - posts.keys()
        nobody: frozenset[int] = frozenset()
        stepped = absent & (nobody if passed is None else passed.stepped)
        reducing = absent & (nobody if passed is None else passed.reducing)
        awaited = nobody
        if passed is not None and communicator.answers_questions:
            awaited = absent - passed.ahead
        if absent and communicator.peers.is_alone and not (stepped | reducing):
            # Perhaps they have no such wrapper, or another number for it: no proof.
            return Verdict(dict.fromkeys(ranks, digests[communicator.rank]), ranks)
        if not absent:
            self._forget_before(topic)
        is_same_part = len({each for *_, each in posts.values()}) == 1
        kinds = frozenset(Kind(each) for _, each, _ in posts.values())
        # Only ranks that have asked come to a collective, and all need what differs.
        can_look = len(posts) == communicator.size and kinds.isdisjoint(
            {Kind.ANSWER, Kind.AT_REST}
        )
        is_rounding = False
        if can_look and is_same_part and len(set(digests.values())) > 1:
            is_rounding = are_close_on_all_ranks(tensors, communicator, ROUNDING)
        return Verdict(
            digests,
            ranks,
            stepped=stepped,
            reducing=reducing,
            awaited=awaited,
            is_rounding=is_rounding,
            is_same_part=is_same_part,
            kinds=kinds,
        )

    def _meet(
        self,
        moment: str,
        topic: str,
        post: Any,
        patience: float | None,
        question: _Question | None,
    ) -> tuple[dict[int, Any], Question | None]:
        """Post this rank's digest, and wait for those of the others.

        Returns:
            The posts by rank, and which ranks have gone on without coming, if they can
            be asked.
        """
        communicator, ledger = self._reducer.communicator, self._reducer.ledger
        ranks, store = self._ranks(), self._store()
        with suppress(RuntimeError):  # then the meeting finds out
            if question is not None:
                steps = ledger.steps if moment == "stepped" else None
                asked = [topic, steps, question.looks_again]
                known = read_json(store, "ask", [ledger.finalized])
                if question.looks_again or not known.get(ledger.finalized, asked)[2]:
                    post_json(store, "ask", ledger.finalized, asked)
            post_json(store, topic, communicator.rank, post)
        passed = communicator.peers.ask_who_passed(
            ledger.finalized, ledger.steps, may_answer=question is not None
        )
        if patience is None and (passed is None or communicator.peers.is_alone):
            patience = PATIENCE_SECONDS
        meeting = _Meeting(store, topic, ranks, passed, patience)
        self._is_asking = True
        try:
            with communicator.watching(f"comparing the ranks' {moment}"):
                posts = communicator.wait(meeting)
        finally:
            self._is_asking = False
            if passed is not None:
                passed.drop()
        return dict(sorted({**posts, communicator.rank: post}.items())), passed

    def _agree_who_came(self, topic: str, posts: dict[int, Any]) -> dict[int, Any]:
        """Return the posts that count, of all ranks or, if some came too late, fewer.

        A rank that has gone on alone left its post behind. What it holds now may be
        another matter, and it would not come to a collective. So the first rank that
        leaves a meeting decides whether all have come. If the store is gone, another
        rank has ended, and only this rank's own post counts.
        """
        ranks, rank = self._ranks(), self._reducer.communicator.rank
        is_missed = bool(ranks - posts.keys())
        if not is_missed and len({value for value, *_ in posts.values()}) == 1:
            return posts  # equal values need no collective, and prove no mistake
        mine = "some" if is_missed else "all"
        with suppress(RuntimeError):
            store = self._store()
            decided = store.compare_set(f"{topic}/came", "", mine).decode()
            if decided == mine:
                return posts
            if is_missed:
                return dict(sorted(read_json(store, topic, ranks).items()))
        return {rank: posts[rank]}

    def answer(self) -> None:
        """Post a digest of this replica's parameters if a rank asks for it.

        This is called now and then while this rank waits for other ranks. A rank that
        asks in its backward is answered from inside the same one. One that asks after
        its step may also be answered from the forward after that step, but only if this
        rank has made as many steps, because with two optimizers the other one's step
        may still come.
        """
        reducer, ledger = self._reducer, self._reducer.ledger
        step, steps = ledger.finalized, ledger.steps
        reduces = reducer.phase.now in (Phase.REDUCING, Phase.FINALIZING)
        has_stepped = any(each.uses_grads for each in reducer.queue.observers.everybody)
        is_there = reduces or self._at_forward == (step, steps)
        if not is_there or has_stepped or self._is_asking or not self.is_needed:
            return
        with suppress(RuntimeError):  # the store is lost: the wait itself will tell
            if not has_store(reducer.communicator.group):
                return
            store = self._store()
            nothing = ("", None, None)
            asked = read_json(store, "ask", [step]).get(step, nothing)
            topic, after, looks_again = asked
            can_answer = reduces if after is None else after == steps
            if not can_answer or not topic or topic in (self._answered, self._asked):
                return
            self._answered, digest = topic, _digest(reducer.params)
            post_json(store, topic, reducer.communicator.rank, [digest, Kind.ANSWER, 0])
            posts = read_json(store, topic, self._ranks()) if looks_again else {}
            if any(value != digest for value, *_ in posts.values()):
                self.on_difference(*looks_again)

    def _next_topic(self, moment: str) -> str:
        """Return a new name for this comparison, which is equal on all ranks.

        Ranks that meet in a backward may have made different steps and forwards before,
        and those that meet at a step different forwards. So these numbers are no part
        of such a name.
        """
        ledger = self._reducer.ledger
        place = f"{moment}/{ledger.finalized}"
        if moment != "backward":
            place += f"/{ledger.steps}"
        if moment in _IN_FORWARDS:
            place += f"/{ledger.armed}"
        self._place, repeats = place, self._repeats + 1 if place == self._place else 0
        self._repeats = repeats
        return f"{place}/{repeats}"

    def _store(self) -> Store:
        group = self._reducer.communicator.group
        return group_store(group, f"compare/{self._key()}")

    def _forget_before(self, topic: str) -> None:
        """Delete what this rank posted two comparisons ago, which all have read.

        A rank that has posted for the last one had finished the one before.
        """
        self._topics.append(topic)
        if len(self._topics) > 2:
            with suppress(RuntimeError):
                self._store().delete_key(f"{self._topics.pop(0)}/{self._reducer.rank}")


class _Meeting:
    """A wait for all ranks' posts, as the `Work` of a collective."""

    can_time_out = True  # whatever the group's backend is
    is_left_behind = False  # no thread works on it

    def __init__(
        self,
        store: Store,
        topic: str,
        ranks: frozenset[int],
        passed: Question | None,
        patience: float | None,
    ) -> None:
        self._store, self._topic, self._ranks = store, topic, ranks
        self._passed = passed  # who does not come; None: no heartbeat tells
        self._deadline = None if patience is None else world.now() + patience
        self._posts: dict[int, Any] = {}

    def get_future(self) -> torch.futures.Future[Any]:
        """Wait, and return a completed future of the posts."""
        future: torch.futures.Future[Any] = torch.futures.Future()
        future.set_result(self.wait())
        return future

    def is_completed(self) -> bool:
        """Return whether all ranks have posted, or some will not."""
        passed = self._passed
        # First these, then the posts: a rank posts before it goes on.
        gone = {*passed.gone, *passed.reducing} if passed else set()
        stepped = {*passed.stepped} if passed else set()
        missing = set(self._ranks - self._posts.keys())
        try:
            self._posts |= read_json(self._store, self._topic, missing)
        except RuntimeError:  # the store is gone, because the rank that hosts it ended
            return True
        missing -= self._posts.keys()
        is_late = self._deadline is not None and world.now() > self._deadline
        return is_late or bool(missing & gone) or missing <= stepped

    def is_done_within(self, seconds: float) -> bool:
        """Wait up to ``seconds``, and return whether the meeting is over."""
        deadline, pause = world.now() + seconds, FIRST_PAUSE
        while not self.is_completed():
            if world.now() > deadline:
                return False
            world.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE)
        return True

    def wait(self) -> dict[int, Any]:
        """Wait until the meeting is over, and return what came, by rank."""
        while not self.is_done_within(1.0):
            pass
        return dict(sorted(self._posts.items()))


def _digest(tensors: Iterable[torch.Tensor | None]) -> int:
    """Return a checksum of the tensors' values, dtypes and shapes.

    None counts as a value. Zeros of both signs count as equal, and so do all NaNs,
    because a replica that holds the one trains like a replica that holds the other.
    """
    shapes: list[str] = []
    small: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
    plain = []
    for tensor in tensors:
        if tensor is None:
            shapes.append("None")
            continue
        shapes.append(f"{tensor.dtype} {tuple(tensor.shape)} {tensor.layout}")
        value = tensor.detach()
        parts = [] if value.is_meta else [value]
        if value.layout is torch.sparse_coo:
            value = value.coalesce()
            parts = [value.indices(), value.values()]
        for part in parts:
            if part.nbytes >= SMALL_BYTES:
                plain.append(part)
            elif part.numel():  # a thousand of them take 25 ms one by one
                alike = small.setdefault((part.device, part.dtype), [])
                alike.append(part.reshape(-1))
    plain += map(torch.cat, small.values())
    bits = int(digest_of(plain, of_values=True)) if plain else 0
    return (bits * 31 + zlib.crc32(repr(shapes).encode())) % 2**63
