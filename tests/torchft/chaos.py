"""Kill replicas at random moments, and compute every committed step again.

python -m tests.torchft.chaos --kills 300                     # ten minutes
python -m tests.torchft.chaos --kills 50 --wrapper torchft    # torchft's own DDP
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import os
import random
import signal
import statistics
import sys
import tempfile
import threading
import time
from pathlib import Path

import torch

from . import replica as worker
from .replica import PLACES, RATE, REPLICAS

KINDS = ("SIGKILL", "SIGSTOP", *PLACES)
STOPPED_SECONDS = 3.0
HANG_SECONDS = 40.0
LIGHTHOUSE = {
    "min_replicas": 1,
    "join_timeout_ms": 1000,
    "quorum_tick_ms": 20,
    "heartbeat_timeout_ms": 600,
}
# Where nobody dies, nobody is to be left out, however late it is beside other programs.
PATIENT = {
    "min_replicas": REPLICAS,
    "join_timeout_ms": 20_000,
    "heartbeat_timeout_ms": 20_000,
}


class Job:
    """Three replicas, each replaced as soon as it ends."""

    def __init__(self, folder, wrapper, *, is_patient=False):
        from torchft._torchft import LighthouseServer

        self.folder, self.wrapper = Path(folder), wrapper
        self.lighthouse = LighthouseServer(
            bind="[::]:0", **(LIGHTHOUSE | PATIENT if is_patient else LIGHTHOUSE)
        )
        self.context = multiprocessing.get_context("forkserver")
        self.context.set_forkserver_preload(["torch", "torchft", "minidp.torchft"])
        self.processes = {}
        self.is_over = False
        self.stopped = set()  # pids
        self.doomed = set()  # pids of those that end soon: killed, or about to raise
        for number in range(REPLICAS):
            self.start(number)
        self.keeper = threading.Thread(target=self.keep)
        self.keeper.start()

    def start(self, number):
        arguments = (number, self.lighthouse.address(), self.folder, self.wrapper)
        self.processes[number] = self.context.Process(
            target=worker.train, args=arguments, daemon=True
        )
        self.processes[number].start()

    def keep(self):
        while not self.is_over:
            for number, process in list(self.processes.items()):
                if not self.is_over and process.exitcode:
                    self.start(number)
            time.sleep(0.02)

    def logs(self):
        notes = []
        for path in self.folder.glob("log.*"):
            lines = path.read_text().split("\n")[:-1]  # the last may be half a line
            notes.extend(json.loads(line) for line in lines)
        return notes

    def up_to_date(self):
        """Replicas that run, and have committed a step in the last half second."""
        found = []
        for number, process in self.processes.items():
            path = self.folder / f"log.{number}.{process.pid}"
            hurt = self.stopped | self.doomed
            is_up = process.exitcode is None and process.pid not in hurt
            with_steps = path.exists() and path.stat().st_size
            if is_up and with_steps and time.time() - path.stat().st_mtime < 0.5:
                found.append(number)
        return found

    def hurt(self, kind, number):
        pid = self.processes[number].pid
        if kind == "SIGKILL":
            self.doomed.add(pid)  # it may look alive for some milliseconds more
            os.kill(pid, signal.SIGKILL)
        elif kind == "SIGSTOP":
            os.kill(pid, signal.SIGSTOP)
            self.stopped.add(pid)
            threading.Timer(STOPPED_SECONDS, self.wake, (pid,)).start()
        else:
            self.doomed.add(pid)
            part = self.folder / f"{pid}.part"
            part.write_text(kind)
            part.rename(self.folder / f"{pid}.raise")

    def wake(self, pid):
        self.stopped.discard(pid)
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)

    def end(self, last=None):
        """Let all replicas train up to the same step; return False if one hangs.

        First let those come back that were hurt: alone they would begin anew.
        """
        since = time.time()
        while not last and len(self.up_to_date()) < REPLICAS:
            if time.time() - since > HANG_SECONDS:
                break
            time.sleep(0.01)
        part = self.folder / "part"
        part.write_text(str(last or max(note["step"] for note in self.logs()) + 30))
        part.rename(self.folder / "stop")
        deadline = time.time() + HANG_SECONDS
        while time.time() < deadline:
            hung = [p for p in self.processes.values() if p.exitcode is None]
            if not hung:
                break
            time.sleep(0.02)
        self.is_over = True
        self.keeper.join()
        for process in hung:
            process.kill()
        self.lighthouse.shutdown()
        return not hung


def play(kills, wrapper, seed=0, kinds=KINDS, until=None):
    """Return what all replicas noted, the kills, and what went wrong."""
    chance, wrong, done = random.Random(seed), [], []
    with tempfile.TemporaryDirectory(prefix="mdp-") as folder:
        job = Job(folder, wrapper, is_patient=not kills)
        while len(done) < kills:
            since = time.time()
            while len(ready := job.up_to_date()) < 2:
                if time.time() - since > HANG_SECONDS:
                    wrong.append("a hang: no two replicas commit steps")
                    break
                time.sleep(0.01)
            if wrong:
                break
            time.sleep(chance.uniform(0.2, 1.0))
            if len(ready := job.up_to_date()) < 2:
                continue
            kind, victim = chance.choice(kinds), chance.choice(ready)
            done.append((time.time(), kind, victim))
            job.hurt(kind, victim)
        if not job.end(until):
            wrong.append("a replica did not end")
        notes = job.logs()
    return notes, done, wrong + check(notes)


def check(notes):
    """Compute every committed step again; return what is wrong, as texts."""
    wrong, net = [], worker.first_net()
    states = {(0, worker.digest(net)): worker.flat(net)}  # of the reference
    parents = {}
    for note in sorted(notes, key=lambda note: (note["step"], note["time"])):
        step, weights = note["step"], note["who"]
        before, after = (step, note["before"]), (step + 1, note["after"])
        if before not in states:
            wrong.append(f"step {step}: replica {note['replica']} had other parameters")
            continue
        positive = [w for w in weights if w]
        if max(abs(w * len(positive) - 1) for w in positive) > 1e-12:
            wrong.append(f"step {step}: divided by another number: {weights}")
        if after not in states:
            states[after] = reference(net, states[before], weights, step)
            parents[after] = weights
        elif parents[after] != weights:
            wrong.append(f"step {step}: {weights} and {parents[after]}: equal results")
        error = (
            (states[after][::97] - torch.tensor(note["params"], dtype=torch.float64))
            .abs()
            .max()
        )
        if error > 1e-9:
            wrong.append(f"step {step}: off by {error:.1e} from the reference")
    # A quorum may have left out a replica that lives, which went on by itself. When
    # they meet, one of their states is dropped, at the latest here.
    last = max((step for step, _ in states), default=0)
    if len([state for state in states if state[0] == last]) > 1:
        wrong.append(f"step {last}: replicas have ended with different states")
    return wrong


def reference(net, before, weights, step):
    torch.nn.utils.vector_to_parameters(before, worker.trained(net))
    total = torch.zeros_like(before)
    for number, weight in enumerate(weights):
        if weight:
            net.zero_grad()
            x = worker.batch(number, step)
            net(x, worker.one_hot(number)).backward()
            grads = [param.grad.flatten() for param in worker.trained(net)]
            total += weight * torch.cat(grads)
    return before - RATE * total


def delays(notes, kills):
    """Seconds from each kill to the first step committed by others without the victim.

    Or to one that began after the kill: the victim may be back by then.
    """
    found = {}
    for when, kind, victim in kills:
        later = [
            note["time"] - when
            for note in notes
            if note["time"] > when
            and note["replica"] != victim
            and (note["began"] > when or not note["who"][victim])
        ]
        if later:
            found.setdefault(kind, []).append(min(later))
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    wrappers = "minidp", "torchft"
    parser.add_argument("--wrapper", choices=wrappers, default="minidp")
    parser.add_argument("--out", help="a file for all notes, if a step was wrong")
    parser.add_argument("--kinds", nargs="*", default=KINDS)
    options = parser.parse_args()
    os.environ.setdefault("RUST_LOG", "error")  # else torchft tells all it does
    began = time.time()
    notes, kills, wrong = play(
        options.kills, options.wrapper, options.seed, options.kinds
    )
    steps = {(note["step"], note["after"]) for note in notes}
    print(
        f"{options.wrapper}: {len(kills)} kills in {time.time() - began:.0f} s, "
        f"{len(steps)} committed steps, {len(notes)} compared; {len(wrong)} wrong"
    )
    for text in wrong[:20]:
        print("  ", text)
    if wrong and options.out:
        Path(options.out).write_text(json.dumps({"notes": notes, "kills": kills}))
    found = delays(notes, kills)
    print("seconds from the kill to the survivors' next committed step:")
    found["all"] = [s for each in found.values() for s in each]
    for kind, seconds in found.items() if found["all"] else ():
        median = statistics.median(seconds)
        print(
            f"  {kind:10} {len(seconds):4}  median {median:.3f}  max {max(seconds):.3f}"
        )
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
