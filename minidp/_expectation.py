"""Which gradients a backward must bring: one class per mode of the reducer.

==================  =======================  =====================================
mode                a parameter arrives      what is missing when a backward ends
==================  =======================  =====================================
EveryParameter      once                     stays pending for another backward
FindUnused          at most once             contributes its ``.grad``, or zeros
StaticGraph         as often as in the       first backward: as FindUnused;
                    first backward           later: stays pending
==================  =======================  =====================================
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from torch.autograd.graph import Node
from torch.profiler import record_function

from ._arrivals import Mark
from ._autograd import unreachable
from ._overrides import aside
from .config import ReducerConfig
from .errors import GraphChangedError, MarkedTwiceError, MiniDPError, explain


class EveryParameter:
    """Default: every parameter exactly once per reduction."""

    may_guess_wrong = False  # absent() is a guess, not a promise of the user
    completes_at_end = False  # what is missing is filled in when the backward ends
    shares_used_map = False  # ranks tell each other which parameters they used
    map_goes_first = False  # ... before the buckets (torch's order, static graph)
    shares_reach = False  # ... and after a forward which the backward can reach
    keeps_ready_order = True  # this backward's order is the order to rebuild by
    is_steady = True  # the same parameters were missing in every backward so far
    cause_of_missing = "your module has parameters that were not used in producing loss"
    kept: Collection[int] = ()  # parameters whose ``.grad`` is never written

    def __init__(self, num_params: int) -> None:
        self._num_params = num_params

    @property
    def remedy_for_missing(self) -> str:
        """What to do about gradients that did not come, with torch's words."""
        return (
            "enable unused parameter detection by passing the keyword argument "
            f"`find_unused_parameters=True`{aside(find_unused_parameters=True)}, and "
            "make sure that all `forward` function outputs participate in calculating "
            "loss"
        )

    def saw_outputs(self, output: object, nodes: Sequence[Node]) -> None:
        """A synchronising forward returned ``output``."""

    def marks(self, everyday: Mark) -> list[Mark]:
        """One mark per parameter for the start of a backward."""
        return [everyday] * self._num_params

    def absent(self) -> Sequence[int]:
        """Parameters to count as missing from the first hook on."""
        return ()

    def count(self, i: int) -> None:
        """A hook fired on a COUNTING entry."""

    def is_last_but_one(self, i: int) -> bool:
        """A hook fired on a REPEATS entry: does just one more have to come?"""
        return True

    def ended(self, missing: Sequence[int], unused: Collection[int]) -> None:
        """A reduction is finished.

        Args:
            missing: parameters that did not arrive on this rank.
            unused: parameters that no rank used.
        """

    def shadowed(self, missing: Sequence[int], unused: Collection[int]) -> None:
        """Other ranks had a backward, this one contributed zeros."""
        self.ended(missing, unused)

    def forget(self) -> None:
        """After `reset`: what earlier backwards showed holds no more."""

    def twice(self, rank: int, name: str) -> MiniDPError:
        """The error for a gradient that arrives once too often."""
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


class FindUnused(EveryParameter):
    """``find_unused_parameters=True``.

    Torch walks the graph in every forward, to launch early the buckets of parameters
    that will not arrive. Here nothing is walked as long as everything arrives; only
    after a backward with missing parameters the next forwards look whether *those* are
    out of reach again. With ``skip_all_reduce_unused_params`` every forward is
    searched, and ranks tell each other: a bucket that nobody reaches does not travel.
    """

    may_guess_wrong = True
    completes_at_end = True
    shares_used_map = True
    keeps_ready_order = False

    def __init__(self, num_params: int, *, shares_reach: bool = False) -> None:
        super().__init__(num_params)
        self.shares_reach = shares_reach
        self._missing_last: Sequence[int] | None = None
        self._absent: set[int] | None = None  # None: no forward since the last one

    def saw_outputs(self, output: object, nodes: Sequence[Node]) -> None:
        """Predict what will be missing, if anything was last time."""
        last = self._missing_last
        among = range(self._num_params) if self.shares_reach else last
        with record_function("minidp::search_unused_parameters"):
            absent = unreachable(output, nodes, among) if among else set()
        # The backward may be that of an earlier forward, or of several.
        self._absent = absent if self._absent is None else self._absent & absent

    def absent(self) -> Sequence[int]:
        """Out of reach this time (and missing last time)."""
        return sorted(self._absent or ())

    def ended(self, missing: Sequence[int], unused: Collection[int]) -> None:
        """Remember what was missing."""
        is_first = self._missing_last is None
        self.is_steady &= is_first or set(missing) == set(self._missing_last or ())
        self._missing_last = missing
        self._absent = None

    def forget(self) -> None:
        """Predict nothing."""
        self._missing_last = self._absent = None


class StaticGraph(EveryParameter):
    """``static_graph=True``: the first backward counts, later ones follow."""

    cause_of_missing = (
        "your training graph has changed in this iteration, e.g., one parameter is "
        "used in first iteration, but then got unused in the second iteration. this is "
        "not compatible with static_graph set to True"
    )

    @property
    def remedy_for_missing(self) -> str:
        """What to do about gradients that did not come."""
        words = "use static_graph only if every iteration uses the same parameters"
        return words + aside(static_graph=False)

    def __init__(self, num_params: int) -> None:
        super().__init__(num_params)
        self._counts = [0] * num_params
        self._left: list[int] = []
        self._begin_counting()

    def _begin_counting(self) -> None:
        self.counting = True
        self.completes_at_end = True
        self.shares_used_map = True
        self.map_goes_first = True
        self.keeps_ready_order = False

    def shadowed(self, missing: Sequence[int], unused: Collection[int]) -> None:
        """Unused parameters are known now; the counts are not, on this rank."""
        was_counting = self.counting
        self.ended(missing, unused)
        self.counting = self.completes_at_end = was_counting

    def marks(self, everyday: Mark) -> list[Mark]:
        """Everything is counted first; later only repeats are special."""
        if self.counting:
            self._counts = [0] * self._num_params
            return [Mark.COUNTING] * self._num_params
        self._left = list(self._counts)
        return [Mark.REPEATS if n > 1 else everyday for n in self._counts]

    def absent(self) -> Sequence[int]:
        """What the first backward did not use."""
        if self.counting:
            return ()
        return [i for i, n in enumerate(self._counts) if n == 0]

    def count(self, i: int) -> None:
        """Count one arrival."""
        self._counts[i] += 1

    def is_last_but_one(self, i: int) -> bool:
        """Count down one arrival."""
        self._left[i] -= 1
        return self._left[i] == 1

    def ended(self, missing: Sequence[int], unused: Collection[int]) -> None:
        """The first reduction fixes counts and unused parameters for good."""
        if self.counting:
            self.counting = False
            self.completes_at_end = False
            self.shares_used_map = False
            self.map_goes_first = False
            self.keeps_ready_order = True
            self.kept = frozenset(unused)

    def forget(self) -> None:
        """Count anew in the next backward: ranks may have counted different ones."""
        self.kept = ()
        self._begin_counting()

    def twice(self, rank: int, name: str) -> MiniDPError:
        """The graph is not the first one."""
        return GraphChangedError(
            explain(
                rank,
                "Your training graph has changed in this iteration: a gradient arrived "
                "more often than in the first backward of static_graph=True, or only "
                "now.",
                names=[name],
                remedy="use static_graph only if every iteration uses the same "
                f"parameters equally often{aside(static_graph=False)}; call reset() on "
                "all ranks to go on",
            )
        )


def expectation_for(num_params: int, config: ReducerConfig) -> EveryParameter:
    """The mode that the options ask for; static graph wins."""
    if config.static_graph:
        return StaticGraph(num_params)
    if config.find_unused_parameters:
        skips = config.skip_all_reduce_unused_params
        return FindUnused(num_params, shares_reach=skips)
    return EveryParameter(num_params)
