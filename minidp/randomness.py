"""Keep and seed every random generator that a training may use.

These are torch's on the CPU and on each accelerator, Python's, and numpy's. Python and
numpy have one global generator each; generators that a script makes for itself are its
own affair.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch

from minidp import accelerator


class Numbers:
    """The state of all generators at the moment when this object is made."""

    def __init__(self) -> None:
        self._of_python, self._of_numpy = random.getstate(), np.random.get_state()
        self._of_torch, self._of_devices = (
            torch.get_rng_state(),
            accelerator.generators(),
        )

    def restore(self) -> None:
        """Let all generators go on from that moment."""
        random.setstate(self._of_python)
        np.random.set_state(self._of_numpy)
        torch.set_rng_state(self._of_torch)
        accelerator.restore_generators(self._of_devices)


@contextmanager
def kept() -> Iterator[None]:
    """Let the block draw random numbers without any trace after it."""
    numbers = Numbers()
    try:
        yield
    finally:
        numbers.restore()


def seed_all(*numbers: int) -> None:
    """Seed all generators from some integers, always in the same way."""
    accelerator.seed(_seed_host(numbers))


@contextmanager
def seeded(*numbers: int) -> Iterator[None]:
    """Let the block draw random numbers that depend on some integers only.

    It seeds the generators of torch on the CPU, of Python and of numpy, and lets them
    go on after the block as if nothing had been drawn. Those of accelerators are left
    alone, so that workers of a ``DataLoader`` can use this::

        class Batches:
            def __getitem__(self, where):  # a step and a logical rank
                with minidp.seeded(*where):
                    return batch_of(*where)

    Args:
        numbers: For example a step and a logical rank, or an epoch and an index.
    """
    of_python, of_numpy = random.getstate(), np.random.get_state()
    of_torch = torch.get_rng_state()
    _seed_host(numbers)
    try:
        yield
    finally:
        random.setstate(of_python)
        np.random.set_state(of_numpy)
        torch.set_rng_state(of_torch)


def _seed_host(numbers: Sequence[int]) -> int:
    """Seed what draws on the CPU from some integers, and return the seed."""
    text = ",".join(map(str, numbers)).encode()
    digest = hashlib.blake2b(text, digest_size=8).digest()
    seed = int.from_bytes(digest, "little") >> 1  # torch takes 63 bits on any device
    # torch.manual_seed formats the stack where there is no GPU, which takes 50 us.
    torch.default_generator.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)
    return seed
