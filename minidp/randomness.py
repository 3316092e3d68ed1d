"""Keep and seed every random generator that a training may use.

These are torch's on the CPU and on each accelerator, Python's, and numpy's. Python and
numpy have one global generator each; generators that a script makes for itself are its
own affair.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator
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
    text = ",".join(map(str, numbers)).encode()
    digest = hashlib.blake2b(text, digest_size=8).digest()
    seed = int.from_bytes(digest, "little") >> 1  # torch takes 63 bits on any device
    # torch.manual_seed formats the stack where there is no GPU, which takes 50 us.
    torch.default_generator.manual_seed(seed)
    accelerator.seed(seed)
    random.seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)
