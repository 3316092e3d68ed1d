"""How much memory does training need? Peak by option, minidp beside torch's DDP.

    python benchmarks/memory.py                        # three models: 4 minutes
    python benchmarks/memory.py --models mlp           # while working
    python benchmarks/memory.py --device cuda          # on a GPU
    python benchmarks/memory.py --smoke                # does it run? no numbers

Measured are the bytes beyond the weights, on the rank that needs most: buckets,
activations, gradients. `peak` is the worst moment from the construction through 3 steps
(of "auto" through 52 more, in which it tries layouts). `at rest` is what is left after
the steps, when gradients are freed.

On CPU it is the process's anonymous resident memory, which has what Gloo's threads
allocate too, and its own buckets in shared memory; sampled a thousand times a second.
The C library is told to return all but small pieces at once. What torch, DDP and Gloo
keep for good is not counted. Expect a MiB or two of noise, a few for small models. On a
GPU it is torch.cuda.max_memory_allocated.
"""

from __future__ import annotations

import functools
import gc
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from support.baselines import (
    AFTER,
    BARE,
    AfterBackward,
    auto,
    bare,
    ours,
    theirs,
    torch_knows,
)
from support.charts import OURS, THEIRS, Bar, Words, colour_of, draw_bars
from support.memory import memory_of
from support.models import MODELS, Net, make
from support.ranks import run_ranks
from support.report import Report, command_line, table
from support.rounds import MIB, Contestant, Implementation, Where, Wrap
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

from minidp import comm_hooks
from minidp.console import say_progress

STEPS = 3  # DDP rebuilds its buckets after the first
OPTIONS: dict[str, dict[str, Any]] = {  # of both
    "default": {},
    "bucket_cap_mb=1": {"bucket_cap_mb": 1},
    "views": {"gradient_as_bucket_view": True},
    "static graph": {"static_graph": True},
    "find unused": {"find_unused_parameters": True},
    "batched copy": {"batched_grad_copy": True},
    "lazy": {"lazy_bucket_allocation": True},  # torch: from 2.15 on
    "lazy views": {"lazy_bucket_allocation": True, "gradient_as_bucket_view": True},
}
HOOKS: dict[str, tuple[Callable[[], Any], Any]] = {  # minidp's: state, hook
    "fp16 hook": (lambda: None, comm_hooks.fp16_compress_hook),
    "fp32 over 16 bit": (comm_hooks.Fp32State, comm_hooks.fp32_accumulate_hook),
    "int8 hook": (comm_hooks.Int8State, comm_hooks.int8_error_feedback_hook),
}


class Memory(NamedTuple):
    """Bytes beyond the weights, on the rank that needs most; see ``--help``."""

    peak: int
    at_rest: int


# -- what is measured ------------------------------------------------------------------


def implementations() -> list[Implementation]:
    """List what is measured, called ``torch OPTION`` or ``minidp OPTION``."""
    found = [bare(), Implementation(AFTER, AfterBackward)]
    for option, chosen in OPTIONS.items():
        if torch_knows(chosen):
            found.append(Implementation(f"torch {option}", theirs(**chosen)))
        found.append(Implementation(f"minidp {option}", ours(**chosen)))
    found.append(auto(1))
    hooked = _hooked(theirs(), lambda: None, default_hooks.fp16_compress_hook)
    found.append(Implementation("torch fp16 hook", hooked))
    for option, (state, hook) in HOOKS.items():
        found.append(Implementation(f"minidp {option}", _hooked(ours(), state, hook)))
    return found


def _hooked(wrap: Wrap, state: Callable[[], Any], hook: Any) -> Wrap:
    def wrap_and_register(module: nn.Module) -> nn.Module:
        model: Any = wrap(module)
        model.register_comm_hook(state(), hook)
        return model

    return wrap_and_register


def measure(
    model: str, device: str, *, smoke: bool
) -> tuple[str, int, dict[str, Memory]]:
    """Measure a model, on every rank: title, bytes of the weights, memory by name."""
    net, where = make(MODELS[model], smoke=smoke, device=device), Where(device=device)
    everyone = implementations()
    gc.freeze()  # what imports made; else each collection takes a quarter of a second
    found: dict[str, Memory] = {}
    # Some are measured twice: what torch, DDP and Gloo keep for good is there then.
    queue = [*everyone[:4], everyone[-1], *everyone]
    for number, each in enumerate(queue, start=1):
        if dist.get_rank() == 0:
            say_progress(f"{model}, {number} of {len(queue)}: {each.name}")
        gc.collect()
        history = memory_of(functools.partial(_train, each, net, where))
        most = torch.tensor(history)
        where.reduce(most, dist.ReduceOp.MAX)
        found[each.name] = Memory(*map(int, most))
    ordered = {each.name: found[each.name] for each in everyone}
    return net.title, sum(param.nbytes for param in net.parameters()), ordered


def _train(implementation: Implementation, net: Net, where: Where) -> Contestant:
    """Take some steps. The result keeps the wrapper alive."""
    contestant = Contestant(implementation, net, where)
    for _ in range(implementation.settling + STEPS):
        data = net.data(torch.Generator().manual_seed(0))
        contestant.warm_up([each.to(where.device) for each in data])
    where.barrier()
    return contestant


# -- what it means ---------------------------------------------------------------------


def rows(memory: Mapping[str, Memory]) -> Iterator[list[str]]:
    """Yield the rows of a model's table, in MiB."""
    for name in (BARE, AFTER):
        alone = memory[name]
        yield [name, _mib(alone.peak), "", "", _mib(alone.at_rest), ""]
    for option in [*OPTIONS, "auto", *HOOKS]:
        other, mine = memory.get(f"torch {option}"), memory[f"minidp {option}"]
        yield [
            option,
            "-" if other is None else _mib(other.peak),
            _mib(mine.peak),
            "-" if other is None else f"{(mine.peak - other.peak) / MIB:+.1f}",
            "-" if other is None else _mib(other.at_rest),
            _mib(mine.at_rest),
        ]


def _mib(nbytes: int) -> str:
    return f"{nbytes / MIB:.1f}"


def chart(path: Path, found: Mapping[str, Mapping[str, Memory]], note: str) -> None:
    """Draw the peaks."""
    panels = {
        title: [
            Bar(name, [(peak / MIB, colour_of(name))], (peak / MIB, peak / MIB))
            for name, (peak, _) in memory.items()
        ]
        for title, memory in found.items()
    }
    words = Words("Peak memory beyond the weights", "MiB", note)
    draw_bars(path, words, {"torch": THEIRS, "minidp": OURS}, [panels])


# -- the program -----------------------------------------------------------------------


def main() -> int:
    """Measure and report. Return 2 where memory cannot be measured."""
    parser = command_line(__doc__)
    add = parser.add_argument
    add(
        "--models",
        nargs="+",
        choices=list(MODELS),
        default=list(MODELS),
        metavar="MODEL",
        help=f"of: {', '.join(MODELS)} (default: all)",
    )
    add("--ranks", type=int, metavar="N", help="(default: 2; on one GPU: 1)")
    add("--device", choices=("cpu", "cuda"), default="cpu", help="(default: cpu)")
    args = parser.parse_args()
    is_cuda = args.device == "cuda"
    args.ranks = args.ranks or (1 if is_cuda else 2)
    reason = ""
    if is_cuda and torch.cuda.device_count() < args.ranks:
        reason = f"needs {args.ranks} GPU, found {torch.cuda.device_count()}"
    if not is_cuda and sys.platform != "linux":
        reason = "needs /proc/self/status, which Linux has"
    if reason:
        print(f"No memory is measured: {reason}.", file=sys.stderr)
        return 0 if args.smoke else 2
    device = torch.cuda.get_device_name() if is_cuda else "cpu"
    report = Report(args, "Peak memory by option", device=device, ranks=str(args.ranks))
    found = {}
    content = []
    task = functools.partial(measure, smoke=args.smoke)
    for model in args.models[:1] if args.smoke else args.models:
        title, weights, memory = run_ranks(
            task, args.ranks, model, args.device, is_cuda=is_cuda
        )
        columns = ["option", "peak\ntorch", "\nminidp", "minidp -\ntorch"]
        columns += ["at rest\ntorch", "\nminidp"]
        facts = f"weights {_mib(weights)} MiB; MiB beyond the weights"
        report.show(table(title, facts, columns, rows(memory)))
        found[f"{title}; weights {_mib(weights)} MiB"] = memory
        as_dicts = {name: each._asdict() for name, each in memory.items()}
        content.append({"title": title, "weights": weights, "memory": as_dicts})
    note = f"{device}, {args.ranks} ranks, {report.header['date']}."
    return report.finish(
        f"memory_{args.device}", {"models": content}, lambda p: chart(p, found, note)
    )


if __name__ == "__main__":
    sys.exit(main())
