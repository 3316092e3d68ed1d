"""Peak memory of training, by option: minidp beside torch's DDP.

    python benchmarks/memory.py                        # three models: 2 minutes
    python benchmarks/memory.py --models mlp           # while working
    python benchmarks/memory.py --device cuda          # on a GPU
    python benchmarks/memory.py --smoke                # does it run? no numbers

Measured is what a few steps need beyond the weights. What each number means is in
benchmarks/README.md.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import sys
import textwrap
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.table import Table
from rich.text import Text
from support.bars import Panel, Words, draw
from support.baselines import (
    BARE,
    AfterBackward,
    auto,
    bare,
    has_auto,
    has_batched_copy,
    ours,
    theirs,
)
from support.estimates import Estimate
from support.memory import STEPS, Memory, measure_memory, why_no_memory
from support.models import GPU_MODELS, MODELS
from support.output import check_native, results_folder
from support.ranks import run_ranks
from support.report import (
    header,
    header_table,
    native_line,
    report_console,
    write_json,
    write_markdown,
)
from support.rounds import Implementation, Where, Wrap
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

from minidp import comm_hooks

MIB = 2**20
SETTLING = 12  # steps of "auto" before it is measured: it still tries layouts then, but
# all of them take as much memory
OPTIONS: dict[str, dict[str, Any]] = {  # of both
    "default": {},
    "bucket_cap_mb=1": {"bucket_cap_mb": 1},
    "views": {"gradient_as_bucket_view": True},
    "static graph": {"static_graph": True},
    "find unused": {"find_unused_parameters": True},
    "batched copy": {"batched_grad_copy": True},
}
HOOKS: dict[str, tuple[Callable[[], Any] | None, Any, Any]] = {  # state, torch, minidp
    "fp16 hook": (
        None,
        default_hooks.fp16_compress_hook,
        comm_hooks.fp16_compress_hook,
    ),
    "fp32 over 16 bit": (comm_hooks.Fp32State, None, comm_hooks.fp32_accumulate_hook),
    "int8 hook": (comm_hooks.Int8State, None, comm_hooks.int8_error_feedback_hook),
}


# -- what is measured ------------------------------------------------------------------


def implementations() -> list[Implementation]:
    """Collective: everything, called ``torch OPTION`` or ``minidp OPTION``."""
    found = [Implementation(BARE, bare), Implementation("no overlap", AfterBackward)]
    for option, chosen in OPTIONS.items():
        if option != "batched copy" or has_batched_copy():
            found.append(Implementation(f"torch {option}", theirs(**chosen)))
        found.append(Implementation(f"minidp {option}", ours(**chosen)))
    if has_auto():
        best = dataclasses.replace(auto(ours, 1), name="minidp auto")
        found.append(dataclasses.replace(best, settling=SETTLING))
    for option, (state, torchs, minidps) in HOOKS.items():
        for who, wrap, hook in (
            ("torch", theirs(), torchs),
            ("minidp", ours(), minidps),
        ):
            if hook is not None:
                hooked = functools.partial(_with_hook, wrap, state, hook)
                found.append(Implementation(f"{who} {option}", hooked))
    return found


def _with_hook(
    wrap: Wrap, state: Callable[[], Any] | None, hook: Any, module: nn.Module
) -> nn.Module:
    model: Any = wrap(module)
    model.register_comm_hook(state() if state is not None else None, hook)
    return model


def measure(
    model: str, device: str, *, is_small: bool, native: str
) -> tuple[str, int, dict[str, Memory]]:
    """On every rank: title, bytes of the weights, memory by implementation."""
    check_native(native)
    torch.manual_seed(0)
    if is_small:
        net = MODELS[model].smoke()
    else:
        net = GPU_MODELS[model]() if device == "cuda" else MODELS[model].full()
    net.to(device)
    found = measure_memory(implementations(), net, Where(device=device))
    return net.title, sum(param.nbytes for param in net.parameters()), found


# -- what it means ---------------------------------------------------------------------


@dataclass(frozen=True)
class Footprint:
    """One model.

    Args:
        title: of the model.
        num_bytes: of its weights.
        memory: by implementation.
    """

    title: str
    num_bytes: int
    memory: Mapping[str, Memory]

    @property
    def options(self) -> list[str]:
        """Every option that anybody has."""
        names = [
            n.partition(" ") for n in self.memory if n.startswith(("torch", "mini"))
        ]
        return list(dict.fromkeys(option for _, _, option in names))

    def table(self) -> Table:
        """For printing, in MiB."""
        facts = f"weights {self.num_bytes / MIB:.1f} MiB; MiB beyond the weights"
        title = Text.assemble((self.title, "bold"), "\n", (facts, "dim"))
        table = Table(title=title, title_justify="left", box=None, padding=(0, 1))
        table.add_column("\noption", no_wrap=True)
        for column in (
            "peak\ntorch",
            "\nminidp",
            "minidp -\ntorch",
            "at rest\ntorch",
            "\nminidp",
        ):
            table.add_column(column, justify="right")
        for name in (BARE, "no overlap"):
            alone = self.memory[name]
            style = {"style": "dim"}
            table.add_row(name, _mib(alone.peak), "", "", _mib(alone.at_rest), **style)
        for option in self.options:
            theirs = self.memory.get(f"torch {option}")
            mine = self.memory.get(f"minidp {option}")
            both = theirs is not None and mine is not None
            table.add_row(
                option,
                _mib(theirs and theirs.peak),
                _mib(mine and mine.peak),
                f"{(mine.peak - theirs.peak) / MIB:+.1f}" if both else "-",
                _mib(theirs and theirs.at_rest),
                _mib(mine and mine.at_rest),
            )
        return table

    def panel(self) -> Panel:
        """Peaks as bars."""
        bars: dict[str, dict[str, Estimate]] = {}
        for option in self.options:
            for who in ("torch", "minidp"):
                memory = self.memory.get(f"{who} {option}")
                if memory is not None:
                    peak = memory.peak / MIB
                    bars.setdefault(option, {})[who] = Estimate(peak, peak, peak)
        title = f"{self.title}; weights {self.num_bytes / MIB:.0f} MiB"
        return Panel(textwrap.fill(title, 44), bars)

    def as_json(self) -> dict[str, Any]:
        """For a file, in bytes."""
        memory = {name: vars(found) for name, found in self.memory.items()}
        return {"title": self.title, "weights": self.num_bytes, "memory": memory}


def _mib(nbytes: int | None) -> str:
    return "-" if nbytes is None else f"{nbytes / MIB:.1f}"


# -- the program -----------------------------------------------------------------------


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").partition("\n")[0],
        epilog="benchmarks/README.md says what each number means.",
    )
    add = parser.add_argument
    add("--smoke", action="store_true", help="a tiny model: does everything run?")
    add(
        "--models",
        nargs="+",
        choices=list(MODELS),
        default=list(MODELS),
        metavar="MODEL",
        help=f"of: {', '.join(MODELS)} (default: all)",
    )
    add(
        "--ranks",
        type=int,
        metavar="N",
        help="number of ranks (default: 2; on one GPU: 1)",
    )
    add("--device", choices=("cpu", "cuda"), default="cpu", help="(default: cpu)")
    add(
        "--out",
        type=Path,
        metavar="FOLDER",
        help="where table, numbers and chart go (default: benchmarks/results)",
    )
    args = parser.parse_args()
    args.ranks = args.ranks or (1 if args.device == "cuda" else 2)
    return args


def run(args: argparse.Namespace, folder: Path) -> None:
    """Measure, print, write."""
    console = report_console()
    how = "torch's allocator" if args.device == "cuda" else "resident memory"
    lines = header(
        native=native_line(),
        backend="nccl" if args.device == "cuda" else "gloo on the loopback device",
        device=torch.cuda.get_device_name() if args.device == "cuda" else "cpu",
        ranks=str(args.ranks),
        measured=f"{how}, during construction and {STEPS} steps",
    )
    console.print(header_table(lines), "")
    results = []
    for model in args.models[:1] if args.smoke else args.models:
        task = functools.partial(measure, is_small=args.smoke, native=lines["native"])
        found = run_ranks(
            task, args.ranks, model, args.device, is_cuda=args.device == "cuda"
        )
        results.append(Footprint(*found))
        console.print(results[-1].table(), "")
    stem = f"memory_{args.device}_{lines['date']}"
    content = {"header": lines, "models": [result.as_json() for result in results]}
    write_json(folder / f"{stem}.json", content)
    write_markdown(folder / f"{stem}.md", "Peak memory by option", console)
    words = Words(
        title="Peak memory beyond the weights",
        unit="MiB",
        footnote=f"{lines['device']}, {args.ranks} ranks, {lines['date']}. "
        f"torch {torch.__version__}.",
    )
    draw(folder / f"{stem}.png", words, [[result.panel() for result in results]])


def main() -> int:
    """Run; 2 where memory cannot be measured."""
    args = parse()
    reason = why_no_memory(args.device)
    if args.device == "cuda" and torch.cuda.device_count() < args.ranks:
        reason = f"{args.ranks} GPU, but there are {torch.cuda.device_count()}"
    if reason:
        print(f"No memory is measured: {reason}.", file=sys.stderr)
        return 0 if args.smoke else 2
    with results_folder(args.out, smoke=args.smoke) as folder:
        run(args, folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
