"""Does minidp.watch_speed name the slow rank? Slow one down, and read rank 0's log.

    python benchmarks/slow_ranks.py                      # 6 minutes
    python benchmarks/slow_ranks.py --smoke              # does it run? no numbers

Each injection: two to four ranks train, and one of them sleeps in one phase of some
steps (data, forward, the backward of one layer, optimizer). The first line in rank 0's
log must name this rank and phase, from at most five slow steps; in the backward also a
bucket. The next line must say that it is over. Then steps without an injection: nothing
is logged.

Targets: 48 of 50 injections named; no line in 2,000 quiet steps.
"""

from __future__ import annotations

import logging
import random
import re
import sys
import time
from collections import Counter
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist
from support.estimates import Estimate
from support.ranks import run_ranks
from support.report import Report, Verdict, command_line, native_word, table
from torch import nn

import minidp
from minidp.console import say_progress

WORK = 0.01  # seconds that each rank sleeps in its forward, as if it computed
LAYERS, WIDTH = 6, 64
FIRST, SLOW_STEPS, STEPS = 30, 40, 110  # numbers of steps
LATE = 6  # steps after the first slow one, at which a line may say that it began
WORDS = {
    "data": "time between steps",
    "forward": "forward",
    "backward": "backward",
    "optimizer": "optimizer step",
}
BEGIN = re.compile(
    r"Rank (?P<rank>\d+) \(.*\) slows all ranks down, since step (?P<since>\d+): its "
    rf"(?P<phase>{'|'.join(WORDS.values())})(.*before bucket (?P<bucket>\d+))?"
)
Line = tuple[int, str]  # number of the step, and what was logged


@dataclass(frozen=True)
class Injection:
    """What is slow: one rank, in one phase of its steps, in the backward at a layer."""

    ranks: int
    rank: int
    phase: str
    layer: int
    seconds: float


def draw(number: int) -> Injection:
    """Draw injection ``number``, always the same."""
    rng = random.Random(number)
    phase, ranks = list(WORDS)[number % len(WORDS)], rng.choice((2, 3, 4))
    seconds = rng.uniform(0.6, 2) * WORK
    return Injection(ranks, rng.randrange(ranks), phase, rng.randrange(LAYERS), seconds)


class SlowGradient(torch.autograd.Function):
    """Sleep in the backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, seconds: float) -> torch.Tensor:
        """Return ``x``."""
        ctx.seconds = seconds
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        """Return ``grad``, after a while."""
        time.sleep(ctx.seconds)
        return grad, None


class Net(nn.Module):
    """Linear layers, each its own bucket; ``naps`` has seconds to sleep, by phase."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)])
        self.naps: dict[str, float] = {}
        self.slow_layer = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Apply the layers."""
        time.sleep(WORK + self.naps.get("forward", 0))
        for number, layer in enumerate(self.layers):
            x = torch.tanh(layer(x))
            if number == self.slow_layer and "backward" in self.naps:
                x = SlowGradient.apply(x, self.naps["backward"])
        return x


def train(injection: Injection, steps: int) -> list[Line]:
    """Train on this rank; return what was logged here, each with its step."""
    lines: list[Line] = []
    step, rank = 0, dist.get_rank()
    handler = logging.Handler()
    handler.emit = lambda record: lines.append((step, record.getMessage()))
    logging.getLogger("minidp").addHandler(handler)
    net = Net()
    ddp = minidp.DataParallel(net, bucket_cap_mb=WIDTH**2 * 4 / 2**20)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
    minidp.watch_speed(ddp)
    x = torch.randn(32, WIDTH)
    for step in range(steps):
        net.naps = {}
        if injection.rank == rank:
            net.slow_layer = injection.layer
            if FIRST <= step < FIRST + SLOW_STEPS:
                net.naps = {injection.phase: injection.seconds}
        time.sleep(net.naps.get("data", 0))
        ddp(x).square().sum().backward()
        time.sleep(net.naps.get("optimizer", 0))  # clips gradients, say
        optimizer.step()
        optimizer.zero_grad()
    return lines


def what_is_wrong(injection: Injection, lines: list[Line]) -> str:
    """Return why rank 0's lines are not as they should be; empty if they are."""
    first = lines[0][1] if lines else "nothing was logged"
    found = BEGIN.search(first)
    if found is None:
        return first
    if int(found["rank"]) != injection.rank:
        return f"wrong rank: {first}"
    if found["phase"] != WORDS[injection.phase]:
        return f"wrong phase: {first}"
    if int(found["since"]) > FIRST + LATE:
        return f"late: {first}"
    if injection.phase == "backward" and found["bucket"] is None:
        return f"no bucket: {first}"
    if len(lines) != 2 or "no longer" not in lines[1][1]:
        return "; ".join(text for _, text in lines[1:]) or "not said to be over"
    return ""


def main() -> int:
    """Measure and report."""
    parser = command_line(__doc__)
    parser.add_argument("--injections", type=int, default=50)
    parser.add_argument("--quiet", type=int, default=2000, help="steps without any")
    parser.add_argument("--phases", nargs="+", choices=WORDS, default=[*WORDS])
    args = parser.parse_args()
    if args.smoke:
        args.injections, args.quiet = 3, 20
    report = Report(args, "Does watch_speed name the slow rank?")
    right, all_of, wrong = Counter[str](), Counter[str](), []
    for number in range(args.injections):
        injection = draw(number)
        if injection.phase not in args.phases:
            continue
        said = f"injection {number + 1} of {args.injections}, {right.total()} named"
        say_progress(f"{said}: {injection.phase}, {injection.ranks} ranks")
        lines = run_ranks(train, injection.ranks, injection, STEPS)
        problem = what_is_wrong(injection, lines)
        all_of[injection.phase] += 1
        right[injection.phase] += not problem
        if problem:
            wrong.append({**asdict(injection), "problem": problem})
            report.show(f"{number}: {injection}\n{problem}")
    rows = [[phase, str(right[phase]), str(all_of[phase])] for phase in all_of]
    rows.append(["all", str(right.total()), str(all_of.total())])
    report.show(table("Injections", "", ["slow in", "named", "of"], rows))
    alarms: list[Line] = []
    for ranks in (2, 4):
        say_progress(f"{args.quiet // 2} quiet steps of {ranks} ranks")
        none = Injection(ranks, -1, "data", 0, 0.0)
        alarms += run_ranks(train, ranks, none, args.quiet // 2)
    report.show(
        f"{len(alarms)} lines in {args.quiet // 2 * 2} quiet steps (2 ranks, then 4)"
    )
    for _, text in alarms:
        report.show(text)
    share = right.total() / max(1, all_of.total())
    report.judge(
        [
            Verdict(
                "injections named", Estimate(share, share, share), 0.959, at_least=True
            ),
            Verdict("lines in quiet steps", Estimate(*[float(len(alarms))] * 3), 0),
        ]
    )
    content = {"right": right, "of": all_of, "wrong": wrong, "alarms": alarms}
    return report.finish(f"slow_ranks_cpu_{native_word()}", content)


if __name__ == "__main__":
    sys.exit(main())
