r"""Memory for time: activation checkpointing inside DDP.

    python -m torch.distributed.run --standalone --nproc-per-node 2 \
        examples/gradient_checkpointing.py

A checkpointed block keeps its input alone, and computes the rest again in the backward.
The script trains a net in both ways, and compares weights, and what forwards keep. Gloo
on CPU; NCCL if each process has a GPU of its own.
"""

import argparse
import os
import sys

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.utils.checkpoint import checkpoint

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


class Net(nn.Module):
    """Blocks beside shortcuts, checkpointed or not."""

    def __init__(self, *, checkpointed: bool) -> None:
        super().__init__()
        self.checkpointed = checkpointed
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.LayerNorm(64), nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)
            )
            for _ in range(8)
        )

    def forward(self, x: Tensor) -> Tensor:
        """[batch, 64] -> [batch, 64]."""
        for block in self.blocks:
            if self.checkpointed:
                # Not reentrant: it is a part of the one backward then. The other kind
                # runs a backward of its own inside, which DDP follows less far: layers
                # that are used twice need static_graph=True with it.
                x = x + checkpoint(block, x, use_reentrant=False)
            else:
                x = x + block(x)
        return x


class Kept:
    """Counts bytes that forwards keep for backwards; parameters are there anyhow."""

    def __init__(self, model: nn.Module) -> None:
        self.nbytes = 0
        self.pointers = {param.data_ptr() for param in model.parameters()}

    def pack(self, tensor: Tensor) -> Tensor:
        """Called for each tensor that is kept."""
        if tensor.data_ptr() not in self.pointers:
            self.nbytes += tensor.nbytes
        return tensor


def train(
    device: torch.device, steps: int, *, checkpointed: bool
) -> tuple[int, list[Tensor]]:
    """Return the bytes kept by a forward, and the weights at the end."""
    torch.manual_seed(0)
    model = DDP(Net(checkpointed=checkpointed).to(device))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    generator = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(steps):
        x = torch.randn(256, 64, generator=generator).to(device)
        optimizer.zero_grad()
        kept = Kept(model)
        with torch.autograd.graph.saved_tensors_hooks(kept.pack, lambda tensor: tensor):
            loss = mse_loss(model(x), x.roll(1, dims=1))
        loss.backward()
        optimizer.step()
    if dist.get_rank() == 0:
        name = "checkpointed" if checkpointed else "all kept"
        print(f"{name:12}  loss {loss.item():.4f}  kept {kept.nbytes / 2**20:.1f} MiB")
    return kept.nbytes, list(model.parameters())


def main() -> None:
    """Train twice, compare."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--smoke", action="store_true", help="5 steps, not 100")
    steps = 5 if parser.parse_args().smoke else 100
    device = join_group()
    plain_bytes, plain = train(device, steps, checkpointed=False)
    few_bytes, weights = train(device, steps, checkpointed=True)
    assert few_bytes < plain_bytes / 5
    torch.testing.assert_close(weights, plain)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
