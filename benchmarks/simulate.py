"""How would a step scale to 16,384 ranks? A prediction, validated on real ranks.

    python benchmarks/simulate.py                       # everything: 3 minutes
    python benchmarks/simulate.py --paper               # only the prediction: seconds
    python benchmarks/simulate.py --validate            # only beside real ranks
    python benchmarks/simulate.py --node-gbit 25        # another network
    python benchmarks/simulate.py --smoke               # does it run? no numbers

The model is the one by which minidp chooses layouts: gradients become ready one by one,
buckets go over one wire in launch order, each when it is full and the one before is
done. EVERYTHING TITLED "PREDICTED" WAS COMPUTED, NOT MEASURED.

Validation (measured): two, three and four ranks exchange real gradients through minidp,
Gloo and links of a limited rate. More ranks than cores would fight for them, so forward
and backward wait on the clock instead of computing (27 MiB in 12 layers; 30 and 79 ms).
Latency and bandwidth are fitted to all-reduces of two ranks on each link; a ring's
formula predicts three and four. Target: no prediction is off by more than 15%.

Columns of the prediction, a row for each number of ranks:
  all-reduce, of all    the fastest way to reduce all gradients at once; its ms
  torch's default       step with a first bucket of 1 MiB and others of 25 MiB
  best cap, with it     caps within 1% of the best of 13, from 0.25 to 512 MiB; the step
  best layout, buckets  step with the layout that `best_groups` finds
  bound                 no layout is faster: gradients travel byte by byte once ready
  efficiency            step of one rank without communication / step with best layout

Collectives: a ring or two binary trees of nodes, with reduce-scatter before and
all-gather after it inside each node. Each message takes the fastest. A ring of n has 2
(n - 1) hops and sends 2 (n - 1) / n of the bytes; a tree has 2 log2 n hops and sends
them twice. A third of a step is forward. Within the backward each parameter takes the
time of its multiplications; GPT-2's word embedding is ready last. Gradients are
float32. The defaults are a V100 server with NVLink and the 100 Gbit/s network of the
DDP paper.

Left out: stragglers (at scale they cost more than communication: the slowest of many
ranks decides), copies into and out of buckets, the optimizer, a backward that slows
down while communication runs, congestion between nodes, collectives in parallel.
"""

from __future__ import annotations

import argparse
import functools
import math
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
from support.estimates import Estimate
from support.links import Link, why_not
from support.models import gpt2_shapes, resnet50_shapes
from support.ranks import run_ranks
from support.report import Report, Verdict, command_line, table
from support.rounds import MIB
from torch import Tensor, nn

import minidp
from minidp.console import say_progress
from minidp.costmodel import (
    Backward,
    Network,
    best_groups,
    capped_groups,
    fit_network,
    lower_bound,
    play,
)

Groups = list[list[int]]
TORCH_LIMITS = (MIB, 25 * MIB)
# Of the validation. Probes are as large as buckets: what is not much larger than the
# burst of a shaped link passes faster than any bucket.
REAL_GBIT, REAL_RANKS, REAL_STEPS = (1.0, 2.0), (2, 3, 4), 12
REAL_CAPS: tuple[float | None, ...] = (None, 8.0, 4.0, 1.0)
PROBES = (4, 2 * MIB, 4 * MIB, 8 * MIB, 16 * MIB)
CAPS_MB = (0.25, 0.5, 1, 2, 4, 8, 16, 25, 32, 64, 128, 256, 512)
LIMIT = 0.15  # of a prediction's error
NOTHING = Network(0.0, 1e30)  # what a collective of one rank costs


# -- collectives -----------------------------------------------------------------------


def ring(num_ranks: int, hop: Network) -> Network:
    """Cost an all-reduce in a ring: ``2 (n - 1)`` hops, each with 1/n of the bytes."""
    if num_ranks == 1:
        return NOTHING
    hops = 2 * (num_ranks - 1)
    return Network(hops * hop.latency_s, hop.bytes_per_s * num_ranks / hops)


def tree(num_ranks: int, hop: Network) -> Network:
    """Cost an all-reduce up and down two binary trees, each with half of the bytes.

    Messages travel in pieces, so all levels work at once: each rank sends its bytes
    once up and once down, and only the first piece pays for the depth.
    """
    if num_ranks == 1:
        return NOTHING
    depth = math.ceil(math.log2(num_ranks))
    return Network(2 * depth * hop.latency_s, hop.bytes_per_s / 2)


def _in_turn(*costs: Network) -> Network:
    return Network(
        sum(cost.latency_s for cost in costs),
        1 / sum(1 / cost.bytes_per_s for cost in costs),
    )


@dataclass(frozen=True)
class Cluster:
    """Nodes of equal ranks: fast cables inside, one network between them.

    Args:
        nodes: at least 1.
        ranks_per_node: at least 1.
        inside: one hop between two ranks of a node.
        between: one hop between two nodes; all ranks of a node share its bandwidth.
        launch_s: seconds that a collective costs before its first hop.
    """

    nodes: int
    ranks_per_node: int
    inside: Network
    between: Network
    launch_s: float = 0.0

    @classmethod
    def of(cls, args: argparse.Namespace, num_ranks: int) -> Cluster:
        """Make the cluster of a command line with so many ranks."""
        return cls(
            num_ranks // args.ranks_per_node,
            args.ranks_per_node,
            Network(args.nvlink_us / 1e6, args.nvlink_gb * 1e9),
            Network(args.hop_us / 1e6, args.node_gbit * 1e9 / 8),
            args.launch_us / 1e6,
        )

    def collectives(self) -> dict[str, Network]:
        """Return the cost of each way to all-reduce."""
        per_node = self.ranks_per_node
        local = ring(per_node, self.inside)
        if self.nodes == 1:
            found = {"ring": local, "tree": tree(per_node, self.inside)}
        else:
            found = {
                "node ring": _in_turn(local, ring(self.nodes, self.between)),
                "node tree": _in_turn(local, tree(self.nodes, self.between)),
            }
        return {
            name: replace(cost, latency_s=cost.latency_s + self.launch_s)
            for name, cost in found.items()
        }


@dataclass(frozen=True)
class Fastest:
    """The fastest of several collectives for each size, as libraries choose it."""

    ways: tuple[Network, ...]

    def seconds(self, nbytes: float) -> float:
        """Return the seconds of a message."""
        return min(way.seconds(nbytes) for way in self.ways)


# -- one step --------------------------------------------------------------------------


@dataclass(frozen=True)
class Work:
    """What one rank computes in a step."""

    title: str
    forward_s: float
    backward: Backward

    @property
    def seconds(self) -> float:
        """Seconds of a step without communication."""
        return self.forward_s + self.backward.end_s

    def step_seconds(self, groups: Groups, cost: Any) -> float:
        """Predict a step with these buckets."""
        return self.forward_s + play(self.backward, groups, cost).done_s


def resnet50(seconds: float) -> Work:
    """Describe ResNet-50 on images of 224 x 224, by its multiplications."""

    def pixels(out: int, into: int) -> float:
        if into == 3:
            return 112.0**2
        inner = out // 4 if out > into else out  # 64, 128, 256, 512 in stages 0 to 3
        return (56 / 2 ** round(math.log2(inner / 64))) ** 2

    shapes = resnet50_shapes()
    shares = [math.prod(s) * pixels(*s[:2]) if len(s) == 4 else 0.0 for s in shapes]
    shares[-2] = math.prod(shapes[-2])  # the classifier sees one pixel
    return _work("ResNet-50", shapes, shares, seconds)


def gpt2(seconds: float) -> Work:
    """Describe GPT-2 small: each matrix meets every word once; no attention."""
    shapes = gpt2_shapes()
    shares = [float(math.prod(s)) if len(s) == 2 else 0.0 for s in shapes]
    # The embedding is the head, too: its multiplications come first, its gradient last.
    head, shares[0], shares[1] = shares[0], 0.0, 0.0
    return _work("GPT-2 small", shapes, shares, seconds, head)


def _work(
    title: str,
    shapes: Sequence[tuple[int, ...]],
    shares: Sequence[float],
    seconds: float,
    before: float = 0.0,
) -> Work:
    backward_s = seconds * 2 / 3
    done = list(accumulate(reversed(shares), initial=before))
    ready = tuple(min(backward_s, backward_s * each / done[-1]) for each in done[1:])
    nbytes = tuple(4 * math.prod(shape) for shape in reversed(shapes))
    return Work(title, seconds - backward_s, Backward(ready, nbytes, backward_s))


# -- the prediction --------------------------------------------------------------------


@dataclass(frozen=True)
class Point:
    """One model on one number of ranks; seconds are of a step. See ``--help``."""

    num_ranks: int
    way: str
    all_reduce_s: float
    torch_s: float
    caps_s: dict[float, float]
    best_s: float
    best_buckets: int
    bound_s: float
    efficiency: float

    def row(self) -> list[str]:
        """Format the row of the table, in ms."""
        least = min(self.caps_s.values())
        good = [cap for cap, seconds in self.caps_s.items() if seconds <= 1.01 * least]
        ends = dict.fromkeys((min(good), max(good)))
        times = [self.all_reduce_s, self.torch_s, least, self.best_s, self.bound_s]
        of_all, default, capped, best, bound = (f"{1e3 * s:.1f}" for s in times)
        caps = "-".join(f"{cap:g}" for cap in ends)
        row = [f"{self.num_ranks:,}", self.way, of_all, default, caps, capped, best]
        return [*row, str(self.best_buckets), bound, f"{self.efficiency:.1%}"]


def predict(work: Work, cluster: Cluster) -> Point:
    """Predict the step of all layouts on one cluster."""
    ways = cluster.collectives()
    cost, nbytes = Fastest(tuple(ways.values())), sum(work.backward.nbytes)

    def seconds(groups: Groups) -> float:
        return work.step_seconds(groups, cost)

    default = capped_groups(work.backward, TORCH_LIMITS)
    capped = {cap: capped_groups(work.backward, [round(cap * MIB)]) for cap in CAPS_MB}
    # Dynamic programming knows one way at a time; messages may take different ones.
    layouts = [best_groups(work.backward, way) for way in ways.values()]
    best = min([*layouts, default, *capped.values()], key=seconds)
    way = min(ways, key=lambda name: ways[name].seconds(nbytes))
    # Each message may take another way, so no way alone is a bound.
    ideal = Network(
        min(each.latency_s for each in ways.values()),
        max(each.bytes_per_s for each in ways.values()),
    )
    return Point(
        num_ranks=cluster.nodes * cluster.ranks_per_node,
        way=way,
        all_reduce_s=ways[way].seconds(nbytes),
        torch_s=seconds(default),
        caps_s={cap: seconds(groups) for cap, groups in capped.items()},
        best_s=seconds(best),
        best_buckets=len(best),
        bound_s=work.forward_s + lower_bound(work.backward, ideal),
        efficiency=work.seconds / seconds(best),
    )


def paper(args: argparse.Namespace, report: Report) -> dict[str, list[Point]]:
    """Predict both models on growing clusters; print their tables."""
    sizes = [args.ranks_per_node]
    while sizes[-1] < args.most:
        sizes.append(min(4 * sizes[-1], args.most))
    found = {}
    columns = ["ranks", "all-reduce", "of all", "torch's\ndefault", "best cap\nMiB"]
    columns += ["with\nit", "best\nlayout", "of\nbuckets", "bound", "effi-\nciency"]
    for work in (resnet50(args.resnet50_ms / 1e3), gpt2(args.gpt2_ms / 1e3)):
        points = [predict(work, Cluster.of(args, size)) for size in sizes]
        facts = f"{sum(work.backward.nbytes) / MIB:.0f} MiB of gradients; one rank "
        facts += f"{1e3 * work.seconds:.0f} ms; ms of a step"
        rows = [point.row() for point in points]
        report.show(table(f"PREDICTED: {work.title}", facts, columns, rows))
        found[work.title] = points
    return found


# -- the validation --------------------------------------------------------------------


def even_work(layers: int, nbytes: int, forward_s: float, backward_s: float) -> Work:
    """Describe layers of equal size and time."""
    ready = tuple(backward_s * (k + 1) / layers for k in range(layers))
    return Work("", forward_s, Backward(ready, (nbytes,) * layers, backward_s))


class Waits(nn.Module):
    """A model whose forward and backward wait on the clock instead of computing."""

    def __init__(self, work: Work) -> None:
        super().__init__()
        self.work, self.start = work, 0.0
        sizes = [nbytes // 4 for nbytes in reversed(work.backward.nbytes)]
        self.pieces = nn.ParameterList(torch.zeros(size) for size in sizes)

    def wait_until(self, moment_s: float) -> None:
        """Sleep until this moment of the step."""
        time.sleep(max(0.0, self.start + moment_s - time.perf_counter()))

    def forward(self, value: Tensor) -> Tensor:
        """Return the value after the time of the forward."""
        self.start = time.perf_counter()
        self.wait_until(self.work.forward_s)
        ready = reversed(self.work.backward.ready_s)
        for piece, ready_s in zip(self.pieces, ready, strict=True):
            wait = functools.partial(self.wait_until, self.work.forward_s + ready_s)
            value = _Layer.apply(value, piece, wait)
        return value


class _Layer(torch.autograd.Function):
    """Passes a value on. Its backward waits, then returns the parameter's gradient."""

    @staticmethod
    def forward(
        ctx: Any, value: Tensor, param: Tensor, wait: Callable[[], None]
    ) -> Tensor:
        """Return the value."""
        ctx.shape, ctx.wait = param.shape, wait
        return value.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        """Return the gradients: of the parameter 1 + rank."""
        mine = torch.full(ctx.shape, 1.0 + dist.get_rank())
        ctx.wait()
        return grad, mine, None


@dataclass(frozen=True)
class Trial:
    """Steps of real ranks with one bucket cap.

    Args:
        cap_mb: of buckets; None: torch's default.
        groups: the layout that minidp had, as positions in ready order.
        seconds: of each step, on the slowest rank.
        wrong: gradients that were not the mean over the ranks, on any rank.
    """

    cap_mb: float | None
    groups: Groups
    seconds: list[float]
    wrong: int


def measure_network() -> Network:
    """Collective: fit what an all-reduce costs in a queue of four, as a backward's."""
    queues = [[torch.zeros(nbytes // 4) for _ in range(4)] for nbytes in PROBES]
    samples = []
    for number in range(10):
        for queue in queues:  # in turn: a slow moment hits all sizes
            dist.barrier()
            start = time.perf_counter()
            for work in [dist.all_reduce(each, async_op=True) for each in queue]:
                work.wait()
            seconds = (time.perf_counter() - start) / len(queue)
            if number:  # the first time connects, and finds its memory
                samples.append((queue[0].nbytes, seconds))
    return fit_network(samples)


def measure_steps(
    work: Work, caps_mb: Sequence[float | None], num_steps: int
) -> tuple[Network, list[Trial]]:
    """Measure the network, then steps with each cap in turn, on every rank."""
    network = measure_network() if dist.get_world_size() == 2 else NOTHING
    nets = [Waits(work) for _ in caps_mb]
    models = [
        minidp.DataParallel(net, bucket_cap_mb=cap)
        for net, cap in zip(nets, caps_mb, strict=True)
    ]
    value = torch.zeros((), requires_grad=True)
    expected = (1 + dist.get_world_size()) / 2  # the mean of 1, 2, ... world size
    seconds = torch.zeros(len(nets), num_steps + 3, dtype=torch.float64)
    wrong = torch.zeros(len(nets))
    for step in range(num_steps + 3):
        for k, (net, model) in enumerate(zip(nets, models, strict=True)):
            dist.barrier()
            start = time.perf_counter()
            model(value).backward()
            seconds[k, step] = time.perf_counter() - start
            wrong[k] += sum(not (p.grad == expected).all() for p in net.pieces)
            net.zero_grad()
    dist.all_reduce(seconds, dist.ReduceOp.MAX)
    dist.all_reduce(wrong)
    timed = seconds[:, 3:]  # buckets are rebuilt after the first step
    every = zip(caps_mb, models, timed.tolist(), wrong.tolist(), strict=True)
    return network, [Trial(c, _groups(m), s, int(w)) for c, m, s, w in every]


def _groups(model: minidp.DataParallel) -> Groups:
    """Return the layout, as positions in ready order: the last parameter is first."""
    names = [name for name, _ in model.module.named_parameters()][::-1]
    layout = model.bucket_layout["buckets"]
    return [[names.index(name) for name in bucket] for bucket in layout]


def validate(report: Report, *, smoke: bool) -> list[dict[str, Any]]:
    """Measure real ranks, predict their steps, print the table."""
    if reason := why_not():
        report.show(f"The validation on shaped links is skipped: {reason}.")
        return []
    work, sizes, steps = (
        even_work(12, 768 * 768 * 4, 0.030, 0.079),
        REAL_RANKS,
        REAL_STEPS,
    )
    if smoke:
        work, sizes, steps = even_work(4, 2**16, 0.002, 0.008), (2,), 3
    found, rows = [], []
    for gbit in REAL_GBIT[: 1 if smoke else None]:
        network = NOTHING
        for size in sizes:
            say_progress(f"training {size} ranks at {gbit:g} of {REAL_GBIT} Gbit/s")
            task = functools.partial(measure_steps, work, REAL_CAPS, steps)
            measured, trials = run_ranks(task, size, link=Link(gbit))
            network = measured if size == 2 else network
            # A ring of two has two hops with half of the bytes each.
            hop = Network(network.latency_s / 2, network.bytes_per_s)
            for trial in trials:
                real = statistics.median(trial.seconds)
                predicted = work.step_seconds(trial.groups, ring(size, hop))
                facts = {"gbit": gbit, "ranks": size, **vars(trial)}
                error = predicted / real - 1
                found.append({**facts, "predicted_s": predicted, "error": error})
                cap = "default" if trial.cap_mb is None else f"{trial.cap_mb:g}"
                row = [f"{gbit:g}", str(size), cap, str(len(trial.groups))]
                row += [f"{1e3 * real:.1f}", f"{1e3 * predicted:.1f}", f"{error:+.1%}"]
                rows.append([*row, str(trial.wrong)])
    columns = ["Gbit/s", "ranks", "cap,\nMiB", "buckets", "measured,\nms"]
    columns += ["predicted,\nms", "error", "#wrong"]
    note = (
        "computation replaced by timed waits; gradients, minidp, Gloo, links are real"
    )
    report.show(table("validation: measured beside PREDICTED", note, columns, rows))
    report.count_wrong(row["wrong"] for row in found)
    worst = max(abs(row["error"]) for row in found)
    estimate = Estimate(worst, worst, worst)
    report.judge([Verdict("largest error of a prediction", estimate, LIMIT)])
    return found


# -- the program -----------------------------------------------------------------------

ASSUMPTIONS: dict[str, tuple[float, str]] = {
    "ranks-per-node": (8, "ranks in a node"),
    "node-gbit": (100.0, "Gbit/s between nodes, each way, shared by a node's ranks"),
    "hop-us": (15.0, "latency between two nodes"),
    "nvlink-gb": (130.0, "GB/s between two ranks of a node, each way"),
    "nvlink-us": (4.0, "latency between two ranks of a node"),
    "launch-us": (20.0, "what a collective costs before its first hop"),
    "resnet50-ms": (97.0, "forward and backward of ResNet-50 (V100, 32 images)"),
    "gpt2-ms": (125.0, "of GPT-2 small (8 texts of 1024 words at 50 Tflop/s)"),
    "most": (16384, "ranks at most"),
}


def parse() -> argparse.Namespace:
    """Parse the command line."""
    parser = command_line(__doc__)
    parts = parser.add_mutually_exclusive_group()
    parts.add_argument("--validate", action="store_true", help="only real ranks")
    parts.add_argument("--paper", action="store_true", help="no real ranks")
    group = parser.add_argument_group("predicted clusters")
    for name, (default, meaning) in ASSUMPTIONS.items():
        kind, words = type(default), f"{meaning} (default: {default:g})"
        group.add_argument(f"--{name}", type=kind, default=default, help=words)
    args = parser.parse_args()
    if min(vars(args)[name.replace("-", "_")] for name in ASSUMPTIONS) <= 0:
        parser.error("expected numbers above 0 for the predicted clusters")
    if args.most % args.ranks_per_node:
        parser.error(
            f"--most: expected whole nodes of {args.ranks_per_node} ranks, but got "
            f"{args.most}"
        )
    if args.smoke:
        args.most = 8 * args.ranks_per_node
    return args


def main() -> int:
    """Validate, predict, report. Return 1 if a gradient of real ranks was wrong."""
    args = parse()
    lines = {name: f"{vars(args)[name.replace('-', '_')]:g}" for name in ASSUMPTIONS}
    assumed = ", ".join(f"{name} {value}" for name, value in lines.items())
    report = Report(args, "Scale on paper", assumed=assumed)
    validation = [] if args.paper else validate(report, smoke=args.smoke)
    found = {} if args.validate else paper(args, report)
    content = {
        "validation": validation,
        "predicted": {t: [vars(point) for point in ps] for t, ps in found.items()},
    }
    return report.finish("simulate", content)


if __name__ == "__main__":
    sys.exit(main())
