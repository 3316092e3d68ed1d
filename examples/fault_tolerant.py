r"""Three replicas train on this machine. Kill some: the others go on.

    python examples/fault_tolerant.py

Needs the extra: pip install '.[torchft]'. Type the number of a replica and Enter,
and the replica is killed (or: kill -9 its pid, which is printed). After a moment it is
started again and catches up: another one sends it parameters, optimizer, bucket layout.
`q` ends the training.

Each step's line says which replicas are in its quorum. torchft finds out who is there:
by a lighthouse, one for the whole job, and a manager in each replica. One replica alone
waits until another one is back.
"""

import argparse
import hashlib
import json
import os
import select
import signal
import subprocess
import sys
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

os.environ.setdefault("RUST_LOG", "error")  # else torchft tells all it does
os.environ.setdefault("OMP_NUM_THREADS", "1")
try:
    import torchft
    from torchft.coordination import LighthouseServer

    from minidp.torchft import DataParallel
except ImportError as error:
    print(f"This example needs the extra minidp[torchft]: {error}")
    sys.exit(0 if "--smoke" in sys.argv else 1)

REPLICAS = 3
BACK_AFTER = 2.0  # seconds until a replica that ended is started again
SILENCE = 5.0  # seconds without a step until the first process says so
PATIENCE = timedelta(seconds=20)  # for replicas that are there, but do not answer

# ------------------------------------------------------------------------- one replica


def batch(replica: int, step: int) -> torch.Tensor:
    """Return a replica's inputs of a step."""
    generator = torch.Generator().manual_seed(1000 * step + replica)
    return torch.randn(32, 64, generator=generator)


def train(replica: int, lighthouse: str, steps: int, pause: float) -> None:
    """Train until ``steps`` steps are committed; print a line of JSON for each."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the first process
    torch.manual_seed(replica)  # the first one's parameters go to the others
    net = nn.Sequential(nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 1))
    inner = torch.optim.AdamW(net.parameters(), lr=1e-3)

    def save() -> dict[str, Any]:
        return {"net": net.state_dict(), "optimizer": inner.state_dict()}

    def load(state: dict[str, Any]) -> None:
        net.load_state_dict(state["net"])
        inner.load_state_dict(state["optimizer"])

    # Each replica has a store of its own: here it is one process, it may be many.
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    manager = torchft.Manager(
        pg=torchft.ProcessGroupGloo(timeout=PATIENCE),
        load_state_dict=load,
        state_dict=save,
        min_replica_size=1,
        replica_id=f"replica_{replica}",
        store_addr="localhost",
        store_port=store.port,
        rank=0,
        world_size=1,
        lighthouse_addr=lighthouse,
        timeout=PATIENCE,
    )
    model = DataParallel(manager, net)
    optimizer = torchft.Optimizer(manager, inner)
    while manager.current_step() < steps:
        step = manager.current_step()
        optimizer.zero_grad()  # starts to look for a quorum
        x = batch(replica, step)
        loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
        loss.backward()  # averages over the replicas in the quorum
        optimizer.step()  # if the manager commits the step
        if manager.current_step() > step:
            weights = torch.cat(
                [param.detach().flatten() for param in net.parameters()]
            )
            note = {
                "step": manager.current_step(),
                "replica": replica,
                "in quorum": model.participants,
                "catches up": not manager.is_participating(),
                "loss": loss.item(),
                "digest": hashlib.sha256(weights.numpy().tobytes()).hexdigest()[:8],
            }
            print(json.dumps(note), flush=True)
        time.sleep(pause)
    manager.shutdown(wait=False)
    os._exit(0)  # the store may serve no longer than the others need


# --------------------------------------------------------------------- the whole job


class Job:
    """Start replicas, again when they end; print what they report."""

    def __init__(self, steps: int, pause: float, *, verbose: bool) -> None:
        self.lighthouse = LighthouseServer(
            bind="[::]:0",
            min_replicas=2,  # one alone waits for another
            join_timeout_ms=1000,  # longer than the longest pause between two steps
            heartbeat_timeout_ms=600,  # a silent replica is dead after that
            quorum_tick_ms=20,
        )
        self.words = [str(steps), str(pause)]
        self.errors = None if verbose else subprocess.DEVNULL
        self.processes: dict[int, subprocess.Popen[str]] = {}
        self.back_at: dict[int, float] = {}
        self.digests: dict[int, set[str]] = {}
        self.printed = 0  # the last step
        self.quiet_since = self.told = time.monotonic()  # no step; and that was said
        self.ended: set[int] = set()  # replicas that have trained all steps
        for replica in range(REPLICAS):
            self.start(replica)

    def start(self, replica: int) -> None:
        """Start a replica in a process of its own."""
        words = ["--replica", str(replica), self.lighthouse.address(), *self.words]
        self.processes[replica] = process = subprocess.Popen(
            [sys.executable, __file__, *words],
            stdout=subprocess.PIPE,
            stderr=self.errors,
            text=True,
        )
        print(f"replica {replica} starts, pid {process.pid}")

    def kill(self, replica: int) -> None:
        """Kill a replica, as a machine that fails would."""
        if replica in self.processes:
            print(f"replica {replica} is killed")
            self.processes[replica].send_signal(signal.SIGKILL)
        else:
            print(f"replica {replica} does not run now")

    def obey(self, keys: str) -> bool:
        """Kill the replicas whose numbers were typed; return False after `q`."""
        for key in keys.split():
            if key in map(str, range(REPLICAS)):
                self.kill(int(key))
            elif key != "q":
                print(f"type 0 to {REPLICAS - 1} and Enter to kill a replica, q to end")
        return "q" not in keys.split()

    def end(self) -> None:
        """Kill the replicas that still run, also if Ctrl-C comes twice."""
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        for process in self.processes.values():
            process.kill()

    def watch(self) -> None:
        """Print new steps; start again what ended too early."""
        outputs = {p.stdout: r for r, p in self.processes.items()}
        for output in select.select(list(outputs), [], [], 0.1)[0]:
            line = output.readline()
            if line.startswith("{"):
                self.note(json.loads(line))
            elif not line:
                self.buried(outputs[output])
        if (now := time.monotonic()) > self.told + SILENCE:
            who = ", ".join(map(str, self.processes)) or "none"
            seconds = now - self.quiet_since
            print(f"no step for {seconds:.0f} s; replicas that run or start: {who}")
            self.told = now
        for replica, when in list(self.back_at.items()):
            if time.monotonic() > when:
                del self.back_at[replica]
                self.start(replica)

    def buried(self, replica: int) -> None:
        """Note that a replica's process has ended."""
        process = self.processes.pop(replica)
        if process.wait() == 0:
            self.ended.add(replica)
            return
        print(f"replica {replica} has ended (status {process.returncode})")
        if len(self.processes) == 1:
            print("one replica is left: it waits until another one is back")
        self.back_at[replica] = time.monotonic() + BACK_AFTER

    def note(self, found: dict[str, Any]) -> None:
        """Print a step when the first replica reports it."""
        self.quiet_since = self.told = time.monotonic()
        step = found["step"]
        self.digests.setdefault(step, set()).add(found["digest"])
        if found["catches up"]:
            print(f"replica {found['replica']} has joined, and is at step {step}")
        elif step > self.printed:
            self.printed = step
            who = ", ".join(map(str, found["in quorum"]))
            print(f"step {step:4}  loss {found['loss']:8.4f}  in quorum: {who}")


def main() -> None:
    """Parse arguments, start the job, read keys."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--pause", type=float, default=0.2, help="seconds in each step")
    parser.add_argument("--smoke", action="store_true", help="kill one, check, end")
    parser.add_argument("--verbose", action="store_true", help="what torchft says, too")
    parser.add_argument("--replica", nargs=4, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.replica:
        number, lighthouse, steps, pause = args.replica
        train(int(number), lighthouse, int(steps), float(pause))
        return
    if os.environ.get("RANK", "0") != "0":  # torchrun has started more than one of us
        return
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C
    print(
        f"Type 0 to {REPLICAS - 1} and Enter to kill a replica (or kill -9 its pid), q"
    )
    print("to end. Replicas take some ten seconds to start.")
    job = Job(80 if args.smoke else args.steps, args.pause, verbose=args.verbose)
    try:
        is_whole = run(job, is_test=args.smoke)
    except KeyboardInterrupt:
        is_whole = False
    finally:
        job.end()
    if not is_whole:
        print("ended before the last step")
    equal = all(len(found) == 1 for found in job.digests.values())
    if not job.digests:
        print("no step was committed: nothing is compared")
    else:
        text = f"replicas equal after each of {len(job.digests)} steps"
        print(f"{text}: {'yes' if equal else 'NO'}")
    sys.exit(not equal)


def run(job: Job, *, is_test: bool) -> bool:
    """Obey keys until all steps are trained (True) or `q` is typed (False)."""
    victim = 1 if is_test else None
    keys = [] if is_test or sys.stdin is None else [sys.stdin]
    while len(job.ended) < 2:  # a third one may be on its way, and needs another
        job.watch()
        if victim is not None and job.printed >= 10:
            job.kill(victim)
            victim = None
        for source in select.select(keys, [], [], 0)[0]:
            typed = os.read(source.fileno(), 1024)
            if not typed:
                keys = []  # the input has ended
            elif not job.obey(typed.decode(errors="replace")):
                return False
    return True


if __name__ == "__main__":
    main()
