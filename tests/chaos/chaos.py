"""Chaos on real processes: a rank is struck at a random moment, torchrun restarts.

    python -m tests.chaos.chaos --runs 200 --seed 0

Each run starts `torchrun --max-restarts 2` on `examples/elastic_checkpoint.py`, by way
of `tests/chaos/saboteur.py`, which has the tables of deeds and moments. Run number n of
a seed is always the same; every 70 runs in a row have each deed at each moment once.

What is asked of a run:

* it ends by itself within the limit, with exit status 0, and leaves no process behind;
* the last digest of the weights is that of the undisturbed run of as many ranks;
* a rank that is late, but within the limit for hangs, disturbs nobody: no restart;
* after any other deed there is exactly one restart, and the right rank is named:

    kill, exit, segv   by torchrun (exit status and rank), which ends the peers as soon
                       as it sees that; or by a peer that was quicker
    raise              by its own traceback, in its own log
    stop, stick        by a peer: nobody else can know. Every peer that says who is
                       missing names it (and perhaps others, which wait for it, too:
                       "peer+")

A run takes a second or two, because agent and workers are forked from this process,
which has imported torch. Those that are "cold" (every 25th) are started as a user
would, with ``python -m torch.distributed.run``. After a stop torchrun waits 30 s for
the stopped worker to obey SIGTERM before it kills it; other runs go on meanwhile.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import re
import shutil
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from tests.chaos.saboteur import DEEDS, Plan, moments, occurrences

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "elastic_checkpoint.py"
SABOTEUR = Path(__file__).with_name("saboteur.py")
STEPS, EVERY = 24, 6
HANG_TIMEOUT = 5.0
SAVES = STEPS // EVERY
WORLD_SIZES = (2, 2, 2, 2, 3, 3, 4)  # drawn from
EXIT_CODES = {"kill": -9, "exit": 7, "segv": -11, "raise": 1}
SILENT = {"stop", "stick"}  # the process lives: only its peers can tell
# How an error says which rank is missing.
NAMES = (
    re.compile(r"Missing: rank ([\d, ]+)\."),  # minidp's
    re.compile(r"Rank (\d+) failed to pass monitoredBarrier"),
    re.compile(r"errors while waiting for send/recv from rank (\d+)"),
)


@dataclass(frozen=True)
class Trial:
    """One run, as drawn."""

    number: int
    ranks: int
    plan: Plan
    is_cold: bool
    hang_timeout: float = HANG_TIMEOUT

    @property
    def limit(self) -> float:
        """Seconds after which the run should have ended long ago."""
        slow = 240 * self.is_cold + 30 * (self.plan.deed == "stop")
        return 180 + self.hang_timeout + slow

    def command(self, folder: Path) -> list[str]:
        """Return the arguments of torchrun."""
        started = [] if self.is_cold else ["--run-path", "--start-method", "fork"]
        return [
            *("--standalone", "--max-restarts", "2", "--redirects", "3"),
            *("--nproc-per-node", str(self.ranks), "--log-dir", str(folder / "logs")),
            *started,
            *(str(SABOTEUR), str(EXAMPLE), "--directory", str(folder / "checkpoints")),
            *("--steps", str(STEPS), "--every", str(EVERY)),
            *("--hang-timeout", str(self.hang_timeout)),
        ]


def draw(seed: int, number: int, cold_every: int) -> Trial:
    """Draw the trial of a number: the same for the same seed."""
    table = moments(None)
    cells = [(moment, deed) for moment in table for deed in DEEDS]
    random.Random(f"{seed}, {number // len(cells)}").shuffle(cells)
    moment, deed = cells[number % len(cells)]
    rng = random.Random(f"{seed}, run {number}")
    is_cold = cold_every > 0 and number % cold_every == 0
    ranks = 2 if is_cold else rng.choice(WORLD_SIZES)
    times = occurrences(table[moment], moment, STEPS, SAVES)
    plan = Plan(
        folder="",
        rank=0 if table[moment].per == "save" else rng.randrange(ranks),
        moment=moment,
        occurrence=rng.randint(1, times),
        deed=deed,
        seconds=round(rng.uniform(0.1, 0.5) * HANG_TIMEOUT, 2),
    )
    return Trial(number, ranks, plan, is_cold)


# -------------------------------------------------------------------------- one run


@dataclass
class Run:
    """A trial under way, and what came of it."""

    trial: Trial
    folder: Path
    pid: int
    began: float
    seconds: float = 0.0
    named_by: str = ""
    complaints: list[str] = field(default_factory=list)

    @classmethod
    def start(cls, trial: Trial) -> Run:
        """Start torchrun in a session of its own."""
        folder = Path(tempfile.mkdtemp(prefix=f"chaos-{trial.number}-"))
        plan = replace(trial.plan, folder=str(folder))
        command, began = trial.command(folder), time.monotonic()
        with (folder / "torchrun.log").open("wb") as log:
            pid = os.fork()
            if pid == 0:
                _become_torchrun(command, plan, log.fileno(), is_cold=trial.is_cold)
        return cls(trial, folder, pid, began)

    def __str__(self) -> str:
        """Return one line of the table."""
        trial, plan = self.trial, self.trial.plan
        return (
            f"{trial.number:4}  {trial.ranks} ranks  {plan.deed:6}"
            f" rank {plan.rank} at {plan.moment:16} #{plan.occurrence:<3}"
            f"{'cold' if trial.is_cold else '    '} {self.seconds:5.1f} s"
            f"  {self.named_by or '-':14} {'; '.join(self.complaints) or 'ok'}"
        )

    @property
    def digest(self) -> str:
        """The last digest that rank 0 printed, in whichever attempt; empty if none."""
        printed = "".join(self._read(f"attempt_{n}/0/stdout.log") for n in range(3))
        found = re.findall(r"digest after step \d+: (\w+)", printed)
        return found[-1] if found else ""

    def poll(self) -> int | None:
        """Return the exit status of torchrun; None while it runs."""
        pid, status = os.waitpid(self.pid, os.WNOHANG)
        return os.waitstatus_to_exitcode(status) if pid else None

    def abandon(self) -> None:
        """Kill torchrun, not its workers: `left_behind` does that."""
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)

    def left_behind(self) -> list[int]:
        """Kill the workers that still run; return their process ids."""
        found = []
        for note in self.folder.glob("worker-*.pid"):
            pid = int(note.read_text() or "0")
            if pid and _is_ours(pid, self.folder):
                found.append(pid)
                os.kill(pid, signal.SIGKILL)
        return found

    def errors(self, rank: int, attempt: int = 0) -> str:
        """Return what a rank wrote to stderr in an attempt."""
        return self._read(f"attempt_{attempt}/{rank}/stderr.log")

    def attempts(self) -> int:
        """Return how often torchrun started the workers."""
        return len(list(self.folder.glob("logs/*/attempt_*")))

    def _read(self, name: str) -> str:
        found = list(self.folder.glob(f"logs/*/{name}"))
        return found[0].read_text(errors="replace") if found else ""


def _become_torchrun(
    command: Sequence[str], plan: Plan, log: int, *, is_cold: bool
) -> None:
    """Turn this forked process into torchrun; never returns."""
    try:
        os.setsid()
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.environ["CHAOS"] = json.dumps(asdict(plan))
        if is_cold:
            module = "torch.distributed.run"
            os.execv(sys.executable, [sys.executable, "-m", module, *command])
        import torch.distributed.run

        torch.distributed.run.main(list(command))
        os._exit(0)
    except BaseException as error:
        os.write(2, f"{type(error).__name__}: {error}\n".encode())
    os._exit(1)


def _is_ours(pid: int, folder: Path) -> bool:
    """Whether a process is a worker of the run in ``folder``, and not a zombie."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
        descriptors = os.listdir(f"/proc/{pid}/fd")
        targets = [os.readlink(f"/proc/{pid}/fd/{fd}") for fd in descriptors]
    except OSError:
        return False  # it has gone
    return status.rpartition(")")[2].split()[0] != "Z" and any(
        target.startswith(str(folder)) for target in targets
    )


# --------------------------------------------------------------------------- the judge


def judge(run: Run, status: int | None, digest: str) -> None:
    """Set the complaints of a run; status None: it did not end in time."""
    trial, plan = run.trial, run.trial.plan
    left, found = run.left_behind(), run.digest
    attempts = 1 if plan.deed == "delay" else 2
    wrong = {
        f"did not end within {trial.limit:.0f} s": status is None,
        f"torchrun ended with status {status}": status,
        f"left processes {left}": left,
        "the saboteur never struck": not (run.folder / "struck").exists(),
        f"digest {found[:8] or 'missing'}, undisturbed {digest[:8]}": found != digest,
        f"{run.attempts()} attempts instead of {attempts}": run.attempts() != attempts,
    }
    run.complaints = [text for text, is_so in wrong.items() if is_so]
    if plan.deed != "delay":
        _judge_names(run)


def _judge_names(run: Run) -> None:
    plan, say = run.trial.plan, run.complaints.append
    log = (run.folder / "torchrun.log").read_text(errors="replace")
    code = EXIT_CODES.get(plan.deed)
    peers = [rank for rank in range(run.trial.ranks) if rank != plan.rank]
    named = {rank: named_in(run.errors(rank)) for rank in peers}
    right = [rank for rank in peers if plan.rank in named[rank]]
    by_itself = "ValueError: sabotage" in run.errors(plan.rank)
    only = "" if all(named[rank] == {plan.rank} for rank in right) else "+"
    witnesses = {
        "torchrun": f"(exitcode: {code}) local_rank: {plan.rank} " in log,
        "itself": by_itself,
        f"peer{only}": bool(right),
    }
    run.named_by = ", ".join(who for who, spoke in witnesses.items() if spoke)
    if not run.named_by:
        say(f"nobody names rank {plan.rank}")
    if plan.deed == "raise" and not by_itself:
        say("its own log does not say what it raised")
    wrong = {rank: named[rank] for rank in peers if named[rank] and rank not in right}
    if plan.deed in SILENT and wrong:
        say(f"peers name only others: {wrong}")


def named_in(text: str) -> set[int]:
    """Return the ranks that errors in ``text`` call missing."""
    return {
        int(rank)
        for pattern in NAMES
        for match in pattern.finditer(text)
        for rank in re.findall(r"\d+", match[1])
    }


# -------------------------------------------------------------------------- many runs


def conduct(trials: Sequence[Trial], jobs: int) -> Iterator[tuple[Run, int | None]]:
    """Run trials, ``jobs`` at a time; yield each with its exit status (None: late)."""
    live: list[Run] = []
    waiting = list(trials)
    try:
        while live or waiting:
            while waiting and len(live) < jobs:
                live.append(Run.start(waiting.pop(0)))
            for run in list(live):
                run.seconds = time.monotonic() - run.began
                status = run.poll()
                if status is None and run.seconds < run.trial.limit:
                    continue
                live.remove(run)
                if status is None:
                    run.abandon()
                yield run, status
                run.left_behind()
                shutil.rmtree(run.folder)
            time.sleep(0.02)  # no event covers several children that may also be late
    finally:  # also of an interrupt
        for run in live:
            run.abandon()
            run.left_behind()
            shutil.rmtree(run.folder)


def summary(runs: Sequence[Run]) -> str:
    """Return a table of counts by deed, moment, number of ranks and witness."""
    lines = [f"\n{'':18} runs  failed  median s  longest s"]
    for key in (
        lambda run: run.trial.plan.deed,
        lambda run: run.trial.plan.moment,
        lambda run: f"{run.trial.ranks} ranks",
        lambda run: f"named by {run.named_by or '-'}",
    ):
        for name, group in itertools.groupby(sorted(runs, key=key), key):
            members = list(group)
            failed = sum(bool(run.complaints) for run in members)
            seconds = [run.seconds for run in members]
            lines.append(
                f"{name:18} {len(members):4}  {failed:6}"
                f"  {statistics.median(seconds):8.1f}  {max(seconds):9.1f}"
            )
    failures = sum(bool(run.complaints) for run in runs)
    return "\n".join([*lines, f"{len(runs)} runs, {failures} failed"])


def main() -> int:
    """Run trials and print them; return 1 if there is a complaint, else 0."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.chaos.chaos", description=(__doc__ or "").splitlines()[0]
    )
    add = parser.add_argument
    add("--runs", type=int, default=200, help="how many (default 200)")
    add("--seed", type=int, default=0, help="what is drawn (default 0)")
    add("--jobs", type=int, default=2, help="runs at a time (default 2)")
    add("--cold-every", type=int, default=25, help="0: no cold runs (default 25)")
    add(
        "--hang-timeout",
        type=float,
        default=HANG_TIMEOUT,
        metavar="SECONDS",
        help=f"of the ranks that are struck (default {HANG_TIMEOUT:g})",
    )
    add("--keep", type=Path, help="folder for the logs of runs that failed")
    args = parser.parse_args()

    import torch._dynamo  # so that forked workers need not; optimizers import it

    assert torch._dynamo is not None
    limit = args.hang_timeout
    drawn = [draw(args.seed, n, args.cold_every) for n in range(args.runs)]
    trials = [replace(trial, hang_timeout=limit) for trial in drawn]
    sizes = sorted({trial.ranks for trial in trials})
    undisturbed = [
        Trial(-1, n, Plan(""), is_cold=False, hang_timeout=30.0) for n in sizes
    ]
    digests, runs = {}, []
    for run, _ in conduct(undisturbed, args.jobs):
        ranks = run.trial.ranks
        digests[ranks] = run.digest
        print(f"undisturbed, {ranks} ranks: {run.digest}", flush=True)
        assert run.digest, [run.errors(rank) for rank in range(ranks)]
    for run, status in conduct(trials, args.jobs):
        judge(run, status, digests[run.trial.ranks])
        if run.complaints and args.keep is not None:
            shutil.copytree(run.folder, args.keep / run.folder.name)
        print(run, flush=True)
        runs.append(run)
    print(summary(runs))
    return 1 if any(run.complaints for run in runs) else 0


if __name__ == "__main__":
    sys.exit(main())
