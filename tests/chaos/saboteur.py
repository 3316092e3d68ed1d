"""Runs a training script, and strikes once: the worker of `tests.chaos.chaos`.

    torchrun ... tests/chaos/saboteur.py examples/elastic_checkpoint.py --steps 30 ...

The environment variable CHAOS holds a `Plan` as JSON: which rank does what, at which
moment, the how-many-eth time that moment comes, in the first attempt only. MOMENTS is
the table of where each moment is hooked in, DEEDS of what can happen there. The script
itself knows nothing of this.
"""

from __future__ import annotations

import faulthandler
import functools
import importlib.util
import json
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import minidp
from minidp.core import bucket, reducer
from minidp.data_parallel import replication


@dataclass(frozen=True)
class Plan:
    """Which rank does what, when; an environment variable carries it as JSON."""

    folder: str  # for notes: what was done, and which processes there were
    rank: int = -1  # none: an undisturbed run
    moment: str = ""
    occurrence: int = 1  # the first, second, ... time that the moment comes
    deed: str = ""
    seconds: float = 0.0  # for deeds that wait


def _die_of_segv(plan: Plan) -> None:
    signal.signal(signal.SIGSEGV, signal.SIG_DFL)
    os.kill(os.getpid(), signal.SIGSEGV)


def _raise(plan: Plan) -> None:
    raise ValueError("sabotage")


DEEDS: dict[str, Callable[[Plan], object]] = {
    "kill": lambda _: os.kill(os.getpid(), signal.SIGKILL),
    "stop": lambda _: os.kill(os.getpid(), signal.SIGSTOP),
    "delay": lambda plan: time.sleep(plan.seconds),
    "stick": lambda _: threading.Event().wait(),  # as a data loader may
    "raise": _raise,
    "exit": lambda _: os._exit(7),
    "segv": _die_of_segv,
}


@dataclass(frozen=True)
class Moment:
    """A point in training, and how to be called there.

    Args:
        where: object and attribute that is replaced by one that strikes first.
        per: how often it comes: once in a "run", per "step" or per "save" (rank 0).
        when: called with the arguments of the call; whether this one counts.
        after: strike once the call returned.
    """

    where: tuple[Any, str]
    per: str
    when: Callable[..., bool] = lambda *_: True
    after: bool = False


def moments(script: Any) -> dict[str, Moment]:
    """Return all moments by name; ``script`` is the imported training script."""
    wrapper, replicas = minidp.DataParallel, replication.Replication
    launch = (bucket.Bucket, "launch")
    return {
        # everything is made; peers wait for this rank in the first collective
        "constructor": Moment((wrapper, "_wire"), "run", after=True),
        # the module has run, nothing is announced yet
        "forward": Moment((wrapper, "_post_forward"), "step"),
        "first bucket": Moment(launch, "step", lambda b, _: b.plan.number == 0),
        # the first bucket travels, the second will not
        "between buckets": Moment(launch, "step", lambda b, _: b.plan.number == 1),
        "finalize": Moment((reducer.Reducer, "_finalize"), "step"),
        "buffer broadcast": Moment((replicas, "broadcast_buffers"), "step"),
        "before the save": Moment((script, "write"), "save"),
        # what is written so far is cut to half: a process that dies in the middle
        "in the save": Moment(
            (os, "fsync"), "save", lambda fd: not os.path.isdir(f"/proc/self/fd/{fd}")
        ),
        "before the rename": Moment(
            (os, "replace"), "save", lambda path, *_: str(path).endswith(".part")
        ),
        "after the save": Moment((script, "write"), "save", after=True),
    }


RARE = {"between buckets": -1, "buffer broadcast": -1}  # not in the first step


def occurrences(moment: Moment, name: str, steps: int, saves: int) -> int:
    """Return how often a moment comes in an undisturbed run."""
    return {"run": 1, "step": steps, "save": saves}[moment.per] + RARE.get(name, 0)


def arm(plan: Plan, script: Any) -> None:
    """Replace the function of the plan's moment by one that strikes."""
    moment = moments(script)[plan.moment]
    owner, name = moment.where
    original = getattr(owner, name)
    came = 0

    @functools.wraps(original)
    def hooked(*args: Any, **kwargs: Any) -> Any:
        nonlocal came
        counts = moment.when(*args)
        came += counts
        strikes = counts and came == plan.occurrence
        if strikes and not moment.after:
            if plan.moment == "in the save" and plan.deed != "delay":
                os.ftruncate(args[0], os.fstat(args[0]).st_size // 2)
            strike(plan)
        result = original(*args, **kwargs)
        if strikes and moment.after:
            strike(plan)
        return result

    setattr(owner, name, hooked)


def strike(plan: Plan) -> None:
    """Leave a note in the folder of the plan, and do its deed."""
    Path(plan.folder, "struck").touch()
    DEEDS[plan.deed](plan)


def main() -> int:
    """Run the script named by the first argument; return its exit status."""
    path = sys.argv[1]
    sys.argv = sys.argv[1:]
    spec = importlib.util.spec_from_file_location("training_script", path)
    assert spec is not None
    assert spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    plan = Plan(**json.loads(os.environ["CHAOS"]))
    rank, attempt = int(os.environ["RANK"]), os.environ["TORCHELASTIC_RESTART_COUNT"]
    Path(plan.folder, f"worker-{attempt}-{rank}.pid").write_text(str(os.getpid()))
    if rank == plan.rank and attempt == "0":
        arm(plan, script)
    # A worker that hangs where nobody can see it says where, in its log.
    faulthandler.dump_traceback_later(20, repeat=False)
    try:
        return int(script.main())
    except BaseException:
        traceback.print_exc()  # forked workers' launcher would keep it to itself
        sys.stderr.flush()
        raise


if __name__ == "__main__":
    status = main()
    if status:  # run in torchrun's own interpreter, exit(0) counts as no answer
        sys.exit(status)
