r"""Compute in 16 bits: autocast, GradScaler, and what ranks must agree on.

    python -m torch.distributed.run --standalone --nproc-per-node 2 \
        examples/mixed_precision.py [--dtype bfloat16]

Weights and gradients stay in float32 (that is what DDP averages); the layers compute in
16 bits. float16 has few exponent bits: the loss is scaled up, so that small gradients
do not vanish, and the scale is halved when large ones overflow. bfloat16 needs no
scale. Gloo on CPU; NCCL if each process has a GPU of its own.
"""

import argparse
import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.amp import GradScaler, autocast
from torch.nn.functional import cross_entropy

from minidp import DataParallel as DDP


def join_group() -> torch.device:
    """Join the launcher's process group; return this process's device."""
    if "LOCAL_RANK" not in os.environ:
        sys.exit(f"Started without a launcher.\n\n{__doc__}")
    device = torch.device("cpu")
    if torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"]):
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)  # or all ranks would meet on GPU 0
    dist.init_process_group(dist.get_default_backend_for_device(device))
    return device


def train(device: torch.device, dtype: torch.dtype, steps: int) -> None:
    """Train; all ranks check in each step that they skip it together, or none does."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(16, 256), nn.ReLU(), nn.Linear(256, 4)).to(device)
    model = DDP(net)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    # The default start, 2**16, suits most; this one is too large, to show what happens.
    scaler = GradScaler(device.type, 2.0**24, enabled=dtype == torch.float16)
    generator = torch.Generator().manual_seed(dist.get_rank())
    skipped = 0
    for step in range(1, steps + 1):
        x = torch.randn(64, 16, generator=generator).to(device)
        y = x[:, :4].argmax(dim=1)
        optimizer.zero_grad()
        with autocast(device.type, dtype):  # around forward and loss, not the backward
            loss = cross_entropy(model(x), y)
        # An overflow on any rank makes the average infinite on all of them. So all see
        # it, all skip the step, and all halve the scale: no word has to be exchanged.
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)  # a norm to clip at is one of unscaled gradients
        nn.utils.clip_grad_norm_(model.parameters(), max_norm=1.0)
        scale = scaler.get_scale()
        scaler.step(optimizer)  # unless there is an infinity
        scaler.update()
        skipped += scaler.get_scale() < scale
        if dist.get_rank() == 0 and (step <= 5 or step % (steps // 5) == 0):
            print(f"step {step:4}  loss {loss.item():.4f}  scale {scale:.0f}")
    mine = (skipped, [p.double().sum().item() for p in net.parameters()])
    everyones = [mine] * dist.get_world_size()
    dist.all_gather_object(everyones, mine)
    assert all(theirs == mine for theirs in everyones), everyones
    if dist.get_rank() == 0:
        print(f"steps skipped: {skipped}; weights equal on {len(everyones)} ranks")


def main() -> None:
    """Join, train, leave."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    dtypes = ("float16", "bfloat16")
    parser.add_argument("--dtype", choices=dtypes, default=dtypes[0])
    parser.add_argument("--smoke", action="store_true", help="20 steps, not 300")
    args = parser.parse_args()
    train(join_group(), getattr(torch, args.dtype), 20 if args.smoke else 300)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
