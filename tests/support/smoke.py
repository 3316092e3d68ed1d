"""Run every script of a folder with --smoke, several at a time.

    python -m tests.support.smoke examples      two ranks each, started by torchrun
    python -m tests.support.smoke benchmarks    one process each, which starts its ranks
    python -m tests.support.smoke examples gpt.py

The scripts are found by listing the folder, so that a new one cannot be forgotten.
They run in forks of this process, which has imported torch: a new interpreter needs
seconds of CPU time for that, and torchrun needs one per rank. Two of them are started
as a user would start them (`COLD`).
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
import traceback
import types
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import IO, NoReturn

import torch._dynamo  # optimizers import it, for seconds
import torch.distributed.run

AT_A_TIME = 3
COLD = {"train_digits.py", "scaling.py"}
TORCHRUN = ["--standalone", "--nproc-per-node", "2"]
FORKED = ["--run-path", "--start-method", "fork"]


@dataclass
class Run:
    """A script under way."""

    script: Path
    output: IO[bytes]
    began: float


def main(folder: str, *names: str) -> int:
    """Run scripts, print the output of each when it ends; none begins after a failure.

    Returns the exit status: 1 also if there is no script.
    """
    start = torchrun if folder == "examples" else python
    scripts = [Path(folder, name) for name in names] or sorted(
        Path(folder).glob("*.py")
    )
    waiting, running, done = list(scripts), dict[int, Run](), 0
    failed = False
    while waiting or running:
        while waiting and len(running) < AT_A_TIME:
            output = tempfile.TemporaryFile()  # noqa: SIM115  (lives as long as the run)
            run = Run(waiting.pop(0), output, time.monotonic())
            sys.stdout.flush()
            pid = os.fork()
            if pid == 0:
                become(start, run)
            running[pid] = run
        pid, status = os.wait()
        run = running.pop(pid)
        done += 1
        report(run, f"{done} of {len(scripts)}", status)
        if status != 0:
            waiting, failed = [], True  # those that run go on to their ends
    return int(failed or not scripts)


def become(start: Callable[[Path], object], run: Run) -> NoReturn:
    """Run the script in this process and leave it without Python's own shutdown."""
    os.dup2(run.output.fileno(), 1)
    os.dup2(run.output.fileno(), 2)
    status = 1
    try:
        start(run.script)
        status = 0
    except SystemExit as leaving:
        status = leaving.code if isinstance(leaving.code, int) else bool(leaving.code)
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def torchrun(script: Path) -> None:
    """Run a script on two ranks by torchrun, in this process or (COLD) a new one."""
    if script.name in COLD:
        words = [sys.executable, "-m", "torch.distributed.run", *TORCHRUN]
        os.execv(sys.executable, [*words, str(script), "--smoke"])
    torch.distributed.run.main([*TORCHRUN, *FORKED, str(script), "--smoke"])


def python(script: Path) -> None:
    """Run a script in this process, as if it were a new one."""
    if script.name in COLD:
        os.execv(sys.executable, [sys.executable, str(script), "--smoke"])
    sys.argv, sys.path[0] = [str(script), "--smoke"], str(script.parent.resolve())
    main = types.ModuleType("__main__")
    main.__file__ = str(script)
    # Where pickle looks for what ranks of `multiprocessing` have found in their own.
    sys.modules["__main__"] = sys.modules["__mp_main__"] = main
    exec(compile(script.read_text(), script, "exec"), vars(main))


def report(run: Run, number: str, status: int) -> None:
    """Print how a script ended and all that it printed."""
    seconds = time.monotonic() - run.began
    code = os.waitstatus_to_exitcode(status)
    result = f"FAILED, exit status {code}" if code else "ok"
    print(f"--- {number}: {run.script} --smoke: {result} after {seconds:.0f} s")
    run.output.seek(0)
    print(run.output.read().decode(errors="replace"), flush=True)


if __name__ == "__main__":
    assert torch._dynamo is not None
    sys.exit(main(*sys.argv[1:]))
