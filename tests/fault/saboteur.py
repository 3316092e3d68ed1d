"""Runs a training script, and strikes once: the worker of `tests.fault.chaos`.

    torchrun ... tests/fault/saboteur.py examples/elastic_checkpoint.py --steps 30 ...

The environment variable CHAOS holds a `Plan` as JSON: which rank does what, at which
moment, the how-many-eth time that moment comes, in the first attempt only. MOMENTS is
the table of where each moment is hooked in, DEEDS of what can happen there. The script
itself knows nothing of this.
"""

from __future__ import annotations

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
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import minidp
from minidp import _pipeline, _reducer


@dataclass(frozen=True)
class Plan:
    """What happens in a run."""

    folder: str  # for notes: what was done, and which processes there were
    rank: int = -1  # none: an undisturbed run
    moment: str = ""
    occurrence: int = 1  # the first, second, ... time that the moment comes
    deed: str = ""
    seconds: float = 0.0  # for deeds that wait

    def to_json(self) -> str:
        """For the environment."""
        return json.dumps(asdict(self))


# ------------------------------------------------------------------------------ deeds


def _kill(plan: Plan) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _stop(plan: Plan) -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def _delay(plan: Plan) -> None:
    time.sleep(plan.seconds)


def _stick(plan: Plan) -> None:
    threading.Event().wait()  # like a data loader that never gives the next batch


def _raise(plan: Plan) -> None:
    raise ValueError("sabotage")


def _exit(plan: Plan) -> None:
    os._exit(7)


def _segv(plan: Plan) -> None:
    signal.signal(signal.SIGSEGV, signal.SIG_DFL)
    os.kill(os.getpid(), signal.SIGSEGV)


DEEDS: dict[str, Callable[[Plan], None]] = {
    "kill": _kill,
    "stop": _stop,
    "delay": _delay,
    "stick": _stick,
    "raise": _raise,
    "exit": _exit,
    "segv": _segv,
}

# ---------------------------------------------------------------------------- moments


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


def _is_checkpoint(path: object, *_: object) -> bool:
    return str(path).endswith(".part")


def _is_file(descriptor: int) -> bool:
    return not os.path.isdir(f"/proc/self/fd/{descriptor}")


def moments(script: Any) -> dict[str, Moment]:
    """All moments; ``script`` is the imported training script."""
    wrapper, pipeline = minidp.DataParallel, _pipeline.Pipeline
    return {
        # everything is made; peers wait for this rank in the first collective
        "constructor": Moment((wrapper, "_wire"), "run", after=True),
        # the module has run, nothing is announced yet
        "forward": Moment((wrapper, "_after_module"), "step"),
        "first bucket": Moment((pipeline, "_launch"), "step", lambda _, n: n == 0),
        # the first bucket travels, the second will not
        "between buckets": Moment((pipeline, "_launch"), "step", lambda _, n: n == 1),
        "finalize": Moment((_reducer.Reducer, "_finalize"), "step"),
        "buffer broadcast": Moment((wrapper, "_sync_module_buffers"), "step"),
        "before the save": Moment((script, "write"), "save"),
        # what is written so far is cut to half: a process that dies in the middle
        "in the save": Moment((os, "fsync"), "save", _is_file),
        "before the rename": Moment((os, "replace"), "save", _is_checkpoint),
        "after the save": Moment((script, "write"), "save", after=True),
    }


RARE = {"between buckets": -1, "buffer broadcast": -1}  # not in the first step


def occurrences(moment: Moment, name: str, steps: int, saves: int) -> int:
    """How often a moment comes in an undisturbed run."""
    return {"run": 1, "step": steps, "save": saves}[moment.per] + RARE.get(name, 0)


def arm(plan: Plan, script: Any) -> None:
    """Replace what the moment of the plan is hooked to."""
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
    """Do it, and leave a note that it was done."""
    note = Path(plan.folder, "struck")
    note.write_text(str(time.time()))
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
