"""Decide which gradients a backward must bring, by one class per mode of the reducer.

==================  =======================  =====================================
mode                a parameter arrives      missing gradients at the end
==================  =======================  =====================================
EveryParameter      once                     stay pending for another backward
FindUnused          at most once             contribute their ``.grad``, or zeros
StaticGraph         as often as in the       first backward: as FindUnused;
                    first backward           later: stay pending
==================  =======================  =====================================

The reducer asks, a mode answers, and the reducer acts. A mode knows no reducer. It is
told what arrived and what a forward could reach, and remembers what earlier backwards
have shown. What the default mode does not need is in attributes (`absent`,
`fills_in_missing`), so that it costs no call there.

"Missing" are gradients that have not come when the backward ends. "Absent" are those
whose absence this rank predicts when the backward begins.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from enum import Enum, auto
from typing import NamedTuple

from torch.autograd.graph import Node
from torch.profiler import record_function

from minidp.config import ReducerConfig, hint_from_outside
from minidp.errors import (
    GraphChangedError,
    MarkedTwiceError,
    MiniDPError,
    explain,
)

from .autograd import unreachable
from .entries import Entry, GradState


class Arrival(NamedTuple):
    """What a mode is told of a gradient that no hook may record by itself."""

    i: int  # index of the parameter
    entry: Entry  # what is recorded of it so far
    was_missing: bool = False  # it was filled in, as missing
    bucket_is_open: bool = False  # its bucket is not flattened yet
    is_skipped: bool = False  # no rank launches its bucket in this backward


class Decision(Enum):
    """What the reducer shall do with an arrival."""

    RECORD = auto()
    COUNT = auto()  # it only counts: a later arrival is recorded
    COUNT_TO_LAST = auto()  # the same, and the next arrival is the one to record
    NOTE = auto()  # it only counts: its gradient is filled in at the end
    REFUSE = auto()  # it comes a second time (`Mode.twice`)
    UNREACHED = auto()  # no rank's forward was to reach it


class Mode:
    """The base class of modes, in which each parameter brings one gradient."""

    fills_in_missing = False  # at the end of the backward, so that all buckets launch
    orders_buckets = True  # buckets may be rebuilt in this backward's ready order
    shares_used_map = False  # ranks exchange which parameters they used
    map_goes_first = False  # the exchange starts before the buckets (torch's order)
    shares_reach = False  # ranks exchange what a forward's backward can reach
    counts_arrivals = False  # a parameter may arrive several times
    # Whether to finalize as soon as missing gradients are filled in, before the other
    # final callbacks of the engine. Torch does so. If a second wrapper holds the same
    # parameters, the second one then finishes last, and its averages stay in ``.grad``.
    finishes_at_once = False
    # Whether callers get copies of a module's outputs. Torch makes them where it sends
    # the backward through a node of its own, and scripts may have come to need them.
    copies_outputs = False
    is_steady = True  # every backward so far missed the same parameters
    kept: Collection[int] = ()  # parameters whose ``.grad`` is never written
    absent: Sequence[int] = ()  # parameters that this rank predicts to be missing
    cause_of_missing = "your module has parameters that were not used in producing loss"

    def __init__(self, num_params: int) -> None:
        self._num_params = num_params

    @property
    def remedy_for_missing(self) -> str:
        """The advice of the error for missing gradients, in torch's words."""
        return (
            "enable unused parameter detection by passing the keyword argument "
            "`find_unused_parameters=True`"
            f"{hint_from_outside(find_unused_parameters=True)}, and make sure that all "
            "`forward` function outputs participate in calculating loss"
        )

    def saw_outputs(self, output: object, nodes: Sequence[Node]) -> None:
        """Predict which parameters the next backward will not reach, and set `absent`.

        It is called at the end of a synchronising forward. The base class predicts that
        all will come.

        Args:
            output: What the forward has returned, with the graph of its tensors.
            nodes: The AccumulateGrad node of each parameter, by index.
        """

    def first_entries(self) -> dict[int, GradState]:
        """Return, by index, the entries that begin a backward other than the usual one.

        It is asked only if the mode `counts_arrivals`.
        """
        return {}

    def decide(self, arrival: Arrival) -> Decision:
        """Decide what to do with a gradient that arrives.

        The base class records the first one of a parameter, and refuses a second. An
        entry that is UNSET is recorded by the hook, and nobody is asked.
        """
        is_first = arrival.entry is GradState.VIA_REDUCER
        return Decision.RECORD if is_first else Decision.REFUSE

    def reached(self, used_locally: Collection[int]) -> Collection[int]:
        """Return which parameters may contribute to the coming reduction on this rank.

        Args:
            used_locally: Those whose gradients local backwards have brought since the
                last reduction. They travel, too, even if the backward does not reach
                them.
        """
        return {*range(self._num_params)} - ({*self.absent} - {*used_locally})

    def ended(self, filled: Sequence[int], untouched: Collection[int]) -> None:
        """Learn, when a backward is over, what was filled in and what no rank used.

        The base class has nothing to learn.

        Args:
            filled: The parameters that this rank filled in, in ascending order.
            untouched: The parameters whose ``.grad`` was left alone on all ranks.
        """

    def shadowed(self, untouched: Collection[int]) -> None:
        """Learn what no rank used, in a backward in which only the others had inputs.

        This rank has sent zeros (`join`). The base class has nothing to learn.
        """

    def reset(self) -> None:
        """Forget what earlier backwards have shown, which here is nothing."""

    def twice(self, rank: int, name: str) -> MiniDPError:
        """Return the error for a gradient of ``name`` that arrives a second time."""
        return MarkedTwiceError(
            explain(
                rank,
                "Expected to mark a variable ready only once, but a gradient arrived "
                "a second time in one reduction.",
                names=[name],
                remedy="the parameter takes part in several backward calls of one "
                "forward, or in several reentrant checkpoints: use "
                "checkpoint(..., use_reentrant=False) or "
                f"static_graph=True{hint_from_outside(static_graph=True)}, or keep all "
                "but the last backward local with no_sync(); call reset() on all ranks "
                "to go on",
            )
        )


class EveryParameter(Mode):
    """The default mode: every parameter must bring one gradient.

    If a backward ends without some of them, the reducer pauses until another one brings
    these.
    """


class FindUnused(Mode):
    """The mode of ``find_unused_parameters``: gradients may be missing.

    In the place of a missing gradient the present ``.grad`` travels, or zeros.

    Torch walks the graph in every forward, to launch the buckets of unused parameters
    early. Here a forward searches only for the parameters that were missing in the last
    backward. With ``skip_all_reduce_unused_params`` every forward walks its graph, and
    the ranks exchange the result, because a bucket that no rank reaches is skipped.
    """

    fills_in_missing = shares_used_map = copies_outputs = True
    orders_buckets = False

    def __init__(self, num_params: int, *, shares_reach: bool = False) -> None:
        super().__init__(num_params)
        self.shares_reach = shares_reach
        self._missing_last: Sequence[int] | None = None
        self._has_searched = False  # a forward has, since the last backward

    def saw_outputs(self, output: object, nodes: Sequence[Node]) -> None:
        """Search the graph for the parameters that were missing in the last backward.

        With `shares_reach` it searches for all. Several forwards may precede one
        backward, so `absent` are those that none of them has reached.
        """
        among = range(self._num_params) if self.shares_reach else self._missing_last
        with record_function("minidp::search_unused_parameters"):
            absent = unreachable(output, nodes, among) if among else set()
        if self._has_searched:
            absent.intersection_update(self.absent)
        self.absent, self._has_searched = sorted(absent), True

    def decide(self, arrival: Arrival) -> Decision:
        """Record a first gradient, even if the parameter was predicted to be absent.

        The prediction can be corrected until the bucket is flattened. If the ranks have
        agreed to skip the bucket, it cannot (UNREACHED).
        """
        if arrival.was_missing and arrival.is_skipped:
            return Decision.UNREACHED
        if arrival.was_missing and arrival.bucket_is_open:
            return Decision.RECORD
        return super().decide(arrival)

    def ended(self, filled: Sequence[int], untouched: Collection[int]) -> None:
        """Remember what was missing, for the next search, and clear `absent`."""
        is_first = self._missing_last is None
        self.is_steady &= is_first or set(filled) == set(self._missing_last or ())
        self._missing_last = filled
        self.shadowed(untouched)

    def shadowed(self, untouched: Collection[int]) -> None:
        """Clear `absent`."""
        self.absent, self._has_searched = (), False

    def reset(self) -> None:
        """Forget missing and absent parameters, as before the first backward."""
        self._missing_last, self.is_steady = None, True
        self.absent, self._has_searched = (), False


_SAME_PARAMETERS = "use static_graph only if every iteration uses the same parameters"


class StaticGraph(Mode):
    """The mode of ``static_graph``: every backward brings what the first one brought.

    A parameter may arrive several times in one backward, as in reentrant checkpoints,
    and only its last arrival completes the gradient. So the first backward just counts
    arrivals. It records no gradient: all are filled in at its end with their ``.grad``,
    and no communication is hidden. Each later backward records the arrival that is the
    last one by these counts.
    """

    map_goes_first = counts_arrivals = True
    cause_of_missing = (
        "your training graph has changed in this iteration, e.g., one parameter is "
        "used in first iteration, but then got unused in the second iteration. this is "
        "not compatible with static_graph set to True"
    )

    def __init__(self, num_params: int) -> None:
        super().__init__(num_params)
        self._counts = [0] * num_params
        self._repeated: dict[int, int] = {}  # expected arrivals, where more than one
        self._left: dict[int, int] = {}  # those of `_repeated` still to come
        self._is_first = True  # this backward
        self.reset()

    @property
    def remedy_for_missing(self) -> str:
        """The advice of the error for missing gradients."""
        return _SAME_PARAMETERS + hint_from_outside(static_graph=False)

    def reset(self) -> None:
        """Count again in the next backward, as in the first one."""
        self.kept = self.absent = ()
        self._is_first = self.fills_in_missing = self.shares_used_map = True
        self.finishes_at_once = self.copies_outputs = True
        self.orders_buckets = False

    def first_entries(self) -> dict[int, GradState]:
        """Begin to count, and return COUNTED where arrivals are to be counted.

        In the first backward that is everywhere, in later ones where several are to
        come.
        """
        if self._is_first:
            self._counts = [0] * self._num_params
            return dict.fromkeys(range(self._num_params), GradState.COUNTED)
        self._left = dict(self._repeated)
        return dict.fromkeys(self._left, GradState.COUNTED)

    def decide(self, arrival: Arrival) -> Decision:
        """Record the last arrival that the counts predict, and count those before it.

        The first backward notes every arrival. What it has not brought is refused in
        later ones.
        """
        if arrival.entry is not GradState.COUNTED:
            return super().decide(arrival)
        if self._is_first:
            self._counts[arrival.i] += 1
            return Decision.NOTE
        self._left[arrival.i] -= 1
        is_next_last = self._left[arrival.i] == 1
        return Decision.COUNT_TO_LAST if is_next_last else Decision.COUNT

    def ended(self, filled: Sequence[int], untouched: Collection[int]) -> None:
        """Stop counting after the first backward.

        From then on the parameters without any arrival are `absent`.
        """
        self.shadowed(untouched)
        if self._is_first:
            self.absent = [i for i, n in enumerate(self._counts) if not n]
            self._repeated = {i: n for i, n in enumerate(self._counts) if n > 1}
        self._is_first = self.fills_in_missing = False
        self.finishes_at_once = self.copies_outputs = False

    def shadowed(self, untouched: Collection[int]) -> None:
        """Keep what no rank used in the first backward out of all later ones.

        If this rank had no inputs in it, its own first backward is still to come, and
        will count.
        """
        if self._is_first:
            self.shares_used_map, self.orders_buckets = False, True
            self.kept = frozenset(untouched)

    def twice(self, rank: int, name: str) -> MiniDPError:
        """Return the error for a gradient that the first backward has not brought."""
        return GraphChangedError(
            explain(
                rank,
                "Your training graph has changed in this iteration: a gradient arrived "
                "more often than in the first backward of static_graph=True, or only "
                "now.",
                names=[name],
                remedy=f"{_SAME_PARAMETERS} equally often"
                f"{hint_from_outside(static_graph=False)}; call reset() on all ranks "
                "to go on",
            )
        )


def mode_for(num_params: int, config: ReducerConfig) -> Mode:
    """Return a new mode for these options.

    With both ``static_graph`` and ``find_unused_parameters`` it is that of the former.
    """
    if config.static_graph:
        return StaticGraph(num_params)
    if config.find_unused_parameters:
        skips = config.skip_all_reduce_unused_params
        return FindUnused(num_params, shares_reach=skips)
    return EveryParameter(num_params)
