"""Compare and copy the scales by which a ``GradScaler`` multiplies losses.

All ranks must scale by the same number, because scaled gradients are averaged. A rank
that raises between ``scaler.step()`` and ``scaler.update()`` misses that the scale
grows or shrinks. Neither parameters nor optimizers show that.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import Tensor
from torch.amp.grad_scaler import GradScaler
from torch.optim.optimizer import Optimizer

from .objects import Survey, held_by

Scale = tuple[float, int]  # the scale, and how many steps it has been right for


def scales_of(survey: Survey, wrapped: Iterable[Tensor]) -> list[Scale] | None:
    """Return the scales of this process's scalers, sorted.

    A scaler does not know its optimizers between two steps. If some optimizer holds
    none of the ``wrapped`` parameters, it may be that one's, and each rank may have its
    own of it. Then the answer is None, if there is any scaler.
    """
    found = sorted(
        (scaler.get_scale(), scaler._get_growth_tracker()) for scaler in _used(survey)
    )
    if not found:
        return []
    ours = {id(param) for param in wrapped}
    is_sure = all(held & ours for held in map(held_by, survey.of(Optimizer)) if held)
    return found if is_sure else None


def set_scale(survey: Survey, scale: Scale) -> None:
    """Set the scale of this process's only scaler."""
    (scaler,) = _used(survey)
    own = scaler.state_dict()
    scaler.load_state_dict(own | {"scale": scale[0], "_growth_tracker": scale[1]})


def can_copy_scales(of_ranks: Iterable[Sequence[Scale] | None]) -> bool:
    """Return whether each rank has one scaler, so that they must be the same one."""
    return all(each is not None and len(each) == 1 for each in of_ranks)


def scale_anew(optimizers: Iterable[Optimizer], survey: Survey) -> None:
    """Let scalers unscale the next gradients of these optimizers.

    A scaler takes note that it has unscaled gradients, until its ``update()``. If
    ``step()`` raises in between, it would not unscale those of the next backward.
    """
    for scaler in survey.of(GradScaler):
        if not scaler.is_enabled():
            continue
        for optimizer in optimizers:
            scaler._per_optimizer_states.pop(id(optimizer), None)


def _used(survey: Survey) -> list[GradScaler]:
    """Return the scalers that have scaled a loss, or have loaded a state."""
    every = survey.of(GradScaler)
    return [each for each in every if getattr(each, "_scale", None) is not None]
