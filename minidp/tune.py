"""Run a script once with ``bucket_cap_mb="auto"``, and keep the layout that it finds.

    minidp tune -n 2 --out buckets.json train.py ARGS
    torchrun --nproc-per-node 2 -m minidp.tune --out buckets.json train.py ARGS

Every DataParallel of the script looks for the best layout of its buckets, and rank 0
writes it to the file as soon as it is found. From then on no run has to look again:

    minidp run -n 2 --bucket-layout buckets.json train.py ARGS
    model = minidp.DataParallel(module, bucket_layout="buckets.json")  # or in code

The layout fits this model, these options, this number of ranks and this network.

The script runs in a copy of the working directory, which is deleted afterwards: this is
a trial, and its checkpoints must not replace yours. What it writes elsewhere (by an
absolute path, in your home directory, to a server) it writes as ever.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from .autotune import NUM_TRIALS, STEPS, AutotunePolicy, Choice
from .config import AUTO, NONE, OPTIONS, add_options, numbered, setting, variables
from .console import run_command, say_on_stderr
from .data_parallel import DataParallel
from .run import (
    NoCopyError,
    Script,
    add_num_ranks,
    add_script,
    after_wrapping,
    apart,
    reached_children,
    run_here,
    say_once,
    start_ranks,
    why_not,
)
from .swapping import swapped

# What the script passes of these would keep a model from searching.
OVERRIDES = {"bucket_cap_mb": AUTO, "bucket_cap_mb_list": NONE, "bucket_layout": NONE}
NEEDED = STEPS * NUM_TRIALS + 2  # how many steps; the forward of the last one decides


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``minidp tune`` to ``parser``."""
    parser.description = __doc__
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("buckets.json"),
        metavar="FILE",
        help="the file to write (default: %(default)s); the layout of a second model "
        "in the same script goes to FILE with .1 before its suffix, and so on",
    )
    parser.add_argument(
        "--copy",
        action=argparse.BooleanOptionalAction,
        help="whether the script runs in a copy of the working directory (default: "
        "yes, but a large directory is copied only with --copy); with --no-copy, what "
        "the script writes there, checkpoints too, replaces what is there",
    )
    add_num_ranks(parser)
    add_options(parser, without=OVERRIDES)
    add_script(
        parser,
        "a Python script that trains with minidp.DataParallel or torch's "
        f"DistributedDataParallel, for at least {NEEDED} steps",
    )


def main(arguments: argparse.Namespace) -> int:
    """Run the script, here or on ``-n`` new ranks, and return the exit status.

    The status is

    * 0 if the layout of each model was written;
    * 1 if rank 0 lacks a layout, or the script wrapped no model;
    * 2 if the script cannot be run at all, or not in a copy of the working directory;
    * that of the script if the script fails.
    """
    script = Script(arguments.script, arguments.arguments, arguments.is_module)
    arguments.out = arguments.out.absolute()
    here = Path.cwd()
    try:
        with apart(script, is_wished=arguments.copy) as moved:
            return _run(moved, arguments, here)
    except NoCopyError as why:
        say_once(
            "minidp tune: the script would run in a copy of this folder, so that it "
            f"overwrites nothing of yours, but {why}. Or start in a smaller folder, or "
            "pass --no-copy: then what the script writes here, checkpoints too, "
            "replaces what is here."
        )
        return 2


def _run(script: Script, arguments: argparse.Namespace, here: Path) -> int:
    """Run the script in the present directory, which may be a copy of ``here``.

    The exit status is that of `main`.
    """
    with swapped():  # finding a module imports the packages around it
        problem = why_not(script, arguments.num_ranks, out=arguments.out)
    if problem:
        say_once(f"minidp tune: {problem}.")
        return 2
    if Path.cwd() != here:
        say_once(
            "minidp tune: the script runs in a copy of this folder, which is deleted "
            "afterwards. What it writes elsewhere (absolute paths, your home "
            "directory, a server) it writes as ever."
        )
    with setting(variables(arguments)):
        out = arguments.out
        if arguments.num_ranks is not None:
            flags = ["--out", str(out), "--no-copy"]  # its ranks are in the copy
            return start_ranks(arguments.num_ranks, "tune", flags, script)
        with reached_children("tune", swaps=True), swapped(), tuned(out) as layouts:
            status = run_here("tune", script)
        return status or layouts.finish()


@contextmanager
def tuned(out: Path) -> Iterator[TunedLayouts]:
    """Let each `DataParallel` that is made in the block search its best layout.

    Rank 0 writes it to the file ``out``, or to a file beside it (`config.numbered`) for
    a second model. Options of buckets that the script passes are replaced.
    """
    layouts = TunedLayouts(out)
    changes = {OPTIONS[name].variable: text for name, text in OVERRIDES.items()}
    with setting(changes), after_wrapping(DataParallel, layouts.add):
        yield layouts


class TunedLayouts:
    """The models of one script, and the layouts that they find."""

    def __init__(self, out: Path) -> None:
        self._out = out
        # For each model: how many ranks it has, and its ledger, which counts steps.
        self._models: list[tuple[int, Any]] = []
        self._num_written = 0
        self._is_rank_0 = True

    def add(self, ddp: DataParallel) -> None:
        """Count a new model, and let its search tell rank 0 what it has found."""
        number, group = len(self._models), ddp.process_group
        self._is_rank_0 = group.rank() == 0
        self._models.append((group.size(), ddp._reducer.ledger))
        order = ddp._reducer.rebuild_policy
        if isinstance(order, AutotunePolicy):
            order.told = functools.partial(self._write, number)

    def _write(self, number: int, plain: dict[str, Any], choice: Choice) -> None:
        """Write the layout of model ``number`` to its file, and say what was chosen.

        The file appears at once, so that no reader sees half of it. `AutotunePolicy`
        does not log the choice in this case.
        """
        path = numbered(self._out, number)
        partial = path.with_name(f"{path.name}.{os.getpid()}")
        text = json.dumps(plain | {"tuned": str(choice)}, indent=1)
        partial.write_text(text + "\n", encoding="utf-8")
        partial.replace(path)
        self._num_written += 1
        option = OPTIONS["bucket_layout"]
        use = (
            f"To use it: minidp run {option.word} {self._out} SCRIPT, or the "
            f"environment variable {option.variable}={self._out}, or "
            f"minidp.DataParallel(..., bucket_layout={str(path)!r})."
        )
        if not choice.is_another:
            use = (
                "You need no file for that: it is what a run has without such options."
            )
        say_on_stderr(f"minidp tune: {choice}.\nminidp tune: wrote {path}. {use}")

    def finish(self) -> int:
        """Return the exit status, and on rank 0 say what is missing, if anything is."""
        count, missing = len(self._models), len(self._models) - self._num_written
        if not self._is_rank_0:
            return 0
        if not count:
            say_once(
                "minidp tune: the script wrapped no model in minidp.DataParallel or "
                "torch's DistributedDataParallel in this process, so there is nothing "
                "to write."
            )
        elif missing:
            steps = ", ".join(str(ledger.finalized) for _, ledger in self._models)
            of = "the model" if count == 1 else f"{missing} of {count} models"
            say_on_stderr(
                f"minidp tune: no layout was found for {of} of this script. The search "
                f"needs at least 2 ranks (here: {self._models[-1][0]}), {NEEDED} "
                f"synchronised steps (here: {steps}), and no comm hook that has a "
                "state."
            )
        return int(not count or missing > 0)


if __name__ == "__main__":
    run_command("minidp tune", add_arguments, main)
