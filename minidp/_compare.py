"""Two runs of one script: are the final weights equal, and which was faster?"""

from __future__ import annotations

import ctypes
import random
import statistics
import time
import weakref
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

WARM_UP = 5  # steps: buckets are rebuilt, memory is allocated


def seed(rank: int) -> None:
    """Both runs draw the same numbers, also if the script sets no seeds."""
    torch.manual_seed(rank)
    random.seed(rank)
    numpy.random.seed(rank)


@dataclass(frozen=True)
class Outcome:
    """What a run left behind, on one rank."""

    weights: Mapping[str, torch.Tensor]  # parameters and module buffers, by model
    num_models: int
    step_s: tuple[float, ...]  # from one optimizer step to the next
    num_steps: int = 0  # of that optimizer

    def save(self, path: Path) -> None:
        """Write it to a file, which is there once it is complete."""
        partial = path.with_suffix(".partial")
        torch.save(asdict(self), partial)
        partial.replace(path)

    @staticmethod
    def load(path: Path) -> Outcome:
        """Read what `save` wrote."""
        return Outcome(**torch.load(path, weights_only=True))

    @property
    def steady_s(self) -> tuple[float, ...]:
        """Steps without the first ones, if there are others."""
        return self.step_s[WARM_UP:] or self.step_s


class Observer:
    """Keeps the models that a script wraps, and the times of its optimizer steps."""

    def __init__(self, progress: Path | None = None) -> None:
        self._modules: list[nn.Module] = []
        # A file that grows with each step.
        self._progress = None if progress is None else progress.open("ab", buffering=0)
        self._first: Optimizer | None = None  # the one whose steps are timed
        self._ends: list[float] = []
        self._handle = register_optimizer_step_post_hook(self._stepped)

    def wrapped(self, ddp: Any) -> None:
        """A model was wrapped; it is kept to the end, also if the script drops it."""
        self._modules.append(ddp.module)
        self._note_progress()

    def _note_progress(self) -> None:
        if self._progress is not None:
            self._progress.write(b".")

    def _stepped(self, optimizer: Optimizer, *_arguments: Any) -> None:
        self._note_progress()
        self._first = self._first or optimizer
        if optimizer is self._first:
            self._ends.append(time.perf_counter())

    def outcome(self) -> Outcome:
        """What there is now; nothing is watched any more."""
        self._handle.remove()
        if self._progress is not None:
            self._progress.close()
            self._progress = None
        weights = {
            f"{number}: {name}": tensor.detach().cpu().clone()
            for number, module in enumerate(self._modules)
            for name, tensor in (*module.named_parameters(), *module.named_buffers())
        }
        between = zip(self._ends, self._ends[1:], strict=False)
        return Outcome(
            weights,
            len(self._modules),
            tuple(end - begin for begin, end in between),
            len(self._ends),
        )


def never_take_down(ddp: Any) -> None:
    """Keep what torch's DDP consists of, when the script lets go of it and at exit.

    The destructors of torch's reducer and group may wait for a thread that waits for
    them: for ever, where a script drops its model after the group.
    """
    reducer = getattr(ddp, "reducer", None)
    if reducer is None:
        return
    for part in (reducer, ddp.logger, ddp.process_group):
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(part))
    # The same module may be wrapped again.
    weakref.finalize(ddp, reducer._remove_autograd_hooks).atexit = False


@dataclass(frozen=True)
class Verdict:
    """How two runs differ."""

    is_same: bool
    text: str  # lines for a person


def compare(torchs: Outcome, ours: Outcome, advice: str = "") -> Verdict:
    """Compare a run on torch's DDP with the same run on ours.

    Args:
        torchs: the first run.
        ours: the second one.
        advice: what to do if only one of them went on from a checkpoint.
    """
    if torchs.weights.keys() != ours.weights.keys():
        odd = sorted(torchs.weights.keys() ^ ours.weights.keys())
        text = (
            f"  weights   differ: {torchs.num_models} models on torch, "
            f"{ours.num_models} on minidp; only one of the runs has {_few(odd)}"
        )
        return Verdict(is_same=False, text=f"{text}\n{_speed(torchs, ours)}")
    pairs = {name: (torchs.weights[name], ours.weights[name]) for name in ours.weights}
    changed = {name: pair for name, pair in pairs.items() if not _same_bits(*pair)}
    num_values = sum(tensor.numel() for tensor in ours.weights.values())
    s = "" if ours.num_models == 1 else "s"
    what = f"{ours.num_models} model{s}, {len(pairs)} tensors, {num_values:,} values"
    if not changed:
        text = f"  weights   identical, bit for bit ({what})"
    else:
        gaps = {name: _gap(*pair) for name, pair in changed.items()}
        worst = max(gaps, key=lambda name: gaps[name])
        text = (
            f"  weights   differ in {len(changed)} of {len(pairs)} tensors ({what}): "
            f"by {gaps[worst]:.3g} at most, in {worst}\n"
            "            Does the script repeat itself on torch (seeds, threads)? If "
            "so, see 'Differences from torch' in minidp's README."
        )
    if ours.num_steps != torchs.num_steps:
        text = (
            f"  steps     differ: {torchs.num_steps} on torch, {ours.num_steps} on "
            f"minidp. {advice}\n{text}"
        )
    is_same = not changed and ours.num_steps == torchs.num_steps
    return Verdict(is_same, text=f"{text}\n{_speed(torchs, ours)}")


def _speed(torchs: Outcome, ours: Outcome) -> str:
    if not torchs.steady_s or not ours.steady_s:
        return "  step      no times: fewer than two optimizer steps"
    before, now = map(statistics.median, (torchs.steady_s, ours.steady_s))
    num_steps = len(ours.steady_s)
    return (
        f"  step      torch {before * 1e3:.2f} ms, minidp {now * 1e3:.2f} ms, ratio "
        f"{now / before:.2f} (medians over {num_steps} step{'s' * (num_steps > 1)}; on "
        "a busy machine they say little)"
    )


def _same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Also of NaN."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    return torch.equal(_bytes(a), _bytes(b))


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.resolve_conj().contiguous().reshape(-1).view(torch.uint8)


def _gap(a: torch.Tensor, b: torch.Tensor) -> float:
    """The largest difference; infinite where one is no number."""
    if a.shape != b.shape:
        return float("inf")
    wide = torch.complex128 if a.is_complex() else torch.float64
    gap = (a.to(wide) - b.to(wide)).abs()
    return float(gap.nan_to_num(nan=float("inf")).max())


def _few(names: list[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more
