"""The models that are measured. Each returns its loss, and brings its own data."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as fn


class Net(nn.Module, ABC):
    """A module whose forward returns the loss."""

    title: str

    @abstractmethod
    def data(self, generator: torch.Generator) -> tuple[Tensor, ...]:
        """Return the inputs of one step."""


class ManySmall(Net):
    """Many small parameters; next to no arithmetic, so that overhead is what is left.

    Every parameter has a gradient of its own (a shared one would be copied first), and
    they become ready one after the other, last one first.
    """

    def __init__(self, count: int, numel: int) -> None:
        super().__init__()
        self.title = f"{count} parameters of {numel} elements"
        self.pieces = nn.ParameterList(torch.randn(numel) for _ in range(count))

    def forward(self, factors: Tensor) -> Tensor:
        """Return the loss: ``sum(pieces * factors)``."""
        total = torch.zeros(factors.shape[1])
        for piece, factor in zip(self.pieces, factors.unbind(), strict=True):
            total = torch.addcmul(total, piece, factor)
        return total.sum()

    def data(self, generator: torch.Generator) -> tuple[Tensor, ...]:
        """Return the inputs of one step."""
        return (
            torch.randn(len(self.pieces), self.pieces[0].numel(), generator=generator),
        )


class Mlp(Net):
    """Few large square layers; with ``unused``, the last one takes no part."""

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
        """Return the inputs of one step."""
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


class Transformer(Net):
    """A language model of a few blocks: parameters of very unequal sizes."""

    def __init__(self, blocks: int, width: int, words: int, length: int) -> None:
        super().__init__()
        self.title = f"transformer, {blocks} block{'s' * (blocks > 1)}, width {width}"
        self.words, self.length = words, length
        self.embedding = nn.Embedding(words, width)
        self.positions = nn.Parameter(torch.randn(length, width))
        self.blocks = nn.Sequential(*(Block(width, heads=4) for _ in range(blocks)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, words)

    def forward(self, text: Tensor) -> Tensor:
        """Return the loss: cross entropy of each next word."""
        values = self.blocks(self.embedding(text[:, :-1]) + self.positions)
        guess = self.head(self.norm(values))
        loss: Tensor = fn.cross_entropy(guess.flatten(0, 1), text[:, 1:].flatten())
        return loss

    def data(self, generator: torch.Generator) -> tuple[Tensor, ...]:
        """Return the inputs of one step."""
        shape = (4, self.length + 1)
        return (torch.randint(self.words, shape, generator=generator),)


class Shapes(Net):
    """The parameters of a well-known model, and next to nothing else.

    Every parameter has a gradient of its own, at the price of reading it twice and
    writing the gradient once: what is done with gradients shows as nowhere else.
    """

    def __init__(self, title: str, shapes: Sequence[tuple[int, ...]]) -> None:
        super().__init__()
        self.title = title
        self.pieces = nn.ParameterList(torch.randn(shape) for shape in shapes)

    def forward(self, factors: Tensor) -> Tensor:
        """Return the loss, whose gradient of ``piece`` is ``factor * piece``."""
        rows = (piece.view(-1) for piece in self.pieces)
        return torch.stack([torch.dot(row, row.detach()) for row in rows]) @ factors

    def data(self, generator: torch.Generator) -> tuple[Tensor, ...]:
        """Return the inputs of one step."""
        return (torch.randn(len(self.pieces), generator=generator),)


def resnet50_shapes(
    width: int = 64, blocks: Sequence[int] = (3, 4, 6, 3), classes: int = 1000
) -> list[tuple[int, ...]]:
    """Of ResNet-50's parameters: 161, with 25.6 million elements."""
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
    """Of GPT-2 small's parameters: 148, with 124 million elements."""
    shapes: list[tuple[int, ...]] = [(words, width), (length, width)]
    for _ in range(blocks):
        shapes += [(width,), (width,)]  # norm
        shapes += [(width, 3 * width), (3 * width,), (width, width), (width,)]
        shapes += [(width,), (width,)]  # norm
        shapes += [(width, 4 * width), (4 * width,), (4 * width, width), (width,)]
    return [*shapes, (width,), (width,)]


@dataclass(frozen=True)
class Sizes:
    """A model at full size, and one of the same kind for ``--smoke``."""

    full: Callable[[], Net]
    smoke: Callable[[], Net]


NETS = {
    "small": Sizes(lambda: ManySmall(1000, 64), lambda: ManySmall(30, 8)),
    "tiny": Sizes(lambda: Mlp(2, 64, batch=32), lambda: Mlp(2, 8, batch=4)),
    "mlp": Sizes(
        lambda: Mlp(24, 1024, batch=16),
        lambda: Mlp(3, 160, batch=4),  # still large enough to be copied at once
    ),
    "transformer": Sizes(
        lambda: Transformer(4, 128, words=512, length=64),
        lambda: Transformer(1, 16, words=32, length=8),
    ),
    "resnet50": Sizes(
        lambda: Shapes("parameters of ResNet-50", resnet50_shapes()),
        lambda: Shapes("parameters of ResNet-50", resnet50_shapes(4, (1, 1), 9)),
    ),
    "gpt2": Sizes(
        lambda: Shapes("parameters of GPT-2 small", gpt2_shapes()),
        lambda: Shapes("parameters of GPT-2 small", gpt2_shapes(8, 1, 99, 9)),
    ),
    "unused": Sizes(
        lambda: Mlp(8, 1024, batch=128, unused=True),
        lambda: Mlp(3, 160, batch=4, unused=True),
    ),
}
