"""A constructor of ours meets ranks that are in the constructor of torch's DDP."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ._collectives import gather_integers
from .errors import ReplicaMismatchError, explain

if TYPE_CHECKING:
    import torch
    from torch.distributed import ProcessGroup

GREETING = -1  # torch's DDP sends its number of parameters where this is expected


def meets_torchs_class(
    group: ProcessGroup, device: torch.device, *, raises: bool
) -> bool:
    """Collective: whether some ranks are in the constructor of torch's DDP instead.

    That begins with an all-gather of one integer on the parameters' device, too. If
    ours began otherwise, gloo would abort the process where two collectives meet.

    Raises:
        ReplicaMismatchError: naming those ranks, if ``raises``.
    """
    greetings = gather_integers([GREETING], group, device)
    torchs = [rank for rank, (value,) in enumerate(greetings) if value != GREETING]
    if not torchs or not raises:
        return bool(torchs)
    ranks = f"rank{'s' * (len(torchs) > 1)} {', '.join(map(str, torchs))}"
    raise ReplicaMismatchError(
        explain(
            group.rank(),
            f"The model is wrapped by torch's DistributedDataParallel on {ranks}, but "
            "by minidp.DataParallel here.",
            expected="the same class on all ranks",
            remedy="start all ranks in the same way. `minidp run` and swap() do not "
            "reach a process that is started with python -I, -E or -S, or with an "
            "environment of its own (PYTHONPATH): start that one with `python -m "
            "minidp.run SCRIPT`, too",
        )
    )
