r"""Name the slow rank while training goes on; write the numbers for a dashboard.

    python -m torch.distributed.run --standalone --nproc-per-node 2 \
        examples/watch_speed.py

Rank 1 reads its data slowly for a while: rank 0's log says so, and when it is over. The
numbers go to a file for Prometheus' node exporter (its textfile collector), and to
TensorBoard if that is installed.
"""

import argparse
import logging
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import minidp


def write_prometheus(path: Path, numbers: dict[str, float], rank: int) -> None:
    """Write numbers in Prometheus' text format; readers never see half a file."""
    lines = [
        f'minidp_{name}{{rank="{rank}"}} {value:.6g}' for name, value in numbers.items()
    ]
    unfinished = path.with_suffix(".unfinished")
    unfinished.write_text("\n".join([*lines, ""]))
    unfinished.replace(path)


def main() -> None:
    """Train a small net for some seconds."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--smoke", action="store_true", help="a few steps only")
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()))
    args = parser.parse_args()
    steps = 40 if args.smoke else 300
    logging.basicConfig(format="%(message)s")

    dist.init_process_group("gloo")
    rank = dist.get_rank()
    model = minidp.DataParallel(nn.Sequential(nn.Linear(64, 256), nn.Linear(256, 8)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    speed = minidp.watch_speed(model)  # on all ranks, once

    try:
        from torch.utils.tensorboard import SummaryWriter

        writer = SummaryWriter(str(args.folder / f"tensorboard/rank{rank}"))
    except ImportError:
        writer = None
    for step in range(steps):
        is_slow = rank == 1 and steps // 4 < step < steps // 2
        time.sleep(0.03 if is_slow else 0.01)  # reads a batch
        model(torch.randn(32, 64)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 20 == 0:
            numbers = speed.numbers()
            write_prometheus(args.folder / f"minidp_{rank}.prom", numbers, rank)
            if writer is not None:
                for name, value in numbers.items():
                    writer.add_scalar(f"speed/{name}", value, step)
    if writer is not None:
        writer.close()
    if rank == 0:
        print((args.folder / "minidp_0.prom").read_text())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
