r"""A small GPT that learns to write like Python's manual, letter by letter.

    python -m torch.distributed.run --standalone --nproc-per-node 2 examples/gpt.py

The text ships with Python: what help("topics") shows. A few minutes on two CPU cores;
--steps 5000 writes better. Gloo on CPU; NCCL if each process has a GPU of its own.
"""

import argparse
import math
import os
import sys
from pydoc_data.topics import topics

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

from minidp import DataParallel as DDP

LETTERS = 256  # bytes
CONTEXT, WIDTH, HEADS, DEPTH = 64, 128, 4, 4


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


class Block(nn.Module):
    """Attention to what came before, then two layers; each beside a shortcut."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.split, self.mix = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        layers = [nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)]
        self.layers = nn.Sequential(*layers)

    def forward(self, x: Tensor) -> Tensor:
        """[batch, length, WIDTH] -> the same."""
        heads = self.split(self.norm1(x)).unflatten(-1, (3, HEADS, -1))
        q, k, v = heads.permute(2, 0, 3, 1, 4)  # each [batch, HEADS, length, rest]
        seen = scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.mix(seen.transpose(1, 2).flatten(2))
        return x + self.layers(self.norm2(x))


class GPT(nn.Module):
    """Letters -> scores of the letter that follows each."""

    def __init__(self) -> None:
        super().__init__()
        self.letters = nn.Embedding(LETTERS, WIDTH)
        self.places = nn.Parameter(0.1 * torch.randn(CONTEXT, WIDTH))
        blocks = [Block() for _ in range(DEPTH)]
        last = [nn.LayerNorm(WIDTH), nn.Linear(WIDTH, LETTERS)]
        self.layers = nn.Sequential(*blocks, *last)

    def forward(self, x: Tensor) -> Tensor:
        """[batch, length] -> [batch, length, letters]."""
        return self.layers(self.letters(x) + self.places[: x.size(1)])


@torch.no_grad()
def write(net: GPT, text: str, num_letters: int, device: torch.device) -> str:
    """Go on with a text by so many letters."""
    x = torch.tensor([list(text.encode())], device=device)
    for _ in range(num_letters):
        scores = net(x[:, -CONTEXT:])[:, -1]
        x = torch.cat([x, torch.multinomial(scores.softmax(-1), 1)], dim=1)
    return bytes(x[0].tolist()).decode(errors="replace")


def train(net: GPT, text: Tensor, steps: int) -> None:
    """Train on random places of the text; rank 0 reports."""
    model = DDP(net)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    dice = torch.Generator().manual_seed(dist.get_rank())  # other places on each rank
    for step in range(1, steps + 1):
        starts = torch.randint(len(text) - CONTEXT, (16,), generator=dice)
        pieces = torch.stack([text[i : i + CONTEXT + 1] for i in starts])
        pieces = pieces.to(model.device)
        optimizer.zero_grad()
        loss = cross_entropy(model(pieces[:, :-1]).mT, pieces[:, 1:])
        loss.backward()
        # The average is what is clipped: by as much on every rank.
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if dist.get_rank() == 0 and (step == steps or step % 100 == 0):
            print(f"step {step:5}  loss {loss.item():.3f}", flush=True)
    assert loss < math.log(LETTERS) - 1, "it has learned next to nothing"


def main() -> None:
    """Train; let rank 0 write something."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=1000, help="default 1000")
    parser.add_argument("--smoke", action="store_true", help="10 steps")
    args, device = parser.parse_args(), join_group()
    net = GPT().to(device)
    text = torch.tensor(list("".join(topics.values()).encode()))
    train(net, text, 10 if args.smoke else args.steps)
    if dist.get_rank() == 0:
        # The net, not its wrapper: a forward of that may be a collective.
        print(write(net, "The ", 40 if args.smoke else 400, device))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
