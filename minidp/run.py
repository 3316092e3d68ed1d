"""``minidp run``: an unmodified DDP script, on minidp.

    minidp run -n 2 train.py ARGS                 two ranks on this machine
    torchrun ... -m minidp.run train.py ARGS      ranks that torchrun starts
    minidp run train.py ARGS                      one process, as python train.py

Also -m package.module for train.py. In the script, in all it imports, and in processes
that it starts, torch.nn.parallel.DistributedDataParallel is minidp.DataParallel, by
whichever name (minidp.swapped says which). The exit status is the script's; 2 if it
cannot be run at all, 1 if there is nothing to report or compare, or a difference.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import weakref
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path

from ._children import Children, reached_children
from ._compare import Observer
from ._console import parse
from ._groups import launcher_store
from ._overrides import add_options, misspelt, read_environment, setting, variables
from ._phases import Comparison, begin_phase, run_both, run_on_torch
from ._ranks import (
    add_num_ranks,
    how_to_start,
    is_rank,
    lacks_launcher,
    start_ranks,
    why_no_ranks,
)
from ._script import Script, after_wrapping, from_environment, say, say_once
from ._terminal import fold
from ._timeline import Timeline, from_json, to_json
from .data_parallel import DataParallel
from .recording import Recording, record
from .report import report
from .swapping import has_reached_children, swapped

EXCHANGE_SECONDS = 60.0  # that rank 0 waits for the recordings of other ranks


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command line of ``minidp run``."""
    parser.usage = "%(prog)s [OPTIONS] [-m] SCRIPT [ARGS]"
    add_num_ranks(parser)
    parser.add_argument(
        "--report",
        action="store_true",
        help="at exit, say what of the communication was hidden (minidp report)",
    )
    parser.add_argument(
        "--save",
        type=Path,
        metavar="FILE",
        help="--report, and keep what was recorded, for minidp report FILE (of several "
        "models the first; of the others FILE with .2, .3 and so on)",
    )
    parser.add_argument(
        "-m", dest="is_module", action="store_true", help="SCRIPT is a module's name"
    )
    parser.add_argument("script", metavar="SCRIPT", help="a script that trains")
    parser.add_argument(
        "arguments", metavar="ARGS", nargs=argparse.REMAINDER, help="of the script"
    )
    _add_comparison(parser)
    add_options(parser)


def _add_comparison(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("comparison with torch's DDP")
    group.add_argument(
        "--compare",
        action="store_true",
        help="run the script on torch's DDP first, then on minidp; say whether final "
        "weights are equal, and how long steps took; exit status 1 if they differ, or "
        "the numbers of steps do; both start with the same seeds, for scripts that set "
        "none",
    )
    group.add_argument(
        "--copy",
        action=argparse.BooleanOptionalAction,
        help="whether the run on torch has a copy of the working directory, so that "
        "the other one finds no checkpoint of it (default: unless it is large)",
    )
    group.add_argument(
        "--before",
        metavar="COMMAND",
        help="run by the shell before each of the two runs, once per machine: 'rm -rf "
        "out' for checkpoints elsewhere that the script would resume from",
    )
    group.add_argument(
        "--limit",
        type=_seconds,
        default=Comparison.limit,
        metavar="SECONDS",
        help="end a run that makes no step for so long (default: %(default)g)",
    )
    group.add_argument(
        "--phase", choices=("torch", "minidp"), help=argparse.SUPPRESS
    )  # what the comparison starts
    group.add_argument("--outcome", type=Path, help=argparse.SUPPRESS)


def _seconds(text: str) -> float:
    seconds = float(text)
    if not seconds > 0:
        raise argparse.ArgumentTypeError(f"more than 0 seconds, but got {text}")
    return seconds


def main(options: argparse.Namespace) -> int:
    """Run the script; its exit status, or see `add_arguments`."""
    script = Script(options.script, options.arguments, options.is_module)
    # The script may go to another folder.
    options.save = options.save and options.save.absolute()
    with setting(variables(options)):
        problem = _problem(script, options)
        if problem:
            say_once(f"minidp run: {problem.removesuffix('.')}.")
            return 2
        if options.phase == "torch":
            run_on_torch(script, options.outcome)
        if options.phase:
            return _on_minidp_compared(script, options)
        for warning in misspelt():
            say_once(f"minidp run: {warning}")
        if options.num_ranks is not None:
            return start_ranks(options.num_ranks, "run", _flags(options), script)
        if options.compare:
            comparison = Comparison(
                script,
                _flags(options, is_phase=True),
                options.limit,
                options.copy,
                options.before,
            )
            return run_both(comparison)
        return _on_minidp(script, Session(script, _reports(options), options.save))


def _problem(script: Script, options: argparse.Namespace) -> str:
    """Why nothing is run: what is to be said before hours of training, not after."""
    # To look for a module imports the packages around it.
    with nullcontext() if options.phase == "torch" else swapped():
        problem = script.problem()
    if problem:
        return problem
    path = options.save
    if path is not None and (path.is_dir() or not path.parent.is_dir()):
        why = "it is a folder" if path.is_dir() else f"there is no folder {path.parent}"
        return f"--save {path}: {why}"
    try:
        read_environment()
    except ValueError as error:
        return str(error)
    return why_no_ranks(options.num_ranks)


def _reports(options: argparse.Namespace) -> bool:
    return options.report or options.save is not None


def _flags(options: argparse.Namespace, *, is_phase: bool = False) -> list[str]:
    """The same options, less -n and those of the constructor, for another process.

    Args:
        options: of this one.
        is_phase: whether that process runs the script for a comparison.
    """
    flags = ["--report"] * options.report
    if options.save is not None:
        flags += ["--save", str(options.save)]
    if options.compare and not is_phase:
        flags += ["--compare", "--limit", str(options.limit)]
        flags += {None: [], True: ["--copy"], False: ["--no-copy"]}[options.copy]
        flags += [] if options.before is None else ["--before", options.before]
    return flags


# ------------------------------------------------------------------------- on minidp


def _on_minidp(script: Script, session: Session) -> int:
    """Run the script with torch's class swapped for ours."""
    alone = "" if is_rank() else ", which runs as one process (-n N: as N ranks)"
    say_once(
        "minidp run: torch.nn.parallel.DistributedDataParallel is minidp.DataParallel "
        f"in {script.target}{alone}."
    )
    is_compared = session.observer is not None
    with reached_children(swaps=True, is_compared=is_compared) as children:
        told = after_wrapping(DataParallel, lambda ddp: session.wrapped(ddp, children))
        try:
            with swapped(), told:
                status = script.run()
        except Exception as error:
            why = lacks_launcher(error, "run", script)
            if not why:
                _hint(error)
                raise
            say(f"minidp run: {why}")
            return 1
        finally:
            session.end()
            session.reached_children = has_reached_children()
            session.others_wrapped = children.have_wrapped
        return session.finish(status)


def _on_minidp_compared(script: Script, options: argparse.Namespace) -> int:
    """The second of two runs, in a process that `run_both` has started."""
    observer = begin_phase(options.outcome)
    session = Session(script, _reports(options), options.save, observer)
    status = _on_minidp(script, session)
    if not status:
        observer.outcome().save(options.outcome)
    return status


@dataclass
class Session:
    """What one process of the script wrapped, and what is to be said of it."""

    script: Script
    reports: bool = False
    saves: Path | None = None
    observer: Observer | None = None
    reached_children: bool = False  # by a swap
    others_wrapped: bool = False  # processes that the script started
    names: list[str] = field(default_factory=list)  # of the models' classes
    sizes: list[int] = field(default_factory=list)  # of their process groups
    recordings: list[Recording] = field(default_factory=list)
    _open: ExitStack = field(default_factory=ExitStack)
    _ends: list[tuple[weakref.ref[DataParallel], ExitStack]] = field(
        default_factory=list
    )
    _pid: int = field(default_factory=os.getpid)

    def wrapped(self, ddp: DataParallel, children: Children) -> None:
        """A model was wrapped, here or in a fork of this process."""
        if os.getpid() != self._pid:
            children.note_wrapped()
            return
        module = getattr(ddp.module, "_orig_mod", ddp.module)  # if it is compiled
        self.names.append(type(module).__name__)
        self.sizes.append(ddp.process_group.size())
        if self.observer is not None:
            self.observer.wrapped(ddp)
        if self.reports:
            self._end_those_of_dropped_models()
            recording, end = record(ddp), ExitStack()
            self.recordings.append(end.enter_context(recording))
            self._open.callback(end.close)
            self._ends.append((weakref.ref(ddp), end))

    def _end_those_of_dropped_models(self) -> None:
        """A script may wrap one model after the other; a recording keeps its buckets.

        Not when a model goes: that may be while torch iterates over optimizer hooks.
        """
        for alive, end in self._ends:
            if alive() is None:
                end.close()
        self._ends = [(alive, end) for alive, end in self._ends if alive() is not None]

    def end(self) -> None:
        """Nothing is recorded any more."""
        self._open.close()

    def finish(self, status: int) -> int:
        """At the end of the script: say what there is to say; the exit status."""
        asked = self.reports or self.observer is not None
        if self.sizes and max(self.sizes) == 1:
            say_once(
                "minidp run: this was a world of one rank, so nothing was averaged. "
                f"For two on this machine: {how_to_start('run', self.script)}"
            )
        if not self.sizes:
            in_others = self.reached_children or self.others_wrapped
            if status and not in_others:
                self._say_failed(status)
            elif not status:
                self._say_nothing_wrapped(is_error=asked)
            return status or int(asked)
        if self.reports:
            self._report()
        return status

    def _say_failed(self, status: int) -> None:
        ours = {"--report", "--save", "--compare"} & set(self.script.arguments)
        hint = f" (Options of minidp run stand before {self.script.target}.)"
        say_once(
            f"minidp run: {self.script.target} ended with exit status {status}, before "
            f"it wrapped a model in DistributedDataParallel.{hint * bool(ours)}"
        )

    def _say_nothing_wrapped(self, *, is_error: bool) -> None:
        target = self.script.target
        if is_error and (self.others_wrapped or self.reached_children):
            say_once(
                "minidp run: error: --report and --compare see the models of this "
                f"process, and {target} has its models in others that it starts. Let "
                f"torchrun or -n start the ranks, if it can be started so."
            )
        elif is_error:
            say_once(
                f"minidp run: error: {target} ended without wrapping a model in "
                "DistributedDataParallel, so there is nothing to report or compare."
            )
        elif self.others_wrapped:
            return  # that is what it was to do
        elif self.reached_children:
            say_once(
                f"minidp run: {target} wrapped no model in this process; in those that "
                "it started, DistributedDataParallel was minidp.DataParallel as well."
            )
        else:
            say_once(
                f"minidp run: {target} ended without wrapping a model in "
                "DistributedDataParallel, so minidp had nothing to do."
            )

    def _report(self) -> None:
        """Rank 0 prints what all recorded, where torchrun's store brings it together.

        Else, or of ranks that do not answer: what it has.
        """
        mine = [recording.timelines[0] for recording in self.recordings]
        for number, timelines in enumerate(_exchange(mine)):
            title = f"report of {self.names[number]}"
            if len(mine) > 1:
                title += f" (model {number + 1} of {len(mine)})"
            say(f"minidp run: {title}\n{fold(report(timelines), sys.stderr)}")
            if self.saves is not None:
                name = self.saves.name + (f".{number + 1}" if number else "")
                path = self.saves.with_name(name)
                path.write_text(to_json(timelines))
                say(f"minidp run: wrote {path}")


def _exchange(mine: list[Timeline]) -> list[list[Timeline]]:
    """On rank 0: for each model the timelines of all ranks; elsewhere nothing."""
    rank, size = from_environment("RANK", 0), from_environment("WORLD_SIZE", 1)
    store = launcher_store("report") if size > 1 else None
    if rank:
        if store is not None:
            store.set(str(rank), json.dumps([to_json([each]) for each in mine]))
        return []
    everyone = [[each] for each in mine]
    if store is None:
        return everyone
    for other in range(1, size):
        try:
            store.wait([str(other)], timedelta(seconds=EXCHANGE_SECONDS))
        except RuntimeError:
            say(f"minidp run: rank {other} sent no recording.")
            continue
        theirs = json.loads(store.get(str(other)))
        for timelines, text in zip(everyone, theirs, strict=False):
            timelines.extend(from_json(text))
    return everyone


def _hint(error: BaseException) -> None:
    """What to do about an error that a script does not explain; it is raised on."""
    text = str(error)
    if "EADDRINUSE" in text or "address already in use" in text.lower():
        say_once(
            "minidp run: the port of the rendezvous is in use, by another job or an "
            "earlier run that has not ended. Choose another one: set MASTER_PORT, or "
            "start with torchrun --rdzv-backend c10d --rdzv-endpoint localhost:0."
        )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="minidp run", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    add_arguments(parser)
    sys.exit(main(parse(parser)))
