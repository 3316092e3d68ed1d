"""Private names of torch's DDP that third parties use; skip this room at first.

Trainers, FSDP's tests and dynamo reach into torch's DDP by names that torch calls
private. This room has them, so that the rest of minidp need not know them.

Read the files in this order. `names` puts the names on `minidp.DataParallel`. `reducer`
is ``ddp.reducer``, and `logging_data` is ``_get_ddp_logging_data()``. `dynamo_split` is
for torch.compile, and `manual_finalization` for torch 2.15's ``finalize_backward()``.
`fixed` has attributes whose assignment changes nothing after construction. `versions`
has the versions of torch that are tested. Nothing here imports the wrapper, because the
wrapper imports this room.
"""

from .dynamo_split import refuse_python_reducer, run_splitting
from .logging_data import LoggingData, LogsUnused, logs_unused
from .names import adopt_planted_optimizers, with_torchs_names
from .reducer import ReducerNames
from .versions import note_version

__all__ = ["LoggingData", "LogsUnused", "ReducerNames", "adopt_planted_optimizers"]
__all__ += ["logs_unused", "note_version", "refuse_python_reducer", "run_splitting"]
__all__ += ["with_torchs_names"]
