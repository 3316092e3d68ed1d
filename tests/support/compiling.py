"""torch.compile in tests: a clean compiler, and a backend that counts its graphs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch._dynamo
from torch._dynamo import compiled_autograd


@contextmanager
def clean_compiler(**config: Any) -> Iterator[None]:
    """Reset torch.compile before and after the block; ``config`` is of dynamo."""
    torch.compiler.reset()
    try:
        with torch._dynamo.config.patch(**config):
            yield
    finally:
        torch.compiler.reset()


class Counting:
    """A backend of torch.compile that counts graphs, and runs them as they are."""

    def __init__(self) -> None:
        self.num_graphs = 0

    def __call__(self, graph: Callable[..., Any], _inputs: Any) -> Callable[..., Any]:
        self.num_graphs += 1
        return graph


def compiled_backwards(backend: Any = None, **options: Any) -> Any:
    """Return a context in which backwards are compiled; None: captured, then run."""
    if backend is None:
        return compiled_autograd._enable(lambda graph: graph)
    return compiled_autograd._enable(torch.compile(backend=backend, **options))
