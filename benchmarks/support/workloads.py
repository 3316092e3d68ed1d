"""Real models on paper: when their gradients would be ready, from operation counts.

The backward takes the time that is given; within it, each parameter takes its share of
the multiplications, and is ready when its share is over. Layers are passed backwards.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate

from minidp._schedule import Backward
from support.nets import gpt2_shapes, resnet50_shapes
from support.simulation import Work

FLOAT = 4  # bytes
FORWARD = 1 / 3  # of forward and backward: backward multiplies twice
SIDE = 224  # pixels of an image


def resnet50(seconds: float) -> Work:
    """ResNet-50 on images of 224 x 224.

    Args:
        seconds: of forward and backward.
    """
    shapes = resnet50_shapes()
    shares = [
        math.prod(shape) * _pixels(shape) if len(shape) > 1 else 0 for shape in shapes
    ]
    return _work("ResNet-50", shapes, shares, seconds)


def _pixels(shape: tuple[int, ...]) -> float:
    """Of a convolution's output: its channels tell the stage."""
    out, into = shape[0], shape[1]
    if into == 3:
        return (SIDE / 2) ** 2
    if len(shape) == 2:
        return 1  # the classifier
    inner = out // 4 if out > into else out  # 64, 128, 256, 512 in stages 0 to 3
    return (SIDE / 4 / 2 ** round(math.log2(inner / 64))) ** 2


def gpt2(seconds: float) -> Work:
    """GPT-2 small: each matrix meets every word once; attention is left out.

    The embedding is the head, too: its multiplications come first, its gradient last.

    Args:
        seconds: of forward and backward.
    """
    shapes = gpt2_shapes()
    shares = [math.prod(shape) if len(shape) == 2 else 0 for shape in shapes]
    head = shares[0]
    shares[:2] = [0, 0]
    return _work("GPT-2 small", shapes, shares, seconds, before=head)


def _work(
    title: str,
    shapes: Sequence[tuple[int, ...]],
    shares: Sequence[float],
    seconds: float,
    before: float = 0.0,
) -> Work:
    forward_s = FORWARD * seconds
    backward_s = seconds - forward_s
    whole = before + sum(shares)
    done = accumulate(reversed(shares), initial=before)
    next(done)
    ready = tuple(min(backward_s, backward_s * each / whole) for each in done)
    nbytes = tuple(FLOAT * math.prod(shape) for shape in reversed(shapes))
    return Work(title, forward_s, Backward(ready, nbytes, backward_s))
