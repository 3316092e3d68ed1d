"""``minidp tune``: run a script once with ``bucket_cap_mb="auto"``, keep what it found.

    minidp tune -n 2 --out buckets.json train.py ARGS
    torchrun --nproc-per-node 2 -m minidp.tune --out buckets.json train.py ARGS

Every `DataParallel` of the script looks for the best layout of its buckets; rank 0
writes it to the file as soon as it is found. From then on no run has to look again:

    minidp run -n 2 --bucket-layout buckets.json train.py ARGS
    model = minidp.DataParallel(module, bucket_layout="buckets.json")  # or in code

The layout fits this model, these options, this number of ranks and this network.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ._autotune import STEPS, Tuner
from ._children import reached_children
from ._console import parse
from ._ledger import Ledger
from ._overrides import NONE, OPTIONS, add_options, numbered, setting, variables
from ._ranks import add_num_ranks, lacks_launcher, start_ranks, why_no_ranks
from ._script import Script, after_wrapping, say, say_once
from ._tuning import NUM_TRIALS, Choice
from .config import AUTO
from .data_parallel import DataParallel
from .swapping import has_reached_children, swapped

TRIES = {"bucket_cap_mb": AUTO, "bucket_cap_mb_list": NONE, "bucket_layout": NONE}
NEEDED = STEPS * NUM_TRIALS + 2  # steps: the last one's forward decides


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command line of ``minidp tune``."""
    parser.usage = "%(prog)s [OPTIONS] [-m] SCRIPT [ARGS]"
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("buckets.json"),
        metavar="FILE",
        help="what is written (default: %(default)s); of a second model in the same "
        "script FILE with .1 before its suffix, and so on",
    )
    add_num_ranks(parser)
    add_options(parser, without=TRIES)
    parser.add_argument(
        "-m", dest="is_module", action="store_true", help="SCRIPT is a module's name"
    )
    parser.add_argument(
        "script",
        metavar="SCRIPT",
        help="a Python script that trains with minidp.DataParallel or torch's "
        f"DistributedDataParallel, for at least {NEEDED} steps",
    )
    parser.add_argument(
        "arguments", metavar="ARGS", nargs=argparse.REMAINDER, help="of the script"
    )


def main(arguments: argparse.Namespace) -> int:
    """Run the script; 0 if every model in it has found its layout."""
    script = Script(arguments.script, arguments.arguments, arguments.is_module)
    with swapped():  # to look for a module imports the packages around it
        problem = script.problem()
    if problem:
        say_once(f"minidp tune: {problem}.")
        return 2
    if not arguments.out.absolute().parent.is_dir():
        say_once(f"minidp tune: there is no folder for {arguments.out}.")
        return 2
    problem = why_no_ranks(arguments.num_ranks)
    if problem:
        say_once(f"minidp tune: {problem}.")
        return 2
    with setting(variables(arguments)):
        if arguments.num_ranks is not None:
            flags = ["--out", str(arguments.out)]
            return start_ranks(arguments.num_ranks, "tune", flags, script)
        return _tune(script, arguments.out)


def _tune(script: Script, out: Path) -> int:
    with reached_children("tune", swaps=True) as children:
        try:
            with swapped(), tuned(out) as session:
                status = script.run()
        except Exception as error:
            why = lacks_launcher(error, "tune", script)
            if not why:
                raise
            say(f"minidp tune: {why}")
            return 1
        session.reached_children = has_reached_children() or children.have_wrapped
    return status or session.finish()


@contextmanager
def tuned(out: Path) -> Iterator[Session]:
    """Every `DataParallel` that is made inside tries layouts.

    Args:
        out: where rank 0 writes what the first of them finds.
    """
    session = Session(out)
    changes = {OPTIONS[name].variable: text for name, text in TRIES.items()}
    with setting(changes), after_wrapping(DataParallel, session.add):
        yield session


class Session:
    """The models of one script, and the files written for them."""

    def __init__(self, out: Path) -> None:
        self._out = out
        self._num_models = 0
        self._written: list[Path] = []
        self._is_rank_0 = True
        self._ledgers: list[Ledger] = []
        self._world_size = 0
        self.reached_children = False

    def add(self, ddp: DataParallel) -> None:
        """A model was wrapped."""
        number, self._num_models = self._num_models, self._num_models + 1
        self._is_rank_0 = ddp.process_group.rank() == 0
        self._world_size = ddp.process_group.size()
        self._ledgers.append(ddp._reducer.ledger)
        order = ddp._reducer.ready_order
        if isinstance(order, Tuner):
            order.told = functools.partial(self._write, number)

    def _write(self, number: int, plain: dict[str, Any], choice: Choice) -> None:
        path = numbered(self._out, number)
        plain = plain | {"tuned": str(choice)}
        partial = path.with_name(f"{path.name}.{os.getpid()}")
        partial.write_text(json.dumps(plain, indent=1) + "\n", encoding="utf-8")
        partial.replace(path)  # whoever reads it meanwhile has the old one, whole
        self._written.append(path)
        option = OPTIONS["bucket_layout"]
        use = (
            f"Use it: minidp run {option.word} {self._out} SCRIPT, or the environment "
            f"variable {option.variable}={self._out}, or "
            f"minidp.DataParallel(..., bucket_layout={str(path)!r})."
        )
        if not choice.is_another:
            use = "With this file a run has torch's layout without looking for one."
        say(f"minidp tune: {path}: {choice}. {use}")

    def finish(self) -> int:
        """The exit status, and on rank 0 what is missing."""
        missing = self._num_models - len(self._written)
        if not self._is_rank_0:
            return 0
        if not self._num_models:
            where = " in this process" if self.reached_children else ""
            say_once(
                "minidp tune: the script wrapped no model in minidp.DataParallel or "
                f"torch's DistributedDataParallel{where}, so there is nothing to write."
            )
            return 1
        if missing:
            steps = ", ".join(str(ledger.finalized) for ledger in self._ledgers)
            say(
                f"minidp tune: {missing} of {self._num_models} models found no layout. "
                f"It takes at least 2 ranks (here: {self._world_size}), {NEEDED} "
                f"synchronised steps (here: {steps}), and a comm hook without state, "
                "if any."
            )
            return 1
        return 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="minidp tune", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    add_arguments(parser)
    sys.exit(main(parse(parser)))
