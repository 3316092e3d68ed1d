"""Choose the layouts that ``bucket_cap_mb="auto"`` tries, and the one that stays.

A model of the network says which layout is best. But a model is a guess. So only
layouts that were tried can stay, and torch's layout stays unless another one was
clearly faster::

    trial    layout                                            why it is tried
    0        torch's                                           to compare with it
    1        buckets of 1/32 of all bytes                      what a message costs
    2        the best one by the model (`costmodel`)           it may be the fastest
    3        buckets of 1/12 of all bytes                      number 2 may be too tight
    4        torch's again                                     the machine may drift
    5 to 7   of the two best others the less measured one      times have noise
    stays    the fastest, or torch's
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from statistics import median

import numpy as np

from minidp.config import MIB
from minidp.costmodel import (
    Backward,
    Network,
    best_groups,
    capped_groups,
    fit_network,
    in_ready_order,
    messages_of,
    play,
)
from minidp.layout import Layout, ParamSpec, build_layout, delayed
from minidp.overlap import Step

NUM_TRIALS = 8
FINALS = 5  # from this trial on, layouts are tried again
SHARES = {1: 32, 3: 12}  # trials that make about so many buckets of equal size
# A layout must take less than this share of the time with torch's, beyond noise. The
# share is near 1: it costs nothing to adopt a layout that is equal, but to miss a
# better one costs its gain in each step.
CLEARLY = 0.98


@dataclass
class Trial:
    """One layout, with the recorded steps of all trials that used it.

    `Search` keeps one for each layout. The numbers below need at least one step.
    """

    layout: Layout
    steps: list[Step] = field(default_factory=list)
    predicted_s: float | None = None  # the exposed seconds by the model

    @property
    def judged(self) -> Sequence[Step]:
        """The steps to compare: those without timed hooks, or all if each has them."""
        return [step for step in self.steps if not step.ready_ns] or self.steps

    @property
    def seconds(self) -> float:
        """The median seconds from a backward's start until averages are in .grad."""
        return median(step.reduced_s for step in self.judged)

    @property
    def exposed_s(self) -> float:
        """The median seconds from a backward's end until averages are in .grad."""
        return median(step.reduced_s - step.backward.seconds for step in self.judged)

    @property
    def noise_s(self) -> float:
        """The standard error of `seconds`, estimated from the quartiles of steps."""
        times = [step.reduced_s for step in self.judged]
        low, high = np.quantile(times, (0.25, 0.75))
        return 0.93 * float(high - low) / math.sqrt(len(times))

    def messages(self) -> Iterator[tuple[int, float]]:
        """Yield the bytes and seconds of the all-reduces of dense buckets.

        Those that ran at the same time as a sparse one are left out.
        """
        # The bytes of a sparse gradient are not known; 0 says so.
        sizes = [0 if each.sparse else each.nbytes for each in self.layout.buckets]
        for step in self.steps:
            spans = [(sizes[t.number], t.launched_ns, t.done_ns) for t in step.buckets]
            yield from ((nbytes, ns / 1e9) for nbytes, ns in messages_of(spans))

    def is_clearly_faster(self, other: Trial) -> bool:
        """Return whether this layout is faster by more than 2 % and than the noise."""
        noise = math.hypot(self.noise_s, other.noise_s)
        return self.seconds < min(CLEARLY * other.seconds, other.seconds - noise)


@dataclass(frozen=True)
class Choice:
    """The trial of the layout that stays, and that of torch's, perhaps the same."""

    best: Trial
    torchs: Trial

    @property
    def is_another(self) -> bool:
        """Whether a layout other than torch's stays."""
        return self.best.layout != self.torchs.layout

    def __str__(self) -> str:
        """Return a line to log, with sizes and times of the two layouts."""
        best, torchs, guess = self.best, self.torchs, ""
        if not self.is_another:
            return (
                f"torch's layout stays ({_sizes(best.layout)}): no other one that was "
                f"tried is clearly faster. A backward takes {_ms(torchs.seconds)} with "
                f"it, and exposed communication {_ms(torchs.exposed_s)} of that"
            )
        if best.predicted_s is not None:
            guess = f" (predicted: {_ms(best.predicted_s)})"
        return (
            f"{_sizes(best.layout)} instead of {_sizes(torchs.layout)}: backward "
            f"{_ms(best.seconds)} instead of {_ms(torchs.seconds)}, exposed "
            f"communication {_ms(best.exposed_s)}{guess} instead of "
            f"{_ms(torchs.exposed_s)}"
        )


class Search:
    """Propose layouts to try, and choose one by the steps that `add` was given.

    Nothing is measured here. A `Measurement` on rank 0 makes and calls this.
    """

    def __init__(self, specs: Sequence[ParamSpec], torchs: Layout) -> None:
        self._specs = specs
        self._torchs = Trial(torchs)
        self._trials = {torchs: self._torchs}

    def add(self, layout: Layout, steps: Sequence[Step]) -> None:
        """Add steps that used a layout to the trial of that layout."""
        self._trials.setdefault(layout, Trial(layout)).steps.extend(steps)

    def proposal(self, trial: int) -> Layout:
        """Return the layout to try in a trial, by the table at the head of this file.

        It is torch's if nothing was timed from which another one could be derived.

        Raises:
            ValueError: The model cannot be fitted, because messages of fewer than two
                sizes were timed.
        """
        if trial in (0, 4) or not self._torchs.steps:
            return self._torchs.layout
        if trial >= FINALS:
            others = [one for one in self._timed() if one is not self._torchs]
            two = sorted(others, key=lambda one: one.seconds)[:2]
            return min(two or [self._torchs], key=lambda one: len(one.judged)).layout
        backward = self._backward()
        if backward is None:
            return self._torchs.layout
        if trial in SHARES:
            limit = max(1, sum(backward.nbytes) // SHARES[trial])
            groups = capped_groups(backward, [limit])
        else:
            groups = best_groups(backward, self._network())
        assignment = [[backward.order[k] for k in group] for group in groups]
        layout = build_layout(self._specs, assignment + delayed(self._specs))
        one = self._trials.setdefault(layout, Trial(layout))
        if trial > 1 and one.predicted_s is None:
            one.predicted_s = self._prediction(layout)
        return layout

    def choice(self) -> Choice:
        """Choose the fastest layout if it is clearly faster than torch's, else torch's.

        Raises:
            ValueError: No backward with torch's layout was timed.
        """
        if not self._torchs.steps:
            raise ValueError("no backward with torch's layout was timed")
        best = min(self._timed(), key=lambda one: one.seconds)
        if not best.is_clearly_faster(self._torchs):
            best = self._torchs
        if best.predicted_s is None:
            best.predicted_s = self._prediction(best.layout)
        return Choice(best, self._torchs)

    def _timed(self) -> list[Trial]:
        return [one for one in self._trials.values() if one.steps]

    def _prediction(self, layout: Layout) -> float | None:
        """Predict the exposed seconds of a layout, None if too little was timed."""
        backward = self._backward()
        if backward is None:
            return None
        # The backward has no delayed parameters.
        groups = backward.positions(
            m for m in layout.assignment if m[0] in backward.order
        )
        try:
            return play(backward, groups, self._network()).exposed_s
        except ValueError:  # too few messages of too few sizes
            return None

    def _network(self) -> Network:
        trials = self._trials.values()
        return fit_network(message for one in trials for message in one.messages())

    def _backward(self) -> Backward | None:
        """Return a backward with the median times of all steps with timed gradients.

        Delayed parameters are left out. It is None if there is no such step.
        """
        steps = [s for one in self._timed() for s in one.steps if s.ready_ns]
        if not steps:
            return None
        times: dict[int, float | None] = {}
        for i, spec in enumerate(self._specs):
            if not spec.delayed:
                spans = [(s.backward.begin_ns, s.ready_ns[i]) for s in steps]
                taken = [(at - begin) / 1e9 for begin, at in spans if at is not None]
                times[i] = median(taken) if taken else None
        kinds = [((spec.dtype, spec.device), spec.sparse) for spec in self._specs]
        nbytes = [spec.nbytes for spec in self._specs]
        end_s = median(step.backward.seconds for step in steps)
        return in_ready_order(times, nbytes, kinds, end_s)


def _sizes(layout: Layout) -> str:
    sizes = [bucket.nbytes / MIB for bucket in layout.buckets]
    least, most = (f"{size:.4g}" for size in (min(sizes), max(sizes)))
    between = most if least == most else f"{least} to {most}"
    return f"{len(sizes)} bucket{'s' * (len(sizes) != 1)} of {between} MiB"


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.1f} ms"
