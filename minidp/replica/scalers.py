"""Compare and copy the scales by which a ``GradScaler`` multiplies losses.

All ranks must scale by the same number, because scaled gradients are averaged. A rank
that raises between ``scaler.step()`` and ``scaler.update()`` misses that the scale
grows or shrinks. Neither parameters nor optimizers show that.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch.amp.grad_scaler import GradScaler
from torch.optim.optimizer import Optimizer

from .objects import Survey

Scale = tuple[float, int]  # the scale, and how many steps it has been right for


def scales_of(survey: Survey) -> list[Scale]:
    """Return the scales of this process's scalers, sorted."""
    return sorted(
        (scaler.get_scale(), scaler._get_growth_tracker()) for scaler in _used(survey)
    )


def set_scale(survey: Survey, scale: Scale) -> None:
    """Set the scale of this process's only scaler."""
    (scaler,) = _used(survey)
    own = scaler.state_dict()
    scaler.load_state_dict(own | {"scale": scale[0], "_growth_tracker": scale[1]})


def can_copy_scales(of_ranks: Iterable[Sequence[Scale]]) -> bool:
    """Return whether each rank has one scaler, so that they must be the same one."""
    return all(len(each) == 1 for each in of_ranks)


def scale_anew(optimizers: Iterable[Optimizer], survey: Survey) -> None:
    """Let scalers unscale the next gradients of these optimizers.

    A scaler takes note that it has unscaled gradients, until its ``update()``. If
    ``step()`` raises in between, it would not unscale those of the next backward.
    """
    for scaler in survey.of(GradScaler):
        for optimizer in optimizers:
            scaler._per_optimizer_states.pop(id(optimizer), None)


def _used(survey: Survey) -> list[GradScaler]:
    """Return the scalers that have scaled a loss, or have loaded a state."""
    every = survey.of(GradScaler)
    return [each for each in every if getattr(each, "_scale", None) is not None]
