"""The argument ``logical_ranks``, and what of a run decides about its bits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch

_63_BITS = 2**63 - 1


@dataclass(frozen=True)
class LogicalOptions:
    """How many logical ranks there are, and where their random numbers begin.

    Raises:
        TypeError, ValueError: This is no such number.
    """

    number: int
    seed: int = 0
    first_step: int = 0  # how many steps earlier runs have made
    is_resumed: bool = False  # the other numbers are those of an earlier run

    @property
    def compared(self) -> tuple[int, ...]:
        """What must be equal on all ranks. A new run's seed is that of rank 0."""
        of_state = (self.seed, self.first_step) if self.is_resumed else ()
        return (self.number, *of_state)

    def __post_init__(self) -> None:
        if isinstance(self.number, bool) or not isinstance(self.number, int):
            kind = type(self.number).__name__
            raise TypeError(
                "logical_ranks must be a number (int), or what model.logical_state "
                f"returned, but got {self.number!r} ({kind})."
            )
        if self.number < 1:
            raise ValueError(
                f"logical_ranks must be at least 1, but got {self.number}."
            )
        for name, value in (("seed", self.seed), ("first_step", self.first_step)):
            if type(value) is not int or not 0 <= value <= _63_BITS:
                raise ValueError(
                    f"logical_ranks got a state with {name}={value!r}: pass what "
                    "model.logical_state returned."
                )


@dataclass(frozen=True)
class AuditOptions:
    """Which steps are audited, and what happens if ranks have computed other bits."""

    every: int  # steps; the first one is audited
    action: Literal["raise", "warn"] = "raise"


def read(given: int | Mapping[str, Any], seed: int) -> LogicalOptions:
    """Return the options for the argument ``logical_ranks``.

    Args:
        given: A number, or plain data of an earlier run (`state`).
        seed: Where random numbers begin in a new run.

    Raises:
        TypeError, ValueError: It is neither.
    """
    if not isinstance(given, Mapping):
        return LogicalOptions(given, seed & _63_BITS)  # it travels as a signed number
    try:
        number, seed = given["number"], given["seed"]
        return LogicalOptions(number, seed, given["first_step"], is_resumed=True)
    except KeyError as error:
        raise ValueError(
            f"logical_ranks got a mapping without {error}: pass what "
            "model.logical_state returned, or a number."
        ) from None


def conditions(device: torch.device) -> dict[str, str]:
    """Return what else decides about bits, as texts by name."""
    return {
        "torch": str(torch.__version__),  # a class of torch's own
        "device": device.type,
        "threads": str(torch.get_num_threads()),
        "float32 matmul precision": torch.get_float32_matmul_precision(),
        "deterministic algorithms": str(torch.are_deterministic_algorithms_enabled()),
    }
