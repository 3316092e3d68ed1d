"""Decide which gradients a backward must bring: one class per mode of the reducer.

==================  =======================  =====================================
mode                a parameter arrives      missing gradients at the end
==================  =======================  =====================================
EveryParameter      once                     stay pending for another backward
FindUnused          at most once             contribute their ``.grad``, or zeros
StaticGraph         as often as in the       first backward: as FindUnused;
                    first backward           later: stay pending
==================  =======================  =====================================

The reducer asks, a mode answers, and the reducer acts. A mode knows no reducer: it is
told what arrived and what a forward could reach, and holds what earlier backwards have
shown. What the default does not need is told by attributes (`absent`,
`fills_in_missing`), so that it costs no call.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from enum import Enum, auto
from typing import NamedTuple

from torch.autograd.graph import Node
from torch.profiler import record_function

from minidp.config import ReducerConfig, aside
from minidp.errors import (
    GraphChangedError,
    MarkedTwiceError,
    MiniDPError,
    explain,
)

from .autograd import unreachable
from .entries import Entry, GradState


class Arrival(NamedTuple):
    """Hold what a mode is told of a gradient that no hook may record by itself."""

    i: int  # index of the parameter
    entry: Entry  # what is recorded of it so far
    is_filled: bool = False  # it was filled in, as missing
    is_filling: bool = False  # its bucket is not flattened yet
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
    """Base class of modes: tell the reducer what gradients a backward must bring."""

    fills_in_missing = False  # at the end of the backward, so that all buckets launch
    orders_buckets = True  # buckets may be rebuilt in this backward's ready order
    shares_used_map = False  # ranks exchange which parameters they used
    map_goes_first = False  # the exchange starts before the buckets (torch's order)
    shares_reach = False  # ranks exchange what a forward's backward can reach
    counts_arrivals = False  # a parameter may arrive several times
    # Whether to finalize as soon as missing gradients are filled in, before the other
    # final callbacks of the engine. Torch does so. If another wrapper holds the same
    # parameters, it then finishes last, and its averages stay in ``.grad``.
    finishes_at_once = False
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
            f"`find_unused_parameters=True`{aside(find_unused_parameters=True)}, and "
            "make sure that all `forward` function outputs participate in calculating "
            "loss"
        )

    def saw_outputs(self, output: object, nodes: Sequence[Node]) -> None:
        """Search a synchronising forward's graph for `absent` parameters; here no-op.

        ``nodes``: AccumulateGrad nodes by parameter index.
        """

    def first_marks(self) -> dict[int, GradState]:
        """Return entries, by index, that begin a backward unlike the rest; here {}."""
        return {}

    def decide(self, arrival: Arrival) -> Decision:
        """Decide about a gradient that arrives; here RECORD the first one.

        Not called for entries that are UNSET: their hook records the gradient.
        """
        is_first = arrival.entry is GradState.VIA_REDUCER
        return Decision.RECORD if is_first else Decision.REFUSE

    def reached(self, used_locally: Collection[int]) -> Collection[int]:
        """Return the parameters that this rank's coming backward may bring.

        ``used_locally``: those that backwards have brought since the last reduction.
        """
        return {*range(self._num_params)} - ({*self.absent} - {*used_locally})

    def ended(self, missing: Sequence[int], untouched: Collection[int]) -> None:
        """Learn at the end what was missing, and what no rank used; here no-op."""

    def shadowed(self, untouched: Collection[int]) -> None:
        """Learn what no rank used in a backward of the others; here no-op.

        This rank had no inputs, and sent zeros (`join`).
        """

    def reset(self) -> None:
        """Forget what earlier backwards showed; here no-op."""

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
                f"static_graph=True{aside(static_graph=True)}, or keep all but the "
                "last backward local with no_sync(); call reset() on all ranks to go "
                "on",
            )
        )


class EveryParameter(Mode):
    """Default mode: every parameter must bring one gradient.

    If a backward ends without some, the reducer pauses until another brings them.
    """


class FindUnused(Mode):
    """Mode of ``find_unused_parameters``: ``.grad`` or zeros for missing gradients.

    Torch walks the graph in every forward, to launch unused parameters' buckets early.
    Here a forward searches only for parameters missing in the last backward. With
    ``skip_all_reduce_unused_params`` every forward walks its graph, and ranks exchange
    the result: a bucket that no rank reaches is skipped.
    """

    fills_in_missing = shares_used_map = True
    orders_buckets = False

    def __init__(self, num_params: int, *, shares_reach: bool = False) -> None:
        super().__init__(num_params)
        self.shares_reach = shares_reach
        self._missing_last: Sequence[int] | None = None
        self._has_searched = False  # a forward has, since the last backward

    def saw_outputs(self, output: object, nodes: Sequence[Node]) -> None:
        """Search the graph for parameters that were missing in the last backward.

        With `shares_reach` search for all. Sets `absent`, sorted: those that no forward
        since the last backward reached.
        """
        among = range(self._num_params) if self.shares_reach else self._missing_last
        with record_function("minidp::search_unused_parameters"):
            absent = unreachable(output, nodes, among) if among else set()
        if self._has_searched:
            absent.intersection_update(self.absent)
        self.absent, self._has_searched = sorted(absent), True

    def decide(self, arrival: Arrival) -> Decision:
        """RECORD a first gradient, also of a parameter that was predicted to be absent.

        That is possible until its bucket is flattened, and not if ranks have agreed to
        skip the bucket.
        """
        if arrival.is_filled and arrival.is_skipped:
            return Decision.UNREACHED
        if arrival.is_filled and arrival.is_filling:
            return Decision.RECORD
        return super().decide(arrival)

    def ended(self, missing: Sequence[int], untouched: Collection[int]) -> None:
        """Keep ``missing`` for the next search; clear `absent`."""
        is_first = self._missing_last is None
        self.is_steady &= is_first or set(missing) == set(self._missing_last or ())
        self._missing_last = missing
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
    """Count arrivals in the first backward, then expect the same (``static_graph``).

    The first backward records no gradient: all are filled in at its end with their
    ``.grad``, so that nothing overlaps. Later ones record each parameter's last arrival
    that the counts predict.
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
        return _SAME_PARAMETERS + aside(static_graph=False)

    def reset(self) -> None:
        """Count again in the next backward, as in the first one."""
        self.kept = self.absent = ()
        self._is_first = self.fills_in_missing = self.shares_used_map = True
        self.finishes_at_once = True
        self.orders_buckets = False

    def first_marks(self) -> dict[int, GradState]:
        """Reset counts; return COUNTED for all, later only for repeated arrivals."""
        if self._is_first:
            self._counts = [0] * self._num_params
            return dict.fromkeys(range(self._num_params), GradState.COUNTED)
        self._left = dict(self._repeated)
        return dict.fromkeys(self._left, GradState.COUNTED)

    def decide(self, arrival: Arrival) -> Decision:
        """RECORD the last arrival that the first backward predicts; COUNT others.

        In the first backward NOTE all. REFUSE what was not predicted.
        """
        if arrival.entry is not GradState.COUNTED:
            return super().decide(arrival)
        if self._is_first:
            self._counts[arrival.i] += 1
            return Decision.NOTE
        self._left[arrival.i] -= 1
        is_next_last = self._left[arrival.i] == 1
        return Decision.COUNT_TO_LAST if is_next_last else Decision.COUNT

    def ended(self, missing: Sequence[int], untouched: Collection[int]) -> None:
        """After the first backward stop counting.

        `absent` are from then on the parameters without any arrival.
        """
        self.shadowed(untouched)
        if self._is_first:
            self.absent = [i for i, n in enumerate(self._counts) if not n]
            self._repeated = {i: n for i, n in enumerate(self._counts) if n > 1}
        self._is_first = self.fills_in_missing = self.finishes_at_once = False

    def shadowed(self, untouched: Collection[int]) -> None:
        """After the others' first backward ``untouched`` parameters are `kept`.

        A later backward of this rank will be its first, and counts.
        """
        if self._is_first:
            self.shares_used_map, self.orders_buckets = False, True
            self.kept = frozenset(untouched)

    def twice(self, rank: int, name: str) -> MiniDPError:
        """Return GraphChangedError for a gradient that the first backward lacked."""
        return GraphChangedError(
            explain(
                rank,
                "Your training graph has changed in this iteration: a gradient arrived "
                "more often than in the first backward of static_graph=True, or only "
                "now.",
                names=[name],
                remedy=f"{_SAME_PARAMETERS} equally often{aside(static_graph=False)}; "
                "call reset() on all ranks to go on",
            )
        )


def expectation_for(num_params: int, config: ReducerConfig) -> Mode:
    """Return a new mode object for ``config``; static_graph beats find_unused."""
    if config.static_graph:
        return StaticGraph(num_params)
    if config.find_unused_parameters:
        skips = config.skip_all_reduce_unused_params
        return FindUnused(num_params, shares_reach=skips)
    return EveryParameter(num_params)
