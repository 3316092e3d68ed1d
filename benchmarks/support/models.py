"""What is trained. Each model returns its loss and makes the data of a step.

The MLP, ResNet-50 and GPT-2 of `MODELS` have the structure of the originals with small
batches, so that two cores step them within a second. Their titles say what was reduced.
There is less arithmetic per byte than in a real training: communication is harder to
hide. The models of `NETS` do next to no arithmetic, so that a wrapper's overhead shows.
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as fn


class Net(nn.Module, ABC):
    """A module whose forward returns the loss."""

    title: str

    @abstractmethod
    def data(self, generator: torch.Generator) -> tuple[Tensor, ...]:
        """Make the inputs of one step."""


# -- parameters with next to no arithmetic ---------------------------------------------


class ManySmall(Net):
    """Many small parameters, ready one after the other, the last one first."""

    def __init__(self, count: int, numel: int) -> None:
        super().__init__()
        self.title = f"{count} parameters of {numel} elements"
        self.pieces = nn.ParameterList(torch.randn(numel) for _ in range(count))

    def forward(self, factors: Tensor) -> Tensor:
        """Return the loss: ``sum(pieces * factors)``."""
        total = factors.new_zeros(factors.shape[1])
        for piece, factor in zip(self.pieces, factors.unbind(), strict=True):
            total = torch.addcmul(total, piece, factor)
        return total.sum()

    def data(self, generator: torch.Generator) -> tuple[Tensor, ...]:
        """Make the inputs of one step."""
        shape = len(self.pieces), self.pieces[0].numel()
        return (torch.randn(*shape, generator=generator),)


class Shapes(Net):
    """Parameters with the shapes of a well-known model.

    Each parameter has a gradient of its own, at the price of reading the parameter
    twice and writing the gradient once. No arithmetic hides the copies of a wrapper.
    """

    def __init__(self, title: str, shapes: Sequence[tuple[int, ...]]) -> None:
        super().__init__()
        self.title = title
        self.pieces = nn.ParameterList(torch.randn(shape) for shape in shapes)

    def forward(self, factors: Tensor) -> Tensor:
        """Return the loss. The gradient of ``piece`` is ``factor * piece``."""
        rows = (piece.view(-1) for piece in self.pieces)
        return torch.stack([torch.dot(row, row.detach()) for row in rows]) @ factors

    def data(self, generator: torch.Generator) -> tuple[Tensor, ...]:
        """Make the inputs of one step."""
        return (torch.randn(len(self.pieces), generator=generator),)


def resnet50_shapes(
    width: int = 64, blocks: Sequence[int] = (3, 4, 6, 3), classes: int = 1000
) -> list[tuple[int, ...]]:
    """List the shapes of ResNet-50's 161 parameters: 25.6 million elements."""
    shapes: list[tuple[int, ...]] = []

    def convolution(into: int, out: int, kernel: int) -> None:
        shapes.extend([(out, into, kernel, kernel), (out,), (out,)])  # and its norm

    convolution(3, width, 7)
    inputs = width
    for stage, count in enumerate(blocks):
        inner = width * 2**stage
        for block in range(count):
            convolution(inputs, inner, 1)
            convolution(inner, inner, 3)
            convolution(inner, 4 * inner, 1)
            if block == 0:
                convolution(inputs, 4 * inner, 1)  # of the shortcut
            inputs = 4 * inner
    return [*shapes, (classes, inputs), (classes,)]


def gpt2_shapes(
    width: int = 768, blocks: int = 12, words: int = 50257, length: int = 1024
) -> list[tuple[int, ...]]:
    """List the shapes of GPT-2 small's 148 parameters: 124 million elements."""
    shapes: list[tuple[int, ...]] = [(words, width), (length, width)]
    for _ in range(blocks):
        shapes += [(width,), (width,)]  # norm
        shapes += [(width, 3 * width), (3 * width,), (width, width), (width,)]
        shapes += [(width,), (width,)]  # norm
        shapes += [(width, 4 * width), (4 * width,), (4 * width, width), (width,)]
    return [*shapes, (width,), (width,)]


def one_parameter(numel: int, title: str) -> Shapes:
    """Make a model of one parameter, whose step is nearly all communication."""
    return Shapes(f"one parameter of {title}", [(numel,)])


# -- models with their arithmetic ------------------------------------------------------


class Mlp(Net):
    """Square layers with ReLU. With ``unused``, the last one takes no part."""

    def __init__(
        self, layers: int, width: int, batch: int, *, unused: bool = False
    ) -> None:
        super().__init__()
        self.title = f"MLP, {layers} layers of {width} x {width}"
        self.title += ", the last one unused" * unused
        self.layers = nn.ModuleList(
            nn.Linear(width, width, bias=False) for _ in range(layers)
        )
        self.used = layers - unused
        self.shape = (batch, width)

    def forward(self, values: Tensor) -> Tensor:
        """Return the loss: the mean square of the output."""
        for layer in self.layers[: self.used]:
            values = fn.relu(layer(values))
        return values.square().mean()

    def data(self, generator: torch.Generator) -> tuple[Tensor, ...]:
        """Make the inputs of one step."""
        return (torch.randn(*self.shape, generator=generator),)


class Block(nn.Module):
    """Causal self-attention and a two-layer perceptron, normalized first."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(width)
        self.queries_keys_values = nn.Linear(width, 3 * width)
        self.mix = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width)
        self.widen = nn.Linear(width, 4 * width)
        self.narrow = nn.Linear(4 * width, width)

    def forward(self, values: Tensor) -> Tensor:
        """Return the values (batch, length, width) for the next block."""
        split = self.queries_keys_values(self.norm1(values)).chunk(3, dim=-1)
        query, key, value = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in split
        )
        attended = fn.scaled_dot_product_attention(query, key, value, is_causal=True)
        values = values + self.mix(attended.transpose(1, 2).flatten(2))
        return values + self.narrow(fn.gelu(self.widen(self.norm2(values))))


class LanguageModel(Net):
    """A small transformer, or GPT-2 small with ``is_gpt2``.

    GPT-2's head is its word embedding, whose gradient is complete last.
    """

    def __init__(
        self,
        blocks: int,
        width: int,
        words: int,
        shape: tuple[int, int],
        *,
        is_gpt2: bool = False,
    ) -> None:
        super().__init__()
        batch, length = shape
        self.title = f"transformer, {blocks} block{'s' * (blocks > 1)}, width {width}"
        if is_gpt2:
            self.title = f"GPT-2 small, {blocks} of 12 blocks, {words} of 50257 words, "
            self.title += f"{batch} texts of {length}"
        self.words, self.shape = words, (batch, length + 1)
        self.embedding = nn.Embedding(words, width)
        self.positions = nn.Parameter(0.02 * torch.randn(length, width))
        heads = max(1, width // 64) if is_gpt2 else 4
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(blocks)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, words, bias=not is_gpt2)
        if is_gpt2:
            self.head.weight = self.embedding.weight
            nn.init.normal_(self.embedding.weight, std=0.02)

    def forward(self, text: Tensor) -> Tensor:
        """Return the loss: the cross entropy of each next word."""
        values = self.blocks(self.embedding(text[:, :-1]) + self.positions)
        guess = self.head(self.norm(values))
        loss: Tensor = fn.cross_entropy(guess.flatten(0, 1), text[:, 1:].flatten())
        return loss

    def data(self, generator: torch.Generator) -> tuple[Tensor, ...]:
        """Make the inputs of one step."""
        return (torch.randint(self.words, self.shape, generator=generator),)


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
        """Return the loss: the cross entropy."""
        values = fn.max_pool2d(fn.relu(self.stem(images)), 3, stride=2, padding=1)
        guess = self.head(self.blocks(values).mean(dim=(2, 3)))
        loss: Tensor = fn.cross_entropy(guess, answers)
        return loss

    def data(self, generator: torch.Generator) -> tuple[Tensor, ...]:
        """Make the inputs of one step."""
        images = torch.randn(self.shape, generator=generator)
        count = self.shape[:1]
        return images, torch.randint(self.classes, count, generator=generator)


# -- sizes -----------------------------------------------------------------------------

FULL, SMOKE, GPU = "full", "smoke", "gpu"
Table = dict[str, dict[str, Callable[[], Net]]]
NETS: Table = {
    "small": {
        FULL: lambda: ManySmall(1000, 64),
        SMOKE: lambda: ManySmall(30, 8),
    },
    "tiny": {
        FULL: lambda: Mlp(2, 64, batch=32),
        SMOKE: lambda: Mlp(2, 8, batch=4),
    },
    "layers": {
        FULL: lambda: Mlp(6, 128, batch=32),
        SMOKE: lambda: Mlp(3, 8, batch=4),
    },
    "mlp": {
        FULL: lambda: Mlp(24, 1024, batch=16),
        SMOKE: lambda: Mlp(3, 160, batch=4),  # still large enough to be copied at once
    },
    "transformer": {
        FULL: lambda: LanguageModel(4, 128, words=512, shape=(4, 64)),
        SMOKE: lambda: LanguageModel(1, 16, words=32, shape=(4, 8)),
    },
    "resnet50": {
        FULL: lambda: Shapes("parameters of ResNet-50", resnet50_shapes()),
        SMOKE: lambda: Shapes("parameters of ResNet-50", resnet50_shapes(4, (1,), 9)),
    },
    "gpt2": {
        FULL: lambda: Shapes("parameters of GPT-2 small", gpt2_shapes()),
        SMOKE: lambda: Shapes("parameters of GPT-2 small", gpt2_shapes(8, 1, 99, 9)),
    },
    **{
        f"reduce-{title}": {
            FULL: functools.partial(one_parameter, numel, title),
            SMOKE: functools.partial(one_parameter, 100, title),
        }
        for title, numel in (
            *(("64KiB", 16 * 1024), ("1MiB", 256 * 1024)),
            ("25MiB", 25 * 256 * 1024),
        )
    },
    "link": {  # overhead.py measures it on a slow link
        FULL: lambda: Mlp(8, 1024, batch=128, unused=True),
        SMOKE: lambda: Mlp(3, 160, batch=4, unused=True),
    },
}
MODELS: Table = {
    "mlp": {
        FULL: lambda: Mlp(12, 768, batch=128),
        SMOKE: lambda: Mlp(3, 160, batch=4),
        GPU: lambda: Mlp(24, 4096, batch=4096),
    },
    "resnet50": {
        FULL: lambda: ResNet(side=64, batch=4),
        SMOKE: lambda: ResNet(side=32, batch=2, width=8, blocks=(1, 1), classes=9),
        GPU: lambda: ResNet(side=224, batch=64),
    },
    "gpt2": {
        FULL: lambda: LanguageModel(2, 768, 8192, (2, 64), is_gpt2=True),
        SMOKE: lambda: LanguageModel(1, 16, 50, (2, 8), is_gpt2=True),
        GPU: lambda: LanguageModel(12, 768, 50257, (8, 512), is_gpt2=True),
    },
}


def make(
    model: dict[str, Callable[[], Net]], *, smoke: bool, device: str = "cpu"
) -> Net:
    """Make a model of `NETS` or `MODELS`, the same on every rank."""
    torch.manual_seed(0)
    size = SMOKE if smoke else FULL if device == "cpu" else GPU
    return model[size]().to(device)
