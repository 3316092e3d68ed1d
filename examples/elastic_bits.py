r"""Replicas are killed and come back, and not one bit of the training changes.

    python examples/elastic_bits.py

Needs the extra: pip install '.[torchft]'. Three processes train a small net with
dropout and batch norm on six logical ranks. One is killed in the middle of a step, and
when it is back, two at once. Whoever is left takes over the logical ranks of the dead,
in the very step in which they died. Before that, one process trains the same net alone,
and the digests of both after each step are compared.
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
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import mse_loss

os.environ.setdefault("RUST_LOG", "error")  # else torchft tells all it does
os.environ.setdefault("OMP_NUM_THREADS", "1")  # the number of threads changes bits
try:
    import torchft
    from torchft.coordination import LighthouseServer

    import minidp
    import minidp.torchft
except ImportError as error:
    print(f"This example needs the extra minidp[torchft]: {error}")
    sys.exit(0 if "--smoke" in sys.argv else 1)

LOGICAL_RANKS = 6
REPLICAS = 3
KILLS = [{1}, {0, 2}]  # who is killed at once, each time when all have come back
TURN = 0.03  # seconds that a turn takes longer, so that a kill comes in its step
BACK_AFTER = 1.0  # seconds until a replica that ended is started again
PATIENCE = timedelta(seconds=20)  # for replicas that are there, but do not answer


def make() -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return a net with parameters, buffers and dropout, and its optimizer."""
    torch.manual_seed(0)
    net = nn.Sequential(
        *(nn.Linear(32, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Dropout(0.2)),
        nn.Linear(64, 1),
    )
    return net, torch.optim.AdamW(net.parameters(), lr=1e-2)


def batch_of(step: int, leaf: int) -> tuple[Tensor, Tensor]:
    """Return the samples of a logical rank in a step, whichever process asks."""
    drawn = torch.Generator().manual_seed(1000 * step + leaf)
    x = torch.randn(16, 32, generator=drawn)
    return x, x.square().sum(1, keepdim=True)


def digest_of(net: nn.Module, optimizer: torch.optim.Optimizer) -> str:
    """Return a digest of parameters, buffers and the optimizer's state."""
    states = [each for state in optimizer.state.values() for each in state.values()]
    tensors = [*net.state_dict().values(), *states]
    everything = b"".join(each.numpy().tobytes() for each in tensors)
    return hashlib.sha256(everything).hexdigest()[:12]


def train_alone(steps: int) -> list[str]:
    """Train in this process; return the digest after each step."""
    store = dist.HashStore()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    net, optimizer = make()
    model = minidp.DataParallel(net, logical_ranks=LOGICAL_RANKS)
    digests = []
    for step in range(steps):
        for leaf in model.each_logical_rank():
            x, y = batch_of(step, leaf)
            mse_loss(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
        digests.append(digest_of(net, optimizer))
    dist.destroy_process_group()
    return digests


def train_replica(replica: int, lighthouse: str, steps: int) -> None:
    """Train until ``steps`` steps are committed; print a line of JSON for each."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the first process
    torch.set_num_threads(1)
    net, inner = make()

    def load(state: dict[str, Any]) -> None:
        net.load_state_dict(state["net"])
        inner.load_state_dict(state["optimizer"])

    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    manager = torchft.Manager(
        pg=torchft.ProcessGroupGloo(timeout=PATIENCE),
        load_state_dict=load,
        state_dict=lambda: {"net": net.state_dict(), "optimizer": inner.state_dict()},
        min_replica_size=1,
        replica_id=f"replica_{replica}",
        store_addr="localhost",
        store_port=store.port,
        rank=0,
        world_size=1,
        lighthouse_addr=lighthouse,
        timeout=PATIENCE,
    )
    model = minidp.torchft.DataParallel(manager, net, logical_ranks=LOGICAL_RANKS)
    optimizer = torchft.Optimizer(manager, inner)
    say(replica, kind="ready")
    sys.stdin.readline()  # the first ones begin together
    while manager.current_step() < steps:
        step = manager.current_step()
        optimizer.zero_grad()  # starts to look for a quorum
        turns = []
        for leaf in model.each_logical_rank():
            x, y = batch_of(manager.current_step(), leaf)
            mse_loss(model(x), y).backward()
            turns.append(leaf)
            say(replica, kind="turn", step=step)
            time.sleep(TURN)
        optimizer.step()  # if the manager commits the step
        if manager.current_step() > step and manager.is_participating():
            digest = digest_of(net, inner)
            say(replica, kind="step", step=step, turns=turns, digest=digest)
    manager.shutdown(wait=False)
    os._exit(0)  # the store may serve no longer than the others need


def say(replica: int, **found: Any) -> None:
    """Print a line for the process that has started this one."""
    print(json.dumps({"replica": replica} | found), flush=True)


class Job:
    """Start replicas, kill them, start them again, and collect what they say."""

    def __init__(self, steps: int, kills: list[set[int]], *, verbose: bool) -> None:
        self.lighthouse = LighthouseServer(
            bind="[::]:0",
            min_replicas=1,
            join_timeout_ms=3000,  # longer than the longest pause between two steps
            heartbeat_timeout_ms=600,  # a silent replica is dead after that
            quorum_tick_ms=20,
        )
        self.steps, self.kills = steps, [set(each) for each in kills]
        self.errors = None if verbose else subprocess.DEVNULL
        self.processes: dict[int, subprocess.Popen[str]] = {}
        self.back_at: dict[int, float] = {}
        self.digests: dict[int, set[str]] = {}
        self.lines: dict[int, dict[int, str]] = {}  # by step and replica
        self.num_together = 0  # steps that all have made together since a kill
        self.num_killed = 0
        self.ready: set[int] = set()
        self.ended: set[int] = set()
        for replica in range(REPLICAS):
            self.start(replica)

    def start(self, replica: int) -> None:
        """Start a replica in a process of its own."""
        words = [str(replica), self.lighthouse.address(), str(self.steps)]
        self.processes[replica] = subprocess.Popen(
            [sys.executable, str(Path(__file__)), "--replica", *words],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.errors,
            text=True,
        )

    def watch(self) -> None:
        """Read a line of each replica that says something; start again who died."""
        outputs: dict[Any, int]
        outputs = {each.stdout: number for number, each in self.processes.items()}
        for output in select.select(list(outputs), [], [], 0.1)[0]:
            line = output.readline()
            if line.startswith("{"):
                self.note(json.loads(line))
            elif not line:
                self.bury(outputs[output])
        for replica, when in list(self.back_at.items()):
            if time.monotonic() > when:
                del self.back_at[replica]
                print(f"                        replica {replica} starts again")
                self.start(replica)

    def bury(self, replica: int) -> None:
        """Note that a replica's process has ended."""
        if self.processes.pop(replica).wait() == 0:
            self.ended.add(replica)
        else:
            self.back_at[replica] = time.monotonic() + BACK_AFTER

    def note(self, found: dict[str, Any]) -> None:
        """Note what a replica says, and kill replicas in the middle of a step."""
        replica = found["replica"]
        if found["kind"] == "ready":
            self.ready.add(replica)
            if len(self.ready) == REPLICAS:
                for process in self.processes.values():
                    assert process.stdin is not None
                    process.stdin.close()  # which ends the wait for a line
            return
        step = found["step"]
        if found["kind"] == "turn":
            if self.num_together > 10 and self.kills and replica in self.kills[0]:
                self.kill(replica, step)
            return
        self.digests.setdefault(step, set()).add(found["digest"])
        lines = self.lines.setdefault(step, {})
        lines[replica] = " ".join(map(str, found["turns"]))
        self.num_together += len(lines) == REPLICAS
        who = f"replica {replica} did {lines[replica]}"
        print(f"step {step:3} {found['digest']}   {who}")

    def kill(self, replica: int, step: int) -> None:
        """Kill a replica, as a machine that fails would."""
        print(f"                        replica {replica} is killed in step {step}")
        self.processes[replica].send_signal(signal.SIGKILL)
        self.num_killed += 1
        self.kills[0].remove(replica)
        if not self.kills[0]:
            self.kills.pop(0)
            self.num_together = 0

    def end(self) -> None:
        """Kill the replicas that still run."""
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # also if Ctrl-C comes twice
        for process in self.processes.values():
            process.kill()


def main() -> None:
    """Train alone, then with deaths; compare all digests."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--smoke", action="store_true", help="60 steps, one kill")
    parser.add_argument("--verbose", action="store_true", help="what torchft says, too")
    parser.add_argument("--replica", nargs=3, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.replica:
        number, lighthouse, steps = args.replica
        train_replica(int(number), lighthouse, int(steps))
        return
    if os.environ.get("RANK", "0") != "0":  # torchrun has started more than one of us
        return
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    torch.set_num_threads(1)
    steps, kills = (60, KILLS[:1]) if args.smoke else (args.steps, KILLS)
    alone = train_alone(steps)
    print(f"one process alone: digest {alone[-1]} after {steps} steps")
    print("Three replicas start, which takes some ten seconds.")
    job = Job(steps, kills, verbose=args.verbose)
    try:
        while not job.ended:
            job.watch()
    except KeyboardInterrupt:
        print("ended before the last step")
    finally:
        job.end()
    wrong = [step for step, found in job.digests.items() if found != {alone[step]}]
    print(f"one process alone:  digest {alone[-1]} after {steps} steps")
    through = job.digests.get(steps - 1, {"none"})
    print(f"with deaths ({job.num_killed}):    digest {' '.join(through)}")
    print(f"{len(job.digests)} steps compared; differ: {wrong or 'none'}")
    sys.exit(bool(wrong) or len(job.digests) < steps or not job.num_killed)


if __name__ == "__main__":
    main()
