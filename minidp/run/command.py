"""Define ``minidp run``, which runs a script with minidp in the place of torch's DDP.

One command line may mean several processes. With ``-n`` or ``--compare`` this process
only starts others (`ranks`, `compare`), each of which runs ``minidp run`` again, with
options that only we pass (``--phase``). Without them it runs the script itself, in
`_run_on_minidp`: `WrappedModels` is told of each model that the script wraps, records
its steps, and prints the report when the script has ended.
"""

from __future__ import annotations

import argparse
import os
import sys
import weakref
from argparse import Namespace
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from minidp.comm import gather_json, launcher_store, post_json
from minidp.config import (
    add_options,
    misspelt,
    numbered,
    read_environment,
    setting,
    variables,
)
from minidp.console import fold, positive_seconds, say_on_stderr
from minidp.data_parallel import DataParallel
from minidp.overlap import Timeline, from_json, html_page, report, to_json
from minidp.recording import Recording, record
from minidp.swapping import swapped

from .children import die_with_parent, reached_children
from .compare import (
    NOTHING_AVERAGED,
    OutcomeRecorder,
    begin_phase,
    run_both,
    run_on_torch,
)
from .ranks import (
    add_num_ranks,
    from_environment,
    how_to_start,
    run_here,
    say_once,
    start_ranks,
    why_not,
)
from .script import Script, after_wrapping
from .weights import WeightWatch

EXCHANGE_SECONDS = 60.0  # how long rank 0 waits for the recordings of other ranks
DESCRIPTION = """\
Runs an unmodified DDP script on minidp.

    minidp run -n 2 train.py ARGS                 two ranks on this machine
    torchrun ... -m minidp.run train.py ARGS      ranks that torchrun starts
    minidp run train.py ARGS                      one process, as python train.py

Instead of train.py you can pass -m package.module. In the script, in all that it
imports, and in the processes that it starts, torch's DistributedDataParallel is
minidp.DataParallel, under each of its names (help(minidp.swapped) lists them).

The exit status is that of the script. It is 2 if the script cannot be run at all, and 1
if there is nothing to report or to compare, or if --compare finds a difference.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the description, options and positional arguments of ``minidp run``."""
    parser.description = DESCRIPTION
    add_num_ranks(parser)
    parser.add_argument(
        "--report",
        action="store_true",
        help="at exit, print how much of the communication was hidden behind the "
        "backward, as `minidp report` does",
    )
    parser.add_argument(
        "--save",
        type=Path,
        metavar="FILE",
        help="do what --report does, and keep the recording for `minidp report FILE` "
        "(the recording of a second model is kept in FILE with .1 before its suffix)",
    )
    what = "do what --report does, and write the same as a page for the browser"
    parser.add_argument("--html", type=Path, metavar="FILE", help=what)
    add_script(parser, "a script that trains")
    group = parser.add_argument_group("comparison with torch's DDP")
    group.add_argument(
        "--compare",
        action="store_true",
        help="run the script on torch's DDP first, then on minidp, both with the same "
        "random seeds; say whether the final weights are equal, and how long the steps "
        "took; the exit status is 1 if weights or numbers of steps differ",
    )
    group.add_argument(
        "--copy",
        action=argparse.BooleanOptionalAction,
        help="whether the run on torch works in a copy of the working directory, so "
        "that the run on minidp finds no checkpoint of it (default: yes, unless the "
        "directory is large)",
    )
    group.add_argument(
        "--before",
        metavar="COMMAND",
        help="a command that the shell runs in this folder before each of the two "
        "runs, and before the folder is copied: for example 'rm -rf /data/out', if the "
        "script would resume from a checkpoint there",
    )
    group.add_argument(
        "--limit",
        type=positive_seconds,
        default=1800.0,
        metavar="SECONDS",
        help="end a run that makes no optimizer step and no forward of a wrapped model "
        "for so long (default: %(default)g)",
    )
    # These two are only for the processes that a comparison starts.
    group.add_argument("--phase", choices=("torch", "minidp"), help=argparse.SUPPRESS)
    group.add_argument("--outcome", type=Path, help=argparse.SUPPRESS)
    add_options(parser)


def add_script(parser: argparse.ArgumentParser, what: str) -> None:
    """Add ``-m``, SCRIPT and ARGS to a parser, with ``what`` as the help on SCRIPT."""
    parser.usage = "%(prog)s [OPTIONS] [-m] SCRIPT [ARGS]"
    parser.add_argument(
        "-m",
        dest="is_module",
        action="store_true",
        help="SCRIPT is the name of a module, as for python -m",
    )
    parser.add_argument("script", metavar="SCRIPT", help=what)
    parser.add_argument(
        "arguments",
        metavar="ARGS",
        nargs=argparse.REMAINDER,
        help="the arguments of the script",
    )


def main(options: Namespace) -> int:
    """Run or compare the script, here or on ``-n`` ranks, and return the exit status.

    The status is 2 if the script or an option cannot be used. An error of a script that
    runs in this process passes through.
    """
    script = Script(options.script, options.arguments, options.is_module)
    # The script may change its working directory before these files are written.
    options.save = options.save and options.save.absolute()
    options.html = options.html and options.html.absolute()
    with setting(variables(options)):
        problem = _problem(script, options)
        if problem:
            say_once(f"minidp run: {problem.removesuffix('.')}.")
            return 2
        if options.phase:
            die_with_parent()
        # With -n, rank 0 of those that are started says it.
        elif options.num_ranks is None or options.compare:
            for warning in misspelt():
                say_once(f"minidp run: {warning}")
        flags = _words(options, "report", "save", "html")
        if options.compare:
            return run_both(script, options, flags)
        if options.num_ranks is not None:
            flags += _words(options, "phase", "outcome", "limit")
            return start_ranks(options.num_ranks, "run", flags, script)
        if options.phase == "torch":
            return run_on_torch(script, options)
        return _run_on_minidp(script, options)


def _problem(script: Script, options: Namespace) -> str:
    """Return why the script or the options cannot be used, or "" if they can.

    To find a module, Python imports the packages around it. What they raise passes
    through.
    """
    # These packages may import torch's class, so it is swapped already here.
    with nullcontext() if options.phase == "torch" else swapped():
        files = {"save": options.save, "html": options.html}
        problem = why_not(script, options.num_ranks, **files)
    if problem:
        return problem
    try:
        read_environment()
    except ValueError as error:
        return str(error)
    size = from_environment("WORLD_SIZE", 1)
    local_size = from_environment("LOCAL_WORLD_SIZE", 1)
    if options.compare and local_size != size:
        return (
            f"--compare needs all ranks on one machine, started by torchrun or -n, but "
            f"this machine has {local_size} of {size} ranks: run it on one machine"
        )
    return ""


def _words(options: Namespace, *names: str) -> list[str]:
    """Return the options that are set, as on a command line: ["--save", "x"]."""
    words = []
    for name in names:
        value = getattr(options, name)
        if value is True:
            words.append(f"--{name}")
        elif value not in (None, False):
            words += [f"--{name}", str(value)]
    return words


def _run_on_minidp(script: Script, options: Namespace) -> int:
    """Run the script with torch's class swapped, print reports, return the status.

    In a comparison a run that succeeds also saves its outcome. After an error of the
    script, which passes through, there are no reports.
    """
    outcomes = begin_phase(options) if options.phase else None
    models = WrappedModels(script, options, outcomes)
    alone = (
        "" if "RANK" in os.environ else ", which runs as one process (-n N: as N ranks)"
    )
    say_once(
        "minidp run: torch.nn.parallel.DistributedDataParallel is minidp.DataParallel "
        f"in {script.target}{alone}."
    )
    with reached_children(swaps=True, is_compared=outcomes is not None):
        try:
            with swapped(), after_wrapping(DataParallel, models.add):
                status = run_here("run", script)
        finally:
            models.stop()
        status = models.finish(status)
    if outcomes is not None and not status:
        outcomes.save()
    return status


class WrappedModels:
    """Collect the models that a script wraps, and record and report their steps."""

    def __init__(
        self, script: Script, options: Namespace, outcomes: OutcomeRecorder | None
    ) -> None:
        self._script, self._outcomes = script, outcomes
        self._files = {options.save: to_json, options.html: html_page}
        self._files.pop(None, None)
        self._reports = options.report or bool(self._files)
        self._names: list[str] = []  # of the models' classes
        self._largest = 0  # size of the largest process group of a model
        self._recordings: list[Recording] = []
        self._weights = WeightWatch()
        self._active: list[tuple[weakref.ref[DataParallel], Recording]] = []
        self._pid = os.getpid()

    def add(self, ddp: DataParallel) -> None:
        """Take a model that the script has just wrapped, but none of a forked child."""
        if os.getpid() != self._pid:
            return
        module = getattr(ddp.module, "_orig_mod", ddp.module)  # if it is compiled
        self._names.append(type(module).__name__)
        self._largest = max(self._largest, ddp.process_group.size())
        if self._outcomes is not None:
            self._outcomes.wrapped(ddp)
        if self._reports:
            # A recording holds the buckets of its model, so those of models that the
            # script has dropped must end. They end here and not when the model is
            # destroyed, because torch may be iterating over its optimizer hooks then.
            self.stop(only_dropped=True)
            self._weights.add(ddp)
            recording = record(ddp)
            recording.__enter__()
            self._recordings.append(recording)
            self._active.append((weakref.ref(ddp), recording))

    def stop(self, *, only_dropped: bool = False) -> None:
        """Stop all recordings that run, or only those of models that are dropped."""
        for model, recording in list(self._active):
            if not only_dropped or model() is None:
                self._active.remove((model, recording))
                recording.__exit__(None, None, None)

    def finish(self, status: int) -> int:
        """Print the reports that were asked for, and return the exit status.

        It is that of the script. But if the script succeeded, and something was to be
        reported or compared although no model was wrapped, it is 1. In that case, and
        in a world of one rank, rank 0 says what to do.
        """
        if self._largest == 1:
            say_once(
                "minidp run: this was a world of one rank, so nothing was averaged. "
                f"For two on this machine: {how_to_start('run', self._script)}"
            )
        if self._names:
            if self._reports:
                self._report()
            return status
        target = self._script.target
        text = f"{target} wrapped no model in DistributedDataParallel in this process"
        if status:
            text = f"{target} ended with exit status {status}; it{text[len(target) :]}"
            if {"--report", "--save", "--html", "--compare"} & set(
                self._script.arguments
            ):
                text += f". (Options of minidp run stand before {target})"
        elif self._reports or self._outcomes is not None:
            status = 1
            text += ", so there is nothing to report or compare. "
            if "RANK" in os.environ:
                text += (
                    "This process is a rank that a launcher started: does the script "
                    "train on several ranks here, in this class, and did it get there?"
                )
            else:
                text += "If it starts its ranks itself: let torchrun or -n start them"
        else:
            text += "; in those that it starts, torch's class is minidp's, too"
        say_once(f"minidp run: {text}{'' if text.endswith('?') else '.'}")
        return status

    def _report(self) -> None:
        """Gather the recordings on rank 0, and print and write the reports there."""
        mine = [recording.timelines[0] for recording in self._recordings]
        for number, timelines in enumerate(_gathered(mine)):
            title = f"report of {self._names[number]}"
            if len(mine) > 1:
                title += f" (model {number + 1} of {len(mine)})"
            words = fold(report(timelines), sys.stderr)
            say_on_stderr(f"minidp run: {title}\n{words}")
            for first, write in self._files.items():
                path = numbered(first, number)
                path.write_text(write(timelines), encoding="utf-8")
                say_on_stderr(f"minidp run: wrote {path}")
        if self._largest > 1:
            if not self._weights.num_averaged:
                say_once(f"minidp run: {NOTHING_AVERAGED}")
            differ = self._weights.gather(_store("weights"))
            if differ:
                say_on_stderr(f"minidp run: the ranks' final weights differ: {differ}.")


def _store(topic: str) -> Any:
    """Return torchrun's store for a topic, or None for one rank or without torchrun."""
    return launcher_store(topic) if from_environment("WORLD_SIZE", 1) > 1 else None


def _gathered(mine: list[Timeline]) -> list[list[Timeline]]:
    """Return the timelines of all ranks, by model, on rank 0, and [] on other ranks.

    The other ranks only post theirs. Rank 0 waits for them for 60 s at most. It leaves
    out ranks that sent nothing, and says so.
    """
    rank, size = from_environment("RANK", 0), from_environment("WORLD_SIZE", 1)
    store = _store("report")
    if rank:
        if store is not None:
            post_json(store, "timelines", rank, [to_json([each]) for each in mine])
        return []
    everyone = [[each] for each in mine]
    if store is not None:
        others = range(1, size)
        found = gather_json(store, "timelines", others, EXCHANGE_SECONDS)
        for other in set(others) - found.keys():
            say_on_stderr(
                f"minidp run: rank {other} sent no recording within "
                f"{EXCHANGE_SECONDS:g} s, so the report is without it."
            )
        for texts in found.values():
            for timelines, text in zip(everyone, texts, strict=False):
                timelines.extend(from_json(text))
    return everyone
