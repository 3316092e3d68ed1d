"""Random streams: do ranks draw the same numbers, and does anything draw?"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import nn

from ._findings import Finding, ok, warning

CHECK = "random streams"
_REMEDY = (
    "after the model is made, seed each rank on its own: torch.manual_seed(seed + "
    "rank), the same for random and numpy"
)


def digest_of_states() -> dict[str, str]:
    """A digest of each generator's state in this process, by library."""
    states = {
        "torch": torch.get_rng_state().numpy().tobytes(),
        "random": repr(random.getstate()).encode(),
        "numpy": repr(np.random.get_state()).encode(),
    }
    if torch.cuda.is_initialized():
        states["torch.cuda"] = torch.cuda.get_rng_state().numpy().tobytes()
    return {name: hashlib.sha256(s).hexdigest()[:16] for name, s in states.items()}


@contextmanager
def untouched() -> Iterator[None]:
    """Whatever is drawn inside, the script's own numbers stay what they were."""
    old_random = random.getstate()
    old_numpy = np.random.get_state()
    num_gpus = torch.cuda.device_count() if torch.cuda.is_initialized() else 0
    with torch.random.fork_rng(devices=range(num_gpus)):
        try:
            yield
        finally:
            random.setstate(old_random)
            np.random.set_state(old_numpy)


def dropouts(module: nn.Module) -> list[str]:
    """Names of the modules that drop values while training."""
    return [
        name
        for name, child in module.named_modules()
        if isinstance(child, nn.modules.dropout._DropoutNd) and child.p > 0
    ]


def judge_streams(of_rank: Mapping[int, Mapping[str, str]], who: str) -> Finding:
    """Whether ranks draw the same numbers where they should not.

    Args:
        of_rank: what `digest_of_states` gave.
        who: what draws from them, as the subject of a sentence; empty: nothing seen.
    """
    same = sorted(
        name
        for name in of_rank[min(of_rank)]
        if len({digests.get(name) for digests in of_rank.values()}) == 1
    )
    if len(of_rank) == 1:
        return ok(CHECK, "one rank: nothing to compare")
    if same and who:
        found = f"{who}, and all ranks draw the same numbers ({', '.join(same)})"
        return warning(CHECK, found, _REMEDY)
    if same:
        return ok(
            CHECK, f"equal on all ranks ({', '.join(same)}); nothing seen uses it"
        )
    return ok(CHECK, "each rank draws numbers of its own")


def state_of(value: Any) -> str:
    """A digest of anything with a ``repr``."""
    return hashlib.sha256(repr(value).encode()).hexdigest()[:16]
