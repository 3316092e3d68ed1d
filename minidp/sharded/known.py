"""Which optimizers can be divided among ranks: those that see one parameter at once.

A rank steps the parameters that it owns, each of them whole. That is right if what
becomes of a parameter depends on its own gradient, its own state and the settings of
its group, and on nothing else. It holds for most classes of ``torch.optim``. Of other
classes nobody knows: one may scale by a norm over all gradients, and would see those of
one rank only. So the user has to say it for them.

A large parameter can be divided, too, if each of its elements is stepped by itself.
Most classes of ``torch.optim`` do that, and not Adafactor, which keeps sums of rows and
columns, nor Muon, which multiplies matrices.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.optim.optimizer import Optimizer

from minidp.guard import needs_closure

_OF_TORCH = (
    *("ASGD", "Adadelta", "Adafactor", "Adagrad", "Adam", "AdamW", "Adamax"),
    *("Muon", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD"),
)
_KNOWN = {getattr(torch.optim, name, None) for name in _OF_TORCH}  # some are new
_OF_TENSORS = {getattr(torch.optim, name, None) for name in ("Adafactor", "Muon")}


def is_known(optimizer: Optimizer) -> bool:
    """Return whether an optimizer is known to look at one parameter at once.

    Subclasses are not known, because they may do anything.
    """
    return type(optimizer) in _KNOWN


def is_elementwise(optimizer: Optimizer, *, is_told: bool) -> bool:
    """Return whether an optimizer looks at one element of a parameter at once.

    Args:
        optimizer: The optimizer.
        is_told: Whether the user says so of optimizers that minidp does not know.
    """
    if is_known(optimizer):
        return type(optimizer) not in _OF_TENSORS
    return is_told


def check(optimizers: Sequence[Any], *, is_per_parameter: bool) -> None:
    """Check that these optimizers can be divided among ranks.

    Args:
        optimizers: The optimizers.
        is_per_parameter: Whether the user says that each of them looks at one parameter
            at once.

    Raises:
        TypeError: One of them is no optimizer, or cannot be divided.
    """
    if not optimizers:
        raise TypeError("sharded_step needs an optimizer.")
    for optimizer in optimizers:
        name = type(optimizer).__name__
        if not isinstance(optimizer, Optimizer):
            raise TypeError(
                f"sharded_step needs a torch.optim.Optimizer, but got {name}."
            )
        if needs_closure(optimizer):
            raise TypeError(
                f"{name}.step() needs a closure that runs the backward itself, so its "
                "step cannot be divided among ranks."
            )
        if hasattr(optimizer, "join_hook"):
            raise TypeError(
                f"{name} divides its work among the ranks itself. What to do: pass the "
                "optimizer inside it, made of the module's parameters."
            )
        if _takes_eps_from_neighbours(optimizer):
            raise TypeError(
                f"{name} has a group of several dtypes and no eps, and takes that of "
                "the first gradient's dtype for all of them. Of several ranks each "
                "would take another one. What to do: pass eps=(1e-7, 1e-3), say, or "
                "make a group of each dtype."
            )
        if not is_per_parameter and not is_known(optimizer):
            raise TypeError(
                f"sharded_step does not know {name}: each rank would step its own "
                "parameters only, which is wrong if the optimizer looks at several "
                "parameters at once (a norm over all gradients, for example). What to "
                "do: if what becomes of a parameter depends on its own gradient and "
                "state alone, say so: sharded_step(optimizer, per_parameter=True)."
            )


def _takes_eps_from_neighbours(optimizer: Optimizer) -> bool:
    adafactor = getattr(torch.optim, "Adafactor", None)
    return type(optimizer) is adafactor and any(
        group["eps"][0] is None and len({param.dtype for param in group["params"]}) > 1
        for group in optimizer.param_groups
    )
