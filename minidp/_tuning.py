"""Which layouts ``bucket_cap_mb="auto"`` tries, and which one stays: arithmetic only.

    trial    layout                                           why
    0        torch's                                          the one to beat
    1        buckets of 1/32 of all bytes                     what does a message cost?
    2        the best one of the model (`_schedule`)
    3        the best one for gradients that come late        2 may be too tight
    4        torch's again                                    drift
    5 to 7   of the two best others the less known one        a few backwards are chance
    stays    the best, or torch's

A model is a guess, so nothing is adopted that was not tried, and torch's layout stays
unless another one was clearly faster.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median

from ._layout import Layout, ParamSpec, build_layout, delayed
from ._schedule import Backward, Network, best_groups, capped_groups, fit_network, play

NUM_TRIALS = 8
FINALS = 5  # the first trial of layouts that were tried before, torch's aside
SMALL_SHARE = 32  # trial 1 makes about so many buckets
LATE_SHARE = 12  # trial 3 makes at least so many, large parameters aside
# Of the time with torch's layout, and beyond the noise of both. An equal one that is
# adopted by chance costs nothing; a better one that is missed costs its gain each time.
CLEARLY = 0.98


@dataclass(frozen=True)
class Sample:
    """What one synchronised backward took; seconds since it began."""

    ready_s: tuple[float | None, ...]  # by parameter index; empty: not taken
    computed_s: float  # every gradient is there
    reduced_s: float  # ... and every average
    messages: tuple[tuple[int, float], ...]  # bytes and seconds on the wire

    @property
    def exposed_s(self) -> float:
        """Communication (and copies) after the computation."""
        return self.reduced_s - self.computed_s


@dataclass(frozen=True)
class Trial:
    """One layout, and the backwards that used it."""

    layout: Layout
    samples: tuple[Sample, ...]
    predicted_s: float | None = None  # exposed; None: no model was asked

    @property
    def seconds(self) -> float:
        """Median of the whole backward."""
        return median(sample.reduced_s for sample in self._judged())

    @property
    def exposed_s(self) -> float:
        """Median of what was not hidden."""
        return median(sample.exposed_s for sample in self._judged())

    def num_judged(self) -> int:
        """How many backwards `seconds` is the median of."""
        return len(self._judged())

    @property
    def noise_s(self) -> float:
        """Standard error of `seconds`, from the quartiles (as if they were normal)."""
        times = [sample.reduced_s for sample in self._judged()]
        spread = _quantile(times, 0.75) - _quantile(times, 0.25)
        return 0.93 * spread / math.sqrt(len(times))

    def is_clearly_faster(self, other: Trial) -> bool:
        """Hardly by chance."""
        noise = math.hypot(self.noise_s, other.noise_s)
        return self.seconds < min(CLEARLY * other.seconds, other.seconds - noise)

    def _judged(self) -> Sequence[Sample]:
        """To time each gradient takes time itself: only the others are compared."""
        return [s for s in self.samples if not s.ready_s] or self.samples


@dataclass(frozen=True)
class Choice:
    """What stays."""

    best: Trial
    torchs: Trial

    @property
    def is_another(self) -> bool:
        """Whether it is not torch's."""
        return self.best.layout != self.torchs.layout

    def __str__(self) -> str:
        """One line for the log."""
        best, torchs, guess = self.best, self.torchs, ""
        if best.predicted_s is not None:
            guess = f" (predicted: {1e3 * best.predicted_s:.1f} ms)"
        if not self.is_another:
            return (
                f"torch's layout stays ({_sizes(best.layout)}): none of those tried "
                f"was clearly faster than its {1e3 * torchs.seconds:.1f} ms per "
                f"backward, of which {1e3 * torchs.exposed_s:.1f} ms{guess} are "
                "exposed communication"
            )
        return (
            f"{_sizes(best.layout)} instead of {_sizes(torchs.layout)}: backward "
            f"{1e3 * best.seconds:.1f} ms instead of {1e3 * torchs.seconds:.1f} ms, "
            f"exposed communication {1e3 * best.exposed_s:.1f} ms{guess} instead of "
            f"{1e3 * torchs.exposed_s:.1f} ms"
        )


class Search:
    """Proposes layouts, hears what they took, and chooses.

    Args:
        specs: managed parameters, in parameter-index order.
        torchs: the layout that torch's DDP would have.
    """

    def __init__(self, specs: Sequence[ParamSpec], torchs: Layout) -> None:
        self._specs = specs
        self._torchs = torchs
        self._predicted: dict[Layout, float] = {}
        self._samples: dict[Layout, list[Sample]] = {torchs: []}  # in order of trial

    def add(self, layout: Layout, samples: Sequence[Sample]) -> None:
        """What the backwards with a layout took."""
        self._samples.setdefault(layout, []).extend(samples)

    def proposal(self, trial: int) -> Layout:
        """The layout of a trial, ``NUM_TRIALS`` for the one that stays."""
        if trial in (0, 4) or not self._samples[self._torchs]:
            return self._torchs
        if trial >= NUM_TRIALS:
            return self.choice().best.layout
        if trial >= FINALS:
            others = [t for t in self._trials() if t.layout != self._torchs]
            two = sorted(others, key=lambda trial: trial.seconds)[:2]
            return min(two, key=Trial.num_judged).layout if two else self._torchs
        backward = self._backward(late=trial == 3)
        if backward is None:
            return self._torchs
        total = sum(backward.seen.nbytes)
        if trial == 1:
            limit = max(total // SMALL_SHARE, 1)
            return self._to_layout(backward, capped_groups(backward.seen, [limit]))
        network = self._network()
        room = total // LATE_SHARE if trial == 3 else None
        groups = best_groups(backward.seen, network, max_bytes=room)
        layout = self._to_layout(backward, groups)
        expected = self._backward(late=False)
        assert expected is not None
        self._predicted.setdefault(layout, _predict(expected, layout, network))
        return layout

    def choice(self) -> Choice:
        """Torch's layout, unless another one was clearly faster."""
        trials = self._trials()
        torchs = next(trial for trial in trials if trial.layout == self._torchs)
        best = min(trials, key=lambda trial: trial.seconds)
        if not best.is_clearly_faster(torchs):
            best = torchs
        return Choice(replace(best, predicted_s=self._prediction(best.layout)), torchs)

    def _prediction(self, layout: Layout) -> float | None:
        """Exposed seconds by the model; where none was asked before, by that of now."""
        backward = self._backward(late=False)
        if layout in self._predicted or backward is None:
            return self._predicted.get(layout)
        try:
            return _predict(backward, layout, self._network())
        except ValueError:  # too few messages of too few sizes
            return None

    def _trials(self) -> list[Trial]:
        return [
            Trial(layout, tuple(samples), self._predicted.get(layout))
            for layout, samples in self._samples.items()
            if samples
        ]

    def _network(self) -> Network:
        samples = [s for taken in self._samples.values() for s in taken]
        return fit_network([m for sample in samples for m in sample.messages])

    def _backward(self, *, late: bool) -> _Ordered | None:
        """When gradients become ready; None if nobody knows."""
        samples = [s for taken in self._samples.values() for s in taken if s.ready_s]
        if not samples:
            return None
        share = 0.8 if late else 0.5
        end_s = _quantile([sample.computed_s for sample in samples], share)
        times: dict[int, float | None] = {}
        for i, spec in enumerate(self._specs):
            if not spec.delayed:
                taken = [t for s in samples if (t := s.ready_s[i]) is not None]
                times[i] = min(_quantile(taken, share), end_s) if taken else None
        return _Ordered.of(self._specs, times, end_s)

    def _to_layout(self, backward: _Ordered, groups: Sequence[Sequence[int]]) -> Layout:
        assignment = [[backward.order[k] for k in group] for group in groups]
        return build_layout(self._specs, assignment + delayed(self._specs))


@dataclass(frozen=True)
class _Ordered:
    """A backward, and which parameter stands at each of its positions."""

    order: tuple[int, ...]  # parameter indices
    seen: Backward

    @classmethod
    def of(
        cls, specs: Sequence[ParamSpec], times: dict[int, float | None], end_s: float
    ) -> _Ordered:
        """From ready times by parameter index; what never came travels at the end."""
        never = {i for i, time in times.items() if time is None}
        ready_s = {i: end_s if time is None else time for i, time in times.items()}
        order = tuple(sorted(times, key=lambda i: (i in never, ready_s[i], -i)))
        # A sparse gradient travels alone, so each is of a kind of its own.
        kinds = [
            (specs[i].dtype, specs[i].device, i if specs[i].sparse else -1)
            for i in order
        ]
        numbers = {kind: n for n, kind in enumerate(dict.fromkeys(kinds))}
        return cls(
            order,
            Backward(
                tuple(max(0.0, ready_s[i]) for i in order),
                tuple(specs[i].nbytes for i in order),
                max(0.0, end_s),
                tuple(numbers[kind] for kind in kinds),
            ),
        )


def _predict(backward: _Ordered, layout: Layout, network: Network) -> float:
    """Exposed seconds of a layout, without delayed parameters."""
    position = {i: k for k, i in enumerate(backward.order)}
    groups = [
        [position[i] for i in members]
        for members in layout.assignment
        if members[0] in position
    ]
    return play(backward.seen, groups, network).exposed_s


def _quantile(values: Sequence[float], share: float) -> float:
    """By rank: the result is one of the values."""
    return sorted(values)[min(int(share * len(values)), len(values) - 1)]


def _sizes(layout: Layout) -> str:
    sizes = sorted(bucket.nbytes for bucket in layout.buckets)
    least, most = _size(sizes[0]), _size(sizes[-1])
    if len(sizes) == 1:
        return f"1 bucket of {least}"
    if least == most:
        return f"{len(sizes)} buckets of {least} each"
    if least.split()[1] == most.split()[1]:
        least = least.split()[0]
    return f"{len(sizes)} buckets of {least} to {most}"


def _size(nbytes: int) -> str:
    """In the largest unit of which there is one: 0.001 MiB would say little."""
    if nbytes < 2**10:
        return f"{nbytes} bytes"
    unit, name = (2**20, "MiB") if nbytes >= 2**20 else (2**10, "KiB")
    number = nbytes / unit
    return f"{number:.3g} {name}" if number < 999.5 else f"{number:.0f} {name}"
