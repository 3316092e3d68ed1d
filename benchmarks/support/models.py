"""Well-known models with their arithmetic, at sizes that two cores step in a second.

The MLP is the one whose times stand in the project's notes. ResNet-50 and GPT-2 small
have the structure and the shapes of the originals; what was reduced is in their titles:
small images or short texts, few at a time, and of GPT-2 fewer blocks and words. There
is less arithmetic for each byte than in a real training: that is hard to hide behind.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as fn

from support.nets import Block, Mlp, Net, Sizes


class Bottleneck(nn.Module):
    """Three convolutions beside a shortcut."""

    def __init__(self, inputs: int, inner: int, stride: int) -> None:
        super().__init__()
        outputs = 4 * inner
        self.reduce = _convolution(inputs, inner, kernel=1)
        self.look = _convolution(inner, inner, kernel=3, stride=stride)
        self.expand = _convolution(inner, outputs, kernel=1)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or inputs != outputs:
            self.shortcut = _convolution(inputs, outputs, kernel=1, stride=stride)

    def forward(self, values: Tensor) -> Tensor:
        """Return the values for the next block."""
        found = fn.relu(self.look(fn.relu(self.reduce(values))))
        return fn.relu(self.expand(found) + self.shortcut(values))


def _convolution(into: int, out: int, kernel: int, stride: int = 1) -> nn.Sequential:
    layer = nn.Conv2d(into, out, kernel, stride, padding=kernel // 2, bias=False)
    return nn.Sequential(layer, nn.BatchNorm2d(out))


class ResNet(Net):
    """ResNet-50, on ``batch`` images of ``side`` x ``side`` pixels."""

    def __init__(
        self,
        side: int,
        batch: int,
        width: int = 64,
        blocks: Sequence[int] = (3, 4, 6, 3),
        classes: int = 1000,
    ) -> None:
        super().__init__()
        self.title = f"ResNet-50, {batch} images of {side} x {side}"
        self.classes, self.shape = classes, (batch, 3, side, side)
        self.stem = _convolution(3, width, kernel=7, stride=2)
        layers, inputs = [], width
        for stage, count in enumerate(blocks):
            inner = width * 2**stage
            for block in range(count):
                stride = 2 if stage > 0 and block == 0 else 1
                layers.append(Bottleneck(inputs, inner, stride))
                inputs = 4 * inner
        self.blocks = nn.Sequential(*layers)
        self.head = nn.Linear(inputs, classes)

    def forward(self, images: Tensor, answers: Tensor) -> Tensor:
        """Return the loss: cross entropy."""
        values = fn.max_pool2d(fn.relu(self.stem(images)), 3, stride=2, padding=1)
        guess = self.head(self.blocks(values).mean(dim=(2, 3)))
        loss: Tensor = fn.cross_entropy(guess, answers)
        return loss

    def data(self, generator: torch.Generator) -> tuple[Tensor, ...]:
        """Return the inputs of one step."""
        images = torch.randn(self.shape, generator=generator)
        count = self.shape[:1]
        return images, torch.randint(self.classes, count, generator=generator)


class Gpt2(Net):
    """GPT-2: the head is the word embedding, whose gradient is complete last."""

    def __init__(
        self, blocks: int, words: int, length: int, batch: int, width: int = 768
    ) -> None:
        super().__init__()
        self.title = f"GPT-2 small, {blocks} of 12 blocks, {words} of 50257 words, "
        self.title += f"{batch} texts of {length}"
        self.words, self.shape = words, (batch, length + 1)
        self.embedding = nn.Embedding(words, width)
        self.positions = nn.Parameter(0.02 * torch.randn(length, width))
        layers = (Block(width, heads=max(1, width // 64)) for _ in range(blocks))
        self.blocks = nn.Sequential(*layers)
        self.norm = nn.LayerNorm(width)
        nn.init.normal_(self.embedding.weight, std=0.02)

    def forward(self, text: Tensor) -> Tensor:
        """Return the loss: cross entropy of each next word."""
        values = self.blocks(self.embedding(text[:, :-1]) + self.positions)
        guess = fn.linear(self.norm(values), self.embedding.weight)
        loss: Tensor = fn.cross_entropy(guess.flatten(0, 1), text[:, 1:].flatten())
        return loss

    def data(self, generator: torch.Generator) -> tuple[Tensor, ...]:
        """Return the inputs of one step."""
        return (torch.randint(self.words, self.shape, generator=generator),)


MODELS = {
    "mlp": Sizes(
        lambda: Mlp(12, 768, batch=128),
        lambda: Mlp(3, 160, batch=4),
    ),
    "resnet50": Sizes(
        lambda: ResNet(side=64, batch=4),
        lambda: ResNet(side=32, batch=2, width=8, blocks=(1, 1), classes=9),
    ),
    "gpt2": Sizes(
        lambda: Gpt2(blocks=2, words=8192, length=64, batch=2),
        lambda: Gpt2(blocks=1, words=50, length=8, batch=2, width=16),
    ),
}
# For a GPU: nothing is reduced but the batch.
GPU_MODELS = {
    "mlp": lambda: Mlp(24, 4096, batch=4096),
    "resnet50": lambda: ResNet(side=224, batch=64),
    "gpt2": lambda: Gpt2(blocks=12, words=50257, length=512, batch=8),
}
