r"""Classify images with a small ResNet: SyncBatchNorm, cosine schedule, SAM.

    python -m torch.distributed.run --standalone --nproc-per-node 2 \
        examples/image_classification.py [--sam 0.05]

It learns the 1,797 handwritten digits that come with scikit-learn. Gloo on CPU; NCCL if
each process has a GPU of its own.
"""

import argparse
import os
import sys

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits  # type: ignore[import-untyped]
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, relu
from torch.optim import SGD
from torch.optim.lr_scheduler import CosineAnnealingLR
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from minidp import DataParallel as DDP
from minidp import SyncBatchNorm


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


def load_images() -> tuple[TensorDataset, Tensor, Tensor]:
    """What to train on; images [N, 1, 8, 8] and labels [N] of the held-out fifth."""
    digits = load_digits()
    images, labels = torch.tensor(digits.images).float(), torch.tensor(digits.target)
    images, held_out = images[:, None] / 16, torch.arange(len(labels)) % 5 == 0
    data = TensorDataset(images[~held_out], labels[~held_out])
    return data, images[held_out], labels[held_out]


class Block(nn.Module):
    """Two convolutions beside a shortcut; half the resolution if it gets wider."""

    def __init__(self, width: int, wider: int) -> None:
        super().__init__()
        stride = 1 if width == wider else 2
        self.norm1, self.norm2 = nn.BatchNorm2d(width), nn.BatchNorm2d(wider)
        self.conv1 = nn.Conv2d(width, wider, 3, stride, padding=1)
        self.conv2 = nn.Conv2d(wider, wider, 3, padding=1)
        self.shortcut = nn.Conv2d(width, wider, 1, stride)

    def forward(self, x: Tensor) -> Tensor:
        """[batch, width, h, w] -> [batch, wider, h / stride, w / stride]."""
        x = relu(self.norm1(x))
        return self.shortcut(x) + self.conv2(relu(self.norm2(self.conv1(x))))


def gradients(model: DDP, x: Tensor, y: Tensor, radius: float) -> Tensor:
    """Leave averaged gradients in ``.grad``; return the loss of this rank's images."""
    (loss := cross_entropy(model(x), y)).backward()
    if radius > 0:
        # SAM: the gradient at the worst place nearby, the same on all ranks: the way
        # there is an average as well. (Batch norm's statistics count both forwards.)
        params = list(model.parameters())
        norm = nn.utils.get_total_norm([param.grad for param in params])
        uphill = [param.grad * (radius / norm) for param in params]
        for param, way in zip(params, uphill, strict=True):
            param.data.add_(way)
        model.zero_grad()
        cross_entropy(model(x), y).backward()
        for param, way in zip(params, uphill, strict=True):
            param.data.sub_(way)
    return loss.detach()  # item() would wait for the GPU


def main() -> None:
    """Train, and report the accuracy on every fifth image, which is held out."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--epochs", type=int, default=5, help="default 5")
    parser.add_argument("--sam", type=float, default=0.0, help="radius (default: none)")
    parser.add_argument("--smoke", action="store_true", help="1 epoch of 200 images")
    args, device = parser.parse_args(), join_group()
    data, images, labels = load_images()
    if args.smoke:
        args.epochs, data = 1, TensorDataset(*data[:200])
    sampler: DistributedSampler[int] = DistributedSampler(data)
    loader = DataLoader(data, batch_size=16, sampler=sampler)
    blocks = [Block(16, 16), Block(16, 32), Block(32, 64), nn.AdaptiveAvgPool2d(1)]
    net = nn.Sequential(nn.Conv2d(1, 16, 3), *blocks, nn.Flatten(), nn.Linear(64, 10))
    # A rank's 16 images are few for a mean and a variance: take those of all ranks.
    model = DDP(SyncBatchNorm.convert_sync_batchnorm(net).to(device))
    optimizer = SGD(model.parameters(), 0.1, momentum=0.9, weight_decay=5e-4)
    schedule = CosineAnnealingLR(optimizer, args.epochs * len(loader))
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)  # else every epoch has the same order
        model.train()
        for x, y in loader:
            optimizer.zero_grad()
            loss = gradients(model, x.to(device), y.to(device), args.sam)
            optimizer.step()
            schedule.step()  # after each step: it reaches zero with the last one
        model.eval()
        with torch.no_grad():  # they are few: every rank looks at all of them
            found = model(images.to(device)).argmax(dim=1).cpu()
        if dist.get_rank() == 0:
            right = (found == labels).double().mean()
            print(f"epoch {epoch + 1}  last loss {loss:.4f}  right {right:.1%}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
