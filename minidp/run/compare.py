"""Run a script on torch's DDP, then on minidp, and compare: ``minidp run --compare``.

One process on this machine starts the ranks of both runs and compares their outcomes.
The upper half of this file is that process: `run_both`. The lower half runs in the
ranks: `begin_phase` and `run_on_torch` record an `Outcome`, and write it to a file.

The run on torch is in a copy of the folder, so that the run on minidp does not find its
checkpoints. A command of the user (``--before``) may delete checkpoints elsewhere: it
runs in the folder before each run, and before the copy is made.
"""

from __future__ import annotations

import argparse
import faulthandler
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

from minidp.comm import group_ranks
from minidp.config import RUN
from minidp.console import say_on_stderr
from minidp.data_parallel import DataParallel
from minidp.swapping import TORCHS

from .children import never_take_down, reached_children, seed
from .copies import moved_environment, working_copy
from .ranks import from_environment, say_once
from .script import Script, after_wrapping

WARM_UP = 5  # the first steps are slower: they rebuild buckets and allocate memory
ENOUGH = WARM_UP + 2  # a step's time is measured from the end of the one before it
EXIT_SECONDS = 60.0  # how long a run on torch may take to exit, with its outcome saved


class _CannotCompareError(Exception):
    """The runs cannot be compared although the script did not fail. It says why."""


def run_both(script: Script, options: argparse.Namespace, flags: Sequence[str]) -> int:
    """Run the script on torch's DDP and on minidp, and compare the results.

    If torchrun has started this, its rank 0 does everything, and the other ranks return
    at once. A handler of SIGTERM is set for good.

    Args:
        script: The script to run twice.
        options: The options of ``minidp run``.
        flags: The options to pass on to the run on minidp, as on a command line.

    Returns:
        An exit status: 0 if the results are equal, 1 if they differ or cannot be
        compared, 130 after Ctrl-C, or that of the run that failed.
    """
    num_ranks = options.num_ranks
    if "RANK" in os.environ:  # torchrun has started this process
        num_ranks = from_environment("WORLD_SIZE", 1)
        if from_environment("RANK", 0):
            return 0
    # When a rank fails, torchrun sends SIGTERM to the others. As an exception it lets
    # the temporary folder be deleted.
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    with tempfile.TemporaryDirectory(prefix="minidp-compare-") as made:
        try:
            return _Comparison(options, Path(made), num_ranks).run(script, flags)
        except _CannotCompareError as why:
            say_on_stderr(f"minidp run: {why}")
            return 1
        except KeyboardInterrupt:
            return 128 + signal.SIGINT


class _Comparison(NamedTuple):
    """The settings of a comparison, whose method `run` runs the script twice."""

    options: argparse.Namespace
    made: Path  # a folder for the copy and the outcomes
    num_ranks: int | None  # None: one process that is no rank

    def run(self, script: Script, flags: Sequence[str]) -> int:
        """Run on torch, then on minidp, print the verdict, return the exit status.

        The verdict of rank 0 is printed, and those of all ranks that differ.
        """
        here = Path.cwd()
        # This comes before the copy, so that what the command deletes is not copied.
        self._before(str(here))
        folder, why_not = working_copy(
            here, self.made / "copy", is_wished=self.options.copy
        )
        where = f"in this folder ({why_not})" if why_not else "in a copy of this folder"
        say_once(f"minidp run: first on torch's DistributedDataParallel, {where}.")
        on_torch = script.moved(here, Path(folder))
        torchs = self._run("torch", on_torch.words, folder)
        if isinstance(torchs, int):
            say_once(
                "minidp run: the script failed on torch's DDP, so there is nothing to "
                "compare. Pass --no-copy if it needs this folder."
            )
            return torchs
        _check_torchs(torchs)
        self._before(str(here))
        say_once("minidp run: and now on minidp, in this folder.")
        try:
            ours = self._run("minidp", [*flags, *script.words], str(here))
        except _CannotCompareError as error:
            raise _CannotCompareError(
                f"on torch's DDP the script ended well, but {error}"
            ) from None
        if isinstance(ours, int):
            say_once(
                "minidp run: the script failed on minidp only, with exit status "
                f"{ours}: on torch's DDP it ended well."
            )
            return ours
        results = [compare(*pair, why_not) for pair in zip(torchs, ours, strict=True)]
        for rank, (is_same, text) in enumerate(results):
            if not rank or not is_same:
                name = f"torch's DDP and minidp on rank {rank}"
                say_on_stderr(f"minidp run: {name}\n{text}")
        is_idle = _say_about_ranks(torchs, ours)  # last: it limits what equality means
        return int(is_idle or not all(is_same for is_same, _ in results))

    def _run(self, library: str, words: Sequence[str], cwd: str) -> list[Outcome] | int:
        """Run all ranks, and return their outcomes, or the status of a failed run.

        Raises:
            _CannotCompareError: A rank made no progress within the limit, or outcomes
                are missing although the run succeeded.
        """
        limit = self.options.limit
        outcome = self.made / library
        ranks = [] if self.num_ranks is None else ["-n", str(self.num_ranks)]
        phase = ["--phase", library, "--outcome", str(outcome), "--limit", str(limit)]
        command = [sys.executable, "-m", "minidp.run", *ranks, *phase, *words]
        # The ranks must not take themselves for those of the launcher that started us.
        inherited = {n: v for n, v in os.environ.items() if n not in (RUN, "RANK")}
        inherited |= moved_environment(Path.cwd(), Path(cwd))
        status = subprocess.call(command, cwd=cwd, env=inherited)
        paths = [_of_rank(outcome, rank) for rank in range(self.num_ranks or 1)]
        # A run on torch may hang when it exits, after it has written its outcome. So
        # the outcome counts, whatever the status is.
        if all(p.exists() for p in paths) and (not status or library == "torch"):
            return [Outcome(*torch.load(p, weights_only=True)) for p in paths]
        for rank, path in enumerate(paths):
            if _stacks(path).exists() and (stacks := _stacks(path).read_text()):
                raise _CannotCompareError(
                    f"rank {rank} made no optimizer step and no forward of a wrapped "
                    f"model on {library} for {limit:g} s, and was ended. To wait "
                    f"longer: --limit SECONDS. It was here:\n"
                    f"{stacks}"
                )
        if not status:
            raise _CannotCompareError(
                f"on {library}, the script ended its process itself (os._exit), so its "
                "weights could not be read."
            )
        return status if status > 0 else 128 - status

    def _before(self, cwd: str) -> None:
        before = self.options.before
        status = before is not None and subprocess.call(before, shell=True, cwd=cwd)
        if status:
            raise _CannotCompareError(
                f"the command of --before ended with exit status {status}: {before}"
            )


def _check_torchs(outcomes: Sequence[Outcome]) -> None:
    """Check that the run on torch has used torch's DDP.

    Raises:
        _CannotCompareError: The script wraps its models in minidp's class itself.
    """
    for rank, outcome in enumerate(outcomes):
        if outcome.num_ours and not outcome.num_models:
            raise _CannotCompareError(
                f"the run on torch was a run on minidp: on rank {rank} the script "
                f"itself made {outcome.num_ours} minidp.DataParallel (or attach, or "
                "swap), and no DistributedDataParallel of torch. To compare, let the "
                "script wrap in torch.nn.parallel.DistributedDataParallel; the second "
                "run swaps it."
            )
        if outcome.num_ours and not rank:
            say_on_stderr(
                f"minidp run: {outcome.num_ours} of "
                f"{outcome.num_ours + outcome.num_models} models of the run on torch "
                "were minidp's: the script makes them itself. They are not compared."
            )


# --------------------------------------------------------------------------- one run


def _of_rank(outcome: Path, rank: int) -> Path:
    return outcome.with_name(f"{outcome.name}-{rank}")


def _stacks(outcome: Path) -> Path:
    return outcome.with_suffix(".stacks")  # where a run hung


def begin_phase(options: argparse.Namespace) -> OutcomeRecorder:
    """Seed this process, and return the recorder of its outcome, which runs already."""
    rank = from_environment("RANK", 0)
    seed(rank)
    return OutcomeRecorder(_of_rank(options.outcome, rank), options.limit)


def run_on_torch(script: Script, options: argparse.Namespace) -> int:
    """Run the script on torch's DDP, and return its exit status.

    If that is 0, the outcome is saved, and the process is ended if it still runs after
    60 s, because torch may hang at its exit. What the script raises passes through.
    """
    recorder = begin_phase(options)

    def wrapped(ddp: Any) -> None:
        never_take_down(ddp)
        recorder.wrapped(ddp)

    with reached_children(swaps=False, is_compared=True):
        with (
            after_wrapping(TORCHS, wrapped),
            after_wrapping(DataParallel, recorder.wrapped_ours),
        ):
            status = script.run()
        if not status:
            recorder.save(EXIT_SECONDS)
    return status


class Outcome(NamedTuple):
    """The result of one run of the script, on one rank: weights and step times."""

    weights: Mapping[str, torch.Tensor]  # parameters and module buffers, by model
    num_models: int
    ends: Sequence[float]  # when the steps of the first optimizer ended, in seconds
    models: Sequence[Sequence[Sequence[Any]]] = ()  # a `Model` each
    num_averaged: int = -1  # synchronised backwards of all models; -1: not known
    num_ours: int = 0  # in a run on torch: models that the script wrapped in minidp's


class Model(NamedTuple):
    """What a rank says of a model that it wrapped, to compare weights between ranks."""

    ranks: Sequence[int]  # global ranks, over which its gradients are averaged
    names: Sequence[str]  # of the parameters whose gradients are averaged


class OutcomeRecorder:
    """Keep the models that a script wraps, and time its first optimizer's steps.

    The constructor starts a timer, too, which ends a process that makes no progress.
    Progress is an optimizer step, but also a forward of a wrapped model, because a
    trainer may have optimizers that are not torch's, and a long evaluation makes no
    step.

    Args:
        path: The file to which `save` writes the outcome. The stacks of a process that
            the timer ends are written to a file beside it.
        limit: How many seconds a process may make no progress.
    """

    def __init__(self, path: Path, limit: float) -> None:
        self._path, self._limit = path, limit
        self._stacks = os.open(_stacks(path), os.O_CREAT | os.O_WRONLY)
        self._modules: list[nn.Module] = []
        self._models: list[Model] = []
        self._ledgers: list[Any] = []  # of minidp's wrappers, also of dead ones
        self._num_ours = 0
        self._first: Optimizer | None = None  # the one whose steps are timed
        self._ends: list[float] = []
        self._handle = register_optimizer_step_post_hook(self._stepped)
        self._watch(limit)

    def _watch(self, seconds: float) -> None:
        """Start the timer anew, which at its end writes stacks and ends the process."""
        self._watched_at = time.perf_counter()
        faulthandler.dump_traceback_later(seconds, file=self._stacks, exit=True)

    def wrapped(self, ddp: Any) -> None:
        """Keep a new wrapper's module for `outcome`, and count this as progress."""
        self._modules.append(ddp.module)
        self._models.append(describe(ddp))
        if (reducer := getattr(ddp, "_reducer", None)) is not None:
            self._ledgers.append(reducer.ledger)
        ddp.register_forward_pre_hook(_Progress(self._progressed))
        self._watch(self._limit)

    def wrapped_ours(self, ddp: Any) -> None:
        """Count a wrapper of minidp in a run on torch, and its forwards as progress."""
        self._num_ours += 1
        ddp.register_forward_pre_hook(_Progress(self._progressed))
        self._watch(self._limit)

    def _stepped(self, optimizer: Optimizer, *_arguments: Any) -> None:
        now = time.perf_counter()
        self._first = self._first or optimizer
        if optimizer is self._first:
            self._ends.append(now)
        self._progressed(now)

    def _progressed(self, now: float) -> None:
        # To start the timer takes 0.1 ms, so not every step does it.
        if now > self._watched_at + min(1.0, self._limit / 10):
            self._watch(self._limit)

    def outcome(self) -> Outcome:
        """Stop timing steps, and return these times with copies of all weights."""
        self._handle.remove()
        weights = {
            f"{number}: {name}": tensor.detach().cpu().clone()
            for number, module in enumerate(self._modules)
            for name, tensor in (*module.named_parameters(), *module.named_buffers())
        }
        averaged = sum(ledger.finalized for ledger in self._ledgers)
        models = tuple(
            ([*ranks], [f"{number}: {name}" for name in names])
            for number, (ranks, names) in enumerate(self._models)
        )
        return Outcome(
            weights,
            len(self._modules),
            tuple(self._ends),
            models,
            averaged if self._ledgers else -1,
            self._num_ours,
        )

    def save(self, exit_s: float | None = None) -> None:
        """Write the `outcome`, and end this process if it still runs after ``exit_s``.

        Without ``exit_s`` the limit of this recorder holds.
        """
        self._watch(exit_s or self._limit)
        partial = self._path.with_suffix(".partial")
        torch.save(tuple(self.outcome()), partial)
        partial.replace(self._path)


def describe(ddp: Any) -> Model:
    """Describe a new wrapper, which may be torch's or minidp's."""
    ignored = getattr(ddp, "parameters_to_ignore", ())
    named = ddp.module.named_parameters()
    names = [n for n, p in named if p.requires_grad and n not in ignored]
    group = getattr(ddp, "process_group", None)
    return Model([] if group is None else group_ranks(group), names)


def _say_about_ranks(torchs: Sequence[Outcome], ours: Sequence[Outcome]) -> bool:
    """Say which ranks' weights differ, and return whether no gradient was averaged."""
    for library, outcomes in (("torch", torchs), ("minidp", ours)):
        if text := compare_ranks(outcomes):
            say_on_stderr(f"minidp run: on {library} {text}")
    # A model whose group has one rank averages nothing, and that is no mistake.
    wrapped = [model for each in ours for model in each.models if len(model[0]) > 1]
    is_idle = bool(wrapped) and not any(each.num_averaged for each in ours)
    if is_idle:
        say_on_stderr(f"minidp run: {NOTHING_AVERAGED}")
    return is_idle


NOTHING_AVERAGED = (
    "no synchronised backward ran, so no gradient was averaged over ranks. Does the "
    "script keep the wrapper and call it (not its .module), and run a backward outside "
    "no_sync()?"
)


def compare_ranks(outcomes: Sequence[Outcome]) -> str:
    """Return which ranks' final weights differ from those of their group's first rank.

    The text is empty if none differ. Only averaged parameters are compared, because
    others may differ on purpose.
    """
    texts = []
    for rank, outcome in enumerate(outcomes):
        for ranks, names in outcome.models:
            first = min(ranks, default=rank)
            if first == rank or first >= len(outcomes):
                continue
            theirs = outcomes[first].weights
            both = [n for n in names if n in theirs and n in outcome.weights]
            gaps = {n: _gap(theirs[n], outcome.weights[n]) for n in both}
            wrong = {name: gap for name, gap in gaps.items() if gap is not None}
            if wrong:
                worst = max(wrong, key=wrong.__getitem__)
                texts.append(
                    f"rank {rank} differs from rank {first} in {len(wrong)} tensors, "
                    f"by {wrong[worst]:.3g} at most, in {worst}"
                )
    return f"the ranks' final weights differ: {'; '.join(texts)}." if texts else ""


class _Progress:
    """A forward hook that tells the time of each forward of a wrapper.

    It is a class because a copy or a pickle of the wrapper must not carry the recorder:
    there the hook does nothing. The compiler does not trace it.
    """

    def __init__(self, told: Callable[[float], None]) -> None:
        self._told = told

    def __call__(self, *_arguments: Any) -> None:
        if not torch.compiler.is_compiling():
            self._told(time.perf_counter())

    def __reduce__(self) -> tuple[Any, ...]:
        return _Progress, (_ignore,)


def _ignore(_now: float) -> None:
    """Take the place of the recorder in a copy of the wrapper."""


def compare(torchs: Outcome, ours: Outcome, why_not_copied: str) -> tuple[bool, str]:
    """Return whether weights and numbers of steps are equal, and the verdict's text."""
    weights = _compare_weights(torchs, ours)
    steps = [len(outcome.ends) for outcome in (torchs, ours)]
    text = f"  weights   {weights}\n  step      {_speed(torchs, ours)}"
    if steps[0] != steps[1]:
        where = "elsewhere than in its working directory"
        if why_not_copied:
            where = f"(both runs were in this folder: {why_not_copied})"
        text = (
            f"  steps     differ: {steps[0]} on torch, {steps[1]} on minidp. If the "
            f"script resumes from a checkpoint {where}, let both runs start without "
            f"it: minidp run --compare --before 'rm -rf CHECKPOINTS' ...\n{text}"
        )
    return weights.startswith("identical") and steps[0] == steps[1], text


def _compare_weights(torchs: Outcome, ours: Outcome) -> str:
    """Return a text: "identical..." if all bits are equal, else what differs."""
    odd = ", ".join(sorted(torchs.weights.keys() ^ ours.weights.keys()))
    if odd:
        return (
            f"differ: {torchs.num_models} models on torch, {ours.num_models} on "
            f"minidp; only one of the runs has {textwrap.shorten(odd, 200)}"
        )
    gaps = {n: _gap(torchs.weights[n], ours.weights[n]) for n in ours.weights}
    num_values = sum(tensor.numel() for tensor in ours.weights.values())
    what = f"models: {ours.num_models}, tensors: {len(gaps)}, values: {num_values:,}"
    wrong = {name: gap for name, gap in gaps.items() if gap is not None}
    if not wrong:
        return f"identical, bit for bit ({what})"
    worst = max(wrong, key=wrong.__getitem__)
    return (
        f"differ in {len(wrong)} tensors ({what}): by {wrong[worst]:.3g} at most, in "
        f"{worst}. Does the script repeat itself on torch (seeds, threads)? If so, see "
        "'Differences from torch' in minidp's README."
    )


def _gap(a: torch.Tensor, b: torch.Tensor) -> float | None:
    """Return the largest absolute difference, or None if all bits are equal.

    It is infinite if the shapes differ, or if only one of two values is NaN.
    """
    if a.shape != b.shape:
        return float("inf")
    raw = (x.resolve_conj().contiguous().reshape(-1).view(torch.uint8) for x in (a, b))
    if a.dtype == b.dtype and torch.equal(*raw):
        return None
    wide = torch.complex128 if a.is_complex() else torch.float64
    gap = (a.to(wide) - b.to(wide)).abs()
    return float(gap.nan_to_num(nan=float("inf")).max())


def _speed(torchs: Outcome, ours: Outcome) -> str:
    """Return a text with the median time of a step of both runs, after the warm-up."""
    num_steps = min(len(torchs.ends), len(ours.ends))
    if num_steps < 2:
        return "no times: fewer than two optimizer steps"
    if num_steps < ENOUGH:
        return (
            f"too few steps to compare their times: {num_steps}. It takes {ENOUGH}, "
            f"of which the first {WARM_UP} warm up"
        )
    times = ([b - a for a, b in pairwise(each.ends)] for each in (torchs, ours))
    before, now = (statistics.median(each[WARM_UP:]) for each in times)
    return (
        f"torch {before * 1e3:.2f} ms, minidp {now * 1e3:.2f} ms, ratio "
        f"{now / before:.2f} (medians; on a busy machine they say little)"
    )
