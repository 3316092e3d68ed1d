r"""PowerSGD: torch's low-rank gradient compression, unmodified.

    python -m torch.distributed.run --standalone --nproc-per-node 2 \
        examples/powersgd.py [--rank 2]

A bucket's gradients travel as pairs of thin matrices whose product is nearly them; what
is lost is added to the next step's. A hook that you write yourself:
`custom_comm_hook.py`. Gloo on CPU; NCCL if each process has a GPU of its own.
"""

import argparse
import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import (
    PowerSGDState,
    powerSGD_hook,
)
from torch.nn.functional import mse_loss

from minidp import DataParallel as DDP
from minidp import comm_hooks


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


def train(device: torch.device, steps: int, state: PowerSGDState | None) -> float:
    """Train, with compression if there is a state; return the mean loss at the end."""
    torch.manual_seed(0)
    hidden = [nn.Linear(64, 512), nn.Tanh(), nn.Linear(512, 512), nn.Tanh()]
    model = DDP(nn.Sequential(*hidden, nn.Linear(512, 1)).to(device))
    if state is not None:
        # The hook starts its second all-reduce in a callback of the first. On Gloo the
        # callbacks of two buckets may run in another order on every rank, which mixes
        # the buckets up. One at a time they cannot; NCCL keeps the order by itself.
        is_gloo = dist.get_backend() == "gloo"
        hook = comm_hooks.one_at_a_time(powerSGD_hook) if is_gloo else powerSGD_hook
        model.register_comm_hook(state, hook)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    generator = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(steps):
        x = torch.randn(64, 64, generator=generator).to(device)
        optimizer.zero_grad()
        loss = mse_loss(model(x), x[:, :4].sin().sum(dim=1, keepdim=True))
        loss.backward()
        optimizer.step()
    mean = loss.detach() / dist.get_world_size()
    dist.all_reduce(mean)
    return mean.item()


def main() -> dist.ProcessGroup:
    """Train without and with compression; compare. Return the group, now unused."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--rank", type=int, default=2, help="of the matrices (default 2)"
    )
    parser.add_argument("--smoke", action="store_true", help="20 steps, not 300")
    args = parser.parse_args()
    device, steps = join_group(), 20 if args.smoke else 300
    state = PowerSGDState(
        process_group=None,  # the default group
        matrix_approximation_rank=args.rank,
        start_powerSGD_iter=10,  # the first steps, which change most, travel whole
    )
    plain, compressed = train(device, steps, None), train(device, steps, state)
    ratio, _, _ = state.compression_stats()
    if dist.get_rank() == 0:
        print(f"all-reduce  loss {plain:.4f}")
        print(
            f"PowerSGD    loss {compressed:.4f}  1/{ratio:.0f} of the elements travel"
        )
    assert ratio > 2
    group = dist.group.WORLD
    dist.destroy_process_group()
    return group


if __name__ == "__main__":
    # Callbacks of this hook hold the group. If a thread of Gloo that ends one were the
    # last to hold it, that thread would free the group, wait for itself, and abort.
    kept_until_exit = main()
